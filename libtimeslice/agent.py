"""A small thread in a rank that answers the daemon, and runs callbacks, while the rank computes.

It has its own connection (role `agent`) and no leases. The daemon asks it to quiesce before the
rank is frozen, to resume after it was thawed, to empty the caching allocator, and to move the
tensors that the job named for it (`parking.py`). It also listens on the client's connection while
no other thread reads there, so that contention is told within a second though the caller computes.
It reconnects by itself for as long as the client lives.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, get_args

from libtimeslice import __version__, accelerator
from libtimeslice.callbacks import Callbacks, News, Pause, Resume
from libtimeslice.connection import Connection, ConnectionLost
from libtimeslice.environment import Settings
from libtimeslice.errors import TimeSliceError, Unavailable
from libtimeslice.link import open_link, pause_s, remaining
from libtimeslice.parking import Parking
from libtimeslice.protocol import ErrorCode, Message, error_reply, reply
from libtimeslice.session import Session

logger = logging.getLogger("libtimeslice")

#: Longest pause between two attempts to reach a daemon, seconds.
_LONGEST_PAUSE_S = 30.0
#: The thread looks this often what there is to listen to, seconds.
_LOOK_S = 1.0
#: Longest that `stop` waits for the thread, seconds; a callback may be running in it.
_STOP_LIMIT_S = 1.0
_ONE = (1).to_bytes(8, sys.byteorder)
#: Longest that a callback may take if the daemon says nothing, seconds.
_CALLBACK_LIMIT_S = 60.0


class Overheard(Protocol):
    """The client's own line, as far as its agent listens to it."""

    @property
    def closed(self) -> bool:
        """Whether the client is closed, or gone."""

    def socket_to_watch(self) -> socket.socket | None:
        """The socket of the client's connection, unless a thread reads it already."""

    def drain(self) -> None:
        """Takes in what has come, without waiting."""


