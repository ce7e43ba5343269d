"""Many clients in one process: each is a session of its own, and all want the same group.

    swarm.py SOCKET SESSIONS LEASES HOLD_S

Every session asks for LEASES leases of g1 at once; whatever is granted is confirmed, held for
HOLD_S, and given back. On standard output stands a line when all have asked, and one with the
figures when all is over; in between it waits for a line on standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import time

from libtimeslice.protocol import FrameReader, Message, encode

LIMIT_S = 300.0


class Member(asyncio.Protocol):
    """One connection."""

    def __init__(self, name: str, leases: int, hold_s: float) -> None:
        self.name = name
        self.waiting = leases
        self.granted_at: list[float] = []
        self.refusals: list[str] = []
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self._hold_s = hold_s
        self._ids = leases
        self._held = 0
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        hello = {"t": "hello", "version": [1, 0], "client": "swarm", "caps": [], "job": self.name}
        self._send(hello)

    def ask(self) -> None:
        """Asks for everything at once."""
        for number in range(1, self.waiting + 1):
            self._send({"t": "acquire", "id": number, "groups": ["g1"]})
        self._send({"t": "ping", "id": self._ids + 1})
        self._ids += 1

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.welcomed, self.over):
            if not future.done():
                future.set_exception(ConnectionError(f"{self.name} was hung up on: {exc}"))

    def _on_message(self, message: Message) -> None:
        if message.get("t") == "welcome":
            self.welcomed.set_result(None)
        elif message.get("t") == "error":
            self.refusals.append(message["message"])
            self._transport.close()
        elif "err" in message:
            self.refusals.append(message["err"]["message"])
            self._end_one()
        elif "lease" in message and "tokens" in message:
            self.granted_at.append(time.monotonic())
            self._send({"t": "ack", "lease": message["lease"]})
            asyncio.get_running_loop().call_later(self._hold_s, self._release, message["lease"])
        elif "deferred" in message:
            self._end_one()

    def _release(self, lease: str) -> None:
        self._ids += 1
        self._send({"t": "release", "id": self._ids, "lease": lease})

    def _end_one(self) -> None:
        self.waiting -= 1
        if not self.waiting and not self.over.done():
            self._send({"t": "bye"})
            self.over.set_result(None)

    def _send(self, message: Message) -> None:
        self._transport.write(encode(message))


async def swarm(path: str, sessions: int, leases: int, hold_s: float) -> None:
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    members = [Member(f"{os.getpid()}-{n}", leases, hold_s) for n in range(sessions)]

    async def join(member: Member) -> None:
        # A connect that does not block fails when the backlog is full; this one waits.
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        await loop.create_connection(lambda: member, sock=sock)
        await member.welcomed

    await asyncio.gather(*map(join, members))
    for member in members:
        member.ask()
    say({"connected_s": time.monotonic() - began})
    await loop.run_in_executor(None, sys.stdin.readline)
    await asyncio.gather(*(member.over for member in members))
    say(
        {
            "granted": sum(len(member.granted_at) for member in members),
            "refusals": sorted({text for member in members for text in member.refusals}),
        }
    )


def say(figures: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


async def main() -> None:
    path, sessions, leases, hold_s = sys.argv[1:]
    async with asyncio.timeout(LIMIT_S):
        await swarm(path, int(sessions), int(leases), float(hold_s))


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main())
