"""What a timeline comes to: steps, waits, switches, duty, and what each job would take alone.

Sums of holds and duty are those of `accounts`, of which metrics are made as well. What a job would
take alone is taken from a recording of it alone, if there is one. Else it is worked out: the same
time without what it waited for, for others and for its state.

No clock, no I/O. Times are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from tsliced.observe.accounts import Accounts, Duty, Event
from tsliced.observe.timeline import Hold, Interval, Move, Series, Timeline, gaps

Span = tuple[float, float]

#: A phase pays if no more than this share of it goes into switching.
MOST_OVERHEAD: Final = 0.1
#: What a job tells under these names is shown first.
FIRST_FIGURES: Final = ("reward", "loss")
#: What counts steps or adds up is no curve of its own.
_NO_CURVES: Final = ("step", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How some values are spread."""

    count: int
    p50: float
    p95: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a job's time: a phase with devices, one without, or a wait."""

    name: str
    #: ``held``, ``host``, ``waiting``, ``switching`` or ``other``.
    kind: str
    seconds: float
    share: float
    #: How busy the devices were while it was held; None: nobody looked.
    kernel: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How a job's phases of one name were sliced."""

    name: str
    count: int
    hold_s: Stats
    #: Share of its time, switches included, that went into switches.
    overhead: float

    @property
    def too_fine(self) -> bool:
        """Whether it does not pay to hand the devices over for it; once or twice do not matter."""
        return self.overhead > MOST_OVERHEAD and self.count > 2


@dataclass(slots=True, kw_only=True)
class Steps:
    """Seconds of each step, by its number; what a step took alone is an estimate or a recording."""

    at: list[float] = field(default_factory=list)
    shared_s: list[float] = field(default_factory=list)
    alone_at: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class JobFigures:
    """One job."""

    job: str
    #: From what it did first to what it did last.
    active_s: float
    useful_s: float
    switch_s: float
    waited_s: float
    #: What all of it would have taken alone, and whether that was recorded.
    alone_s: float
    recorded: bool
    steps: Steps
    waits: Stats | None
    switches: Stats | None
    #: Windows in which it wanted no devices.
    idle: Stats | None
    #: Half of all such time is in windows that are as long or longer.
    idle_window_s: float | None
    idle_share: float
    stages: list[Stage]
    phases: list[Phase]
    tokens_per_s: float | None
    tokens_per_s_alone: float | None
    moved_bytes: int

    @property
    def step_s(self) -> float | None:
        """The median of its steps."""
        return median(self.steps.shared_s) if self.steps.shared_s else None

    @property
    def alone_step_s(self) -> float | None:
        """The median of its steps alone."""
        return median(self.steps.alone_s) if self.steps.alone_s else None

    @property
    def limit(self) -> Stage | None:
        """The stage of its own that takes most of its time."""
        own = [stage for stage in self.stages if stage.kind in ("held", "host")]
        return max(own, key=lambda stage: stage.seconds, default=None)


