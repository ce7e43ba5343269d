"""The blocking client's line to the daemon: one session over as many connections as it takes.

Whoever needs a connection and finds none opens it, one thread at a time: a caller, or the keeper if
nobody calls. On a new connection the session is resumed, what is unsettled is sent again, and then
each waiting thread repeats its own request under its old id.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from libtimeslice.base import (
    MAX_LOSSES,
    SETTLE_LIMIT_S,
    client_hello,
    logger,
    no_answer,
    tell_lost,
    tell_notice,
)
from libtimeslice.callbacks import Callbacks
from libtimeslice.connection import Connection, ConnectionLost
from libtimeslice.environment import Settings
from libtimeslice.errors import ClientClosed, TimeSliceError, Unavailable
from libtimeslice.keeper import Keeper
from libtimeslice.link import TICK_S, Link, OutOfTime, open_within, pause_s, remaining
from libtimeslice.protocol import ErrorCode, Message
from libtimeslice.session import LeaseState, Session

#: How long the keeper leaves it to a reading thread to find out that a connection ended, seconds.
_NOTICE_LIMIT_S = 1.0

_Lock = AbstractContextManager[bool]  # threading.RLock is a function before Python 3.13


class Line:
    """Requests and notices in one session. All methods may be called by several threads."""

    def __init__(self, settings: Settings, callbacks: Callbacks) -> None:
        self.session = Session()
        #: Guards the session. Reentrant, because a signal handler may close the client.
        self.lock = threading.RLock()
        self.closed = False
        self.settings = settings
        self._callbacks = callbacks
        self._connection: Connection | None = None
        #: Held by the thread that connects.
        self._connecting = threading.RLock()
        #: How often no daemon was found within the limit, and what came of it last.
        self._gave_up = 0
        self._failure: Unavailable | None = None
        self._keeper = Keeper(self)

    # -- talking

    def call(self, message: Message) -> Message:
        """Sends a request under a new id and returns the answer, good or bad.

        Raises DaemonUnreachable if it takes longer than the reply limit.
        """
        message["id"] = next(self.session.ids)
        limit_s = self.settings.reply_limit_s
        try:
            return self.exchange(message, time.monotonic() + limit_s)
        except OutOfTime:
            raise no_answer(message["t"], limit_s) from None

    def exchange(
        self,
        message: Message,
        deadline: float | None,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> Message:
        """Sends a request that has its id until it is answered, on several connections if need be.

        Returns {} if `stop` came true first. Raises OutOfTime at the monotonic instant
        `deadline`, DaemonUnreachable, or ClientClosed.
        """
        losses = 0
        while True:
            connection = self.connected(deadline)
            try:
                return connection.exchange(message, deadline, stop=stop)
            except ConnectionLost:
                lasted_s = time.monotonic() - connection.opened_at
                losses = 0 if lasted_s > TICK_S else losses + 1
                if losses > MAX_LOSSES:
                    raise
            if losses > 0:  # it accepts us and hangs up again
                time.sleep(pause_s(losses))

    def exchange_now(self, message: Message) -> Message | None:
        """Sends a request that is noted as unsettled; None if that must wait for a reconnect."""
        connection = self._connection
        if connection is None or connection.lost:
            return None
        try:
            limit = time.monotonic() + self.settings.reply_limit_s
            answer = connection.exchange(message, limit)
        except (ConnectionLost, OutOfTime) as error:
            logger.warning("%s will be repeated on reconnect: %s", message, error)
            return None
        except BaseException:
            connection.send_or_drop(message)
            raise
        with self.lock:
            self.session.settle(answer)
        return answer

    def withdraw(self, acquire: Message, *, again: bool, limit_s: float) -> None:
        """Cancels an acquire, and hands a grant back that may be on its way.

        With `again` its answer may have come and gone: then the same question under the same id has
        the same answer. What does not work out within the limit is done on the next connection.
        """
        acquire_id = acquire["id"]
        with self.lock:
            messages = (
                self.session.abandon_blindly(acquire) if again else [self.session.abandon(acquire)]
            )
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(TimeSliceError, OutOfTime):
            connection = self.connected(deadline)
            connection.forget(acquire_id)
            for message in messages:
                connection.send(message)
            connection.wait(lambda: acquire_id not in self.session.unsettled, deadline)

    def acknowledge(self, lease: str) -> None:
        """Tells the daemon that a grant arrived. After a loss, the next hello does it as well."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(ConnectionLost):
                connection.send({"t": "ack", "lease": lease})

    def send_or_drop(self, message: Message) -> None:
        """Sends a message if there is a connection that takes it at once. Never raises."""
        connection = self._connection
        if connection is not None:
            connection.send_or_drop(message)

    def tell(self, message: Message) -> None:
        """Sends a notice that may get lost, and takes in what came meanwhile."""
        connection = self._connection or self.connected(None)
        connection.send_or_drop(message)
        connection.drain()

    def drain(self) -> None:
        """Takes in what has come, without waiting."""
        connection = self._connection
        if connection is not None:
            connection.drain()

    def socket_to_watch(self) -> socket.socket | None:
        """For the agent: the socket to listen on, unless a thread reads it already."""
        connection = self._connection
        if connection is None or connection.lost or connection.being_read:
            return None
        return connection.sock

    def wake(self) -> None:
        """Makes threads that wait with a `stop` look at it."""
        self.send_or_drop({"t": "ping", "id": next(self.session.ids)})

    # -- connecting

    def connected(self, deadline: float | None) -> Connection:
        """Returns a good connection. Raises OutOfTime, DaemonUnreachable or ClientClosed."""
        connection = self._connection
        if connection is not None and not connection.lost:
            return connection
        gave_up = self._gave_up
        if not self._connecting.acquire(timeout=remaining(deadline, most_s=threading.TIMEOUT_MAX)):
            raise OutOfTime("another thread is still connecting")
        try:
            connection = self._connection
            if connection is None or connection.lost:
                if self._failure is not None and self._gave_up != gave_up:
                    # The thread before this one gave up just now; that holds for all who waited.
                    raise copy.copy(self._failure)
                connection = self._connect(deadline)
            return connection
        finally:
            self._connecting.release()

    def keep_connected(self, hung_up: socket.socket | None) -> socket.socket | None:
        """For the keeper: returns the socket to watch; None once the client is closed."""
        connection = self._connection
        if connection is not None and connection.sock is hung_up and not self.closed:
            # Whoever reads first takes in what the daemon said before it hung up.
            connection.drain()
            if not connection.wait_until_lost(_NOTICE_LIMIT_S):
                connection.fail("the daemon hung up")
        try:
            return self.connected(None).sock
        except ClientClosed:
            return None

    def close(self) -> None:
        """Says bye and closes. Takes a moment at most."""
        self.closed = True
        self.send_or_drop({"t": "bye"})
        if self._connection is not None:
            self._connection.close()
        self._keeper.stop()

    def close_after_fork(self) -> None:
        """In a forked child: drops the connection and the leases, which are the parent's."""
        for grant in self.session.grants.values():
            grant.state, grant.reason = LeaseState.LOST, "it belongs to the parent process"
        if self._connection is not None:
            self._connection.close_after_fork()

    def _connect(self, deadline: float | None) -> Connection:
        """Opens a connection while holding `_connecting`."""
        session, now = self.session, time.monotonic()
        with self.lock:
            session.disconnected(now)
        limit = session.give_up_at or now + self.settings.connect_timeout_s
        until = limit if deadline is None else min(limit, deadline)
        for failures in itertools.count(1):
            connection = self._attempt(until, limit)
            if connection is not None:
                return connection
            time.sleep(pause_s(failures))
        raise AssertionError("counting does not end")

    def _attempt(self, until: float, limit: float) -> Connection | None:
        """Opens a connection; None if there is reason to try again at once.

        until, limit: monotonic instants at which this call, and the session, are given up.
        """
        session = self.session
        if session.session is None or session.path is None:
            session.path = self.settings.path()
        try:
            return self._adopt(open_within(session.path, self._hello, until=until))
        except ConnectionLost:  # right after its welcome
            if time.monotonic() >= until:
                raise
        except Unavailable as error:
            if session.session is not None and until < limit:
                raise OutOfTime(str(error)) from error
            self._end_session(f"no daemon for {session.grace_s:g} s")
            self._gave_up, self._failure = self._gave_up + 1, error
            raise
        except TimeSliceError as error:
            if error.code != ErrorCode.SESSION_UNKNOWN or session.session is None:
                raise
            self._end_session("the daemon does not know the session any more")
        return None

    def _hello(self) -> Message:
        if self.closed:
            raise ClientClosed("the client is closed")
        return client_hello(self.settings, self.session)

    def _adopt(self, link: Link) -> Connection:
        """Goes on with a fresh link."""
        connection = Connection(
            link.sock,
            reader=link.reader,
            ids=self.session.ids,
            on_message=_Receiver(self.session, self.lock, self._callbacks),
        )
        with self.lock:
            lost = self.session.welcomed(link.welcome)
            unsettled = self.session.resend()
        old, self._connection = self._connection, connection
        if old is not None:
            old.close()
        tell_lost(self._callbacks, lost)
        try:
            connection.take_over(link)
            self._settle(connection, unsettled)
            if self.closed:  # while this was under way
                connection.close()
                raise ClientClosed("the client is closed")
        except BaseException:
            connection.fail("it was interrupted before its first use")
            raise
        finally:
            self._keeper.start()
        return connection

    def _settle(self, connection: Connection, unsettled: list[Message]) -> None:
        """Repeats what is unsettled, and stays to hand back what was granted for nobody."""
        for message in unsettled:
            connection.send(message)
        if unsettled:
            with contextlib.suppress(OutOfTime):
                connection.wait(
                    lambda: not self.session.unsettled, time.monotonic() + SETTLE_LIMIT_S
                )

    def _end_session(self, reason: str) -> None:
        with self.lock:
            lost = self.session.end(reason)
        tell_lost(self._callbacks, lost)


class _Receiver:
    """Takes in what comes unasked. Knows no line, so that an unused client can be collected."""

    def __init__(self, session: Session, lock: _Lock, callbacks: Callbacks) -> None:
        self._session = session
        self._lock = lock
        self._callbacks = callbacks

    def __call__(self, connection: Connection, message: Message) -> None:
        with self._lock:
            received = self._session.receive(message)
        tell_lost(self._callbacks, received.lost)
        tell_notice(self._callbacks, message)
        for answer in received.send:
            connection.send(answer)
