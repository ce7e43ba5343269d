"""What jobs tell of themselves: figures, backlogs and phases. Bounded for each job.

The latest values are kept for whoever asks (`JobTold`). Events of a job are written as it comes as
long as it stays below a rate; what comes faster is put together, and written when there is room
again: of figures and backlogs the latest values, of figures called ``tokens`` the sum, of phases
that are over their number and length. Nothing else about them is lost.

No clock, no I/O: `now` is monotonic seconds, and whoever owns this calls `write_due`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tsliced.host.history import Fact, Write

Value: TypeAlias = int | float | str | bool

#: Seconds at the full rate that a job may save up.
_BURST_S: Final = 10.0
#: Rates are those of the last hour, looked at in steps of this, in seconds.
_WINDOW_S: Final = 3600.0
_WINDOW_STEP_S: Final = 15.0
#: Phases of one job that are under way; more are not followed.
_MOST_OPEN: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldLimits:
    """Limits of what is kept and written of jobs."""

    max_events_per_s: float = 2.0
    #: Of figures, queues and phases, each.
    max_names: int = 64
    max_jobs: int = 1024


@dataclass(slots=True, kw_only=True)
class Backlog:
    """The latest depth of a queue between two stages, in its items."""

    depth: float
    target: float | None


@dataclass(slots=True, kw_only=True)
class Pace:
    """How a number that only rises has risen within the last hour."""

    total: float = 0.0
    _seen: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, more: float, now: float) -> None:
        """Let it rise."""
        seen = self._seen
        if not seen:
            # Of what came before there is no telling how long it took.
            seen.append((now, 0.0))
            return
        self.total += more
        if now - seen[-1][0] >= _WINDOW_STEP_S:
            seen.append((now, self.total))
            while len(seen) > 2 and now - seen[1][0] >= _WINDOW_S:
                seen.popleft()

    def per_hour(self, now: float) -> float | None:
        """Return how much an hour; None: it was seen to rise for too short a time."""
        if not self._seen or now - self._seen[0][0] < 1.0:
            return None
        at, before = self._seen[0]
        return (self.total - before) / (now - at) * 3600.0


@dataclass(slots=True, kw_only=True)
class JobTold:
    """What one job has told of itself."""

    figures: dict[str, Value] = field(default_factory=dict)
    queues: dict[str, Backlog] = field(default_factory=dict)
    steps: Pace = field(default_factory=Pace)
    tokens: Pace = field(default_factory=Pace)
    #: By process and name of phases under way: since when, and whether the history was told.
    open: dict[tuple[int, str], tuple[float, bool]] = field(default_factory=dict)
    #: Names of phases there ever were.
    phases: set[str] = field(default_factory=set)
    #: Of what too many names were told.
    crowded: set[str] = field(default_factory=set)
    heard_at: float = 0.0
    #: Events that it may cause now, ...
    room: float
    #: ... as of then.
    room_at: float
    #: What is not written yet.
    waiting_figures: dict[str, Value] = field(default_factory=dict)
    waiting_queues: dict[str, None] = field(default_factory=dict)
    #: By process and name: how many phases are over, and how long they were together.
    waiting_phases: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether anything is not written yet."""
        return bool(self.waiting_figures or self.waiting_queues or self.waiting_phases)


