"""Cgroups of a test's own, in whichever hierarchy has the controller; they need root."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import until


def hierarchies() -> dict[str, Path]:
    """Returns where each controller is mounted; "" is version 2."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        fields, types = place.split(), kind.split()
        if types[0] == "cgroup2":
            found[""] = Path(fields[4])
        elif types[0] == "cgroup":
            found |= dict.fromkeys(types[2].split(","), Path(fields[4]))
    return found


class Cgroup:
    """One directory of a hierarchy."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def write(self, name: str, value: object) -> None:
        (self.path / name).write_text(f"{value}\n")

    def read(self, name: str) -> str:
        return (self.path / name).read_text().strip()

    def child(self, name: str) -> Cgroup:
        (self.path / name).mkdir()
        return Cgroup(self.path / name)

    def take(self, pid: int) -> None:
        self.write("cgroup.procs", pid)

    def remove(self) -> None:
        """Takes it and all below it away; whoever is still in it is killed."""
        for below in [d for d in self.path.iterdir() if d.is_dir()]:
            Cgroup(below).remove()
        for pid in self.read("cgroup.procs").split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        # A process leaves its cgroup a moment after its end.
        until(self._gone, f"{self} is removed")

    def _gone(self) -> bool:
        with suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


@contextmanager
def cgroup(controller: str) -> Iterator[Cgroup]:
    """Yields a new cgroup with a controller of version 1, or of version 2 if it is ""."""
    root = hierarchies().get(controller)
    if os.geteuid() != 0 or root is None or not os.access(root, os.W_OK):
        pytest.skip(f"needs root and a writable cgroup hierarchy of {controller or 'version 2'}")
    made = Cgroup(root / f"tsliced-test-{os.getpid()}-{time.monotonic_ns()}")
    made.path.mkdir()
    try:
        yield made
    finally:
        made.remove()


@contextmanager
def memory_cgroup() -> Iterator[Cgroup]:
    """Yields a new cgroup whose memory can be limited, of whichever version this host has."""
    if "memory" in hierarchies():
        with cgroup("memory") as made:
            yield made
        return
    with cgroup("") as made:
        if "memory" not in made.read("cgroup.controllers").split():
            pytest.skip("the memory controller is not available to tests here")
        made.write("cgroup.subtree_control", "+memory")
        yield made


def limit_memory(place: Cgroup, count: int) -> None:
    """Limits a memory cgroup, in bytes."""
    version_1 = (place.path / "memory.limit_in_bytes").exists()
    place.write("memory.limit_in_bytes" if version_1 else "memory.max", count)


def used_memory(place: Cgroup) -> int:
    """Returns how much a memory cgroup uses, in bytes."""
    version_1 = (place.path / "memory.usage_in_bytes").exists()
    return int(place.read("memory.usage_in_bytes" if version_1 else "memory.current"))
