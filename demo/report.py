"""What the demo prints of a run: duty and operations, by the figures of which reports are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from libtimeslice.protocol import Message
from tsliced.ctl.output import size, table
from tsliced.observe import timeline
from tsliced.observe.report.figures import Figures, Stats, stats, switch_of
from tsliced.observe.report.verdict import job_id


@dataclass(frozen=True, kw_only=True)
class Operations:
    """One kind of backend operation over a run; times in seconds, bytes in total."""

    verb: str
    seconds: Stats
    moved_bytes: int


def operations(events: Iterable[Message]) -> list[Operations]:
    """Returns the figures of each kind of operation that succeeded."""
    good = [each for each in timeline.read(events).operations if each.reason is None]
    found = []
    for verb in timeline.STEPS:
        own = [each for each in good if each.verb == verb]
        if (spread := stats(each.seconds for each in own)) is not None:
            moved = sum(each.bytes for each in own)
            found.append(Operations(verb=verb, seconds=spread, moved_bytes=moved))
    return found


def count_switches(events: Iterable[Message]) -> int:
    """Returns how often a job's state was moved off the devices for another job.

    A job that has ended, or has no state yet, is evicted as well, but then nothing moves.
    """
    switch = switch_of(timeline.read(events))
    return switch.count if switch is not None else 0


def duty_lines(figures: Figures, busy_s: Mapping[str, float]) -> list[str]:
    """Returns the table of duties; ``busy_s`` is the device work of one rank, by the job's id."""
    span_s = figures.end_unix - figures.begin_unix
    rows = [
        [f"group {group.name}", group.duty.held, group.duty.useful, group.duty.kernel]
        for group in figures.groups
    ]
    rows += [
        [
            f"job {job_id(job.job)}",
            (job.useful_s + job.switch_s) / span_s,
            job.useful_s / span_s,
            busy_s.get(job_id(job.job), 0.0) / span_s,
        ]
        for job in figures.jobs
    ]
    texts = [
        [str(name), *("-" if share is None else f"{float(share):.0%}" for share in shares)]
        for name, *shares in rows
    ]
    return table(["DUTY", "HELD", "USEFUL", "KERNEL"], texts, right=["HELD", "USEFUL", "KERNEL"])


def operation_lines(found: Iterable[Operations]) -> list[str]:
    """Returns the table of operations."""
    rows = [
        [
            one.verb,
            str(one.seconds.count),
            f"{one.seconds.p50 * 1000:.0f} ms",
            f"{one.seconds.p95 * 1000:.0f} ms",
            size(one.moved_bytes) if one.moved_bytes else "-",
        ]
        for one in found
    ]
    header = ["OPERATION", "COUNT", "P50", "P95", "BYTES"]
    return table(header, rows, right=header[1:])
