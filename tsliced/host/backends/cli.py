"""The ``cuda-checkpoint`` utility, for drivers 550 to 569, which have no API for it.

Driver 550 knows a single call, the *toggle*: it locks and checkpoints a running process, or
restores and unlocks a checkpointed one. Nothing limits its wait for device work, nobody says in
which state a process is, and there is no way to freeze several processes before the first of them
leaves. So with toggles a rank is called frozen and goes on until its turn to leave, jobs of several
ranks on a host are refused, and where a rank is stands in a file of ours and in NVML's lists.

With `calls` = ``actions``, for utilities and drivers that know single steps, it is as with the API,
at the price of attaching to the driver for each of them, which takes 2 to 3 s on a real host.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from cuda_ckpt.errors import code_name
from tsliced.core.model import Cause, JobKey, ProcessId, RankId, RankState
from tsliced.host.backends.base import Backend, BackendContext, BackendError, Outcome, failed
from tsliced.host.backends.driver_threads import hindrance_of, seems_cuda, why_not_runnable
from tsliced.host.backends.op_files import read_facts, write_atomically
from tsliced.host.backends.programs import Ended, ProgramError, Programs
from tsliced.host.processes import identify

#: A question to the driver waits while a peer of the process is locked.
STATE_LIMIT_S: Final = 20.0

#: The utility's exit status is the driver's error code, of which the kernel keeps eight bits.
_CODES: Final = {code % 256: code for code in (1, 2, 3, 304, 401, 600, 800, 801, 999)}
_CAUSES: Final = {
    3: Cause.UNSUPPORTED,
    600: Cause.FREEZE_TIMEOUT,
    800: Cause.NOT_PERMITTED,
    801: Cause.UNSUPPORTED,
}
_STATES: Final = {
    "running": RankState.RUNNING,
    "locked": RankState.FROZEN,
    "checkpointed": RankState.PARKED,
    "failed": RankState.FAILED,
}


class _Place(NamedTuple):
    """Where a rank was brought by toggles, and whether one was under way."""

    state: RankState = RankState.RUNNING
    is_toggling: bool = False


class CliBackend(Backend):
    """NVIDIA's utility, or anything that takes its arguments."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._settings = context.settings.cli
        self._toggles = self._settings.calls == "toggle"
        self._programs = Programs(context.directory, "cli")
        self._program = self._settings.program
        self._jobs: dict[ProcessId, JobKey] = {}

    async def start(self) -> None:
        """Find the utility."""
        program = shutil.which(self._settings.program)
        if program is None:
            raise BackendError(
                f"{self._settings.program} is not there: install NVIDIA's cuda-checkpoint, or set "
                "backends.cli.program"
            )
        self._program = program
        await self._programs.start()
        await asyncio.to_thread(_sweep, self.context.directory)

    def belongs(self, process: ProcessId, job: JobKey) -> None:
        """Know whose rank it is: with toggles, a job may have one on a host."""
        self._jobs[process] = job

    def forget(self, process: ProcessId) -> None:
        """Forget where a dead rank was."""
        self._jobs.pop(process, None)
        self._programs.forget(process)
        self._file(process).unlink(missing_ok=True)

    async def probe(self, process: ProcessId) -> bool:
        """Look for the driver's thread."""
        return await asyncio.to_thread(seems_cuda, process.pid)

    def hindrance(self, process: ProcessId) -> str | None:
        """Look whether the driver's thread in the process can run."""
        return hindrance_of(process)

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Lock; with toggles, only see whether it can be taken off at all."""
        if (stopped := why_not_runnable(rank.process)) is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.RUNNING)
        if self._toggles:
            return self._call_frozen(rank)
        limit_ms = max(1, round(timeout_s * 1000))
        return await self._act(rank, "lock", RankState.FROZEN, "--timeout", str(limit_ms))

    async def snapshot(self, rank: RankId) -> Outcome:
        """Checkpoint."""
        if (stopped := why_not_runnable(rank.process)) is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.FROZEN)
        if self._toggles:
            return await self._toggle(rank, RankState.PARKED)
        return await self._act(rank, "checkpoint", RankState.PARKED)

    async def restore(self, rank: RankId) -> Outcome:
        """Restore; with toggles it runs as soon as that is done."""
        if (stopped := why_not_runnable(rank.process)) is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.PARKED)
        if self._toggles:
            return await self._toggle(rank, RankState.FROZEN)
        return await self._act(rank, "restore", RankState.FROZEN)

    async def thaw(self, rank: RankId) -> Outcome:
        """Unlock."""
        if (stopped := why_not_runnable(rank.process)) is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.FROZEN)
        if self._toggles:
            return self._become(rank, RankState.RUNNING)
        return await self._act(rank, "unlock", RankState.RUNNING)

    async def state(self, rank: RankId) -> Outcome:
        """Ask the driver; with toggles, look into our file and at NVML's lists."""
        if (stopped := why_not_runnable(rank.process)) is not None:
            return failed(rank, Cause.STOPPED, stopped, RankState.UNKNOWN)
        if not self._toggles:
            return await self._ask(rank)
        place = self._place(rank.process)
        if not place.is_toggling:
            return Outcome(observed=place.state)
        # A toggle of an earlier daemon may be at work yet.
        await self._programs.await_others(rank.process)
        return await self._look(rank, place)

    # --- toggles ------------------------------------------------------------------------------

    def _call_frozen(self, rank: RankId) -> Outcome:
        job = self._jobs.get(rank.process)
        for other, of in self._jobs.items():
            if of == job and other != rank.process and job is not None:
                text = (
                    f"job {job} has another rank here, pid {other.pid}, and a toggle cannot freeze "
                    'both before one leaves: driver 570 can, or backends.cli.calls = "actions"'
                )
                return failed(rank, Cause.UNSUPPORTED, text, RankState.RUNNING)
        return self._become(rank, RankState.FROZEN)

    def _become(self, rank: RankId, state: RankState, *, toggling: bool = False) -> Outcome:
        facts = {"state": state.value, "toggling": toggling}
        write_atomically(self._file(rank.process), facts)
        return Outcome(observed=state)

    async def _toggle(self, rank: RankId, goal: RankState) -> Outcome:
        before = self._place(rank.process)
        if before.is_toggling:
            found = await self.state(rank)
            if found.failure is not None or found.observed is goal:
                return found
            before = _Place(found.observed)
        self._become(rank, before.state, toggling=True)
        try:
            ended = await self._programs.run(
                rank.process, [self._program, "--toggle", "--pid", str(rank.process.pid)]
            )
        except ProgramError as exc:
            self._become(rank, before.state)
            return failed(rank, Cause.DRIVER, str(exc), before.state)
        if ended.status == 0:
            return self._become(rank, goal)
        return _refused(rank, ended, (await self._look(rank, before)).observed)

    async def _look(self, rank: RankId, before: _Place) -> Outcome:
        """Find out what a toggle did of which nobody heard, or that failed."""
        used = await self.context.measure(rank.process)
        if used is None:
            text = "NVML cannot tell where an unfinished toggle left it"
            return failed(rank, Cause.DRIVER, text, RankState.UNKNOWN)
        if not used:
            return self._become(rank, RankState.PARKED)
        # It is on its devices: what was to leave did not, and what was to come back did.
        was_frozen = before.state in (RankState.FROZEN, RankState.PARKED)
        return self._become(rank, RankState.FROZEN if was_frozen else RankState.RUNNING)

    def _place(self, process: ProcessId) -> _Place:
        facts = read_facts(self._file(process))
        try:
            return _Place(RankState(facts["state"]), bool(facts["toggling"]))
        except (KeyError, ValueError):
            return _Place()

    def _file(self, process: ProcessId) -> Path:
        return self.context.directory / f"cli-{process.pid}-{process.start_time}.json"

    # --- single steps -------------------------------------------------------------------------

    async def _act(self, rank: RankId, action: str, goal: RankState, *more: str) -> Outcome:
        command = [self._program, "--action", action, "--pid", str(rank.process.pid), *more]
        try:
            ended = await self._programs.run(rank.process, command)
        except ProgramError as exc:
            return failed(rank, Cause.DRIVER, str(exc), RankState.UNKNOWN)
        found = await self._ask(rank)
        if ended.status != 0:
            return _refused(rank, ended, found.observed)
        if found.failure is None and found.observed is not goal:
            text = f"the utility says that {action} is done, and that it is {found.observed.value}"
            return failed(rank, Cause.DRIVER, text, found.observed)
        return found

    async def _ask(self, rank: RankId) -> Outcome:
        command = [self._program, "--get-state", "--pid", str(rank.process.pid)]
        try:
            # A question changes nothing in its target, so it may be cut off.
            ended = await self._programs.run(rank.process, command, limit_s=STATE_LIMIT_S)
        except ProgramError as exc:
            return failed(rank, Cause.DRIVER, str(exc), RankState.UNKNOWN)
        observed = _STATES.get(ended.said, RankState.UNKNOWN)
        if ended.status != 0:
            return _refused(rank, ended, RankState.UNKNOWN)
        if observed is RankState.UNKNOWN:
            return failed(rank, Cause.DRIVER, f"its state is {ended.said!r}", observed)
        return Outcome(observed=observed)


def _refused(rank: RankId, ended: Ended, observed: RankState) -> Outcome:
    code = _CODES.get(ended.status)
    name = f" ({code_name(code)} {code})" if code is not None else ""
    cause = Cause.FAILED if observed is RankState.FAILED else _CAUSES.get(code or 0, Cause.DRIVER)
    return failed(rank, cause, f"cuda-checkpoint ended with {ended.text}{name}", observed)


def _sweep(directory: Path) -> None:
    """Forget files about processes that are gone."""
    for path in directory.glob("cli-*.json"):
        _, pid, start_time = path.stem.split("-")
        process = identify(int(pid))
        if process is None or str(process.start_time) != start_time:
            path.unlink(missing_ok=True)
