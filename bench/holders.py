"""Processes that hold a lease until they are killed, made by fork so that each costs milliseconds.

python -m bench.holders SOCKET

A line ``JOB GROUP BYTES`` on standard input makes one with so much memory of its own; its pid is
written when it holds the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from bench.load import LIMIT_S, acquire_of
from bench.server import ROOT
from libtimeslice.connection import Connection

_PAGE_BYTES = 4096


class Holders:
    """The program, from outside. Those that it made end with it."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.holders", str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )

    def start(self, job: str, group: str, size: int) -> int:
        """Makes a process that holds a group, and returns its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{job} {group} {size}\n".encode())
        return int(self._process.stdout.readline())

    def __enter__(self) -> Holders:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def hold(path: str, job: str, group: str, size: int) -> None:
    """Holds a group until the process is killed."""
    memory = bytearray(size)
    memory[::_PAGE_BYTES] = b"\1" * len(memory[::_PAGE_BYTES])
    connection = Connection.open(path, role="client", job=job)
    connection.request(acquire_of(group), LIMIT_S)
    os.write(1, f"{os.getpid()}\n".encode())
    signal.pause()


def main() -> None:
    # The kernel reaps them: their pids are free once they are dead.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        job, group, size = line.split()
        if not os.fork():
            try:
                hold(sys.argv[1], job, group, int(size))
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
