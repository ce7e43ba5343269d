"""Moves one tenancy off its devices or on, over all its hosts.

It orders goals, each a barrier over all hosts, and decides by the reports:

    evict    FROZEN, then OFF
    admit    RESTORED, then ON
    turn back (an evict that failed, or was taken back)    RESTORED, then ON
    withdraw (an admit that failed)                        OFF
    qualify (an evict and an admit in one)                 FROZEN, OFF, RESTORED, then ON

Every attempt and every change of direction takes a new epoch, which is written down with its goal
before anybody is told. A coordinator that starts anew asks every host first and decides nothing
before all have answered; then it is the same loop.

Safety rule: OFF is ordered only when all are FROZEN, ON only when all are RESTORED.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import Note, TenancyRecord
from tsliced.core.links import Links
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
from tsliced.core.value import Word, maker

#: Lower than any order's.
NO_STAMP = Stamp(0, Counter(0, 0), 0)

#: Tries to bring a tenancy back to a stable place before it counts as BLOCKED.
MAX_RECOVERIES = 5

#: Pauses between tries double no more often than this.
MAX_DOUBLINGS = 16

_make_note, _make_order, _make_record = maker(Note), maker(Order), maker(TenancyRecord)


class Place(Word):
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


#: As events name the time that a goal took.
_STEPS = {
    Goal.FROZEN: "freeze_s",
    Goal.OFF: "snapshot_s",
    Goal.RESTORED: "restore_s",
    Goal.ON: "thaw_s",
    Goal.QUERY: "query_s",
}

#: As with `RoundState`: every acquire and every report asks for them.
_BLOCKED = Place.BLOCKED
_STABLE = (Place.ON, Place.OFF, Place.BLOCKED)

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
    #: All that take part; empty where another host's coordinator leads.
    hosts: tuple[HostName, ...]
    numbers: Numbers
    limits: CoreLimits
    links: Links = field(default_factory=Links)
    #: Who leads, if that is not this host.
    lead: HostName | None = None
    place: Place = Place.OFF
    stamp: Stamp = NO_STAMP
    #: The latest order but for questions, which move nothing.
    goal: Goal = field(init=False)
    #: Why the move under way goes back, or why the tenancy is BLOCKED.
    reason: Reason | None = None
    #: It has been seen to leave its devices and to come back.
    qualified: bool = False
    #: The move under way, or the latest one, is to see that, ...
    qualifies: bool = False
    #: ... whatever is known of its kind.
    insists: bool = False
    #: Evicting was given up on; it stays until a rank is gone or an operator clears it.
    pinned: Reason | None = None
    #: When it was PINNED or BLOCKED.
    stopped_at: float = 0.0
    #: Instant at which the barrier, or the pause before another try, is over.
    deadline: float | None = None
    #: When the move under way began, ...
    began_at: float = 0.0
    #: ... and when the goal was ordered that is waited for.
    ordered_at: float = 0.0
    #: What hosts have taken so far for each goal of the move under way, in seconds.
    taken: dict[Goal, float] = field(default_factory=dict)
    #: Evictions and admissions that were carried through.
    moves: int = 0
    #: Epochs are exhausted, or a pause is to pass: the place to go to then.
    wanted: Place | None = None
    #: How long all hosts together may take to freeze.
    _barrier_s: float = 0.0
    _reports: dict[HostName, Report] = field(default_factory=dict)
    #: Hosts that have not answered the standing order.
    _unanswered: dict[HostName, None] = field(default_factory=dict)
    _recoveries: int = 0
    #: OFF has been ordered in the move under way: some of it may be parked.
    _off_ordered: bool = False
    _was_parked: bool = False
    #: It was on when it was asked after: ranks may have come up that nobody has seen.
    _was_on: bool = False
    _least_term: int = 0
    #: How notes name the tenancy.
    _names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = self.tenancy.names()
        self.goal = Goal.OFF if self.place is Place.OFF else Goal.ON

    # --- what is asked of it ------------------------------------------------------------------

    @property
    def stable(self) -> bool:
        """Whether no move is under way."""
        return self.place in _STABLE

    @property
    def given_up(self) -> bool:
        """Whether it is BLOCKED or PINNED: nothing moves it until somebody does something."""
        return self.pinned is not None or self.place is _BLOCKED

    @property
    def missing(self) -> list[HostName]:
        """The hosts whose answer to the standing order is waited for; none while nothing is."""
        if self.stable or self.wanted is not None:
            return []
        return [host for host in self._unanswered if self._counts(host)]

    def left_out(self, host: HostName) -> bool:
        """Whether the latest move ended without a host's answer, which may still owe a thaw."""
        return self.stable and host in self._unanswered

    @property
    def waits(self) -> bool:
        """Whether any host's answer to the standing order is waited for."""
        return not self.stable and self.wanted is None and self._lacks_answers()

    def takes_part(self, host: HostName) -> bool:
        """Whether the standing order was for a host too."""
        return host in self._unanswered or host in self._reports

    def _counts(self, host: HostName) -> bool:
        """Whether a host's answer is waited for.

        Not of one that nothing is left on. Nor, on the way back from a freeze, of one that is lost:
        nothing was snapshotted there, and it thaws alone what it has frozen.
        """
        if host in self.links.dead:
            return False
        if host not in self.links.lost:
            return True
        return self._off_ordered or self.place not in (Place.TURNING_BACK, Place.REVIVING)

    def _lacks_answers(self) -> bool:
        """Whether an answer to the standing order that counts is not there; each answer asks."""
        if self.links.lost or self.links.dead:
            return any(map(self._counts, self._unanswered))
        return bool(self._unanswered)

    @property
    def stop(self) -> Reason | None:
        """Why it is BLOCKED or PINNED, if it is."""
        return self.reason if self.place is _BLOCKED else self.pinned

    def introduction(self) -> list[Order]:
        """Return what tells all participants who moves the tenancy; it moves nothing."""
        return [
            Order(host=host, tenancy=self.tenancy, stamp=self.stamp, goal=Goal.QUERY)
            for host in self.hosts
        ]

    def evict(
        self, *, now: float, ranks: int, qualifies: bool = False, insists: bool = False
    ) -> list[Effect]:
        """Begin to take the tenancy off. `ranks`: how many are known, for the time-out.

        If it `qualifies`, it is brought back when it has left, unless its kind is known to come
        back and nobody `insists`.
        """
        limits = self.limits
        freezes_s = max(1, ranks) * limits.freeze_timeout_s
        derived_s = limits.quiesce_timeout_s + freezes_s + limits.barrier_margin_s
        self._barrier_s = limits.barrier_timeout_s or derived_s
        effects = self._begin(Place.FREEZING, now)
        self.qualifies, self.insists = qualifies, insists
        return effects

    def admit(self, *, now: float, parked: bool) -> list[Effect]:
        """Begin to bring the tenancy on. `parked`: some of its state is in host memory."""
        self._was_parked = parked
        return self._begin(Place.RESTORING, now)

    def on_parked_found(self) -> None:
        """A rank turned out to be parked that nobody knew of when it began to be let on."""
        self._was_parked = True

    def take_back(self, *, now: float) -> list[Effect]:
        """Turn an eviction back that nobody needs any more, while that is free."""
        if self.place is not Place.FREEZING:
            return []
        self.reason = Reason(cause=Cause.CANCELLED, text="nobody waits any more")
        return self._turn(Place.TURNING_BACK, now)

    def ask(self, *, now: float) -> list[Effect]:
        """Find out where the ranks are, after a restart."""
        return self._begin(Place.ASKING, now)

    def _begin(self, place: Place, now: float) -> list[Effect]:
        assert self.stable, "a move ends before the next one begins"
        self.reason, self.began_at, self._recoveries = None, now, 0
        self.taken.clear()
        self._off_ordered, self._was_on = place is Place.ASKING, self.place is Place.ON
        self.qualifies = False
        return self._turn(place, now)

    # --- events -------------------------------------------------------------------------------

    def on_report(self, report: Report, *, now: float) -> list[Effect]:
        """Take one host's answer; decide when the barrier is complete or broken."""
        if report.stamp != self.stamp or self.stable or self.wanted is not None:
            return []
        self._reports[report.host] = report
        self._unanswered.pop(report.host, None)
        if (failure := report.failure) is not None:
            if len(self.hosts) > 1:
                failure = failure.at(report.host)
            return self._on_failure(failure, now)
        return [] if self._lacks_answers() else self._complete(now)

    def on_host_gone(self, *, now: float) -> list[Effect]:
        """Go on without a host that is dead, or lost where that is enough; undecided, go back."""
        if self.stable or self.wanted is not None:
            return []
        missing = self.missing
        if not missing:
            return self._complete(now)
        lost = [host for host in missing if host in self.links.lost]
        if lost and self.place in (Place.FREEZING, Place.RESTORING):
            text = f"host {lost[0]} is silent"
            return self._on_failure(Reason(cause=Cause.SILENT, text=text), now)
        return []

    def order_for(self, host: HostName) -> list[Order]:
        """Return what to tell a host again: the order that it has not answered, or who moves."""
        if self.stable:
            return [order for order in self.introduction() if order.host == host]
        if host not in self.missing:
            return []
        goal = GOALS[self.place]
        return [Order(host=host, tenancy=self.tenancy, stamp=self.stamp, goal=goal)]

    def exceed(self, term: int) -> None:
        """Order in no lower term than this from the next order on: a participant has obeyed it."""
        self._least_term = max(self._least_term, term)
        if self.stable:
            self.stamp = self.stamp._replace(term=max(self._least_term, self.stamp.term))

    def follow(self, order: Order) -> TenancyRecord:
        """Know what another host's coordinator has ordered."""
        self.stamp = order.stamp
        if order.goal is not Goal.QUERY:
            self.goal = order.goal
        return self.record()

    def _complete(self, now: float) -> list[Effect]:
        self._count_time(now)
        if self.place is Place.ASKING:
            return self._decide(now)
        if self.place is Place.SNAPSHOTTING and self.qualifies:
            # By now all ranks have been seen, on each host. Those that another host still moves
            # would not be thawed together with these.
            reports = self._reports.values()
            untried = self.insists or any(report.untried for report in reports)
            self.qualifies = untried and not any(report.disowned for report in reports)
        if self.place is Place.SNAPSHOTTING and self.qualifies:
            self._was_parked = True
            return self._turn(Place.RESTORING, now)
        if (after := NEXT.get(self.place)) is not None:
            return self._step(after, now)
        return self._arrive(now)

    def on_deadline(self, *, now: float) -> list[Effect]:
        """End a pause, or a barrier that took too long."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.wanted is not None:
            return self._turn(self.wanted, now)
        text = f"not all ranks could be frozen in time; missing: {', '.join(self.missing)}"
        return self._on_failure(Reason(cause=Cause.FREEZE_TIMEOUT, text=text), now)

    def on_numbers(self, *, now: float) -> list[Effect]:
        """Go on when epochs can be had again."""
        if self.wanted is None or self.deadline is not None:
            return []
        return self._turn(self.wanted, now)

    def on_ranks_lost(self, *, left: int, failed: int, now: float) -> list[Effect]:
        """A rank's process is gone, which may be the way out of a fault."""
        out = self._unpin()
        if self.place is Place.BLOCKED:
            return out if failed else out + self._start_over(now)
        if not left and self.place in (Place.TURNING_BACK, Place.REVIVING):
            # Nobody is left to bring back.
            return out + self._start_over(now)
        if self.wanted is not None:
            # What could not be done may have been the dead one's part.
            return out + self._turn(self.wanted, now)
        return out

    def clear(self, *, now: float) -> list[Effect]:
        """Try again what was given up on, because an operator says so or its cause is gone."""
        out = self._unpin()
        return out + self._start_over(now) if self.place is Place.BLOCKED else out

    def hurry(self, *, now: float) -> list[Effect]:
        """End a pause before another try."""
        if self.wanted is None or self.deadline is None:
            return []
        return self._turn(self.wanted, now)

    def pin(self, reason: Reason, *, now: float) -> list[Effect]:
        """Give evicting up."""
        self.pinned, self.stopped_at = reason, now
        return [self.record()]

    def _unpin(self) -> list[Effect]:
        if self.pinned is None:
            return []
        self.pinned = None
        return [self.record()]

    def _start_over(self, now: float) -> list[Effect]:
        # By what is found: nobody who is all parked is brought back where others may be.
        self._recoveries, self.reason, self._was_on = 0, None, False
        return self._turn(Place.ASKING, now)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self.wanted is None or not self.stable, "a stable tenancy wants nothing"
        assert (self.place is not Place.BLOCKED) or self.reason is not None

    # --- decisions ----------------------------------------------------------------------------

    def _count_time(self, now: float) -> None:
        goal = GOALS[self.place]
        self.taken[goal] = self.taken.get(goal, 0.0) + now - self.ordered_at

    def _on_failure(self, reason: Reason, now: float) -> list[Effect]:
        self._count_time(now)
        back = FALLBACK[self.place]
        if self.reason is None:
            self.reason = reason
        if self.place is Place.RESTORING and self._untouched():
            # It runs where it ran before; only the others have to leave, if they could be seen.
            self.place, self.reason = Place.OFF if reason.is_ours else Place.ON, None
            return [AdmissionFailed(tenancy=self.tenancy, reason=reason)]
        if self.place in (Place.FREEZING, Place.SNAPSHOTTING, Place.RESTORING):
            return self._turn(back, now)
        if self.place is Place.TURNING_BACK and reason.cause is Cause.OCCUPIED:
            # Its place is taken: what is left of it on the devices leaves too.
            back = Place.WITHDRAWING
        # A direction that cannot be changed any more is tried again, but not for ever.
        self._recoveries += 1
        enough = self._recoveries >= MAX_RECOVERIES and not reason.is_ours
        if reason.cause is Cause.FAILED or enough:
            return self._block(reason, now)
        self.wanted = back
        limits, doublings = self.limits, min(self._recoveries, MAX_DOUBLINGS)
        self.deadline = now + min(limits.retry_max_s, limits.retry_min_s * 2**doublings)
        return []

    def _block(self, reason: Reason, now: float) -> list[Effect]:
        first = self.reason
        if first is not None and first.text != reason.text:
            # What began it is what somebody has to mend.
            text = f"{reason.text} (it began with: {first})"
            reason = Reason(cause=reason.cause, text=text, rank=reason.rank)
        self.place, self.reason, self.stopped_at = Place.BLOCKED, reason, now
        return [Blocked(tenancy=self.tenancy, reason=reason)]

    def _states(self) -> list[RankState]:
        return [state for report in self._reports.values() for _, state in report.states]

    def _untouched(self) -> bool:
        """Whether all hosts have answered, and nothing of it is frozen or parked."""
        states = self._states()
        return not self._lacks_answers() and bool(states) and set(states) == {RankState.RUNNING}

    def _decide(self, now: float) -> list[Effect]:
        self.reason, states = None, self._states()
        # All have answered: whether anything of it is parked is known from now on.
        self._off_ordered = RankState.PARKED in states
        if not states and self._was_on:
            return self._turn(Place.REVIVING, now)
        if all(state is RankState.PARKED for state in states):
            return self._turn(Place.WITHDRAWING, now)
        return self._turn(Place.TURNING_BACK, now)

    def _arrive(self, now: float) -> list[Effect]:
        place, reason = self.place, self.reason
        off = GOALS[place] is Goal.OFF
        self.place, self.reason = Place.OFF if off else Place.ON, None
        arrived: Effect
        if place in (Place.SNAPSHOTTING, Place.THAWING):
            self.moves += 1
            if off:
                return [self._note("evicted", now), Evicted(tenancy=self.tenancy)]
            arrived = Admitted(tenancy=self.tenancy, restored=self._was_parked)
            self.qualified |= self._was_parked
            if self.qualifies:
                return [self._note("qualified", now), arrived]
            return [self._note("admitted", now), arrived]
        if reason is None:
            if off:
                return [Evicted(tenancy=self.tenancy)]
            return [Admitted(tenancy=self.tenancy, restored=False)]
        if off:
            arrived = AdmissionFailed(tenancy=self.tenancy, reason=reason)
            return [self._note("admission_failed", now, reason), arrived]
        arrived = EvictionFailed(tenancy=self.tenancy, reason=reason)
        return [self._note("eviction_failed", now, reason), arrived]

    # --- orders -------------------------------------------------------------------------------

    def _turn(self, place: Place, now: float) -> list[Effect]:
        """Take a new epoch and order the first step of it, or wait for epochs."""
        self.place, self.wanted, self.deadline = place, None, None
        epoch = self.numbers.take()
        if epoch is None:
            self.wanted = place
            return []
        if place is Place.FREEZING:
            self.deadline = now + self._barrier_s
        self.stamp = Stamp(max(self._least_term, self.stamp.term), epoch, 0)
        return self._order(now)

    def _step(self, place: Place, now: float) -> list[Effect]:
        self.place, self.deadline = place, None
        self.stamp = self.stamp._replace(step=self.stamp.step + 1)
        return self._order(now)

    def _order(self, now: float) -> list[Effect]:
        self._reports.clear()
        self._unanswered = dict.fromkeys(self.hosts)
        self.ordered_at = now
        goal = GOALS[self.place]
        if goal is not Goal.QUERY:
            self.goal = goal
        self._off_ordered |= goal is Goal.OFF
        tenancy, stamp, dead = self.tenancy, self.stamp, self.links.dead
        orders = [
            _make_order(host=host, tenancy=tenancy, stamp=stamp, goal=goal)
            for host in self.hosts
            if host not in dead
        ]
        return [self.record(), *orders]

    def record(self) -> TenancyRecord:
        """Return what must be kept of this tenancy."""
        return _make_record(
            tenancy=self.tenancy,
            stamp=self.stamp,
            goal=self.goal,
            pinned=self.pinned,
            lead=self.lead,
        )

    def _note(self, kind: str, now: float, reason: Reason | None = None) -> Note:
        return _make_note(
            kind=kind,
            level="info" if reason is None or reason.cause is Cause.CANCELLED else "warning",
            facts={
                **self._names,
                "epoch": self.stamp.epoch.as_int(),
                "seconds": now - self.began_at,
                **{_STEPS[goal]: seconds for goal, seconds in self.taken.items()},
                "cause": reason.cause.value if reason else None,
                "reason": str(reason) if reason else None,
                **({"qualifies": True} if self.qualifies else {}),
            },
        )
