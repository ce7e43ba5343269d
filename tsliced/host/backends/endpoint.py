"""Serving engines that park themselves when they are asked over HTTP: vLLM and SGLang.

Several ranks may belong to one engine, and a rank to several: what is asked of a rank is asked of
its engines, once for all ranks of each. An engine's word is not taken for what it did, because they
answer 200 and do nothing where they were started without the option: NVML has to show that memory
went. Where an engine is stands in a file, since hardly any can be asked, and a request of which
nobody heard the end is judged by memory too.

What an engine leaves on its devices (a context, NCCL's buffers, graphs) is weighed by the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from tsliced.core.model import Cause, DeviceId, JobKey, ProcessId, RankId, RankState
from tsliced.host.backends.base import Backend, BackendContext, BackendError, Outcome, failed
from tsliced.host.backends.driver_threads import why_not_runnable
from tsliced.host.backends.engine_discovery import ENDPOINT, Discovery, Found
from tsliced.host.backends.engines import KINDS, Engine, EngineUnfit
from tsliced.host.backends.http import HttpClient, HttpError
from tsliced.host.backends.op_files import read_facts, write_atomically
from tsliced.host.processes import is_alive

#: How often NVML is looked at, for memory that is to go.
POLL_S: Final = 0.05
#: An engine that has this share of what it had is back as a whole.
WHOLE_RATIO: Final = 0.95

#: Device memory of a rank, by device.
Used = Mapping[DeviceId, int]


class Place(Enum):
    """Where an engine is, or what it was last asked and did not answer yet."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RELEASING = "releasing"
    RELEASED = "released"
    OCCUPYING = "occupying"


NO_ENGINE: Final = (
    f"nobody says to which engine it belongs: start the engine with {ENDPOINT}=vllm+http://"
    "127.0.0.1:PORT (or sglang+http://...), or set backends.endpoint.engines"
)


class _NotFreed(Exception):  # noqa: N818 - an answer, not a mistake
    """An engine said that it freed its memory, and did not."""


class _Step(NamedTuple):
    """What is done to each engine of a rank."""

    act: Callable[[_Engine], Awaitable[None]]
    #: Where the rank is if nothing can be done at all.
    start: RankState
    #: None: wherever it is.
    goal: RankState | None
    undo: Callable[[_Engine], Awaitable[None]] | None = None


