"""Rules of the core, each broken on purpose: ``make sim-mutations``.

A simulation that never fails may be blind. Each mutation takes one rule away from the real core, in
a process of its own, and lives seeds until one fails: the oracle must see it, without the core's
own checks, within `SEEDS` lives.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from simulate import live, with_fixed_hashes

from tsliced.core.coordinator import Coordinator, Place
from tsliced.core.events import GroupsScanned, OperationFinished
from tsliced.core.granting import Granting
from tsliced.core.hosts import Hosts
from tsliced.core.model import Counter, Goal, Token
from tsliced.core.numbers import Numbers
from tsliced.core.participant import Participant
from tsliced.core.rounds import Round
from tsliced.core.signals import Effect, Order, Report

#: Within so many lives a mutation must be seen.
SEEDS = 2000

Mutation = Callable[[pytest.MonkeyPatch], None]


def drop_stale_results(patch: pytest.MonkeyPatch) -> None:
    """What an operation did under an order that no longer stands is not taken in."""
    original = Participant.on_operation

    def on_operation(self: Participant, event: OperationFinished, *, now: float) -> list[Effect]:
        rank = self.ranks[event.rank.process]
        operation, order = rank.operation, self.order
        assert operation is not None
        if order is not None and order.stamp.epoch != operation.epoch and not rank.exited:
            event = replace(event, observed=rank.state, failure=None)
        return original(self, event, now=now)

    patch.setattr(Participant, "on_operation", on_operation)


def thaw_restored_ones_alone(patch: pytest.MonkeyPatch) -> None:
    """A participant whose coordinator is silent thaws also what it has restored."""
    original = Hosts.await_leads

    def await_leads(self: Hosts, now: float) -> None:
        coordinators = [tenancy.coordinator for tenancy in self.tenancies.all.values()]
        restored = [each for each in coordinators if each.goal is Goal.RESTORED]
        for coordinator in restored:
            coordinator.goal = Goal.FROZEN
        original(self, now)
        for coordinator in restored:
            coordinator.goal = Goal.RESTORED

    patch.setattr(Hosts, "await_leads", await_leads)


def go_on_at_the_first_answer_in(place: Place) -> Mutation:
    """Return what completes a barrier when one host has answered."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        original = Coordinator.on_report

        def on_report(self: Coordinator, report: Report, *, now: float) -> list[Effect]:
            if self.place is place and report.stamp == self.stamp and report.failure is None:
                for host in self.missing:
                    self._reports[host] = replace(report, host=host)
                    del self._unanswered[host]
            return original(self, report, now=now)

        patch.setattr(Coordinator, "on_report", on_report)

    return mutate


def roll_forward_with_a_thawed_host(patch: pytest.MonkeyPatch) -> None:
    """A host that thawed alone, and says so, does not turn an eviction back."""
    original = Coordinator.on_report

    def on_report(self: Coordinator, report: Report, *, now: float) -> list[Effect]:
        failure = report.failure
        if self.place in (Place.FREEZING, Place.SNAPSHOTTING) and failure is not None:
            report = replace(report, failure=None)
        return original(self, report, now=now)

    patch.setattr(Coordinator, "on_report", on_report)


def reuse_epochs(patch: pytest.MonkeyPatch) -> None:
    """A daemon that starts anew goes back to the beginning of its block of numbers."""

    def begin(self: Numbers) -> None:
        self._next = max(0, self.ceiling - self.block)
        self.low = True

    patch.setattr(Numbers, "__post_init__", begin)


def restore_before_memory_is_free(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether devices are free, after a snapshot and before a restore."""

    def judge(_self: Participant, _scan: GroupsScanned) -> list[Effect]:
        return []

    patch.setattr(Participant, "_judge", judge)


def grant_before_resume(patch: pytest.MonkeyPatch) -> None:
    """A tenancy is ON when it is thawed, though its hooks were not told to resume."""
    original = Participant._toward_on

    def toward_on(self: Participant, order: Order, now: float) -> list[Effect]:
        self.quiesced = False
        return original(self, order, now)

    patch.setattr(Participant, "_toward_on", toward_on)


def do_not_raise_tokens(patch: pytest.MonkeyPatch) -> None:
    """Each grant of a round has the token of the one before."""
    original = Granting._grant_round

    def grant_round(self: Granting, round_: Round, now: float) -> None:
        taken = self.numbers.take_several

        def take_several(count: int) -> list[Token] | None:
            numbers = taken(count)
            return None if numbers is None else [Counter(1, 1)] * count

        with patch.context() as inner:
            inner.setattr(Numbers, "take_several", lambda _self, count: take_several(count))
            original(self, round_, now)

    patch.setattr(Granting, "_grant_round", grant_round)


def answer_before_operations_end(patch: pytest.MonkeyPatch) -> None:
    """Told to turn back, a participant answers at once, with operations in flight."""
    original = Participant._drive

    def drive(self: Participant, now: float) -> list[Effect]:
        order = self.order
        in_flight = self.busy and order is not None and self.answer is None
        if order is not None and in_flight and order.goal in (Goal.RESTORED, Goal.ON):
            return self._give_answer(order)
        return original(self, now)

    patch.setattr(Participant, "_drive", drive)


MUTATIONS: dict[str, Mutation] = {
    "stale operation result dropped": drop_stale_results,
    "solo thaw of a restored tenancy": thaw_restored_ones_alone,
    "OFF without all FROZEN": go_on_at_the_first_answer_in(Place.FREEZING),
    "roll forward with a thawed host": roll_forward_with_a_thawed_host,
    "epoch reused": reuse_epochs,
    "restore before memory is seen free": restore_before_memory_is_free,
    "thaw before all restored": go_on_at_the_first_answer_in(Place.RESTORING),
    "grant before resume": grant_before_resume,
    "token not raised": do_not_raise_tokens,
    "turned back answered before operations ended": answer_before_operations_end,
}


@dataclass(frozen=True, slots=True)
class Caught:
    """After how many lives a mutation was seen, and by what; `lives` None: it was not."""

    name: str
    lives: int | None
    by: str


def hunt(name: str, seeds: int = SEEDS) -> Caught:
    """Break a rule in this process, for good, and live until the oracle sees it."""
    MUTATIONS[name](pytest.MonkeyPatch())
    for seed in range(seeds):
        failure = live(seed, full_checks=False).failure
        if failure is not None:
            return Caught(name, seed + 1, failure[:120])
    return Caught(name, None, "nothing")


def main() -> int:
    """Hunt all mutations; say after how many lives each was seen."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="lives per mutation")
    arguments.add_argument("--only", choices=MUTATIONS, help="one of them")
    options = arguments.parse_args()
    seeds, missed = options.seeds, 0
    names = [options.only] if options.only else list(MUTATIONS)
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        hunts = [pool.apply_async(hunt, (name, seeds)) for name in names]
        for each in hunts:
            caught = each.get()
            missed += caught.lives is None
            lives = f"after {caught.lives:4} lives" if caught.lives else f"MISSED in {seeds}"
            print(f"{caught.name:46} {lives}: {caught.by}", flush=True)
    return bool(missed)


if __name__ == "__main__":
    with_fixed_hashes()
    sys.exit(main())
