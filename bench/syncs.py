"""How often a process waits for the disk, seen from outside; and how long such a wait is."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from pathlib import Path

_SOURCE = Path(__file__).with_name("count_syncs.c")
#: As in the C source.
_REMEMBERED = 65536
_WORD_BYTES = 8


class SyncCounter:
    """Counts fsync and fdatasync of every process that is started with its `environment`."""

    def __init__(self, directory: Path) -> None:
        library = directory / "count_syncs.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-o", library, _SOURCE],
            check=True,
            timeout=60,
        )
        self._path = directory / "syncs"
        self._path.write_bytes(bytes(_WORD_BYTES * (1 + _REMEMBERED)))
        self.environment = {"LD_PRELOAD": str(library), "BENCH_SYNCS": str(self._path)}

    def durations_ns(self) -> list[int]:
        """Returns how long each call took, the oldest first. Raises OverflowError."""
        data = self._path.read_bytes()
        count, *durations = struct.unpack(f"={1 + _REMEMBERED}Q", data)
        if count > _REMEMBERED:
            raise OverflowError(f"{count} syncs are more than {_REMEMBERED}")
        return durations[:count]


def measure_syncs(directory: Path, count: int) -> list[int]:
    """Appends a block of 4 KiB and waits for the disk, so many times; returns the nanoseconds."""
    path = directory / "sync-probe"
    durations = []
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(bytes(4096))
            started_ns = time.perf_counter_ns()
            os.fdatasync(file.fileno())
            durations.append(time.perf_counter_ns() - started_ns)
    path.unlink()
    return durations
