"""What a client knows of its session, its leases and its open questions. Sans-I/O.

Both shells (`client.py`, `aio.py`) keep one `Session` and feed it what the daemon says; it answers
with what is to be sent. It knows no socket, no clock and no lock: the blocking shell calls it under
its own lock, the asyncio shell from its loop.

Rules:

* A grant is either live (`HELD`, `UNCERTAIN`) and in `grants`, or ended (`LOST`, `RELEASED`) and
  out of it.
* A request whose answer nobody waits for any more, but whose effect must not be left behind (the
  release of a lease, an acquire that was given up), stays in `unsettled` until it is answered, and
  is sent again after every reconnect. Ids are never used twice, so repeating is harmless.
* Nested leases are kept here, in `Grant.holders`. The daemon never hears of them. A set, not a
  count: adding and discarding may be repeated when an interrupt came in between.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from libtimeslice import watchdogs
from libtimeslice.errors import ProtocolError
from libtimeslice.protocol import PROTOCOL_VERSION, ErrorCode, Message, error_reply

#: For a daemon that does not say how long it keeps the session of a lost connection, seconds.
DEFAULT_GRACE_S = 30.0
#: Notices about leases whose grant has not been read yet. More would be a fault of the daemon.
_MAX_EARLY = 64


class LeaseState(Enum):
    """What a client knows of one of its leases: three states while it lasts, then RELEASED."""

    HELD = "held"
    #: The connection is gone; the daemon keeps the lease for the session's grace.
    UNCERTAIN = "uncertain"
    #: It ended before its release. Another job may be on the devices.
    LOST = "lost"
    RELEASED = "released"


Arrive = Literal["all", "first"]

#: Requests that may be answered by a grant.
_ASKING = ("acquire", "last_turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a caller wants to lease. `groups` None: all groups that the job may use."""

    groups: tuple[str, ...] | None = None
    phase: str | None = None
    #: Ranks of a round; None: the caller alone.
    ranks: int | None = None
    arrive: Arrive = "all"
    timeout_s: float | None = None
    #: A last turn of this process, if it needs one; True: it ends now. None: an ordinary lease.
    leaving: bool | None = None

    def message(self, request_id: int, inside: Sequence[str] = ()) -> Message:
        """The request for it. `inside`: leases that are held until after it is given back."""
        if self.leaving is not None:
            return {
                "t": "last_turn",
                "id": request_id,
                "leaving": self.leaving,
                "timeout_s": self.timeout_s,
            }
        message: Message = {
            "t": "acquire",
            "id": request_id,
            "groups": self.groups,
            "phase": self.phase,
            "ranks": self.ranks,
            "arrive": self.arrive,
            "timeout_s": self.timeout_s,
        }
        if inside:
            message["inside"] = list(inside)
        return message


@dataclass(slots=True, kw_only=True, eq=False)
class Grant:
    """One lease of the daemon's, shared by all nested `Lease` objects over it."""

    ask: Ask
    request_id: int
    lease: str
    groups: tuple[str, ...]
    tokens: dict[str, int]
    waited_s: float = 0.0
    restored: bool = False
    switch_s: float = 0.0
    #: How long the daemon waits for a sign that the grant arrived, seconds; None: it does not.
    ack_s: float | None = None
    #: Jobs that wait for what this lease holds, as last heard.
    waiters: int = 0
    state: LeaseState = LeaseState.HELD
    #: Why it was lost.
    reason: str | None = None
    #: The leases that stand on it; the last one to go frees it.
    holders: set[object] = field(default_factory=set)
    #: False: no daemon knows of it, because the client runs unshared.
    shared: bool = True

    @property
    def live(self) -> bool:
        """Whether it still stands, as far as this side knows."""
        return self.state is LeaseState.HELD or self.state is LeaseState.UNCERTAIN


class Released(NamedTuple):
    """The daemon's answer to a release."""

    #: Jobs that waited in the queue just before.
    waiters: int
    #: Nobody waited: the state stays on the devices, and a new lease costs one round trip.
    deferred: bool


