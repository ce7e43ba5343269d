"""All tenancies of this host: who they are, where their ranks are, and their moves.

A job's groups are divided into the finest sets that it ever leased apart, and never finer than its
processes: a rank with contexts in two groups binds them. One that reaches beyond its tenancy's
groups makes the tenancy resident there too, until the job leases them together and they become one.

Orders and reports travel between coordinators and participants here; what a coordinator has to say
beyond that is left in `signals`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

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
from tsliced.core.events import (
    GroupsScanned,
    HooksRun,
    HostMemoryPromised,
    MemoryReserved,
    OperationFinished,
)
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
    RankId,
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

#: As with `RoundState`: every grant asks for it.
_ON = Place.ON

Outcome = Evicted | EvictionFailed | Admitted | AdmissionFailed | Blocked


class Bound(Exception):  # noqa: N818 - a finding, not an error of the program
    """A job's groups cannot be taken apart as asked for."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _bound(groups: Iterable[GroupName], rank: RankId) -> Reason:
    text = f"one process has contexts in {' and '.join(groups)}: lease them together"
    return Reason(cause=Cause.BOUND_GROUPS, text=text, rank=rank)


@dataclass(slots=True, kw_only=True, eq=False)
class Tenancy:
    """A coordinator and, while all hosts are this one, its only participant."""

    key: TenancyKey
    coordinator: Coordinator
    participant: Participant

    @property
    def beyond(self) -> dict[GroupName, RankId]:
        """Groups that are not its own and that a rank of it has a context in nevertheless."""
        return self.participant.beyond

    @property
    def reach(self) -> tuple[GroupName, ...]:
        """All groups on whose devices it may be."""
        return (*self.key.groups, *self.beyond)

    @property
    def resident(self) -> bool:
        """Whether its state must be assumed to be on devices."""
        return self.coordinator.place is not Place.OFF or self.participant.on_devices

    @property
    def runs_within(self) -> bool:
        """Whether its job may be granted what it covers, and it is on no other group's devices."""
        return self.coordinator.place is _ON and not self.participant.beyond

    @property
    def ready(self) -> bool:
        """Whether its job may be granted what it covers."""
        return self.coordinator.place is _ON


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
    #: By each group on whose devices it may be.
    by_group: dict[GroupName, dict[TenancyKey, Tenancy]] = field(init=False)
    home: dict[ProcessId, TenancyKey] = field(default_factory=dict)
    #: Steps in flight, and operations with the process that they are for.
    steps: dict[OpId, TenancyKey] = field(default_factory=dict)
    operations: dict[OpId, StartOperation] = field(default_factory=dict)
    hooks: dict[JobKey, dict[SessionId, None]] = field(default_factory=dict)
    #: Seen on the devices and of no known job.
    strangers: dict[ProcessId, FoundRank] = field(default_factory=dict)
    signals: deque[Outcome] = field(default_factory=deque)
    #: Whose coordinator's deadline may have changed.
    touched: dict[TenancyKey, None] = field(default_factory=dict)

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
        wanted = set(groups)
        own = [self.all[key] for key in self.by_job.get(job, ())]
        concerned = [tenancy for tenancy in own if not wanted.isdisjoint(tenancy.reach)]
        for tenancy in concerned:
            if tenancy.beyond and not wanted.issuperset(tenancy.reach):
                raise Bound(_bound(tenancy.reach, next(iter(tenancy.beyond.values()))))
            if wanted.issuperset(tenancy.key.groups):
                continue
            if not tenancy.coordinator.stable:
                return None
            if tenancy.coordinator.place is Place.BLOCKED:
                return [tenancy]
            out += self._divide(tenancy, wanted)
        covering = self._within(job, wanted)
        if rest := wanted.difference(*(tenancy.key.groups for tenancy in covering)):
            covering.append(self.make(self._key(job, rest)))
        if any(tenancy.beyond for tenancy in covering):
            return self._unite(covering, out)
        return self._join(covering, out) if len(covering) > 1 else covering

    def regain_held(self, job: JobKey, groups: tuple[GroupName, ...]) -> None:
        """After a restart: know that a holder may be on its groups, with ranks or without."""
        within = self._within(job, set(groups))
        for tenancy in within:
            if not tenancy.participant.ranks:
                tenancy.coordinator.place = Place.ON
        rest = set(groups).difference(*(tenancy.key.groups for tenancy in within))
        if rest:
            self.make(self._key(job, rest), Place.ON)

    def _within(self, job: JobKey, groups: set[GroupName]) -> list[Tenancy]:
        return [self.all[k] for k in self.by_job.get(job, ()) if groups.issuperset(k.groups)]

    def _key(self, job: JobKey, groups: Iterable[GroupName]) -> TenancyKey:
        return TenancyKey(job, self.in_order(groups))

    def in_order(self, groups: Iterable[GroupName]) -> tuple[GroupName, ...]:
        """Return groups in the order in which they are reserved."""
        return tuple(sorted(groups, key=self.order_of.__getitem__))

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
                away=place is Place.OFF,
            ),
        )
        self.all[key] = tenancy
        self.by_job.setdefault(key.job, {})[key] = None
        for group in key.groups:
            self.by_group[group][key] = tenancy
        return tenancy

    def residents(self, group: GroupName) -> list[Tenancy]:
        """Return the tenancies whose state must be assumed to be on the group's devices."""
        return [tenancy for tenancy in self.by_group[group].values() if tenancy.resident]

    def assert_alone(self, group: GroupName, job: JobKey) -> None:
        """Assert that nobody but the job is on the group's devices, as every grant does."""
        for tenancy in self.by_group[group].values():
            assert tenancy.key.job == job or not tenancy.resident, f"{tenancy.key} is there too"

    def settled(self, job: JobKey, groups: tuple[GroupName, ...]) -> bool:
        """Whether one tenancy of the job covers `groups`, runs, and is alone on their devices."""
        covered = False
        for group in groups:
            for tenancy in self.by_group[group].values():
                if tenancy.key.job != job:
                    if tenancy.resident:
                        return False
                elif tenancy.key.groups == groups and tenancy.runs_within:
                    covered = True
                else:
                    # Another one of the job is here because a rank of it binds the groups.
                    return False
        return covered

    def _divide(self, tenancy: Tenancy, wanted: set[GroupName]) -> list[Effect]:
        parts = [wanted.intersection(tenancy.key.groups), set(tenancy.key.groups) - wanted]
        for rank in tenancy.participant.ranks.values():
            groups = self._groups_of(rank.devices)
            if not any(groups <= part for part in parts):
                raise Bound(_bound(self.in_order(groups), rank.id))
        return self._rebuild([tenancy], [self._key(tenancy.key.job, part) for part in parts])

    def _unite(self, parts: list[Tenancy], out: list[Effect]) -> list[Tenancy] | None:
        """Make one of tenancies that a rank binds; None while one of them is moving."""
        if not all(part.coordinator.stable for part in parts):
            return None
        if any(part.coordinator.place is Place.BLOCKED for part in parts):
            return parts
        key = self._key(parts[0].key.job, {group for part in parts for group in part.key.groups})
        out += self._rebuild(parts, [key])
        return [self.all[key]]

    def _join(self, parts: list[Tenancy], out: list[Effect]) -> list[Tenancy] | None:
        """Make one of the parts that are off, so that none of them runs before all are restored.

        Returns None while one of them is moving. A lease on a part divides them again.
        """
        if not all(part.coordinator.stable for part in parts):
            return None
        away = [part for part in parts if part.coordinator.place is Place.OFF]
        if len(away) < 2:
            return parts
        united = self._unite(away, out)
        assert united is not None, "all of them are stable"
        return [*(part for part in parts if part not in away), *united]

    def _rebuild(self, old: list[Tenancy], keys: list[TenancyKey]) -> list[Effect]:
        """Put new tenancies in place of stable ones, and each rank where its devices are."""
        all_on = all(tenancy.coordinator.place is Place.ON for tenancy in old)
        pinned = next((p for t in old if (p := t.coordinator.pinned) is not None), None)
        out: list[Effect] = []
        for tenancy in old:
            self._forget(tenancy)
            out.append(TenancyEndedRecord(tenancy=tenancy.key))
            # What comes instead reserves anew before its next move.
            out.append(FreeMemory(tenancy=tenancy.key, host=True, device=True))
        for key in keys:
            made = self.make(key, Place.ON if all_on else Place.OFF)
            made.coordinator.pinned = pinned
            made.coordinator.stopped_at = max(tenancy.coordinator.stopped_at for tenancy in old)
            made.coordinator.moves = max(tenancy.coordinator.moves for tenancy in old)
            made.participant.quiesced = any(tenancy.participant.quiesced for tenancy in old)
            out.append(made.coordinator.record())
        for tenancy in old:
            for process, rank in tenancy.participant.ranks.items():
                on = self._groups_of(rank.devices)
                key = next(key for key in keys if on.issubset(key.groups))
                self.all[key].participant.ranks[process] = rank
                self.home[process] = key
                out.append(rank.record(key))
        return out

    def _forget(self, tenancy: Tenancy) -> None:
        key = tenancy.key
        del self.all[key]
        of_job = self.by_job[key.job]
        del of_job[key]
        if not of_job:
            del self.by_job[key.job]
        for group in tenancy.reach:
            del self.by_group[group][key]

    def drop_unused(self, job: JobKey, *, abandoned: bool) -> list[Effect]:
        """Forget a job's tenancies that have no ranks and are off. `abandoned`: no session left.

        One that is on without a known rank is kept for a job that may have made one unseen.
        """
        out: list[Effect] = []
        for key in list(self.by_job.get(job, ())):
            tenancy = self.all[key]
            gone = (Place.OFF, Place.ON) if abandoned else (Place.OFF,)
            if tenancy.participant.ranks or tenancy.coordinator.place not in gone:
                continue
            if tenancy.participant.owes_resume:
                continue
            self._forget(tenancy)
            out.append(TenancyEndedRecord(tenancy=key))
        return out

    def _groups_of(self, devices: Iterable[DeviceId]) -> set[GroupName]:
        return {self.group_of[device] for device in devices if device in self.group_of}

    # --- their ranks --------------------------------------------------------------------------

    def put(self, found: FoundRank, groups: tuple[GroupName, ...] = ()) -> list[Effect]:
        """Take in a process that was seen on devices, or registered for `groups`."""
        key = self.home.get(found.process)
        job = key.job if key is not None else found.job
        if job is None:
            return self._put_stranger(found)
        on = self._groups_of(found.devices) or set(groups)
        if not on:
            return []
        self.strangers.pop(found.process, None)
        if key is not None:
            out = self.all[key].participant.put(found)
        else:
            key = self._home_for(job, on)
            watch = WatchProcess(process=found.process)
            out = [watch, *self.all[key].participant.put(found)]
        self._settle_in(found.process, key)
        return out

    def regain(self, rank: Rank, key: TenancyKey) -> None:
        """Take a rank back from the journal, into a tenancy that is known."""
        self.all[key].participant.ranks[rank.id.process] = rank
        self._settle_in(rank.id.process, key)

    def _settle_in(self, process: ProcessId, key: TenancyKey) -> None:
        self.home[process] = key
        tenancy = self.all[key]
        rank = tenancy.participant.ranks[process]
        for group in self.in_order(self._groups_of(rank.devices).difference(tenancy.reach)):
            tenancy.beyond[group] = rank.id
            self.by_group[group][key] = tenancy

    def _home_for(self, job: JobKey, on: set[GroupName]) -> TenancyKey:
        keys = self.by_job.get(job, {})
        if inside := next((key for key in keys if on.issubset(key.groups)), None):
            return inside
        # One that it reaches beyond, unless all that it is on is new.
        if touched := next((key for key in keys if not on.isdisjoint(key.groups)), None):
            return touched
        # It runs there, but who else does is looked at before its job is let on.
        return self.make(self._key(job, on)).key

    def _put_stranger(self, found: FoundRank) -> list[Effect]:
        if found.process in self.strangers:
            return []
        self.strangers[found.process] = found
        return [WatchProcess(process=found.process), *self.note_stranger(found)]

    def note_stranger(self, found: FoundRank) -> list[Effect]:
        """Note that a process of no known job is on the devices."""
        facts: dict[str, str | int | float | bool | None] = {
            "pid": found.process.pid,
            "uid": found.uid,
            "name": found.name,
            "device": ",".join(sorted(found.devices)),
            "bytes": found.device_bytes,
        }
        return [Note(kind="stranger", level="warning", facts=facts)]

    def ranks_of(self, key: TenancyKey) -> Iterable[Rank]:
        """Return a tenancy's ranks."""
        return self.all[key].participant.ranks.values()

    def turns_back(self, key: TenancyKey) -> bool:
        """Whether a tenancy is on its way back to where it was."""
        return self.all[key].coordinator.place is Place.TURNING_BACK

    def holds_still(self, process: ProcessId) -> bool:
        """Whether a process is a rank that we keep from running."""
        key = self.home.get(process)
        if key is None:
            return False
        rank = self.all[key].participant.ranks[process]
        return rank.operation is not None or rank.state in (RankState.FROZEN, RankState.PARKED)

    def any_still(self, job: JobKey, groups: Iterable[GroupName]) -> bool:
        """Whether state of a job on any of the groups is frozen, parked or being moved."""
        wanted = set(groups)
        own = (self.all[key] for key in self.by_job.get(job, ()))
        return any(
            tenancy.participant.ranks and not tenancy.ready and not wanted.isdisjoint(tenancy.reach)
            for tenancy in own
        )

    def at_rest(self, process: ProcessId) -> bool:
        """Whether a process is a rank that we keep from running, with no driver call in flight."""
        key = self.home.get(process)
        if key is None:
            return False
        rank = self.all[key].participant.ranks[process]
        return rank.operation is None and rank.state in (RankState.FROZEN, RankState.PARKED)

    # --- their moves --------------------------------------------------------------------------

    def evict(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Take a stable tenancy off."""
        self.touched[key] = None
        tenancy = self.all[key]
        ranks = len(tenancy.participant.ranks)
        return self.run(tenancy.coordinator.evict(now=now, ranks=ranks), now)

    def admit(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Bring a stable tenancy on."""
        self.touched[key] = None
        tenancy = self.all[key]
        parked = any(r.state is RankState.PARKED for r in tenancy.participant.ranks.values())
        return self.run(tenancy.coordinator.admit(now=now, parked=parked), now)

    def take_back(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Turn back an eviction that nobody needs any more."""
        self.touched[key] = None
        return self.run(self.all[key].coordinator.take_back(now=now), now)

    def ask_all(self, *, now: float) -> list[Effect]:
        """After a restart: find out where all ranks are."""
        out: list[Effect] = []
        for key, tenancy in self.all.items():
            if tenancy.participant.ranks:
                self.touched[key] = None
                out += self.run(tenancy.coordinator.ask(now=now), now)
        return out

    def clear(self, job: JobKey, *, now: float) -> list[Effect]:
        """Try again what a job's tenancies were given up on."""
        out: list[Effect] = []
        for key in self.by_job.get(job, ()):
            self.touched[key] = None
            out += self.run(self.all[key].coordinator.clear(now=now), now)
        return out

    def hurry(self, job: JobKey, *, now: float) -> list[Effect]:
        """End the pauses before a job's tenancies are moved again."""
        out: list[Effect] = []
        for key in self.by_job.get(job, ()):
            self.touched[key] = None
            out += self.run(self.all[key].coordinator.hurry(now=now), now)
        return out

    def on_barrier(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """A coordinator's deadline came."""
        tenancy = self.all.get(key)
        if tenancy is None:
            return []
        self.touched[key] = None
        return self.run(tenancy.coordinator.on_deadline(now=now), now)

    def on_numbers(self, *, now: float) -> list[Effect]:
        """Epochs can be had again."""
        out: list[Effect] = []
        for key, tenancy in self.all.items():
            self.touched[key] = None
            out += self.run(tenancy.coordinator.on_numbers(now=now), now)
        return out

    def on_scanned(self, event: GroupsScanned, *, now: float) -> list[Effect]:
        """Take in who is on the devices, then let the one who asked go on."""
        out = self.observe(event.found)
        tenancy = self.all[self.steps.pop(event.op)]
        if any(found.state is RankState.PARKED for found in event.found):
            tenancy.coordinator.on_parked_found()
        event = replace(event, found=tuple(self._identified(event.found, tenancy.key)))
        return out + self.run(tenancy.participant.on_scanned(event, now=now), now)

    def _identified(self, found: Iterable[FoundRank], asker: TenancyKey) -> Iterable[FoundRank]:
        """Add what is known here and a scan cannot tell: whose a process is, and who is parked.

        What a parked rank is known to have left on the devices is nobody's company.
        """
        for process in found:
            key = self.home.get(process.process)
            if key is None:
                yield process
                continue
            rank = self.all[key].participant.ranks[process.process]
            known = 0 if key == asker else rank.residue_bytes
            if rank.state is not RankState.PARKED or process.device_bytes > known:
                yield replace(process, job=key.job)

    def on_promised(self, event: HostMemoryPromised, *, now: float) -> list[Effect]:
        """Know whether a tenancy could be parked; its job's next acquire depends on it."""
        if (tenancy := self.all.get(event.tenancy)) is None:
            return []
        tenancy.participant.shortage = event.failure
        pinned = tenancy.coordinator.pinned
        if event.failure or pinned is None or pinned.cause is not Cause.NO_HOST_MEMORY:
            return []
        # What it was given up on for is there.
        self.touched[event.tenancy] = None
        return self.run(tenancy.coordinator.clear(now=now), now)

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
        stranger = self.strangers.pop(process, None)
        if stranger is not None:
            return self._on_stranger_gone(stranger, now)
        key = self.home.get(process)
        if key is None:
            return []
        tenancy = self.all[key]
        out = self.run(tenancy.participant.on_rank_exited(process, now=now), now)
        if process not in tenancy.participant.ranks:
            out += self._on_rank_gone(tenancy, process, now)
        return out

    def _on_stranger_gone(self, stranger: FoundRank, now: float) -> list[Effect]:
        """Try again what a stranger on the devices had stopped."""
        groups = self.in_order(self._groups_of(stranger.devices))
        keys = [key for group in groups for key in self.by_group[group]]
        out: list[Effect] = []
        for key in keys:
            reason = self.all[key].coordinator.reason
            if reason is not None and reason.cause is Cause.STRANGER:
                self.touched[key] = None
                out += self.run(self.all[key].coordinator.clear(now=now), now)
        return out

    def _on_rank_gone(self, tenancy: Tenancy, process: ProcessId, now: float) -> list[Effect]:
        del self.home[process]
        ranks = tenancy.participant.ranks.values()
        for group, rank in list(tenancy.beyond.items()):
            if rank.process == process:
                del tenancy.beyond[group]
                del self.by_group[group][tenancy.key]
        for rank_left in ranks:
            self._settle_in(rank_left.id.process, tenancy.key)
        failed = sum(rank.state is RankState.FAILED for rank in ranks)
        self.touched[tenancy.key] = None
        effects = tenancy.coordinator.on_ranks_lost(left=len(ranks), failed=failed, now=now)
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
                    self.touched[effect.tenancy] = None
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
            busy = tenancy.participant.busy
            assert not (busy and tenancy.coordinator.stable), "a move ends after its operations"
            for process in tenancy.participant.ranks:
                assert self.home[process] == key, "a rank is at home in one tenancy"
            for group in tenancy.reach:
                assert key in self.by_group[group], "it is found by each group that it may be on"
        for job, keys in self.by_job.items():
            groups = [group for key in keys for group in key.groups]
            assert len(groups) == len(set(groups)), f"tenancies of {job} share a group"
