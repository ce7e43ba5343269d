"""`on_accelerators`: a lease around a function or a block."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from libtimeslice.lease import Lease, LeaseContext
from libtimeslice.session import Ask

if TYPE_CHECKING:
    from libtimeslice.client import TimeSlice

Function = TypeVar("Function", bound=Callable[..., Any])


def check_function(function: Callable[..., object]) -> None:
    """Refuses what would run its body after the lease is gone."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{function.__qualname__} is a generator: its body runs when it is iterated, not when "
            "it is called; use `with ts.lease(...)` inside it"
        )


class OnAccelerators:
    """Decorator for functions and coroutine functions, and context manager. May be used again."""

    def __init__(self, client: TimeSlice, ask: Ask) -> None:
        self._client = client
        self._ask = ask
        self._entered: list[LeaseContext] = []

    def __enter__(self) -> Lease:
        context = LeaseContext(self._client, self._ask)
        # On the list before it is granted: an interrupt finds it there, or finds nothing held.
        self._entered.append(context)
        try:
            return context.__enter__()
        except BaseException:
            self._entered.remove(context)
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._entered.pop().__exit__(*exc_info)

    def __call__(self, function: Function) -> Function:
        check_function(function)
        wrapper = (
            self._wrap_coroutine(function)
            if inspect.iscoroutinefunction(function)
            else self._wrap_function(function)
        )
        return cast("Function", wrapper)

    def _wrap_function(self, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def leased(*args: object, **kwargs: object) -> object:
            with LeaseContext(self._client, self._ask):
                return function(*args, **kwargs)

        return leased

    def _wrap_coroutine(
        self, function: Callable[..., Coroutine[Any, Any, object]]
    ) -> Callable[..., Coroutine[Any, Any, object]]:
        @functools.wraps(function)
        async def leased(*args: object, **kwargs: object) -> object:
            lease = await acquire_off_loop(self._client, self._ask)
            try:
                return await function(*args, **kwargs)
            finally:
                await _in_thread(lease.release)

        return leased


async def acquire_off_loop(client: TimeSlice, ask: Ask) -> Lease:
    """Waits for a lease of the blocking client without blocking the event loop.

    Each wait has a thread of its own: in a shared pool, waiters could fill all the threads that the
    holder needs to release. A cancelled task cancels its acquire.
    """
    cancelled = threading.Event()
    held: list[Lease] = []

    def acquire() -> Lease:
        held.append(client._acquire(ask, stop=cancelled.is_set))
        if cancelled.is_set():
            held[0].release()
        return held[0]

    try:
        return await _in_thread(acquire)
    except asyncio.CancelledError:
        # Each side first says what it did and then looks at what the other did: one of them, or
        # both, which is harmless, will release a grant that came at this moment.
        cancelled.set()
        if held:
            threading.Thread(target=held[0].release, name="timeslice-release", daemon=True).start()
        else:
            client._wake()
        raise


Result = TypeVar("Result")


async def _in_thread(call: Callable[[], Result]) -> Result:
    """Runs a blocking call in a fresh thread; a cancelled caller does not stop it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("Result", result))

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:  # handed to the one who waits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="timeslice-wait", daemon=True).start()
    return await done
