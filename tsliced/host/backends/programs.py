"""Programs that carry out a backend's operations, one at a time for each process.

A program that moves state must come to its end, whatever becomes of the daemon. So each inherits a
lock of its process's own, which the kernel keeps until it has ended: whoever comes after, this
daemon or the next one, waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from tsliced.core.model import ProcessId
from tsliced.host.processes import identify, is_alive

#: How often it is looked whether a predecessor has ended.
POLL_S: Final = 0.05
#: From SIGTERM to SIGKILL, for a program that is over its limit.
END_GRACE_S: Final = 5.0
#: A program may wait for ever for a process that died; nothing can get out of step any more then.
DEAD_TARGET_LIMIT_S: Final = 5.0
#: What is read of what a program says: the end of it.
MAX_SAID_BYTES: Final = 4096

#: These are the daemon's own, or hide devices from whoever must see all.
_NOT_INHERITED: Final = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "LISTEN_FDNAMES",
        "LISTEN_FDS",
        "LISTEN_PID",
        "NOTIFY_SOCKET",
        "WATCHDOG_PID",
        "WATCHDOG_USEC",
    }
)


class ProgramError(Exception):
    """A program could not be started; the text says why."""


class Ended(NamedTuple):
    """How a program ended."""

    #: As `subprocess` has it: negative for a signal.
    status: int
    #: The end of its standard output, and of its standard error, on one line each.
    said: str
    complained: str
    #: It was over its limit.
    is_overdue: bool = False

    @property
    def text(self) -> str:
        """What it says of a failure, fit to be shown."""
        said = self.complained or self.said
        late = "it was ended after its time-out" if self.is_overdue else ""
        return "; ".join(part for part in (late, f"status {self.status}", said) if part)


class Programs:
    """Runs a backend's programs. All methods belong to the event loop.

    `directory` holds the locks; `kind` tells those of different backends apart.
    """

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._running: dict[ProcessId, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Forget the locks of processes that are gone."""
        await asyncio.to_thread(self._sweep)

    async def run(
        self, process: ProcessId, command: Sequence[str], *, limit_s: float | None = None
    ) -> Ended:
        """Run a program about a process to its end, after whatever is at work on that process.

        Beyond `limit_s` it is ended. Raises `ProgramError`.
        """
        async with self._turn(process) as lock:
            ended = await self._run(process, command, lock, limit_s)
            # What it left in the background has the lock too, and is not waited for.
            fcntl.flock(lock, fcntl.LOCK_UN)
            return ended

    async def await_others(self, process: ProcessId) -> None:
        """Wait until nothing is at work on a process, whoever started it."""
        async with self._turn(process):
            pass

    @contextlib.asynccontextmanager
    async def _turn(self, process: ProcessId) -> AsyncIterator[int]:
        lock = os.open(self._lock_file(process), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # No limit: two callers in one process may wedge it for ever. The core's alarm names it.
            while not _try_to_lock(lock):  # noqa: ASYNC110 - another daemon has it, maybe
                await asyncio.sleep(POLL_S)
            yield lock
        finally:
            os.close(lock)
            if not is_alive(process):
                self._forget_lock(process)

    def forget(self, process: ProcessId) -> None:
        """End what a dead process keeps waiting, after a moment to end by itself."""
        self._forget_lock(process)
        if process in self._running:
            loop = asyncio.get_running_loop()
            loop.call_later(DEAD_TARGET_LIMIT_S, self._end, process)

    def _forget_lock(self, process: ProcessId) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._lock_file(process))

    def _end(self, process: ProcessId) -> None:
        if (program := self._running.get(process)) is not None:
            _signal(program, signal.SIGKILL)

    async def _run(
        self, process: ProcessId, command: Sequence[str], lock: int, limit_s: float | None
    ) -> Ended:
        # Files and no pipes: a program goes on when nobody reads what it says any more.
        with _unnamed(self._directory) as said, _unnamed(self._directory) as complained:
            try:
                program = await asyncio.to_thread(_spawn, command, said, complained, lock)
            except OSError as exc:
                raise ProgramError(f"{command[0]} cannot be run: {exc.strerror}") from exc
            self._running[process] = program
            try:
                is_overdue = await _wait(program, limit_s)
            finally:
                del self._running[process]
            return Ended(program.wait(), _tail(said), _tail(complained), is_overdue)

    def _lock_file(self, process: ProcessId) -> Path:
        return self._directory / f"{self._kind}-{process.pid}-{process.start_time}.lock"

    def _sweep(self) -> None:
        for path in self._directory.glob(f"{self._kind}-*.lock"):
            pid = path.stem.split("-")[1]
            process = identify(int(pid)) if pid.isdigit() else None
            if process is None or path != self._lock_file(process):
                path.unlink(missing_ok=True)


def _try_to_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _spawn(
    command: Sequence[str], said: IO[bytes], complained: IO[bytes], lock: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        pass_fds=(lock,),
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=complained,
        start_new_session=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
    )


async def _wait(program: subprocess.Popen[bytes], limit_s: float | None) -> bool:
    """Wait for the end of a program, and see to it if it is over its limit; return whether it was.

    Not by asyncio's own subprocesses, which are killed with their loop.
    """
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    # It is not reaped before, so the pid is its own.
    pidfd = os.pidfd_open(program.pid)
    loop.add_reader(pidfd, gone.set)
    try:
        if await _is_set(gone, limit_s):
            return False
        _signal(program, signal.SIGTERM)
        if not await _is_set(gone, END_GRACE_S):
            _signal(program, signal.SIGKILL)
            await gone.wait()
        return True
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _is_set(event: asyncio.Event, limit_s: float | None) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
    return event.is_set()


def _signal(program: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a program and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, number)


@contextlib.contextmanager
def _unnamed(directory: Path) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=directory) as file:
        yield file


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_SAID_BYTES))
    return " ".join(file.read().decode(errors="replace").split())
