"""The event history as intervals and series: what reports draw and traces are made of.

Sums are made by `accounts`, from the same events. No clock, no I/O: times are unix seconds. What
is not over when the history ends lasts to the end of the span, and what began before it is cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tsliced.host.history import Fact
from tsliced.observe.accounts import MOVING, Event, Token, groups_of, lease_of, number, token_of

#: Facts of every event, which are no figures of a job's own.
_COMMON = frozenset({"seq", "at", "kind", "level", "job"})
#: Steps of a move as the history has them, in their order.
STEPS = ("freeze", "snapshot", "restore", "thaw")

Kind = TypeVar("Kind", bound="Interval")
Key = TypeVar("Key", bound="tuple[Fact, ...]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Something that a job did from one instant to another."""

    job: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Interval):
    """A job had groups."""

    groups: tuple[str, ...]
    phase: str
    #: What moving state for it took, just before `begin`.
    switch_s: float = 0.0
    #: From its request to `begin`, the switch included.
    waited_s: float = 0.0
    #: Leases that came and went too fast to be told one by one.
    rounds: int = 1
    #: State was brought back for it.
    restored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Interval):
    """A job waited for groups: behind others, or for its state."""

    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Interval):
    """One step on one rank."""

    groups: tuple[str, ...]
    rank: str
    verb: str
    bytes: int
    reason: str | None
    #: All of one move have the same.
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Interval):
    """A whole tenancy was taken off its devices or put on: ``evicted``, ``admitted``, or failed."""

    groups: tuple[str, ...]
    kind: str
    #: Seconds by step.
    steps: Mapping[str, float]
    epoch: int = 0
    #: Whether state was copied, and not only looked for.
    moved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPhase(Interval):
    """A phase of a job that needs no devices (`ts.phase`)."""

    name: str
    times: int = 1


@dataclass(slots=True, kw_only=True)
class Series:
    """Values over time."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    #: Of a queue: how full it should be.
    target: float | None = None

    def add(self, at: float, value: float) -> None:
        """Put a value behind the others."""
        self.at.append(at)
        self.values.append(value)


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Everything, in the order of time."""

    begin: float
    end: float
    holds: list[Hold] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    phases: list[HostPhase] = field(default_factory=list)
    #: By job and name.
    queues: dict[tuple[str, str], Series] = field(default_factory=dict)
    #: By job and name.
    figures: dict[tuple[str, str], Series] = field(default_factory=dict)
    #: By device: the share of time in which a kernel ran.
    busy: dict[str, Series] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)

    @property
    def jobs(self) -> list[str]:
        """The jobs that had anything, the first one first."""
        found: list[Interval] = [*self.holds, *self.waits, *self.phases, *self.moves]
        return list(dict.fromkeys(each.job for each in sorted(found, key=lambda x: x.begin)))

    @property
    def groups(self) -> list[str]:
        """The groups that anybody wanted, by name."""
        named = {group for hold in self.holds for group in hold.groups}
        named |= {group for wait in self.waits for group in wait.groups}
        return sorted({*named, *self.group_of.values()})

    def devices_of(self, group: str) -> list[str]:
        """Return the devices of a group that were looked at."""
        return sorted(device for device, its in self.group_of.items() if its == group)


def read(
    events: Iterable[Event], *, since_unix: float | None = None, until_unix: float | None = None
) -> Timeline:
    """Return what happened, within the given span.

    Without one it lasts from what began first, of all that is told, to the last event.
    """
    reader = _Reader()
    for event in events:
        reader.add(event)
    begin = since_unix if since_unix is not None else reader.begin
    end = until_unix if until_unix is not None else reader.last_at
    return reader.timeline(begin, max(begin, end))


@dataclass(slots=True, kw_only=True)
class _Open:
    hold: Hold
    leases: set[tuple[Fact, str]]


