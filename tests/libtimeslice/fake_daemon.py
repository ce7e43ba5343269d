"""A small daemon for tests of the client: real socket, real threads, the wire by `protocol`.

It arbitrates groups first come, first served, keeps sessions over lost connections and over its own
restarts, and answers a repeated request as it answered the first. Faults are scripted: `intercept`
sees each message first, `lose_answer_to` hangs up where an answer was due.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libtimeslice.errors import ProtocolError
from libtimeslice.lease import LeaseView
from libtimeslice.protocol import (
    Ack,
    Acquire,
    Bye,
    Cancel,
    FrameReader,
    Hello,
    LastTurn,
    Message,
    Ping,
    Register,
    Release,
    Reply,
    StatusQuery,
    encode,
    error_message,
    error_reply,
    parse_untrusted,
    reply,
)
from libtimeslice.session import LeaseState

LIMIT_S = 10.0


class Background:
    """A call in a thread, whose outcome is fetched with a limit."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def running(self) -> bool:
        return self._thread.is_alive()


def state_of(lease: LeaseView) -> LeaseState:
    """A lease's state now: a type checker takes an attribute to keep what was seen in it."""
    return lease.state


def wait_for(true: Callable[[], bool]) -> None:
    """Waits for what another thread of the client does: it has no event for that."""
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.002)


@dataclass(eq=False)
class FakeSession:
    """What the daemon keeps of a client while its connection is gone."""

    name: str
    secret: bytes
    hello: Hello
    job: str
    connection: FakeConnection | None = None
    answers: dict[int, Message] = field(default_factory=dict)
    asked: dict[int, Message] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)

    def send(self, message: Message) -> None:
        if self.connection is not None:
            self.connection.send(message)


@dataclass(eq=False)
class Waiting:
    """An acquire that is not answered yet."""

    session: FakeSession
    request: Acquire
    groups: tuple[str, ...]
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Held:
    """A lease."""

    name: str
    session: FakeSession
    groups: tuple[str, ...]
    round_id: int


class FakeConnection:
    """One accepted connection, with a thread that reads it."""

    def __init__(self, daemon: FakeDaemon, sock: socket.socket) -> None:
        self.daemon = daemon
        self.sock = sock
        self.session: FakeSession | None = None
        self.ids = itertools.count(1)
        #: Collects what would be sent.
        self.catch: list[Message] | None = None
        self.thread = threading.Thread(target=self._run, name="fake-daemon", daemon=True)
        self.thread.start()

    def send(self, message: Message) -> None:
        if self.catch is not None:
            self.catch.append(message)
            return
        with contextlib.suppress(OSError):
            self.sock.sendall(encode(message))

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        reader = FrameReader()
        with self.sock:
            try:
                while data := self.sock.recv(65536):
                    for message in reader.feed(data):
                        self.daemon.handle(self, message)
            except ProtocolError as error:
                self.send(error_message(error.code, error.message))
            except OSError:
                pass
            self.daemon.closed(self)


_REQUESTS = (Acquire, LastTurn, Release, Cancel, Register, StatusQuery, Ping)


