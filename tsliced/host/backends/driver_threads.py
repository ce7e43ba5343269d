"""What a process's own side of the CUDA driver shows of itself in /proc."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Final

from tsliced.core.model import ProcessId
from tsliced.host.processes import RunState, run_state

#: The driver names the thread that carries its calls out: "cuda" and hexadecimal digits.
_RESTORE_THREAD: Final = re.compile(rb"cuda[0-9a-f]{4,}")

#: A process that cannot run cannot answer its driver's calls: they hang until it can.
_HINDRANCES: Final = {
    RunState.STOPPED: "it is stopped by a signal, and its driver cannot answer; send it SIGCONT",
    RunState.FROZEN: "its cgroup is frozen, and its driver cannot answer; thaw the cgroup first",
}


def seems_cuda(pid: int) -> bool:
    """Return whether a thread is named as the driver's restore thread is."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/comm", "rb") as file:
                if _RESTORE_THREAD.match(file.read()):
                    return True
    return False


def hindrance_of(process: ProcessId) -> str | None:
    """Say why the driver's thread in a process cannot run, and what helps; if so."""
    return _HINDRANCES.get(run_state(process.pid))


def why_not_runnable(process: ProcessId) -> str | None:
    """Say why the driver cannot do anything with a process, if so."""
    state = run_state(process.pid)
    if state in (RunState.ZOMBIE, RunState.GONE):
        return "its process has ended"
    return _HINDRANCES.get(state)
