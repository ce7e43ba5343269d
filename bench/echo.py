"""The yardstick of the wire: a server that decodes a request and sends a ready answer, no more.

It has the daemon's codec and event loop, and answers of the same bytes but for the request's id.
What the daemon takes longer is what its queue, journal, log and metrics cost.

    python -m bench.echo SOCKET ANSWERS

ANSWERS is a JSON map from the name of a request to the fields of its answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import uvloop

from bench.daemon import GROUP
from bench.load import LIMIT_S, acquire_of
from bench.server import Server
from libtimeslice.connection import Connection
from libtimeslice.protocol import PROTOCOL_VERSION, FrameReader, Message, encode

Answers = Mapping[str, Message]


class Echo(asyncio.Protocol):
    """One connection."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the way back."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Answers every request in the bytes."""
        for message in self._reader.feed(data):
            answer = {"re": message.get("id"), **self._answers[message["t"]]}
            self._transport.write(encode(answer))


async def serve(path: str, answers: Answers) -> None:
    """Answers at a socket until the process is told to end."""
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: Echo(answers), path, backlog=128)
    await server.serve_forever()


def answers_of(connection: Connection) -> Answers:
    """Returns the daemon's answers to a pair, and a welcome for the echo's own clients."""
    granted = connection.request(acquire_of(GROUP), LIMIT_S)
    released = connection.request({"t": "release", "lease": granted["lease"]}, LIMIT_S)
    for answer in (granted, released):
        del answer["re"]
    welcome = {"t": "welcome", "version": list(PROTOCOL_VERSION)}
    return {"hello": welcome, "acquire": granted, "release": released}


def start_echo(directory: Path, answers: Answers, *, core: int) -> Server:
    """Starts the echo in a process of its own; its socket and log lie in the directory."""
    path = directory / "echo.sock"
    command = [sys.executable, "-m", "bench.echo", str(path), json.dumps(answers)]
    return Server(command, path=path, core=core, log=directory / "echo.log")


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], json.loads(sys.argv[2])))
