"""What this package asks of the kernel: who a process is, whether it lives, which signals come in.

A process is (pid, start time), never a bare pid: the kernel reuses pids, and an operation on the
wrong process cannot be taken back.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

# Signals that report a fault of the thread itself. Blocking them would not stop the fault, only
# take away its handler.
_FAULT_SIGNALS = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)

_POLL_INTERVAL_S = 0.005


def start_time(pid: int) -> int | None:
    """Returns when process ``pid`` started, in clock ticks since boot, or None if it is dead.

    It is field 22 of ``/proc/PID/stat`` (proc_pid_stat(5)). A zombie is dead: its device memory is
    free. A leader that has left its threads running also shows as a zombie; such a process lives.
    Raises OSError when ``/proc`` itself refuses to answer (mount option ``hidepid``).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and parentheses: fields are counted from the last one.
    fields = content[content.rindex(b")") + 2 :].split()
    state, threads, started = fields[0], int(fields[17]), int(fields[19])
    if state in (b"Z", b"X", b"x") and threads <= 1:
        return None
    return started


def is_alive(pid: int, started: int) -> bool:
    """Tells whether the process ``pid`` that started at ``started`` is still alive."""
    return start_time(pid) == started


def dies_within(pid: int, started: int, limit_s: float) -> bool:
    """Waits at most ``limit_s`` seconds for a process to die; tells whether it has.

    The driver notices that its channel to a dying process has closed some milliseconds before the
    kernel shows that process as dead, so a single look right after the error would be a race.
    """
    deadline = time.monotonic() + limit_s
    while is_alive(pid, started):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def may_attach(pid: int) -> bool:
    """Tells whether the kernel lets the caller attach to ``pid``, as ptrace(2) would.

    Opening ``/proc/PID/mem`` runs that check (uid, capabilities, Yama) and does nothing else.
    """
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0):
            return True
    except PermissionError:
        return False
    except OSError:
        return True


def block_signals() -> None:
    """Blocks every signal that can be blocked, for the calling thread and for good."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULT_SIGNALS)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Holds signals back from the calling thread; those that came meanwhile arrive at the end."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
