"""Simulated clients: they remember what they asked and what they were told, as the library does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tsliced.core.actions import (
    Action,
    ConfirmCancel,
    ConfirmRelease,
    EndSession,
    Grant,
    Refuse,
    TellLost,
)
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    Event,
    GrantConfirmed,
    ReleaseRequested,
    SessionResumed,
)
from tsliced.core.model import GroupName, JobKey, LeaseId, ProcessId, RequestId, SessionId, Token

Request = AcquireRequested | ReleaseRequested | CancelRequested


@dataclass(slots=True, kw_only=True)
class Client:
    """One client over all its connections."""

    session: SessionId
    job: JobKey
    process: ProcessId
    connected: bool = True
    #: Sends a confirmation of each grant that asks for one.
    confirms: bool = True
    #: Requests without an answer, in the order in which they were sent.
    open: dict[RequestId, Request] = field(default_factory=dict)
    #: What it believes to hold, without what it is giving back.
    held: dict[LeaseId, tuple[tuple[GroupName, Token], ...]] = field(default_factory=dict)
    #: The last answer to each request.
    answers: dict[RequestId, Action] = field(default_factory=dict)
    lost: list[LeaseId] = field(default_factory=list)
    ended: bool = False

    def ask(self, request: Request) -> None:
        """Note that a request is on its way."""
        self.open[request.request] = request
        if isinstance(request, ReleaseRequested):
            self.held.pop(request.lease, None)

    def take(self, action: Action, post: Callable[[Event], None]) -> None:
        """Take in what the daemon says; nothing reaches a client without a connection."""
        if isinstance(action, EndSession):
            self.end()
            return
        if not self.connected:
            return
        match action:
            case Grant() if self._is_settled(action):
                # Nobody waits for it: without a confirmation it is handed back.
                pass
            case Grant():
                self._answer(action.request, action)
                if not self._is_given_back(action.lease):
                    self.held[action.lease] = action.tokens
                if action.ack_s is not None and self.confirms:
                    post(GrantConfirmed(session=self.session, lease=action.lease))
            case Refuse(code="session_unknown"):
                self.end()
            case Refuse() | ConfirmRelease() | ConfirmCancel():
                self._answer(action.request, action)
            case TellLost(lease=lease):
                self.held.pop(lease, None)
                self.lost.append(lease)
            case _:
                pass

    def end(self) -> None:
        """The session is over; whatever it had or wanted is gone."""
        self.ended, self.connected = True, False
        self.held.clear()
        self.open.clear()

    def _answer(self, request: RequestId, action: Action) -> None:
        self.open.pop(request, None)
        self.answers[request] = action

    def _is_settled(self, grant: Grant) -> bool:
        answered = grant.request in self.answers and grant.request not in self.open
        return answered and grant.lease not in self.held

    def _is_given_back(self, lease: LeaseId) -> bool:
        releases = (r for r in self.open.values() if isinstance(r, ReleaseRequested))
        return any(release.lease == lease for release in releases)

    def come_back(self, leases: Iterable[LeaseId], requests: Iterator[int]) -> list[Event]:
        """Return what it sends on a new connection: all that it has no answer to, again.

        `leases`: what it holds by the daemon's books. What it knows nothing of it gives back.
        """
        self.connected = True
        asked = {LeaseId(f"{self.session}.{request}") for request in self.open}
        for lease in leases:
            if lease not in self.held and lease not in asked and not self._is_given_back(lease):
                number = RequestId(next(requests))
                self.ask(ReleaseRequested(session=self.session, request=number, lease=lease))
        return [SessionResumed(session=self.session), *self.open.values()]
