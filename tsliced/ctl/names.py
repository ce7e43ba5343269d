"""How jobs, users and devices are written for people."""

from __future__ import annotations

import functools
import pwd
from collections.abc import Sequence

from libtimeslice.protocol import Message
from tsliced.ctl.output import NOTHING, printable


@functools.lru_cache(maxsize=1024)
def user_name(uid: int) -> str:
    """Returns the user's name, or the number of one that this machine does not know."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def job_text(job: Message | str) -> str:
    """Returns the job's id, led by its cluster where it has one; a text stays as it is."""
    if isinstance(job, str):
        return printable(job)
    cluster, identifier = printable(job["cluster"]), printable(job["id"])
    return f"{cluster}/{identifier}" if cluster else identifier


def job_name(job: Message) -> str:
    """Returns the name by which every command knows one job and no other: ``UID/ID``."""
    parts = [printable(job["cluster"]), str(job["uid"]), printable(job["id"])]
    return "/".join(filter(None, parts))


def devices_text(devices: Sequence[Message]) -> str:
    """Returns the indices of devices, runs of them shortened: ``0-3,6``."""
    runs: list[list[int]] = []
    for index in sorted(device["index"] for device in devices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ",".join(texts) or NOTHING
