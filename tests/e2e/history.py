"""What clients saw of the daemon, written down by themselves: asked, granted, given back.

Each process appends lines of JSON to a file of its own, one write for each, before and after what
it does; so whatever kills it, and whenever, what it wrote is there. All times are CLOCK_MONOTONIC,
which the processes of one machine share. `judging` decides what the lines prove.

Nothing here knows the rest of the tests, for every client under test imports it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def directory_of(socket: str | Path) -> Path:
    """Returns where the clients of a daemon write, by the path of its socket."""
    return Path(socket).parent / "history"


class Recorder:
    """Writes the history of one client of one process. Does nothing if nobody asked for one."""

    _made = 0

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        self._pid = 0
        self._asked = 0

    def invoke(self, job: str | None, groups: Sequence[str], ranks: int = 1) -> int:
        """An acquire is about to be sent; returns its number in this history."""
        self._asked += 1
        self.write("invoke", n=self._asked, job=job, groups=groups, ranks=ranks)
        return self._asked

    def ok(self, n: int, job: str, lease: str, tokens: Mapping[str, int]) -> None:
        """An acquire was answered with a grant."""
        self.write("ok", n=n, job=job, lease=lease, tokens=dict(tokens))

    def fail(self, n: int, code: str) -> None:
        """An acquire was refused, or given up."""
        self.write("fail", n=n, code=code)

    def release(self, lease: str) -> None:
        """A lease is about to be given back: from here on it is not relied on."""
        self.write("release", lease=lease)

    def lost(self, lease: str, reason: str | None) -> None:
        """A lease was seen to be lost."""
        self.write("lost", lease=lease, reason=reason)

    def write(self, what: str, **facts: object) -> None:
        """Appends a line."""
        if self._pid != os.getpid():
            self._begin()
        if self._descriptor is not None:
            line = {"at": time.monotonic(), "what": what, **facts}
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Writes nothing more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self) -> None:
        # A forked child is a client of its own.
        self._pid, self._descriptor = os.getpid(), None
        if self._directory.is_dir():
            Recorder._made += 1
            path = self._directory / f"{self._pid}-{time.monotonic_ns()}-{Recorder._made}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self.write("begin", pid=self._pid, start_time=start_time(self._pid))


def start_time(pid: int) -> int | None:
    """Returns when a process was started, in clock ticks since boot; None: it is gone or dead."""
    words = _stat(pid)
    return None if words is None or words[0] in "ZX" else int(words[19])


def is_stopped(pid: int) -> bool:
    """Whether a signal keeps a process from running."""
    words = _stat(pid)
    return words is not None and words[0] in "Tt"


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