@dataclass(slots=True, kw_only=True)
class GroupFigures:
    """One group."""

    name: str
    jobs: list[str]
    #: From the first thing that its jobs did to the last.
    span_s: float
    duty: Duty
    #: Of the devices if each job had some of its own.
    before: Duty
    #: What the jobs would take one after the other, and whether all of them were recorded alone.
    serial_s: float
    recorded: bool

    @property
    def gain(self) -> float:
        """How many times as fast it was as one job after the other."""
        return self.serial_s / self.span_s if self.span_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What it costs to take one job off and to put another one on."""

    off_s: float
    on_s: float
    bytes: int
    count: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.off_s + self.on_s

    @property
    def shortest_phase_s(self) -> float:
        """The shortest phase for which the cost is no more than `MOST_OVERHEAD`."""
        return self.seconds * (1 - MOST_OVERHEAD) / MOST_OVERHEAD


@dataclass(slots=True, kw_only=True)
class Figures:
    """All of it."""

    begin_unix: float
    end_unix: float
    jobs: list[JobFigures]
    groups: list[GroupFigures]
    switch: Switch | None
    failed_moves: int
    warnings: dict[str, int]


def figures(events: Sequence[Event], line: Timeline, solo: Sequence[Timeline] = ()) -> Figures:
    """Return what happened in the span of a timeline.

    `events` are those that it was made of; `solo` are recordings of jobs that ran alone.
    """
    accounts = Accounts(line.begin).add_all(events)
    jobs = [_job(job, line, accounts, _recording_of(job, line, solo)) for job in line.jobs]
    return Figures(
        begin_unix=line.begin,
        end_unix=line.end,
        jobs=jobs,
        groups=[_group(name, line, accounts, jobs) for name in line.groups],
        switch=switch_of(line),
        failed_moves=sum(move.kind.endswith("_failed") for move in line.moves),
        warnings=dict(accounts.warnings),
    )


def _recording_of(job: str, line: Timeline, solo: Sequence[Timeline]) -> Timeline | None:
    """Return the recording of a job alone: by its name, or the only one that there can be."""
    name = job.rpartition("/")[2]
    for recording in solo:
        if any(each.rpartition("/")[2] == name for each in recording.jobs):
            return recording
    if len(solo) == 1 and len(line.jobs) == 1:
        return solo[0]
    return None


# --- jobs -----------------------------------------------------------------------------------------


def _job(job: str, line: Timeline, accounts: Accounts, alone: Timeline | None) -> JobFigures:
    holds = [hold for hold in line.holds if hold.job == job]
    waits = [wait for wait in line.waits if wait.job == job]
    phases = [phase for phase in line.phases if phase.job == job]
    everything: list[Interval] = [*holds, *waits, *phases]
    active = _hull(everything)
    waited = union(_span(wait) for wait in waits)
    waited_s, account = length(waited), accounts.jobs.get(job)
    windows = [end - begin for begin, end in gaps(holds, waits)]
    active_s = active[1] - active[0]
    alone_s = active_s - waited_s
    if alone is not None:
        alone_s = _same_work_s(job, line, alone) or alone_s
    switch_s = account.switch_s if account is not None else 0.0
    tokens = line.figures.get((job, "tokens"))
    return JobFigures(
        job=job,
        active_s=active_s,
        useful_s=accounts.job_useful_s(job, line.end),
        switch_s=switch_s,
        waited_s=waited_s,
        alone_s=alone_s,
        recorded=alone is not None,
        steps=_steps(job, line, waited, alone),
        waits=stats(hold.waited_s for hold in holds),
        switches=stats(hold.switch_s for hold in holds if hold.switch_s > 0),
        idle=stats(windows),
        idle_window_s=typical(windows),
        idle_share=sum(windows) / max(1e-9, active_s - waited_s),
        stages=_stages(job, line, active_s, waited_s, switch_s),
        phases=_phases(holds),
        tokens_per_s=sum(tokens.values) / active_s if tokens is not None and active_s else None,
        tokens_per_s_alone=_tokens_per_s(alone, job) if alone is not None else None,
        moved_bytes=account.moved_bytes if account is not None else 0,
    )


def _of(line: Timeline, job: str) -> list[str]:
    """Return what a recording calls a job: by its id, or the only one."""
    name = job.rpartition("/")[2]
    same = [each for each in line.jobs if each.rpartition("/")[2] == name]
    return same or line.jobs


def _active_s(line: Timeline, job: str) -> float:
    names = _of(line, job)
    items: list[Interval] = [*line.holds, *line.waits, *line.phases]
    begin, end = _hull([item for item in items if item.job in names])
    return end - begin


def _same_work_s(job: str, line: Timeline, alone: Timeline) -> float | None:
    """Return what a recorded job takes for what was done here, by its steps or by its holds."""
    names = _of(alone, job)
    steps = _steps_of(line, [job]), _steps_of(alone, names)
    held = [
        sum(hold.seconds for hold in each.holds if hold.job in whose)
        for each, whose in ((line, [job]), (alone, names))
    ]
    done, recorded = steps if all(steps) else held
    return _active_s(alone, job) * done / recorded if recorded else None


def _steps_of(line: Timeline, names: Sequence[str]) -> float:
    """Return how many steps some job told of; several of its ranks may have told the same."""
    found = (line.figures.get((name, "step")) for name in names)
    return max((len(set(series.values)) for series in found if series is not None), default=0)


def _tokens_per_s(line: Timeline, job: str) -> float | None:
    series = next(
        (line.figures[n, "tokens"] for n in _of(line, job) if (n, "tokens") in line.figures), None
    )
    seconds = _active_s(line, job)
    return sum(series.values) / seconds if series is not None and seconds else None


def _steps(job: str, line: Timeline, waited: Sequence[Span], alone: Timeline | None) -> Steps:
    found = Steps()
    covered = Coverage(waited)
    for step, (begin, end), seconds in step_times(line.figures.get((job, "step"))):
        found.at.append(step)
        found.shared_s.append(seconds)
        if alone is None:
            share = 1 - covered.within(begin, end) / (end - begin)
            found.alone_at.append(step)
            found.alone_s.append(seconds * share)
    if alone is not None:
        series = next((alone.figures.get((name, "step")) for name in _of(alone, job)), None)
        for step, _, seconds in step_times(series):
            found.alone_at.append(step)
            found.alone_s.append(seconds)
    return found


def step_times(series: Series | None) -> list[tuple[float, Span, float]]:
    """Return the number of each step that was told, when it was worked on, and its seconds."""
    if series is None:
        return []
    told = list(zip(series.at, series.values, strict=True))
    return [
        (step, (begin, end), (end - begin) / (step - before))
        for (begin, before), (end, step) in pairwise(told)
        if step > before and end > begin
    ]


def _stages(
    job: str, line: Timeline, active_s: float, waited_s: float, switch_s: float
) -> list[Stage]:
    """Return what a job's time went into; shares are of all of it."""
    whole = max(active_s, 1e-9)
    held: defaultdict[str, list[Hold]] = defaultdict(list)
    for hold in line.holds:
        if hold.job == job:
            held[hold.phase or "held"].append(hold)
    host: defaultdict[str, list[Span]] = defaultdict(list)
    for phase in line.phases:
        if phase.job == job:
            host[phase.name].append(_span(phase))
    found = []
    for name, holds in held.items():
        seconds = length(union(map(_span, holds)))
        kernel = _kernel(line, holds)
        found.append(
            Stage(name=name, kind="held", seconds=seconds, share=seconds / whole, kernel=kernel)
        )
    for name, spans in host.items():
        seconds = length(union(spans))
        found.append(Stage(name=name, kind="host", seconds=seconds, share=seconds / whole))
    behind_s = max(0.0, waited_s - switch_s)
    found.append(
        Stage(name="waiting for others", kind="waiting", seconds=behind_s, share=behind_s / whole)
    )
    found.append(
        Stage(name="switching", kind="switching", seconds=switch_s, share=switch_s / whole)
    )
    rest = max(0.0, active_s - sum(stage.seconds for stage in found))
    found.append(Stage(name="other", kind="other", seconds=rest, share=rest / whole))
    return [stage for stage in found if stage.seconds > 0]


