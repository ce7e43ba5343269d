"""The asyncio client's line to the daemon: one session over as many connections as it takes.

Everything here runs on the event loop, except connecting: that is done by the keeper's thread, so
that a session is resumed in time also while a training step blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from enum import Enum

from libtimeslice.base import MAX_LOSSES, client_hello, no_answer, tell_lost, tell_notice
from libtimeslice.callbacks import Callbacks
from libtimeslice.connection import ConnectionLost
from libtimeslice.environment import Settings
from libtimeslice.errors import (
    ClientClosed,
    DaemonUnreachable,
    TimeSliceError,
    Unavailable,
    error_from,
)
from libtimeslice.keeper import Keeper
from libtimeslice.link import READ_BYTES, TICK_S, Link, OutOfTime, hang_up, open_within, pause_s
from libtimeslice.protocol import MAX_FRAME, ErrorCode, Message, encode
from libtimeslice.session import LeaseState, Session


class _Outcome(Enum):
    """How a wait can end without what it waited for."""

    TIMED_OUT = "timed out"
    LOST = "connection lost"


class Signal:
    """Wakes the tasks that wait for something to change."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[object]] = set()

    async def wait(self, deadline: float | None) -> None:
        """Waits for `fire`. Raises OutOfTime at the monotonic instant `deadline`."""
        waiter: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            if await _by(waiter, deadline) is _Outcome.TIMED_OUT:
                raise OutOfTime("it did not happen in time")
        finally:
            self._waiters.discard(waiter)

    def fire(self) -> None:
        """Wakes all that wait now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


async def _by(waiter: asyncio.Future[object], deadline: float | None) -> object:
    """Awaits a future of this module's until a monotonic instant.

    `asyncio.wait_for` would lose a result that comes together with a cancellation (before 3.12).
    """
    if deadline is None:
        return await waiter
    left_s = max(0.0, deadline - time.monotonic())
    timer = asyncio.get_running_loop().call_later(left_s, _expire, waiter)
    try:
        return await waiter
    finally:
        timer.cancel()


def _expire(waiter: asyncio.Future[object]) -> None:
    if not waiter.done():
        waiter.set_result(_Outcome.TIMED_OUT)


class AsyncConnection:
    """One connection on an event loop. The twin of `connection.Connection`."""

    def __init__(
        self,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[AsyncConnection, Message], object],
        on_lost: Callable[[], object],
    ) -> None:
        self.sock = link.sock
        self.opened_at = time.monotonic()
        self.lost = False
        self._loop = loop
        self._reader = link.reader
        self._on_message = on_message
        self._on_lost = on_lost
        self._why = ""
        self._told: TimeSliceError | None = None
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._unsent = bytearray()
        self.sock.setblocking(False)
        loop.add_reader(self.sock, self._readable)

    async def exchange(self, message: Message, deadline: float | None) -> Message:
        """Sends a request that has its id, and returns the answer, be it good or bad.

        Raises OutOfTime at the monotonic instant `deadline`, or ConnectionLost.
        """
        answer: asyncio.Future[object] = self._loop.create_future()
        self._answers[message["id"]] = answer
        try:
            self.send(message)
            found = await _by(answer, deadline)
        finally:
            del self._answers[message["id"]]
        if isinstance(found, dict):
            return found
        if found is _Outcome.TIMED_OUT:
            raise OutOfTime("the answer did not come in time")
        raise self._loss()

    def send(self, message: Message) -> None:
        """Sends a message without waiting. Raises ConnectionLost."""
        frame = encode(message)
        if self.lost:
            raise self._loss()
        if not self._unsent:
            try:
                frame = frame[self.sock.send(frame) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._readable()  # the daemon may have said why before it hung up
                self.fail(f"sending failed: {error}")
                raise self._loss() from error
            if not frame:
                return
            self._loop.add_writer(self.sock, self._writable)
        self._unsent += frame
        if len(self._unsent) > MAX_FRAME:
            self.fail("the daemon takes nothing in")
            raise self._loss()

    def send_or_drop(self, message: Message) -> None:
        """Sends a message that may get lost. Never raises."""
        if not self._unsent:
            with contextlib.suppress(TimeSliceError):
                self.send(message)

    def take_over(self, link: Link) -> None:
        """Takes in what came right behind the welcome."""
        self._dispatch(link.backlog)

    def fail(self, why: str) -> None:
        """Ends the connection for all tasks that wait for an answer."""
        if self.lost:
            return
        self.lost, self._why = True, why
        self._forget()
        hang_up(self.sock)  # the keeper watches the socket and opens the next
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(_Outcome.LOST)
        self._on_lost()

    def close(self) -> None:
        """Ends the connection and gives the descriptor back."""
        self.fail("it was closed by this side")
        self.sock.close()

    def close_after_fork(self) -> None:
        """Gives an inherited descriptor back, and leaves the parent's loop and connection alone."""
        self.lost = True
        self.sock.close()

    def _forget(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self.sock)
            self._loop.remove_writer(self.sock)

    def _readable(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"reading failed: {error}")
            return
        if not data:
            self.fail("the daemon closed the connection")
            return
        try:
            self._dispatch(self._reader.feed(data))
        except TimeSliceError as error:
            self._told = error
            self.fail(str(error))

    def _writable(self) -> None:
        try:
            del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"sending failed: {error}")
            return
        if not self._unsent:
            self._loop.remove_writer(self.sock)

    def _dispatch(self, messages: list[Message]) -> None:
        for message in messages:
            answer = self._answers.get(message.get("re", 0))
            if answer is not None and not answer.done():
                answer.set_result(message)
            elif message.get("t") == "error":
                self._told = error_from(message)
            else:
                self._on_message(self, message)

    def _loss(self) -> TimeSliceError:
        told = self._told
        if told is not None and not isinstance(told, Unavailable):
            return told
        return ConnectionLost(f"the connection to the daemon was lost: {told or self._why}")


