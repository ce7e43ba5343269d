"""What a job wants to be told: contention, loss, and the pauses around a move of its state."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

logger = logging.getLogger("libtimeslice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contended:
    """Somebody waits for what a lease of this job holds; `waiters` 0: no longer."""

    lease: str
    groups: tuple[str, ...]
    waiters: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The state on these groups is back and runs."""

    groups: tuple[str, ...]


Notice = Contended | Lost | Pause | Resume
#: A function of one notice, or a coroutine function. What it returns is ignored.
Callback = TypeVar("Callback", bound=Callable[..., object])

#: Leases whose loss was told, so that it is told once though two connections may hear of it.
_MAX_TOLD = 256
#: How long the agent waits for a function that runs on the event loop, seconds.
_LIMIT_S = 60.0


class Callbacks:
    """The functions that a job registered, and how they are run.

    They run one after the other in the agent's thread, or on the event loop if there is one.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._functions: dict[type[Notice], list[Callable[[Any], object]]] = {}
        self._told: dict[str, None] = {}
        self._lock = threading.Lock()
        self.loop = loop

    def start_afresh_in_child(self) -> None:
        """After a fork: no thread and no event loop of the parent's exists here."""
        self._lock = threading.Lock()
        self.loop = None

    def add(self, kind: type[Notice], function: Callback) -> Callback:
        """Registers a function for one kind of notice and returns it."""
        self._functions.setdefault(kind, []).append(function)
        return function

    def has(self, *kinds: type[Notice]) -> bool:
        """Whether there is a function for any of these kinds."""
        return any(self._functions.get(kind) for kind in kinds)

    @property
    def any(self) -> bool:
        """Whether there is any function at all."""
        return bool(self._functions)

    def run(self, notice: Notice, *, limit_s: float = _LIMIT_S) -> None:
        """Runs all functions for a notice; raises what the first that fails raises.

        A function that runs on the event loop has `limit_s` seconds; then TimeoutError is raised.
        """
        for function in self._functions.get(type(notice), ()):
            self._call(function, notice, limit_s)

    def tell(self, notice: Contended | Lost) -> None:
        """Runs all functions for a notice that nobody waits for; failures go to the log."""
        if isinstance(notice, Lost) and self._was_told(notice.lease):
            return
        for function in self._functions.get(type(notice), ()):
            self._call_and_log(function, notice)

    def _was_told(self, lease: str) -> bool:
        with self._lock:
            if lease in self._told:
                return True
            if len(self._told) >= _MAX_TOLD:
                del self._told[next(iter(self._told))]
            self._told[lease] = None
            return False

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