def _kernel(line: Timeline, holds: Sequence[Hold]) -> float | None:
    """Return how busy the devices of some holds were meanwhile."""
    shares = [
        _mean(line.busy[device], hold.begin, hold.end)
        for hold in holds
        for group in hold.groups
        for device in line.devices_of(group)
        if device in line.busy
    ]
    weights = [
        hold.seconds
        for hold in holds
        for group in hold.groups
        for device in line.devices_of(group)
        if device in line.busy
    ]
    pairs = [(s, w) for s, w in zip(shares, weights, strict=True) if s is not None]
    total = sum(weight for _, weight in pairs)
    return sum(share * weight for share, weight in pairs) / total if total else None


def _mean(series: Series, begin: float, end: float) -> float | None:
    """Return the mean of a series over a time; each value is of the time up to its instant."""
    total = seconds = 0.0
    first = bisect_right(series.at, begin)
    for n in range(max(1, first), len(series.at)):
        since, until = max(begin, series.at[n - 1]), min(end, series.at[n])
        if since >= end:
            break
        if until > since:
            total += series.values[n] * (until - since)
            seconds += until - since
    return total / seconds if seconds else None


def _phases(holds: Sequence[Hold]) -> list[Phase]:
    named: defaultdict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        named[hold.phase or "held"].append(hold)
    found = []
    for name, its in named.items():
        spread = stats(hold.seconds / hold.rounds for hold in its)
        assert spread is not None, "a phase is a name that something has"
        switch_s = sum(hold.switch_s for hold in its)
        whole = switch_s + sum(hold.seconds for hold in its)
        found.append(
            Phase(
                name=name,
                count=sum(hold.rounds for hold in its),
                hold_s=spread,
                overhead=switch_s / whole if whole else 0.0,
            )
        )
    return found


