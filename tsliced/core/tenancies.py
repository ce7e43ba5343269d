"""All tenancies of this host, and their moves.

Orders and reports travel between coordinators and participants here; what a coordinator has to say
beyond that is left in `signals`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tsliced.core.actions import (
    ReserveDeviceMemory,
    ReserveHostMemory,
    RunHooks,
    ScanGroups,
    StartOperation,
)
from tsliced.core.events import (
    GroupsScanned,
    HooksRun,
    HostMemoryPromised,
    MemoryReserved,
    OperationFinished,
)
from tsliced.core.homes import Homes
from tsliced.core.model import Cause, FoundRank, JobKey, OpId, ProcessId, RankState, TenancyKey
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
from tsliced.core.tenancy import Tenancy

Outcome = Evicted | EvictionFailed | Admitted | AdmissionFailed | Blocked


@dataclass(slots=True, kw_only=True)
class Tenancies(Homes):
    """Tenancies that can be moved. Mutate it only through its methods."""

    #: Steps in flight, and operations with the process that they are for.
    steps: dict[OpId, TenancyKey] = field(default_factory=dict)
    operations: dict[OpId, StartOperation] = field(default_factory=dict)
    signals: deque[Outcome] = field(default_factory=deque)
    #: Whose coordinator's deadline may have changed.
    touched: dict[TenancyKey, None] = field(default_factory=dict)

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
