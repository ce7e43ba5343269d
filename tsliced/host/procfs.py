"""Small files of the kernel: /proc, and what lies in cgroup directories.

These reads are on hot paths (a scan looks at every process on every device twice a second), so they
are plain system calls. A file that is gone reads as None; any other trouble is raised: an
exhausted descriptor table must never look like the death of a process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from errno import EACCES, ENODEV, ENOENT, ENOTDIR, EPERM, ESRCH
from typing import Final

PROC: Final = "/proc"

#: No file that is read here is larger; the kernel itself limits an environment to 6 MiB.
_LIMIT_BYTES: Final = 8 << 20
_CHUNK_BYTES: Final = 1 << 16
#: So many files stay open between two reads.
_MAX_HELD: Final = 128
_GONE: Final = frozenset({ENOENT, ESRCH, ENOTDIR, ENODEV})
_DENIED: Final = frozenset({EACCES, EPERM})


def read_file(path: str) -> bytes | None:
    """Return what a file holds, or None if it, or the process that it is about, is gone.

    Raises:
        OSError: for any other reason, PermissionError among them.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_all(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise


def read_permitted_file(path: str) -> bytes | None:
    """Return what a file holds, or None if it is gone or not ours to read."""
    try:
        return read_file(path)
    except OSError as exc:
        if exc.errno in _DENIED:
            return None
        raise


def _read_all(descriptor: int) -> bytes:
    data = os.read(descriptor, _CHUNK_BYTES)
    if not data:
        return data
    parts = [data]
    size = len(data)
    # The kernel hands out such files in pieces of its own choosing: only an empty read is the end.
    while size < _LIMIT_BYTES and (data := os.read(descriptor, _CHUNK_BYTES)):
        parts.append(data)
        size += len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class HeldFiles:
    """Files that are read again and again, such as cgroups': they stay open in between.

    To find and to open one takes seven times as long as to read it. The kernel makes what is in it
    anew for each read. A cgroup or a process that is gone says so to whoever has its files open,
    whatever is there under its name by now. It may be used by several threads.
    """

    def __init__(self, limit: int = _MAX_HELD) -> None:
        self._limit = limit
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, path: str) -> bytes | None:
        """Return what a file holds now; see `read_file`.

        It must be one that the kernel makes in one piece, as it does numbers and tables of them,
        of at most 64 KiB.
        """
        with self._lock:
            descriptor = self._descriptors.get(path)
            try:
                if descriptor is not None:
                    return os.pread(descriptor, _CHUNK_BYTES, 0)
            except OSError as exc:
                if exc.errno not in _GONE:
                    raise
                self._let_go(path)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._hold(path, descriptor)
                return os.pread(descriptor, _CHUNK_BYTES, 0)
            except OSError as exc:
                if exc.errno in _GONE:
                    return None
                raise

    def _hold(self, path: str, descriptor: int) -> None:
        while len(self._descriptors) >= self._limit:
            self._let_go(next(iter(self._descriptors)))
        self._descriptors[path] = descriptor

    def _let_go(self, path: str) -> None:
        if (descriptor := self._descriptors.pop(path, None)) is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of ``/proc/PID/stat`` that matter here (man 5 proc)."""

    pid: int
    name: str
    #: One letter: R running, S sleeping, D disk, T stopped, t traced, Z zombie, X dead, I idle.
    state: str
    parent: int
    threads: int
    #: Clock ticks since boot.
    start_time: int

    @property
    def is_dead(self) -> bool:
        """Whether nothing of it runs any more, though its parent may not have reaped it.

        A process whose first thread ended also shows as a zombie while its other threads run on.
        """
        return self.state in "ZXx" and self.threads <= 1


def read_stat(pid: int, *, proc: str = PROC) -> Stat | None:
    """Return the process's `Stat`, or None if there is no such process."""
    data = read_file(f"{proc}/{pid}/stat")
    if not data:
        return None
    # The name may hold anything, blanks and parentheses too: it ends at the last parenthesis.
    opening, closing = data.index(b"("), data.rindex(b")")
    fields = data[closing + 2 :].split()
    return Stat(
        pid=pid,
        name=data[opening + 1 : closing].decode(errors="replace"),
        state=fields[0].decode("ascii"),
        parent=int(fields[1]),
        threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def read_status_field(pid: int, field: str, *, proc: str = PROC) -> list[str] | None:
    """Return the words after ``field:`` in ``/proc/PID/status``; None if gone or not there."""
    data = read_file(f"{proc}/{pid}/status")
    if not data:
        return None
    start = data.find(b"\n" + field.encode("ascii") + b":")
    if start < 0:
        return None
    line = data[start + 1 :].split(b"\n", 1)[0]
    return line.decode("ascii", errors="replace").split()[1:]