# --- groups and switches --------------------------------------------------------------------------


def _group(
    name: str, line: Timeline, accounts: Accounts, jobs: Sequence[JobFigures]
) -> GroupFigures:
    users = {hold.job for hold in line.holds if name in hold.groups}
    own = [job for job in jobs if job.job in users]
    begin, end = _hull(
        [each for each in (*line.holds, *line.waits, *line.phases) if each.job in users]
    )
    serial_s = sum(job.alone_s for job in own)
    duty = (
        accounts.duty(name, line.end)
        if line.end > line.begin
        else Duty(held=0.0, useful=0.0, kernel=None)
    )
    useful = sum(job.useful_s for job in own) / serial_s if serial_s else 0.0
    kernel = duty.kernel
    if kernel is not None:
        # The same work, over the time that it would have been spread over.
        kernel = kernel * (line.end - line.begin) / serial_s if serial_s else None
    return GroupFigures(
        name=name,
        jobs=[job.job for job in own],
        span_s=end - begin,
        duty=duty,
        before=Duty(held=useful, useful=useful, kernel=kernel),
        serial_s=serial_s,
        recorded=all(job.recorded for job in own),
    )


def switch_of(line: Timeline) -> Switch | None:
    """Return what a full switch costs: the medians of what was moved off, and on."""
    off = [move for move in line.moves if move.kind == "evicted" and move.moved]
    on = [move for move in line.moves if move.kind == "admitted" and move.moved]
    if not off:
        return None
    saved: defaultdict[tuple[str, int], int] = defaultdict(int)
    for operation in line.operations:
        if operation.verb == "snapshot":
            saved[operation.job, operation.epoch] += operation.bytes
    bytes_ = [saved[move.job, move.epoch] for move in off]
    return Switch(
        off_s=_median_s(off), on_s=_median_s(on), bytes=int(median(bytes_)), count=len(off)
    )


def _median_s(moves: Sequence[Move]) -> float:
    return median(move.seconds for move in moves) if moves else 0.0


# --- small change ---------------------------------------------------------------------------------


def stats(values: Iterable[float]) -> Stats | None:
    """Return how values are spread; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Stats(
        count=len(ordered),
        p50=percentile(ordered, 0.50),
        p95=percentile(ordered, 0.95),
        most=ordered[-1],
    )


def typical(values: Iterable[float]) -> float | None:
    """Return the value above which half of the sum of all lies: many small ones do not count."""
    ordered = sorted(values)
    left = sum(ordered) / 2
    for value in ordered:
        left -= value
        if left <= 0:
            return value
    return None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of ordered values that at least ``share`` of all do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time without overlaps, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the time that spans without overlaps cover."""
    return sum(end - begin for begin, end in spans)


class Coverage:
    """How much of a window is covered by spans; these have no overlaps and are in order."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._ends = [end for _, end in spans]

    def within(self, begin: float, end: float) -> float:
        """Return the seconds of a window that are covered."""
        covered = 0.0
        for since, until in self._spans[bisect_left(self._ends, begin) :]:
            if since >= end:
                break
            covered += max(0.0, min(end, until) - max(begin, since))
        return covered


def curves(line: Timeline) -> list[str]:
    """Return the names of figures that are worth a curve, those that everybody knows first."""
    names = dict.fromkeys(name for _, name in line.figures if name not in _NO_CURVES)
    first = [name for name in FIRST_FIGURES if name in names]
    return [*first, *(name for name in names if name not in first)]


def _span(interval: Interval) -> Span:
    return interval.begin, interval.end


def _hull(intervals: Sequence[Interval]) -> Span:
    if not intervals:
        return 0.0, 0.0
    return min(i.begin for i in intervals), max(i.end for i in intervals)
