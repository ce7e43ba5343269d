"""What the event history adds up to: holds, waits, switches, moves, duty. One definition of each.

Metrics feed an `Accounts` with events as they come, reports with events that they read; so what
both say is the same. The three duty cycles of a group or device are shares of a span of time:

* *held*: a job has the group: from when its switch begins to when it gives the group back;
* *useful*: held, minus switching;
* *kernel*: a kernel runs on the device, as NVML samples it.

A round of several ranks holds a group once, whatever the number of its leases. No clock, no I/O:
times are those of the events, unix seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from tsliced.host.history import Fact

#: As `tsliced.host.history.Event`, for readers.
Event: TypeAlias = Mapping[str, Fact]

#: Of a round: of which host it is, where a history is of several, and its number there.
Token: TypeAlias = tuple[Fact, int]

#: Upper bounds in seconds, of waits and holds ...
LONG_BOUNDS: Final = (
    0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
#: ... and of single steps of a move.
STEP_BOUNDS: Final = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip

#: Operations that move state, and so have bytes.
MOVING: Final = ("snapshot", "restore")
#: Holds that are known of at once; whoever never gives back is dropped for the newest.
_MOST_OPEN: Final = 65_536


@dataclass(slots=True)
class Spread:
    """How many values there were, their sum, and how they are spread over buckets."""

    bounds: tuple[float, ...] = LONG_BOUNDS
    count: int = 0
    total: float = 0.0
    buckets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, or so many of the same."""
        self.count += times
        self.total += value * times
        self.buckets[bisect_left(self.bounds, value)] += times


def _steps() -> Spread:
    return Spread(STEP_BOUNDS)


@dataclass(slots=True)
class Held:
    """How long somebody had groups, in seconds, and what it was waited for."""

    #: Leases that were granted.
    leases: int = 0
    #: Leases that had to wait in a queue.
    queued: int = 0
    #: Rounds that were granted: with one rank each, as many.
    rounds: int = 0
    #: Rounds for which state had to move.
    switches: int = 0
    useful_s: float = 0.0
    switch_s: float = 0.0
    waits: Spread = field(default_factory=Spread)
    #: Of rounds that are over; those that came and went unnoticed at their average.
    holds: Spread = field(default_factory=Spread)

    @property
    def held_s(self) -> float:
        """Return the time that was held in all, as far as it is over."""
        return self.useful_s + self.switch_s


@dataclass(slots=True)
class Job(Held):
    """One job's account. Time counts once, however many groups the job had."""

    useful_s_by_phase: dict[str, float] = field(default_factory=dict)
    #: Phases without devices (`ts.phase`): how often, and how long in all.
    phases: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: Moves off the devices and onto them that were carried through.
    evictions: int = 0
    admissions: int = 0
    moved_bytes: int = 0


@dataclass(slots=True)
class Step:
    """One kind of step of moves: quiesce, freeze, snapshot, restore, thaw, resume."""

    seconds: Spread = field(default_factory=_steps)
    bytes: int = 0
    #: Of the latest that moved anything.
    latest_bytes_per_s: float | None = None
    #: By cause.
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Move:
    """Moves of whole tenancies: evicted, admitted, eviction_failed, admission_failed."""

    seconds: Spread = field(default_factory=_steps)
    causes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Device:
    """One device's account."""

    group: str
    busy_s: float = 0.0
    #: For how long it is known whether it was busy.
    seen_s: float = 0.0


