"""Groups that nobody more is let onto, and what becomes of who wanted them.

Rules:

* A drained group takes nobody in. Who holds it keeps it to the end of its lease.
* A round that wants a drained group waits outside of all queues and has none of its groups, so that
  it is in nobody's way elsewhere. It keeps its place by arrival, and takes it again afterwards.
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
from tsliced.core.model import Cause, Drain, GroupName, Reason, RoundId
from tsliced.core.rounds import ASIDE, GRANTING, HELD, MOVING, QUEUED, Round
from tsliced.core.tenancies import Tenancy
from tsliced.core.timers import TimerKey, TimerKind

#: States of a round that has or wants its groups and is not granted.
_ON_ITS_WAY = frozenset({QUEUED, MOVING, GRANTING})


@dataclass(slots=True, kw_only=True)
class Draining(Books):
    """The books of one host, with the groups in them that are drained."""

    drains: dict[GroupName, Drain] = field(default_factory=dict)
    #: Rounds that want a drained group.
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

    # --- rounds that want a drained group -----------------------------------------------------

    def set_all_aside(self, group: GroupName) -> None:
        """Let every round wait elsewhere that wants a group and is not granted."""
        for round_ in list(self.rounds.values()):
            if group in round_.groups and round_.state in _ON_ITS_WAY:
                self.set_aside(round_)

    def set_aside(self, round_: Round) -> bool:
        """Let a round wait outside of the queues if a group of it is drained; return whether."""
        group = next((group for group in round_.groups if group in self.drains), None)
        if group is None:
            return False
        for name in round_.groups:
            self.leave(self.arbiters[name], round_)
        round_.state, round_.reserved = ASIDE, 0
        self.aside[round_.id] = None
        text = f"group {group} is drained by {self.drains[group].by}: nobody is let in"
        self.tell_stalled(round_, round_.job, Reason(cause=Cause.DRAINED, text=text))
        return True

    def come_back(self) -> list[Round]:
        """Return the rounds that may queue again, the first come first."""
        back = [
            round_
            for round_ in map(self.rounds.__getitem__, self.aside)
            if self.drains.keys().isdisjoint(round_.groups)
        ]
        for round_ in back:
            del self.aside[round_.id]
            round_.state, round_.stalled = QUEUED, None
        return sorted(back, key=lambda round_: round_.place)

    # --- groups that are left -----------------------------------------------------------------

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
            stays = coordinator.place is Place.BLOCKED or coordinator.pinned is not None
            if coordinator.stable and not stays and not self._is_held(tenancy):
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
