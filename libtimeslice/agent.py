"""A small thread in a rank that answers the daemon while the rank computes.

It has its own connection (role `agent`) and no leases. The daemon asks it to quiesce before the
rank is frozen, to resume after it was thawed, and to empty the caching allocator; it tells it of
contention and loss. The thread reconnects by itself for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from libtimeslice import __version__, accelerator
from libtimeslice.callbacks import Callbacks, Contended, Lost, Pause, Resume
from libtimeslice.connection import Connection
from libtimeslice.environment import Settings
from libtimeslice.errors import TimeSliceError, Unavailable
from libtimeslice.link import Link, open_link, pause_s
from libtimeslice.protocol import ErrorCode, Message, error_reply, reply
from libtimeslice.session import Session

logger = logging.getLogger("libtimeslice")

#: Longest pause between two attempts to reach a daemon, seconds.
_LONGEST_PAUSE_S = 30.0
#: The thread looks this often whether it was stopped, seconds.
_LOOK_S = 60.0
#: Longest that `stop` waits for the thread, seconds; a callback may be running in it.
_STOP_LIMIT_S = 1.0


class Agent:
    """One agent of one client. `start` may be called again whenever a callback was added."""

    def __init__(self, settings: Settings, callbacks: Callbacks) -> None:
        self.job = settings.job
        #: Whether this process made itself known as a rank, to be repeated on each connection.
        self.registered = False
        #: Set while the agent is connected, for those who wait for it.
        self.connected = threading.Event()
        self._settings = settings
        self._callbacks = callbacks
        self._stopped = threading.Event()
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._caps: tuple[str, ...] = ()
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "quiesce": self._quiesce,
            "resume": self._resume,
            "empty_cache": self._empty_cache,
        }

    def start(self) -> None:
        """Starts the thread, or makes a running one announce what it can do by now."""
        if self._stopped.is_set():
            return
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="timeslice-agent", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                thread.start()
                self._thread = thread
        elif self._caps != self._capabilities() and self._connection is not None:
            self._connection.fail("the agent has new capabilities to announce")

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread; waits for it for a second at most."""
        self._stopped.set()
        connection, thread = self._connection, self._thread
        if connection is not None:
            connection.fail("the client was closed")
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_LIMIT_S)

    def abandon_after_fork(self) -> None:
        """Drops what belongs to the parent process: its thread does not exist here."""
        self._stopped.set()
        if self._connection is not None:
            self._connection.close_after_fork()

    def _capabilities(self) -> tuple[str, ...]:
        # Without a callback the daemon need not ask, and a freeze has one round trip less.
        quiesces = self._callbacks.has(Pause, Resume)
        return ("empty_cache", "quiesce") if quiesces else ("empty_cache",)

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                with self._connect() as connection:
                    failures = 0
                    self._serve(connection)
            except (Unavailable, TimeoutError) as error:
                logger.debug("the agent has no connection: %s", error)
            except TimeSliceError as error:
                logger.warning("the agent was turned away: %s", error)
            failures += 1
            self._stopped.wait(pause_s(failures, longest_s=_LONGEST_PAUSE_S))

    def _connect(self) -> Connection:
        self._caps = self._capabilities()
        hello = Session().hello(
            client=f"libtimeslice/{__version__}",
            role="agent",
            job=self.job,
            caps=self._caps,
            ranks=None,
        )
        link: Link = open_link(self._settings.path(), hello)
        connection = Connection(link.sock, reader=link.reader)
        self._connection = connection
        # `stop` and `start` may have looked just before there was something to close.
        if self._stopped.is_set() or self._caps != self._capabilities():
            connection.fail("the client was closed, or has new capabilities")
        connection.take_over(link)
        return connection

    def _serve(self, connection: Connection) -> None:
        if self.registered:
            connection.request({"t": "register", "pid": None}, self._settings.reply_limit_s)
        self.connected.set()
        try:
            while not self._stopped.is_set():
                message = connection.take_notice(_LOOK_S)
                if message is not None:
                    self._handle(connection, message)
        finally:
            self.connected.clear()

    def _handle(self, connection: Connection, message: Message) -> None:
        kind, request_id = message.get("t"), message.get("id")
        if isinstance(request_id, int):
            connection.send(self._answer(str(kind), request_id, message))
        elif kind == "contended":
            self._callbacks.tell(
                Contended(
                    lease=str(message.get("lease")),
                    groups=tuple(message.get("groups") or ()),
                    waiters=int(message.get("waiters") or 0),
                )
            )
        elif kind == "lost":
            reason = str(message.get("reason", "no reason given"))
            self._callbacks.tell(Lost(lease=str(message.get("lease")), reason=reason))

    def _answer(self, kind: str, request_id: int, message: Message) -> Message:
        handler = self._handlers.get(kind)
        if handler is None:
            return error_reply(
                request_id, ErrorCode.UNKNOWN_REQUEST, f"this agent does not know {kind!r:.80}"
            )
        try:
            return reply(request_id, **handler(message))
        except Exception as error:  # the edge: whatever a callback raises is the answer
            logger.exception("%s failed", kind)
            return error_reply(
                request_id, ErrorCode.INTERNAL, f"{kind} failed: {type(error).__name__}: {error}"
            )

    def _quiesce(self, message: Message) -> Message:
        limit_s = float(message.get("timeout_s") or _LONGEST_PAUSE_S)
        pause = Pause(groups=tuple(message.get("groups") or ()), timeout_s=limit_s)
        self._callbacks.run(pause, limit_s=limit_s)
        return {}

    def _resume(self, message: Message) -> Message:
        self._callbacks.run(Resume(groups=tuple(message.get("groups") or ())))
        return {}

    def _empty_cache(self, _message: Message) -> Message:
        return {"bytes": accelerator.empty_cache()}
