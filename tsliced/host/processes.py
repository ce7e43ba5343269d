"""Processes of this host: who they are, whether they can run, and the moment they die.

A process is (pid, start time). Its death is a pidfd becoming readable, and a zombie is dead: a slow
init keeps orphans in the process table for seconds, and ``kill(pid, 0)`` still succeeds on them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from enum import Enum
from errno import EINVAL, EMFILE, ENFILE, ENOENT
from typing import Final

from tsliced.core.model import ProcessId
from tsliced.host.cgroups import UNIFIED, Cgroups
from tsliced.host.procfs import (
    PROC,
    Stat,
    read_file,
    read_permitted_file,
    read_stat,
    read_status_field,
)

#: A chain of parents is cut here; a real one is a dozen long.
MAX_ANCESTORS: Final = 256


class RunState(Enum):
    """Whether a process can run, which the driver's restore thread in it must."""

    RUNNING = "running"
    #: By SIGSTOP, a terminal, a debugger or ``scontrol suspend``.
    STOPPED = "stopped"
    #: By a cgroup freezer.
    FROZEN = "frozen"
    ZOMBIE = "zombie"
    GONE = "gone"


def identify(pid: int, *, proc: str = PROC) -> ProcessId | None:
    """Return who has this pid now, or None if nobody or a zombie has it."""
    stat = read_stat(pid, proc=proc)
    return None if stat is None or stat.is_dead else ProcessId(pid, stat.start_time)


def is_alive(process: ProcessId, *, proc: str = PROC) -> bool:
    """Return whether this very process lives; its successor under the same pid doesn't count."""
    return identify(process.pid, proc=proc) == process


def run_state(pid: int, *, cgroups: Cgroups | None = None) -> RunState:
    """Return whether a process can run.

    Ask before each driver call: a call on a process that is stopped or frozen hangs until it runs.
    """
    groups = cgroups or _CGROUPS
    stat = read_stat(pid, proc=groups.proc)
    if stat is None:
        return RunState.GONE
    if stat.is_dead:
        return RunState.ZOMBIE
    if _is_frozen(pid, groups):
        return RunState.FROZEN
    return RunState.STOPPED if stat.state in "Tt" else RunState.RUNNING


def _is_frozen(pid: int, cgroups: Cgroups) -> bool:
    paths = cgroups.paths(pid)
    if "freezer" in paths and (directory := cgroups.directory("freezer", paths["freezer"])):
        # Version 1 reports the effective state: a frozen ancestor shows here. The root has no file.
        state = read_file(f"{directory}/freezer.state")
        if state is not None and state.strip() != b"THAWED":
            return True
    # Version 2: what was asked for, on any level; ``cgroup.events`` tells only when it is complete.
    return any(
        (read_file(f"{directory}/cgroup.freeze") or b"0").strip() == b"1"
        for directory in cgroups.lineage(UNIFIED, paths.get(UNIFIED, "/"))
    )


def ancestors(pid: int, *, proc: str = PROC) -> tuple[Stat, ...]:
    """Return a process's parent, its parent, and so on up to pid 1, as they are now."""
    chain: list[Stat] = []
    stat = read_stat(pid, proc=proc)
    while stat is not None and stat.parent > 0 and len(chain) < MAX_ANCESTORS:
        stat = read_stat(stat.parent, proc=proc)
        if stat is not None:
            chain.append(stat)
    return tuple(chain)


def parent_chain(pid: int, *, proc: str = PROC) -> tuple[ProcessId, ...]:
    """Return the identities of a process's ancestors, nearest first."""
    return tuple(ProcessId(stat.pid, stat.start_time) for stat in ancestors(pid, proc=proc))


def environment(pid: int, *, proc: str = PROC) -> dict[str, str] | None:
    """Return the environment that a process was started with; None if it can't be read.

    It is what the process's own memory holds there now: setproctitle writes its titles over it,
    and later ``setenv`` calls don't show. Lines that are no ``NAME=value`` are left out.
    """
    data = read_permitted_file(f"{proc}/{pid}/environ")
    if data is None:
        return None
    values: dict[str, str] = {}
    for item in data.split(b"\0"):
        name, equals, value = item.partition(b"=")
        if equals:
            values.setdefault(os.fsdecode(name), os.fsdecode(value))
    return values