class Received(NamedTuple):
    """What follows from a message of the daemon's."""

    send: tuple[Message, ...] = ()
    lost: tuple[Grant, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Early:
    """What was said about a lease before its grant was looked at."""

    waiters: int = 0
    reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """The client's side of a session. See the rules at the top of the module."""

    #: Source of request ids. They go on rising over reconnects and new sessions.
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    session: str | None = None
    secret: bytes | None = None
    #: Where the daemon of this session listens: another one cannot resume it.
    path: str | None = None
    #: What the daemon said in its last welcome.
    host: str = ""
    job: str | None = None
    groups: tuple[str, ...] = ()
    grace_s: float = DEFAULT_GRACE_S
    caps: frozenset[str] = frozenset()
    #: Whether any daemon ever answered this client.
    answered: bool = False
    #: Monotonic instant at which the connection was found lost; None while there is one.
    down_at: float | None = None
    grants: dict[str, Grant] = field(default_factory=dict)
    #: What was last granted.
    last_ask: Ask | None = None
    unsettled: dict[int, Message] = field(default_factory=dict)
    #: Groups asked for and not granted yet, by the lease that they are to become.
    asking: dict[object, tuple[str, ...] | None] = field(default_factory=dict)
    _early: dict[str, _Early] = field(default_factory=dict)
    #: What the daemon was told of watchdogs.
    _watchdog_s: float | None = None

    # -- the connection

    def hello(
        self,
        *,
        client: str,
        role: str,
        job: str | None,
        caps: tuple[str, ...],
        ranks: int | None,
        heartbeat_s: float | None = None,
    ) -> Message:
        """The first message on a new connection; resumes the session if there is one."""
        self._watchdog_s = watchdogs.limit_s()
        return {
            "t": "hello",
            "version": list(PROTOCOL_VERSION),
            "client": client,
            "caps": list(caps),
            "job": job,
            "uid": None,
            "role": role,
            "session": self.session,
            "secret": self.secret,
            "ranks": ranks,
            "heartbeat_s": heartbeat_s,
            "watchdog_s": self._watchdog_s,
        }

    def watchdog_news(self) -> Message | None:
        """A notice for the daemon, if the watchdogs of this process are others than it was told."""
        if "torch.distributed" not in sys.modules or self.session is None:
            # What it was started with it says in its hello.
            return None
        limit_s = watchdogs.limit_s()
        if limit_s == self._watchdog_s:
            return None
        self._watchdog_s = limit_s
        return {"t": "watchdog", "limit_s": limit_s}

    def welcomed(self, welcome: Message) -> tuple[Grant, ...]:
        """Takes the daemon's welcome and returns the grants that turned out to be lost."""
        resumed = bool(welcome.get("resumed")) and welcome.get("session") == self.session
        alive: set[object] = set()
        if resumed:
            alive = {entry.get("lease") for entry in welcome.get("leases") or ()}
        self.answered = True
        self.down_at = None
        self.session = welcome.get("session")
        self.secret = welcome.get("secret")
        self.host = str(welcome.get("host", ""))
        self.job = (welcome.get("job") or {}).get("id")
        self.groups = tuple(welcome.get("groups") or ())
        self.caps = frozenset(welcome.get("caps") or ())
        self.grace_s = float(welcome.get("grace_s", DEFAULT_GRACE_S))
        lost = []
        for grant in self._shared_grants():
            if grant.lease in alive:
                grant.state = LeaseState.HELD
            else:
                reason = "it ended while the connection was down"
                lost.append(self._lose(grant, reason if resumed else "the daemon lost the session"))
        if not resumed:
            # A new session has none of the old one's leases and requests.
            self.unsettled.clear()
        self._early.clear()
        return tuple(lost)

    def disconnected(self, now: float) -> None:
        """The connection is gone: what was held is uncertain until the daemon says more."""
        if self.down_at is None and self.session is not None:
            self.down_at = now
        for grant in self._shared_grants():
            grant.state = LeaseState.UNCERTAIN

    @property
    def give_up_at(self) -> float | None:
        """Monotonic instant after which the daemon has forgotten a session that lost its link."""
        return None if self.down_at is None else self.down_at + self.grace_s

    def end(self, reason: str) -> tuple[Grant, ...]:
        """Gives the session up; the next connection starts a new one. Returns what is lost."""
        self.session = self.secret = self.down_at = None
        self.unsettled.clear()
        self._early.clear()
        return tuple(self._lose(grant, reason) for grant in self._shared_grants())

    # -- leases

    def covering(self, groups: tuple[str, ...] | None) -> tuple[Grant, ...]:
        """The live grants that together hold all of `groups`; () if something is missing."""
        missing = set(self.groups if groups is None else groups)
        if not missing:
            return ()
        found = []
        for grant in self.grants.values():
            if not missing.isdisjoint(grant.groups):
                found.append(grant)
                missing.difference_update(grant.groups)
        return () if missing else tuple(found)

    def is_asking(self, groups: tuple[str, ...] | None) -> bool:
        """Whether a grant that is asked for already would hold all of `groups`.

        Then another thread or task waits for it to come and nests in it, instead of queueing up at
        the daemon behind its own client.
        """
        wanted = frozenset(self.groups if groups is None else groups)
        return any(
            asked is None or (bool(wanted) and wanted.issubset(asked))
            for asked in self.asking.values()
        )

    def granted(self, ask: Ask, request_id: int, answer: Message, holder: object) -> Grant:
        """Turns the answer to an acquire into a live grant with one holder."""
        lease, groups, tokens = answer.get("lease"), answer.get("groups"), answer.get("tokens")
        if not (isinstance(lease, str) and isinstance(groups, list) and isinstance(tokens, dict)):
            raise ProtocolError(
                "the daemon sent a grant without lease, groups or tokens",
                code=ErrorCode.BAD_REQUEST,
            )
        grant = Grant(
            ask=ask,
            request_id=request_id,
            lease=lease,
            groups=tuple(groups),
            tokens=tokens,
            waited_s=answer.get("waited_s", 0.0),
            restored=answer.get("restored", False),
            switch_s=answer.get("switch_s", 0.0),
            ack_s=answer.get("ack_s"),
            waiters=1 if answer.get("contended") else 0,
            holders={holder},
        )
        self.grants[lease] = grant
        self.last_ask = ask
        early = self._early.pop(lease, None) if self._early else None
        if early is not None:
            grant.waiters = early.waiters
            if early.reason is not None:
                self._lose(grant, early.reason)
        return grant

    def pretend(self, ask: Ask, holder: object) -> Grant:
        """A grant for a client that runs unshared: of everything asked for, and at once."""
        request_id = next(self.ids)
        groups = ask.groups or ()
        grant = Grant(
            ask=ask,
            request_id=request_id,
            lease=f"unshared-{os.getpid()}-{request_id}",
            groups=groups,
            tokens=dict.fromkeys(groups, 0),
            holders={holder},
            shared=False,
        )
        self.grants[grant.lease] = grant
        return grant

    def taken_again(self, grant: Grant, fresh: Grant) -> None:
        """Lets the leases that stand on `grant` go on with a fresh grant of the same groups."""
        self.grants.pop(fresh.lease, None)
        grant.request_id, grant.lease = fresh.request_id, fresh.lease
        grant.groups, grant.tokens = fresh.groups, fresh.tokens
        grant.waiters, grant.reason, grant.shared = fresh.waiters, fresh.reason, fresh.shared
        grant.state = fresh.state
        if grant.state is not LeaseState.LOST:
            self.grants[grant.lease] = grant

    def release(self, grant: Grant) -> Message | None:
        """Ends a grant and returns the request to send; None if the daemon need not hear of it."""
        message: Message | None = None
        if grant.live:
            if grant.shared:
                # Noted first: an interrupt may come between any two of these lines, and then all of
                # this is done once more.
                message = {"t": "release", "id": next(self.ids), "lease": grant.lease}
                self.unsettled[message["id"]] = message
            grant.state = LeaseState.RELEASED
        self.grants.pop(grant.lease, None)
        return message

    def open_releases(self, lease: str) -> list[Message]:
        """The releases of a lease that were not answered yet."""
        return [message for message in self.unsettled.values() if message.get("lease") == lease]

    def abandon(self, acquire: Message) -> Message:
        """Gives up an acquire whose answer may be on its way; returns the cancel to send."""
        self.unsettled[acquire["id"]] = acquire
        return self._cancel(acquire["id"])

    def abandon_blindly(self, acquire: Message) -> list[Message]:
        """Gives up an acquire that may never have been sent, or whose answer may be gone.

        The first cancel makes sure that it does not begin to move anybody's state now; the acquire
        itself asks for its answer once more, to hand back what was granted; the last cancel is for
        a daemon that does not remember the first.
        """
        return [self.abandon(acquire), acquire, self._cancel(acquire["id"])]

    def resend(self) -> list[Message]:
        """What to send on a resumed connection, before anything else."""
        messages: list[Message] = []
        for message in list(self.unsettled.values()):
            if message["t"] in _ASKING:
                messages += self.abandon_blindly(message)
            else:
                messages.append(message)
        return messages

    # -- what the daemon says

    def settle(self, answer: Message) -> tuple[Message, ...]:
        """Takes the answer to an unsettled request; returns what must be sent because of it."""
        message = self.unsettled.pop(answer.get("re", 0), None)
        lease = answer.get("lease")
        if message is None or message["t"] not in _ASKING or not isinstance(lease, str):
            return ()
        # The grant crossed the cancel on the wire: hand it back.
        release: Message = {"t": "release", "id": next(self.ids), "lease": lease}
        self.unsettled[release["id"]] = release
        return (release,)

    def receive(self, message: Message) -> Received:
        """Takes any message that is not the answer to a request somebody waits for."""
        kind = message.get("t")
        if kind is None:
            return Received(send=self.settle(message))
        if kind == "contended":
            self._contended(message)
        elif kind == "lost":
            return self._lost(message)
        elif isinstance(message.get("id"), int):
            refusal = error_reply(
                message["id"], ErrorCode.UNKNOWN_REQUEST, f"this client does not know {kind!r:.80}"
            )
            return Received(send=(refusal,))
        return Received()

    def _contended(self, message: Message) -> None:
        lease, waiters = str(message.get("lease")), message.get("waiters")
        count = waiters if isinstance(waiters, int) else 0
        grant = self.grants.get(lease)
        if grant is not None:
            grant.waiters = count
        else:
            self._early_notice(lease).waiters = count

    def _lost(self, message: Message) -> Received:
        lease, reason = str(message.get("lease")), str(message.get("reason", "no reason given"))
        grant = self.grants.get(lease)
        if grant is not None:
            return Received(lost=(self._lose(grant, reason),))
        self._early_notice(lease).reason = reason
        return Received()

    def _early_notice(self, lease: str) -> _Early:
        """Remembers what came between a grant and the moment its caller looks at it.

        Both may be read in one go by another thread. Notices about leases long gone end here as
        well; the oldest make room.
        """
        while len(self._early) >= _MAX_EARLY and lease not in self._early:
            del self._early[next(iter(self._early))]
        return self._early.setdefault(lease, _Early())

    def _lose(self, grant: Grant, reason: str) -> Grant:
        self.grants.pop(grant.lease, None)
        grant.state, grant.reason = LeaseState.LOST, reason
        return grant

    def _cancel(self, acquire_id: int) -> Message:
        return {"t": "cancel", "id": next(self.ids), "acquire": acquire_id}

    def _shared_grants(self) -> Iterable[Grant]:
        return [grant for grant in self.grants.values() if grant.shared]
