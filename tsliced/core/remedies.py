"""What a person can do about what stands still: the ways out, as commands to type.

Every fault of a job, and every PINNED, BLOCKED and STUCK, is named together with one of these.
"""

from __future__ import annotations

from tsliced.core.model import Cause, JobKey, Reason


def out_of_fault(job: JobKey) -> str:
    """Return what helps a job that is held back."""
    return (
        f"end its processes (tslicectl kill {job}), "
        f"or clear the fault to let it try again (tslicectl clear {job})"
    )


def out_of_pin(job: JobKey) -> str:
    """Return what helps where a job cannot be taken off its devices."""
    return (
        f"mend that and try again (tslicectl retry {job}), "
        f"or end its processes (tslicectl kill {job})"
    )


def out_of_block(job: JobKey, reason: Reason) -> str:
    """Return what helps where a job can be moved neither off nor on."""
    if reason.cause is Cause.FAILED:
        return f"end its processes (tslicectl kill {job}): the driver cannot mend them"
    if reason.cause is Cause.STRANGER:
        return f"end that process, or try again when it is gone (tslicectl retry {job})"
    return f"try again (tslicectl retry {job}), or end its processes (tslicectl kill {job})"


def out_of_hang(job: JobKey) -> str:
    """Return what helps where a driver call does not come back."""
    return f"wait for it, or end its processes (tslicectl kill {job}): the call ends with them"


def explained(reason: Reason, seconds: float, way_out: str) -> str:
    """Return a reason with how long it has stood and what helps."""
    return f"{reason}, for {seconds:.0f} s now; {way_out}"
