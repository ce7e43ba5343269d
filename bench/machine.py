"""What a run is measured on: the machine's description, its cores, and the clocks of processes."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

#: clock_getcpuclockid(3): the clock of a process is made of its inverted pid and this.
_CLOCK_BITS = 3
_CLOCK_SCHEDULER = 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """For whoever reads the figures later."""

    cpu_model: str
    #: Cores that this process may use.
    cores: int
    kernel: str
    python: str
    #: Load of the last minute, before anything was measured.
    load_average: float
    #: File system of the daemon's state.
    file_system: str

    def as_dict(self) -> dict[str, str | int | float]:
        """Returns the fields by name."""
        return asdict(self)


def describe(state_dir: Path) -> Machine:
    """Looks at the machine."""
    return Machine(
        cpu_model=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        load_average=round(os.getloadavg()[0], 2),
        file_system=file_system(state_dir),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        # Arm's kernel gives no name.
        if key.strip() in ("model name", "CPU part"):
            return value.strip()
    return platform.machine()


def file_system(path: Path) -> str:
    """Returns the type of the file system under a path, as stat(1) names it."""
    done = subprocess.run(
        ["stat", "--file-system", "--format=%T", path],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return done.stdout.strip()


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Where servers and clients run. Unpinned, the same code can look five times slower."""

    server: int
    client: int

    @property
    def apart(self) -> bool:
        """Whether the two have a core each."""
        return self.server != self.client


def choose_cores() -> Cores:
    """Returns the last two of the cores that this process may use; the first serves interrupts."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(server=usable[-1], client=usable[-2:][0])


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process with all its threads, in seconds.

    /proc/PID/stat counts in ticks of 10 ms, which is as much as a thousand requests need.
    """
    return time.clock_gettime(~pid << _CLOCK_BITS | _CLOCK_SCHEDULER)


def rss_bytes(pid: int) -> int:
    """Returns the resident memory of a process, its children apart, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
