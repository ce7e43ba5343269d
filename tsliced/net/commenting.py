"""Has what Slurm jobs had of the devices written into Slurm's own records of them.

Not in the hooks: slurm.conf(5) warns of calling Slurm's commands in prolog and epilog, which all
nodes of a job run at the same time while the controller waits for them; and when its epilog runs, a
job's comment cannot be changed any more. So one host of a job, the first one, does it for all while
the job runs, in a process of its own that nobody waits for: ``tslicectl slurm comment``. When the
job has ended, the sums go to the accounting, where there is one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tsliced.driver import Driver
from tsliced.host.allocations import Allocation, Allocations

#: How often it is looked who is due, seconds.
LOOK_S: Final = 2.0
#: Of one process, seconds; its own limit is shorter.
LIMIT_S: Final = 30.0
#: Jobs that have ended and are not written of yet; more are left out.
MAX_ENDED: Final = 256


class Commenting:
    """Starts one process at a time. All methods belong to the event loop."""

    def __init__(
        self,
        driver: Driver,
        allocations: Allocations,
        *,
        socket: str,
        interval_s: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._allocations = allocations
        self._socket = socket
        self._interval_s = interval_s
        self._ended: list[Allocation] = []
        #: By job: when its comment was written.
        self._written_at: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._has_failed = False

    def look(self) -> None:
        """Look soon who is due: a job is known."""
        self._wake.set()

    def end(self, allocation: Allocation) -> None:
        """Have the sums of a job written that is over on this host."""
        if self._is_first(allocation) and len(self._ended) < MAX_ENDED:
            self._ended.append(allocation)
            self._wake.set()

    async def write_for_ever(self) -> None:
        """Keep the comments up to date."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            self._wake.clear()
            due, self._ended = self._ended, []
            if interval_s := self._interval_s():
                now = time.monotonic()
                due += [each for each in self._allocations if self._is_due(each, now, interval_s)]
                for allocation in due:
                    self._written_at[allocation.job_id] = now
                    await self._write(allocation)
            known = {each.job_id for each in self._allocations}
            self._written_at = {id: at for id, at in self._written_at.items() if id in known}

    def _is_due(self, allocation: Allocation, now: float, interval_s: float) -> bool:
        if allocation.ending or not self._is_first(allocation):
            return False
        return now - self._written_at.get(allocation.job_id, float("-inf")) >= interval_s

    def _is_first(self, allocation: Allocation) -> bool:
        """Whether it is for this host to write of a job, all of whose hosts are known."""
        here = allocation.node or self._driver.machine.config.host
        return allocation.complete and allocation.nodes[:1] == (here,)

    async def _write(self, allocation: Allocation) -> None:
        job = {"SLURM_JOB_ID": allocation.job_id, "SLURM_JOB_UID": str(allocation.uid)}
        command = ("slurm", "comment", "--strict", "--socket", self._socket)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tsliced.ctl", *command),
                env={**os.environ, **job},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as exc:
            self._note(allocation, str(exc))
            return
        try:
            _, told = await asyncio.wait_for(process.communicate(), LIMIT_S)
        except TimeoutError:
            self._note(allocation, f"tslicectl slurm comment has not ended within {LIMIT_S:g} s")
        else:
            if process.returncode:
                *_, last = ("it failed", *told.decode(errors="replace").splitlines())
                self._note(allocation, last.removeprefix("tslicectl: "))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _note(self, allocation: Allocation, reason: str) -> None:
        """Tell of a failure: aloud once, for the next ones will be like it."""
        level = "debug" if self._has_failed else "warning"
        self._has_failed = True
        text = f"its comment is not written: {reason}"
        self._driver.note("slurm", level, job=allocation.job_id, reason=text)
