"""All states in which a host was found, and what each event makes of each: worked out once.

What becomes of a host depends on its own state and the event, and on nothing else. So a search over
several hosts, which meets the same host in the same state again and again, asks the core only once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from hosts_lab import HostWorld
from simulated import Process, failure
from still import VALUES, Still, digest_of, freeze, still_of, wake

from tsliced.core.actions import (
    Action,
    Grant,
    ReserveDeviceMemory,
    ReserveHostMemory,
    ReserveNumbers,
    RunHooks,
    StartOperation,
)
from tsliced.core.events import Event, PeerDisconnected, PeerLost, TimePassed
from tsliced.core.messages import PeerMessage
from tsliced.core.model import Cause, GroupName, HostName, JobKey, LeaseId, RankState, Verb
from tsliced.core.timers import TimerKey, TimerKind

#: Clocks that only let something be told.
IDLE_CLOCKS = frozenset({TimerKind.AWAITED, TimerKind.IDLE})

#: Over as soon as they are begun: no order of events that matters depends on how long they take.
QUICK = (ReserveHostMemory, ReserveDeviceMemory, ReserveNumbers, RunHooks)

#: From one event of a host to the next, seconds: less than any clock of the core measures.
TICK_S = 1e-6

#: How an operation may end besides well: as the driver's error, or with a broken context.
FAILURES = {
    Verb.FREEZE: (Cause.FREEZE_TIMEOUT,),
    Verb.SNAPSHOT: (Cause.DRIVER, Cause.FAILED),
    Verb.RESTORE: (Cause.DRIVER, Cause.FAILED),
    Verb.THAW: (Cause.DRIVER,),
    Verb.QUERY: (),
}


class Label(NamedTuple):
    """Something that may happen to a host."""

    kind: str
    #: Which event is heard, which pending action ends, which clock strikes, who does something.
    what: int | str = 0
    #: How, where it can go one way or another.
    how: str = ""


class Present(NamedTuple):
    """A process on a host, as it physically is."""

    job: JobKey
    groups: frozenset[GroupName]
    state: RankState
    #: Its host has thawed it, or does, because its coordinator was silent.
    alone: bool


class Began(NamedTuple):
    """What a host began to do for which others must be ready: "grant", or a verb."""

    what: str
    job: JobKey
    groups: frozenset[GroupName]


class Pending(NamedTuple):
    """What has begun on a host and not ended."""

    #: Whose ranks cannot be frozen while one of them is parked; None: it is something else.
    freezes: JobKey | None
    failures: tuple[Cause, ...]


class Clock(NamedTuple):
    """A clock that runs, and how long it still does."""

    left_s: float
    kind: TimerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a search has to know of a host's state."""

    processes: tuple[Present, ...]
    #: What its clients believe to hold.
    held: tuple[tuple[JobKey, GroupName], ...]
    #: Whose clients were told that they have lost what they held.
    let_down: frozenset[JobKey]
    #: A client waits for an answer.
    asks: bool
    up: frozenset[HostName]
    lost: frozenset[HostName]
    pending: tuple[Pending, ...]
    #: The first to strike first.
    clocks: tuple[Clock, ...]
    #: What its clients may do.
    acts: tuple[str, ...]


class Outcome(NamedTuple):
    """What something made of a host."""

    state: int
    #: What it says to whom, by number.
    said: tuple[tuple[HostName, int], ...]
    began: tuple[Began, ...]


@dataclass(frozen=True, slots=True)
class Act:
    """Something that a client, or its process, may do."""

    can: Callable[[Still], bool]
    do: Callable[[Still], object]


@dataclass(slots=True, kw_only=True)
class Stills:
    """The states of one host, by their numbers. The first is number 0."""

    template: Still
    acts: dict[str, Act] = field(default_factory=dict)
    facts: list[Facts] = field(default_factory=list)
    #: What tells each of them apart from the others, in any search of this process.
    digests: list[bytes] = field(default_factory=list)
    outcomes: dict[tuple[int, Label], Outcome | str] = field(default_factory=dict)
    _bodies: list[bytes] = field(default_factory=list)
    _numbers: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, world: HostWorld, acts: dict[str, Act]) -> Stills:
        """Begin with the state in which a host is."""
        stills = cls(template=still_of(world), acts=acts)
        stills._take(stills.template)
        return stills

    def after(self, state: int, label: Label) -> Outcome | str:
        """Return what something makes of a state, or in words what is wrong with that."""
        outcome = self.outcomes.get((state, label))
        if outcome is None:
            outcome = self.outcomes[state, label] = self._work_out(state, label)
        return outcome

    def _work_out(self, state: int, label: Label) -> Outcome | str:
        world = wake(self.template, self._bodies[state])
        world.now += TICK_S
        had = {lease.id for lease in world.machine.leasing.leases.values() if lease.tokens}
        before = list(world.pending)
        try:
            self._happen(world, label)
            _settle(world)
        except AssertionError as exc:
            return f"on {world.host}: {exc}{_place_of(exc)}"
        said = tuple((send.host, number_of(send.message)) for send in world.outbox)
        began = (*_grants(world, had), *_starts(world, before))
        return Outcome(self._take(world), said, began)

    def _take(self, world: Still) -> int:
        """Return the number of the state in which a host is."""
        digest = digest_of(world)
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._bodies)
            self.digests.append(digest)
            # First that, since it puts what is pending in order.
            self._bodies.append(freeze(world))
            self.facts.append(self._facts_of(world))
        return number

    def _facts_of(self, world: Still) -> Facts:
        links = world.machine.hosts.links
        return Facts(
            processes=tuple(_present(world, world.processes[id_]) for id_ in world.processes),
            held=tuple(
                (client.job, group)
                for client in world.clients.values()
                for tokens in client.held.values()
                for group, _ in tokens
            ),
            let_down=frozenset(c.job for c in world.clients.values() if c.lost),
            asks=any(client.open for client in world.clients.values()),
            up=frozenset(links.up),
            lost=frozenset(links.lost),
            pending=tuple(map(_pending, world.pending)),
            clocks=tuple(Clock(at - world.now, key.kind) for at, key in _clocks(world)),
            acts=tuple(name for name, act in self.acts.items() if act.can(world)),
        )

    def _happen(self, world: Still, label: Label) -> None:
        match label:
            case Label("hears", int(number)):
                world.feed(cast(Event, VALUES.all[number]))
            case Label("ends", int(index), how):
                _end(world, index, Cause(how) if how else None)
            case Label("strikes", int(index)):
                _strike(world, _clocks(world)[index][1])
            case Label("loses", str(host)):
                world.feed(PeerLost(host=HostName(host)))
            case Label("hears nothing of", str(host)):
                # The silence is noticed before the end of the connection.
                world.feed(PeerLost(host=HostName(host)))
                world.feed(PeerDisconnected(host=HostName(host)))
            case Label("is killed", _, how):
                world.durable_ceiling = world.machine.numbers._next
                world.restart(finish=how == "its calls end")
            case Label("reboots"):
                _reboot(world)
            case Label("sees", str(name)):
                self.acts[name].do(world)
            case Label("is mended"):
                _mend(world)
            case _:
                raise ValueError(label)


