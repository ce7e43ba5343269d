"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Processes of the trace are the devices, each job, and the counters; threads are tracks. Slices of
one track are nested or apart, as the format wants it, so what overlaps goes to a further track of
the same name. Times are microseconds from the beginning of the span.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from libtimeslice import __version__
from tsliced.observe.accounts import MOVING
from tsliced.observe.timeline import Hold, Operation, Timeline

Message = dict[str, Any]

_DEVICES: Final = 1
_FIRST_JOB: Final = 10
_COUNTERS: Final = 2


def trace(line: Timeline, host: str = "") -> Message:
    """Return the JSON object of a trace: ``{"traceEvents": [...], ...}``."""
    maker = _Maker(line)
    maker.make()
    return {
        "displayTimeUnit": "ms",
        "otherData": {"producer": f"tsliced {__version__}", "host": host, "begin_unix": line.begin},
        "traceEvents": maker.events(),
    }


@dataclass(slots=True)
class _Lane:
    """One track: where its open slices end, the innermost last."""

    tid: int
    ends: list[int] = field(default_factory=list)

    def takes(self, begin: int, end: int) -> bool:
        """Whether a slice that begins no earlier than all before it fits here; then it is here."""
        while self.ends and self.ends[-1] <= begin:
            self.ends.pop()
        if self.ends and end > self.ends[-1]:
            return False
        self.ends.append(end)
        return True


@dataclass(slots=True)
class _Slice:
    pid: int
    track: str
    name: str
    category: str
    begin: int
    end: int
    args: Message
    tid: int = 0


