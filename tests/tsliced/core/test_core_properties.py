"""Random lives of a world, judged by an oracle that knows nothing of the core.

`TSLICED_SEEDS` sets how many lives of each kind are lived; a failure names its seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from chaos import Chaos

from tsliced.core import recovery
from tsliced.core.actions import Action, Grant, LeaseRecord
from tsliced.core.arbiter import Arbiter
from tsliced.core.books import Books
from tsliced.core.events import OperationFinished, RecordsFailed, ReleaseRequested
from tsliced.core.granting import Granting
from tsliced.core.leasing import Leasing
from tsliced.core.machine import Machine
from tsliced.core.model import Counter, Goal, RankState, RoundId, Verb
from tsliced.core.numbers import Numbers
from tsliced.core.participant import Participant
from tsliced.core.rank import Operation, Rank
from tsliced.core.signals import Effect, Order
from tsliced.core.tenancies import Tenancies

SEEDS = int(os.environ.get("TSLICED_SEEDS", "300"))

#: A rule that is broken on purpose must be missed within so many lives.
SEEDS_TO_MISS_IT = 150


@pytest.mark.parametrize("faults", [False, True], ids=["orderly", "faulty"])
def test_g1_g2_g4_g5_no_life_breaks_a_guarantee_and_all_who_wait_get_an_answer(
    faults: bool,
) -> None:
    for seed in range(SEEDS):
        live(seed, faults=faults)


def test_g8_g11_nor_does_a_long_one() -> None:
    for seed in range(SEEDS // 10):
        live(seed, faults=True, steps=600)


def test_g1_g9_nor_does_one_with_clocks_unasked_turns_and_strangers() -> None:
    for seed in range(SEEDS // 2):
        live(seed, faults=True, timed=True, steps=160)


def live(seed: int, *, faults: bool, timed: bool = False, steps: int = 120) -> None:
    try:
        Chaos(seed=seed, faults=faults, timed=timed, steps=steps).live()
    except Exception as exc:
        what = f"seed {seed}, faults={faults}, timed={timed}, steps={steps}"
        raise AssertionError(f"{what}: {exc!r}") from exc


# --- rules broken on purpose, to prove that the oracle sees it ------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def grant_beside_others(patch: pytest.MonkeyPatch) -> None:
    """Whoever has a group is granted it, whatever is on the devices."""
    patch.setattr(Granting, "_clear_devices", lambda _self, _round, _now: True)
    patch.setattr(Tenancies, "settled", lambda _self, _job, _groups: True)
    patch.setattr(Tenancies, "assert_alone", lambda _self, _group, _job: None)


def restore_beside_others(patch: pytest.MonkeyPatch) -> None:
    """Nobody who is already there is sent away before a restore, nor does it mind."""
    patch.setattr(Tenancies, "residents", lambda _self, _group: [])
    patch.setattr(Participant, "_refuse_company", lambda _self, _found: None)
    patch.setattr(Tenancies, "assert_alone", lambda _self, _group, _job: None)


def hold_for_several(patch: pytest.MonkeyPatch) -> None:
    """A group is given to everyone who asks."""

    def choose(self: Arbiter, *, now: float) -> RoundId | None:
        if not self.queue:
            return None
        self.chosen = next(iter(self.queue))
        del self.queue[self.chosen]
        return self.chosen

    patch.setattr(Arbiter, "choose", choose)


def give_numbers_twice(patch: pytest.MonkeyPatch) -> None:
    """Tokens do not rise."""

    def take_several(self: Numbers, count: int) -> list[Counter] | None:
        return [Counter(1, 7)] * count if self.left() >= count else None

    patch.setattr(Numbers, "take_several", take_several)


def reuse_numbers_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restart goes back to the beginning of a block."""

    def begin(self: Numbers) -> None:
        self._next = max(0, self.ceiling - self.block)

    patch.setattr(Numbers, "__post_init__", begin)


def serve_the_last_first(patch: pytest.MonkeyPatch) -> None:
    """The queue is a stack."""

    def choose(self: Arbiter, *, now: float) -> RoundId | None:
        if self.chosen is not None or not self.queue:
            return None
        self.chosen, _ = self.queue.popitem()
        return self.chosen

    patch.setattr(Arbiter, "choose", choose)


def choose_nobody_after_a_release(patch: pytest.MonkeyPatch) -> None:
    """What becomes free stays free."""
    patch.setattr(Granting, "leave", lambda _self, arbiter, round_: arbiter.leave(round_.id))


def let_jobs_onto_drained_groups(patch: pytest.MonkeyPatch) -> None:
    """A drain is noted, and nobody minds it."""
    patch.setattr(Granting, "set_aside", lambda _self, _round: False)
    patch.setattr(Granting, "check_drains", lambda _self: None)


def ignore_releases(patch: pytest.MonkeyPatch) -> None:
    """A release is confirmed and forgotten."""
    kept = Leasing.end_lease

    def on_release(self: Leasing, event: ReleaseRequested, now: float) -> None:
        patch.setattr(Leasing, "end_lease", lambda *_args, **_more: None)
        original(self, event, now)
        patch.setattr(Leasing, "end_lease", kept)

    original = Leasing.on_release
    patch.setattr(Leasing, "on_release", on_release)


