"""One session as the server sees it: its connection, if it has one now, and what is open on it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from libtimeslice.protocol import Message, Reply, error_reply
from tsliced.core.model import JobKey, SessionId
from tsliced.host.history import Follower
from tsliced.net.connection import Connection, Peer
from tsliced.net.shares import Share
from tsliced.net.survivors import Survivor

_NOT_CONNECTED = "its agent is not connected"


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
    #: Its process can move tensors when asked; None: it has not come back since the restart.
    moves_tensors: bool | None = None
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
    #: Its session is over.
    gone: bool = False
    #: Who waits for it to come back.
    _awaited: list[asyncio.Future[None]] = field(default_factory=list)

    def note_capabilities(self, caps: Collection[str]) -> None:
        """Know what it says that it can do; the journal does not have it."""
        self.empties_cache = "empty_cache" in caps
        self.moves_tensors = "tensors" in caps

    def connect(self, connection: Connection) -> None:
        """Take another connection for the one that there was."""
        self.connection = connection
        self._wake()

    def end(self) -> None:
        """Know that it does not come back."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        for future in self._awaited:
            if not future.done():
                future.set_result(None)
        self._awaited.clear()

    async def is_present(self, limit_s: float | None) -> bool:
        """Wait until it is connected; return whether it is, or False once it is gone for good."""
        if self.connection is None and not self.gone:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited.append(future)
            await asyncio.wait({future}, timeout=limit_s)
        return self.connection is not None

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
    """Ask all who are connected; return for each what was wrong, None where it did as asked."""
    return await asyncio.gather(*(_ask(client, message, limit_s) for client in clients))


async def reach_all(
    clients: Iterable[Client], message: Message, limit_s: float, *, again: bool
) -> list[str | None]:
    """The same, but wait for those who are away, such as after a restart of the daemon.

    `again`: ask those again whose connection ends before they answered. One who is gone for good
    has nothing to do.
    """
    return await asyncio.gather(*(_reach(client, message, limit_s, again) for client in clients))


async def _reach(client: Client, message: Message, limit_s: float, again: bool) -> str | None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while True:
        if not await client.is_present(deadline - loop.time()):
            return None if client.gone else _NOT_CONNECTED
        wrong = await _ask(client, message, deadline - loop.time())
        if wrong != _NOT_CONNECTED or not again:
            return wrong


async def ask_first(
    clients: Iterable[Client], message: Message, limit_s: float | None
) -> Reply | None:
    """Ask one client after the other that moves tensors, until one has what is asked for.

    A process may have several, and one of them has its tensors. Return the latest answer; None if
    there was none.
    """
    loop = asyncio.get_running_loop()
    deadline = None if limit_s is None else loop.time() + limit_s
    answer = None
    for client in clients:
        left_s = None if deadline is None else deadline - loop.time()
        if left_s is not None and left_s <= 0:
            break  # what is asked and not waited for would be done all the same
        answer = await _insist(client, message, left_s) or answer
        if answer is not None and (answer.error or {}).get("code") != "not_found":
            break
    return answer


async def _insist(client: Client, message: Message, limit_s: float | None) -> Reply | None:
    """Ask one client, and again whenever its connection ended before it answered.

    Return None if it moves no tensors, is gone for good, or did not answer within the limit.
    """
    loop = asyncio.get_running_loop()
    deadline = None if limit_s is None else loop.time() + limit_s

    def left_s() -> float | None:
        return None if deadline is None else max(0.0, deadline - loop.time())

    while await client.is_present(left_s()) and client.moves_tensors:
        future = client.ask(message)
        await asyncio.wait({future}, timeout=left_s())
        if not future.done():
            return None
        if not future.cancelled():
            return future.result()
    return None


async def _ask(client: Client, message: Message, limit_s: float) -> str | None:
    future = client.ask(message)
    # To wait for it in this way does not cancel it, so that its cancellation says one thing.
    await asyncio.wait({future}, timeout=limit_s)
    if not future.done():
        return f"it did not answer within {message.get('timeout_s', limit_s):g} s"
    if future.cancelled():
        return _NOT_CONNECTED
    error = future.result().error
    return str(error.get("message")) if error is not None else None
