"""The books of one host: sessions, leases and rounds, and what is said to clients about them.

Nothing is decided here. What is to be written down, done or said is added to `out`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

from tsliced.core.actions import (
    Fact,
    FaultRecord,
    Grant,
    Note,
    Refuse,
    Send,
    TellContended,
    TellRankLost,
    TellStalled,
)
from tsliced.core.arbiter import Arbiter
from tsliced.core.messages import PeerMessage
from tsliced.core.model import (
    CoreLimits,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    OpId,
    ProcessId,
    RankId,
    Reason,
    RequestId,
    RoundId,
    SessionId,
    TenancyKey,
)
from tsliced.core.remedies import out_of_fault
from tsliced.core.rounds import HELD, Round
from tsliced.core.sessions import RELEASED, Lease, Session
from tsliced.core.signals import Effect
from tsliced.core.strangers import Inhabitants
from tsliced.core.timers import TimerKey, TimerKind, Timers
from tsliced.core.value import maker

K = TypeVar("K")

_make_grant = maker(Grant)

#: How often the history is told of what goes on with nobody waiting.
TELL_EVERY_S = 1.0
#: There is one.
_UNTOLD = TimerKey(TimerKind.UNTOLD, OpId(0))


@dataclass(slots=True, kw_only=True)
class Tally:
    """Leases of one job on the same groups, granted at once and given back with nobody waiting."""

    last: Lease
    leases: int = 0
    held_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Books:
    """Who is here, what they asked for, and which jobs are at fault."""

    limits: CoreLimits
    arbiters: dict[GroupName, Arbiter]
    tenancies: Inhabitants
    timers: Timers[TimerKey]
    out: list[Effect] = field(default_factory=list)
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    by_process: dict[ProcessId, dict[SessionId, None]] = field(default_factory=dict)
    by_job: dict[JobKey, dict[SessionId, None]] = field(default_factory=dict)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    #: How many leases each user has, waiting or held.
    leases_by_uid: dict[int, int] = field(default_factory=dict)
    rounds: dict[RoundId, Round] = field(default_factory=dict)
    #: Groups of arbiters elsewhere: the round of here that has committed to each.
    borrowed: dict[GroupName, RoundId] = field(default_factory=dict)
    faults: dict[JobKey, Reason] = field(default_factory=dict)
    #: Since when; of a fault that is older than this daemon, since it started.
    faulted_at: dict[JobKey, float] = field(default_factory=dict)
    #: Where the clients of sessions are that are not of this host.
    foreign: dict[SessionId, HostName] = field(default_factory=dict)
    #: Sessions of this host that have ended and may be known elsewhere.
    gone: list[SessionId] = field(default_factory=list)
    #: Jobs of which a session has ended.
    left: dict[JobKey, None] = field(default_factory=dict)
    #: Held, and not in the history yet; those that are held for longest come first.
    untold: dict[LeaseId, Lease] = field(default_factory=dict)
    #: By job, as the history has it, groups and phase: what is over, and not in the history yet.
    tallies: dict[tuple[str, tuple[GroupName, ...], str], Tally] = field(default_factory=dict)
    #: Whether there is a history to tell of leases that nobody waits for.
    recording: bool = True
    #: A clock runs for both.
    untold_timed: bool = False
    #: Groups that must be looked at before the event is done with.
    todo: deque[GroupName] = field(default_factory=deque)

    # --- entries ------------------------------------------------------------------------------

    def put_session(self, session: Session) -> None:
        """Enter a session into the books."""
        self.sessions[session.id] = session
        if session.host is None:
            self.by_process.setdefault(session.process, {})[session.id] = None
        else:
            self.foreign[session.id] = session.host
        self.by_job.setdefault(session.job, {})[session.id] = None
        if session.hooks:
            self.tenancies.add_hooks(session.job, session.id)
        self.tell_arbiters(session)

    def tell_arbiters(self, session: Session) -> None:
        """Let arbiters elsewhere know whether a job that has ranks here has a client here."""
        if session.host is None and not session.tool:
            for tenancy in self.tenancies.tenancies_of(session.job):
                self.tenancies.tell_arbiters(tenancy)

    def rank_of(self, session: Session) -> RankId:
        """Return the process of a session's client, as the rank that it may be."""
        return RankId(session.host or self.tenancies.host, session.process)

    def strike_session(self, session: Session) -> None:
        """Take a session out of the books; its leases are out already."""
        assert not session.leases, "a lease ends before its session"
        del self.sessions[session.id]
        if session.host is None:
            _strike(self.by_process, session.process, session.id)
            self.gone.append(session.id)
        _strike(self.by_job, session.job, session.id)
        self.left[session.job] = None
        if session.hooks:
            self.tenancies.remove_hooks(session.job, session.id)
        self.tell_arbiters(session)

    def sessions_of(self, job: JobKey) -> list[Session]:
        """Return the sessions of a job."""
        return [self.sessions[session_id] for session_id in self.by_job.get(job, ())]

    def put_lease(self, session: Session, lease: Lease, round_: Round) -> None:
        """Enter a lease into the books."""
        session.leases[lease.request] = lease
        self.leases[lease.id] = lease
        uid = session.job.uid
        self.leases_by_uid[uid] = self.leases_by_uid.get(uid, 0) + 1
        round_.members[lease.id] = lease
        round_.took_part.add(session.id)

    def strike_lease(self, lease: Lease, code: str, text: str, waiters: int) -> None:
        """Take a lease out of the books, and remember how it ended."""
        session = self.sessions[lease.session]
        del session.leases[lease.request]
        del self.leases[lease.id]
        uid = session.job.uid
        self.leases_by_uid[uid] -= 1
        if not self.leases_by_uid[uid]:
            del self.leases_by_uid[uid]
        del self.rounds[lease.round].members[lease.id]
        if lease.unconfirmed:
            self.confirm(lease)
        if lease.limited:
            self.stop_clock(lease)
        ended = session.remember(
            lease.id,
            lease.request,
            code=code,
            text=text,
            waiters=waiters,
            deferred=waiters == 0,
            limit=self.limits.max_answers,
        )
        self.out.append(ended)

    def keep_lease(self, lease: Lease) -> None:
        """Write down where a lease stands."""
        round_ = self.rounds[lease.round]
        self.out.append(lease.record(place=round_.place, lost=round_.lost))

    def stop_clock(self, lease: Lease) -> None:
        """Let an acquire that is answered not run out of time."""
        lease.limited = False
        self.timers.clear(TimerKey(TimerKind.ACQUIRE, lease.id))

    def confirm(self, lease: Lease) -> None:
        """Know that the client has its grant, or does not care any more."""
        if lease.unconfirmed:
            lease.unconfirmed = False
            self.timers.clear(TimerKey(TimerKind.CONFIRM, lease.id))

    def await_confirmation(self, lease: Lease, now: float) -> None:
        """Expect the client to confirm its grant in time.

        A client of another host is waited for by its front: whether the grant has reached that,
        nobody knows here.
        """
        lease.unconfirmed = True
        if lease.session not in self.foreign:
            self.timers.set(TimerKey(TimerKind.CONFIRM, lease.id), now + self.limits.ack_s)

    # --- what is on record --------------------------------------------------------------------

    def waiters_of(self, lease: Lease) -> int:
        """Return how many rounds wait for a group of the lease."""
        if len(lease.groups) == 1:
            return len(self.arbiters[lease.groups[0]].queue)
        here = (group for group in lease.groups if group in self.arbiters)
        waiters = len({r for group in here for r in self.arbiters[group].queue})
        elsewhere = self.rounds[lease.round].elsewhere.values()
        return waiters + sum(there.waiters for there in elsewhere)

    def chosen_for(self, group: GroupName) -> Round | None:
        """Return the round that has the group."""
        arbiter = self.arbiters.get(group)
        chosen = arbiter.chosen if arbiter is not None else self.borrowed.get(group)
        return self.rounds[chosen] if chosen is not None else None

    # --- faults -------------------------------------------------------------------------------

    def set_fault(self, key: TenancyKey, reason: Reason, now: float) -> None:
        """Refuse a job until its processes are gone or the fault is cleared."""
        self.faults[key.job], self.faulted_at[key.job] = reason, now
        self.out.append(FaultRecord(job=key.job, reason=reason))
        self.note_fault("faulted", key, reason, out_of_fault(key.job))

    def clear_fault(self, job: JobKey) -> None:
        """Let a faulted job try again."""
        if self.faults.pop(job, None) is not None:
            del self.faulted_at[job]
            self.out.append(FaultRecord(job=job, reason=None))
            facts = {"job": str(job), "reason": "the fault is cleared"}
            self.out.append(Note(kind="cleared", level="info", facts=facts))

    def clear_fault_of(self, job: JobKey, rank: RankId) -> None:
        """Let a job try again whose fault was that of a process that is gone."""
        fault = self.faults.get(job)
        if fault is not None and fault.rank == rank:
            self.clear_fault(job)

    def tidy(self, job: JobKey) -> None:
        """Forget of a job what nothing of it is left for."""
        abandoned = job not in self.by_job
        self.out += self.tenancies.drop_unused(job, abandoned=abandoned)
        if abandoned and job not in self.tenancies.by_job:
            self.clear_fault(job)

    def say(self, host: HostName, message: PeerMessage) -> None:
        """Say something to another host's daemon, if there is a link; else it is said again."""
        if host in self.tenancies.links.up:
            self.out.append(Send(host=host, message=message))

    # --- messages -----------------------------------------------------------------------------

    def refuse(self, session: SessionId, request: RequestId, code: str, text: str) -> None:
        """Answer a request with a coded error."""
        self.out.append(Refuse(session=session, request=request, code=code, text=text))

    def tell_granted(self, lease: Lease) -> None:
        """Answer an acquire, for the first time or again."""
        round_ = self.rounds[lease.round]
        self.out.append(
            _make_grant(
                session=lease.session,
                request=lease.request,
                lease=lease.id,
                tokens=lease.tokens,
                waited_s=lease.granted_at - lease.asked_at,
                restored=round_.restored,
                switch_s=_switch_s(lease, round_),
                contended=self.waiters_of(lease) > 0,
                ack_s=self.limits.ack_s if lease.unconfirmed else None,
            )
        )

    def tell_contended(self, group: GroupName) -> None:
        """Tell who holds a group that its waiters have come or gone."""
        round_ = self.chosen_for(group)
        if round_ is not None and round_.state is HELD:
            self.tell_holder(round_)

    def tell_holder(self, round_: Round) -> None:
        """Tell who holds how many wait for it."""
        for lease in round_.members.values():
            self.out.append(
                TellContended(
                    session=lease.session,
                    lease=lease.id,
                    groups=lease.groups,
                    waiters=self.waiters_of(lease),
                )
            )

    def tell_stalled(self, round_: Round, job: JobKey, reason: Reason, way_out: str = "") -> None:
        """Tell a round, once for each reason, why its turn does not come."""
        if round_.stalled == reason:
            return
        round_.stalled = reason
        for lease in round_.members.values():
            self.out.append(
                TellStalled(
                    session=lease.session, lease=lease.id, job=job, reason=reason, way_out=way_out
                )
            )

    def tell_rank_lost(self, key: TenancyKey, rank: RankId) -> None:
        """Tell a job that one of its ranks died."""
        pid, where = rank.process.pid, ""
        if rank.host != self.tenancies.host:
            where = f" on {rank.host}"
        text = f"rank {pid}{where} of this job ended"
        for session in self.sessions_of(key.job):
            for lease in session.leases.values():
                if not set(lease.groups).isdisjoint(key.groups):
                    self.out.append(
                        TellRankLost(session=session.id, lease=lease.id, pid=pid, text=text)
                    )

    # --- the history --------------------------------------------------------------------------

    def note_fault(self, kind: str, key: TenancyKey, reason: Reason, way_out: str) -> None:
        """Note that somebody must look after a tenancy."""
        facts = {
            "job": str(key.job),
            "groups": ",".join(key.groups),
            "rank": str(reason.rank) if reason.rank else None,
            "reason": str(reason),
            "way_out": way_out,
        }
        self.out.append(Note(kind=kind, level="error", facts=facts))

    # A job that goes on where it is, with nobody waiting, changes nothing that one would look for,
    # and may do so thousands of times a second. Two events for each of these leases would cost a
    # sixth of what it costs in all, and push out of the history what one does look for.

    def note_later(self, lease: Lease, now: float) -> None:
        """Note a lease that was granted at once when it has lasted, or else with others like it."""
        if not self.recording:
            return
        self.untold[lease.id] = lease
        if not self.untold_timed:
            self._time_untold(now)

    def _time_untold(self, now: float) -> None:
        self.untold_timed = True
        self.timers.set(_UNTOLD, now + TELL_EVERY_S)

    def on_untold_due(self, now: float) -> None:
        """Note what came and went meanwhile, and what has lasted."""
        self.untold_timed = False
        self.note_tallies()
        for lease in list(self.untold.values()):
            if lease.granted_at + TELL_EVERY_S > now:
                self._time_untold(now)
                return
            self.note_granted(lease, now)

    def note_all_untold(self, now: float) -> None:
        """Note now what would have been noted later."""
        self.note_tallies()
        for lease in list(self.untold.values()):
            self.note_granted(lease, now)

    def note_holders(self, group: GroupName, now: float) -> None:
        """Note who holds a group that somebody waits for, if that is not told yet."""
        round_ = self.chosen_for(group)
        assert round_ is not None, "who waits for a group waits for somebody"
        self._note_members(round_, now)

    def _note_members(self, round_: Round, now: float) -> None:
        """Note whoever of a round is not told yet: before one of them is told to have ended."""
        for lease in round_.members.values():
            if lease.id in self.untold:
                self.note_granted(lease, now)

    def note_tallies(self) -> None:
        """Note what is over; it comes before whatever is noted next."""
        for (job, groups, phase), tally in self.tallies.items():
            facts: dict[str, Fact] = {
                "job": job,
                "groups": ",".join(groups),
                "leases": tally.leases,
                "held_s": tally.held_s,
                "ranks": tally.last.ranks,
                "lease": tally.last.id,
                "token": tally.last.tokens[0][1].as_int(),
                "phase": phase or None,
            }
            self.out.append(Note(kind="held", level="debug", facts=facts))
        self.tallies.clear()

    def _count(self, lease: Lease, now: float) -> None:
        key = (self.sessions[lease.session].job_name, lease.groups, lease.phase)
        if (tally := self.tallies.get(key)) is None:
            tally = self.tallies[key] = Tally(last=lease)
        tally.last = lease
        tally.leases += 1
        tally.held_s += now - lease.granted_at

    def note_queued(self, lease: Lease) -> None:
        """Note that a lease has to wait."""
        lease.queued = True
        self.note_tallies()
        round_ = self.rounds[lease.round]
        facts = {**self._facts(lease), "round": round_.state.value}
        self.out.append(Note(kind="queued", level="info", facts=facts))

    def note_aside(self, round_: Round, reason: Reason) -> None:
        """Note that a round waits outside of the queues."""
        self._note_each(round_, "set_aside", reason=str(reason))

    def note_back(self, round_: Round) -> None:
        """Note that a round which was set aside has its place in the queues again."""
        self._note_each(round_, "queued_again")

    def _note_each(self, round_: Round, kind: str, **facts: str) -> None:
        for lease in round_.members.values():
            self.out.append(Note(kind=kind, level="info", facts={**self._facts(lease), **facts}))

    def note_granted(self, lease: Lease, now: float) -> None:
        """Note that a lease is held, and for how long already if that is told late."""
        self.note_tallies()
        round_ = self.rounds[lease.round]
        facts = self._facts(lease)
        facts["token"] = lease.tokens[0][1].as_int()
        facts["phase"] = lease.phase or None
        facts["waited_s"] = lease.granted_at - lease.asked_at
        facts["restored"] = round_.restored
        facts["switch_s"] = _switch_s(lease, round_)
        if self.untold.pop(lease.id, None) is not None:
            facts["held_s"] = now - lease.granted_at
        self.out.append(Note(kind="granted", level=_level(lease), facts=facts))

    def note_not_granted(self, lease: Lease, code: str, now: float) -> None:
        """Note that a lease waits no longer, and was not granted."""
        self.note_tallies()
        facts = {**self._facts(lease), "waited_s": now - lease.asked_at, "cause": code}
        self.out.append(Note(kind="not_granted", level="info", facts=facts))

    def note_released(self, lease: Lease, code: str, waiters: int, now: float) -> None:
        """Note that a lease is held no longer."""
        if lease.id in self.untold and code == RELEASED and not waiters:
            del self.untold[lease.id]
            self._count(lease, now)
            return
        if not self.recording and _level(lease) == "debug":
            return
        self._note_members(self.rounds[lease.round], now)
        facts = self._facts(lease)
        facts["held_s"] = now - lease.granted_at
        facts["cause"] = code
        self.out.append(Note(kind="released", level=_level(lease), facts=facts))

    def _facts(self, lease: Lease) -> dict[str, Fact]:
        return {
            "job": self.sessions[lease.session].job_name,
            "groups": ",".join(lease.groups),
            "lease": lease.id,
        }


def _strike(index: dict[K, dict[SessionId, None]], key: K, session: SessionId) -> None:
    del index[key][session]
    if not index[key]:
        del index[key]


def _level(lease: Lease) -> str:
    # What changed nothing is nothing that one would look for in a log either.
    return "debug" if lease.granted_at == lease.asked_at else "info"


def _switch_s(lease: Lease, round_: Round) -> float:
    # A rank that joined when its round was held already did not wait for the switch.
    began_at = max(round_.switch_began_at, lease.asked_at)
    return lease.granted_at - began_at if round_.moved else 0.0