class AsyncLine:
    """Requests and notices in one session, for the tasks of one event loop."""

    def __init__(self, settings: Settings, callbacks: Callbacks) -> None:
        self.session = Session()
        self.settings = settings
        self.closed = False
        self._callbacks = callbacks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: AsyncConnection | None = None
        self._failure: TimeSliceError | None = None
        self._arrival = Signal()
        self._keeper = Keeper(self)

    # -- talking

    async def call(self, message: Message) -> Message:
        """Sends a request under a new id and returns the answer, good or bad."""
        message["id"] = next(self.session.ids)
        limit_s = self.settings.reply_limit_s
        try:
            return await self.exchange(message, time.monotonic() + limit_s)
        except OutOfTime:
            raise no_answer(message["t"], limit_s) from None

    async def exchange(self, message: Message, deadline: float | None) -> Message:
        """Sends a request that has its id until it is answered, on several connections if need be.

        Raises OutOfTime at the monotonic instant `deadline`, DaemonUnreachable, or ClientClosed.
        """
        losses = 0
        while True:
            connection = await self.connected(deadline)
            try:
                return await connection.exchange(message, deadline)
            except ConnectionLost:
                lasted_s = time.monotonic() - connection.opened_at
                losses = 0 if lasted_s > TICK_S else losses + 1
                if losses > MAX_LOSSES:
                    raise
            if losses > 0:
                await asyncio.sleep(pause_s(losses))

    async def exchange_now(self, message: Message) -> Message | None:
        """Sends a request that is noted as unsettled; None if that must wait for a reconnect."""
        connection = self._connection
        if connection is None or connection.lost:
            return None
        try:
            limit = time.monotonic() + self.settings.reply_limit_s
            answer = await connection.exchange(message, limit)
        except (ConnectionLost, OutOfTime):
            return None
        self.session.settle(answer)
        return answer

    def withdraw(self, acquire: Message, *, again: bool) -> None:
        """Cancels an acquire; a grant that is on its way is handed back when it arrives.

        With `again` its answer may have come and gone: then the same question under the same id has
        the same answer.
        """
        session = self.session
        for message in session.abandon_blindly(acquire) if again else [session.abandon(acquire)]:
            self.send_or_drop(message)

    def send_or_drop(self, message: Message) -> None:
        """Sends a message if there is a connection. Never raises."""
        if self._connection is not None:
            self._connection.send_or_drop(message)

    async def tell(self, message: Message) -> None:
        """Sends a notice that may get lost; connects if that was never done."""
        if self._connection is None:
            await self.connected(None)
        self.send_or_drop(message)

    # -- connecting

    async def connected(self, deadline: float | None) -> AsyncConnection:
        """Returns a good connection. Raises OutOfTime, DaemonUnreachable or ClientClosed."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError("the client belongs to another event loop; make one for each")
            self._loop = self._callbacks.loop = loop
        self._failure = None
        while self._connection is None or self._connection.lost:
            if self.closed:
                raise ClientClosed("the client is closed")
            self._keeper.start()
            await self._arrival.wait(deadline)
            if self._failure is not None:
                raise self._failure
        return self._connection

    def keep_connected(self, hung_up: socket.socket | None) -> socket.socket | None:
        """Opens a connection, in the keeper's thread, and hands it to the loop."""
        del hung_up  # nobody else opens connections, so there is none
        if self.closed:
            return None
        try:
            link = self._open()
        except TimeSliceError as error:
            self._post(self._give_up, error)
            raise
        if not self._post(self._adopt, link):
            link.sock.close()
            return None
        return link.sock

    def _open(self) -> Link:
        session, now = self.session, time.monotonic()
        resuming = session.session is not None
        if not resuming or session.path is None:
            session.path = self.settings.path()
        path = session.path
        limit_s = session.grace_s if resuming else self.settings.connect_timeout_s
        try:
            return open_within(path, self._hello, until=now + limit_s)
        except TimeSliceError as error:
            if error.code != ErrorCode.SESSION_UNKNOWN or not resuming:
                raise
        # What was lost with it is found when the loop takes the new session's welcome in.
        limit_s = self.settings.connect_timeout_s
        return open_within(path, self._fresh_hello, until=time.monotonic() + limit_s)

    def _hello(self) -> Message:
        if self.closed:
            raise ClientClosed("the client is closed")
        return client_hello(self.settings, self.session)

    def _fresh_hello(self) -> Message:
        return {**self._hello(), "session": None, "secret": None}

    def _post(self, call: Callable[..., object], argument: object) -> bool:
        """Has something done on the loop; returns False if the loop is closed."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:
            return False
        return True

    def _adopt(self, link: Link) -> None:
        """Goes on with a fresh link."""
        loop = self._loop
        if self.closed or loop is None:
            link.sock.close()
            return
        old = self._connection
        if old is not None:
            old.close()
        connection = AsyncConnection(link, loop, self._receive, self._disconnected)
        lost = self.session.welcomed(link.welcome)
        self._connection = connection
        tell_lost(self._callbacks, lost)
        for message in self.session.resend():
            connection.send_or_drop(message)
        connection.take_over(link)
        self._arrival.fire()

    def _disconnected(self) -> None:
        self.session.disconnected(time.monotonic())

    def _give_up(self, error: TimeSliceError) -> None:
        """Ends a session whose daemon stayed away longer than it keeps sessions."""
        if isinstance(error, DaemonUnreachable) or self.session.session is not None:
            tell_lost(self._callbacks, self.session.end(f"the session was given up: {error}"))
        self._failure = error
        self._arrival.fire()

    def _receive(self, connection: AsyncConnection, message: Message) -> None:
        received = self.session.receive(message)
        tell_lost(self._callbacks, received.lost)
        tell_notice(self._callbacks, message)
        for answer in received.send:
            connection.send_or_drop(answer)

    # -- for the agent

    def socket_to_watch(self) -> socket.socket | None:
        """The loop reads everything itself."""
        return None

    def drain(self) -> None:
        """The loop reads everything itself."""

    # -- the end

    def close(self) -> None:
        """Says bye and closes, from whichever thread, with the loop running or not."""
        self.closed = True
        loop = self._loop
        if loop is not None and loop.is_running() and not _is_running_here(loop):
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(self._close)
        else:
            self._close()

    def _close(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.send_or_drop({"t": "bye"})
            connection.close()
        self._keeper.stop()
        self._arrival.fire()

    def close_after_fork(self) -> None:
        """In a forked child: drops the connection and the leases, which are the parent's."""
        for grant in self.session.grants.values():
            grant.state, grant.reason = LeaseState.LOST, "it belongs to the parent process"
        if self._connection is not None:
            self._connection.close_after_fork()


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
