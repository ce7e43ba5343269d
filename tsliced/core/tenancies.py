"""All tenancies of this host: who they are, where their ranks are, and their moves.

A job's groups are divided into the finest sets that it ever leased apart, and never finer than its
processes: a rank with contexts in two groups binds them. Orders and reports travel between
coordinators and participants here; what a coordinator has to say beyond that is left in `signals`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tsliced.core.actions import (
    FreeMemory,
    Note,
    ReserveDeviceMemory,
    ReserveHostMemory,
    RunHooks,
    ScanGroups,
    StartOperation,
    TenancyEndedRecord,
    WatchProcess,
)
from tsliced.core.coordinator import Coordinator, Place
from tsliced.core.events import GroupsScanned, HooksRun, MemoryReserved, OperationFinished
from tsliced.core.model import (
    Cause,
    CoreLimits,
    DeviceId,
    FoundRank,
    GroupName,
    HostName,
    JobKey,
    OpId,
    ProcessId,
    RankState,
    Reason,
    SessionId,
    TenancyKey,
)
from tsliced.core.numbers import Numbers
from tsliced.core.participant import Participant
from tsliced.core.rank import Rank
from tsliced.core.signals import (
    AdmissionFailed,
    Admitted,
    Blocked,
    Effect,
    Evicted,
    EvictionFailed,
    Order,
    Report,
)

Outcome = Evicted | EvictionFailed | Admitted | AdmissionFailed | Blocked


class Bound(Exception):  # noqa: N818 - a finding, not an error of the program
    """A job's groups cannot be taken apart as asked for."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(slots=True, kw_only=True, eq=False)
class Tenancy:
    """A coordinator and, while all hosts are this one, its only participant."""

    key: TenancyKey
    coordinator: Coordinator
    participant: Participant

    @property
    def resident(self) -> bool:
        """Whether its state must be assumed to be on devices."""
        return self.coordinator.place is not Place.OFF or self.participant.on_devices

    @property
    def ready(self) -> bool:
        """Whether its job may be granted what it covers."""
        return self.coordinator.place is Place.ON


