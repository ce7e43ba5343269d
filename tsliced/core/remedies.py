"""What a person can do about what stands still: the ways out, as commands to type.

Every fault of a job, and every PINNED, BLOCKED and STUCK, is named together with one of these.
"""

from __future__ import annotations

from typing import NamedTuple

from tsliced.core.model import Cause, JobKey, Reason


def out_of_fault(job: JobKey) -> str:
    """Return what helps a job that is held back."""
    return (
        f"end its processes (tslicectl kill {job}), "
        f"or clear the fault to let it try again (tslicectl clear {job})"
    )


def toward_a_freeze(reason: Reason, *, has_callbacks: bool) -> str:
    """Return what lets a job be frozen that could not be in time; empty: that is not its trouble.

    Ranks that wait for one another are never at one step by chance: a rank that is frozen keeps its
    peers in their collective, and those cannot be frozen then, however long one waits for them.
    """
    if reason.cause is not Cause.FREEZE_TIMEOUT:
        return ""
    if has_callbacks:
        return "its on_pause callbacks must stop all ranks at the same step, and let devices finish"
    return (
        "let its ranks stop at one step when they are asked to: register on_pause and on_resume "
        "(libtimeslice), or use pausable_step"
    )


def out_of_pin(job: JobKey, reason: Reason, *, has_callbacks: bool) -> str:
    """Return what helps where a job cannot be taken off its devices."""
    mend = toward_a_freeze(reason, has_callbacks=has_callbacks) or "mend that"
    return (
        f"{mend}; then try again (tslicectl retry {job}), "
        f"or end its processes (tslicectl kill {job})"
    )


def out_of_block(job: JobKey, reason: Reason) -> str:
    """Return what helps where a job can be moved neither off nor on."""
    if reason.cause is Cause.FAILED:
        return f"end its processes (tslicectl kill {job}): the driver cannot mend them"
    if reason.cause is Cause.STRANGER:
        return f"end that process, or try again when it is gone (tslicectl retry {job})"
    return f"try again (tslicectl retry {job}), or end its processes (tslicectl kill {job})"


def out_of_orphan(job: JobKey) -> str:
    """Return what helps where nobody can ask for anything in a job's name any more."""
    return f"end them (tslicectl kill {job}), or start a client of the job"


def out_of_hang(job: JobKey) -> str:
    """Return what helps where a driver call does not come back."""
    return f"wait for it, or end its processes (tslicectl kill {job}): the call ends with them"


def out_of_silence() -> str:
    """Return what helps where a host of a group is not there."""
    return "see tslicectl show host; if it is gone for good, an operator says tslicectl host-dead"


def out_of_loss() -> str:
    """Return what helps where a device is lost."""
    return "see the kernel's log for Xid errors; reset the device (nvidia-smi -r) or reboot"


class Standstill(NamedTuple):
    """Why something does not go on, for how long, and what helps."""

    reason: Reason
    seconds: float
    way_out: str

    def __str__(self) -> str:
        return f"{self.reason}, for {self.seconds:.0f} s now; {self.way_out}"
