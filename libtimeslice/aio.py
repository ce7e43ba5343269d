"""The asyncio client: the twin of `client.TimeSlice`, with the same names.

    from libtimeslice.aio import connect

    ts = connect()
    async with ts.lease("sampler", timeout=600) as lease:
        ...

A client belongs to the event loop that uses it first. A cancelled task leaves nothing behind: its
acquire is withdrawn, and a grant that crosses the cancel is handed back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from libtimeslice import accelerator, leaving
from libtimeslice.aio_line import AsyncLine, Signal
from libtimeslice.base import (
    TIMEOUT_SLACK_S,
    BaseClient,
    Names,
    acquire_error,
    acquire_timeout,
    answer_of,
    logger,
    progress_message,
    queue_message,
    tell_contended,
)
from libtimeslice.environment import Mode, Settings, check_name, settings_from
from libtimeslice.lease import LeaseView, PlainLeases
from libtimeslice.link import OutOfTime
from libtimeslice.nesting import enter, inside_of
from libtimeslice.protocol import Message
from libtimeslice.session import Arrive, Ask, Grant, LeaseState, Released
from libtimeslice.usage import check_function

CoroutineFunction = TypeVar(
    "CoroutineFunction", bound=Callable[..., Coroutine[Any, Any, Any]]
)  # Any: whatever the decorated function takes and returns


def connect(
    socket: str | os.PathLike[str] | None = None,
    job: str | None = None,
    *,
    mode: str | Mode | None = None,
    groups: Mapping[str, str | Iterable[str]] | None = None,
    ranks: int | None = None,
    connect_timeout_s: float = 10.0,
    reply_limit_s: float = 30.0,
    last_turn_s: float = 600.0,
    heartbeat_s: float | None = None,
    synchronize: bool = True,
) -> AsyncTimeSlice:
    """Returns a client of the daemon on this host, as `libtimeslice.connect` does.

    It connects when it is first needed, so this is no coroutine.
    """
    return AsyncTimeSlice(
        settings_from(
            socket=socket,
            job=job,
            mode=mode,
            groups=groups,
            ranks=ranks,
            connect_timeout_s=connect_timeout_s,
            reply_limit_s=reply_limit_s,
            last_turn_s=last_turn_s,
            heartbeat_s=heartbeat_s,
            synchronize=synchronize,
        )
    )


class AsyncLease(LeaseView):
    """A right to use the devices of its groups, until `release()` or the end of `async with`."""

    __slots__ = ("_client",)

    def __init__(self, client: AsyncTimeSlice) -> None:
        super().__init__()
        self._client = client

    @property
    def contended(self) -> bool:
        """Whether somebody waits for it, as last heard by the event loop."""
        return self._waited_for

    async def release(self) -> Released | None:
        """Gives the lease back; repeating it does nothing. See `lease.Lease.release`."""
        if self._done:
            return None
        self._done = True
        return await self._client._release(self)

    def off_accelerators(self, *, timeout: float | None = None) -> AsyncOffAccelerators:
        """Lets others onto the devices inside an `async with`, and takes them back at its end."""
        return AsyncOffAccelerators(self._client, self._grants, timeout)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.release()


class AsyncLeaseContext:
    """`async with ts.lease(...) as lease`. For one use."""

    __slots__ = ("_ask", "_client", "lease")

    def __init__(self, client: AsyncTimeSlice, ask: Ask) -> None:
        self._client = client
        self._ask = ask
        self.lease: AsyncLease | None = None

    async def __aenter__(self) -> AsyncLease:
        self.lease = await self._client._acquire(self._ask)
        return self.lease

    async def __aexit__(self, *exc_info: object) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            await lease.release()


class AsyncOffAccelerators:
    """The reverse of a lease: gives grants back on entry and takes them again on exit."""

    __slots__ = ("_client", "_given", "_grants", "_timeout")

    def __init__(
        self, client: AsyncTimeSlice, grants: tuple[Grant, ...], timeout: float | None
    ) -> None:
        self._client = client
        self._grants = grants
        self._timeout = timeout
        self._given: list[Grant] = []

    async def __aenter__(self) -> None:
        for grant in reversed(self._grants):
            if grant.live:
                self._given.insert(0, grant)
                await self._client._free(grant)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        given, self._given = self._given, []
        if kind is not None and not issubclass(kind, Exception):
            # The task is being cancelled: it shall not queue up for a turn to be cancelled in.
            return
        for grant in given:
            await self._client._take_again(grant, self._timeout)


class AsyncOnAccelerators:
    """Decorator for coroutine functions, and async context manager. May be used again."""

    def __init__(self, client: AsyncTimeSlice, ask: Ask) -> None:
        self._client = client
        self._ask = ask
        self._entered: list[AsyncLease] = []

    async def __aenter__(self) -> AsyncLease:
        lease = await self._client._acquire(self._ask)
        self._entered.append(lease)
        return lease

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.pop().release()

    def __call__(self, function: CoroutineFunction) -> CoroutineFunction:
        check_function(function)
        if not inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{function.__qualname__} is no coroutine function, and to wait for a lease in it "
                "would block the event loop; use libtimeslice.connect() for it"
            )

        @functools.wraps(function)
        async def leased(*args: object, **kwargs: object) -> object:
            async with AsyncLeaseContext(self._client, self._ask):
                return await function(*args, **kwargs)

        return cast("CoroutineFunction", leased)


class AsyncTimeSlice(BaseClient):
    """A client of the daemon for one event loop. Pickles as its configuration."""

    _line: AsyncLine

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._start_afresh()
        leaving.watch(self)

    def _start_afresh(self) -> None:
        self._line = AsyncLine(self.settings, self.callbacks)
        self._session = self._line.session
        #: Where tasks wait for a grant that another task of this client asked for.
        self._gate = Signal()
        self._plain: PlainLeases[AsyncLease] = PlainLeases()
        self._asks.clear()
        self._finalizer = weakref.finalize(self, leaving.settle, self._line)
        self._finalizer.atexit = False  # `leaving` has its own order

    def _start_afresh_in_child(self) -> None:
        self._finalizer.detach()
        self._line.close_after_fork()
        self._drop_agent_after_fork()
        self._start_afresh()

    def __reduce__(self) -> tuple[object, ...]:
        return AsyncTimeSlice, (dataclasses.replace(self.settings, job=self.job),)

    async def __aenter__(self) -> AsyncTimeSlice:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- leases

    def lease(
        self,
        groups: Names = None,
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> AsyncLeaseContext:
        """Returns an async context manager. Arguments and errors as of `TimeSlice.lease`."""
        return AsyncLeaseContext(self, self._ask(groups, timeout, phase, ranks, arrive))

    async def acquire(
        self,
        groups: Names = None,
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> AsyncLease:
        """Like `lease`, for code that cannot use `async with`. Must be followed by `release`."""
        lease = await self._acquire(self._ask(groups, timeout, phase, ranks, arrive))
        self._plain.add(lease)
        return lease

    async def release(self, lease: AsyncLease | None = None) -> Released | None:
        """Releases a lease that `acquire` returned, without one the latest."""
        return await self._plain.take(lease).release()

    @overload
    def on_accelerators(self, function: CoroutineFunction, /) -> CoroutineFunction: ...

    @overload
    def on_accelerators(
        self,
        *groups: str,
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> AsyncOnAccelerators: ...

    def on_accelerators(
        self,
        *groups: str | Callable[..., Coroutine[Any, Any, Any]],
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> object:
        """A lease around each call of a coroutine function, or around an `async with` block."""
        function = groups[0] if len(groups) == 1 and callable(groups[0]) else None
        names = cast("tuple[str, ...]", groups) if groups and function is None else None
        around = AsyncOnAccelerators(self, self._ask(names, timeout, phase, ranks, arrive))
        return around if function is None else around(function)

    def off_accelerators(self, *, timeout: float | None = None) -> AsyncOffAccelerators:
        """Lets others onto everything that this client holds, inside an `async with`."""
        return AsyncOffAccelerators(self, tuple(self._session.grants.values()), timeout)

    # -- what a job tells

    @contextlib.asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        """Names a phase that needs no devices, such as a reward function, for reports."""
        check_name("a phase", name)
        await self._tell({"t": "phase", "name": name, "begin": True})
        try:
            yield
        finally:
            await self._tell({"t": "phase", "name": name, "begin": False})

    async def progress(self, **fields: object) -> None:
        """Tells figures of the job for reports. See `TimeSlice.progress`."""
        await self._tell(progress_message(fields))

    async def queue(self, name: str, *, depth: float, target: float | None = None) -> None:
        """Tells the backlog between two stages of the job, in its own items."""
        await self._tell(queue_message(name, depth, target))

    async def heartbeat(self) -> None:
        """Shows that this job goes on, if it promised to. See `TimeSlice.heartbeat`."""
        if self._heartbeat_is_due():
            await self._tell({"t": "heartbeat"})

    async def register(self) -> tuple[str, ...]:
        """Makes this process known as a rank of its job, and starts its agent."""
        if not self._join():
            return ()
        answer = answer_of(await self._line.call({"t": "register", "pid": None}))
        self._start_agent(registered=True)
        return tuple(answer.get("groups") or ())

    async def status(self) -> Message:
        """The daemon's view of all groups: `{"groups": [...], ...}`."""
        if not self._join():
            return {"groups": []}
        status: Message = answer_of(await self._line.call({"t": "status"})).get("status", {})
        return status

    async def close(self) -> None:
        """Ends the session and releases what it holds. May be repeated."""
        if self._closed:
            return
        try:
            for grant in list(self._session.grants.values()):
                await self._finish_device_work(grant)
        finally:
            self.close_now()
        if accelerator.in_use():
            # In a thread, since it may take long, and on a line that does not end with the loop.
            await asyncio.get_running_loop().run_in_executor(None, leaving.come_back, self._line)

    def close_now(self) -> None:
        """Closes without waiting for anything, with the event loop running or not."""
        if self._closed:
            return
        self._closed = True
        if self._agent is not None:
            self._agent.stop(wait=False)  # its callback may wait for this very loop
        for grant in list(self._session.grants.values()):
            self._session.release(grant)
        self._finalizer()

    # -- acquiring

    async def _acquire(self, ask: Ask) -> AsyncLease:
        """Returns a granted lease. Whatever is raised in here, nothing stays behind."""
        lease = AsyncLease(self)
        deadline = None if ask.timeout_s is None else time.monotonic() + ask.timeout_s
        try:
            if not await self._nest(lease, ask, deadline):
                lease._stand_on(await self._obtain(lease, ask, deadline))
            enter(lease._grants)
            return lease
        finally:
            self._session.asking.pop(lease, None)
            self._gate.fire()

    async def _nest(self, lease: AsyncLease, ask: Ask, deadline: float | None) -> bool:
        """Stands the lease on grants that this client has, or will have any moment.

        Returns False if there are none: then it is noted that the lease asks for them.
        """
        while True:
            found = self._session.covering(ask.groups)
            if found:
                lease._nest_in(found)
                return True
            if not self._session.is_asking(ask.groups):
                self._session.asking[lease] = ask.groups
                return False
            try:
                await self._gate.wait(deadline)
            except OutOfTime:
                raise acquire_timeout(ask) from None

    async def _obtain(self, holder: object, ask: Ask, deadline: float | None) -> Grant:
        """Gets a fresh grant from the daemon; whatever is raised, none is left behind."""
        session = self._session
        if not self._join():
            return session.pretend(ask, holder)
        if (news := session.watchdog_news()) is not None:
            self._line.send_or_drop(news)
        message = ask.message(next(session.ids), inside_of(session.grants))
        if deadline is not None:
            message["timeout_s"] = max(0.0, deadline - time.monotonic())
        try:
            limit = None if deadline is None else deadline + TIMEOUT_SLACK_S
            answer = await self._line.exchange(message, limit)
        except OutOfTime:
            self._line.withdraw(message, again=False)
            raise acquire_timeout(ask) from None
        except BaseException:
            self._line.withdraw(message, again=True)
            raise
        if "err" in answer:
            raise acquire_error(answer, ask)
        grant = session.granted(ask, message["id"], answer, holder)
        if grant.ack_s is not None:
            self._line.send_or_drop({"t": "ack", "lease": grant.lease})
        tell_contended(self.callbacks, grant)
        return grant

    async def _take_again(
        self,
        grant: Grant,
        timeout: float | None,
    ) -> None:
        """Gets a released grant back for the leases that still stand on it."""
        if not grant.holders or grant.state is not LeaseState.RELEASED:
            return
        ask = dataclasses.replace(grant.ask, timeout_s=timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            fresh = await self._obtain(next(iter(grant.holders)), ask, deadline)
        except BaseException as error:
            grant.state, grant.reason = LeaseState.LOST, f"it could not be taken back: {error}"
            raise
        self._session.taken_again(grant, fresh)

    # -- releasing

    async def _release(self, lease: AsyncLease) -> Released | None:
        answer = None
        for grant in reversed(lease._grants):
            grant.holders.discard(lease)
            if not grant.holders:
                answer = await self._free(grant)
        return answer

    async def _free(self, grant: Grant) -> Released | None:
        try:
            await self._finish_device_work(grant)
        finally:
            # The request leaves at once; only its answer is waited for.
            answer = await self._give_back(grant)
        return answer

    async def _finish_device_work(self, grant: Grant) -> None:
        if not (self.settings.synchronize and grant.live and accelerator.in_torch()):
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, accelerator.synchronize)
        if grant.waiters:
            await loop.run_in_executor(None, accelerator.empty_cache)

    async def _give_back(self, grant: Grant) -> Released | None:
        message = self._session.release(grant)
        answer = None if message is None else await self._line.exchange_now(message)
        if answer is None:
            return None
        if "err" in answer:
            logger.warning("lease %s had ended before: %s", grant.lease, answer["err"])
            return None
        return Released(int(answer.get("waiters", 0)), bool(answer.get("deferred", True)))

    async def _tell(self, message: Message) -> None:
        if self._join():
            await self._line.tell(message)