@dataclass(slots=True, kw_only=True)
class Tenancies:
    """The registry. Mutate it only through its methods."""

    host: HostName
    group_of: Mapping[DeviceId, GroupName]
    order_of: Mapping[GroupName, int]
    numbers: Numbers
    limits: CoreLimits
    all: dict[TenancyKey, Tenancy] = field(default_factory=dict)
    by_job: dict[JobKey, dict[TenancyKey, None]] = field(default_factory=dict)
    by_group: dict[GroupName, dict[TenancyKey, None]] = field(init=False)
    home: dict[ProcessId, TenancyKey] = field(default_factory=dict)
    #: Steps in flight, and operations with the process that they are for.
    steps: dict[OpId, TenancyKey] = field(default_factory=dict)
    operations: dict[OpId, StartOperation] = field(default_factory=dict)
    hooks: dict[JobKey, dict[SessionId, None]] = field(default_factory=dict)
    #: Seen on the devices and of no known job.
    strangers: dict[ProcessId, FoundRank] = field(default_factory=dict)
    signals: deque[Outcome] = field(default_factory=deque)
    #: Whose coordinator's deadline may have changed.
    touched: set[TenancyKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.by_group = {group: {} for group in self.order_of}

    # --- who they are -------------------------------------------------------------------------

    def cover(
        self, job: JobKey, groups: tuple[GroupName, ...], out: list[Effect]
    ) -> list[Tenancy] | None:
        """Return the job's tenancies that make up `groups`; None while one of them is moving.

        Divides a larger tenancy where the job leases a part of it for the first time, and makes
        one of what has none yet; what follows from that is added to `out`. Raises `Bound` if a
        process stands in the way.
        """
        if whole := self.all.get(TenancyKey(job, groups)):
            return [whole]
        wanted = set(groups)
        touched = [key for key in self.by_job.get(job, ()) if not wanted.isdisjoint(key.groups)]
        larger = [key for key in touched if not wanted.issuperset(key.groups)]
        for key in larger:
            tenancy = self.all[key]
            if not tenancy.coordinator.stable or tenancy.participant.busy:
                return None
            out += self._divide(tenancy, wanted)
        covered = [key for key in self.by_job.get(job, ()) if wanted.issuperset(key.groups)]
        rest = wanted.difference(*(key.groups for key in covered))
        if rest:
            covered.append(self.make(self._key(job, rest)).key)
        return [self.all[key] for key in covered]

    def _key(self, job: JobKey, groups: Iterable[GroupName]) -> TenancyKey:
        return TenancyKey(job, tuple(sorted(groups, key=self.order_of.__getitem__)))

    def make(self, key: TenancyKey, place: Place = Place.OFF) -> Tenancy:
        """Enter a new tenancy into the books."""
        tenancy = Tenancy(
            key=key,
            coordinator=Coordinator(
                tenancy=key,
                hosts=(self.host,),
                numbers=self.numbers,
                limits=self.limits,
                place=place,
            ),
            participant=Participant(
                host=self.host,
                tenancy=key,
                numbers=self.numbers,
                limits=self.limits,
                hook_sessions=dict(self.hooks.get(key.job, {})),
            ),
        )
        self.all[key] = tenancy
        self.by_job.setdefault(key.job, {})[key] = None
        for group in key.groups:
            self.by_group[group][key] = None
        return tenancy

    def residents(self, group: GroupName) -> list[Tenancy]:
        """Return the tenancies whose state must be assumed to be on the group's devices."""
        return [t for key in self.by_group[group] if (t := self.all[key]).resident]

    def _divide(self, tenancy: Tenancy, wanted: set[GroupName]) -> list[Effect]:
        key, ranks = tenancy.key, tenancy.participant.ranks
        parts = [wanted.intersection(key.groups), set(key.groups) - wanted]
        for rank in ranks.values():
            groups = self._groups_of(rank.devices)
            if groups and not any(groups <= part for part in parts):
                names = " and ".join(sorted(groups))
                text = f"one process has contexts in {names}: lease them together"
                raise Bound(Reason(cause=Cause.BOUND_GROUPS, text=text, rank=rank.id))
        self._forget(key)
        out: list[Effect] = [
            TenancyEndedRecord(tenancy=key),
            # Each part reserves anew before its next move.
            FreeMemory(tenancy=key, host=True, device=True),
        ]
        for part in parts:
            made = self.make(self._key(key.job, part), tenancy.coordinator.place)
            made.coordinator.reason = tenancy.coordinator.reason
            made.coordinator.pinned = tenancy.coordinator.pinned
            made.participant.quiesced = tenancy.participant.quiesced
            for process, rank in list(ranks.items()):
                if self._groups_of(rank.devices) <= part:
                    made.participant.ranks[process] = ranks.pop(process)
                    self.home[process] = made.key
                    out.append(rank.record(made.key))
        return out

    def _forget(self, key: TenancyKey) -> None:
        del self.all[key]
        of_job = self.by_job[key.job]
        del of_job[key]
        if not of_job:
            del self.by_job[key.job]
        for group in key.groups:
            del self.by_group[group][key]

    def drop(self, key: TenancyKey) -> list[Effect]:
        """Forget a tenancy that is off and has no ranks."""
        tenancy = self.all.get(key)
        if tenancy is None or tenancy.coordinator.place is not Place.OFF:
            return []
        if tenancy.participant.ranks or tenancy.participant.busy:
            return []
        self._forget(key)
        return [TenancyEndedRecord(tenancy=key)]

    def _groups_of(self, devices: Iterable[DeviceId]) -> set[GroupName]:
        return {self.group_of[device] for device in devices if device in self.group_of}

    # --- their ranks --------------------------------------------------------------------------

    def put(self, found: FoundRank, groups: tuple[GroupName, ...] = ()) -> list[Effect]:
        """Take in a process that was seen on devices, or registered for `groups`."""
        if found.job is None:
            return self._put_stranger(found)
        on = self._groups_of(found.devices) or set(groups)
        if not on:
            return []
        new = found.process not in self.home
        key = self.home.get(found.process) or self._home_for(found.job, on)
        self.home[found.process] = key
        out = self.all[key].participant.put(found)
        return [WatchProcess(process=found.process), *out] if new else out

    def _home_for(self, job: JobKey, on: set[GroupName]) -> TenancyKey:
        keys = self.by_job.get(job, {})
        for key in keys:
            if on.issubset(key.groups):
                return key
        free = on.difference(*(key.groups for key in keys))
        if free == on:
            return self.make(self._key(job, on), Place.ON).key
        # It binds groups that were leased apart; it belongs to the first of them, and a scan of
        # the others sees it there as company that must leave first.
        return next(key for key in keys if not on.isdisjoint(key.groups))

    def _put_stranger(self, found: FoundRank) -> list[Effect]:
        if found.process in self.strangers:
            return []
        self.strangers[found.process] = found
        facts: dict[str, str | int | float | bool | None] = {
            "pid": found.process.pid,
            "uid": found.uid,
            "name": found.name,
            "device": ",".join(sorted(found.devices)),
            "bytes": found.device_bytes,
        }
        note = Note(kind="stranger", level="warning", facts=facts)
        return [WatchProcess(process=found.process), note]

    def ranks_of(self, key: TenancyKey) -> Iterable[Rank]:
        """Return a tenancy's ranks."""
        return self.all[key].participant.ranks.values()

    # --- their moves --------------------------------------------------------------------------

    def evict(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Take a stable tenancy off."""
        self.touched.add(key)
        tenancy = self.all[key]
        ranks = len(tenancy.participant.ranks)
        return self.run(tenancy.coordinator.evict(now=now, ranks=ranks), now)

    def admit(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Bring a stable tenancy on."""
        self.touched.add(key)
        tenancy = self.all[key]
        parked = any(r.state is RankState.PARKED for r in tenancy.participant.ranks.values())
        return self.run(tenancy.coordinator.admit(now=now, parked=parked), now)

    def take_back(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Turn back an eviction that nobody needs any more."""
        self.touched.add(key)
        return self.run(self.all[key].coordinator.take_back(), now)

    def ask_all(self, *, now: float) -> list[Effect]:
        """After a restart: find out where all ranks are."""
        out: list[Effect] = []
        for key, tenancy in list(self.all.items()):
            if tenancy.participant.ranks:
                self.touched.add(key)
                out += self.run(tenancy.coordinator.ask(now=now), now)
            else:
                out += self.drop(key)
        return out

    def clear(self, job: JobKey, *, now: float) -> list[Effect]:
        """Try again what a job's tenancies were given up on."""
        out: list[Effect] = []
        for key in self.by_job.get(job, ()):
            self.touched.add(key)
            out += self.run(self.all[key].coordinator.clear(), now)
        return out

    def on_barrier(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """A coordinator's deadline came."""
        tenancy = self.all.get(key)
        if tenancy is None:
            return []
        self.touched.add(key)
        return self.run(tenancy.coordinator.on_deadline(now=now), now)

    def on_numbers(self, *, now: float) -> list[Effect]:
        """Epochs can be had again."""
        out: list[Effect] = []
        for key, tenancy in list(self.all.items()):
            self.touched.add(key)
            out += self.run(tenancy.coordinator.on_numbers(), now)
        return out

    def on_scanned(self, event: GroupsScanned, *, now: float) -> list[Effect]:
        """Take in who is on the devices, then let the one who asked go on."""
        out = self.observe(event.found)
        tenancy = self.all[self.steps.pop(event.op)]
        return out + self.run(tenancy.participant.on_scanned(event, now=now), now)

    def on_step(self, event: MemoryReserved | HooksRun, *, now: float) -> list[Effect]:
        """Hand a step's result to its tenancy."""
        tenancy = self.all[self.steps.pop(event.op)]
        return self.run(tenancy.participant.on_step(event, now=now), now)

    def on_operation(self, event: OperationFinished, *, now: float) -> list[Effect]:
        """Hand an operation's result to its rank."""
        start = self.operations.pop(event.op)
        tenancy = self.all[start.tenancy]
        out = self.run(tenancy.participant.on_operation(event, now=now), now)
        if event.rank.process not in tenancy.participant.ranks:
            out += self._on_rank_gone(tenancy, event.rank.process, now)
        return out

    def on_exit(self, process: ProcessId, *, now: float) -> list[Effect]:
        """A process is gone: as a stranger, or as a rank."""
        self.strangers.pop(process, None)
        key = self.home.get(process)
        if key is None:
            return []
        tenancy = self.all[key]
        out = self.run(tenancy.participant.on_rank_exited(process, now=now), now)
        if process not in tenancy.participant.ranks:
            out += self._on_rank_gone(tenancy, process, now)
        return out

    def _on_rank_gone(self, tenancy: Tenancy, process: ProcessId, now: float) -> list[Effect]:
        del self.home[process]
        ranks = tenancy.participant.ranks.values()
        failed = sum(rank.state is RankState.FAILED for rank in ranks)
        self.touched.add(tenancy.key)
        effects = tenancy.coordinator.on_ranks_lost(left=len(ranks), failed=failed)
        return self.run(effects, now)

    def observe(self, found: Iterable[FoundRank]) -> list[Effect]:
        """Take in what a scan, or the regular look, saw."""
        out: list[Effect] = []
        for process in found:
            out += self.put(process)
        return out

    def add_hooks(self, job: JobKey, session: SessionId) -> None:
        """A session of the job can quiesce and resume."""
        self.hooks.setdefault(job, {})[session] = None
        for key in self.by_job.get(job, ()):
            self.all[key].participant.hook_sessions[session] = None

    def remove_hooks(self, job: JobKey, session: SessionId) -> None:
        """A session is gone."""
        self.hooks.get(job, {}).pop(session, None)
        if not self.hooks.get(job):
            self.hooks.pop(job, None)
        for key in self.by_job.get(job, ()):
            self.all[key].participant.hook_sessions.pop(session, None)

    def run(self, effects: Iterable[Effect], now: float) -> list[Effect]:
        """Deliver orders and reports until nobody has anything to say; return what is left."""
        out: list[Effect] = []
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case Order():
                    participant = self.all[effect.tenancy].participant
                    todo.extend(participant.on_order(effect, now=now))
                case Report():
                    coordinator = self.all[effect.tenancy].coordinator
                    self.touched.add(effect.tenancy)
                    todo.extend(coordinator.on_report(effect, now=now))
                case Evicted() | EvictionFailed() | Admitted() | AdmissionFailed() | Blocked():
                    self.signals.append(effect)
                case StartOperation():
                    self.operations[effect.op] = effect
                    out.append(effect)
                case ScanGroups() | ReserveHostMemory() | ReserveDeviceMemory() | RunHooks():
                    self.steps[effect.op] = effect.tenancy
                    out.append(effect)
                case _:
                    out.append(effect)
        return out

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        for key, tenancy in self.all.items():
            tenancy.coordinator.check_invariants()
            tenancy.participant.check_invariants()
            for process in tenancy.participant.ranks:
                assert self.home[process] == key, "a rank is at home in one tenancy"
        for job, keys in self.by_job.items():
            groups = [group for key in keys for group in key.groups]
            assert len(groups) == len(set(groups)), f"tenancies of {job} share a group"
