"""What a Slurm job had of the devices, in Slurm's own records of it: its ``AdminComment``.

That is the comment that the job's user cannot write. While the job is there the controller has it,
for ``scontrol show job`` and ``squeue``, and hands it to the accounting when the job ends; then it
is the accounting that has to be told. What somebody else has written there stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tsliced.host.slurm import (
    Remark,
    SlurmError,
    ask_remark,
    ask_stored_remark,
    write_remark,
    write_stored_remark,
)
from tsliced.observe.accounts import Event
from tsliced.observe.usage import Usage, is_part, usage

__all__ = ["KINDS", "SlurmError", "put_remark", "remark_of"]

#: How each of ours begins, and nobody else's.
OURS: Final = "tslice "
#: Kinds of events that count, of all jobs: the parts of one have names that nobody knows before.
KINDS: Final = (
    "started",
    "granted",
    "released",
    "held",
    "evicted",
    "admitted",
    "killing",
    "job_ended",
)
_TIMES: Final = ("held_s", "useful_s", "waited_s", "parked_s")


def remark_of(events: Sequence[Event], job: str, *, until_unix: float) -> str:
    """Return what a job and its parts had: ``tslice name=value ...``, times in whole seconds."""
    own = [e for e in events if e["kind"] == "started" or is_part(str(e.get("job")), job)]
    sums = Usage(name=job)
    for row in usage(own, "job", since_unix=float("-inf"), until_unix=until_unix):
        sums.add(row)
    named = (str(event.get("groups") or "").split(",") for event in own if event.get("job"))
    groups = dict.fromkeys(group for names in named for group in names if group)
    facts: dict[str, object] = {"leases": sums.leases, "switches": sums.switches}
    facts |= {name: round(getattr(sums, name)) for name in _TIMES}
    if groups:
        facts["groups"] = ",".join(groups)
    return OURS + " ".join(f"{name}={value}" for name, value in facts.items())


def put_remark(id: str, text: str, left_s: Callable[[], float]) -> bool:
    """Put a text onto a Slurm job, and return whether there is a place for it.

    There is none if somebody else's text stands there, or if the job has ended and there is no
    accounting. `left_s` says how many seconds there are still. Raises `SlurmError`.
    """
    known, write = ask_remark(id, limit_s=left_s()), write_remark
    if known is None:
        known, write = ask_stored_remark(id, limit_s=left_s()), write_stored_remark
    if known is None or (known.text and not known.text.startswith(OURS)):
        return False
    if known.text != text:
        write(Remark(job=known.job, text=text), limit_s=left_s())
    return True