class Agent:
    """One agent of one client. `start` may be called again whenever a callback was added."""

    def __init__(
        self, settings: Settings, callbacks: Callbacks, line: Overheard, parking: Parking
    ) -> None:
        self.job = settings.job
        #: Whether this process made itself known as a rank, to be repeated on each connection.
        self.registered = False
        self._settings = settings
        self._callbacks = callbacks
        self._line = line
        self._parking = parking
        self._stopped = False
        self._connection: Connection | None = None
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._caps: tuple[str, ...] = ()
        #: What it was told to pause for and not yet to resume from.
        self._paused: Message | None = None
        #: Nobody will tell it to resume: it does so as soon as its tensors are thawed.
        self._resumes_alone = False
        #: Set once the daemon knows this process as a rank.
        self._known = threading.Event()
        #: One for all connections: the daemon waits for a session that it knows and that is away.
        self._session = Session()
        #: An event counter; a file object, so that what comes after its close harms no other file.
        self._bell = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "quiesce": self._quiesce,
            "resume": self._resume,
            "empty_cache": self._empty_cache,
            "tensors": self._tensors,
        }

    def start(self) -> None:
        """Starts the thread, or makes a running one announce what it can do by now."""
        if self._has_ended():
            return
        if self._thread is None or not self._thread.is_alive():
            self._callbacks.wake = self._wake
            thread = threading.Thread(target=self._run, name="timeslice-agent", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                thread.start()
                self._thread = thread
        elif self._caps != self._capabilities() and self._connection is not None:
            self._known.clear()
            self._connection.fail("the agent has new capabilities to announce")
        else:
            self._wake()  # there may be a rank to make known

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread; waits for it for a second at most."""
        self._stopped = True
        self._wake()
        connection, thread = self._connection, self._thread
        if self._parking.is_held:
            return  # who closes while its tensors are away has to get them back
        if connection is not None:
            connection.fail("the client was closed")
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_LIMIT_S)
        if thread is None:
            self._bell.close()

    def abandon_after_fork(self) -> None:
        """Drops what belongs to the parent process: its thread does not exist here."""
        self._stopped = True
        self._bell.close()
        if self._connection is not None:
            self._connection.close_after_fork()

    def wait_until_known(self, limit_s: float) -> bool:
        """Waits until the daemon knows this process as a rank; returns False if it does not."""
        return self._known.wait(limit_s)

    def _has_ended(self) -> bool:
        return (self._stopped or self._line.closed) and not self._parking.is_held

    def _wake(self) -> None:
        with contextlib.suppress(ValueError):  # the thread is gone
            self._bell.write(_ONE)

    def _capabilities(self) -> tuple[str, ...]:
        # Without a callback the daemon need not ask, and a freeze has one round trip less.
        quiesces = ("quiesce",) if self._callbacks.has(Pause, Resume) else ()
        tensors = ("tensors",) if self._parking.tensors is not None else ()
        return ("empty_cache", *quiesces, *tensors)

    # -- the thread

    def _run(self) -> None:
        while not self._has_ended():
            self._failures += 1
            try:
                with self._connect() as connection:
                    self._serve(connection)
            except (Unavailable, TimeoutError) as error:
                logger.debug("the agent has no connection: %s", error)
            except TimeSliceError as error:
                logger.warning("the agent was turned away: %s", error)
                self._session = Session()
            until = time.monotonic() + pause_s(self._failures, longest_s=_LONGEST_PAUSE_S)
            while not self._has_ended() and time.monotonic() < until:
                self._listen(None, until)
        self._bell.close()

    def _connect(self) -> Connection:
        self._connection = None
        caps = self._capabilities()
        if caps != self._caps:
            # What a session can do is said once.
            self._session = Session()
        self._caps = caps
        hello = self._session.hello(
            client=f"libtimeslice/{__version__}",
            role="agent",
            job=self.job,
            caps=self._caps,
            ranks=None,
        )
        link = open_link(self._settings.path(), hello)
        self._session.welcomed(link.welcome)
        connection = Connection(link.sock, reader=link.reader)
        self._connection = connection
        # `stop` and `start` may have looked just before there was something to close.
        if self._has_ended() or self._caps != self._capabilities():
            connection.fail("the client was closed, or has new capabilities")
        connection.take_over(link)
        if not link.welcome.get("resumed"):
            self._go_on_if_forgotten()
        return connection

    def _go_on_if_forgotten(self) -> None:
        """A daemon that does not know this session will not tell it to resume from a pause."""
        if self._paused is None:
            return
        self._resumes_alone = self._parking.is_held
        if not self._resumes_alone:
            logger.warning("the daemon does not know any more that it paused this process")
            self._answer("resume", 0, self._paused)

    def _serve(self, connection: Connection) -> None:
        registered = False
        while not self._has_ended():
            if self.registered and not registered:
                connection.request({"t": "register", "pid": None}, self._settings.reply_limit_s)
                registered = True
                if self._caps == self._capabilities():
                    self._known.set()
            while connection.notices:
                self._handle(connection, connection.notices.popleft())
            if (news := self._session.watchdog_news()) is not None:
                connection.send_or_drop(news)
            if connection.lost:
                raise ConnectionLost("the agent's connection was lost")
            self._listen(connection, time.monotonic() + _LOOK_S)
            if time.monotonic() - connection.opened_at > _LOOK_S:
                self._failures = 0

    def _listen(self, connection: Connection | None, until: float) -> None:
        """Waits for anything to do until a monotonic instant, and does what others posted."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        if connection is not None:
            poller.register(connection.sock, select.POLLIN)
        watched = self._line.socket_to_watch() if self._callbacks.has(*get_args(News)) else None
        if watched is not None:
            with contextlib.suppress(ValueError):  # closed just now
                poller.register(watched, select.POLLIN)
        poller.poll(remaining(until, most_s=_LOOK_S) * 1000 + 1)
        self._bell.read(len(_ONE))  # None if it was something else
        if watched is not None:
            self._line.drain()
        if connection is not None:
            connection.drain()
        self._callbacks.run_posted()

    def _handle(self, connection: Connection, message: Message) -> None:
        request_id = message.get("id")
        if isinstance(request_id, int):
            connection.send(self._answer(str(message.get("t")), request_id, message))

    def _answer(self, kind: str, request_id: int, message: Message) -> Message:
        handler = self._handlers.get(kind)
        if handler is None:
            return error_reply(
                request_id, ErrorCode.UNKNOWN_REQUEST, f"this agent does not know {kind!r:.80}"
            )
        try:
            return reply(request_id, **handler(message))
        except TimeSliceError as error:  # with a code that says what kind of trouble it is
            logger.warning("%s was not done: %s", kind, error)
            return error_reply(
                request_id, error.code, error.message, state=self._parking.place.value
            )
        except Exception as error:  # the edge: whatever a callback raises is the answer
            logger.exception("%s failed", kind)
            return error_reply(
                request_id, ErrorCode.INTERNAL, f"{kind} failed: {type(error).__name__}: {error}"
            )

    def _quiesce(self, message: Message) -> Message:
        limit_s = float(message.get("timeout_s") or _CALLBACK_LIMIT_S)
        groups = tuple(message.get("groups") or ())
        self._paused, self._resumes_alone = message, False
        pause = Pause(groups=groups, timeout_s=limit_s, move=message.get("move"))
        self._callbacks.run(pause, limit_s=limit_s)
        if self._callbacks.has(Pause):
            self._parking.pause()
        return {}

    def _resume(self, message: Message) -> Message:
        self._parking.resume()
        self._paused, self._resumes_alone = None, False
        limit_s = float(message.get("timeout_s") or _CALLBACK_LIMIT_S)
        groups = tuple(message.get("groups") or ())
        self._callbacks.run(Resume(groups=groups), limit_s=limit_s)
        return {}

    def _empty_cache(self, _message: Message) -> Message:
        return {"bytes": accelerator.empty_cache()}

    def _tensors(self, message: Message) -> Message:
        answer = self._parking.obey(str(message.get("do")))
        if self._resumes_alone and not self._parking.is_held and self._paused is not None:
            self._answer("resume", 0, self._paused)
        return answer
