"""The data that the page of a report draws: lanes of bars, and curves. Small enough for a mail.

Bars are four whole numbers each: begin and length in milliseconds from the beginning, what it is,
and which label it has. What could not be told apart on a screen is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tsliced.ctl.output import rate, size
from tsliced.observe.report.figures import JobFigures, curves, union
from tsliced.observe.report.verdict import job_id
from tsliced.observe.timeline import STEPS, Operation, Series, Timeline

Message = dict[str, Any]

#: Bars of a lane beyond this are put together, the nearest of a kind first.
MOST_BARS: Final = 6000
#: Points of a curve: more than a screen has columns.
MOST_POINTS: Final = 1500
#: Curves of what jobs tell of themselves.
MOST_CURVES: Final = 12

#: What a bar is; holds of a device have a number from `FIRST_JOB` on, by the job.
HELD, WAITING, SWITCHING, HOST = range(4)
FIRST_STEP: Final = 4
FIRST_JOB: Final = 16


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, in seconds."""

    begin: float
    end: float
    kind: int
    label: str


@dataclass(slots=True)
class _Labels:
    """Texts of bars, each once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def drawing(line: Timeline, jobs: Sequence[JobFigures], solo: Sequence[Timeline]) -> Message:
    """Return everything that is drawn, fit for JSON."""
    labels = _Labels()
    names = [job.job for job in jobs]
    lanes = [
        {"name": name, "kind": kind, "bars": _flat(bars, line, labels)}
        for name, kind, bars in (*_device_lanes(line, names), *_job_lanes(line, names))
    ]
    return {
        "begin": line.begin,
        "span": line.end - line.begin,
        "jobs": [job_id(name) for name in names],
        "lanes": lanes,
        "labels": list(labels.numbers),
        "charts": [*_over_time(line), *_over_steps(line, jobs, solo), *_spreads(line, names)],
    }


# --- lanes ----------------------------------------------------------------------------------------


def _device_lanes(line: Timeline, jobs: Sequence[str]) -> Iterable[tuple[str, str, list[Bar]]]:
    for group in line.groups:
        bars = []
        free_at = line.begin
        for hold in line.holds:
            if group not in hold.groups:
                continue
            begin = max(hold.begin, free_at)
            if hold.switch_s > 0:
                switch = max(free_at, begin - hold.switch_s)
                bars.append(Bar(switch, begin, SWITCHING, f"switch to {job_id(hold.job)}"))
            label = f"{job_id(hold.job)}: {hold.phase or 'held'}"
            bars.append(Bar(begin, hold.end, FIRST_JOB + jobs.index(hold.job), label))
            free_at = max(free_at, hold.end)
        # All devices of a group are held as one; how busy each of them is the curves show.
        devices = line.devices_of(group)
        for device in devices or [""]:
            short = f"{group} {device[:12]}" if device else group
            yield short, "device", bars


def _job_lanes(line: Timeline, jobs: Sequence[str]) -> Iterable[tuple[str, str, list[Bar]]]:
    for job in jobs:
        bars = [Bar(w.begin, w.end, WAITING, "waits") for w in _merged_waits(line, job)]
        bars += [
            Bar(hold.begin, hold.end, HELD, hold.phase or "held")
            for hold in line.holds
            if hold.job == job
        ]
        bars += [
            Bar(phase.begin, phase.end, HOST, f"{phase.name} (host)")
            for phase in line.phases
            if phase.job == job
        ]
        bars += _steps(line, job)
        yield job_id(job), "job", bars


def _merged_waits(line: Timeline, job: str) -> list[Bar]:
    spans = union((wait.begin, wait.end) for wait in line.waits if wait.job == job)
    return [Bar(begin, end, WAITING, "") for begin, end in spans]


def _steps(line: Timeline, job: str) -> list[Bar]:
    """Return the steps of moves; those of several ranks that belong together are one bar."""
    bars = []
    for number, verb in enumerate(STEPS):
        own = [o for o in line.operations if o.job == job and o.verb == verb]
        for together in _overlapping(own):
            begin, end = min(o.begin for o in together), max(o.end for o in together)
            moved = sum(o.bytes for o in together)
            label = verb if len(together) == 1 else f"{verb} of {len(together)} ranks"
            if moved:
                label += f", {size(moved)}, {rate(moved / max(1e-6, end - begin))}"
            if any(o.reason for o in together):
                label += ", failed"
            bars.append(Bar(begin, end, FIRST_STEP + number, label))
    return bars


def _overlapping(operations: Sequence[Operation]) -> list[list[Operation]]:
    found: list[list[Operation]] = []
    until = float("-inf")
    for operation in sorted(operations, key=lambda o: o.begin):
        if not found or operation.begin > until:
            found.append([])
        found[-1].append(operation)
        until = max(until, operation.end)
    return found


def _flat(bars: Sequence[Bar], line: Timeline, labels: _Labels) -> list[int]:
    flat: list[int] = []
    for bar in thinned(bars, line.end - line.begin):
        begin = round(1000 * (bar.begin - line.begin))
        length = max(1, round(1000 * (bar.end - bar.begin)))
        flat += (begin, length, bar.kind, labels.number(bar.label))
    return flat


def thinned(bars: Sequence[Bar], span_s: float) -> list[Bar]:
    """Return bars in the order of time, so many that a page can have them.

    Neighbours of one kind that are nearer than a part of the span become one, until it is enough.
    """
    ordered = sorted(bars, key=lambda bar: bar.begin)
    nearness = span_s / 20_000
    while len(ordered) > MOST_BARS:
        latest: dict[int, int] = {}
        kept: list[Bar] = []
        for bar in ordered:
            place = latest.get(bar.kind)
            before = kept[place] if place is not None else None
            if place is not None and before is not None and bar.begin - before.end < nearness:
                end = max(before.end, bar.end)
                label = bar.label if bar.label == before.label else "several"
                kept[place] = Bar(before.begin, end, bar.kind, label)
            else:
                latest[bar.kind] = len(kept)
                kept.append(bar)
        ordered, nearness = kept, 2 * nearness
    return ordered


# --- curves ---------------------------------------------------------------------------------------


def _over_time(line: Timeline) -> Iterable[Message]:
    if line.busy:
        curves_ = [
            _curve(f"{line.group_of[device]} {device[:12]}", series, line, lambda v: 100 * v)
            for device, series in line.busy.items()
        ]
        yield _chart("Kernels running", "time", "%", curves_, steps=True, most=100)
    queues: dict[str, list[Message]] = {}
    for (job, name), series in line.queues.items():
        queues.setdefault(name, []).append(_curve(job_id(job), series, line))
        if series.target is not None:
            level = Series(at=[line.begin, line.end], values=[series.target] * 2)
            queues[name].append({**_curve(f"{job_id(job)}: target", level, line), "dash": True})
    for name, found in queues.items():
        yield _chart(f"Queue {name}", "time", "items", found, steps=True)


def _over_steps(
    line: Timeline, jobs: Sequence[JobFigures], solo: Sequence[Timeline]
) -> Iterable[Message]:
    times = []
    for job in jobs:
        name, steps = job_id(job.job), job.steps
        times.append(_points(f"{name} shared", steps.at, steps.shared_s))
        how = "alone" if job.recorded else "alone (worked out)"
        times.append({**_points(f"{name} {how}", steps.alone_at, steps.alone_s), "dash": True})
    if any(curve["x"] for curve in times):
        yield _chart("Time of a step", "step", "s", [curve for curve in times if curve["x"]])
    for name in curves(line)[:MOST_CURVES]:
        found = []
        for job in jobs:
            found.append(_of_steps(line, job.job, name, ""))
            found += [
                {**_of_steps(recording, each, name, " alone"), "dash": True}
                for recording in solo
                for each in recording.jobs
                if job_id(each) == job_id(job.job) or len(jobs) == 1
            ]
        if found := [curve for curve in found if curve["x"]]:
            yield _chart(name, "step", "", found)


def _of_steps(line: Timeline, job: str, name: str, more: str) -> Message:
    """Return a figure by the number of the step that it was told with, or else by its own."""
    series, steps = line.figures.get((job, name)), line.figures.get((job, "step"))
    if series is None:
        return _points(job_id(job) + more, [], [])
    number_at = dict(zip(steps.at, steps.values, strict=True)) if steps is not None else {}
    numbers = [number_at.get(at, float(n)) for n, at in enumerate(series.at, start=1)]
    return _points(job_id(job) + more, numbers, series.values)


def _spreads(line: Timeline, jobs: Sequence[str]) -> Iterable[Message]:
    """Yield how many leases waited, and how many switches took, at most so long."""
    for title in ("Waits", "Switches"):
        found = []
        for job in jobs:
            holds = [hold for hold in line.holds if hold.job == job]
            switches = [hold.switch_s for hold in holds if hold.switch_s > 0]
            values = sorted(switches if title == "Switches" else [h.waited_s for h in holds])
            shares = [100 * (n + 1) / len(values) for n in range(len(values))]
            found.append(_points(job_id(job), values, shares))
        if found := [curve for curve in found if curve["x"]]:
            yield _chart(f"{title}: share that took no longer", "seconds", "%", found, most=100)


def _chart(
    title: str,
    x: str,
    unit: str,
    found: list[Message],
    *,
    steps: bool = False,
    most: float | None = None,
) -> Message:
    return {"title": title, "x": x, "unit": unit, "curves": found, "steps": steps, "most": most}


def _curve(
    label: str, series: Series, line: Timeline, scale: Callable[[float], float] = lambda v: v
) -> Message:
    """Return a curve over time, in seconds from the beginning."""
    at = [round(at - line.begin, 3) for at in series.at]
    return _points(label, at, [scale(value) for value in series.values])


def _points(label: str, x: Sequence[float], y: Sequence[float]) -> Message:
    pairs = sorted(zip(x, y, strict=False))
    if len(pairs) > MOST_POINTS:
        pairs = _sparse(pairs)
    return {
        "label": label,
        "x": [_short(value) for value, _ in pairs],
        "y": [_short(value) for _, value in pairs],
    }


def _sparse(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep of each stretch the lowest and the highest value, so that no peak is lost."""
    stretches = MOST_POINTS // 2
    kept: list[tuple[float, float]] = []
    for n in range(stretches):
        stretch = pairs[n * len(pairs) // stretches : (n + 1) * len(pairs) // stretches]
        if stretch:
            kept += {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
    return sorted(kept)


def _short(value: float) -> float:
    """Return a number with as many digits as anybody sees. What is no number JSON cannot carry."""
    return float(f"{value:.7g}") if abs(value) < float("inf") else 0.0