class FakeDaemon:
    """See the top of the module. All state is guarded by `changed`, which tells of each change."""

    def __init__(self, path: Path, *, groups: tuple[str, ...] = ("n1", "n2")) -> None:
        self.path = path
        self.groups = groups
        self.grace_s = 5.0
        self.ack_s: float | None = None
        #: What it says that it can do; nothing, as a daemon of version 1.0.
        self.caps: list[str] = []
        #: Whoever asks for a last turn needs one.
        self.parked = False
        self.mute_timeouts = False
        #: Whether the cancel of an acquire that did not come yet holds for when it comes.
        self.remembers_cancels = True
        self.granted = 0
        self.changed = threading.Condition(threading.RLock())
        self.log: list[Message] = []
        self.sessions: dict[str, FakeSession] = {}
        self.held: dict[str, Held] = {}
        self.waiting: list[Waiting] = []
        self.connections: list[FakeConnection] = []
        self.replies: list[Message] = []
        self.byes = 0
        #: Sees every message first; True: it dealt with it.
        self.intercept: Callable[[FakeConnection, Message], bool] | None = None
        #: Names of requests whose next answer is lost together with the connection.
        self.lose_answer_to: set[str] = set()
        self._tokens = itertools.count(1)
        self._rounds = itertools.count(1)
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    # -- life

    def start(self) -> FakeDaemon:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(64)
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._acceptor.start()
        return self

    def stop(self, *, forget: bool = False) -> None:
        """Ends like a daemon that is killed: state survives (in its journal) unless forgotten."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.path.unlink(missing_ok=True)
        if self._acceptor is not None:
            self._acceptor.join(LIMIT_S)
        self.hang_up()
        if forget:
            with self.changed:
                self.sessions.clear()
                self.held.clear()
                self.waiting.clear()

    def hang_up(self) -> None:
        """Cuts all connections and waits for their threads."""
        with self.changed:
            connections = list(self.connections)
        for connection in connections:
            connection.hang_up()
        for connection in connections:
            connection.thread.join(LIMIT_S)

    def __enter__(self) -> FakeDaemon:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # -- for tests

    def wait_until(self, true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Waits for a change of state, or fails the test."""
        with self.changed:
            assert self.changed.wait_for(true, limit_s), f"did not happen; log: {self.log[-10:]}"

    def count(self, kind: str) -> int:
        """How many messages of a kind came in."""
        with self.changed:
            return sum(1 for message in self.log if message.get("t") == kind)

    def last(self, kind: str) -> Message:
        """The latest message of a kind."""
        with self.changed:
            return next(message for message in reversed(self.log) if message.get("t") == kind)

    def steal(self, groups: tuple[str, ...], job: str = "other") -> str:
        """Another job takes groups, without a connection of its own. Returns its lease."""
        with self.changed:
            session = FakeSession("thief", b"", self._hello_of(job), job)
            held = Held(f"stolen-{next(self._rounds)}", session, groups, 0)
            self.held[held.name] = held
            return held.name

    def give_back(self, lease: str) -> None:
        """Ends a lease, whoever has it, and serves the queue."""
        with self.changed:
            self.held.pop(lease, None)
            self._serve()

    def queue_up(self, groups: tuple[str, ...], job: str = "other") -> None:
        """Another job starts to wait."""
        with self.changed:
            session = FakeSession("waiter", b"", self._hello_of(job), job)
            request = Acquire(
                id=1, groups=groups, phase=None, ranks=None, arrive="all", timeout_s=None
            )
            self.waiting.append(Waiting(session, request, groups))
            self._tell_contended()

    def clear_queue(self) -> None:
        """Nobody waits any more."""
        with self.changed:
            self.waiting.clear()
            self._tell_contended()

    def end_lease(self, lease: str, reason: str) -> None:
        """Takes a lease away and tells its holder."""
        with self.changed:
            held = self.held.pop(lease)
            held.session.send({"t": "lost", "lease": lease, "reason": reason})
            self._serve()

    def tell_holder(self, lease: str, message: Message) -> None:
        """Tells who holds a lease something."""
        with self.changed:
            self.held[lease].session.send(message)

    def ask_agent(self, message: Message) -> Message:
        """Sends a request to the latest agent and returns its answer."""
        with self.changed:
            agents = [c for c in self.connections if c.session and c.session.hello.role == "agent"]
            connection = agents[-1]
            message["id"] = next(connection.ids)
        connection.send(message)
        self.wait_until(lambda: any(answer["re"] == message["id"] for answer in self.replies))
        return next(answer for answer in self.replies if answer["re"] == message["id"])

    def agent_caps(self) -> list[tuple[str, ...]]:
        """The capabilities of the agents that are connected."""
        with self.changed:
            return [
                connection.session.hello.caps
                for connection in self.connections
                if connection.session is not None and connection.session.hello.role == "agent"
            ]

    # -- connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with self.changed:
                self.connections.append(FakeConnection(self, sock))

    def closed(self, connection: FakeConnection) -> None:
        with self.changed:
            self.connections.remove(connection)
            if connection.session is not None and connection.session.connection is connection:
                connection.session.connection = None
            self.changed.notify_all()

    def handle(self, connection: FakeConnection, message: Message) -> None:
        with self.changed:
            self.log.append(message)
            self.changed.notify_all()
            if self.intercept is not None and self.intercept(connection, message):
                return
            self._handle(connection, message)
            self.changed.notify_all()

    def _handle(self, connection: FakeConnection, message: Message) -> None:
        try:
            request = parse_untrusted(message)
        except ProtocolError as error:
            if error.request_id is None:
                connection.send(error_message(error.code, error.message))
                connection.hang_up()
            else:
                connection.send(error_reply(error.request_id, error.code, error.message))
            return
        if isinstance(request, Hello):
            self._hello(connection, request)
            return
        session = connection.session
        assert session is not None, "a message came before the hello"
        if isinstance(request, Reply):
            self.replies.append(message)
        elif isinstance(request, Bye):
            self.byes += 1
            self._end_session(session)
        elif isinstance(request, _REQUESTS):
            self._request(session, request, message)
        else:
            assert not hasattr(request, "id") or isinstance(request, Ack), request

    def _request(
        self,
        session: FakeSession,
        request: Acquire | LastTurn | Release | Cancel | Register | StatusQuery | Ping,
        message: Message,
    ) -> None:
        answered = session.answers.get(request.id)
        if answered is not None:
            assert session.asked[request.id] == message, "an id was used twice"
            session.send(answered)
            return
        pending = request.id in session.asked
        session.asked[request.id] = message
        if isinstance(request, Acquire):
            if not pending:
                self._acquire(session, request)
        elif isinstance(request, LastTurn):
            if not pending:
                self._last_turn(session, request)
        elif isinstance(request, Release):
            self._release(session, request)
        elif isinstance(request, Cancel):
            self._cancel(session, request)
        elif isinstance(request, Register):
            rank = {"pid": 4242, "start_time": 1}
            self._answer(session, request.id, rank=rank, groups=["n1"])
        elif isinstance(request, StatusQuery):
            self._answer(session, request.id, status=self._status())
        else:
            self._answer(session, request.id)

    def _answer(self, session: FakeSession, request_id: int, **fields: object) -> None:
        self._send_answer(session, request_id, reply(request_id, **fields))

    def _refuse(
        self, session: FakeSession, request_id: int, code: str, text: str, **facts: object
    ) -> None:
        self._send_answer(session, request_id, error_reply(request_id, code, text, **facts))

    def _send_answer(self, session: FakeSession, request_id: int, answer: Message) -> None:
        session.answers[request_id] = answer
        kind = session.asked[request_id]["t"]
        if kind in self.lose_answer_to:
            self.lose_answer_to.discard(kind)
            if session.connection is not None:
                session.connection.hang_up()
            return
        session.send(answer)

    # -- sessions

    def _hello(self, connection: FakeConnection, hello: Hello) -> None:
        session = self.sessions.get(hello.session or "")
        if hello.session is not None and (session is None or session.secret != hello.secret):
            connection.send(error_message("session_unknown", "no such session"))
            connection.hang_up()
            return
        resumed = session is not None
        if session is None:
            name = f"s{len(self.sessions) + 1}-{secrets.token_hex(4)}"
            job = hello.job or "found-out"
            session = FakeSession(name, secrets.token_bytes(16), hello, job)
            self.sessions[name] = session
        session.connection = connection
        connection.session = session
        leases = [held for held in self.held.values() if held.session is session]
        connection.send(
            {
                "t": "welcome",
                "version": [1, 0],
                "daemon": "fake/1",
                "host": "n1",
                "caps": self.caps,
                "session": session.name,
                "secret": session.secret,
                "resumed": resumed,
                "grace_s": self.grace_s,
                "job": {"cluster": "c", "uid": 0, "id": session.job},
                "groups": list(self.groups),
                "leases": [
                    {"lease": held.name, "groups": list(held.groups), "tokens": {}}
                    for held in leases
                ],
            }
        )

    def _end_session(self, session: FakeSession) -> None:
        self.sessions.pop(session.name, None)
        for held in [held for held in self.held.values() if held.session is session]:
            del self.held[held.name]
        self.waiting = [waiting for waiting in self.waiting if waiting.session is not session]
        self._serve()

    # -- arbitration

    def _acquire(self, session: FakeSession, request: Acquire) -> None:
        if request.id in session.cancelled:
            self._refuse(session, request.id, "cancelled", "before it came")
            return
        groups = request.groups or self.groups
        unknown = [group for group in groups if group not in self.groups]
        if unknown:
            text = f"there is no group {unknown[0]}"
            self._refuse(session, request.id, "unknown_group", text, group=unknown[0])
            return
        waiting = Waiting(session, request, groups)
        self.waiting.append(waiting)
        self._serve()
        if waiting in self.waiting:
            self._tell_contended()
            self._set_timeout(waiting)

    def _last_turn(self, session: FakeSession, request: LastTurn) -> None:
        if not self.parked:
            self._answer(session, request.id, needed=False)
            return
        acquire = Acquire(
            id=request.id,
            groups=("n1",),
            phase=None,
            ranks=None,
            arrive="all",
            timeout_s=request.timeout_s,
        )
        self._acquire(session, acquire)

    def _set_timeout(self, waiting: Waiting) -> None:
        timeout_s = waiting.request.timeout_s
        if timeout_s is None or self.mute_timeouts:
            return
        if timeout_s == 0:
            self._time_out(waiting)
            return
        timer = threading.Timer(timeout_s, self._time_out, (waiting,))
        timer.daemon = True
        timer.start()

    def _time_out(self, waiting: Waiting) -> None:
        with self.changed:
            if waiting in self.waiting:
                self.waiting.remove(waiting)
                self._refuse(waiting.session, waiting.request.id, "timeout", "not in time")
                self._tell_contended()

    def _serve(self) -> None:
        """Grants from the front of the queue what is free and whose round is complete."""
        for waiting in list(self.waiting):
            if waiting not in self.waiting or waiting.session.name == "waiter":
                continue
            if any(set(waiting.groups) & set(held.groups) for held in self.held.values()):
                continue
            party = self._party(waiting)
            if party is not None:
                self._grant(party)
        self.changed.notify_all()

    def _party(self, waiting: Waiting) -> list[Waiting] | None:
        ranks = waiting.request.ranks
        if ranks is None:
            return [waiting]
        mates = [
            other
            for other in self.waiting
            if other.session.job == waiting.session.job
            and other.groups == waiting.groups
            and other.request.ranks == ranks
        ]
        return mates[:ranks] if len(mates) >= ranks else None

    def _grant(self, party: list[Waiting]) -> None:
        round_id = next(self._rounds)
        self.granted += len(party)
        for waiting in party:
            self.waiting.remove(waiting)
            lease = f"lease-{round_id}-{waiting.session.name}-{waiting.request.id}"
            self.held[lease] = Held(lease, waiting.session, waiting.groups, round_id)
        tokens = {group: next(self._tokens) for group in party[0].groups}
        for waiting in party:
            lease = f"lease-{round_id}-{waiting.session.name}-{waiting.request.id}"
            self._answer(
                waiting.session,
                waiting.request.id,
                lease=lease,
                groups=list(waiting.groups),
                tokens=tokens,
                waited_s=time.monotonic() - waiting.since,
                restored=True,
                switch_s=0.25,
                contended=bool(self.waiting),
                ack_s=self.ack_s,
            )

    def _release(self, session: FakeSession, request: Release) -> None:
        held = self.held.get(request.lease)
        if held is None or held.session is not session:
            self._refuse(session, request.id, "lease_ended", "it ended", reason="released")
            return
        waiters = sum(1 for waiting in self.waiting if set(waiting.groups) & set(held.groups))
        del self.held[request.lease]
        self._answer(session, request.id, waiters=waiters, deferred=waiters == 0)
        self._serve()

    def _cancel(self, session: FakeSession, request: Cancel) -> None:
        for waiting in self.waiting:
            if waiting.session is session and waiting.request.id == request.acquire:
                self.waiting.remove(waiting)
                self._refuse(session, request.acquire, "cancelled", "by its client")
                self._answer(session, request.id, cancelled=True)
                self._tell_contended()
                return
        if request.acquire not in session.asked and self.remembers_cancels:
            session.cancelled.add(request.acquire)
        self._answer(session, request.id, cancelled=False)

    def _tell_contended(self) -> None:
        for held in self.held.values():
            waiters = sum(1 for waiting in self.waiting if set(waiting.groups) & set(held.groups))
            notice: Message = {
                "t": "contended",
                "lease": held.name,
                "groups": list(held.groups),
                "waiters": waiters,
            }
            held.session.send(notice)

    def _status(self) -> Message:
        groups = []
        for group in self.groups:
            holders = [held for held in self.held.values() if group in held.groups]
            groups.append(
                {
                    "name": group,
                    "state": "held" if holders else "free",
                    "holder": holders[0].session.job if holders else None,
                    "resident": [holders[0].session.job] if holders else [],
                    "waiters": sum(1 for waiting in self.waiting if group in waiting.groups),
                    "since_s": 1.5,
                }
            )
        return {"groups": groups}

    @staticmethod
    def _hello_of(job: str) -> Hello:
        return Hello(
            version=(1, 0),
            client="test",
            caps=(),
            job=job,
            uid=None,
            role="client",
            session=None,
            secret=None,
            ranks=None,
            heartbeat_s=None,
            watchdog_s=None,
        )
