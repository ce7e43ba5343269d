"""Builds pretended /proc and cgroup directories, so that any host can be read on this one."""

from __future__ import annotations

import os
from pathlib import Path

#: Version 1 writes this where there is no limit.
UNLIMITED = 9223372036854771712


class FakeHost:
    """A directory with a ``proc`` and the cgroup hierarchies that its mountinfo names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = str(root / "proc")
        self._mounts: list[str] = []
        self.write("proc/self/mountinfo", "")
        self.write("proc/meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 50 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def set_available(self, count: int) -> None:
        """Set MemAvailable, in bytes (a multiple of 1024)."""
        self.write("proc/meminfo", f"MemTotal: 999999 kB\nMemAvailable: {count // 1024} kB\n")

    def mount(self, controllers: str, *, root: str = "/") -> Path:
        """Mount a version 1 hierarchy, or version 2 where `controllers` is empty."""
        point = self.root / "cgroup" / (controllers or "unified")
        point.mkdir(parents=True, exist_ok=True)
        kind = f"cgroup cgroup rw,{controllers}" if controllers else "cgroup2 cgroup2 rw"
        escaped = str(point).replace(" ", "\\040")
        self._mounts.append(f"31 23 0:27 {root} {escaped} rw,relatime shared:9 - {kind}\n")
        self.write("proc/self/mountinfo", "".join(self._mounts))
        return point

    def cgroup(self, directory: Path, **files: object) -> Path:
        """Make a cgroup; ``memory_max=1`` writes ``memory.max``."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name.replace("_", ".", 1)).write_text(f"{value}\n")
        return directory

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        uid: int = 1000,
        state: str = "S",
        name: str = "python",
        start_time: int | None = None,
        env: dict[str, str] | None = None,
        cgroups: str = "0::/\n",
    ) -> None:
        """Make a process; without `env` its environment was overwritten by zeros."""
        start = 100 * pid if start_time is None else start_time
        middle = " ".join(["0"] * 15)
        self.write(
            f"proc/{pid}/stat", f"{pid} ({name}) {state} {parent} {middle} 1 0 {start} 0 0\n"
        )
        self.write(
            f"proc/{pid}/status",
            f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pid}\n",
        )
        lines = [f"{key}={value}" for key, value in (env or {}).items()]
        self.write(f"proc/{pid}/environ", "\0".join([*lines, ""]) if env else "\0" * 64)
        self.write(f"proc/{pid}/cgroup", cgroups)

    def end(self, pid: int) -> None:
        for file in ("stat", "status", "environ", "cgroup"):
            os.unlink(f"{self.proc}/{pid}/{file}")
