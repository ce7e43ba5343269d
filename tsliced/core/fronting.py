"""Leases of this host's clients whose arbiter is on another host: what is asked there, and held.

Rules:

* A request that the arbiter has not answered is said again after each connect; it has an id, so
  that is harmless.
* What is held is on record here too: a client that comes back after a restart still has its lease.
* A request that nobody is interested in any more is taken back, and a grant of it handed back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
from tsliced.core.sessions import Session, lease_name
from tsliced.core.timers import TimerKey, TimerKind

#: How much longer than the arbiter a front waits, so that its answer comes first if it can.
TIMEOUT_SLACK_S = 1.0

#: A request of a client that the arbiter answers.
Asked = AcquireRequested | LastTurnRequested | ReleaseRequested | CancelRequested


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
    #: By host: the sessions that it knows of since the link is up.
    known: dict[HostName, set[SessionId]] = field(default_factory=dict)

    # --- what clients say ---------------------------------------------------------------------

    def ask(
        self, event: AcquireRequested | LastTurnRequested, arbiter: HostName, now: float
    ) -> None:
        """Pass on that a client wants groups."""
        lease = lease_name(event.session, event.request)
        if lease not in self.leases:
            self.leases[lease] = ForeignLease(
                id=lease, session=event.session, request=event.request, arbiter=arbiter
            )
            if event.timeout_s is not None:
                at = now + event.timeout_s + TIMEOUT_SLACK_S
                self.books.timers.set(TimerKey(TimerKind.ACQUIRE, lease), at)
        self._pass_on(event, arbiter)

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
        self._say(lease.arbiter, event)
        return True

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
        self._abandon(lease)

    def _abandon(self, lease: ForeignLease) -> None:
        """Take an acquire back that its client does not wait for any more."""
        lease.abandoned = True
        cancel = CancelRequested(
            session=lease.session, request=lease.request, acquire=lease.request
        )
        self._pass_on(cancel, lease.arbiter)

    def on_ended(self, session: SessionId) -> None:
        """A session is over."""
        for host, known in self.known.items():
            if session in known:
                known.discard(session)
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
        known = self.known.setdefault(arbiter, set())
        if event.session not in known:
            known.add(event.session)
            self._send(arbiter, _introduction(self.books.sessions[event.session]))
        self._send(arbiter, event)

    def _send(self, host: HostName, message: PeerMessage) -> None:
        self.books.out.append(Send(host=host, message=message))

    # --- what arbiters say --------------------------------------------------------------------

    def on_action(self, action: ClientAction, arbiter: HostName) -> None:
        """Take an answer, or news, of an arbiter elsewhere for a client of this host."""
        if action.session not in self.books.sessions:
            if not isinstance(action, EndSession):
                self._send(arbiter, SessionClosed(session=action.session))
            return
        match action:
            case Grant():
                self._on_grant(action, arbiter)
            case Refuse() | ConfirmRelease() | ConfirmCancel() | DeclineTurn():
                self._on_answer(action, arbiter)
            case EndSession(session=session, text=text):
                self._on_session_ended(session, arbiter, text)
            case TellLost(lease=lease_id):
                lease = self.leases.get(lease_id)
                if lease is not None and lease.arbiter == arbiter:
                    self._forget(lease)
                    self.books.out.append(action)
            case _:
                self.books.out.append(action)

    def _on_grant(self, grant: Grant, arbiter: HostName) -> None:
        lease = self.leases.get(grant.lease)
        asked = self.open.get((grant.session, grant.request))
        if lease is None or lease.arbiter != arbiter or lease.abandoned:
            # Nobody waits for it any more.
            release = ReleaseRequested(
                session=grant.session, request=grant.request, lease=grant.lease
            )
            self._say(arbiter, release)
            return
        if asked is not None and not isinstance(asked[1], ReleaseRequested):
            del self.open[grant.session, grant.request]
        self.books.timers.clear(TimerKey(TimerKind.ACQUIRE, lease.id))
        if lease.tokens != grant.tokens:
            lease.tokens = grant.tokens
            self.books.out.append(lease.record())
        self.books.out.append(grant)

    def _on_answer(
        self, answer: Refuse | ConfirmRelease | ConfirmCancel | DeclineTurn, arbiter: HostName
    ) -> None:
        asked = self.open.pop((answer.session, answer.request), None)
        if asked is None:
            return
        event = asked[1]
        lease = self.leases.get(lease_name(event.session, event.request))
        match event:
            case ReleaseRequested():
                lease = self.leases.get(event.lease)
            case CancelRequested() if lease is None or not lease.abandoned:
                lease = None
            case _:
                pass
        silent = lease is not None and lease.abandoned
        if lease is not None:
            self._forget(lease)
        if not silent:
            self.books.out.append(answer)

    def _on_session_ended(self, session: SessionId, arbiter: HostName, text: str) -> None:
        """An arbiter ended what a session has there; the client is there as before."""
        self.known.get(arbiter, set()).discard(session)
        for lease in list(self.leases.values()):
            if lease.session == session and lease.arbiter == arbiter:
                self._lose(lease, text)

    def _lose(self, lease: ForeignLease, text: str) -> None:
        self._forget(lease)
        self.open.pop((lease.session, lease.request), None)
        if lease.tokens:
            self.books.out.append(TellLost(session=lease.session, lease=lease.id, text=text))
        elif not lease.abandoned:
            self.books.refuse(lease.session, lease.request, "lease_ended", text)

    def _forget(self, lease: ForeignLease) -> None:
        del self.leases[lease.id]
        self.books.timers.clear(TimerKey(TimerKind.ACQUIRE, lease.id))
        if lease.tokens:
            self.books.out.append(lease.record(over=True))

    # --- links --------------------------------------------------------------------------------

    def on_connected(self, host: HostName) -> None:
        """Say again what a host has not answered."""
        self.known[host] = set()
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
        there = dict.fromkeys(lease for _, lease in held.leases)
        for lease in list(self.leases.values()):
            if lease.arbiter == arbiter and lease.tokens and lease.id not in there:
                self._lose(lease, f"{arbiter}, which arbitrates it, has ended it")
        for session, lease_id in held.leases:
            if lease_id not in self.leases:
                # Its grant did not come through, and nobody waits for it any more.
                request = RequestId(int(lease_id.rpartition(".")[2]))
                event = ReleaseRequested(session=session, request=request, lease=lease_id)
                self._send(arbiter, event)

    def on_arbiter_died(self, host: HostName, text: str) -> None:
        """All that a host had given is gone with it."""
        for lease in list(self.leases.values()):
            if lease.arbiter == host and lease.tokens:
                self._lose(lease, text)

    def held_by(self, session: SessionId) -> Iterable[ForeignLease]:
        """Return what a session holds elsewhere."""
        return [
            lease for lease in self.leases.values() if lease.session == session and lease.tokens
        ]


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
