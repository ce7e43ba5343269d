"""An example of a backend that another package brings: its devices are directories.

A process's state is the file ``PID`` in the directory of the device; parked, it lies elsewhere. A
process looks for its state where the device is and finds none while it is parked, which is all that
stops it. docs/backends.md tells the rest.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from tsliced.core.model import Cause, ProcessId, RankId, RankState
from tsliced.host.backends.base import Backend, BackendContext, BackendError, Outcome, failed


class PaperBackend(Backend):
    """Configured under ``[backends.paper]``: `device` is a directory, as is `drawer`."""

    #: So ranks have to register themselves: nothing else lists them.
    seen_by_nvml = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        table = context.settings.others.get("paper", {})
        self._device = Path(str(table.get("device", "/nowhere")))
        self._drawer = Path(str(table.get("drawer", context.directory)))

    async def start(self) -> None:
        """See whether the device is there."""
        if not await asyncio.to_thread(self._device.is_dir):
            raise BackendError(f"there is no device {self._device}: set backends.paper.device")

    async def probe(self, process: ProcessId) -> bool:
        """Look for a file of the process."""
        return self._observe(process.pid) is not RankState.UNKNOWN

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Rename the file: its process does not find it any more."""
        return await self._move(rank, self._running(rank), self._frozen(rank))

    async def snapshot(self, rank: RankId) -> Outcome:
        """Copy the state to the drawer, and only then take it off the device."""
        return await self._move(rank, self._frozen(rank), self._parked(rank))

    async def restore(self, rank: RankId) -> Outcome:
        """Copy it back."""
        return await self._move(rank, self._parked(rank), self._frozen(rank))

    async def thaw(self, rank: RankId) -> Outcome:
        """Let the process find it again."""
        return await self._move(rank, self._frozen(rank), self._running(rank))

    async def state(self, rank: RankId) -> Outcome:
        """Look where the file is."""
        observed = self._observe(rank.process.pid)
        if observed is RankState.UNKNOWN:
            return failed(rank, Cause.DRIVER, "it has no state anywhere", observed)
        return Outcome(observed=observed)

    async def _move(self, rank: RankId, source: Path, target: Path) -> Outcome:
        try:
            size = await asyncio.to_thread(_move_whole, source, target)
        except OSError as exc:
            observed = self._observe(rank.process.pid)
            return failed(rank, Cause.DRIVER, f"it cannot be moved: {exc}", observed)
        return Outcome(observed=self._observe(rank.process.pid), moved_bytes=size)

    def _observe(self, pid: int) -> RankState:
        for path, state in (
            (self._device / str(pid), RankState.RUNNING),
            (self._device / f"{pid}.frozen", RankState.FROZEN),
            (self._drawer / str(pid), RankState.PARKED),
        ):
            if path.exists():
                return state
        return RankState.UNKNOWN

    def _running(self, rank: RankId) -> Path:
        return self._device / str(rank.process.pid)

    def _frozen(self, rank: RankId) -> Path:
        return self._device / f"{rank.process.pid}.frozen"

    def _parked(self, rank: RankId) -> Path:
        return self._drawer / str(rank.process.pid)


def _move_whole(source: Path, target: Path) -> int:
    """Move a file so that it is always whole in one of the two places; return its size."""
    size = source.stat().st_size
    if source.parent == target.parent:
        os.rename(source, target)
        return size
    copy = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, copy)
    os.rename(copy, target)
    source.unlink()
    return size
