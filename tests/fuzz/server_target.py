"""What is fuzzed: the daemon's socket side and its core, fed with whatever clients may send.

The server, its connections, the driver, the core and the journal are the real ones and run in this
process. A connection's transport is a stand-in, so that no time goes into the kernel and so that
what the daemon sends is seen at once; devices and backend are those of `in_process`.

Whatever comes, this must hold, and `AssertionError` says that it did not:

* no exception gets out of a connection or ends a task, and no invariant of the core breaks;
* all that the daemon sends is frames, each refusal has a code of the protocol, and none of them is
  ``internal``;
* when the clients are gone, nothing of them is left: no connection, session, lease, place in a
  queue or task.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from choices import Choices
from golden import Golden, all_frames, frame_of
from in_process import D1, D2, GROUPS, MIB, Inside, inside, process_of

from libtimeslice.protocol import MAX_FRAME, ErrorCode, FrameReader, Message
from tsliced.config import ServerLimits
from tsliced.core.events import SessionClosed
from tsliced.core.model import CoreLimits, ProcessId
from tsliced.host.allocations import Allocations
from tsliced.host.memory import HostMemory
from tsliced.host.slurm import SlurmError
from tsliced.net.allotment import Allotment
from tsliced.net.authority import Authority
from tsliced.net.connection import Connection
from tsliced.net.enrolment import Enrolment
from tsliced.net.operations import Operations
from tsliced.net.server import Server
from tsliced.net.shares import Shares
from tsliced.observe.details import Details
from tsliced.observe.status import StatusPage
from tsliced.observe.told import Told, ToldLimits
from tsliced.sdnotify import Notifier

LIMIT_S = 60.0
CONNECTIONS = 4
#: So small that the fuzzer reaches them.
SERVER_LIMITS = ServerLimits(
    max_frame_bytes=1 << 16,
    max_pending_requests=8,
    max_send_buffer_bytes=1 << 16,
    max_clients=CONNECTIONS,
    reserved_clients=0,
    max_sessions=6,
)
CORE_LIMITS = CoreLimits(
    retry_min_s=0.01,
    retry_max_s=0.05,
    max_evict_tries=3,
    max_waiters=6,
    max_leases_per_session=4,
    max_answers=8,
)
KEPT = [frame for frame in all_frames() if frame.sender == "client"]
HELLO: Message = {"t": "hello", "version": [1, 0], "client": "fuzz", "job": "golden"}
#: What the clients of each connection say first.
HELLOS: list[Message] = [
    HELLO,
    {**HELLO, "job": "other"},
    {**HELLO, "role": "agent", "caps": ["quiesce", "empty_cache"]},
    {**HELLO, "role": "tool", "job": None},
]
NAMES = {str(frame.message.get("t")) for frame in KEPT}
#: Fields of an answer that say, when they are true, what came of the request.
TELLING = ("resumed", "cancelled", "deferred", "contended", "restored", "leases")
CODES = {str(code) for code in ErrorCode} - {"internal"}
#: What the daemon logs of its own mistakes. (Other errors are for the operator: a job is pinned.)
#: What the daemon goes on with when the hook that told of a job is gone.
SEARCH = "finding the sentinel of a Slurm job"
ERROR_LINE = re.compile(
    r"^\S+ ERROR +(?:bug|broken_invariant|journal|not_ended|story|unwatched) .*$", re.MULTILINE
)
#: What a field may hold, besides what it should.
VALUES: list[object] = [
    *(None, True, False, 0, 1, 2, 3, -1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)),
    *(0.0, -0.5, 1e9, 1e300, float("nan"), float("inf"), 0.001),
    *("", "a", "golden", "other", "g1", "g2", "g3", "x" * 129, "\x1b[31m", "a\nb", "\u202e", "é"),
    *(b"", b"\xff" * 300, bytes(16), [], ["g1"], ["g2", "g1"], ["g1", "g1"], [["g1"]], [None]),
    *({}, {"": {}}, {"a": 1}, {"code": "x", "message": "y"}, [0] * 100, {"step": float("nan")}),
    *("all", "first", "client", "agent", "tool", "quiesce", ["quiesce", "empty_cache"], [1, 0]),
]


class Wire(asyncio.Transport):
    """The daemon's end of a connection that leads nowhere."""

    def __init__(self, sock: socket.socket, protocol: Connection) -> None:
        super().__init__()
        self._sock = sock
        self._protocol: Connection | None = protocol
        self._reader = FrameReader()
        self._closing = False
        #: The client does not read: so much waits for it.
        self._unread: int | None = None
        self._high = 1 << 16
        self.heard: list[Message] = []
        #: What its client asked for last, and what it was granted last.
        self.acquire = 1
        self.lease = "none.1"
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        self._high = high

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._unread is not None:
            self.stop_reading(self._unread + len(data))
        self.heard += self._reader.feed(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self._unread or 0

    def stop_reading(self, unread: int | None) -> None:
        """Let so many bytes wait to be read; None: the client reads again."""
        was_full = self.get_write_buffer_size() > self._high
        self._unread = unread
        is_full = self.get_write_buffer_size() > self._high
        if self._protocol is not None and is_full and not was_full:
            self._protocol.pause_writing()
        elif self._protocol is not None and was_full and not is_full:
            self._protocol.resume_writing()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def feed(self, data: bytes) -> None:
        """Let bytes arrive."""
        if not self._closing and self._protocol is not None:
            self._protocol.data_received(data)

    def _lose(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(None)


@dataclass(slots=True)
class Known:
    """What the clients of one input were told, to be used in what they say next."""

    leases: list[str] = field(default_factory=lambda: ["none.1"])
    sessions: list[tuple[str, bytes]] = field(default_factory=lambda: [("f" * 16, bytes(16))])
    asked: int = 0


class ServerTarget:
    """Runs inputs against one server; see the top of the module."""

    def __init__(
        self,
        daemon: Inside,
        server: Server,
        shares: Shares,
        page: StatusPage,
        pids: list[int],
    ) -> None:
        self.frames = 0
        #: What was answered to what, ever: an input that adds to it is worth being varied.
        self.behaviours: set[str] = set()
        self._daemon = daemon
        self._server = server
        self._shares = shares
        self._page = page
        self._pids = pids
        self._wires: list[Wire | None] = [None] * CONNECTIONS
        self._known = Known()
        self._names: dict[int, str] = {}
        self._at_rest = asyncio.all_tasks()
        self._peer, self._sock = socket.socketpair()

    def close(self) -> None:
        self._peer.close()
        self._sock.close()

    async def run(self, data: bytes) -> None:
        """Live through one input and see that nothing is left of it."""
        choices, self._known = Choices(data), Known()
        while not choices.spent:
            self._step(choices)
            if choices.below(4) == 0:
                await asyncio.sleep(0)
            self._check_daemon()
        await self._end()

    # --- what clients do ----------------------------------------------------------------------

    def _step(self, choices: Choices) -> None:
        index, what = choices.below(CONNECTIONS), choices.below(16)
        wire = self._wires[index]
        if wire is not None and what == 4:
            wire.close()
        if wire is None or wire.is_closing():
            wire = self._wires[index] = Wire(self._sock, Connection(self._server))
            if what < 14 and what != 4:
                self._send(wire, HELLOS[index])
        if what == 0:
            wire.close()
        elif what == 1:
            wire.feed(choices.some_bytes())
        elif what == 2:
            body = choices.some_bytes()
            self._send_bytes(wire, len(body).to_bytes(4, "big") + body)
        elif what == 3:
            wire.stop_reading((0, None, 1 << 17)[choices.below(3)])
        elif what == 4:
            session, secret = choices.one_of(self._known.sessions[-4:])
            self._send(wire, {**HELLO, "session": session, "secret": secret})
        elif what == 5:
            # In two reads: what is between them belongs to others.
            frame = frame_of(self._message(choices, wire))
            wire.feed(frame[: len(frame) // 2])
            self._send_bytes(wire, frame[len(frame) // 2 :])
        elif what == 6:
            groups = (["g1"], ["g2"], ["g1", "g2"], None)[choices.below(4)]
            self._send(wire, self._numbered({"t": "acquire", "groups": groups}, wire))
        elif what == 7:
            self._send(wire, self._numbered({"t": "release", "lease": wire.lease}, wire))
        elif what == 8:
            self._send(wire, self._numbered({"t": "cancel", "acquire": wire.acquire}, wire))
        else:
            self._send(wire, self._message(choices, wire))
        self._listen(wire)

    def _numbered(self, message: Message, wire: Wire) -> Message:
        self._known.asked += 1
        if message["t"] == "acquire":
            wire.acquire = self._known.asked
        return {**message, "id": self._known.asked}

    def _message(self, choices: Choices, wire: Wire) -> Message:
        """A kept message, as it was or with a few fields changed."""
        kept: Golden = choices.one_of(KEPT)
        message = dict(kept.message)
        if "id" in message:
            message = self._numbered(message, wire)
        for name in ("lease", "acquire", "pid"):
            if name in message:
                message[name] = self._live(choices, name)
        for _ in range((0, 0, 1, 1, 2, 3)[choices.below(6)]):
            name = choices.one_of([*message, "more"])
            if choices.below(8) == 0:
                message.pop(name, None)
            else:
                message[name] = choices.one_of(VALUES)
        return message

    def _live(self, choices: Choices, name: str) -> object:
        if name == "lease":
            return choices.one_of(self._known.leases[-3:])
        if name == "pid":
            return choices.one_of(self._pids)
        return max(1, self._known.asked - choices.below(8))

    def _send(self, wire: Wire, message: Message) -> None:
        number, name = message.get("id"), message.get("t")
        if number.__class__ is int and name.__class__ is str and name in NAMES:
            self._names[number] = name
        frame = frame_of(message)
        assert len(frame) < MAX_FRAME
        self._send_bytes(wire, frame)

    def _send_bytes(self, wire: Wire, data: bytes) -> None:
        self.frames += 1
        wire.feed(data)

    # --- what the daemon says ------------------------------------------------------------------

    def _listen(self, wire: Wire) -> None:
        heard, wire.heard = wire.heard, []
        for message in heard:
            self._hear(message, wire)

    def _hear(self, message: Message, wire: Wire) -> None:
        told = message if message.get("t") == "error" else message.get("err")
        if told is not None:
            assert told["code"] in CODES, message
            assert isinstance(told["message"], str), message
        kind = message.get("t") or self._names.get(message["re"], "?")
        outcome = [told["code"]] if told is not None else [f for f in TELLING if message.get(f)]
        self.behaviours.add(" ".join([kind, *outcome]))
        if kind == "welcome":
            self._known.sessions.append((message["session"], message["secret"]))
        lease = message.get("lease")
        if isinstance(lease, str) and "re" in message:
            wire.lease = lease
            if lease not in self._known.leases:
                self._known.leases.append(lease)

    # --- what must hold ------------------------------------------------------------------------

    def _check_daemon(self) -> None:
        assert self._daemon.driver.broken is None, self._daemon.driver.broken
        for wire in self._wires:
            if wire is not None and wire.heard:
                self._listen(wire)

    async def _end(self) -> None:
        """Have all clients leave, one way or the other, and see that nothing is left of them."""
        for wire in self._wires:
            if wire is not None:
                wire.close()
        self._wires = [None] * CONNECTIONS
        await asyncio.sleep(0)
        for session in list(self._daemon.machine.leasing.sessions):
            self._daemon.driver.post(SessionClosed(session=session))
        async with asyncio.timeout(LIMIT_S):
            while self._left():  # noqa: ASYNC110 - no event announces that nothing is left
                await asyncio.sleep(0)
        self._check_daemon()
        self._daemon.machine.check_invariants()
        log = self._daemon.log
        errors = ERROR_LINE.findall(log.getvalue())
        assert not errors, errors
        log.seek(0)
        log.truncate()
        self._names.clear()

    def _left(self) -> list[str]:
        """Name what is there of clients that are gone."""
        server, machine = self._server, self._daemon.machine
        left = [
            *(f"connection {c.peer}" for c in server._connections),
            *(f"client {session}" for session in server._clients),
            *(f"share of uid {uid}" for uid in self._shares._shares),
            *(f"buffers of {hoard}" for hoard in self._shares._hoards),
            *(f"session {session}" for session in machine.leasing.sessions),
        ]
        tasks = asyncio.all_tasks() - self._at_rest - {asyncio.current_task()}
        # It is about a job that Slurm may yet begin, and ends within a minute.
        tasks = {task for task in tasks if task.get_name() != SEARCH}
        if left or tasks:
            return left + [f"task {task.get_name()}" for task in tasks]
        return [
            f"group {group['name']} {group['state']}"
            for group in self._page.status()["groups"]
            if group["waiters"] or group["holder"] or group["next"]
        ]


@contextmanager
def nobody_is_signalled() -> Iterator[None]:
    """A fuzzer may name any process of this machine as a rank: none of them shall be ended."""
    real: Callable[..., None] = signal.pidfd_send_signal
    signal.pidfd_send_signal = lambda *_arguments: None
    try:
        yield
    finally:
        signal.pidfd_send_signal = real


@contextmanager
def ranks() -> Iterator[list[ProcessId]]:
    """Processes that the fuzzer's jobs may have as ranks."""
    with ExitStack() as stack:
        yield [stack.enter_context(process_of(name)) for name in ("golden", "other")]


def nobody_knows(id: str, *, limit_s: float) -> NoReturn:
    """Stands in for a controller that is away; there is none to be asked a million times."""
    raise SlurmError("there is no Slurm here")


@asynccontextmanager
async def server_target(directory: Path, of: list[ProcessId]) -> AsyncIterator[ServerTarget]:
    """Runs a server that starts with an empty journal in a directory that is there."""
    with nobody_is_signalled():
        async with inside(directory, limits=CORE_LIMITS, log_level="error") as daemon:
            for process, device in zip(of, (D1, D2), strict=True):
                daemon.devices.put(process, MIB, device)
            around = daemon.driver.around
            authority = Authority(GROUPS, [], "no-such-group")
            page = StatusPage(
                machine=daemon.machine,
                scanner=around.scanner,
                inventory=(),
                backend="cuda",
                memory=HostMemory(),
                reserved_bytes=around.ledgers.host.promised,
            )
            shares = Shares(SERVER_LIMITS, descriptors=1024, watched=lambda: daemon.driver.watched)
            details = Details(machine=daemon.machine, status=page)
            told = Told(ToldLimits(), daemon.driver.write)
            server = Server(
                daemon.driver,
                SERVER_LIMITS,
                authority=authority,
                membership=around.membership,
                enrolment=Enrolment(daemon.driver, authority, around.membership, around.scanner),
                operations=Operations(daemon.driver, authority, details),
                allotment=Allotment(
                    daemon.driver, authority, Allocations(), details, ask=nobody_knows
                ),
                status=page,
                shares=shares,
                vault=Notifier({}),
                told=told,
            )
            daemon.driver.clients = server
            pids = [*(process.pid for process in of), os.getpid(), 1, (1 << 22) - 1]
            target = ServerTarget(daemon, server, shares, page, pids)
            try:
                yield target
            finally:
                target.close()
