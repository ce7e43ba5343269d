"""Several backends on one host: for each rank the first way that fits, and two of them in one.

A *way* names a backend, or two: ``torch+cuda`` has the process move its tensors, and then the
driver what is left of it on the devices. The second part works only if what is left, as NVML shows
it, may not stay there beside whoever comes next.

    freeze     the first part
    snapshot   the first part; weigh what is left; freeze and snapshot by the second part
    restore    restore and thaw by the second part; the first part
    thaw       whatever of this is left to do; thaw by the first part

Rules:

* The first part works inside of the process, which has to run for it. So the second part lets go
  of the device work as soon as it has brought its share back; the job stands still all the same,
  since the first part keeps it so until it is thawed.
* A rank that is somewhere between its devices and host memory is called FROZEN: it counts as on
  its devices, a snapshot goes on with it, and a thaw brings it back as a whole.
* What no part can tell is written down before it becomes true: the way, whether the second part
  may have begun, and whether the rank rests without it.
* Processes that move together (the ranks of an engine) have all to run when the first part brings
  them back; the last of them that the second part has let go brings them back for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from tsliced.config.ways import Way, Ways
from tsliced.core.model import Cause, DeviceId, JobKey, ProcessId, RankId, RankState
from tsliced.host.backends.base import (
    Agents,
    Backend,
    BackendContext,
    BackendError,
    Neighbours,
    Outcome,
    failed,
    load_backend,
)
from tsliced.host.backends.op_files import read_facts, write_atomically
from tsliced.host.processes import identify

#: What is left on the devices is final when it has not changed for so long, since NVML lags.
SETTLED_S: Final = 0.3
POLL_S: Final = 0.05
#: For the second part of a rank whose freeze an earlier daemon was asked for.
FREEZE_TIMEOUT_S: Final = 10.0


class Depth(Enum):
    """How far a rank has been moved, as far as its parts do not say it themselves."""

    #: The second part has nothing of it.
    FIRST = "first"
    #: The same, and what the first part left may stay: it is parked.
    RESTS = "rests"
    #: The second part was begun, and not let go of it since.
    SECOND = "second"


@dataclass(slots=True, kw_only=True)
class _Course:
    """How one process is moved, from its freeze to its thaw. Changes are written to its file."""

    way: Way
    depth: Depth
    timeout_s: float = FREEZE_TIMEOUT_S
    #: The first part is known to be on the devices as a whole.
    is_whole: bool = False
    #: It is what the process would go now, and perhaps another one than it went.
    is_guessed: bool = False


class CompositeBackend(Backend):
    """Chooses among backends by what is configured and what each process has."""

    nothing_to_move = "has nothing that a backend of this host could move"

    def __init__(self, context: BackendContext, ways: Ways) -> None:
        super().__init__(context)
        self._ways = ways
        self._backends: dict[str, Backend] = {}
        for way in ways.all():
            self._load(way)
        self.seen_by_nvml = any(backend.seen_by_nvml for backend in self._backends.values())
        self._jobs: dict[ProcessId, JobKey] = {}
        self._courses: dict[ProcessId, _Course] = {}
        self._neighbours: Neighbours | None = None

    def _load(self, way: Way) -> None:
        """Load a way's backends. Raises `BackendError` for those that make no sense together."""
        for name in way:
            if name not in self._backends:
                self._backends[name] = load_backend(name, self.context)
        if len(way) == 1:
            return
        first, second = (self._backends[name] for name in way)
        if second.in_process or not first.in_process:
            raise BackendError(
                f"{'+'.join(way)!r} makes no sense: the first of two backends has the process move "
                "its own state (torch, endpoint), and the second one does not"
            )

    # --- for all of them ----------------------------------------------------------------------

    async def start(self) -> None:
        """Start all, and know what an earlier daemon had under way."""
        self._courses = await asyncio.to_thread(_read_courses, self.context.directory)
        for course in self._courses.values():
            # Also what is not configured any more.
            self._load(course.way)
        for backend in self._backends.values():
            await backend.start()

    async def close(self) -> None:
        """Close all."""
        for backend in self._backends.values():
            await backend.close()

    def meet(self, agents: Agents) -> None:
        """Introduce all."""
        for backend in self._backends.values():
            backend.meet(agents)

    def join(self, neighbours: Neighbours) -> None:
        """Know whom to ask what may stay on the devices."""
        self._neighbours = neighbours
        for backend in self._backends.values():
            backend.join(neighbours)

    def belongs(self, process: ProcessId, job: JobKey) -> None:
        """Know whose ways a process goes."""
        self._jobs[process] = job
        for backend in self._backends.values():
            backend.belongs(process, job)

    def prepare(self, process: ProcessId) -> None:
        """Prepare all that may have to move it."""
        for backend in self._involved(process):
            backend.prepare(process)

    def forget(self, process: ProcessId) -> None:
        """Forget it everywhere."""
        self._jobs.pop(process, None)
        self._end(process)
        for backend in self._backends.values():
            backend.forget(process)

    def hindrance(self, process: ProcessId) -> str | None:
        """Ask those that may be moving it."""
        found = (backend.hindrance(process) for backend in self._involved(process))
        return next(filter(None, found), None)

    def way_of(self, process: ProcessId) -> str | None:
        """Return the way that it is going; None: it is not being moved."""
        course = self._courses.get(process)
        return "+".join(course.way) if course is not None else None

    def _involved(self, process: ProcessId) -> list[Backend]:
        course = self._courses.get(process)
        ways = self._ways_of(process) if course is None else [course.way]
        return [self._backends[name] for name in dict.fromkeys(n for way in ways for n in way)]

    # --- which way ----------------------------------------------------------------------------

    def _ways_of(self, process: ProcessId) -> tuple[Way, ...]:
        groups = self._neighbours.groups_of(process) if self._neighbours is not None else ()
        return self._ways.of(self._jobs.get(process), groups)

    async def _fits(self, way: Way, process: ProcessId) -> bool | BackendError:
        """Return whether a way's first part has something to move, or why that is not clear."""
        try:
            return await self._backends[way[0]].probe(process)
        except BackendError as exc:
            return exc

    async def _first_fitting(self, process: ProcessId) -> Way | None:
        """Return the way that a process would go now. Raises `BackendError` if it is not clear."""
        doubt: BackendError | None = None
        for way in self._ways_of(process):
            fits = await self._fits(way, process)
            if fits is True:
                return way
            doubt = doubt or fits or None
        if doubt is not None:
            raise doubt
        return None

    async def probe(self, process: ProcessId) -> bool:
        """Return whether any of them could move something."""
        return process in self._courses or await self._first_fitting(process) is not None

    async def is_hidden(self, process: ProcessId) -> bool:
        """Return whether it has something that NVML does not show."""
        for name in dict.fromkeys(way[0] for way in self._ways_of(process)):
            backend = self._backends[name]
            with contextlib.suppress(BackendError):
                if await backend.is_hidden(process) and await backend.probe(process):
                    return True
        return False

    async def drains(self, process: ProcessId) -> bool:
        """Ask the first part of the way that it goes.

        Each scan asks this of each rank. So nobody is asked whether a way fits behind which none
        drains: the driver, as a rule.
        """
        ways = self._ways_of(process)
        each = [await self._backends[way[0]].drains(process) for way in ways]
        for number, way in enumerate(ways):
            if not any(each[number:]):
                break
            if await self._fits(way, process) is True:
                return each[number]
        return False

    # --- operations ---------------------------------------------------------------------------

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Freeze by the first way that can move the rank."""
        refusals: list[str] = []
        for way in self._ways_of(rank.process):
            # Where it is not clear whether there is anything, the freeze itself says why.
            if await self._fits(way, rank.process) is False:
                continue
            course = _Course(way=way, depth=Depth.FIRST, timeout_s=timeout_s, is_whole=True)
            self._begin(rank.process, course)
            outcome = await self._backends[way[0]].freeze(rank, timeout_s=timeout_s)
            if outcome.failure is None or outcome.observed is not RankState.RUNNING:
                return outcome
            self._end(rank.process)
            if outcome.failure.cause is not Cause.UNSUPPORTED:
                return outcome
            refusals.append(outcome.failure.text)
        text = "; ".join(refusals) or f"process {rank.process.pid} {self.nothing_to_move}"
        return failed(rank, Cause.UNSUPPORTED, text, RankState.RUNNING)

    async def snapshot(self, rank: RankId) -> Outcome:
        """Park by the first part, and by the second one if what is left may not stay."""
        course = await self._course_of(rank)
        if isinstance(course, Outcome):
            return course
        first, second = self._parts(course)
        if second is None:
            return await first.snapshot(rank)
        state = await self._settle(rank, course, second)
        if course.depth is Depth.SECOND:
            return await self._sink(rank, second, state, moved_bytes=0)
        course.is_whole = False
        self._set(rank.process, course, Depth.FIRST)
        outcome = await first.snapshot(rank)
        if outcome.failure is not None or outcome.observed is not RankState.PARKED:
            return _between(outcome, RankState.PARKED)
        if (objection := await self._objection(rank.process)) is None:
            self._set(rank.process, course, Depth.RESTS)
            return outcome
        if not await second.probe(rank.process):
            text = f"{objection}, and {course.way[1]} can move nothing of it"
            return failed(rank, Cause.NOT_FREED, text, RankState.FROZEN)
        self._set(rank.process, course, Depth.SECOND)
        state = await second.freeze(rank, timeout_s=course.timeout_s)
        if state.observed is RankState.RUNNING:
            self._set(rank.process, course, Depth.FIRST)
            return _between(state, RankState.RUNNING)
        return await self._sink(rank, second, state, moved_bytes=outcome.moved_bytes)

    async def _sink(
        self, rank: RankId, second: Backend, state: Outcome, *, moved_bytes: int
    ) -> Outcome:
        """Move what the first part left; `state`: where the second part has it."""
        if state.failure is not None or state.observed is not RankState.FROZEN:
            return state
        left = sum((await self.context.measure(rank.process) or {}).values())
        state = await second.snapshot(rank)
        if state.failure is not None:
            return state
        return replace(state, moved_bytes=moved_bytes + (state.moved_bytes or left))

    async def restore(self, rank: RankId) -> Outcome:
        """Bring it back, the second part first."""
        course = await self._course_of(rank)
        if isinstance(course, Outcome):
            return course
        first, second = self._parts(course)
        if second is None:
            return await first.restore(rank)
        outcome = await self._emerge(rank, course, second)
        if course.depth is Depth.SECOND:
            return outcome
        if not await self._all_run(rank.process, first):
            return Outcome(observed=RankState.FROZEN)
        return await self._complete(rank, course, first)

    async def thaw(self, rank: RankId) -> Outcome:
        """Let it run; what is not back yet is brought back before."""
        course = await self._course_of(rank)
        if isinstance(course, Outcome):
            return course
        first, second = self._parts(course)
        if second is not None:
            outcome = await self._emerge(rank, course, second)
            if course.depth is Depth.SECOND:
                return outcome
            if not await self._all_run(rank.process, first):
                return Outcome(observed=RankState.RUNNING)
            if not course.is_whole:
                outcome = await self._complete(rank, course, first)
                if outcome.failure is not None:
                    return outcome
        outcome = await first.thaw(rank)
        if outcome.failure is None and outcome.observed is RankState.RUNNING:
            self._end(rank.process)
        return outcome

    async def _emerge(self, rank: RankId, course: _Course, second: Backend) -> Outcome:
        """Have the second part bring its share back and let go, if it has any."""
        state = await self._settle(rank, course, second)
        if course.depth is not Depth.SECOND:
            return state
        if state.observed is RankState.PARKED and state.failure is None:
            state = await second.restore(rank)
        if state.observed is RankState.FROZEN and state.failure is None:
            state = await second.thaw(rank)
        if state.observed is RankState.RUNNING:
            self._set(rank.process, course, Depth.FIRST)
        return state

    async def _complete(self, rank: RankId, course: _Course, first: Backend) -> Outcome:
        """Have the first part bring its share back."""
        if course.is_guessed and (state := await first.state(rank)).observed is RankState.RUNNING:
            return state
        outcome = await first.restore(rank)
        if outcome.failure is not None:
            # What rests goes on resting.
            rests = course.depth is Depth.RESTS
            return outcome if rests else _between(outcome, RankState.PARKED)
        course.is_whole = True
        self._set(rank.process, course, Depth.FIRST)
        return outcome

    async def state(self, rank: RankId) -> Outcome:
        """Ask the parts, the second one first: a process that it has need not answer the other."""
        course = await self._course_of(rank)
        if isinstance(course, Outcome):
            return course
        first, second = self._parts(course)
        if second is not None:
            outcome = await self._settle(rank, course, second)
            if course.depth is Depth.SECOND:
                return outcome
        outcome = await first.state(rank)
        if outcome.failure is not None:
            return outcome
        if outcome.observed is RankState.RUNNING:
            self._end(rank.process)
        if second is None or course.depth is Depth.RESTS:
            return outcome
        return _between(outcome, RankState.PARKED)

    async def _settle(self, rank: RankId, course: _Course, second: Backend) -> Outcome:
        """Find out where the second part has the rank, if it may have it."""
        if course.depth is not Depth.SECOND:
            return Outcome(observed=RankState.RUNNING)
        outcome = await second.state(rank)
        if outcome.observed is RankState.RUNNING and outcome.failure is None:
            self._set(rank.process, course, Depth.FIRST)
        return outcome

    async def _course_of(self, rank: RankId) -> _Course | Outcome:
        """Return how a rank is moved, or why that cannot be told.

        If nothing is written down, another backend had this host before, or the files are lost: it
        goes by what is found.
        """
        if (course := self._courses.get(rank.process)) is not None:
            return course
        try:
            way = await self._first_fitting(rank.process)
        except BackendError as exc:
            return failed(rank, Cause.DRIVER, str(exc), RankState.UNKNOWN)
        if way is None:
            text = f"process {rank.process.pid} {self.nothing_to_move}"
            return failed(rank, Cause.UNSUPPORTED, text, RankState.UNKNOWN)
        course = _Course(way=way, depth=Depth.FIRST, is_guessed=True)
        _, second = self._parts(course)
        if second is not None and await second.probe(rank.process):
            course.depth = Depth.SECOND
        self._begin(rank.process, course)
        return course

    # --- small change -------------------------------------------------------------------------

    def _parts(self, course: _Course) -> tuple[Backend, Backend | None]:
        first, *rest = (self._backends[name] for name in course.way)
        return first, rest[0] if rest else None

    async def _all_run(self, process: ProcessId, first: Backend) -> bool:
        """Whether the second part has let go of all that move together with a process."""
        together = await first.companions(process)
        courses = (self._courses.get(one) for one in together)
        return all(course is None or course.depth is not Depth.SECOND for course in courses)

    async def _objection(self, process: ProcessId) -> str | None:
        """Say why what a process has left on its devices may not stay there, if so."""
        loop = asyncio.get_running_loop()
        before, since = None, loop.time()
        while True:
            left = await self.context.measure(process)
            if (objection := await self._judge(process, left)) is None:
                return None
            if left != before:
                before, since = left, loop.time()
            elif loop.time() - since >= SETTLED_S:
                return objection
            await asyncio.sleep(POLL_S)

    async def _judge(self, process: ProcessId, left: Mapping[DeviceId, int] | None) -> str | None:
        if left is None:
            return "what it left on the devices cannot be told"
        if not any(left.values()):
            return None
        if self._neighbours is None:
            return f"{sum(left.values()):,} bytes are left on the devices"
        return await self._neighbours.objection(process, left)

    def _begin(self, process: ProcessId, course: _Course) -> None:
        self._courses[process] = course
        self._set(process, course, course.depth)

    def _set(self, process: ProcessId, course: _Course, depth: Depth) -> None:
        course.depth = depth
        facts = {"way": list(course.way), "depth": depth.value}
        write_atomically(_file_of(self.context.directory, process), facts)

    def _end(self, process: ProcessId) -> None:
        if self._courses.pop(process, None) is not None:
            _file_of(self.context.directory, process).unlink(missing_ok=True)


def make_backend(ways: Ways, context: BackendContext) -> Backend:
    """Return the backend of a host. Raises `BackendError`."""
    if (name := ways.only()) is not None:
        return load_backend(name, context)
    return CompositeBackend(context, ways)


def _between(outcome: Outcome, end: RankState) -> Outcome:
    """Return the outcome of one part; if it is at an end of its own, the rank is in between."""
    return replace(outcome, observed=RankState.FROZEN) if outcome.observed is end else outcome


def _file_of(directory: Path, process: ProcessId) -> Path:
    return directory / f"course-{process.pid}-{process.start_time}.json"


def _read_courses(directory: Path) -> dict[ProcessId, _Course]:
    """Return the courses of processes that live, and take the files of others away."""
    found: dict[ProcessId, _Course] = {}
    for path in directory.glob("course-*.json"):
        process = identify(int(pid)) if (pid := path.stem.split("-")[1]).isdigit() else None
        facts = read_facts(path)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if process is not None and path == _file_of(directory, process):
                way, depth = tuple(map(str, facts["way"])), Depth(facts["depth"])
                found[process] = _Course(way=way, depth=depth)
                continue
        path.unlink(missing_ok=True)
    return found
