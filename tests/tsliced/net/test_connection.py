"""One connection: what comes in, what goes out, and who is let go."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from in_process import LIMIT_S, until

from libtimeslice.protocol import FrameReader, Hello, Message, Ping, Request, encode
from tsliced.config import ServerLimits
from tsliced.core.model import SessionId
from tsliced.net.connection import MUCH_BYTES, SO_PEERPIDFD, Connection, peer_of

HELLO: Message = {"t": "hello", "version": [1, 0], "client": "test", "caps": [], "job": "a"}


class FakeDesk:
    """Takes everything in."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.refusal: str | None = None
        self.connections: list[Connection] = []
        self.heard: list[Request] = []
        self.closed: list[Connection] = []
        self.hoards: dict[Connection, None] = {}

    def admit(self, connection: Connection) -> str | None:
        self.connections.append(connection)
        return self.refusal

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        self.heard.append(hello)
        connection.session = SessionId("s")

    def on_request(self, connection: Connection, request: Request) -> None:
        self.heard.append(request)

    def on_buffered(self, connection: Connection, *, much: bool) -> None:
        if much:
            self.hoards[connection] = None
        else:
            self.hoards.pop(connection, None)

    def on_closed(self, connection: Connection) -> None:
        self.closed.append(connection)


class Client:
    """The other end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()

    async def send(self, *messages: Message) -> None:
        data = b"".join(map(encode, messages))
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def read_all(self) -> list[Message]:
        """Return everything that comes until the other side closes."""
        messages: list[Message] = []
        while data := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16):
            messages += self._reader.feed(data)
        return messages


@asynccontextmanager
async def serving(tmp_path: Path, desk: FakeDesk) -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: Connection(desk), path=str(tmp_path / "s"))
    async with server:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, str(tmp_path / "s"))
            yield Client(sock)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def tell(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[Callable[[FakeDesk, Client], Awaitable[None]], FakeDesk], None]:
    """Runs a story on a connection, with either event loop."""

    def run(story: Callable[[FakeDesk, Client], Awaitable[None]], desk: FakeDesk) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S), serving(tmp_path, desk) as client:
                await story(desk, client)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(limited())

    return run


Tell = Callable[[Callable[[FakeDesk, Client], Awaitable[None]], FakeDesk], None]


def test_who_connects_is_known_from_the_kernel_g10(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        await client.send({**HELLO, "pid": 1, "uid": 12345})
        await until(lambda: desk.heard, "it is heard")
        peer = desk.connections[0].peer
        assert peer is not None
        assert (peer.process.pid, peer.uid) == (os.getpid(), os.getuid())

    tell(story, FakeDesk(ServerLimits()))


def test_messages_that_come_together_are_heard_in_order(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        await client.send(HELLO, *({"t": "ping", "id": number} for number in range(1, 50)))
        await until(lambda: len(desk.heard) == 50, "all are heard")
        assert [r.id for r in desk.heard if isinstance(r, Ping)] == list(range(1, 50))

    tell(story, FakeDesk(ServerLimits()))


def test_what_comes_after_a_mistake_is_not_heard(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        await client.send({"t": "ping", "id": 1}, HELLO)
        (message,) = await client.read_all()
        assert message["code"] == "bad_request"
        assert desk.heard == []
        await until(lambda: desk.closed, "the desk hears of the end")

    tell(story, FakeDesk(ServerLimits()))


def test_who_finds_no_room_is_told_so(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        (message,) = await client.read_all()
        assert (message["code"], message["message"]) == ("would_exceed_limit", "it is full")

    desk = FakeDesk(ServerLimits())
    desk.refusal = "it is full"
    tell(story, desk)


def test_who_says_nothing_is_let_go_in_time_g9(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        (message,) = await client.read_all()
        assert "0.05 s" in message["message"]

    tell(story, FakeDesk(ServerLimits(handshake_timeout_s=0.05)))


def test_after_the_hello_there_is_no_hurry(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        await client.send(HELLO)
        await until(lambda: desk.heard, "it is heard")
        await asyncio.sleep(0.1)
        assert desk.connections[0].open

    tell(story, FakeDesk(ServerLimits(handshake_timeout_s=0.05)))


def test_nothing_is_heard_between_hello_and_welcome(tell: Tell) -> None:
    class SlowDesk(FakeDesk):
        """Does not know yet whom it has before it."""

        def on_hello(self, connection: Connection, hello: Hello) -> None:
            self.heard.append(hello)

    async def story(desk: FakeDesk, client: Client) -> None:
        await client.send(HELLO, HELLO)
        (message,) = await client.read_all()
        assert message["code"] == "bad_request"
        assert "welcome" in message["message"]
        assert len(desk.heard) == 1

    tell(story, SlowDesk(ServerLimits()))


def test_much_that_waits_in_either_direction_is_known_until_it_is_gone_g9(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        await client.send(HELLO)
        await until(lambda: desk.heard, "it is heard")
        (connection,) = desk.connections
        assert desk.hoards == {}
        frame = encode({"t": "ping", "id": 1, "more": "x" * (1 << 19)})
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client.sock, frame[:-1])
        await until(lambda: connection in desk.hoards, "a part of a frame is there")
        assert connection.buffered_bytes > MUCH_BYTES
        await loop.sock_sendall(client.sock, frame[-1:])
        await until(lambda: not desk.hoards, "the frame is complete")
        for _ in range(4):
            connection.send({"t": "event", "text": "x" * (1 << 19)})
        await until(lambda: connection in desk.hoards, "it does not read")
        assert connection.buffered_bytes > MUCH_BYTES
        reading = asyncio.create_task(client.read_all())
        await until(lambda: not desk.hoards, "it has read")
        connection.drop()
        await until(lambda: desk.closed, "it is gone")
        reading.cancel()

    tell(story, FakeDesk(ServerLimits()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose the next pid")
def test_a_process_that_got_the_pid_of_one_that_connected_is_not_taken_for_it_g10(
    tmp_path: Path,
) -> None:
    if not has_peer_pidfd():
        pytest.skip("the kernel has no SO_PEERPIDFD; it came with Linux 6.5")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(8)
        for _ in range(100):
            child = os.fork()
            if child == 0:
                socket.socket(socket.AF_UNIX).connect(str(tmp_path / "s"))
                os._exit(0)
            os.waitpid(child, 0)
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(child - 1))
            successor = subprocess.Popen(["sleep", "600"])
            sock, _ = listening.accept()
            with sock:
                peer = peer_of(sock)
            successor.kill()
            successor.wait(LIMIT_S)
            assert peer is None
            if successor.pid == child:
                return
    pytest.fail("another process always got the pid")


def has_peer_pidfd() -> bool:
    one, other = socket.socketpair()
    with one, other:
        try:
            os.close(one.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
        return True


def test_a_message_longer_than_a_frame_is_not_sent_and_the_next_one_is(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        await until(lambda: desk.connections, "it is connected")
        connection = desk.connections[0]
        assert not connection.send({"t": "event", "text": "x" * (1 << 20)})
        assert connection.send({"t": "event"})
        connection.close()
        assert await client.read_all() == [{"t": "event"}]
        assert connection.send({"t": "event"}), "to nobody, which is not the message's fault"

    tell(story, FakeDesk(ServerLimits()))


def test_one_who_does_not_read_is_dropped_and_not_before_it_has_its_share_g9(tell: Tell) -> None:
    async def story(desk: FakeDesk, client: Client) -> None:
        await until(lambda: desk.connections, "it is connected")
        connection = desk.connections[0]
        half = {"t": "event", "text": "x" * (1 << 19)}
        connection.send(half)
        assert connection.open, "a single message may be larger than what may wait"
        for _ in range(100):
            connection.send(half)
        await until(lambda: desk.closed, "the desk hears of it")
        await until(lambda: not connection.open, "it is dropped")

    tell(story, FakeDesk(ServerLimits(max_send_buffer_bytes=1 << 16)))


def test_one_who_is_dead_by_the_time_it_is_let_in_is_not_admitted(tmp_path: Path) -> None:
    async def story() -> None:
        desk = FakeDesk(ServerLimits())
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            listening.listen(8)
            program = f"import socket; socket.socket(1).connect({str(tmp_path / 's')!r})"
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
            assert await process.wait() == 0
            listening.setblocking(False)
            seen: list[Connection] = []

            def make() -> Connection:
                seen.append(Connection(desk))
                return seen[-1]

            server = await loop.create_unix_server(make, sock=listening)
            async with server:
                await until(lambda: seen, "it is let in")
                await until(lambda: not seen[0].open, "it is gone")
            assert desk.connections == []

    asyncio.run(story())