class Told:
    """What all jobs have told of themselves, by their names in the history."""

    def __init__(self, limits: ToldLimits, write: Write) -> None:
        self.jobs: dict[str, JobTold] = {}
        #: Jobs of which not everything is written yet.
        self.behind: dict[str, None] = {}
        self._limits = limits
        self._write = write
        self._burst = max(1.0, limits.max_events_per_s * _BURST_S)

    # --- what is told -------------------------------------------------------------------------

    def on_progress(self, job: str, fields: Mapping[str, Value], now: float) -> None:
        """Take figures of a job: ``tokens`` are those since the last time, ``step`` its number."""
        told = self._job(job, now)
        self._count_progress(told, fields, now)
        waiting = told.waiting_figures
        tokens = _number(waiting.get("tokens"))
        for name, value in fields.items():
            if self._has_room(job, told, told.figures, "figures", name):
                told.figures[name] = waiting[name] = value
        if tokens is not None and (more := _number(fields.get("tokens"))) is not None:
            waiting["tokens"] = tokens + more
        self._write_waiting(job, told, now)

    def on_queue(self, job: str, name: str, depth: float, target: float | None, now: float) -> None:
        """Take the backlog between two stages of a job."""
        told = self._job(job, now)
        if self._has_room(job, told, told.queues, "queues", name):
            told.queues[name] = Backlog(depth=depth, target=target)
            told.waiting_queues[name] = None
            self._write_waiting(job, told, now)

    def on_phase_begun(self, job: str, pid: int, name: str, now: float) -> None:
        """A process of a job begins a phase."""
        told = self._job(job, now)
        if len(told.open) >= _MOST_OPEN or not self._has_room(
            job, told, told.phases, "phases", name
        ):
            return
        told.phases.add(name)
        is_written = not told.waits and self._take_room(told, now)
        told.open[pid, name] = (now, is_written)
        if is_written:
            self._write("phase", "info", {"job": job, "pid": pid, "name": name, "begin": True})

    def on_phase_ended(self, job: str, pid: int, name: str, now: float) -> None:
        """A phase is over."""
        told = self._job(job, now)
        if (begun := told.open.pop((pid, name), None)) is None:
            return
        times, seconds = told.waiting_phases.get((pid, name), (0, 0.0))
        told.waiting_phases[pid, name] = (times + 1, seconds + now - begun[0])
        self._write_waiting(job, told, now)

    def on_process_gone(self, job: str, pid: int, now: float) -> None:
        """A process of a job is not there any more: its phases are over."""
        told = self.jobs.get(job)
        if told is not None:
            for key in [key for key in told.open if key[0] == pid]:
                self.on_phase_ended(job, *key, now)

    def on_job_over(self, job: str) -> None:
        """Write what is not written yet of a job, and forget it."""
        told = self.jobs.pop(job, None)
        if told is not None:
            told.room = math.inf
            self._write_all(job, told)

    # --- what is written ----------------------------------------------------------------------

    def write_due(self, now: float) -> float | None:
        """Write what there is room for by now; return when to call again, or None."""
        for job in list(self.behind):
            self._write_waiting(job, self.jobs[job], now)
        behind = (self.jobs[job] for job in self.behind)
        rate = self._limits.max_events_per_s
        return min((told.room_at + (1.0 - told.room) / rate for told in behind), default=None)

    def close(self) -> None:
        """Write everything that is not written yet."""
        for job in list(self.jobs):
            self.on_job_over(job)

    def _write_waiting(self, job: str, told: JobTold, now: float) -> None:
        self._fill_room(told, now)
        self._write_all(job, told)

    def _write_all(self, job: str, told: JobTold) -> None:
        """Write one event after the other as long as there is room."""
        self.behind[job] = None
        while told.room >= 1.0 and told.waits:
            told.room -= 1.0
            if told.waiting_figures:
                figures = {name: _plain(value) for name, value in told.waiting_figures.items()}
                told.waiting_figures.clear()
                self._write("progress", "info", {**figures, "job": job})
            elif told.waiting_phases:
                pid, name = key = next(iter(told.waiting_phases))
                times, seconds = told.waiting_phases.pop(key)
                facts: dict[str, Fact] = {"job": job, "pid": pid, "name": name, "begin": False}
                self._write("phase", "info", {**facts, "times": times, "seconds": seconds})
            else:
                name = next(iter(told.waiting_queues))
                del told.waiting_queues[name]
                backlog = told.queues[name]
                facts = {"job": job, "name": name}
                facts |= {"depth": _plain(backlog.depth), "target": _plain(backlog.target)}
                self._write("queue", "info", facts)
        if not told.waits:
            del self.behind[job]

    def _take_room(self, told: JobTold, now: float) -> bool:
        self._fill_room(told, now)
        if told.room < 1.0:
            return False
        told.room -= 1.0
        return True

    def _fill_room(self, told: JobTold, now: float) -> None:
        more = (now - told.room_at) * self._limits.max_events_per_s
        told.room, told.room_at = min(self._burst, told.room + more), now

    # --- what is kept -------------------------------------------------------------------------

    def _job(self, job: str, now: float) -> JobTold:
        told = self.jobs.get(job)
        if told is None:
            if len(self.jobs) >= self._limits.max_jobs:
                self.on_job_over(min(self.jobs, key=lambda name: self.jobs[name].heard_at))
            told = self.jobs[job] = JobTold(room=self._burst, room_at=now)
        told.heard_at = now
        return told

    def _has_room(
        self, job: str, told: JobTold, names: Mapping[str, object] | set[str], of: str, name: str
    ) -> bool:
        if name in names or len(names) < self._limits.max_names:
            return True
        if of not in told.crowded:
            told.crowded.add(of)
            most = self._limits.max_names
            reason = f"it has more than {most} names of {of}; {name!r} and later ones are left out"
            self._write("too_many_names", "warning", {"job": job, "reason": reason})
        return False

    def _count_progress(self, told: JobTold, fields: Mapping[str, Value], now: float) -> None:
        step, before = _number(fields.get("step")), _number(told.figures.get("step"))
        if step is not None:
            # One that starts again from a checkpoint repeats steps.
            told.steps.add(max(0.0, step - before) if before is not None else 0.0, now)
        tokens = _number(fields.get("tokens"))
        if tokens is not None:
            told.tokens.add(max(0.0, tokens), now)


def _number(value: Value | None) -> float | None:
    """Return a figure that can be counted with, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _plain(value: Value | None) -> Fact:
    """Return a value as every reader of an event can take it: JSON knows no infinite numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
