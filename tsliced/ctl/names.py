"""How jobs, users and devices are written for people."""

from __future__ import annotations

import functools
import pwd
from collections.abc import Sequence

from libtimeslice.protocol import Message
from tsliced.ctl.output import NOTHING, duration, printable, rate, size


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


#: What is done to a job's state, by the place that its move is at.
_MOVES = {
    "freezing": "is being frozen",
    "snapshotting": "goes to host memory",
    "turning back": "is turned back",
    "reviving": "goes on",
    "restoring": "comes back from host memory",
    "thawing": "goes on",
    "withdrawing": "is taken off again",
    "asking": "is looked for",
}


def step_text(step: str) -> str:
    """Returns what a step of a move does to its job."""
    return _MOVES.get(step, step)


def move_text(move: Message) -> str:
    """Returns a move in a sentence: whose, where to, how far it is, and how long it still takes."""
    text = f"{job_text(move['job'])} {step_text(move['step'])} since {duration(move['seconds'])}"
    if move["done_bytes"] or move["bytes_per_s"]:
        text += f": {size(move['done_bytes'])} of {size(move['total_bytes'])}"
        text += f", {rate(move['bytes_per_s'])}" if move["bytes_per_s"] else ""
    if move["left_s"] is not None:
        text += f", about {duration(move['left_s'])} left"
    return text


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
