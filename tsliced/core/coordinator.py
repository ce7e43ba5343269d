"""Moves one tenancy off its devices or on, over all its hosts.

It orders goals, each a barrier over all hosts, and decides by the reports:

    evict    FROZEN, then OFF
    admit    RESTORED, then ON
    turn back (an evict that failed, or was taken back)    RESTORED, then ON
    withdraw (an admit that failed)                        OFF

Every attempt and every change of direction takes a new epoch, which is written down with its goal
before anybody is told. A coordinator that starts anew asks every host first and decides nothing
before all have answered; then it is the same loop.

Safety rule: OFF is ordered only when all are FROZEN, ON only when all are RESTORED.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tsliced.core.actions import Note, TenancyRecord
from tsliced.core.model import (
    Cause,
    CoreLimits,
    Counter,
    Goal,
    HostName,
    RankState,
    Reason,
    Stamp,
    TenancyKey,
)
from tsliced.core.numbers import Numbers
from tsliced.core.signals import (
    AdmissionFailed,
    Admitted,
    Blocked,
    Effect,
    Evicted,
    EvictionFailed,
    Order,
    Report,
)

#: Lower than any order's.
NO_STAMP = Stamp(Counter(0, 0), 0)

#: Tries to bring a tenancy back to a stable place before it counts as BLOCKED.
MAX_RECOVERIES = 5


class Place(Enum):
    """Where the tenancy is, or which goal is ordered and why."""

    OFF = "off"
    ON = "on"
    BLOCKED = "blocked"
    FREEZING = "freezing"
    SNAPSHOTTING = "snapshotting"
    TURNING_BACK = "turning back"
    REVIVING = "reviving"
    RESTORING = "restoring"
    THAWING = "thawing"
    WITHDRAWING = "withdrawing"
    ASKING = "asking"


GOALS = {
    Place.FREEZING: Goal.FROZEN,
    Place.SNAPSHOTTING: Goal.OFF,
    Place.TURNING_BACK: Goal.RESTORED,
    Place.REVIVING: Goal.ON,
    Place.RESTORING: Goal.RESTORED,
    Place.THAWING: Goal.ON,
    Place.WITHDRAWING: Goal.OFF,
    Place.ASKING: Goal.QUERY,
}

#: The next step of the same epoch, once all hosts are AT the goal.
NEXT = {
    Place.FREEZING: Place.SNAPSHOTTING,
    Place.TURNING_BACK: Place.REVIVING,
    Place.RESTORING: Place.THAWING,
}

#: The direction, under a new epoch, when one host CANNOT.
FALLBACK = {
    Place.FREEZING: Place.TURNING_BACK,
    Place.SNAPSHOTTING: Place.TURNING_BACK,
    Place.RESTORING: Place.WITHDRAWING,
    # Somebody may run already, so the way is onward: again until all do.
    Place.THAWING: Place.THAWING,
    Place.TURNING_BACK: Place.TURNING_BACK,
    Place.REVIVING: Place.TURNING_BACK,
    Place.WITHDRAWING: Place.WITHDRAWING,
    Place.ASKING: Place.ASKING,
}


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The mover of one tenancy. Mutate it only through its public methods."""

    tenancy: TenancyKey
    hosts: tuple[HostName, ...]
    numbers: Numbers
    limits: CoreLimits
    place: Place = Place.OFF
    stamp: Stamp = NO_STAMP
    #: Why the move under way goes back, or why the tenancy is BLOCKED.
    reason: Reason | None = None
    #: Evicting was given up on; it stays until a rank is gone or an operator clears it.
    pinned: Reason | None = None
    #: Instant at which the barrier, or the pause before another try, is over.
    deadline: float | None = None
    #: When the move under way began.
    began_at: float = 0.0
    #: Evictions and admissions that were carried through.
    moves: int = 0
    #: Epochs are exhausted, or a pause is to pass: the place to go to then.
    wanted: Place | None = None
    _reports: dict[HostName, Report] = field(default_factory=dict)
    _recoveries: int = 0
    _was_parked: bool = False

    # --- what is asked of it ------------------------------------------------------------------

    @property
    def stable(self) -> bool:
        """Whether no move is under way."""
        return self.place not in GOALS

    def evict(self, *, now: float, ranks: int) -> list[Effect]:
        """Begin to take the tenancy off. `ranks`: how many are known, for the time-out."""
        assert self.stable
        self.reason, self.began_at, self._recoveries = None, now, 0
        limits = self.limits
        freezes_s = max(1, ranks) * limits.freeze_timeout_s
        self.deadline = now + limits.quiesce_timeout_s + freezes_s + limits.barrier_margin_s
        return self._turn(Place.FREEZING)

    def admit(self, *, now: float, parked: bool) -> list[Effect]:
        """Begin to bring the tenancy on. `parked`: some of its state is in host memory."""
        assert self.stable
        self.reason, self.began_at, self._recoveries = None, now, 0
        self.deadline, self._was_parked = None, parked
        return self._turn(Place.RESTORING)

    def take_back(self) -> list[Effect]:
        """Turn an eviction back that nobody needs any more, while that is free."""
        if self.place is not Place.FREEZING:
            return []
        self.reason = Reason(cause=Cause.CANCELLED, text="nobody waits any more")
        return self._go(Place.TURNING_BACK)

    def ask(self, *, now: float) -> list[Effect]:
        """Find out where the ranks are, after a restart."""
        self.began_at, self.deadline, self._recoveries = now, None, 0
        return self._turn(Place.ASKING)

    # --- events -------------------------------------------------------------------------------

    def on_report(self, report: Report, *, now: float) -> list[Effect]:
        """Take one host's answer; decide when the barrier is complete or broken."""
        if report.stamp != self.stamp or self.stable or self.wanted is not None:
            return []
        self._reports[report.host] = report
        if report.failure is not None:
            return self._on_failure(report.failure, now)
        if len(self._reports) < len(self.hosts):
            return []
        if self.place is Place.ASKING:
            return self._decide()
        if (after := NEXT.get(self.place)) is not None:
            return self._step(after)
        return self._arrive(now)

    def on_deadline(self, *, now: float) -> list[Effect]:
        """End a pause, or a barrier that took too long."""
        self.deadline = None
        if self.wanted is not None:
            return self._turn(self.wanted)
        if self.place is not Place.FREEZING:
            return []
        missing = [host for host in self.hosts if host not in self._reports]
        text = f"not all ranks could be frozen in time; missing: {', '.join(missing)}"
        return self._on_failure(Reason(cause=Cause.FREEZE_TIMEOUT, text=text), now)

    def on_numbers(self) -> list[Effect]:
        """Go on when epochs can be had again."""
        if self.wanted is None or self.deadline is not None:
            return []
        return self._turn(self.wanted)

    def on_ranks_lost(self, *, left: int, failed: int) -> list[Effect]:
        """A rank's process is gone, which may be the way out of a fault."""
        self.pinned = None
        if self.place is not Place.BLOCKED or failed:
            return []
        self._recoveries, self.reason = 0, None
        return self._go(Place.TURNING_BACK if left else Place.WITHDRAWING)

    def clear(self) -> list[Effect]:
        """Try again what was given up on, because an operator says so."""
        self.pinned = None
        if self.place is not Place.BLOCKED:
            return []
        self._recoveries, self.reason = 0, None
        return self._go(Place.TURNING_BACK)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self.wanted is None or not self.stable, "a stable tenancy wants nothing"
        assert (self.place is not Place.BLOCKED) or self.reason is not None

    # --- decisions ----------------------------------------------------------------------------

    def _on_failure(self, reason: Reason, now: float) -> list[Effect]:
        back = FALLBACK[self.place]
        if self.reason is None:
            self.reason = reason
        if self.place in (Place.FREEZING, Place.SNAPSHOTTING, Place.RESTORING):
            return self._go(back)
        # A direction that cannot be changed any more is tried again, but not for ever.
        self._recoveries += 1
        if reason.cause is Cause.FAILED or self._recoveries >= MAX_RECOVERIES:
            self.place, self.reason, self.deadline = Place.BLOCKED, reason, None
            return [Blocked(tenancy=self.tenancy, reason=reason)]
        self.wanted = back
        self.deadline = now + min(
            self.limits.retry_max_s, self.limits.retry_min_s * 2**self._recoveries
        )
        return []

    def _decide(self) -> list[Effect]:
        self.reason = None
        states = [state for report in self._reports.values() for _, state in report.states]
        if all(state is RankState.PARKED for state in states):
            return self._go(Place.WITHDRAWING)
        return self._go(Place.TURNING_BACK)

    def _arrive(self, now: float) -> list[Effect]:
        place, reason = self.place, self.reason
        self.deadline = None
        match place:
            case Place.SNAPSHOTTING:
                self.place = Place.OFF
                self.moves += 1
                return [self._note("evicted", now), Evicted(tenancy=self.tenancy)]
            case Place.THAWING:
                self.place, self.reason = Place.ON, None
                self.moves += 1
                done = Admitted(tenancy=self.tenancy, restored=self._was_parked)
                return [self._note("admitted", now), done]
            case Place.REVIVING:
                self.place, self.reason = Place.ON, None
                if reason is None:
                    return [Admitted(tenancy=self.tenancy, restored=False)]
                failed = EvictionFailed(tenancy=self.tenancy, reason=reason)
                return [self._note("eviction_failed", now, reason), failed]
            case Place.WITHDRAWING:
                self.place, self.reason = Place.OFF, None
                if reason is None:
                    return [Evicted(tenancy=self.tenancy)]
                withdrawn = AdmissionFailed(tenancy=self.tenancy, reason=reason)
                return [self._note("admission_failed", now, reason), withdrawn]
            case _:
                raise AssertionError(f"{place} is not the last step of a move")

    # --- orders -------------------------------------------------------------------------------

    def _go(self, place: Place) -> list[Effect]:
        """Change direction at once."""
        self.deadline = None
        return self._turn(place)

    def _turn(self, place: Place) -> list[Effect]:
        """Take a new epoch and order the first step of it, or wait for epochs."""
        epoch = self.numbers.take()
        self.place = place
        if epoch is None:
            self.wanted = place
            return []
        self.wanted = None
        self.stamp = Stamp(epoch, 0)
        return self._order()

    def _step(self, place: Place) -> list[Effect]:
        self.place = place
        self.stamp = Stamp(self.stamp.epoch, self.stamp.step + 1)
        self.deadline = None
        return self._order()

    def _order(self) -> list[Effect]:
        self._reports.clear()
        goal = GOALS[self.place]
        orders = [
            Order(host=host, tenancy=self.tenancy, stamp=self.stamp, goal=goal)
            for host in self.hosts
        ]
        return [self.record(), *orders]

    def record(self) -> TenancyRecord:
        """Return what must be kept of this tenancy."""
        stable_goal = Goal.OFF if self.place is Place.OFF else Goal.ON
        return TenancyRecord(
            tenancy=self.tenancy,
            stamp=self.stamp,
            goal=GOALS.get(self.place, stable_goal),
            pinned=self.pinned,
        )

    def _note(self, kind: str, now: float, reason: Reason | None = None) -> Note:
        return Note(
            kind=kind,
            level="info" if reason is None or reason.cause is Cause.CANCELLED else "warning",
            facts={
                "job": str(self.tenancy.job),
                "groups": ",".join(self.tenancy.groups),
                "epoch": self.stamp.epoch.as_int(),
                "seconds": now - self.began_at,
                "reason": str(reason) if reason else None,
            },
        )
