"""Leases of this host's clients whose arbiter is on another host: what is asked there, and held.

Rules:

* A request that the arbiter has not answered is said again after each connect; it has an id, so
  that is harmless.
* What is waited for and held is on record here too: a client that comes back after a restart still
  has its lease, and its place.
* A request that nobody is interested in any more is taken back, and a grant of it handed back.
* How a lease ended is remembered as that of any other: a client that asks again, because the answer
  was lost, gets the same one.
* A grant that had to wait must be confirmed to the front: only that knows whether its client is
  there, and whether the grant has come.
* Only the arbiter that was asked answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from tsliced.core.actions import (
    ClientAction,
    ConfirmCancel,
    ConfirmRelease,
    DeclineTurn,
    EndSession,
    ForeignLeaseRecord,
    Grant,
    Refuse,
    Send,
    TellLost,
)
from tsliced.core.books import Books
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    GrantConfirmed,
    LastTurnRequested,
    ReleaseRequested,
    SessionClosed,
    SessionOpened,
    SignOfLife,
)
from tsliced.core.links import Links
from tsliced.core.messages import HeldLeases, PeerMessage
from tsliced.core.model import GroupName, HostName, LeaseId, RequestId, SessionId, Token
from tsliced.core.sessions import RELEASED, Session, lease_name
from tsliced.core.timers import TimerKey, TimerKind

#: How much longer than the arbiter a front waits, so that its answer comes first if it can.
TIMEOUT_SLACK_S = 1.0

#: A request of a client that the arbiter answers.
Asked = AcquireRequested | LastTurnRequested | ReleaseRequested | CancelRequested

#: What it is answered with.
Answer = Refuse | ConfirmRelease | ConfirmCancel | DeclineTurn


@dataclass(slots=True, kw_only=True, eq=False)
class ForeignLease:
    """A lease of an arbiter elsewhere."""

    id: LeaseId
    session: SessionId
    request: RequestId
    arbiter: HostName
    #: Empty while it waits.
    tokens: tuple[tuple[GroupName, Token], ...] = ()
    #: The client has been told that it does not get it.
    abandoned: bool = False

    @property
    def groups(self) -> tuple[GroupName, ...]:
        """What it is of, once it is held."""
        return tuple(group for group, _ in self.tokens)

    def record(self, *, over: bool = False) -> ForeignLeaseRecord:
        """Return what must be kept of it."""
        return ForeignLeaseRecord(
            lease=self.id,
            session=self.session,
            request=self.request,
            arbiter=None if over else self.arbiter,
            tokens=self.tokens,
        )


@dataclass(slots=True, kw_only=True)
class Fronting:
    """What this host's clients want of arbiters elsewhere. Mutate it only through its methods."""

    books: Books
    links: Links
    leases: dict[LeaseId, ForeignLease] = field(default_factory=dict)
    #: Requests without an answer, in the order in which they came.
    open: dict[tuple[SessionId, RequestId], tuple[HostName, Asked]] = field(default_factory=dict)
    #: By host: the sessions that were introduced to it since the link is up, ...
    known: dict[HostName, set[SessionId]] = field(default_factory=dict)
    #: ... and those of which it was told then that they live: it may know them from before.
    listed: dict[HostName, set[SessionId]] = field(default_factory=dict)

    # --- what clients say ---------------------------------------------------------------------

    def ask(
        self, event: AcquireRequested | LastTurnRequested, arbiter: HostName, now: float
    ) -> None:
        """Pass on that a client wants groups."""
        name = lease_name(event.session, event.request)
        lease = self.leases.get(name)
        if lease is None:
            lease = self.leases[name] = ForeignLease(
                id=name, session=event.session, request=event.request, arbiter=arbiter
            )
            self.books.out.append(lease.record())
        timer = TimerKey(TimerKind.ACQUIRE, name)
        timeout_s = event.timeout_s
        if timeout_s is not None and not lease.tokens and self.books.timers.get(timer) is None:
            self.books.timers.set(timer, now + timeout_s + TIMEOUT_SLACK_S)
        self._pass_on(event, arbiter)

    def regain(self, lease: ForeignLease) -> None:
        """After a restart: know again what a session waits for or holds elsewhere."""
        self.leases[lease.id] = lease
        if lease.id in self.books.sessions[lease.session].ended:
            # Its client was told that it does not get it; its arbiter may not know.
            self._abandon(lease)

    def release(self, event: ReleaseRequested) -> bool:
        """Pass on that a client gives a lease back, if it is one of here."""
        lease = self.leases.get(event.lease)
        if lease is None or lease.session != event.session or not lease.tokens:
            return False
        self._pass_on(event, lease.arbiter)
        return True

    def cancel(self, event: CancelRequested) -> bool:
        """Pass on that a client no longer wants something, if that is one of here."""
        lease = self.leases.get(lease_name(event.session, event.acquire))
        if lease is None:
            return False
        self._pass_on(event, lease.arbiter)
        return True

    def confirm(self, event: GrantConfirmed) -> bool:
        """Pass on that a client has its grant, if it is one of here."""
        lease = self.leases.get(event.lease)
        if lease is None or lease.session != event.session:
            return False
        self._expect_no_confirmation(lease)
        self._say(lease.arbiter, event)
        return True

    def on_resumed(self, session: SessionId) -> None:
        """A client came back: what it has an answer to it has seen."""
        for lease in self.held_by(session):
            self._expect_no_confirmation(lease)

    def on_confirm_due(self, lease_id: LeaseId, now: float) -> None:
        """A grant was not confirmed: it is handed back."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return
        session = self.books.sessions[lease.session]
        if not session.connected:
            # While the connection is down another clock runs.
            return
        if self.books.tenancies.holds_still(self.books.rank_of(session)):
            self._await_confirmation(lease, now)
            return
        text = f"its grant was not confirmed within {self.books.limits.ack_s} s"
        self._end(lease, "lease_ended", text)
        self.books.out.append(TellLost(session=lease.session, lease=lease.id, text=text))
        # If that is lost, it says so again when it hears what it holds.
        self._say(lease.arbiter, _release(lease.session, lease.id))

    def _await_confirmation(self, lease: ForeignLease, now: float) -> None:
        timer = TimerKey(TimerKind.CONFIRM, lease.id)
        self.books.timers.set(timer, now + self.books.limits.ack_s)

    def _expect_no_confirmation(self, lease: ForeignLease) -> None:
        self.books.timers.clear(TimerKey(TimerKind.CONFIRM, lease.id))

    def show_life(self, event: SignOfLife) -> None:
        """Pass on a client's sign of life to those of whom it holds something."""
        held = (lease for lease in self.leases.values() if lease.session == event.session)
        for arbiter in dict.fromkeys(lease.arbiter for lease in held if lease.tokens):
            self._say(arbiter, event)

    def on_acquire_due(self, lease_id: LeaseId, now: float) -> None:
        """An acquire's time is over, and its arbiter has not said so."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.tokens or lease.abandoned:
            return
        text = f"not granted in time: {lease.arbiter}, which arbitrates it, does not answer"
        self.books.refuse(lease.session, lease.request, "timeout", text)
        self._remember(lease, "timeout", text)
        self._abandon(lease)

    def hand_back(self, lease_id: LeaseId, text: str) -> bool:
        """Hand a grant back that its client has not been told of, if it is one of here."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return False
        self.books.refuse(lease.session, lease.request, "unavailable", text)
        self._end(lease, "unavailable", text)
        self._say(lease.arbiter, _release(lease.session, lease.id))
        return True

    def _abandon(self, lease: ForeignLease) -> None:
        """Take an acquire back that its client does not wait for any more."""
        lease.abandoned = True
        cancel = CancelRequested(
            session=lease.session, request=lease.request, acquire=lease.request
        )
        self._pass_on(cancel, lease.arbiter)

    def on_ended(self, session: SessionId) -> None:
        """A session is over."""
        for host in sorted(self.links.up):
            known, listed = self.known[host], self.listed[host]
            if session in known or session in listed:
                known.discard(session)
                listed.discard(session)
                self._send(host, SessionClosed(session=session))
        for lease in [lease for lease in self.leases.values() if lease.session == session]:
            self._forget(lease)
        for key in [key for key in self.open if key[0] == session]:
            del self.open[key]

    def _pass_on(self, event: Asked, arbiter: HostName) -> None:
        self.open[event.session, event.request] = arbiter, event
        self._say(arbiter, event)

    def _say(self, arbiter: HostName, event: Asked | GrantConfirmed | SignOfLife) -> None:
        if arbiter not in self.links.up:
            return
        self._introduce(arbiter, event.session)
        self._send(arbiter, event)

    def _send(self, host: HostName, message: PeerMessage) -> None:
        self.books.out.append(Send(host=host, message=message))

    # --- what arbiters say --------------------------------------------------------------------

    def on_action(self, action: ClientAction, arbiter: HostName, now: float) -> None:
        """Take an answer, or news, of an arbiter elsewhere for a client of this host."""
        if action.session not in self.books.sessions:
            if not isinstance(action, EndSession):
                self._send(arbiter, SessionClosed(session=action.session))
            return
        match action:
            case Grant():
                self._on_grant(action, arbiter, now)
            case Refuse() | ConfirmRelease() | ConfirmCancel() | DeclineTurn():
                self._on_answer(action, arbiter)
            case EndSession(session=session, text=text):
                self._on_session_ended(session, arbiter, text)
            case TellLost(lease=lease_id):
                lease = self.leases.get(lease_id)
                if lease is not None and lease.arbiter == arbiter:
                    self._end(lease, "lease_ended", action.text)
                    self.books.out.append(action)
            case _:
                self.books.out.append(action)

    def _on_grant(self, grant: Grant, arbiter: HostName, now: float) -> None:
        lease = self.leases.get(grant.lease)
        if lease is None or lease.arbiter != arbiter or lease.abandoned:
            # Nobody waits for it any more.
            self._say(arbiter, _release(grant.session, grant.lease))
            return
        self.open.pop((grant.session, grant.request), None)
        self.books.timers.clear(TimerKey(TimerKind.ACQUIRE, lease.id))
        if lease.tokens != grant.tokens:
            lease.tokens = grant.tokens
            self.books.out.append(lease.record())
        if grant.ack_s is not None:
            self._await_confirmation(lease, now)
        self.books.out.append(grant)

    def _on_answer(self, answer: Answer, arbiter: HostName) -> None:
        key = answer.session, answer.request
        host, event = self.open.get(key, (None, None))
        if event is None or host != arbiter:
            return
        del self.open[key]
        lease = self.leases.get(_lease_of(event))
        if lease is not None and lease.abandoned and answer.request == lease.request:
            # Its client has had an answer: this one is to what took it back.
            self._forget(lease)
            return
        if lease is not None:
            self._close(lease, event, answer)
        self.books.out.append(answer)

    def _close(self, lease: ForeignLease, event: Asked, answer: Answer) -> None:
        """Know what an answer means for a lease."""
        match answer:
            case ConfirmRelease(waiters=waiters, deferred=deferred):
                text = "it was released"
                self._end(lease, RELEASED, text, waiters=waiters, deferred=deferred)
            case Refuse(code=code, text=text):
                given_back = isinstance(event, ReleaseRequested)
                self._end(lease, "lease_ended" if given_back else code, text)
            case DeclineTurn():
                self._forget(lease)
            case ConfirmCancel():
                # If it was taken back, its acquire was refused first.
                pass
            case _:
                assert_never(answer)

    def _on_session_ended(self, session: SessionId, arbiter: HostName, text: str) -> None:
        """An arbiter ended what a session has there; the client is there as before."""
        self.known[arbiter].discard(session)
        for lease in list(self.leases.values()):
            if lease.session == session and lease.arbiter == arbiter:
                self._lose(lease, text)
        for key, (host, _) in list(self.open.items()):
            if key[0] == session and host == arbiter:
                del self.open[key]
                self.books.refuse(*key, "lease_ended", text)

    def _lose(self, lease: ForeignLease, text: str) -> None:
        asked = self.open.pop((lease.session, lease.request), None)
        if lease.abandoned:
            self._forget(lease)
            return
        self._end(lease, "lease_ended", text)
        if lease.tokens:
            self.books.out.append(TellLost(session=lease.session, lease=lease.id, text=text))
        if asked is not None:
            self.books.refuse(lease.session, lease.request, "lease_ended", text)

    def _end(
        self, lease: ForeignLease, code: str, text: str, *, waiters: int = 0, deferred: bool = False
    ) -> None:
        self._forget(lease)
        self._remember(lease, code, text, waiters=waiters, deferred=deferred)

    def _remember(
        self, lease: ForeignLease, code: str, text: str, *, waiters: int = 0, deferred: bool = False
    ) -> None:
        ended = self.books.sessions[lease.session].remember(
            lease.id,
            lease.request,
            code=code,
            text=text,
            waiters=waiters,
            deferred=deferred,
            limit=self.books.limits.max_answers,
        )
        self.books.out.append(ended)

    def _forget(self, lease: ForeignLease) -> None:
        del self.leases[lease.id]
        self.books.timers.clear(TimerKey(TimerKind.ACQUIRE, lease.id))
        self._expect_no_confirmation(lease)
        self.books.out.append(lease.record(over=True))

    # --- links --------------------------------------------------------------------------------

    def on_connected(self, host: HostName, live: Iterable[SessionId]) -> None:
        """Say again what a host has not answered. `live`: the sessions that it is told of."""
        self.known[host], self.listed[host] = set(), set(live)
        for arbiter, event in list(self.open.values()):
            if arbiter == host:
                self._say(host, event)
        for lease in self.leases.values():
            if lease.arbiter == host:
                # So that it knows where the client is, whatever it remembers.
                self._introduce(host, lease.session)

    def _introduce(self, host: HostName, session: SessionId) -> None:
        if session not in self.known[host]:
            self.known[host].add(session)
            self._send(host, _introduction(self.books.sessions[session]))

    def on_held(self, held: HeldLeases, arbiter: HostName) -> None:
        """Compare what is held there with what is known here."""
        there = {lease for _, lease in held.leases}
        asked = (event for _, event in self.open.values())
        # Of one that is given back, the answer says how it ended.
        there |= {event.lease for event in asked if isinstance(event, ReleaseRequested)}
        for lease in list(self.leases.values()):
            if lease.arbiter == arbiter and lease.tokens and lease.id not in there:
                self._lose(lease, f"{arbiter}, which arbitrates it, has ended it")
        for session, lease_id in held.leases:
            known = self.leases.get(lease_id)
            if known is None or known.abandoned:
                # Its grant did not come through, and nobody waits for it any more.
                self._send(arbiter, _release(session, lease_id))
            elif not known.tokens and (known.session, known.request) not in self.open:
                # Granted while this daemon was away: so that its client finds it when it is back.
                again = AcquireRequested(session=session, request=known.request, groups=())
                self._send(arbiter, again)

    def on_arbiter_died(self, host: HostName, text: str) -> None:
        """All that a host had given is gone with it."""
        for lease in list(self.leases.values()):
            if lease.arbiter == host and lease.tokens:
                self._lose(lease, text)

    def arbiters_of(self, sessions: Iterable[SessionId]) -> set[HostName]:
        """Return the hosts of which sessions want something, or have it."""
        wanted = set(sessions)
        return {lease.arbiter for lease in self.leases.values() if lease.session in wanted}

    def held_by(self, session: SessionId) -> list[ForeignLease]:
        """Return what a session holds elsewhere."""
        return [
            lease for lease in self.leases.values() if lease.session == session and lease.tokens
        ]


def _lease_of(event: Asked) -> LeaseId:
    """Return the lease that a request is about."""
    match event:
        case ReleaseRequested(lease=lease):
            return lease
        case CancelRequested(session=session, acquire=acquire):
            return lease_name(session, acquire)
        case _:
            return lease_name(event.session, event.request)


def _release(session: SessionId, lease: LeaseId) -> ReleaseRequested:
    """Return what gives a lease back that no client has: in the name of its own request."""
    _, _, request = lease.rpartition(".")
    number = RequestId(int(request) if request.isdecimal() else 0)
    return ReleaseRequested(session=session, request=number, lease=lease)


def _introduction(session: Session) -> SessionOpened:
    """Return who a client is, for another host: what only its own has to know is left out."""
    return SessionOpened(
        session=session.id,
        job=session.job,
        process=session.process,
        secret=b"",
        groups=session.groups,
        agent=session.agent,
        heartbeat_s=session.heartbeat_s,
    )
