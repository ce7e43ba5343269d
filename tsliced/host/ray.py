"""Memory that stays free because Ray would kill workers otherwise.

Ray's memory monitor, a part of each raylet, ends workers when more than 95 per cent of the memory
of its host or container are in use. What a snapshot takes counts as much as anything else, and whom
it ends need not be the one who was parked. So where a raylet runs, that share is left free.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from tsliced.host.memory import HOST, HostMemory
from tsliced.host.processes import identify
from tsliced.host.procfs import PROC, read_file

#: Between two looks for raylets; one look reads a small file of each process.
LOOK_S: Final = 5.0


class RayMargin:
    """How much must stay free in each place, as of the latest look.

    `when` is ``auto`` (where a raylet runs), ``always`` (on the host, and where one runs) or
    ``never``; `ratio` is the share of the memory of a place.
    """

    def __init__(self, memory: HostMemory, *, when: str, ratio: float, proc: str = PROC) -> None:
        self._memory = memory
        self._proc = proc
        self.when = when
        self.ratio = ratio
        self._bytes: dict[str, int] = {}

    def in_bytes(self) -> Mapping[str, int]:
        """Return what must stay free, by place as in `Shortage`."""
        return self._bytes

    def look(self) -> None:
        """Look for raylets. It reads much of /proc: call it in a thread."""
        totals: dict[str, int] = {}
        if self.when == "always":
            totals[HOST] = self._memory.host_total_bytes()
        if self.when != "never":
            for pid in self._raylets():
                totals |= self._memory.totals(pid)
        self._bytes = {place: int(total * self.ratio) for place, total in totals.items()}

    def _raylets(self) -> list[int]:
        named = (
            int(name)
            for name in os.listdir(self._proc)
            if name.isdigit() and read_file(f"{self._proc}/{name}/comm") == b"raylet\n"
        )
        # A zombie kills nobody.
        return [pid for pid in named if identify(pid, proc=self._proc) is not None]

    async def look_for_ever(self) -> None:
        """Keep up with raylets that come and go."""
        while True:
            with suppress(OSError):
                await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_S)
