"""What a job wants to be told: contention, loss, and the pauses around a move of its state."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

logger = logging.getLogger("libtimeslice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contended:
    """Somebody waits for what a lease of this client holds; `waiters` 0: no longer."""

    lease: str
    groups: tuple[str, ...]
    waiters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldWarning:
    """In `ends_in_s` seconds a lease is taken back, as soon as anybody waits for it."""

    lease: str
    groups: tuple[str, ...]
    ends_in_s: float
    #: Jobs that wait for it now.
    waiters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A lease that was asked for waits until a job's state has been moved off or onto the devices.

    Told about twice a second as long as bytes are moved.
    """

    lease: str
    #: The job whose state is moved: the one before, and then this client's own.
    job: str
    #: As `tslicectl show` has it: ``snapshotting``, ``restoring``, ...
    step: str
    done_bytes: int
    total_bytes: int
    #: None: nobody can tell yet.
    bytes_per_s: float | None
    left_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A lease ended before its release."""

    lease: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The state on these groups is about to be frozen: stop using it within `timeout_s` seconds."""

    groups: tuple[str, ...]
    timeout_s: float
    #: Number of the move that it is for, the same in all ranks of the job and used for one try
    #: alone; None: the daemon is too old to say.
    move: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The state on these groups is back and runs."""

    groups: tuple[str, ...]


#: What is told whenever it happens.
News = Contended | HoldWarning | Lost | Waiting
Notice = News | Pause | Resume
#: A function of one notice, or a coroutine function. What it returns is ignored.
Callback = TypeVar("Callback", bound=Callable[..., object])

#: Notices that wait to be told; the oldest make room.
_MAX_POSTED = 1024
#: How long the agent waits for a function that runs on the event loop, seconds.
_LIMIT_S = 60.0


class Callbacks:
    """The functions that a job registered, and how they are run.

    They run one after the other in the agent's thread, or on the event loop if there is one. What
    other threads hear of is posted to that thread.
    """

    def __init__(self) -> None:
        self._functions: dict[type[Notice], list[Callable[[Any], object]]] = {}
        #: Those that run behind all others of their kind.
        self._last_functions: dict[type[Notice], list[Callable[[Any], object]]] = {}
        self._posted: deque[News] = deque(maxlen=_MAX_POSTED)
        self._last: News | None = None
        #: Wakes the thread that runs what is posted.
        self.wake: Callable[[], object] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def start_afresh_in_child(self) -> None:
        """After a fork: no thread and no event loop of the parent's exists here."""
        self._posted.clear()
        self.wake = self.loop = None

    def add(self, kind: type[Notice], function: Callback, *, last: bool = False) -> Callback:
        """Registers a function for one kind of notice and returns it.

        last: it runs behind all that are not, whenever those were registered.
        """
        functions = self._last_functions if last else self._functions
        functions.setdefault(kind, []).append(function)
        return function

    def _of(self, kind: type[Notice]) -> list[Callable[[Any], object]]:
        return [*self._functions.get(kind, ()), *self._last_functions.get(kind, ())]

    def has(self, *kinds: type[Notice]) -> bool:
        """Whether there is a function for any of these kinds."""
        return any(self._of(kind) for kind in kinds)

    @property
    def any(self) -> bool:
        """Whether there is any function at all."""
        return bool(self._functions or self._last_functions)

    def post(self, notice: News) -> None:
        """Has the functions for a notice run soon. Takes no time, in whichever thread."""
        if not self._of(type(notice)) or notice == self._last:
            return  # a grant that begins contended is told twice: in it, and after it
        self._last = notice
        self._posted.append(notice)
        if self.wake is not None:
            self.wake()

    def run_posted(self) -> None:
        """Runs the functions for what was posted; their failures go to the log."""
        while self._posted:
            notice = self._posted.popleft()
            for function in self._of(type(notice)):
                self._call_and_log(function, notice)

    def run(self, notice: Pause | Resume, *, limit_s: float = _LIMIT_S) -> None:
        """Runs the functions for a notice that is answered; raises what the first failing raises.

        A function that runs on the event loop has `limit_s` seconds; then TimeoutError is raised.
        """
        for function in self._of(type(notice)):
            self._call(function, notice, limit_s)

    def _call_and_log(self, function: Callable[[Any], object], notice: Notice) -> None:
        try:
            self._call(function, notice, _LIMIT_S)
        except Exception:  # the edge: a callback's fault must not end the agent
            logger.exception("a callback for %r failed", notice)

    def _call(self, function: Callable[[Any], object], notice: Notice, limit_s: float) -> None:
        loop = self.loop
        if loop is not None and loop.is_running():
            running = asyncio.run_coroutine_threadsafe(_invoke(function, notice), loop)
            try:
                running.result(limit_s)
            finally:
                running.cancel()
        elif inspect.iscoroutinefunction(function):
            asyncio.run(_invoke(function, notice))
        else:
            function(notice)


async def _invoke(function: Callable[[Any], object], notice: Notice) -> None:
    result = function(notice)
    if inspect.isawaitable(result):
        await cast("Coroutine[object, object, object]", result)