def command_name(pid: int, *, proc: str = PROC) -> str | None:
    """Return the short name of a process (at most 15 bytes), or None if it is gone."""
    data = read_file(f"{proc}/{pid}/comm")
    return data.decode(errors="replace").rstrip("\n") if data else None


def uid_of(pid: int, *, proc: str = PROC) -> int | None:
    """Return the real uid of a process, or None if it is gone.

    The owner of ``/proc/PID`` won't do: it is the effective uid, and root for a process that may
    not be dumped.
    """
    words = read_status_field(pid, "Uid", proc=proc)
    return int(words[0]) if words else None


def leader_of(pid: int, *, proc: str = PROC) -> int | None:
    """Return the process that a thread's id belongs to, which is a process's own; None if gone."""
    words = read_status_field(pid, "Tgid", proc=proc)
    return int(words[0]) if words else None


def ns_pid(pid: int, *, proc: str = PROC) -> int | None:
    """Return the pid by which a process knows itself, in a container another than ours."""
    words = read_status_field(pid, "NSpid", proc=proc)
    return int(words[-1]) if words else None


def open_pidfd(process: ProcessId) -> int | None:
    """Return a pidfd of this very process, or None if it is dead. Raises OSError."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        # Only now is it certain whose descriptor it is: the pid may have been reused.
        alive = is_alive(process)
    except BaseException:
        os.close(pidfd)
        raise
    if not alive:
        os.close(pidfd)
        return None
    return pidfd


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process, and never its successor; return False if it is dead.

    Raises OSError: it may not be signalled, or no descriptor is left.
    """
    pidfd = open_pidfd(process)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


class ProcessLimitError(Exception):
    """No more processes can be watched or known; the caller must refuse whoever asked."""

    def __init__(self, text: str, *, limit: int) -> None:
        super().__init__(text)
        self.limit = limit


class NotAProcessError(ValueError):
    """The pid names a thread, not a process."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"{pid} is a thread, not a process: give the pid of its process")
        self.pid = pid


class ExitWatch:
    """Reports the death of each watched process once.

    `on_exit` is called on the loop, as soon as the kernel says so, and never from within `add`.
    Call `close` at the end; until then every watched process holds one descriptor.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[ProcessId], None],
        *,
        limit: int = 65_536,
    ) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._limit = limit
        self._pidfds: dict[ProcessId, int] = {}
        self._reports: dict[ProcessId, asyncio.Handle] = {}

    def __len__(self) -> int:
        return len(self._pidfds) + len(self._reports)

    def __contains__(self, process: object) -> bool:
        return process in self._pidfds or process in self._reports

    def add(self, process: ProcessId) -> None:
        """Watch a process; doing it twice is doing it once. A dead one is reported soon.

        Raises:
            ProcessLimitError: `limit` processes are watched, or no descriptor is left.
            NotAProcessError: the pid is a thread's.
        """
        if process in self:
            return
        if len(self) >= self._limit:
            raise ProcessLimitError(
                f"{self._limit} processes are watched already, which is the limit",
                limit=self._limit,
            )
        pidfd = self._open(process)
        if pidfd is None:
            self._reports[process] = self._loop.call_soon(self._report, process)
            return
        self._pidfds[process] = pidfd
        self._loop.add_reader(pidfd, self._exited, process)

    def discard(self, process: ProcessId) -> None:
        """Stop watching; after this `on_exit` is not called for it."""
        pidfd = self._pidfds.pop(process, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        report = self._reports.pop(process, None)
        if report is not None:
            report.cancel()

    def close(self) -> None:
        """Stop watching everything."""
        for process in [*self._pidfds, *self._reports]:
            self.discard(process)

    def _open(self, process: ProcessId) -> int | None:
        """Return a pidfd of this very process, or None if it is dead."""
        try:
            return open_pidfd(process)
        except OSError as exc:
            if exc.errno in (EINVAL, ENOENT):
                raise NotAProcessError(process.pid) from exc
            if exc.errno in (EMFILE, ENFILE):
                raise ProcessLimitError(
                    "no descriptor is left to watch a process: raise LimitNOFILE of the daemon",
                    limit=len(self),
                ) from exc
            raise

    def _exited(self, process: ProcessId) -> None:
        self.discard(process)
        self._on_exit(process)

    def _report(self, process: ProcessId) -> None:
        del self._reports[process]
        self._on_exit(process)


_CGROUPS: Final = Cgroups()
