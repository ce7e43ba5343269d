"""One session as the server sees it: its connection, if it has one now, and what is open on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from libtimeslice.protocol import Message, Reply, error_reply
from tsliced.core.model import JobKey, SessionId
from tsliced.host.history import Follower
from tsliced.net.connection import Connection, Peer
from tsliced.net.shares import Share
from tsliced.net.survivors import Survivor


@dataclass(slots=True, eq=False)
class Client:
    """A session's client. All methods belong to the event loop."""

    session: SessionId
    peer: Peer
    share: Share
    job: JobKey
    connection: Connection | None
    hooks: bool = False
    #: Its process can empty its caching allocator when asked.
    empties_cache: bool = False
    tool: bool = False
    #: It promised signs of life.
    heartbeats: bool = False
    #: Requests that are not answered yet.
    open_requests: int = 0
    #: The daemon's own requests, by their ids.
    asked: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    last_asked: int = 0
    follower: Follower | None = None
    #: Its connections to daemons before this one, while it has not come back.
    survivors: list[Survivor] = field(default_factory=list)

    def send(self, message: Message) -> bool:
        """Send a message if there is a connection; return False if it exceeds a frame."""
        if self.connection is None:
            return True
        return self.connection.send(message)

    def send_whole(self, answer: Message) -> None:
        """Send an answer of which a part would be of no use."""
        if not self.send(answer):
            text = "there is more to tell than one message can hold"
            self.send(error_reply(answer["re"], "would_exceed_limit", text))

    def disconnect(self) -> None:
        """Forget the connection, and what was open on it."""
        self.connection = None
        self.share.requests -= self.open_requests
        self.open_requests = 0
        for future in self.asked.values():
            future.cancel()
        self.asked.clear()

    def close_survivors(self) -> None:
        """Let go of its earlier connections: it is here itself, or gone for good."""
        for survivor in self.survivors:
            survivor.close()
        self.survivors.clear()

    def leave_survivors(self) -> None:
        """Leave its earlier connections to the next daemon."""
        for survivor in self.survivors:
            survivor.leave()
        self.survivors.clear()

    # --- the daemon's own requests ------------------------------------------------------------

    def on_reply(self, answer: Reply) -> None:
        """Hand an answer to whoever asked."""
        future = self.asked.pop(answer.re, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def ask(self, message: Message) -> asyncio.Future[Reply]:
        """Ask something; without a connection the future is cancelled already."""
        self.last_asked += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self.connection is None:
            future.cancel()
            return future
        self.asked[self.last_asked] = future
        self.connection.send({**message, "id": self.last_asked})
        return future


async def ask_all(clients: Iterable[Client], message: Message, limit_s: float) -> list[str | None]:
    """Ask all at once; return for each what was wrong, None where it did what was asked."""
    asked = [client.ask(message) for client in clients]
    return await asyncio.gather(*(_answer(future, limit_s) for future in asked))


async def _answer(future: asyncio.Future[Reply], limit_s: float) -> str | None:
    try:
        answer = await asyncio.wait_for(future, limit_s)
    except TimeoutError:
        return f"it did not answer within {limit_s:g} s"
    except asyncio.CancelledError:
        if not future.cancelled():
            raise
        return "its agent is not connected"
    return str(answer.error.get("message")) if answer.error is not None else None
