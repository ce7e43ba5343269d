"""One thread for calls that may hang in a library, so that the event loop never does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

#: Calls in the queue to the thread; beyond, it counts as not answering.
_MAX_CALLS: Final = 256

Answer = TypeVar("Answer")


class _Call(Generic[Answer]):
    """One call on its way through the thread and back."""

    __slots__ = ("function", "future", "is_overdue", "loop")

    def __init__(self, function: Callable[[], Answer], loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.loop = loop
        self.future: asyncio.Future[Answer] = loop.create_future()
        self.is_overdue = False


class CallThread:
    """Makes calls one after another in a thread of its own, and stops waiting for late ones.

    A bare queue there and one `call_soon_threadsafe` back: 22 us a call, where an executor with a
    time-out took 35 (measured idle, with uvloop).
    All but `_run` belongs to the loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._pending = 0
        #: Calls that are past their deadline and did not come back yet.
        self._overdue = 0
        self.is_running = False

    def start(self) -> None:
        """Let calls be made."""
        self.is_running = True
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def stop(self) -> None:
        """Let the thread end when it is through with what it was given."""
        self.is_running = False
        self._queue.put(None)

    async def call(self, function: Callable[[], Answer], timeout_s: float) -> Answer:
        """Return what `function` returns, or raise what it raises.

        Raises:
            TimeoutError: it is not back in time, or an earlier call is overdue already: then
                nothing is queued behind it.
        """
        assert self.is_running, "start() comes first"
        if self._overdue or self._pending >= _MAX_CALLS:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        call = _Call(function, loop)
        self._pending += 1
        self._queue.put(call)
        timer = loop.call_later(timeout_s, self._expire, call)
        try:
            return await call.future
        finally:
            timer.cancel()

    def _expire(self, call: _Call[Any]) -> None:
        if not call.future.done():
            call.is_overdue = True
            self._overdue += 1
            call.future.set_exception(TimeoutError())

    def _deliver(self, call: _Call[Any], answer: object, error: BaseException | None) -> None:
        self._pending -= 1
        self._overdue -= call.is_overdue
        if call.future.done():
            return
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(answer)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            answer: object = None
            error: BaseException | None = None
            try:
                # Nobody waits any more for what was cancelled or came too late.
                if not call.future.done():
                    answer = call.function()
            except BaseException as exc:
                error = exc
            # A loop that was closed meanwhile has nobody who waits.
            with suppress(RuntimeError):
                call.loop.call_soon_threadsafe(self._deliver, call, answer, error)