def number_of(message: PeerMessage) -> int:
    """Return the number of what is said; for how long somebody waited does not count."""
    if isinstance(message, Grant):
        message = replace(message, waited_s=0.0, switch_s=0.0)
    return VALUES.of(message)


def _settle(world: Still) -> None:
    """Let everything happen that takes no time."""
    while True:
        if world.inbox:
            world.read()
            continue
        quick = (i for i, action in enumerate(world.pending) if isinstance(action, QUICK))
        if (index := next(quick, None)) is None:
            return
        world.finish(index)


def _place_of(exc: AssertionError) -> str:
    """Return where in the program an assertion is, since not all of them have a text."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    file, _, _ = trace.tb_frame.f_code.co_filename.rpartition("/")[2].partition(".")
    return f" ({file}.{trace.tb_frame.f_code.co_name})"


# --- what is seen of a state ----------------------------------------------------------------------


def _present(world: Still, process: Process) -> Present:
    tenancies = world.machine.tenancies
    key = tenancies.home.get(process.id)
    part = tenancies.all[key].participant if key is not None else None
    order = part.order if part is not None else None
    alone = part is not None and order is not None and part.alone == order.stamp.epoch
    groups = frozenset(tenancies.group_of[device] for device in process.devices)
    assert process.job is not None
    return Present(process.job, groups, process.state, alone)


def _pending(action: Action) -> Pending:
    if not isinstance(action, StartOperation):
        return Pending(None, ())
    freezes = action.tenancy.job if action.verb is Verb.FREEZE else None
    return Pending(freezes, FAILURES[action.verb])


def _grants(world: Still, had: set[LeaseId]) -> list[Began]:
    """Return what was granted that nobody had."""
    leasing = world.machine.leasing
    told = [*world.done, *(send.message for send in world.outbox)]
    grants = {a.lease: a for a in told if isinstance(a, Grant) and a.lease in leasing.leases}
    return [
        Began("grant", leasing.sessions[grant.session].job, frozenset(dict(grant.tokens)))
        for lease, grant in grants.items()
        if lease not in had
    ]


def _starts(world: Still, before: list[Action]) -> list[Began]:
    return [
        Began(start.verb.value, start.tenancy.job, frozenset(start.tenancy.groups))
        for start in world.pending
        if isinstance(start, StartOperation) and all(start is not old for old in before)
    ]


def _clocks(world: Still) -> list[tuple[float, TimerKey]]:
    """Return the clocks that run, the first to strike first."""
    running = world.machine.timers._at.items()
    clocks = ((at, key) for key, (at, _) in running if key.kind not in IDLE_CLOCKS)
    return sorted(clocks, key=lambda clock: (clock[0], clock[1].kind.value, str(clock[1].id)))


# --- what may happen ------------------------------------------------------------------------------


def _end(world: Still, index: int, cause: Cause | None) -> None:
    """Let a pending action end, well or otherwise."""
    action, verdict = world.pending[index], world.verdict
    if cause is not None:
        assert isinstance(action, StartOperation)
        reason = failure(cause, action.rank.process, world.host)
        world.verdict = lambda _verb, _process: reason
    try:
        world.finish(index)
    finally:
        world.verdict = verdict


def _strike(world: Still, struck: TimerKey) -> None:
    """Let a clock strike, also if others were to strike before it: these do so later."""
    timers = world.machine.timers
    at = timers.get(struck)
    assert at is not None
    world.now = max(world.now, at)
    for key in [key for key, (due, _) in timers._at.items() if due <= world.now and key != struck]:
        timers.set(key, world.now + TICK_S)
    world.feed(TimePassed())


def _reboot(world: Still) -> None:
    """Let a machine lose its power and come back: nothing that was there is left."""
    world.durable_ceiling = world.machine.numbers._next
    world.processes, world.clients, world.journal = {}, {}, {}
    world.restart(finish=False)


def _mend(world: Still) -> None:
    """Do what an operator does: end what is broken for good, and let all be tried again."""
    jobs = {process.job for process in world.processes.values() if process.job is not None}
    jobs |= world.machine.leasing.faults.keys() | world.machine.tenancies.by_job.keys()
    for process in list(world.processes.values()):
        if process.state is RankState.FAILED:
            world.die(process.id)
    for job in sorted(jobs):
        world.clear(job)
