"""A daemon's links in a test: one side of them, and somebody who speaks as a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from libtimeslice.protocol import EventsQuery, Message
from tsliced.config import PeerAddress, PeerSettings
from tsliced.core.events import PeerEvent
from tsliced.core.model import HostName
from tsliced.net.histories import Refuse, SendPage
from tsliced.net.peer_auth import Credentials, Exchange
from tsliced.net.peer_link import Identity
from tsliced.net.peer_messages import (
    FEATURES,
    NONCE_BYTES,
    PEER_VERSION,
    Challenge,
    Frames,
    Greeting,
    Hello,
    PeerMessage,
    Proof,
    Refusal,
)
from tsliced.net.peers import Peers, Unanswered, listen_for_peers

SECRET = b"a key that both hosts have: 32 bytes."
SETTINGS = PeerSettings(
    auth="psk",
    heartbeat_s=0.1,
    suspect_s=5.0,
    lost_s=10.0,
    greeting_timeout_s=10.0,
    reconnect_min_s=0.01,
    reconnect_max_s=0.1,
    max_greetings=3,
)
N1, N2 = HostName("n1"), HostName("n2")


Run = Callable[[Awaitable[None]], None]


def _no_history(_query: EventsQuery, _send: SendPage, refuse: Refuse) -> None:
    refuse("unavailable", "nothing is recorded")


@dataclass
class Side:
    """One daemon's links, and what it told of them."""

    host: HostName
    settings: PeerSettings = SETTINGS
    credentials: Credentials = field(default=Credentials(auth="psk", secret=SECRET))
    status: Callable[[], Message] = dict
    #: Answers other hosts' questions about its history.
    history: Callable[[EventsQuery, SendPage, Refuse], object] = _no_history
    features: tuple[str, ...] = FEATURES
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    events: list[PeerEvent] = field(default_factory=list)
    #: Is told as the core is; left out: `events` are collected.
    post: Callable[[PeerEvent], object] | None = None

    def note(self, kind: str, level: str, /, **facts: str | float | bool | None) -> None:
        self.notes.append((kind, {"level": level, **facts}))

    def hello(self, _other: HostName) -> Hello:
        return Hello(
            host=self.host,
            incarnation=f"{self.host}/1",
            release="0",
            features=self.features,
            cluster="",
            heartbeat_s=self.settings.heartbeat_s,
            groups={},
        )

    @contextlib.asynccontextmanager
    async def serve(self, **others: PeerAddress) -> AsyncIterator[tuple[Peers, PeerAddress]]:
        addresses = {HostName(name): address for name, address in others.items()}
        identity = Identity(
            host=self.host,
            settings=self.settings,
            credentials=self.credentials,
            hello=self.hello,
            allowed=frozenset(addresses),
        )
        peers = Peers(
            identity,
            addresses,
            post=self.post or self.events.append,
            note=self.note,
            status=self.status,
            events=self.history,
        )
        listener = listen_for_peers(PeerAddress("127.0.0.1", 0))
        task = asyncio.create_task(peers.run(listener))
        try:
            yield peers, PeerAddress(*listener.getsockname()[:2])
        finally:
            peers.close()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            listener.close()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self.notes if name == kind]


NOBODY = PeerAddress("127.0.0.1", 1)


def state(peers: Peers) -> str:
    return str(peers.shown()[0]["state"])


async def ask(peers: Peers, host: str) -> Message | Unanswered:
    answer: asyncio.Future[Message | Unanswered] = asyncio.get_running_loop().create_future()
    peers.ask_status(host, answer.set_result)
    return await answer


async def ask_events(peers: Peers, host: str, **query: Any) -> Message | Unanswered:
    answer: asyncio.Future[Message | Unanswered] = asyncio.get_running_loop().create_future()
    wanted = EventsQuery(
        **{"id": 1, "since": None, "follow": False, "limit": 10, "host": host, **query}
    )
    peers.ask_events(host, wanted, answer.set_result)
    return await answer


class Raw:
    """Somebody who speaks to a daemon as a test wants it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.frames = Frames(max_bytes=1 << 20)
        self.reader, self.writer = reader, writer
        self.sent: list[bytes] = []

    def send(self, message: PeerMessage) -> None:
        frame = self.frames.encode(message)
        self.sent.append(frame)
        self.writer.write(frame)

    async def receive(self) -> PeerMessage:
        length = self.frames.length_untrusted(await self.reader.readexactly(4))
        return self.frames.decode_untrusted(await self.reader.readexactly(length))

    async def refusal(self) -> Refusal:
        while not isinstance(message := await self.receive(), Refusal):
            pass
        return message

    async def greet(self, *, secret: bytes = SECRET, nonce: bytes = b"", to: str = "n2") -> Frames:
        """Goes through the greeting as n1, up to the keys."""
        nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self.send(Greeting(version=PEER_VERSION, auth="psk", host="n1", to=to, nonce=nonce))
        challenge = await self.receive()
        assert isinstance(challenge, Challenge)
        exchange = Exchange(
            secret=secret,
            dialer="n1",
            acceptor="n2",
            dialer_nonce=nonce,
            acceptor_nonce=challenge.nonce,
        )
        self.send(Proof(proof=exchange.proof_of_dialer()))
        self.frames.use_keys(sending=exchange.key_of_dialer(), receiving=exchange.key_of_acceptor())
        return self.frames


@contextlib.asynccontextmanager
async def stranger(address: PeerAddress, tls: ssl.SSLContext | None = None) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection(*address, ssl=tls)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