def thaw_before_all_are_restored(patch: pytest.MonkeyPatch) -> None:
    """RESTORED is answered when one is restored."""
    restored, on = Participant._toward_restored, Participant._toward_on

    def toward_restored(self: Participant, order: Order, now: float) -> list[Effect]:
        some = any(rank.state is RankState.FROZEN for rank in self.ranks.values())
        return [] if some else restored(self, order, now)

    def toward_on(self: Participant, order: Order, now: float) -> list[Effect]:
        aside = {p: r for p, r in self.ranks.items() if r.state is RankState.PARKED}
        self.ranks = {p: r for p, r in self.ranks.items() if p not in aside}
        effects = on(self, order, now)
        self.ranks |= aside
        return effects

    patch.setattr(Participant, "_toward_restored", toward_restored)
    patch.setattr(Participant, "_toward_on", toward_on)


def leave_frozen_what_is_turned_back(patch: pytest.MonkeyPatch) -> None:
    """ON is answered without a thaw."""
    on = Participant._toward_on

    def toward_on(self: Participant, order: Order, now: float) -> list[Effect]:
        return [] if self._in_state(RankState.FROZEN) else on(self, order, now)

    patch.setattr(Participant, "_toward_on", toward_on)


def ignore_late_results(patch: pytest.MonkeyPatch) -> None:
    """What an operation did under an older order is not believed."""
    finish = Rank.finish

    def forget(self: Rank, event: OperationFinished) -> Operation:
        before, operation = self.state, finish(self, event)
        if operation.verb is Verb.FREEZE and operation.epoch.number % 2:
            self.state = before
        return operation

    patch.setattr(Rank, "finish", forget)


def call_off_what_was_not_moved(patch: pytest.MonkeyPatch) -> None:
    """OFF is answered without a snapshot."""
    drive = Participant._drive

    def skip(self: Participant, now: float) -> list[Effect]:
        order = self.order
        if order is not None and order.goal is Goal.OFF and not self.busy and not self.answer:
            return self._give_answer(order)
        return drive(self, now)

    patch.setattr(Participant, "_drive", skip)


def send_grants_that_were_not_written(patch: pytest.MonkeyPatch) -> None:
    """A grant goes out although the journal did not take it."""
    original = Machine._on_records_failed

    def on_records_failed(self: Machine, event: RecordsFailed, now: float) -> None:
        def is_grant(action: Action) -> bool:
            return isinstance(action, Grant)

        rest = tuple(action for action in event.actions if not is_grant(action))
        self.leasing.out += [action for action in event.actions if is_grant(action)]
        original(
            self,
            RecordsFailed(records=event.records, actions=rest, failure=event.failure),
            now,
        )

    patch.setattr(Machine, "_on_records_failed", on_records_failed)


def forget_what_waits_for_numbers(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks again when tokens can be had."""
    patch.setattr(Leasing, "advance_all", lambda _self: None)
    patch.setattr(Tenancies, "on_numbers", lambda _self, *, now: [])


def never_tidy(patch: pytest.MonkeyPatch) -> None:
    """What nobody needs any more is kept for ever."""
    patch.setattr(Books, "tidy", lambda _self, _job: None)


def keep_clocks(patch: pytest.MonkeyPatch) -> None:
    """Clocks of what is over run on."""
    patch.setattr(Books, "stop_clock", lambda _self, _lease: None)
    patch.setattr(Books, "confirm", lambda _self, _lease: None)


def forget_holders_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    """What was held is free after a restart."""
    original = recovery._lease

    def lease(machine: Machine, record: LeaseRecord, now: float) -> None:
        if not record.tokens:
            original(machine, record, now)

    patch.setattr(recovery, "_lease", lease)


def let_the_dead_hold(patch: pytest.MonkeyPatch) -> None:
    """Nobody's leases end with its process."""
    patch.setattr(Machine, "_on_exit", lambda _self, _event, _now: None)


BREAKS: list[Break] = [
    forget_holders_at_a_restart,
    let_the_dead_hold,
    grant_beside_others,
    restore_beside_others,
    hold_for_several,
    give_numbers_twice,
    reuse_numbers_after_a_restart,
    serve_the_last_first,
    choose_nobody_after_a_release,
    let_jobs_onto_drained_groups,
    ignore_releases,
    thaw_before_all_are_restored,
    leave_frozen_what_is_turned_back,
    ignore_late_results,
    call_off_what_was_not_moved,
    send_grants_that_were_not_written,
    forget_what_waits_for_numbers,
    never_tidy,
    keep_clocks,
]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_the_oracle_misses_a_rule_that_is_broken_on_purpose(
    broken: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    lives = ((seed, faults) for seed in range(SEEDS_TO_MISS_IT) for faults in (False, True))
    assert any(goes_wrong(seed, faults=faults) for seed, faults in lives), broken.__doc__


def goes_wrong(seed: int, *, faults: bool) -> bool:
    try:
        # The core's own checks are off: the oracle alone must see it.
        Chaos(seed=seed, faults=faults, full_checks=False).live()
    except Exception:
        return True
    return False
