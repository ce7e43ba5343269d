"""Programs that an operator configured: the way in for accelerators without a backend of their own.

What a program did is believed when the `state` program says so. docs/backends.md says what each of
them has to do.
"""

from __future__ import annotations

from typing import Final

from tsliced.config.backends import fill_in
from tsliced.core.model import Cause, JobKey, ProcessId, RankId, RankState
from tsliced.host.backends.base import Backend, BackendContext, BackendError, Outcome, failed
from tsliced.host.backends.programs import Ended, ProgramError, Programs

_STATES: Final = {
    state.value: state
    for state in (RankState.RUNNING, RankState.FROZEN, RankState.PARKED, RankState.FAILED)
}
#: What a program says by its exit status beyond that it failed: sysexits.h.
EX_UNAVAILABLE: Final = 69
EX_TEMPFAIL: Final = 75
EX_NOPERM: Final = 77
_CAUSES: Final = {
    EX_UNAVAILABLE: Cause.UNSUPPORTED,
    EX_TEMPFAIL: Cause.FREEZE_TIMEOUT,
    EX_NOPERM: Cause.NOT_PERMITTED,
}
#: A program that was told the limit of a freeze has a moment more to turn it back by itself.
FREEZE_GRACE_S: Final = 2.0


class CommandBackend(Backend):
    """Configured under ``[backends.command]``."""

    nothing_to_move = (
        "has no device state, says the configured program: nothing of it could be moved"
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._settings = context.settings.command
        self.seen_by_nvml = self._settings.seen_by_nvml
        self._programs = Programs(context.directory, "command")
        self._jobs: dict[ProcessId, JobKey] = {}
        #: Called frozen where no program freezes.
        self._frozen: set[ProcessId] = set()

    async def start(self) -> None:
        """Forget the locks of processes that are gone."""
        await self._programs.start()

    def belongs(self, process: ProcessId, job: JobKey) -> None:
        """Know what stands for ``{job}``."""
        self._jobs[process] = job

    def forget(self, process: ProcessId) -> None:
        """End what a dead process keeps waiting."""
        self._jobs.pop(process, None)
        self._frozen.discard(process)
        self._programs.forget(process)

    async def probe(self, process: ProcessId) -> bool:
        """Ask for the state: a program that knows nothing of the process ends with 69."""
        try:
            ended = await self._run(process, "state", limit_s=self._settings.state_timeout_s)
        except ProgramError as exc:
            raise BackendError(str(exc)) from exc
        if ended.status == EX_UNAVAILABLE:
            return False
        if ended.status != 0 or ended.said not in _STATES:
            raise BackendError(f"its state is not known: {_why(ended)}")
        return True

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Freeze, or call it frozen if no program does that."""
        if not self._settings.freeze:
            return await self._call_it(rank, RankState.FROZEN)
        return await self._act(rank, "freeze", RankState.FROZEN, timeout_s)

    async def snapshot(self, rank: RankId) -> Outcome:
        """Move its state out."""
        return await self._act(rank, "snapshot", RankState.PARKED)

    async def restore(self, rank: RankId) -> Outcome:
        """Bring its state back; it may run at once if no program thaws."""
        if not self._settings.freeze:
            self._frozen.add(rank.process)
        return await self._act(rank, "restore", RankState.FROZEN)

    async def thaw(self, rank: RankId) -> Outcome:
        """Thaw, or call it running if no program does that."""
        if not self._settings.freeze:
            return await self._call_it(rank, RankState.RUNNING)
        return await self._act(rank, "thaw", RankState.RUNNING)

    async def state(self, rank: RankId) -> Outcome:
        """Ask where it is."""
        process = rank.process
        try:
            ended = await self._run(process, "state", limit_s=self._settings.state_timeout_s)
        except ProgramError as exc:
            return failed(rank, Cause.DRIVER, str(exc), RankState.UNKNOWN)
        observed = _STATES.get(ended.said)
        if ended.status != 0 or observed is None:
            text = f"its state is not known: {_why(ended)}"
            return failed(rank, Cause.DRIVER, text, RankState.UNKNOWN)
        if observed is RankState.RUNNING and process in self._frozen:
            observed = RankState.FROZEN
        return Outcome(observed=observed)

    async def _call_it(self, rank: RankId, state: RankState) -> Outcome:
        if state is RankState.FROZEN:
            self._frozen.add(rank.process)
        else:
            self._frozen.discard(rank.process)
        return await self.state(rank)

    async def _act(
        self, rank: RankId, name: str, goal: RankState, timeout_s: float | None = None
    ) -> Outcome:
        limit_s = self._settings.command_timeout_s
        if timeout_s is not None:
            limit_s = timeout_s + FREEZE_GRACE_S
        try:
            ended = await self._run(rank.process, name, limit_s=limit_s, timeout_s=timeout_s)
        except ProgramError as exc:
            return failed(rank, Cause.DRIVER, str(exc), (await self.state(rank)).observed)
        found = await self.state(rank)
        if ended.status != 0:
            is_late = ended.is_overdue and name == "freeze"
            cause = Cause.FREEZE_TIMEOUT if is_late else _CAUSES.get(ended.status, Cause.DRIVER)
            return failed(rank, cause, f"{name}: {ended.text}", found.observed)
        if found.failure is None and found.observed is not goal:
            text = f"{name} says that it is done, and state that it is {found.observed.value}"
            return failed(rank, Cause.DRIVER, text, found.observed)
        return found

    async def _run(
        self,
        process: ProcessId,
        name: str,
        *,
        limit_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Ended:
        job = self._jobs.get(process)
        values = {
            "pid": str(process.pid),
            "job": job.id if job is not None else "",
            "uid": str(job.uid) if job is not None else "",
            "timeout_s": f"{timeout_s:g}" if timeout_s is not None else "",
        }
        command = fill_in(getattr(self._settings, name), values)
        return await self._programs.run(process, command, limit_s=limit_s)


def _why(ended: Ended) -> str:
    return ended.text if ended.status != 0 else f"it says {ended.said!r}"
