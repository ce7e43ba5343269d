"""Figures of a run, from the daemon's events and what the ranks told. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libtimeslice.protocol import Message
from tsliced.ctl.output import size, table

Interval = tuple[float, float]

#: The backend operations of a switch, in the order in which they happen.
VERBS = ("freeze", "snapshot", "restore", "thaw")


@dataclass(frozen=True, kw_only=True)
class Operations:
    """One kind of backend operation over a run; times in seconds, bytes in total."""

    verb: str
    count: int
    p50_s: float
    p95_s: float
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Duty:
    """Shares of a time, each from 0 to 1."""

    name: str
    #: Leased, or being moved for a lease.
    held: float
    #: Leased and not being moved.
    useful: float
    #: The devices were busy; None if nothing could tell.
    kernel: float | None


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of all values do not exceed."""
    if not values:
        raise ValueError("no values, no percentile")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same time without overlaps, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the time that intervals cover, overlaps counted once; in seconds."""
    return sum(end - begin for begin, end in union(intervals))


def leases(events: Iterable[Message], end: float) -> dict[str, list[Interval]]:
    """Returns when each job, by its id, had a lease; one that is not released lasts to ``end``.

    Short ones that the daemon told of together count as one that is as long as all of them.
    """
    open_leases: dict[str, tuple[str, float]] = {}
    found: dict[str, list[Interval]] = {}
    for event in events:
        if event["kind"] == "granted":
            began_at = event["at"] - (event.get("held_s") or 0.0)
            open_leases[event["lease"]] = (job_of(event), began_at)
        elif event["kind"] == "released" and event["lease"] in open_leases:
            job, began_at = open_leases.pop(event["lease"])
            found.setdefault(job, []).append((began_at, event["at"]))
        elif event["kind"] == "held":
            interval = (event["at"] - event["held_s"], event["at"])
            found.setdefault(job_of(event), []).append(interval)
    for job, began_at in open_leases.values():
        found.setdefault(job, []).append((began_at, end))
    return found


def moves(events: Iterable[Message]) -> dict[str, list[Interval]]:
    """Returns when the state of each job, by its id, was moved off or onto the devices."""
    found: dict[str, list[Interval]] = {}
    for event in events:
        if event["kind"] in ("evicted", "admitted"):
            interval = (event["at"] - event["seconds"], event["at"])
            found.setdefault(job_of(event), []).append(interval)
    return found


def operations(events: Iterable[Message]) -> list[Operations]:
    """Returns the figures of each kind of operation that succeeded."""
    seconds: dict[str, list[float]] = {verb: [] for verb in VERBS}
    moved = dict.fromkeys(VERBS, 0)
    for event in events:
        if succeeded(event) and event["verb"] in seconds:
            seconds[event["verb"]].append(event["seconds"])
            moved[event["verb"]] += event["bytes"] or 0
    return [
        Operations(
            verb=verb,
            count=len(values),
            p50_s=percentile(values, 0.50),
            p95_s=percentile(values, 0.95),
            moved_bytes=moved[verb],
        )
        for verb, values in seconds.items()
        if values
    ]


def count_switches(events: Iterable[Message]) -> int:
    """Returns how often a job's state was moved off the devices for another job.

    A job that has ended, or has no state yet, is evicted as well, but then nothing moves.
    """
    count = 0
    has_moved = False
    for event in events:
        if succeeded(event):
            has_moved = has_moved or event["verb"] == "snapshot"
        elif event["kind"] == "evicted":
            count += has_moved
            has_moved = False
    return count


def succeeded(event: Message) -> bool:
    """Tells whether the event is about a backend operation that did what it was to do."""
    return event["kind"] == "operation" and event["reason"] is None


def job_of(event: Message) -> str:
    """Returns the id of the job that an event is about; the daemon writes it behind the user's."""
    return str(event["job"]).rpartition("/")[2]


def group_duty(name: str, events: Sequence[Message], span: Interval, kernel: float | None) -> Duty:
    """Returns the duty of the group over ``span``; ``kernel`` comes from NVML."""
    leased = [one for intervals in leases(events, span[1]).values() for one in intervals]
    moved = [one for intervals in moves(events).values() for one in intervals]
    whole = span[1] - span[0]
    return Duty(
        name=name,
        held=length([*leased, *moved]) / whole,
        useful=(length([*leased, *moved]) - length(moved)) / whole,
        kernel=kernel,
    )


def job_duty(job: str, events: Sequence[Message], span: Interval, busy_s: float) -> Duty:
    """Returns the duty of one job over ``span``; ``busy_s`` is the device work of one rank."""
    leased = leases(events, span[1]).get(job, [])
    admitted = [e for e in events if e["kind"] == "admitted"]
    moved = moves(admitted).get(job, [])
    whole = span[1] - span[0]
    return Duty(
        name=f"job {job}",
        held=length([*leased, *moved]) / whole,
        useful=(length([*leased, *moved]) - length(moved)) / whole,
        kernel=busy_s / whole,
    )


def duty_lines(duties: Iterable[Duty]) -> list[str]:
    """Returns the table of duties."""
    rows = [
        [
            duty.name,
            *(
                "-" if share is None else f"{share:.0%}"
                for share in (duty.held, duty.useful, duty.kernel)
            ),
        ]
        for duty in duties
    ]
    return table(["DUTY", "HELD", "USEFUL", "KERNEL"], rows, right=["HELD", "USEFUL", "KERNEL"])


def operation_lines(found: Iterable[Operations]) -> list[str]:
    """Returns the table of operations."""
    rows = [
        [
            one.verb,
            str(one.count),
            f"{one.p50_s * 1000:.0f} ms",
            f"{one.p95_s * 1000:.0f} ms",
            size(one.moved_bytes) if one.moved_bytes else "-",
        ]
        for one in found
    ]
    header = ["OPERATION", "COUNT", "P50", "P95", "BYTES"]
    return table(header, rows, right=header[1:])
