"""The links to the daemons of other hosts: made, kept, watched, and asked through.

Nothing here decides about devices. The core is told what becomes of links and hosts, and what the
core of another host says; in which order it happened is the order in which it is told.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from libtimeslice.errors import ProtocolError
from libtimeslice.protocol import EventsQuery, Message, parse_untrusted
from tsliced.config import PeerAddress
from tsliced.core.actions import Send
from tsliced.core.events import PeerConnected, PeerDisconnected, PeerEvent, PeerLost, PeerSaid
from tsliced.core.model import HostName
from tsliced.core.value import maker
from tsliced.host.history import Page
from tsliced.net import peer_codec
from tsliced.net.histories import Refuse, SendPage
from tsliced.net.listening import ListenError
from tsliced.net.peer_link import Identity, dial, receive_link
from tsliced.net.peer_liveness import Liveness, PeerState
from tsliced.net.peer_messages import (
    EVENTS,
    JOBS,
    Answer,
    Ask,
    Bye,
    Hello,
    PeerMessage,
    PeerRefused,
    Ping,
    Pong,
    Refusal,
    Say,
    check_agreement,
)
from tsliced.net.peer_stream import Link, PeerGone

BACKLOG: Final = 128
#: Looks at who is silent, in one heartbeat.
LOOKS: Final = 4
#: The same refusal is told again after so long, and of so many different ones.
REFUSAL_PAUSE_S: Final = 60.0
MAX_REFUSALS: Final = 256
#: After an accept that failed, for example because there is no file descriptor left.
ACCEPT_PAUSE_S: Final = 0.5

_make_said = maker(PeerSaid)
#: What of a client's request for events the other host gets.
_PASSED_ON: Final = ("since", "limit", "after", "before", "groups", "jobs", "kinds")


class Unanswered(NamedTuple):
    """Why a question to another host has no answer; `code` is one of the wire to clients."""

    code: str
    text: str


Answered = Callable[[Message | Unanswered], object]


class NoteWriter(Protocol):
    """Adds a line to the log and the history."""

    def __call__(self, kind: str, level: str, /, **facts: str | float | bool | None) -> None: ...


@dataclass(slots=True, eq=False)
class _Question:
    answered: Answered
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class _Peer:
    host: HostName
    address: PeerAddress
    liveness: Liveness
    link: Link | None = None
    hello: Hello | None = None
    #: The core was told that it is there, and hears what it says.
    is_heard: bool = False
    #: Why one of the two did not go on with the other, and when.
    refusal: str = ""
    refused_at: float = 0.0
    questions: dict[int, _Question] = field(default_factory=dict)
    #: Questions of its that are being answered.
    answering: int = 0
    #: When pings went out that are not answered yet, monotonic and Unix time.
    pings: dict[int, tuple[float, float]] = field(default_factory=dict)
    rtt_s: float | None = None
    #: How far its clock is ahead of this host's.
    clock_ahead_s: float | None = None


class Peers:
    """All other hosts of this one. All methods belong to the event loop."""

    def __init__(
        self,
        identity: Identity,
        addresses: Mapping[HostName, PeerAddress],
        *,
        post: Callable[[PeerEvent], object],
        note: NoteWriter,
        status: Callable[[], Message],
        events: Callable[[EventsQuery, SendPage, Refuse], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._settings = identity.settings
        self._post = post
        self._note = note
        self._encoder = peer_codec.Encoder()
        self._status = status
        self._events = events
        self._clock = clock
        self._random = Random()
        self._numbers = count(1)
        self._greeting = 0
        self._closed = False
        #: When each refusal was told last.
        self._told: dict[tuple[str, str], float] = {}
        now = clock()
        settings = identity.settings
        self._peers = {
            host: _Peer(
                host,
                address,
                Liveness(suspect_s=settings.suspect_s, lost_s=settings.lost_s, now=now),
            )
            for host, address in addresses.items()
        }

    # --- what it does by itself ---------------------------------------------------------------

    async def run(self, listener: socket.socket) -> None:
        """Keep the links, for ever. The listener stays its owner's."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._accept(listener, tasks), name="peers: accept")
            tasks.create_task(self._watch(), name="peers: watch")
            for peer in self._peers.values():
                if self._identity.host < peer.host:
                    tasks.create_task(self._keep(peer), name=f"peers: {peer.host}")

    def close(self) -> None:
        """Take leave of everybody, for the daemon ends."""
        self._closed = True
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.leave()

    def renew(self, addresses: Mapping[HostName, PeerAddress]) -> None:
        """After another configuration was read: see anew whether what must agree does."""
        if addresses.keys() != self._peers.keys():
            hosts = ", ".join(sorted(addresses.keys() ^ self._peers.keys()))
            text = f"waits for a restart: links to {hosts}, which groups name or no longer name"
            self._note("config", "warning", reason=text)
        for peer in self._peers.values():
            link, hello = peer.link, peer.hello
            if link is not None and hello is not None:
                ours = self._identity.hello(peer.host)
                try:
                    check_agreement(ours, hello, suspect_s=self._settings.suspect_s)
                except PeerRefused as exc:
                    link.drop(str(exc))

    async def _keep(self, peer: _Peer) -> None:
        """Connect to a host, again and again."""
        settings, pause_s = self._settings, self._settings.reconnect_min_s
        while not self._closed:
            began_at = self._clock()
            try:
                link, hello = await dial(self._identity, peer.host, peer.address)
                began_at = self._clock()
                await self._serve(peer, link, hello)
            except PeerGone as exc:
                peer.refusal = ""
                self._on_ended(peer, None, str(exc))
            except PeerRefused as exc:
                self._on_refused(peer.host, str(peer.address), exc)
                pause_s = settings.reconnect_max_s
            except Exception as exc:
                self._on_mistake(peer.host, exc)
                pause_s = settings.reconnect_max_s
            if self._clock() - began_at > settings.reconnect_max_s:
                # It went well for a while.
                pause_s = settings.reconnect_min_s
            # Hosts that lost the same switch do not come back at the same moment.
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, settings.reconnect_max_s)

    async def _accept(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        loop, failing = asyncio.get_running_loop(), False
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as exc:
                if not failing:
                    self._note("peers", "error", reason=f"cannot take connections: {exc.strerror}")
                failing = True
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            failing = False
            if self._greeting >= self._settings.max_greetings:
                text = f"{self._greeting} connections have not said yet who they are"
                self._on_refused(None, _name_of(sock), PeerRefused("too_many", text))
                sock.close()
                continue
            self._greeting += 1
            tasks.create_task(self._receive(sock), name="peers: greeting")

    async def _receive(self, sock: socket.socket) -> None:
        address = _name_of(sock)
        try:
            try:
                link, hello = await receive_link(self._identity, sock)
            finally:
                self._greeting -= 1
            await self._serve(self._peers[HostName(hello.host)], link, hello)
        except PeerGone:
            # Whoever looks whether a port is open does this; a host that is meant notices itself.
            return
        except PeerRefused as exc:
            self._on_refused(HostName(exc.host) if exc.host is not None else None, address, exc)
        except Exception as exc:
            self._on_mistake(address, exc)

    async def _watch(self) -> None:
        """Send signs of life, and see whose are missing."""
        heartbeat_s = self._settings.heartbeat_s
        interval_s = heartbeat_s / LOOKS
        ping_at, looked_at = self._clock(), self._clock()
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            gap_s = now - looked_at - interval_s
            looked_at = now
            for peer in self._peers.values():
                if gap_s > heartbeat_s:
                    # What others said meanwhile is still to be read.
                    peer.liveness.excuse(gap_s)
                elif peer.liveness.pass_time(now):
                    self._on_silent(peer)
                if now >= ping_at and peer.link is not None:
                    self._ping(peer, peer.link, now)
            if now >= ping_at:
                ping_at = now + heartbeat_s - interval_s / 2

    def _ping(self, peer: _Peer, link: Link, now: float) -> None:
        seq = next(self._numbers)
        peer.pings[seq] = (now, time.time())
        while len(peer.pings) > 8:
            del peer.pings[next(iter(peer.pings))]
        link.send(Ping(seq=seq))

    # --- one link -----------------------------------------------------------------------------

    async def _serve(self, peer: _Peer, link: Link, hello: Hello) -> None:
        """Take what a host says, until its connection ends."""
        if self._closed:
            link.close()
            return
        if (old := peer.link) is not None:
            # Of a daemon or a network that is gone: the newest connection counts.
            old.drop("it has connected again")
            self._forget(peer)
        anew = peer.hello is not None and peer.hello.incarnation != hello.incarnation
        peer.link, peer.hello, peer.refusal = link, hello, ""
        self._hear(peer, restarted=anew)
        if JOBS in hello.features:
            peer.is_heard = True
            self._post(
                PeerConnected(host=peer.host, boot=hello.boot, incarnation=hello.incarnation)
            )
        reason = ""
        try:
            await link.serve(partial(self._take, peer, link))
            reason = "its daemon was stopped"
        except PeerGone as exc:
            reason = str(exc)
        except PeerRefused as exc:
            self._on_refused(peer.host, link.address, exc)
            link.refuse(exc)
            reason = str(exc)
        finally:
            link.close()
            self._on_ended(peer, link, reason)

    def _take(self, peer: _Peer, link: Link, message: PeerMessage) -> bool:
        """Do what a message is about; return whether more may come."""
        if link is not peer.link:
            # Another one has taken its place.
            return False
        if not isinstance(message, Bye | Refusal):
            self._hear(peer)
        match message:
            case Say() if peer.is_heard:
                said = peer_codec.decode_untrusted(
                    message, speaker=peer.host, listener=self._identity.host
                )
                self._post(_make_said(host=peer.host, message=said))
            case Ping():
                link.send(Pong(seq=message.seq, at_unix=time.time()))
            case Pong():
                self._on_pong(peer, message)
            case Ask():
                self._answer(peer, link, message)
            case Answer():
                answer = message.body
                if answer is None:
                    text = f"{peer.host}: {message.error}"
                    self._settle(peer, message.id, Unanswered("unavailable", text))
                else:
                    self._settle(peer, message.id, answer)
            case Bye():
                return False
            case Refusal():
                raise PeerRefused(message.code, message.text, told=True)
            case _:
                raise PeerRefused("bad_message", f"{type(message).__name__} came out of turn")
        return True

    def _answer(self, peer: _Peer, link: Link, ask: Ask) -> None:
        match ask.what:
            case "status":
                try:
                    link.send(Answer(id=ask.id, body=self._status()))
                except PeerRefused as exc:
                    link.send(Answer(id=ask.id, error=str(exc)))
            case "events":
                self._answer_events(peer, link, ask)
            case what:
                link.send(Answer(id=ask.id, error=f"this host knows nothing of {what!r:.80}"))

    def _answer_events(self, peer: _Peer, link: Link, ask: Ask) -> None:
        def send(page: Page) -> bool:
            try:
                link.send(Answer(id=ask.id, body=page._asdict()))
            except PeerRefused:
                return False
            peer.answering -= 1
            return True

        def refuse(_code: str, text: str) -> None:
            peer.answering -= 1
            link.send(Answer(id=ask.id, error=text))

        peer.answering += 1
        # Each may read the disk.
        if peer.answering > self._settings.max_asks:
            refuse("would_exceed_limit", f"{peer.answering} questions wait for an answer")
            return
        try:
            query = parse_untrusted({**(ask.query or {}), "t": "events", "id": ask.id})
        except ProtocolError as exc:
            refuse("bad_request", str(exc))
            return
        assert isinstance(query, EventsQuery), "by its `t`"
        self._events(query, send, refuse)

    def _on_pong(self, peer: _Peer, pong: Pong) -> None:
        sent = peer.pings.pop(pong.seq, None)
        if sent is not None:
            peer.rtt_s = self._clock() - sent[0]
            peer.clock_ahead_s = pong.at_unix - (sent[1] + peer.rtt_s / 2)

    def _forget(self, peer: _Peer) -> None:
        peer.link = None
        peer.pings.clear()
        for ask in list(peer.questions):
            self._settle(peer, ask, self._absence(peer))
        if peer.is_heard:
            peer.is_heard = False
            self._post(PeerDisconnected(host=peer.host))

    # --- for the core -------------------------------------------------------------------------

    def deliver(self, sends: Iterable[Send]) -> None:
        """Say things to other hosts, each host's with one write; who has no link misses them."""
        bodies: dict[HostName, list[bytes]] = {}
        for send in sends:
            peer = self._peers.get(send.host)
            if peer is not None and peer.is_heard:
                bodies.setdefault(send.host, []).append(self._encoder.encode(send.message))
        for host, of_host in bodies.items():
            link = self._peers[host].link
            assert link is not None, "a host that is heard has a link"
            try:
                link.send_bodies(of_host)
            except PeerRefused as exc:
                # It would not know what it must, and not know that.
                self._note("peers", "error", host=host, reason=f"cannot be told all: {exc}")
                link.drop(f"what it has to be told does not fit into a frame: {exc}")

    # --- where hosts stand --------------------------------------------------------------------

    def _hear(self, peer: _Peer, *, restarted: bool = False) -> None:
        now, before = self._clock(), peer.liveness.state
        if before is PeerState.CONNECTED:
            peer.liveness.hear(now)
            return
        silent_s = peer.liveness.silent_s(now)
        peer.liveness.hear(now)
        assert peer.link is not None
        assert peer.hello is not None
        self._note(
            "peer_up",
            "info",
            host=peer.host,
            address=peer.link.address,
            incarnation=peer.hello.incarnation,
            silent_s=silent_s if before is not PeerState.AWAITED else None,
            restarted=restarted or None,
        )

    def _on_silent(self, peer: _Peer) -> None:
        if peer.liveness.state is PeerState.LOST:
            self._note("peer_lost", "error", host=peer.host, reason=self._reason(peer))
            if peer.link is not None:
                peer.link.drop("it is silent")
                self._forget(peer)
            self._post(PeerLost(host=peer.host))
        else:
            self._note("peer_suspect", "warning", host=peer.host, reason=self._reason(peer))

    def _on_ended(self, peer: _Peer, link: Link | None, reason: str) -> None:
        if link is not peer.link:
            # Another one has taken its place.
            return
        if peer.liveness.close(reason, self._clock()) and not self._closed:
            self._note("peer_suspect", "warning", host=peer.host, reason=reason)
        self._forget(peer)

    def _on_refused(self, host: HostName | None, address: str, refusal: PeerRefused) -> None:
        """Tell it, unless the same was told a moment ago: anybody may connect again and again."""
        text, now = str(refusal), self._clock()
        if host is not None:
            self._peers[host].refusal, self._peers[host].refused_at = text, now
        key = (host or address.rpartition(":")[0], f"{refusal.code} {text}")
        told_at = self._told.get(key)
        if told_at is not None and now - told_at < REFUSAL_PAUSE_S:
            return
        if told_at is None and len(self._told) >= MAX_REFUSALS:
            recent = {k: at for k, at in self._told.items() if now - at < REFUSAL_PAUSE_S}
            self._told = recent
            if len(recent) >= MAX_REFUSALS:
                return
        self._told[key] = now
        by = "it" if refusal.told else "this host"
        self._note(
            "peer_refused",
            "warning",
            host=host,
            address=address,
            by=by,
            code=refusal.code,
            reason=text,
        )

    def _on_mistake(self, whose: str, exc: Exception) -> None:
        """A bug of this side: one connection ends by it, and no more than that."""
        refusal = PeerRefused("internal", f"a mistake in this daemon: {exc!r}")
        self._on_refused(None, f"{whose}:", refusal)

    def _reason(self, peer: _Peer) -> str:
        if peer.liveness.state is PeerState.CONNECTED:
            return ""
        # Whoever is refused comes again; a refusal that was not repeated is of the past.
        lasts_s = self._settings.lost_s + 2 * self._settings.reconnect_max_s
        if peer.refusal and self._clock() - peer.refused_at < lasts_s:
            return peer.refusal
        reason = peer.liveness.reason
        if self._identity.host > peer.host and peer.hello is None:
            return f"{reason}; it is {peer.host} that connects: see its peers.hosts and its log"
        return reason

    # --- for clients of this daemon -----------------------------------------------------------

    def shown(self) -> list[Message]:
        """Return where each host stands, for `status`."""
        return [self._shown(peer) for _, peer in sorted(self._peers.items())]

    def _shown(self, peer: _Peer) -> Message:
        now, up = self._clock(), peer.liveness.state is PeerState.CONNECTED
        return {
            "host": peer.host,
            "address": str(peer.address),
            "state": peer.liveness.state.value,
            "since_s": now - peer.liveness.since,
            "incarnation": peer.hello.incarnation if peer.hello is not None else None,
            "version": peer.hello.release if peer.hello is not None else None,
            "rtt_s": peer.rtt_s if up else None,
            "clock_ahead_s": peer.clock_ahead_s if up else None,
            "reason": self._reason(peer) or None,
        }

    def ask_status(self, host: str, answered: Answered) -> None:
        """Ask a host for its status; `answered` is called exactly once, perhaps at once."""
        self._ask(host, "status", answered)

    def ask_events(self, host: str, query: EventsQuery, answered: Answered) -> None:
        """Ask a host for a page of its history, as `ask_status` does; it has its own limits."""
        chosen = {field: getattr(query, field) for field in _PASSED_ON}
        self._ask(host, EVENTS, answered, {k: v for k, v in chosen.items() if v is not None})

    def _ask(self, host: str, what: str, answered: Answered, query: Message | None = None) -> None:
        peer = self._peers.get(HostName(host))
        if peer is None:
            known = ", ".join(sorted(self._peers)) or "none"
            answered(Unanswered("not_found", f"there is no link to {host!r}; there are: {known}"))
        elif peer.link is None or peer.liveness.state is not PeerState.CONNECTED:
            answered(self._absence(peer))
        elif peer.hello is None or what not in peer.hello.features:
            release = peer.hello.release if peer.hello is not None else "an unknown version"
            text = f"{host} runs {release}, which does not tell of its {what}; update it"
            answered(Unanswered("unavailable", text))
        elif len(peer.questions) >= self._settings.max_asks:
            text = f"{len(peer.questions)} questions to {host} wait for an answer: peers.max_asks"
            answered(Unanswered("would_exceed_limit", text))
        else:
            ask, limit_s = next(self._numbers), self._settings.answer_timeout_s
            late = Unanswered("unavailable", f"{host} did not answer within {limit_s:g} s")
            loop = asyncio.get_running_loop()
            timer = loop.call_later(limit_s, self._settle, peer, ask, late)
            peer.questions[ask] = _Question(answered, timer)
            peer.link.send(Ask(id=ask, what=what, query=query))

    def _settle(self, peer: _Peer, ask: int, answer: Message | Unanswered) -> None:
        question = peer.questions.pop(ask, None)
        if question is not None:
            question.timer.cancel()
            question.answered(answer)

    def _absence(self, peer: _Peer) -> Unanswered:
        state, reason = peer.liveness.state.value, self._reason(peer)
        return Unanswered("unavailable", f"{peer.host} is {state}: {reason or 'it just left'}")


def listen_for_peers(address: PeerAddress) -> socket.socket:
    """Return a socket that listens where others are to connect. Raises `ListenError`."""
    listener: socket.socket | None = None
    try:
        kinds: Any = socket.getaddrinfo(
            address.address, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = kinds[0]
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as exc:
        if listener is not None:
            listener.close()
        text = f"cannot listen for other hosts at {address}: {exc.strerror or exc}"
        raise ListenError(f"{text}; see peers.listen and peers.hosts") from exc
    listener.setblocking(False)
    return listener


def _name_of(sock: socket.socket) -> str:
    with suppress(OSError):
        name = sock.getpeername()
        return f"{name[0]}:{name[1]}"
    return "unknown"