class EndpointBackend(Backend):
    """Configured under ``[backends.endpoint]``."""

    in_process = True
    nothing_to_move = (
        "belongs to no engine, or has no memory on a device: nothing of it could be moved"
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._settings = context.settings.endpoint
        self._discovery = Discovery(self._settings)
        self._jobs: dict[ProcessId, JobKey] = {}
        self._engines: dict[str, _Engine] = {}
        #: Two engines that move on one device at a time have been seen to deadlock
        #: (vllm-project/vllm#36753).
        self._turns: dict[DeviceId, asyncio.Lock] = {}

    async def start(self) -> None:
        """Forget the files of engines that are gone."""
        await asyncio.to_thread(_sweep, self.context.directory)

    def belongs(self, process: ProcessId, job: JobKey) -> None:
        """Know for which job the configuration may name an engine."""
        self._jobs[process] = job

    def forget(self, process: ProcessId) -> None:
        """Forget an engine with the last of its processes."""
        self._jobs.pop(process, None)
        for url, engine in list(self._engines.items()):
            engine.forget(process)
            if not engine.ranks:
                del self._engines[url]

    async def probe(self, process: ProcessId) -> bool:
        """Look whether it has an engine, and memory on a device, or had some that is parked."""
        try:
            engines = await self._engines_of(process)
        except EngineUnfit as exc:
            # One that is being started has nothing on a device yet, and nobody who listens.
            if await self.context.measure(process) == {}:
                return False
            raise BackendError(str(exc)) from exc
        if engines and await self.context.measure(process) == {}:
            return any(engine.used_by(process) for engine in engines)
        return bool(engines)

    async def companions(self, process: ProcessId) -> frozenset[ProcessId]:
        """Return all ranks of its engines."""
        try:
            engines = await self._engines_of(process)
        except EngineUnfit:
            engines = []
        return frozenset({process}.union(*(engine.ranks for engine in engines)))

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Pause its engines, when they have nothing in flight any more; all of them, or none."""
        process = rank.process
        objection = await asyncio.to_thread(self._discovery.objection, process)
        if objection is not None:
            return failed(rank, Cause.UNSUPPORTED, objection, RankState.RUNNING)
        used = await self.context.measure(process) or {}

        async def pause(engine: _Engine) -> None:
            engine.remember(process, used)
            await engine.pause(timeout_s)

        step = _Step(pause, RankState.RUNNING, RankState.FROZEN, undo=_Engine.unpause)
        return await self._on_all(rank, step)

    async def snapshot(self, rank: RankId) -> Outcome:
        """Have its engines free their memory, and see that it is free; all of them, or none."""
        step = _Step(self._release, RankState.FROZEN, RankState.PARKED, undo=self._occupy)
        return await self._on_all(rank, step)

    async def restore(self, rank: RankId) -> Outcome:
        """Have its engines take their memory again; all of them, or none."""

        async def undo(engine: _Engine) -> None:
            try:
                await self._release(engine)
            except _NotFreed:
                # Whatever it says: it has a part of its memory.
                engine.call_half_back()
                raise

        step = _Step(self._occupy, RankState.PARKED, RankState.FROZEN, undo=undo)
        return await self._on_all(rank, step)

    async def thaw(self, rank: RankId) -> Outcome:
        """Let its engines work on requests; one that was not brought back yet is, before."""

        async def thaw(engine: _Engine) -> None:
            await self._occupy(engine)
            await engine.unpause()

        return await self._on_all(rank, _Step(thaw, RankState.FROZEN, RankState.RUNNING))

    async def state(self, rank: RankId) -> Outcome:
        """Say where its engines are, and find it out where nobody heard the end of a request."""
        return await self._on_all(rank, _Step(_Engine.settle, RankState.UNKNOWN, None))

    # --- all engines of a rank ----------------------------------------------------------------

    async def _on_all(self, rank: RankId, step: _Step) -> Outcome:
        """Do something to all engines at once; if it fails for one, undo it for all."""
        if (stopped := why_not_runnable(rank.process)) is not None:
            return failed(rank, Cause.STOPPED, stopped, step.start)
        try:
            engines = await self._engines_of(rank.process)
        except EngineUnfit as exc:
            return failed(rank, Cause.UNSUPPORTED, str(exc), step.start)
        if not engines:
            return failed(rank, Cause.UNSUPPORTED, NO_ENGINE, step.start)
        before = engines[0].used_by(rank.process)
        errors = await asyncio.gather(*map(step.act, engines), return_exceptions=True)
        failures = [error for error in errors if error is not None]
        for error in failures:
            if not isinstance(error, HttpError | EngineUnfit | _NotFreed):
                raise error
        if failures and step.undo is not None:
            # Also the one that failed: it may have done a part of it.
            await asyncio.gather(*map(step.undo, engines), return_exceptions=True)
        observed = _observed(engine.place for engine in engines)
        if failures:
            observed = observed if step.goal is not None else RankState.UNKNOWN
            return failed(rank, _cause(failures[0], step.goal), str(failures[0]), observed)
        if step.goal not in (None, observed):
            text = f"its engines are not all where they were asked to be, but {observed.value}"
            return failed(rank, Cause.DRIVER, text, observed)
        is_parked = step.goal is RankState.PARKED
        after = await self.context.measure(rank.process) if is_parked else None
        moved = max(0, before - sum(after.values())) if after is not None else 0
        return Outcome(observed=observed, moved_bytes=moved)

    async def _engines_of(self, process: ProcessId) -> list[_Engine]:
        found = await asyncio.to_thread(self._discovery.find, process, self._jobs.get(process))
        return list(map(self._engine, found))

    def _engine(self, found: Found) -> _Engine:
        url = found.address.url
        if url not in self._engines:
            engine = KINDS[found.address.kind](
                HttpClient(found.address, found.token), self._settings
            )
            self._engines[url] = _Engine(engine, self.context)
        return self._engines[url]

    # --- devices ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _turn(self, devices: Collection[DeviceId]) -> AsyncIterator[None]:
        """Be the only one that moves on some devices. In one order, so nobody waits in a circle."""
        async with contextlib.AsyncExitStack() as stack:
            for device in sorted(devices):
                await stack.enter_async_context(self._turns.setdefault(device, asyncio.Lock()))
            yield

    async def _release(self, engine: _Engine) -> None:
        async with self._turn(engine.devices):
            await engine.release()
        # Without the turn: another engine of the same rank may have to free its part first.
        await engine.await_freed()

    async def _occupy(self, engine: _Engine) -> None:
        async with self._turn(engine.devices):
            await engine.occupy()


class _Engine:
    """One engine, and where it is. Its methods change that one after the other."""

    def __init__(self, engine: Engine, context: BackendContext) -> None:
        self._engine = engine
        self._settings = context.settings.endpoint
        self._measure = context.measure
        self._turn = asyncio.Lock()
        self.url = engine.client.address.url
        self._file = _file_of(context.directory, self.url)
        #: What its ranks had on the devices when it was paused.
        self.ranks: dict[ProcessId, Used] = {}
        self.place = Place.RUNNING
        self._load()

    @property
    def devices(self) -> frozenset[DeviceId]:
        """Where it has, or had, memory."""
        return frozenset(device for used in self.ranks.values() for device in used)

    def used_by(self, process: ProcessId) -> int:
        """Return what a rank had on the devices, in bytes; 0 where that is not known."""
        return sum(self.ranks.get(process, {}).values())

    def is_freed(self, process: ProcessId, now: Used) -> bool:
        """Whether a rank has so little left that the engine must have released it."""
        kept = 1 - self._settings.min_freed_ratio
        return sum(now.values()) <= self.used_by(process) * kept

    def remember(self, process: ProcessId, used: Used) -> None:
        """Know what a rank has before anything is released."""
        if self.place in (Place.RUNNING, Place.PAUSING, Place.PAUSED):
            self.ranks[process] = dict(used)

    def forget(self, process: ProcessId) -> None:
        """Forget a rank that died; without any, the engine has gone too."""
        self.ranks.pop(process, None)
        if not self.ranks:
            self._file.unlink(missing_ok=True)

    async def pause(self, timeout_s: float) -> None:
        """Pause it, if it runs. After a failure it runs as before, if it can be reached."""
        async with self._turn:
            if self.place is not Place.RUNNING:
                return
            self._set(Place.PAUSING)
            try:
                await self._engine.pause(timeout_s)
            except EngineUnfit:
                self._set(Place.RUNNING)
                raise
            self._set(Place.PAUSED)

    async def unpause(self) -> None:
        """Let it run, if it is paused or was to be."""
        async with self._turn:
            if self.place in (Place.PAUSED, Place.PAUSING):
                await self._engine.unpause()
                self._set(Place.RUNNING)

    async def release(self) -> None:
        """Have it free its memory, if it has not. What it says then is not proof."""
        async with self._turn:
            await self._judge_unless_asked_again()
            if self.place is Place.RELEASED:
                return
            if self.place is Place.OCCUPYING and self._engine.may_be_asked_again:
                # vLLM with one half awake takes itself for asleep: first it has to be whole.
                await self._engine.occupy(self._limit_s())
            self._set(Place.RELEASING)
            try:
                await self._engine.release(self._limit_s())
            except EngineUnfit:
                self._set(Place.PAUSED)
                raise
            except HttpError as exc:
                await self._judge_failure(exc)
                raise
            self._set(Place.RELEASED)

    async def await_freed(self) -> None:
        """Wait until NVML shows that the memory of all its ranks went. Raises `_NotFreed`.

        An engine may answer before it is done.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.settle_s
        for process in list(self.ranks):
            while self.used_by(process):
                now = await self._measure(process)
                if now is None or self.is_freed(process, now):
                    break
                if loop.time() >= end:
                    raise _NotFreed(
                        f"the engine at {self.url} says that it freed its memory, and process "
                        f"{process.pid} has {sum(now.values()):,} bytes still, of "
                        f"{self.used_by(process):,}; {self._engine.not_freed}"
                    )
                await asyncio.sleep(POLL_S)

    async def occupy(self) -> None:
        """Have it take its memory again, if it is not back as a whole."""
        async with self._turn:
            await self._judge_unless_asked_again()
            if self.place not in (Place.RELEASED, Place.RELEASING, Place.OCCUPYING):
                return
            self._set(Place.OCCUPYING)
            try:
                await self._engine.occupy(self._limit_s())
            except HttpError as exc:
                await self._judge_failure(exc)
                raise
            self._set(Place.PAUSED)

    def call_half_back(self) -> None:
        """Know that it has a part of its memory, whatever it says."""
        self._set(Place.OCCUPYING)

    async def settle(self) -> None:
        """Find out where it is. Raises `HttpError` if that cannot be told."""
        async with self._turn:
            if self.place is Place.PAUSING:
                # Nothing else has happened to it; to unpause it twice does no harm.
                self._set(Place.PAUSED)
            await self._judge(self._settings.settle_s)
            if self.place is Place.RELEASED and await self._was_woken():
                self._set(Place.RUNNING)

    async def _judge_failure(self, failure: HttpError) -> None:
        """Find out how far a request got that failed; without an answer it may go on."""
        with contextlib.suppress(HttpError):
            await self._judge(0.0 if failure.status is not None else self._settings.settle_s)

    async def _judge_unless_asked_again(self) -> None:
        if not self._engine.may_be_asked_again:
            await self._judge(self._settings.settle_s)

    async def _judge(self, patience_s: float) -> None:
        """Find out by memory how far a request got of which nobody heard the end.

        What is neither here nor there, or may still move, stays as it is: it may have memory, and
        not all of it. Raises `HttpError` where NVML does not tell, and the engine neither.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        while self.place in (Place.RELEASING, Place.OCCUPYING):
            share = await self._share_left()
            is_over = loop.time() >= end
            if share is None:
                await self._ask_if_awake()
            elif share <= 1 - self._settings.min_freed_ratio:
                if is_over or self.place is Place.RELEASING:
                    self._set(Place.RELEASED)
            elif share >= WHOLE_RATIO and not self._engine.may_be_asked_again:
                # Of one that may be asked again that is not taken for the end: it may have to read
                # its weights yet.
                if is_over or self.place is Place.OCCUPYING:
                    self._set(Place.PAUSED)
            elif is_over:
                return
            await asyncio.sleep(POLL_S)

    async def _share_left(self) -> float | None:
        """Return which share of what its ranks had they have now; None: it cannot be told."""
        before, now = 0, 0
        for process in list(self.ranks):
            used = await self._measure(process)
            if used is None:
                return None
            before += self.used_by(process)
            now += sum(used.values())
        return now / before if before else None

    async def _ask_if_awake(self) -> None:
        if not await self._engine.is_awake():
            raise HttpError(
                f"how far the engine at {self.url} got with {self.place.value} its memory cannot "
                "be told: NVML does not say what it has"
            )
        self._set(Place.PAUSED)

    async def _was_woken(self) -> bool:
        """Whether somebody else, such as a trainer of its own job, woke it meanwhile."""
        with contextlib.suppress(HttpError):
            return await self._engine.is_awake()
        return False

    def _limit_s(self) -> float:
        size = sum(sum(used.values()) for used in self.ranks.values())
        return self._settings.request_timeout_s + size / self._settings.request_bytes_per_s

    # --- the file -----------------------------------------------------------------------------

    def _set(self, place: Place) -> None:
        self.place = place
        ranks = [[p.pid, p.start_time, dict(used)] for p, used in self.ranks.items()]
        write_atomically(self._file, {"place": place.value, "ranks": ranks})

    def _load(self) -> None:
        """Know what an earlier daemon wrote, unless all processes that it is about are gone."""
        facts = read_facts(self._file)
        self.ranks = _living(facts)
        if self.ranks:
            with contextlib.suppress(ValueError):
                self.place = Place(facts.get("place"))


def _file_of(directory: Path, url: str) -> Path:
    return directory / f"engine-{hashlib.sha256(url.encode()).hexdigest()[:24]}.json"


def _living(facts: dict[str, Any]) -> dict[ProcessId, Used]:
    """Return the ranks of an engine's file that live."""
    found: dict[ProcessId, Used] = {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        for pid, start_time, used in facts["ranks"]:
            process = ProcessId(int(pid), int(start_time))
            if is_alive(process):
                found[process] = {DeviceId(device): int(size) for device, size in used.items()}
    return found


def _sweep(directory: Path) -> None:
    for path in directory.glob("engine-*.json"):
        if not _living(read_facts(path)):
            path.unlink(missing_ok=True)


def _observed(places: Iterable[Place]) -> RankState:
    """Return the state of a rank by those of its engines.

    While any of them may have memory on a device, the rank counts as frozen: then it is thought to
    be on its devices, and a thaw brings back what is away.
    """
    found = set(places)
    if found == {Place.RELEASED}:
        return RankState.PARKED
    if found == {Place.RUNNING}:
        return RankState.RUNNING
    return RankState.FROZEN


def _cause(failure: BaseException, goal: RankState | None) -> Cause:
    match failure:
        case EngineUnfit():
            return Cause.UNSUPPORTED
        case _NotFreed():
            return Cause.NOT_FREED
        case HttpError(is_timeout=True) if goal is RankState.FROZEN:
            return Cause.FREEZE_TIMEOUT
        case _:
            return Cause.DRIVER
