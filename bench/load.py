"""Clients that load a server, and the times that they measure.

The same code loads the daemon and the echo, so what it costs itself is on both sides of a ratio.
"""

from __future__ import annotations

import itertools
import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libtimeslice import __version__
from libtimeslice.connection import Connection
from libtimeslice.errors import error_from
from libtimeslice.link import READ_BYTES, open_link
from libtimeslice.protocol import PROTOCOL_VERSION, Message, encode

#: No answer in a bench takes longer; seconds.
LIMIT_S = 20.0


@dataclass(kw_only=True)
class PairTimes:
    """Nanoseconds of each request of pairs: an acquire, then the release of what was granted."""

    acquire_ns: list[int] = field(default_factory=list)
    release_ns: list[int] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """How many requests were measured."""
        return len(self.acquire_ns) + len(self.release_ns)

    @property
    def pair_ns(self) -> list[int]:
        """Nanoseconds of each pair."""
        return [sum(pair) for pair in zip(self.acquire_ns, self.release_ns, strict=True)]

    def add(self, others: PairTimes) -> None:
        """Takes the times of another round in."""
        self.acquire_ns += others.acquire_ns
        self.release_ns += others.release_ns


def acquire_of(group: str) -> Message:
    """Returns an acquire, without its id."""
    return {
        "t": "acquire",
        "groups": [group],
        "phase": "rollout",
        "ranks": None,
        "arrive": "all",
        "timeout_s": None,
    }


def measure_pairs(connection: Connection, group: str, count: int) -> PairTimes:
    """Makes acquires and releases with the library's blocking connection, one after the other."""
    times = PairTimes()
    clock = time.perf_counter_ns
    for _ in range(count):
        started_ns = clock()
        granted = connection.request(acquire_of(group), LIMIT_S)
        granted_ns = clock()
        connection.request({"t": "release", "lease": granted["lease"]}, LIMIT_S)
        released_ns = clock()
        times.acquire_ns.append(granted_ns - started_ns)
        times.release_ns.append(released_ns - granted_ns)
    return times


class Client:
    """A connection on which a request can be in flight while others do something."""

    def __init__(self, path: Path, job: str) -> None:
        link = open_link(str(path), _hello(job), limit_s=LIMIT_S)
        self.sock = link.sock
        self._reader = link.reader
        self._messages = deque(link.backlog)
        self._ids = itertools.count(1)

    def send(self, message: Message) -> int:
        """Sends a request and returns the id that it got."""
        message["id"] = request_id = next(self._ids)
        self.sock.sendall(encode(message))
        return request_id

    def read(self) -> list[Message]:
        """Reads once and returns the answers that came; raises what an answer refuses with."""
        data = self.sock.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        return [_checked(message) for message in self._reader.feed(data) if "re" in message]

    def wait(self, request_id: int) -> Message:
        """Waits for the answer to a request; others that come before are dropped."""
        until = time.monotonic() + LIMIT_S
        while True:
            while self._messages:
                message = self._messages.popleft()
                if message.get("re") == request_id:
                    return message
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {LIMIT_S:g} s")
            # The kernel returns from a read in vain after a few seconds.
            try:
                self._messages.extend(self.read())
            except BlockingIOError:
                continue

    def request(self, message: Message) -> Message:
        """Sends a request and waits for its answer."""
        return self.wait(self.send(message))

    def close(self) -> None:
        """Ends the connection."""
        self.sock.close()


class Crowd:
    """Clients that each have one request in flight all the time, all in this one process."""

    def __init__(self, path: Path, groups: Sequence[str]) -> None:
        self._clients = {group: Client(path, f"bench-{group}") for group in groups}
        self._groups = {client.sock.fileno(): group for group, client in self._clients.items()}
        self._poller = select.epoll()
        for number in self._groups:
            self._poller.register(number, select.EPOLLIN)

    @property
    def clients(self) -> Sequence[Client]:
        """The clients, in the order of their groups."""
        return list(self._clients.values())

    def run(self, pairs: int) -> float:
        """Lets each client make so many pairs; returns the seconds from the first to the last."""
        left = dict.fromkeys(self._clients, pairs)
        started_at = time.perf_counter()
        for group, client in self._clients.items():
            client.send(acquire_of(group))
        while left:
            ready = self._poller.poll(LIMIT_S)
            if not ready:
                raise TimeoutError(f"no answer within {LIMIT_S:g} s")
            for number, _ in ready:
                self._go_on(self._groups[number], left)
        return time.perf_counter() - started_at

    def _go_on(self, group: str, left: dict[str, int]) -> None:
        client = self._clients[group]
        for answer in client.read():
            lease = answer.get("lease")
            if lease is not None:
                client.send({"t": "release", "lease": lease})
            elif left[group] > 1:
                left[group] -= 1
                client.send(acquire_of(group))
            else:
                del left[group]

    def close(self) -> None:
        """Ends all connections."""
        self._poller.close()
        for client in self._clients.values():
            client.close()


def _hello(job: str) -> Message:
    return {
        "t": "hello",
        "version": list(PROTOCOL_VERSION),
        "client": f"libtimeslice/{__version__}",
        "caps": [],
        "job": job,
        "uid": None,
        "role": "client",
        "session": None,
        "secret": None,
        "ranks": None,
    }


def _checked(answer: Message) -> Message:
    if "err" in answer:
        raise error_from(answer["err"])
    return answer
