"""Sessions and what they ask for: the side of leases that clients see.

Rules:

* A lease ends once: released, taken back, or lost with its session. Its answer is remembered, and a
  request that is sent again gets it.
* A session ends with its goodbye, with its process, or when its client has been away for too long.
* A grant that had to wait must be confirmed, since its client may have gone meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import (
    ConfirmCancel,
    ConfirmRelease,
    DeclineTurn,
    EndSession,
    SessionEndedRecord,
    WatchProcess,
)
from tsliced.core.coordinator import Place
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    GrantConfirmed,
    LastTurnRequested,
    ReleaseRequested,
    SessionOpened,
)
from tsliced.core.model import (
    Arrival,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    RequestId,
    RoundId,
    SessionId,
)
from tsliced.core.rounds import GATHERING, HELD, Gang, Round
from tsliced.core.sessions import (
    LEASE_HELD,
    LEASE_WAITING,
    RELEASED,
    Lease,
    Session,
    lease_name,
)
from tsliced.core.timers import TimerKey, TimerKind
from tsliced.core.turns import Turns
from tsliced.core.value import maker

_make_lease, _make_round = maker(Lease), maker(Round)
_make_release = maker(ConfirmRelease)


@dataclass(slots=True, kw_only=True)
class Leasing(Turns):
    """The books of one host, with the doors that clients come in by."""

    gangs: dict[JobKey, dict[tuple[GroupName, ...], Gang]] = field(default_factory=dict)

    # --- sessions -----------------------------------------------------------------------------

    def on_opened(self, event: SessionOpened, host: HostName | None = None) -> None:
        """Take in a new session; `host`: of a client there, for which its daemon speaks."""
        session = Session(
            id=event.session,
            job=event.job,
            process=event.process,
            secret=event.secret,
            groups=event.groups,
            host=host,
            hooks=event.hooks and host is None,
            agent=event.agent,
            tool=event.tool,
            heartbeat_s=event.heartbeat_s,
        )
        self.put_session(session)
        if not session.tool and host is None:
            self.tenancies.claim(session.process, session.job)
        if not session.tool:
            # A tool opens another session when it comes back, so a restart need not know of it.
            self.out.append(session.record())
        if host is None:
            self.out.append(WatchProcess(process=event.process))

    def on_disconnected(self, session_id: SessionId, now: float) -> None:
        """Wait for a client to come back as long as it may."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        session.connected = False
        self.await_return(session_id, now)

    def await_return(self, session_id: SessionId, now: float) -> None:
        """Let the clock run for a client that is away."""
        key = TimerKey(TimerKind.GRACE, session_id)
        self.timers.set(key, now + self.limits.grace_s)

    def on_resumed(self, session_id: SessionId, now: float) -> None:
        """A client came back. What it has no answer to it asks again; other grants it has seen."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        session.connected = True
        self.timers.clear(TimerKey(TimerKind.GRACE, session_id))
        for lease in session.leases.values():
            self.confirm(lease)
        self.restart_clocks(session, now)

    def end_session(self, session_id: SessionId, text: str, now: float) -> None:
        """End a session and all its leases."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        # Those that wait come first, so that none of them is granted what the others leave.
        leases = sorted(session.leases.values(), key=lambda lease: lease.state is LEASE_HELD)
        for lease in leases:
            self.end_lease(lease, code="lease_ended", text=text, now=now)
        self.timers.clear(TimerKey(TimerKind.GRACE, session_id))
        self.timers.clear(TimerKey(TimerKind.SILENCE, session_id))
        self.strike_session(session)
        self.out.append(EndSession(session=session_id, text=text))
        self._leave_gangs(session, now)
        self.tidy(session.job)
        # Last, so that whatever is kept of all this, a restart can end what is left of it.
        self.out.append(SessionEndedRecord(session=session_id))

    def _leave_gangs(self, session: Session, now: float) -> None:
        of_job = self.gangs.get(session.job, {})
        for groups, gang in list(of_job.items()):
            if session.id not in gang.sessions:
                continue
            gang.sessions.remove(session.id)
            gang.lost += 1
            if not gang.sessions:
                del of_job[groups]
            for round_ in self._live(gang):
                if round_.state is GATHERING:
                    # The one that all others waited for may be the one that is gone.
                    round_.lost = gang.lost
                    self.take_place(round_, now)
                if round_.state is GATHERING:
                    for lease in round_.members.values():
                        self.keep_lease(lease)
        if not of_job:
            self.gangs.pop(session.job, None)

    def _live(self, gang: Gang) -> list[Round]:
        gang.rounds = [round_id for round_id in gang.rounds if round_id in self.rounds]
        return [self.rounds[round_id] for round_id in gang.rounds]

    # --- requests -----------------------------------------------------------------------------

    def on_acquire(self, event: AcquireRequested, now: float, joined: Round | None = None) -> None:
        """Let a session ask for groups; as one more of a round that exists, if it is `joined`."""
        session = self.sessions.get(event.session)
        if session is None:
            self.refuse(event.session, event.request, "session_unknown", "connect again")
            return
        session.heard_at = session.asked_at = now
        lease_id = lease_name(event.session, event.request)
        lease = session.leases.get(event.request)
        if lease is not None:
            if lease.state is LEASE_HELD:
                self.await_confirmation(lease, now)
                self.tell_granted(lease)
            else:
                self._limit_wait(lease, event.timeout_s, now)
                if event.holding:
                    # A restart does not know of it.
                    lease.out_of_order = self._out_of_order(lease.groups, event.holding)
                    self.advance(self.rounds[lease.round], now)
            return
        if (ended := session.ended.get(lease_id)) is not None:
            code = "lease_ended" if ended.code == RELEASED else ended.code
            self.refuse(event.session, event.request, code, ended.text)
            return
        groups = event.groups or session.groups
        if (refusal := self._objection(session, groups, now)) is not None:
            self._refuse_for_good(session, event.request, *refusal)
            return
        self._ask(session, event, groups, lease_id, now, joined)

    def on_last_turn(self, event: LastTurnRequested, now: float) -> None:
        """Let a process that ends have its state back, if it is away, until it is gone."""
        session = self.sessions.get(event.session)
        if session is None:
            self.refuse(event.session, event.request, "session_unknown", "connect again")
            return
        name = lease_name(session.id, event.request)
        groups = session.groups
        joined: Round | None = None
        if event.request not in session.leases and name not in session.ended:
            rank = self.rank_of(session)
            tenancy = self.tenancies.tenancy_of(rank)
            if tenancy is None:
                self.out.append(DeclineTurn(session=session.id, request=event.request))
                return
            groups = self.tenancies.in_order(tenancy.reach)
            joined = self._round_to_join(session.job, groups)
            away = self.tenancies.holds_still(rank) or not tenancy.coordinator.stable
            if not away and not (event.leaving and self._may_stay(session.job, groups, joined)):
                # It runs, and others are to have the devices, or its job has them for long.
                self.out.append(DeclineTurn(session=session.id, request=event.request))
                return
        acquire = AcquireRequested(
            session=session.id,
            request=event.request,
            groups=groups,
            phase="last turn",
            ranks=joined.ranks if joined is not None else 1,
            arrival=joined.arrival if joined is not None else Arrival.ALL,
            timeout_s=event.timeout_s,
        )
        self.on_acquire(acquire, now, joined)

    def _round_to_join(self, job: JobKey, groups: tuple[GroupName, ...]) -> Round | None:
        """Return a round by which a job has the groups, or will.

        Ranks that end together must not wait for each other: one may need the others to end.
        """
        for round_ in self.rounds.values():
            if round_.job == job and round_.groups == groups and round_.state is not GATHERING:
                return round_ if round_.turn_s is None else None
        return None

    def _may_stay(self, job: JobKey, groups: tuple[GroupName, ...], joined: Round | None) -> bool:
        """Whether a job that runs can be given its devices at once, and nobody is passed over."""
        if joined is not None:
            return joined.state is HELD
        arbiters = [self.arbiters[group] for group in groups if group in self.arbiters]
        free = all(arbiter.chosen is None and not arbiter.queue for arbiter in arbiters)
        free = free and len(arbiters) == len(groups)
        return free and self.tenancies.settled(job, groups)

    def _objection(
        self, session: Session, groups: tuple[GroupName, ...], now: float
    ) -> tuple[str, str] | None:
        limits = self.limits
        for group in groups:
            arbiter = self.arbiters.get(group)
            if arbiter is None and group not in self.tenancies.order_of:
                known = ", ".join(sorted(self.tenancies.order_of)) or "none"
                return "unknown_group", f"there is no group {group!r} here; known: {known}"
            if group not in session.groups:
                text = f"uid {session.job.uid} may not lease group {group!r}: it is not on its list"
                return "not_permitted", f"{text}, or the cgroup of this process lacks a device"
            queue = arbiter.queue if arbiter is not None else ()
            if len(queue) + len(self.aside) >= limits.max_waiters:
                text = f"{limits.max_waiters} already wait for {group!r}"
                return "would_exceed_limit", f"{text}, which is the limit max_waiters"
        if not groups:
            text = "this session may lease no group of this host: it is on the list of none"
            return "unknown_group", f"{text}, or the cgroup of its process lacks their devices"
        if len(groups) > limits.max_groups_per_lease:
            most = limits.max_groups_per_lease
            text = f"one lease has at most {most} groups, which is the limit max_groups_per_lease"
            return "would_exceed_limit", text
        if len(session.leases) >= limits.max_leases_per_session:
            text = f"this session has {limits.max_leases_per_session} leases, which is the limit"
            return "would_exceed_limit", f"{text} max_leases_per_session; release some first"
        uid = session.job.uid
        if self.leases_by_uid.get(uid, 0) >= limits.max_leases_per_uid:
            text = f"uid {uid} has or waits for {limits.max_leases_per_uid} leases"
            return "would_exceed_limit", f"{text}, which is the limit max_leases_per_uid"
        if session.job in self.faults:
            return "job_faulted", str(self.explain_fault(session.job, now))
        for key in self.tenancies.by_job.get(session.job, ()):
            tenancy = self.tenancies.all[key]
            coordinator, shortage = tenancy.coordinator, tenancy.shortage
            stands = coordinator.given_up
            if not (stands or shortage) or set(groups).isdisjoint(key.groups):
                continue
            if stands:
                stop = self.explain_stop(tenancy, now)
                code = "blocked" if coordinator.place is Place.BLOCKED else "pinned"
                return code, f"this job cannot be moved off its devices: {stop}"
            return "no_host_memory", f"this job could not be parked when others wait: {shortage}"
        return None

    def _ask(
        self,
        session: Session,
        event: AcquireRequested,
        groups: tuple[GroupName, ...],
        lease_id: LeaseId,
        now: float,
        joined: Round | None,
    ) -> None:
        if self.turns or self.idle:
            self.end_turns(session.job, now)
        round_ = joined or self._round_for(session, groups, event.ranks, event.arrival, now)
        lease = _make_lease(
            id=lease_id,
            session=session.id,
            request=event.request,
            round=round_.id,
            groups=groups,
            phase=event.phase,
            ranks=event.ranks,
            arrival=event.arrival,
            asked_at=now,
        )
        if event.holding:
            lease.out_of_order = self._out_of_order(groups, event.holding)
        self.put_lease(session, lease, round_)
        if joined is not None:
            # It takes nobody's place in the round.
            joined.took_part.discard(session.id)
        if round_.state is HELD:
            self.hold(lease, now)
            return
        place = round_.place
        self.take_place(round_, now)
        if lease.state is LEASE_HELD or lease.id not in self.leases:
            return
        if round_.place == place:
            self.keep_lease(lease)
        self._limit_wait(lease, event.timeout_s, now)
        self.note_queued(lease)

    def _out_of_order(
        self, groups: tuple[GroupName, ...], holding: tuple[GroupName, ...]
    ) -> GroupName | None:
        """Return a group that is held though it comes after one that is wanted."""
        order = self.tenancies.order_of
        known = (held for held in holding if held in order and held not in groups)
        return next((held for held in known if order[held] > order[groups[0]]), None)

    def _limit_wait(self, lease: Lease, timeout_s: float | None, now: float) -> None:
        """Let a lease wait no longer than its client wants; a repeated wish does not extend it."""
        if timeout_s is not None and not lease.limited:
            lease.limited = True
            self.timers.set(TimerKey(TimerKind.ACQUIRE, lease.id), now + timeout_s)

    def _round_for(
        self,
        session: Session,
        groups: tuple[GroupName, ...],
        ranks: int,
        arrival: Arrival,
        now: float,
    ) -> Round:
        gang: Gang | None = None
        if ranks > 1:
            gang = self._gang(session.job, groups)
            gang.join(session.id, ranks)
            for round_ in self._live(gang):
                if round_.may_join(session.id):
                    round_.lost = min(round_.lost, gang.lost)
                    return round_
        self.last_round = RoundId(self.last_round + 1)
        round_ = _make_round(
            id=self.last_round,
            job=session.job,
            groups=groups,
            ranks=ranks,
            arrival=arrival,
            asked_at=now,
        )
        self.rounds[round_.id] = round_
        if gang is not None:
            round_.lost = gang.lost
            gang.rounds.append(round_.id)
        return round_

    def regain_gang(self, round_: Round) -> None:
        """After a restart: know again who asks together."""
        gang = self._gang(round_.job, round_.groups)
        gang.lost = max(gang.lost, round_.lost)
        if round_.id not in gang.rounds:
            gang.rounds.append(round_.id)
            gang.rounds.sort()

    def _gang(self, job: JobKey, groups: tuple[GroupName, ...]) -> Gang:
        of_job = self.gangs.setdefault(job, {})
        if (gang := of_job.get(groups)) is None:
            gang = of_job[groups] = Gang()
            # Of those that a restart took back any may have asked before, and would be waited for.
            of_the_job = self.sessions_of(job)
            gang.sessions.update(s.id for s in of_the_job if s.regained and not s.agent)
        return gang

    def on_release(self, event: ReleaseRequested, now: float) -> None:
        """Let a session give a lease back."""
        session = self.sessions.get(event.session)
        if session is None:
            self.refuse(event.session, event.request, "session_unknown", "connect again")
            return
        session.heard_at = session.asked_at = now
        lease = self.leases.get(event.lease)
        if lease is not None and lease.session == session.id and lease.state is LEASE_HELD:
            waiters = self.waiters_of(lease)
            deferred = waiters == 0
            self.end_lease(lease, code=RELEASED, text="it was released", now=now, waiters=waiters)
        elif (ended := session.ended.get(event.lease)) is None:
            text = f"this session holds no lease {event.lease!r}"
            self.refuse(event.session, event.request, "unknown_lease", text)
            return
        elif ended.code != RELEASED:
            self.refuse(event.session, event.request, "lease_ended", ended.text)
            return
        else:
            waiters, deferred = ended.waiters, ended.deferred
        self.out.append(
            _make_release(
                session=session.id, request=event.request, waiters=waiters, deferred=deferred
            )
        )

    def on_cancel(self, event: CancelRequested, now: float) -> None:
        """Let a session take an acquire back. A held lease is released by its client."""
        session = self.sessions.get(event.session)
        if session is None:
            self.refuse(event.session, event.request, "session_unknown", "connect again")
            return
        lease = session.leases.get(event.acquire)
        if lease is not None and lease.state is LEASE_WAITING:
            self.refuse_lease(lease, "cancelled", "it was cancelled", now)
        ended = session.ended.get(lease_name(session.id, event.acquire))
        cancelled = ended is not None and ended.code == "cancelled"
        self.out.append(
            ConfirmCancel(session=event.session, request=event.request, cancelled=cancelled)
        )

    def on_confirmed(self, event: GrantConfirmed) -> None:
        """A client has its grant in hand."""
        lease = self.leases.get(event.lease)
        if lease is not None and lease.session == event.session:
            self.confirm(lease)

    def _refuse_for_good(self, session: Session, request: RequestId, code: str, text: str) -> None:
        lease = lease_name(session.id, request)
        limit = self.limits.max_answers
        self.out.append(session.remember(lease, request, code=code, text=text, limit=limit))
        self.refuse(session.id, request, code, text)

    # --- time ---------------------------------------------------------------------------------

    def on_acquire_due(self, lease_id: LeaseId, now: float) -> None:
        """An acquire's time is over."""
        lease = self.leases.get(lease_id)
        if lease is not None and lease.state is LEASE_WAITING:
            text = f"not granted within {now - lease.asked_at:.1f} s"
            if stalled := self.rounds[lease.round].stalled:
                text += f": {stalled}"
            self.refuse_lease(lease, "timeout", text, now)

    def on_confirm_due(self, lease_id: LeaseId, now: float) -> None:
        """A grant was not confirmed: it is handed back."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return
        session = self.sessions[lease.session]
        if not session.connected:
            # While the connection is down another clock runs.
            return
        if self.tenancies.holds_still(self.rank_of(session)):
            self.await_confirmation(lease, now)
            return
        text = f"its grant was not confirmed within {self.limits.ack_s} s"
        self.take_away(lease, text, now)

    def on_grace_due(self, session_id: SessionId, now: float) -> None:
        """A client did not come back."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        holds = any(lease.state is LEASE_HELD for lease in session.leases.values())
        if self.tenancies.holds_still(self.rank_of(session)) and not holds:
            # It may be our doing that it does not come. But a holder keeps others waiting.
            self.await_return(session_id, now)
            return
        text = f"its connection was gone for {self.limits.grace_s} s"
        self.end_session(session_id, text, now)
