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
    EndSession,
    Note,
    SessionEndedRecord,
    TellLost,
    WatchProcess,
)
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    GrantConfirmed,
    ReleaseRequested,
    SessionOpened,
)
from tsliced.core.granting import Granting
from tsliced.core.model import (
    Arrival,
    GroupName,
    JobKey,
    LeaseId,
    RequestId,
    RoundId,
    SessionId,
)
from tsliced.core.rounds import Gang, Round, RoundState
from tsliced.core.sessions import RELEASED, Lease, LeaseState, Session, lease_name
from tsliced.core.timers import TimerKey, TimerKind

NO_ROUND = RoundId(0)


@dataclass(slots=True, kw_only=True)
class Leasing(Granting):
    """The books of one host, with the doors that clients come in by."""

    gangs: dict[tuple[JobKey, tuple[GroupName, ...]], Gang] = field(default_factory=dict)
    #: Number of the latest round.
    last_round: RoundId = NO_ROUND

    # --- sessions -----------------------------------------------------------------------------

    def on_opened(self, event: SessionOpened) -> None:
        """Take in a new session."""
        session = Session(
            id=event.session,
            job=event.job,
            process=event.process,
            secret=event.secret,
            groups=event.groups,
            hooks=event.hooks,
            agent=event.agent,
        )
        self.put_session(session)
        self.out += (session.record(), WatchProcess(process=event.process))

    def put_session(self, session: Session) -> None:
        """Enter a session into the books."""
        self.sessions[session.id] = session
        self.by_process.setdefault(session.process, {})[session.id] = None
        if session.hooks:
            self.tenancies.add_hooks(session.job, session.id)

    def on_disconnected(self, session_id: SessionId, now: float) -> None:
        """Wait for a client to come back as long as it may."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        session.connected = False
        key = TimerKey(TimerKind.GRACE, session_id)
        self.timers.set(key, now + self.limits.grace_s)

    def on_resumed(self, session_id: SessionId, now: float) -> None:
        """A client came back; what was on the wire may be lost, so grants count as unseen."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        session.connected = True
        self.timers.clear(TimerKey(TimerKind.GRACE, session_id))
        for lease in session.leases.values():
            if lease.unconfirmed:
                self.await_confirmation(lease, now)

    def end_session(self, session_id: SessionId, text: str, now: float, *, died: bool) -> None:
        """End a session and all its leases."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        of_process = self.by_process[session.process]
        del of_process[session_id]
        if not of_process:
            del self.by_process[session.process]
        if session.hooks:
            self.tenancies.remove_hooks(session.job, session_id)
        self.timers.clear(TimerKey(TimerKind.GRACE, session_id))
        for lease in list(session.leases.values()):
            self.end_lease(lease, code="lease_ended", text=text, now=now)
        self._leave_gangs(session, now, died=died)
        self.forget_job(session.job)
        self.out += (
            SessionEndedRecord(session=session_id),
            EndSession(session=session_id, text=text),
        )

    def _leave_gangs(self, session: Session, now: float, *, died: bool) -> None:
        for key, gang in list(self.gangs.items()):
            if session.id not in gang.sessions:
                continue
            gang.sessions.remove(session.id)
            gang.lost += died
            if not gang.sessions:
                del self.gangs[key]
                continue
            latest = gang.latest
            gathering = latest is not None and latest.id in self.rounds
            if latest is not None and gathering and latest.state is RoundState.GATHERING:
                # The one that all others waited for may be the one that is gone.
                latest.lost = gang.lost
                self.take_place(latest, now)

    # --- requests -----------------------------------------------------------------------------

    def on_acquire(self, event: AcquireRequested, now: float) -> None:
        """Let a session ask for groups."""
        session = self.sessions.get(event.session)
        if session is None:
            self.refuse(event.session, event.request, "session_unknown", "connect again")
            return
        lease_id = lease_name(event.session, event.request)
        lease = session.leases.get(event.request)
        if lease is not None:
            if lease.state is LeaseState.HELD:
                self.grant(lease, self.rounds[lease.round], now)
            return
        if (ended := session.ended.get(lease_id)) is not None:
            code = "lease_ended" if ended.code == RELEASED else ended.code
            self.refuse(event.session, event.request, code, ended.text)
            return
        groups = event.groups or session.groups
        if (refusal := self._objection(session, groups)) is not None:
            self._refuse_for_good(session, event.request, *refusal)
            return
        self._ask(session, event, groups, lease_id, now)

    def _objection(self, session: Session, groups: tuple[GroupName, ...]) -> tuple[str, str] | None:
        limits = self.limits
        for group in groups:
            arbiter = self.arbiters.get(group)
            if arbiter is None:
                known = ", ".join(sorted(self.arbiters)) or "none"
                return "unknown_group", f"there is no group {group!r} here; known: {known}"
            if group not in session.groups:
                return "not_permitted", f"uid {session.job.uid} may not lease group {group!r}"
            if len(arbiter.queue) >= limits.max_waiters:
                return "would_exceed_limit", f"{limits.max_waiters} already wait for {group!r}"
        if not groups:
            return "unknown_group", "this session may lease no group of this host"
        if len(session.leases) >= limits.max_leases_per_session:
            return "would_exceed_limit", "this session has too many leases; release some first"
        if (reason := self.faults.get(session.job)) is not None:
            return "job_faulted", f"{reason}; end its processes, or clear the fault"
        for key in self.tenancies.by_job.get(session.job, ()):
            pinned = self.tenancies.all[key].coordinator.pinned
            if pinned is not None and not set(groups).isdisjoint(key.groups):
                return "pinned", f"this job cannot be moved off its devices: {pinned}"
        return None

    def _ask(
        self,
        session: Session,
        event: AcquireRequested,
        groups: tuple[GroupName, ...],
        lease_id: LeaseId,
        now: float,
    ) -> None:
        round_ = self._round_for(session, groups, event.ranks, event.arrival, now)
        lease = Lease(
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
        self.put_lease(session, lease, round_)
        if round_.state is RoundState.HELD:
            self.hold(lease, round_, now)
            return
        self.take_place(round_, now)
        if lease.state is LeaseState.WAITING and lease.id in self.leases:
            self._wait(lease, round_, event.timeout_s, now)

    def _wait(self, lease: Lease, round_: Round, timeout_s: float | None, now: float) -> None:
        # All of the round's: the last to ask gives them all their place in the queue.
        for member in round_.members.values():
            self.out.append(member.record(round_.place))
        if timeout_s is not None:
            self.timers.set(TimerKey(TimerKind.ACQUIRE, lease.id), now + timeout_s)
        self.out.append(
            Note(
                kind="queued",
                level="info",
                facts={
                    "job": str(round_.job),
                    "groups": ",".join(round_.groups),
                    "lease": lease.id,
                    "round": round_.state.value,
                },
            )
        )

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
            gang = self.gangs.setdefault((session.job, groups), Gang())
            gang.sessions.add(session.id)
            latest = gang.latest
            if latest is not None and latest.id in self.rounds and latest.may_join(session.id):
                return latest
        self.last_round = RoundId(self.last_round + 1)
        round_ = Round(
            id=self.last_round,
            job=session.job,
            groups=groups,
            ranks=ranks,
            arrival=arrival,
            asked_at=now,
            lost=gang.lost if gang is not None else 0,
        )
        self.rounds[round_.id] = round_
        if gang is not None:
            gang.latest = round_
        return round_

    def regain_gang(self, round_: Round, session: SessionId) -> None:
        """After a restart: know again who asks together."""
        gang = self.gangs.setdefault((round_.job, round_.groups), Gang())
        gang.sessions.add(session)
        if gang.latest is None or gang.latest.id < round_.id:
            gang.latest = round_

    def on_release(self, event: ReleaseRequested, now: float) -> None:
        """Let a session give a lease back."""
        session = self.sessions.get(event.session)
        if session is None:
            self.refuse(event.session, event.request, "session_unknown", "connect again")
            return
        lease = self.leases.get(event.lease)
        if lease is not None and lease.session == session.id and lease.state is LeaseState.HELD:
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
            ConfirmRelease(
                session=session.id, request=event.request, waiters=waiters, deferred=deferred
            )
        )

    def on_cancel(self, event: CancelRequested, now: float) -> None:
        """Let a session take an acquire back. A held lease is released by its client."""
        session = self.sessions.get(event.session)
        lease = session.leases.get(event.acquire) if session else None
        cancelled = lease is not None and lease.state is LeaseState.WAITING
        if lease is not None and cancelled:
            self.refuse_lease(lease, "cancelled", "it was cancelled", now)
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
        if lease is not None and lease.state is LeaseState.WAITING:
            text = f"not granted within {now - lease.asked_at:.1f} s"
            if stalled := self.rounds[lease.round].stalled:
                text += f": {stalled}"
            self.refuse_lease(lease, "timeout", text, now)

    def on_confirm_due(self, lease_id: LeaseId, now: float) -> None:
        """A grant was not confirmed: it is handed back."""
        lease = self.leases.get(lease_id)
        if lease is None or not lease.unconfirmed:
            return
        session = self.sessions[lease.session]
        if not session.connected:
            # While the connection is down another clock runs, and a resumed session gets anew.
            return
        text = f"its grant was not confirmed within {self.limits.ack_s} s"
        self.end_lease(lease, code="lease_ended", text=text, now=now)
        self.out.append(TellLost(session=session.id, lease=lease_id, text=text))

    def on_grace_due(self, session_id: SessionId, now: float) -> None:
        """A client did not come back."""
        text = f"its connection was gone for {self.limits.grace_s} s"
        self.end_session(session_id, text, now, died=True)