class _Maker:
    def __init__(self, line: Timeline) -> None:
        self._line = line
        self._slices: list[_Slice] = []
        self._other: list[Message] = []
        self._pid_of = {job: _FIRST_JOB + n for n, job in enumerate(line.jobs)}
        self._lanes: dict[tuple[int, str], list[_Lane]] = {}
        #: Slices of holds, for hand-offs: by group, in the order of time.
        self._turns: dict[str, list[tuple[Hold, _Slice]]] = {}
        #: By group: the end of the latest hold.
        self._free_at: dict[str, float] = {}

    def make(self) -> None:
        """Make all slices, flows and counters."""
        line = self._line
        for hold in line.holds:
            self._hold(hold)
        for wait in line.waits:
            track = f"leases of {', '.join(wait.groups)}"
            self._slice(self._pid(wait.job), track, "waiting", "wait", wait.begin, wait.end)
        for phase in line.phases:
            pid, times = self._pid(phase.job), {"times": phase.times}
            self._slice(pid, "host phases", phase.name, "phase", phase.begin, phase.end, times)
        for move in line.moves:
            args: Message = {**move.steps, "groups": ", ".join(move.groups)}
            self._slice(self._pid(move.job), "moves", move.kind, "move", move.begin, move.end, args)
        for operation in line.operations:
            self._operation(operation)
        self._place()
        self._flows()
        self._counters()

    def events(self) -> list[Message]:
        """Return all events, names of tracks first, the others in the order of time."""
        slices = [
            {
                "ph": "X",
                "pid": each.pid,
                "tid": each.tid,
                "ts": each.begin,
                "dur": each.end - each.begin,
                "name": each.name or "(unnamed)",
                "cat": each.category,
                "args": each.args,
            }
            for each in self._slices
        ]
        # Of slices that begin together the longest is the outer one.
        timed = sorted([*slices, *self._other], key=lambda e: (e["ts"], -e.get("dur", 0)))
        return [*self._names(), *timed]

    # --- slices -------------------------------------------------------------------------------

    def _slice(
        self,
        pid: int,
        track: str,
        name: str,
        category: str,
        begin: float,
        end: float,
        args: Message | None = None,
    ) -> _Slice:
        made = _Slice(pid, track, name, category, self._us(begin), self._us(end), args or {})
        self._slices.append(made)
        return made

    def _hold(self, hold: Hold) -> None:
        args: Message = {"phase": hold.phase, "rounds": hold.rounds, "restored": hold.restored}
        args |= {"waited_s": hold.waited_s, "switch_s": hold.switch_s}
        track = f"leases of {', '.join(hold.groups)}"
        own = self._slice(
            self._pid(hold.job), track, hold.phase or "held", "hold", hold.begin, hold.end, args
        )
        for group in hold.groups:
            self._turns.setdefault(group, []).append((hold, own))
            self._turn(hold, group, args)

    def _turn(self, hold: Hold, group: str, args: Message) -> None:
        """Show a hold on the devices of one of its groups."""
        # Times are those of lines that were written: they may be some milliseconds late.
        free_at = self._free_at.get(group, self._line.begin)
        begin = max(hold.begin, free_at)
        self._free_at[group] = max(hold.end, begin)
        name = f"{hold.job}: {hold.phase}" if hold.phase else hold.job
        # A group of which no device was looked at has a track of its own.
        for device in self._line.devices_of(group) or [f"group {group}"]:
            if hold.switch_s > 0:
                switch = max(free_at, begin - hold.switch_s)
                self._slice(_DEVICES, device, "switch", "switch", switch, begin)
            self._slice(_DEVICES, device, name, "hold", begin, max(hold.end, begin), args)

    def _operation(self, operation: Operation) -> None:
        seconds = operation.end - operation.begin
        args: Message = {"bytes": operation.bytes, "rank": operation.rank}
        if operation.bytes and seconds > 0:
            args["bytes_per_s"] = operation.bytes / seconds
        if operation.reason is not None:
            args["failed"] = operation.reason
        self._slice(
            self._pid(operation.job),
            f"rank {operation.rank}",
            operation.verb,
            "operation",
            operation.begin,
            operation.end,
            args,
        )

    def _place(self) -> None:
        """Give each slice a track on which it is nested in others or apart from them."""
        self._slices.sort(key=lambda each: (each.begin, -each.end))
        for each in self._slices:
            lanes = self._lanes.setdefault((each.pid, each.track), [])
            lane = next((lane for lane in lanes if lane.takes(each.begin, each.end)), None)
            if lane is None:
                lane = _Lane(sum(map(len, self._lanes.values())) + 1)
                lanes.append(lane)
                lane.takes(each.begin, each.end)
            each.tid = lane.tid

    def _flows(self) -> None:
        """Draw an arrow from each hold to the next one of the same group by another job."""
        flow = 0
        for group, turns in sorted(self._turns.items()):
            turns.sort(key=lambda turn: turn[0].begin)
            for (before, source), (after, target) in itertools.pairwise(turns):
                if before.job == after.job:
                    continue
                flow += 1
                common = {"name": f"hand-off of {group}", "cat": "handoff", "id": flow}
                start = min(max(source.begin, source.end - 1), target.begin)
                self._other.append(
                    {"ph": "s", "pid": source.pid, "tid": source.tid, "ts": start, **common}
                )
                self._other.append(
                    {
                        "ph": "f",
                        "bp": "e",
                        "pid": target.pid,
                        "tid": target.tid,
                        "ts": target.begin,
                        **common,
                    }
                )

    # --- counters -----------------------------------------------------------------------------

    def _counters(self) -> None:
        line = self._line
        for device, series in line.busy.items():
            for at, value in zip(series.at, series.values, strict=True):
                self._count(f"busy {device}", at, 100 * value)
        for (job, name), series in line.queues.items():
            for at, value in zip(series.at, series.values, strict=True):
                self._count(f"queue {name} of {job}", at, value)
        for group in line.groups:
            edges = [
                edge
                for wait in line.waits
                if group in wait.groups
                for edge in ((wait.begin, 1), (wait.end, -1))
            ]
            self._levels(f"waiting for {group}", edges)
        parked = [
            (op.end, op.bytes if op.verb == "snapshot" else -op.bytes)
            for op in line.operations
            if op.verb in MOVING and op.reason is None
        ]
        self._levels("parked bytes", parked)

    def _levels(self, name: str, edges: Iterable[tuple[float, int]]) -> None:
        level = 0
        for at, change in sorted(edges):
            # What was parked before the history began is not known of.
            level = max(0, level + change)
            self._count(name, at, level)

    def _count(self, name: str, at: float, value: float) -> None:
        if self._line.begin <= at <= self._line.end:
            self._other.append(
                {
                    "ph": "C",
                    "pid": _COUNTERS,
                    "tid": 0,
                    "ts": self._us(at),
                    "name": name,
                    "args": {"value": value},
                }
            )

    # --- names --------------------------------------------------------------------------------

    def _names(self) -> Iterator[Message]:
        processes = {_DEVICES: "devices", _COUNTERS: "counters"}
        processes |= {pid: f"job {job}" for job, pid in self._pid_of.items()}
        for pid, name in processes.items():
            yield _name(pid, 0, "process_name", name=name)
            yield _name(pid, 0, "process_sort_index", sort_index=pid)
        for (pid, track), lanes in self._lanes.items():
            for number, lane in enumerate(lanes, start=1):
                name = track if number == 1 else f"{track} ({number})"
                yield _name(pid, lane.tid, "thread_name", name=name)
                yield _name(pid, lane.tid, "thread_sort_index", sort_index=lane.tid)

    def _pid(self, job: str) -> int:
        return self._pid_of.setdefault(job, _FIRST_JOB + len(self._pid_of))

    def _us(self, at: float) -> int:
        return max(0, round(1e6 * (at - self._line.begin)))


def _name(pid: int, tid: int, what: str, **args: object) -> Message:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}
