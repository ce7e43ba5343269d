"""Groups that nobody more is let onto, and what becomes of who wanted them.

Rules:

* A drained group takes nobody in. Who holds it keeps it to the end of its lease.
* A round that wants a drained group waits outside of all queues and has none of its groups, so that
  it is in nobody's way elsewhere. It keeps its place by arrival, and takes it again afterwards.
* So does a round over several groups of which one stands still: another job on it is BLOCKED,
  PINNED or in a call that does not come back, or a device of it is lost. The rest goes on.
* Where it is to be parked too, what is on the devices and not held is taken off them.

What is drained is on record: a restart of the daemon lets nobody in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tsliced.core.actions import DrainRecord, Note
from tsliced.core.arbiter import Arbiter
from tsliced.core.books import Books
from tsliced.core.coordinator import Place
from tsliced.core.messages import GiveBack
from tsliced.core.model import (
    Cause,
    DeviceId,
    Drain,
    GroupName,
    JobKey,
    Reason,
    RoundId,
    TenancyKey,
)
from tsliced.core.remedies import (
    out_of_block,
    out_of_hang,
    out_of_loss,
    out_of_pin,
    out_of_silence,
)
from tsliced.core.rounds import ASIDE, GRANTING, HELD, MOVING, QUEUED, Round
from tsliced.core.tenancy import Tenancy
from tsliced.core.timers import TimerKey, TimerKind

#: States of a round that has or wants its groups and is not granted.
_ON_ITS_WAY = frozenset({QUEUED, MOVING, GRANTING})


@dataclass(slots=True, kw_only=True)
class Draining(Books):
    """The books of one host, with the groups in them that are drained."""

    drains: dict[GroupName, Drain] = field(default_factory=dict)
    #: Devices that are there no more, and why.
    lost: dict[DeviceId, Reason] = field(default_factory=dict)
    #: Groups of which a host is not there, and what waiters are told of it.
    silent: dict[GroupName, Reason] = field(default_factory=dict)
    #: Whose driver calls do not come back, and what waiters are told of it.
    hung: dict[TenancyKey, Reason] = field(default_factory=dict)
    #: Rounds that want a group that nobody is let onto.
    aside: dict[RoundId, None] = field(default_factory=dict)
    #: Groups that a round has left without having held them.
    vacated: dict[GroupName, None] = field(default_factory=dict)

    def set_drain(self, group: GroupName, drain: Drain | None) -> bool:
        """Enter what an operator wishes of a group; return whether that changes anything."""
        if self.drains.get(group) == drain:
            return False
        if drain is None:
            del self.drains[group]
            self.timers.clear(TimerKey(TimerKind.PARK, group))
            # What was being taken off only for this may stay.
            self.vacated[group] = None
        else:
            self.drains[group] = drain
            self.todo.append(group)
        self.out.append(DrainRecord(group=group, drain=drain))
        if drain is not None:
            self.out.append(
                Note(
                    kind="drained",
                    level="warning",
                    facts={"groups": group, "by": drain.by, "park": drain.park},
                )
            )
        else:
            self.out.append(Note(kind="undrained", level="info", facts={"groups": group}))
        return True

    # --- rounds that want what cannot be had --------------------------------------------------

    def set_all_aside(self, groups: Iterable[GroupName]) -> None:
        """Let every round wait elsewhere that wants what it cannot have, and is not granted."""
        concerned = set(groups)
        for round_ in list(self.rounds.values()):
            if round_.state in _ON_ITS_WAY and not concerned.isdisjoint(round_.groups):
                self.set_aside(round_)

    def set_aside(self, round_: Round) -> bool:
        """Let a round wait outside of the queues if it cannot have a group; return whether."""
        if (bar := self._bar(round_)) is None:
            return False
        self.leave_all(round_)
        round_.state, round_.reserved = ASIDE, 0
        self.aside[round_.id] = None
        self.take_back(round_)
        self.note_aside(round_, bar[1])
        self.tell_stalled(round_, *bar)
        return True

    def take_back(self, round_: Round) -> None:
        """Tell another host that its round does not have a group any more, if it was told so."""

    def come_back(self) -> list[Round]:
        """Return the rounds that may queue again, the first come first."""
        aside = map(self.rounds.__getitem__, self.aside)
        back = [round_ for round_ in aside if self._bar(round_) is None]
        for round_ in back:
            del self.aside[round_.id]
            round_.state, round_.stalled = QUEUED, None
            self.note_back(round_)
        return sorted(back, key=lambda round_: round_.place)

    def _bar(self, round_: Round) -> tuple[JobKey, Reason, str] | None:
        """Say whose state keeps a round out of the queues, why, and what helps; None: nothing."""
        for group in round_.groups:
            if (drain := self.drains.get(group)) is not None:
                text = f"group {group} is drained by {drain.by}: nobody is let in"
                return round_.job, Reason(cause=Cause.DRAINED, text=text), ""
        if len(round_.groups) == 1:
            # It keeps nothing from others that they could have.
            return None
        if (silence := self.silence_of(round_)) is not None:
            return round_.job, silence, out_of_silence()
        if (loss := self.loss_of(round_)) is not None:
            return round_.job, loss, out_of_loss()
        for group in round_.groups:
            for tenancy in self.tenancies.residents(group):
                job = tenancy.key.job
                if job == round_.job:
                    continue
                if (stop := self.stop_of(tenancy)) is not None:
                    return job, *stop
                if (hang := self.hung.get(tenancy.key)) is not None:
                    return job, hang, out_of_hang(job)
        return None

    def silence_of(self, round_: Round) -> Reason | None:
        """Say which host of a round's groups is not there, if one is not."""
        silent = (self.silent[group] for group in round_.groups if group in self.silent)
        return next(silent, None)

    def loss_of(self, round_: Round) -> Reason | None:
        """Say which device of a round's groups is lost, if one is."""
        group_of = self.tenancies.group_of
        lost = (reason for d, reason in self.lost.items() if group_of.get(d) in round_.groups)
        return next(lost, None)

    def stop_of(self, tenancy: Tenancy) -> tuple[Reason, str] | None:
        """Say why a tenancy is BLOCKED or PINNED, and what helps; None: it is not."""
        coordinator, job = tenancy.coordinator, tenancy.key.job
        if not coordinator.given_up:
            return None
        if coordinator.place is Place.BLOCKED and coordinator.reason is not None:
            return coordinator.reason, out_of_block(job, coordinator.reason)
        assert coordinator.pinned is not None
        has_callbacks = bool(tenancy.participant.hook_sessions)
        return coordinator.pinned, out_of_pin(job, coordinator.pinned, has_callbacks=has_callbacks)

    # --- groups that are left -----------------------------------------------------------------

    def leave_all(self, round_: Round) -> None:
        """Take a round off all of its groups, and out of their queues."""
        for group in round_.groups:
            self.leave_group(round_, group)

    def leave_group(self, round_: Round, group: GroupName) -> None:
        """Take a round off one of its groups, here or elsewhere."""
        arbiter = self.arbiters.get(group)
        if arbiter is not None:
            self.leave(arbiter, round_)
        elif (there := round_.elsewhere.pop(group, None)) is not None:
            if self.borrowed.get(group) == round_.id:
                del self.borrowed[group]
            self.say(there.arbiter, GiveBack(round=round_.id, group=group))

    def leave(self, arbiter: Arbiter, round_: Round) -> None:
        """Take a round off a group, or out of its queue."""
        waiters = len(arbiter.queue)
        arbiter.leave(round_.id)
        if arbiter.chosen is None and (waiters or arbiter.name in self.drains):
            self.todo.append(arbiter.name)
        elif waiters and not arbiter.queue:
            self.tell_contended(arbiter.name)
        if round_.state is not HELD:
            self.vacated[arbiter.name] = None

    def spare(self, group: GroupName, now: float) -> None:
        """Turn back the evictions from a group that nobody needs any more."""
        for tenancy in self.tenancies.residents(group):
            if not self._is_to_go(tenancy):
                self.out += self.tenancies.take_back(tenancy.key, now=now)

    def _is_to_go(self, tenancy: Tenancy) -> bool:
        """Whether somebody else is to have devices that a tenancy is on, or nobody at all."""
        for group in tenancy.reach:
            round_, drain = self.chosen_for(group), self.drains.get(group)
            if round_ is not None and round_.job != tenancy.key.job:
                return True
            if round_ is None and drain is not None and drain.park:
                return True
        return False

    # --- taking off what nobody holds ---------------------------------------------------------

    def park(self, group: GroupName, now: float) -> None:
        """Take off a group what is on it, if it is to be parked and nobody holds it."""
        drain = self.drains.get(group)
        if drain is None or not drain.park:
            return
        if self.timers.get(TimerKey(TimerKind.PARK, group)) is not None:
            return
        for tenancy in self.tenancies.residents(group):
            coordinator = tenancy.coordinator
            movable = coordinator.stable and not coordinator.given_up
            if movable and not self._is_held(tenancy):
                self.out += self.tenancies.evict(tenancy.key, now=now)

    def _is_held(self, tenancy: Tenancy) -> bool:
        chosen = (self.chosen_for(group) for group in tenancy.reach)
        return any(round_ is not None and round_.job == tenancy.key.job for round_ in chosen)

    def pause_parking(self, groups: Iterable[GroupName], now: float) -> bool:
        """Try again later what could not be taken off; return whether it was to be parked."""
        parked = [g for g in groups if (drain := self.drains.get(g)) is not None and drain.park]
        for group in parked:
            self.timers.set(TimerKey(TimerKind.PARK, group), now + self.limits.retry_max_s)
        return bool(parked)

    def check_drains(self) -> None:
        """Assert what must hold between any two events."""
        for round_id in self.aside:
            assert self.rounds[round_id].state is ASIDE
        for group in self.drains:
            chosen = self.chosen_for(group)
            assert not self.arbiters[group].queue, "nobody waits for a drained group in its queue"
            assert chosen is None or chosen.state is HELD, "nobody is let onto it"