class _Reader:
    """Takes events in, the oldest first."""

    def __init__(self) -> None:
        self.first_at = float("inf")
        self.last_at = float("-inf")
        self._latest_of: dict[Fact, float] = {}
        self._line = Timeline(begin=0.0, end=0.0)
        self._held: dict[Token, _Open] = {}
        self._token_of: dict[tuple[Fact, str], Token] = {}
        #: By lease: who waits for it, and since when.
        self._waiting: dict[tuple[Fact, str], Wait] = {}
        #: By origin, job, process and name: since when a phase goes on.
        self._phases: dict[tuple[Fact, str, Fact, str], float] = {}
        #: By rank: when its latest operation ended.
        self._done_at: dict[str, float] = {}

    def add(self, event: Event) -> None:
        """Take one event in."""
        at = number(event, "at")
        if event["kind"] == "started" and not event.get("leases"):
            # It remembers no lease, so they ended with its machine.
            origin = event.get("origin")
            self._end_all(self._latest_of.get(origin, at), origin)
        self.first_at, self.last_at = min(self.first_at, at), max(self.last_at, at)
        # (Jobs may tell of anything by that name.)
        self._latest_of[event.get("origin") if event["kind"] != "progress" else None] = at
        match event["kind"]:
            case "queued":
                wait = Wait(job=_job(event), groups=groups_of(event), begin=at, end=at)
                self._waiting.setdefault(lease_of(event), wait)
            case "granted":
                self._on_granted(event, at)
            case "released":
                self._on_released(event, at)
            case "not_granted":
                if (over := self._waiting.pop(lease_of(event), None)) is not None:
                    self._line.waits.append(replace(over, end=at))
            case "held":
                self._on_held(event, at)
            case "operation":
                self._on_operation(event, at)
            case "evicted" | "admitted" | "eviction_failed" | "admission_failed":
                self._on_move(event, at)
            case "phase":
                self._on_phase(event, at)
            case "queue":
                series = self._line.queues.setdefault((_job(event), str(event["name"])), Series())
                series.add(at, number(event, "depth"))
                if event.get("target") is not None:
                    series.target = number(event, "target")
            case "progress":
                self._on_progress(event, at)
            case "busy":
                self._on_busy(event, at)
            case _:
                pass

    def _end_all(self, end: float, origin: Fact = None) -> None:
        """End what is not over, on all hosts or on one."""
        line = self._line
        for token in _of(self._held, origin):
            line.holds.append(replace(self._held.pop(token).hold, end=end))
        for lease in _of(self._waiting, origin):
            line.waits.append(replace(self._waiting.pop(lease), end=end))
        for key in _of(self._phases, origin):
            phase = HostPhase(job=key[1], name=key[3], begin=self._phases.pop(key), end=end)
            line.phases.append(phase)
        for lease in _of(self._token_of, origin):
            del self._token_of[lease]

    @property
    def begin(self) -> float:
        """The instant at which something began first."""
        line = self._line
        lists: tuple[list[Hold], list[Wait], list[Operation], list[Move], list[HostPhase]]
        lists = (line.holds, line.waits, line.operations, line.moves, line.phases)
        begins = [each.begin for list_ in lists for each in list_]
        return min([self.first_at, *begins])

    def timeline(self, begin: float, end: float) -> Timeline:
        """Return all of it, cut off at both ends."""
        self._end_all(end)
        line = self._line
        line.begin, line.end = begin, end
        line.holds = _within(line.holds, begin, end)
        line.waits = _within(line.waits, begin, end)
        line.operations = _within(line.operations, begin, end)
        copied = {(o.job, o.epoch) for o in line.operations if o.verb in MOVING}
        line.moves = [
            replace(move, moved=(move.job, move.epoch) in copied)
            for move in _within(line.moves, begin, end)
        ]
        line.phases = _within(line.phases, begin, end)
        return line

    # --- leases -------------------------------------------------------------------------------

    def _on_granted(self, event: Event, at: float) -> None:
        lease, token = lease_of(event), token_of(event)
        began_at = at - number(event, "held_s")
        waited_s = number(event, "waited_s")
        self._waiting.pop(lease, None)
        groups = groups_of(event)
        if waited_s > 0:
            wait = Wait(job=_job(event), groups=groups, begin=began_at - waited_s, end=began_at)
            self._line.waits.append(wait)
        known = self._held.get(token)
        if known is None:
            hold = Hold(
                job=_job(event),
                groups=groups,
                phase=str(event.get("phase") or ""),
                begin=began_at,
                end=began_at,
                switch_s=number(event, "switch_s"),
                waited_s=waited_s,
                restored=bool(event.get("restored")),
            )
            known = self._held[token] = _Open(hold=hold, leases=set())
        elif waited_s > known.hold.waited_s:
            known.hold = replace(known.hold, waited_s=waited_s)
        known.leases.add(lease)
        self._token_of[lease] = token

    def _on_released(self, event: Event, at: float) -> None:
        lease = lease_of(event)
        token = self._token_of.pop(lease, None)
        if token is None:
            # Its beginning is not among the events.
            begin = at - number(event, "held_s")
            self._line.holds.append(
                Hold(job=_job(event), groups=groups_of(event), phase="", begin=begin, end=at)
            )
            return
        known = self._held[token]
        known.leases.discard(lease)
        if not known.leases:
            del self._held[token]
            self._line.holds.append(replace(known.hold, end=at))

    def _on_held(self, event: Event, at: float) -> None:
        ranks = max(1.0, number(event, "ranks"))
        self._line.holds.append(
            Hold(
                job=_job(event),
                groups=groups_of(event),
                phase=str(event.get("phase") or ""),
                begin=at - number(event, "held_s") / ranks,
                end=at,
                rounds=max(1, int(number(event, "leases") / ranks)),
            )
        )

    # --- moves --------------------------------------------------------------------------------

    def _on_operation(self, event: Event, at: float) -> None:
        if event["verb"] not in STEPS:
            return
        reason, rank = event.get("reason"), str(event["rank"])
        # One after the other, though each is written down a little late.
        begin = max(at - number(event, "seconds"), self._done_at.get(rank, 0.0))
        self._done_at[rank] = at
        self._line.operations.append(
            Operation(
                job=_job(event),
                groups=groups_of(event),
                rank=rank,
                verb=str(event["verb"]),
                begin=begin,
                end=at,
                bytes=int(number(event, "bytes")),
                reason=str(reason) if reason is not None else None,
                epoch=int(number(event, "epoch")),
            )
        )

    def _on_move(self, event: Event, at: float) -> None:
        steps = {step: number(event, f"{step}_s") for step in STEPS}
        self._line.moves.append(
            Move(
                job=_job(event),
                groups=groups_of(event),
                kind=str(event["kind"]),
                begin=at - number(event, "seconds"),
                end=at,
                steps={step: seconds for step, seconds in steps.items() if seconds},
                epoch=int(number(event, "epoch")),
            )
        )

    # --- what jobs tell -----------------------------------------------------------------------

    def _on_phase(self, event: Event, at: float) -> None:
        key = (event.get("origin"), _job(event), event.get("pid"), str(event["name"]))
        if event.get("begin"):
            self._phases[key] = at
            return
        began_at = self._phases.pop(key, None)
        seconds, times = number(event, "seconds"), max(1, int(number(event, "times")))
        begin = began_at if began_at is not None and times == 1 else at - seconds
        self._line.phases.append(
            HostPhase(job=key[1], name=key[3], begin=begin, end=at, times=times)
        )

    def _on_progress(self, event: Event, at: float) -> None:
        job = _job(event)
        for name, value in event.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in _COMMON and is_number:
                self._line.figures.setdefault((job, name), Series()).add(at, float(str(value)))

    def _on_busy(self, event: Event, at: float) -> None:
        device, span_s = str(event["device"]), number(event, "span_s")
        self._line.group_of[device] = str(event["group"])
        if span_s > 0:
            series = self._line.busy.setdefault(device, Series())
            begin = at - span_s
            if not series.at or begin > series.at[-1] + span_s / 2:
                # Nothing was told for a while, because nothing ran.
                series.add(max(begin, series.at[-1] if series.at else begin), 0.0)
            series.add(at, min(1.0, number(event, "busy_s") / span_s))


def gaps(holds: Iterable[Hold], waits: Iterable[Wait]) -> Iterator[tuple[float, float]]:
    """Yield the windows in which one job neither holds nor waits for anything.

    `holds` and `waits` are those of one job; what overlaps counts once.
    """
    until: float | None = None
    for begin, end in sorted((each.begin, each.end) for each in (*holds, *waits)):
        if until is not None and begin > until:
            yield until, begin
        until = end if until is None else max(until, end)


def _of(known: Iterable[Key], origin: Fact) -> list[Key]:
    """Return those keys that begin with an origin; with None, all."""
    return [key for key in known if origin is None or key[0] == origin]


def _within(found: list[Kind], begin: float, end: float) -> list[Kind]:
    """Return what of some intervals lies in a span, in the order of time."""
    inside = [each for each in found if each.end >= begin and each.begin <= end]
    cut = [
        each
        if each.begin >= begin and each.end <= end
        else replace(each, begin=max(each.begin, begin), end=min(each.end, end))
        for each in inside
    ]
    return sorted(cut, key=lambda each: each.begin)


def _job(event: Event) -> str:
    return str(event["job"])
