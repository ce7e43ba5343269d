"""One blocking connection that several threads may use at once, without a reader thread.

The thread that waits for an answer reads the socket itself, so that the usual request is four
steps: encode, send, receive, decode. If several threads wait, one of them, the leader, reads for
all and hands each answer to the thread that waits for it; when the leader has its own, the next one
takes its place.

A connection lives as long as its socket. `client.py` makes a new one after a loss and repeats what
was not answered.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType

from libtimeslice import __version__
from libtimeslice.errors import DaemonUnreachable, TimeSliceError, Unavailable, error_from
from libtimeslice.fields import MAX_EVENTS
from libtimeslice.link import (
    READ_BYTES,
    TICK_S,
    Link,
    OutOfTime,
    hang_up,
    make_blocking,
    open_link,
    remaining,
)
from libtimeslice.protocol import FrameReader, Message, encode
from libtimeslice.session import Session

#: Longest that a message which may get lost waits for another thread that is sending, seconds.
_DROP_LIMIT_S = 1.0

#: How long the thread that reads stays awake for an answer before it sleeps. The daemon answers
#: within this time what it can grant at once, and to be woken up costs both sides more than that.
#: With a single processor the daemon would have to wait for it.
_AWAKE_S = 100e-6 if (os.cpu_count() or 1) > 1 else 0.0


class ConnectionLost(DaemonUnreachable):
    """The connection ended. What was in flight may or may not have reached the daemon."""


class Connection:
    """Requests, answers and notices over one connected socket.

    `on_message` gets every message that is not the answer to a waiting request, in the thread that
    happens to read; without it such messages collect in `notices`. It must not wait for an answer.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        reader: FrameReader | None = None,
        ids: Iterator[int] | None = None,
        on_message: Callable[[Connection, Message], object] | None = None,
    ) -> None:
        make_blocking(sock)
        self.sock = sock
        self.opened_at = time.monotonic()
        #: What came unasked, oldest first, if there is no `on_message`.
        self.notices: deque[Message] = deque(maxlen=MAX_EVENTS)
        self.welcome: Message = {}
        self._reader = reader or FrameReader()
        self._ids = ids or itertools.count(1)
        self._on_message = on_message
        # Reentrant, because a signal handler may close the client in the middle of anything.
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self._send_lock = threading.RLock()
        #: Answers waited for: None until one is here.
        self._answers: dict[int, Message | None] = {}
        #: Identity of the thread that reads, 0 if none does.
        self._leader = 0
        self._followers = 0
        self._lost: str | None = None
        #: What the daemon said before it hung up.
        self._told: TimeSliceError | None = None

    @classmethod
    def open(
        cls,
        path: str,
        *,
        role: str = "tool",
        job: str | None = None,
        uid: int | None = None,
        limit_s: float = 10.0,
    ) -> Connection:
        """Connects to a daemon for single questions; it does not reconnect.

        `uid` is the user for whom root, or another administrator, acts.
        With another role than "tool" its session outlives it by the daemon's grace.

        Raises DaemonUnreachable within `limit_s` seconds, or what the daemon answers to the hello.
        """
        hello = Session().hello(
            client=f"libtimeslice/{__version__}", role=role, job=job, caps=(), ranks=None
        )
        if uid is not None:
            hello["uid"] = uid
        link = open_link(path, hello, limit_s=limit_s)
        connection = cls(link.sock, reader=link.reader)
        connection.take_over(link)
        return connection

    def take_over(self, link: Link) -> None:
        """Goes on from a link whose socket and reader it has: keeps its welcome, reads its rest."""
        self.welcome = link.welcome
        self._dispatch(link.backlog)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def lost(self) -> bool:
        """Whether the connection is known to have ended."""
        return self._lost is not None

    @property
    def being_read(self) -> bool:
        """Whether a thread waits for what comes, and takes everything in."""
        return self._leader != 0

    # -- requests

    def request(self, message: Message, limit_s: float | None = None) -> Message:
        """Sends a request under a new id and returns the answer.

        Raises the error of the answer, TimeoutError after `limit_s` seconds (None: no limit), or
        ConnectionLost.
        """
        message["id"] = next(self._ids)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        answer = self.exchange(message, deadline)
        if "err" in answer:
            raise error_from(answer["err"])
        return answer

    def exchange(
        self,
        message: Message,
        deadline: float | None = None,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> Message:
        """Sends a request that has its id, and returns the answer, be it good or bad.

        With `stop`, returns {} once that is true and a message came in.
        """
        request_id: int = message["id"]
        answers = self._answers
        done: Callable[[], object] = functools.partial(answers.get, request_id)
        if stop is not None:
            done = functools.partial(_either, done, stop)
        try:
            answers[request_id] = None
            self.send(message)
            self.wait(done, deadline)
            return answers[request_id] or {}
        finally:
            self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """Treats the answer to a request as one that nobody waits for."""
        with self._lock:
            self._answers.pop(request_id, None)

    def send(self, message: Message) -> None:
        """Sends a message and waits for nothing. Raises ConnectionLost."""
        frame = encode(message)
        try:
            self._await_turn_to_send()
            try:
                self.sock.sendall(frame)
            finally:
                self._send_lock.release()
        except OSError as error:
            # The daemon may have said why before it hung up.
            self.drain()
            self.fail(f"sending failed: {error}")
            raise self._loss() from error
        except BaseException:
            self.fail("a send was interrupted, and part of a frame may be out")
            raise

    def _await_turn_to_send(self) -> None:
        """Takes the lock of those who send. Raises ConnectionLost.

        A thread that is interrupted just before it gives the lock back keeps it for ever, and ends
        the connection.
        """
        while not self._send_lock.acquire(timeout=TICK_S):
            if self._lost is not None:
                raise self._loss()

    def send_or_drop(self, message: Message) -> None:
        """Sends a message that may get lost, if that takes no time. Never raises."""
        frame = encode(message)
        if self._lost is not None or not self._send_lock.acquire(timeout=_DROP_LIMIT_S):
            return
        try:
            sent = self.sock.send(frame, socket.MSG_DONTWAIT)
            if sent < len(frame):  # what has begun must be finished
                self.sock.sendall(frame[sent:])
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(f"sending failed: {error}")
        except BaseException:
            self.fail("a send was interrupted, and part of a frame may be out")
            raise
        finally:
            self._send_lock.release()

    def take_notice(self, limit_s: float) -> Message | None:
        """Waits for a message that came unasked; None if there is none within `limit_s` seconds."""
        with contextlib.suppress(OutOfTime):
            self.wait(self.notices.__len__, time.monotonic() + limit_s)
        return self.notices.popleft() if self.notices else None

    # -- reading

    def wait(self, done: Callable[[], object], deadline: float | None = None) -> None:
        """Reads, or lets another thread read, until `done()` is true.

        Raises OutOfTime at the monotonic instant `deadline`, or ConnectionLost.
        """
        me = threading.get_ident()
        if self._leader == me:
            self._refuse_reentry()
        try:
            if self._become_leader(me, done, deadline):
                while not done():
                    self._dispatch(self._receive(deadline))
        except (TimeSliceError, OutOfTime):
            raise
        except BaseException:
            if self._leader == me:
                # Bytes may have been read and thrown away with the exception.
                self.fail("the thread that was reading was interrupted")
            raise
        finally:
            if self._leader == me:
                with self._lock:
                    self._leader = 0
                    if self._followers:
                        self._turn.notify_all()

    def drain(self) -> None:
        """Takes in what has arrived, without waiting. Never raises but for an interrupt."""
        if self._leader or self._lost is not None:
            return
        me = threading.get_ident()
        try:
            with self._lock:
                if not self._leader:
                    self._leader = me
            while self._leader == me and (data := self._read_now()) is not None:
                self._dispatch(self._decode(data))
        except TimeSliceError:
            pass  # the next request finds out
        except BaseException:
            self.fail("the thread that was reading was interrupted")
            raise
        finally:
            if self._leader == me:
                with self._lock:
                    self._leader = 0
                    if self._followers:
                        self._turn.notify_all()

    def _become_leader(self, me: int, done: Callable[[], object], deadline: float | None) -> bool:
        """Waits for the turn to read; returns False if `done()` comes true before."""
        with self._lock:
            self._followers += 1
            try:
                while not done():
                    if self._lost is not None:
                        raise self._loss()
                    if not self._leader:
                        self._leader = me
                        return True
                    left_s = remaining(deadline, most_s=TICK_S)
                    if left_s == 0.0:
                        raise OutOfTime("the answer did not come in time")
                    self._turn.wait(left_s)
                return False
            finally:
                self._followers -= 1

    def _refuse_reentry(self) -> None:
        """Raises RuntimeError if this very thread is reading, further up in its stack.

        If it is not, it was, and an interrupt came into its stepping down.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code in _READERS and frame.f_locals.get("self") is self:
                raise RuntimeError(
                    "a signal handler called into the library while this thread was waiting in "
                    "it; only close() can be called there"
                )
            frame = frame.f_back
        self._leader = 0

    def _receive(self, deadline: float | None) -> list[Message]:
        """Reads once, or returns [] after a tick."""
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            raise OutOfTime("the answer did not come in time")
        asleep_at = now + _AWAKE_S
        while time.monotonic() < asleep_at:
            if (data := self._read_now()) is not None:
                return self._decode(data)
        if deadline is not None and (left_s := deadline - time.monotonic()) < TICK_S:
            self._poll(max(0.0, left_s))
            data = self._read_now()
            return [] if data is None else self._decode(data)
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self.fail(f"reading failed: {error}")
            raise self._loss() from error
        return self._decode(data)

    def _poll(self, limit_s: float) -> None:
        poller = select.poll()
        with contextlib.suppress(OSError, ValueError):  # closed on this side: the read will tell
            poller.register(self.sock.fileno(), select.POLLIN)
            poller.poll(limit_s * 1000 + 1)

    def _read_now(self) -> bytes | None:
        """Reads without waiting; None if nothing is there."""
        try:
            return self.sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            self.fail(f"reading failed: {error}")
            raise self._loss() from error

    def _decode(self, data: bytes) -> list[Message]:
        if not data:
            self.fail("the daemon closed the connection")
            raise self._loss()
        try:
            return self._reader.feed(data)
        except TimeSliceError as error:
            self._told = error
            self.fail(str(error))
            raise self._loss() from error

    def _dispatch(self, messages: list[Message]) -> None:
        for message in messages:
            if not self._keep_answer(message):
                self._on_other(message)

    def _keep_answer(self, message: Message) -> bool:
        answered = message.get("re")
        if answered.__class__ is not int or answered not in self._answers:
            return False
        with self._lock:
            if answered not in self._answers:  # given up just now
                return False
            self._answers[answered] = message
            if self._followers:
                self._turn.notify_all()
        return True

    def _on_other(self, message: Message) -> None:
        if message.get("t") == "error":
            self._told = error_from(message)
            return
        if self._on_message is None:
            self.notices.append(message)
        else:
            self._on_message(self, message)
        with self._lock:
            if self._followers:  # `done` of another thread may look at what this changed
                self._turn.notify_all()

    # -- the end

    def fail(self, why: str) -> None:
        """Ends the connection for all its threads; each raises ConnectionLost."""
        with self._lock:
            if self._lost is None:
                self._lost = why
            self._turn.notify_all()
        hang_up(self.sock)

    def wait_until_lost(self, limit_s: float) -> bool:
        """Waits for a thread to find out that the connection ended; for one that knows it did."""
        with self._lock:
            return self._turn.wait_for(lambda: self._lost is not None, limit_s)

    def close(self) -> None:
        """Ends the connection and gives the descriptor back."""
        self.fail("it was closed by this side")
        self.sock.close()

    def close_after_fork(self) -> None:
        """Gives an inherited descriptor back. The parent's connection goes on; locks are not used,
        because a thread that does not exist here may hold them.
        """
        self._lost = "it belongs to the parent process"
        with contextlib.suppress(OSError):
            os.close(self.sock.detach())

    def _loss(self) -> TimeSliceError:
        """The exception to raise. What is the fault of this side is not worth a reconnect."""
        told = self._told
        if told is not None and not isinstance(told, Unavailable):
            return told
        return ConnectionLost(f"the connection to the daemon was lost: {told or self._lost}")


def _either(first: Callable[[], object], second: Callable[[], bool]) -> bool:
    return bool(first()) or second()


_READERS = (Connection.wait.__code__, Connection.drain.__code__)
