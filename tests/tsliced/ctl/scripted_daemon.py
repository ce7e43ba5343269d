"""A daemon that says what a test wants it to say, over a real socket.

For what a real one does not do on demand: refuse, lose a lease, keep somebody waiting, restart.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from libtimeslice.protocol import PROTOCOL_VERSION, FrameReader, Message, encode

JOB = {"cluster": "", "uid": 0, "id": "trainer-7"}
OTHER = {"cluster": "mars", "uid": 4_000_000_000, "id": "4711"}
GIB = 1 << 30
LIMIT_S = 10.0

STATUS: Message = {
    "schema": 1,
    "host": "n1",
    "version": "0.1.0",
    "pid": 4242,
    "uptime_s": 93784.0,
    "driver": "580.95.05",
    "backend": "cuda",
    "groups": [
        {
            "name": "trainer",
            "devices": [
                {
                    "uuid": f"GPU-{index}",
                    "index": index,
                    "name": "H200",
                    "total_bytes": 140 * GIB,
                    "used_bytes": 70 * GIB,
                    "utilization_pct": 90 + index,
                }
                for index in range(4)
            ],
            "state": "held",
            "holder": JOB,
            "lease_since_s": 192.4,
            "phase": "rollout",
            "token": 7,
            "next": None,
            "resident": [JOB],
            "waiters": 1,
            "queue": [{"job": OTHER, "waited_s": 12.34, "phase": "training"}],
            "reason": None,
        },
        {
            "name": "sampler",
            "devices": [
                {
                    "uuid": "GPU-6",
                    "index": 6,
                    "name": "H200",
                    "total_bytes": 140 * GIB,
                    "used_bytes": None,
                    "utilization_pct": None,
                }
            ],
            "state": "blocked",
            "holder": None,
            "lease_since_s": None,
            "phase": None,
            "token": None,
            "next": None,
            "resident": [],
            "waiters": 0,
            "queue": [],
            "reason": "process 99 holds memory and is of no job",
        },
    ],
    "jobs": [
        {
            "job": JOB,
            "state": "held",
            "ranks": 4,
            "device_bytes": 280 * GIB,
            "parked_bytes": 0,
            "held_s": 192.4,
            "waited_s": 0.0,
            "switches": 3,
            "gathering": [],
            "reason": None,
        },
        {
            "job": OTHER,
            "state": "parked",
            "ranks": 4,
            "device_bytes": 0,
            "parked_bytes": 100 * GIB,
            "held_s": 0.0,
            "waited_s": 12.34,
            "switches": 2,
            "gathering": [{"groups": ["sampler"], "ranks": 4, "arrived": [31, 32]}],
            "reason": None,
        },
    ],
    "sessions": 3,
    "memory": {"available_bytes": 900 * GIB, "reserved_bytes": 200 * GIB},
}

MOVE: Message = {
    "job": OTHER,
    "step": "snapshotting",
    "seconds": 12.0,
    "done_bytes": 30 * GIB,
    "total_bytes": 100 * GIB,
    "bytes_per_s": 2.5e9,
    "left_s": 30.06,
    "measured": True,
}

RANKS: list[Message] = [
    {
        "job": JOB,
        "host": "n1",
        "pid": 1234,
        "start_time": 99,
        "name": "python\x1b[31m",
        "uid": 0,
        "groups": ["trainer"],
        "devices": ["GPU-0"],
        "device_bytes": 70 * GIB,
        "state": "frozen",
        "doing": "snapshot",
        "doing_s": 1.5,
    }
]

EVENTS: list[Message] = [
    {
        "seq": 1,
        "at": 1_700_000_000.25,
        "kind": "queued",
        "level": "info",
        "job": "0/trainer-7",
        "groups": "trainer",
        "lease": "L1",
    },
    {
        "seq": 2,
        "at": 1_700_000_001.5,
        "kind": "granted",
        "level": "info",
        "job": "0/trainer-7",
        "groups": "trainer",
        "lease": "L1",
        "token": 7,
        "waited_s": 1.25,
        "restored": True,
        "switch_s": 0.5,
        "phase": None,
    },
    {"seq": 3, "at": 1_700_000_002.0, "kind": "stranger", "level": "warning", "pid": 99, "uid": 5},
]


class ScriptedDaemon:
    """Serves one socket in threads, and remembers every message that came in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Errors to answer with, by request: code and message.
        self.refusals: dict[str, tuple[str, str]] = {}
        #: While set, an acquire is not answered; one with a time-out fails at once with `timeout`.
        self.busy = False
        self.waiters = 0
        self.status: Message = STATUS
        self.seen: queue.Queue[Message] = queue.Queue()
        self._stopped = threading.Event()
        self._connections: list[socket.socket] = []
        self._pending: list[tuple[socket.socket, Message]] = []
        self._leases = 0
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ScriptedDaemon:
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._spawn(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self.drop()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a thread of the scripted daemon hangs"
        self._listener.close()

    def wait_for(self, kind: str) -> Message:
        """Waits for a message of a kind and returns it; others are skipped."""
        until = time.monotonic() + LIMIT_S
        while True:
            message = self.seen.get(timeout=max(0.0, until - time.monotonic()))
            if message.get("t") == kind:
                return message

    def grant_pending(self) -> None:
        """Grants what waits, and everything from now on."""
        with self._lock:
            self.busy = False
            pending, self._pending = self._pending, []
        for connection, message in pending:
            self._send(connection, self._grant(message))

    def tell_all(self, message: Message) -> None:
        """Sends a notice to every client."""
        for connection in list(self._connections):
            self._send(connection, message)

    def drop(self) -> None:
        """Ends every connection."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # --- in threads of its own ---

    def _spawn(self, target: object, *arguments: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        for message in self._messages(connection):
            self.seen.put(message)
            answer = self._answer(connection, message)
            if answer is not None:
                self._send(connection, answer)
        self._connections.remove(connection)
        connection.close()

    def _messages(self, connection: socket.socket) -> Iterator[Message]:
        reader = FrameReader()
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            yield from reader.feed(data)

    def _send(self, connection: socket.socket, message: Message) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(encode(message))

    def _answer(self, connection: socket.socket, message: Message) -> Message | None:
        kind = message.get("t")
        if kind in self.refusals:
            code, text = self.refusals[kind]
            if kind == "hello":
                return {"t": "error", "code": code, "message": text}
            return {"re": message["id"], "err": {"code": code, "message": text}}
        if kind == "hello":
            return self._welcome(message)
        if "id" not in message:
            return None
        if kind == "acquire":
            return self._acquire(connection, message)
        if kind == "cancel":
            self._cancel(connection, message)
        answers: dict[str, Message] = {
            "status": {"status": self.status},
            "ps": {"ranks": RANKS},
            "release": {"waiters": self.waiters, "deferred": not self.waiters},
            "cancel": {"cancelled": True},
            "attach": {
                "rank": {"pid": message.get("pid"), "start_time": 99},
                "groups": message.get("groups") or ["trainer"],
            },
            "events": self._events(message),
        }
        return {"re": message["id"], **answers.get(str(kind), {})}

    def _welcome(self, message: Message) -> Message:
        return {
            "t": "welcome",
            "version": list(PROTOCOL_VERSION),
            "daemon": "tsliced/0.1.0",
            "host": "n1",
            "caps": [],
            "session": "S1",
            "secret": b"secret",
            "resumed": message.get("session") is not None,
            "grace_s": 5.0,
            "job": {**JOB, "id": message.get("job") or JOB["id"]},
            "groups": ["trainer", "sampler"],
            "leases": [],
        }

    def _events(self, message: Message) -> Message:
        since = message.get("since") or 0
        kinds = message.get("kinds")
        events = [event for event in EVENTS if not kinds or event["kind"] in kinds]
        return {"events": [event for event in events if event["seq"] >= since], "next": 4}

    def _acquire(self, connection: socket.socket, message: Message) -> Message | None:
        with self._lock:
            if self.busy:
                if message["timeout_s"] is None:
                    self._pending.append((connection, message))
                    return None
                text = "not granted in time"
                return {"re": message["id"], "err": {"code": "timeout", "message": text}}
        return self._grant(message)

    def _cancel(self, connection: socket.socket, message: Message) -> None:
        with self._lock:
            cancelled = [one for one in self._pending if one[1]["id"] == message["acquire"]]
            self._pending = [one for one in self._pending if one not in cancelled]
        for _, acquire in cancelled:
            error = {"code": "cancelled", "message": "cancelled by its client"}
            self._send(connection, {"re": acquire["id"], "err": error})

    def _grant(self, message: Message) -> Message:
        self._leases += 1
        groups = message["groups"] or ["trainer", "sampler"]
        return {
            "re": message["id"],
            "lease": f"L{self._leases}",
            "groups": groups,
            "tokens": {group: 40 + place for place, group in enumerate(groups)},
            "waited_s": 0.5,
            "restored": True,
            "switch_s": 0.25,
            "contended": False,
            "ack_s": None,
        }