@dataclass(slots=True)
class _Round:
    """A round that has groups now."""

    job: str
    groups: tuple[str, ...]
    phase: str
    granted_at: float
    leases: set[tuple[Fact, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """Shares of a span of time, from 0 to 1; `kernel` None: nobody looked."""

    held: float
    useful: float
    kernel: float | None


class Accounts:
    """Adds up events. What happened before `since_unix` counts only as far as it lasts on."""

    def __init__(self, since_unix: float = float("-inf")) -> None:
        self.since_unix = since_unix
        self.groups: dict[str, Held] = {}
        self.jobs: dict[str, Job] = {}
        self.steps: dict[str, Step] = {}
        self.moves: dict[str, Move] = {}
        self.devices: dict[str, Device] = {}
        #: Events by kind, of warning level and above.
        self.warnings: Counter[str] = Counter()
        #: Leases that were taken back, by cause.
        self.reclaims: Counter[str] = Counter()
        #: Leases that waited and were not granted, by cause.
        self.not_granted: Counter[str] = Counter()
        self._open: dict[Token, _Round] = {}
        self._round_of: dict[tuple[Fact, str], Token] = {}
        #: By origin.
        self._latest_at: dict[Fact, float] = {}
        move = self._on_move
        self._counters: dict[str, Callable[[Event], None]] = {
            "held": self._on_held,
            "queued": self._on_queued,
            "not_granted": self._on_not_granted,
            "operation": self._on_step,
            "hooks": self._on_step,
            "busy": self._on_busy,
            "phase": self._on_phase,
            "evicted": partial(move, "evicted"),
            "admitted": partial(move, "admitted"),
            "eviction_failed": partial(move, "eviction_failed"),
            "admission_failed": partial(move, "admission_failed"),
        }

    # --- adding up ----------------------------------------------------------------------------

    def add_all(self, events: Iterable[Event]) -> Accounts:
        """Count events, the oldest first; return itself."""
        for event in events:
            self.add(event)
        return self

    def add(self, event: Event) -> None:
        """Count one event; of other kinds than are known only what they warn of."""
        self.count(number(event, "at"), str(event["kind"]), str(event["level"]), event)

    def count(self, at_unix: float, kind: str, level: str, facts: Mapping[str, Fact]) -> None:
        """Count one event, as the history gets it."""
        is_new = at_unix >= self.since_unix
        if is_new and level in ("warning", "error"):
            self.warnings[kind] += 1
        if kind == "started":
            self._on_started(facts)
        # (Jobs may tell of anything by that name.)
        self._latest_at[facts.get("origin") if kind != "progress" else None] = at_unix
        if kind == "granted":
            self._on_granted(at_unix, facts)
        elif kind == "released":
            self._on_released(at_unix, facts)
        elif is_new and (counter := self._counters.get(kind)) is not None:
            counter(facts)

    def forget_job(self, job: str) -> None:
        """Drop a job's account."""
        self.jobs.pop(job, None)

    def _on_started(self, event: Event) -> None:
        """Know that a daemon which remembers no lease has begun: they ended with its machine."""
        origin = event.get("origin")
        if not event.get("leases"):
            for token in [token for token in self._open if token[0] == origin]:
                self._close(token, self._latest_at[origin])

    def _on_granted(self, at: float, event: Event) -> None:
        token, lease = token_of(event), lease_of(event)
        granted_at = at - number(event, "held_s")
        groups, job = groups_of(event), str(event["job"])
        is_new = granted_at >= self.since_unix
        owners = (self._job(job), *map(self._group, groups))
        if is_new:
            for owner in owners:
                owner.leases += 1
                owner.waits.add(number(event, "waited_s"))
        known = self._open.get(token)
        if known is None:
            switch_s = number(event, "switch_s")
            counted_s = self._within(granted_at - switch_s, granted_at)
            for owner in owners if is_new else ():
                owner.rounds += 1
                owner.switches += switch_s > 0
                owner.switch_s += counted_s
            phase = str(event.get("phase") or "")
            known = _Round(job, groups, phase, granted_at, set())
            self._open[token] = known
            if len(self._open) > _MOST_OPEN:
                self._close(next(iter(self._open)), None)
        known.leases.add(lease)
        self._round_of[lease] = token

    def _on_released(self, at: float, event: Event) -> None:
        lease = lease_of(event)
        cause = str(event.get("cause") or "released")
        if cause != "released" and at >= self.since_unix:
            self.reclaims[cause] += 1
        token = self._round_of.pop(lease, None)
        if token is None:
            self._count_unknown(event, at)
            return
        round_ = self._open[token]
        round_.leases.discard(lease)
        if not round_.leases:
            self._close(token, at)

    def _count_unknown(self, event: Event, at: float) -> None:
        """Count a hold of which the beginning is not among the events."""
        held_s = number(event, "held_s")
        useful_s = self._within(at - held_s, at)
        if at >= self.since_unix:
            owners = (self._job(str(event["job"])), *map(self._group, groups_of(event)))
            for owner in owners:
                owner.useful_s += useful_s
                owner.holds.add(held_s)

    def _close(self, token: Token, at: float | None) -> None:
        round_ = self._open.pop(token)
        for lease in round_.leases:
            self._round_of.pop(lease, None)
        if at is None or at < self.since_unix:
            return
        useful_s = self._within(round_.granted_at, at)
        job = self._job(round_.job)
        for owner in (job, *map(self._group, round_.groups)):
            owner.useful_s += useful_s
            owner.holds.add(at - round_.granted_at)
        by_phase = job.useful_s_by_phase
        by_phase[round_.phase] = by_phase.get(round_.phase, 0.0) + useful_s

    def _on_held(self, event: Event) -> None:
        """Count leases that nobody waited for: they were granted at once."""
        leases, ranks = int(number(event, "leases")), max(1, int(number(event, "ranks")))
        rounds = max(1, leases // ranks)
        # Of each lease the time is counted, and its ranks hold together.
        useful_s = number(event, "held_s") / ranks
        job, phase = self._job(str(event["job"])), str(event.get("phase") or "")
        for owner in (job, *map(self._group, groups_of(event))):
            owner.leases += leases
            owner.rounds += rounds
            owner.useful_s += useful_s
            owner.waits.add(0.0, leases)
            owner.holds.add(useful_s / rounds, rounds)
        job.useful_s_by_phase[phase] = job.useful_s_by_phase.get(phase, 0.0) + useful_s

    def _on_queued(self, event: Event) -> None:
        for owner in (self._job(str(event["job"])), *map(self._group, groups_of(event))):
            owner.queued += 1

    def _on_not_granted(self, event: Event) -> None:
        self.not_granted[str(event["cause"])] += 1

    def _on_busy(self, event: Event) -> None:
        device = self.devices.setdefault(str(event["device"]), Device(str(event["group"])))
        device.busy_s += number(event, "busy_s")
        device.seen_s += number(event, "span_s")

    def _on_step(self, event: Event) -> None:
        verb = str(event["verb"])
        step = self.steps.setdefault(verb, Step())
        if (cause := event.get("cause")) is not None:
            step.failures[str(cause)] += 1
            return
        seconds, moved = number(event, "seconds"), int(number(event, "bytes"))
        step.seconds.add(seconds)
        if verb in MOVING:
            step.bytes += moved
            if moved and seconds > 0:
                step.latest_bytes_per_s = moved / seconds
            self._job(str(event["job"])).moved_bytes += moved

    def _on_move(self, kind: str, event: Event) -> None:
        move = self.moves.setdefault(kind, Move())
        move.seconds.add(number(event, "seconds"))
        if (cause := event.get("cause")) is not None:
            move.causes[str(cause)] += 1
        job = self._job(str(event["job"]))
        job.evictions += kind == "evicted"
        job.admissions += kind == "admitted"

    def _on_phase(self, event: Event) -> None:
        if event.get("begin"):
            return
        phases, name = self._job(str(event["job"])).phases, str(event["name"])
        times, seconds = phases.get(name, (0, 0.0))
        more = int(number(event, "times"))
        phases[name] = (times + more, seconds + number(event, "seconds"))

    # --- what it comes to ---------------------------------------------------------------------

    def useful_s(self, group: str, until_unix: float) -> float:
        """Return for how long a group was held and not switching, with what lasts on."""
        lasting = (
            self._within(round_.granted_at, until_unix)
            for round_ in self._open.values()
            if group in round_.groups
        )
        return self._group(group).useful_s + sum(lasting)

    def held_s(self, group: str, until_unix: float) -> float:
        """Return for how long a group was held, with what lasts on."""
        return self.useful_s(group, until_unix) + self._group(group).switch_s

    def job_useful_s(self, job: str, until_unix: float) -> float:
        """Return for how long a job held anything and was not switching, with what lasts on."""
        lasting = (
            self._within(round_.granted_at, until_unix)
            for round_ in self._open.values()
            if round_.job == job
        )
        return self._job(job).useful_s + sum(lasting)

    def duty(self, group: str, until_unix: float) -> Duty:
        """Return the duty cycles of a group from `since_unix` to `until_unix`."""
        span_s = until_unix - self.since_unix
        assert 0 < span_s < float("inf"), "a share of a span that has an end and a beginning"
        devices = [device for device in self.devices.values() if device.group == group]
        busy_s = sum(device.busy_s for device in devices)
        return Duty(
            held=self.held_s(group, until_unix) / span_s,
            useful=self.useful_s(group, until_unix) / span_s,
            kernel=busy_s / len(devices) / span_s if devices else None,
        )

    def _within(self, begin: float, end: float) -> float:
        """Return how much of an interval counts."""
        return max(0.0, end - max(begin, self.since_unix))

    def _group(self, name: str) -> Held:
        return self.groups.setdefault(name, Held())

    def _job(self, name: str) -> Job:
        return self.jobs.setdefault(name, Job())


def groups_of(event: Event) -> tuple[str, ...]:
    """Return the names of the groups that an event is about."""
    groups = event.get("groups")
    return tuple(groups.split(",")) if isinstance(groups, str) and groups else ()


def token_of(event: Event) -> Token:
    """Return what the events of one round have in common."""
    return event.get("origin"), int(number(event, "token"))


def lease_of(event: Event) -> tuple[Fact, str]:
    """Return what the events of one lease have in common."""
    return event.get("origin"), str(event["lease"])


def number(event: Event, name: str) -> float:
    """Return a fact that should be a number; 0 if it is missing: earlier versions had fewer."""
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
