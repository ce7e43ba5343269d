"""All tenancies of this host, and their moves.

Orders and reports travel between coordinators and participants here; what a coordinator has to say
beyond that is left in `signals`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tsliced.core.abroad import Abroad
from tsliced.core.actions import (
    FreeMemory,
    Note,
    RankRecord,
    ReserveDeviceMemory,
    ReserveHostMemory,
    RunHooks,
    ScanGroups,
    Send,
    SettleHostMemory,
    StartOperation,
    TenancyRecord,
)
from tsliced.core.coordinator import NO_STAMP, Place
from tsliced.core.events import (
    GroupsScanned,
    HooksRun,
    HostMemoryPromised,
    MemoryReserved,
    OperationFinished,
)
from tsliced.core.model import (
    Cause,
    FoundRank,
    Goal,
    GroupName,
    HostName,
    JobKey,
    OpId,
    ProcessId,
    RankId,
    RankState,
    TenancyKey,
)
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
from tsliced.core.value import maker

_make_scanned, _make_send = maker(GroupsScanned), maker(Send)

#: Most of what there is to deliver, and not for any tenancy.
_PASSED_ON = frozenset({FreeMemory, Note, RankRecord, SettleHostMemory, TenancyRecord})

Outcome = Evicted | EvictionFailed | Admitted | AdmissionFailed | Blocked


@dataclass(slots=True, kw_only=True)
class Tenancies(Abroad):
    """Tenancies that can be moved. Mutate it only through its methods."""

    #: Steps in flight, and operations with the process that they are for.
    steps: dict[OpId, TenancyKey] = field(default_factory=dict)
    operations: dict[OpId, StartOperation] = field(default_factory=dict)
    signals: deque[Outcome] = field(default_factory=deque)
    #: Whose coordinator's deadline may have changed.
    touched: dict[TenancyKey, None] = field(default_factory=dict)
    #: Of tenancies that are led here: groups on which other hosts obey somebody else.
    disowned: dict[TenancyKey, dict[HostName, set[GroupName]]] = field(default_factory=dict)
    #: Jobs that another host's coordinator has moved all the way, or asked after.
    arrived: dict[JobKey, None] = field(default_factory=dict)

    def make_room(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Take a stable tenancy off for another one, or first have it show that it comes back.

        Nobody is brought back beside others, so of several on the same devices nobody shows it now.
        Nor where another host arbitrates: that would let somebody on as soon as it is off.
        """
        first = self.limits.qualify and not self.all[key].coordinator.qualified
        is_ours = all(self.arbiter_of(group) == self.host for group in self.all[key].reach)
        qualifies = first and is_ours and self.company_of(key) is None
        return self.evict(key, now=now, qualifies=qualifies)

    def evict(
        self, key: TenancyKey, *, now: float, qualifies: bool = False, insists: bool = False
    ) -> list[Effect]:
        """Take a stable tenancy off, or have it leave and come back: see `Coordinator.evict`."""
        tenancy = self.all[key]
        if self._is_beyond_reach(tenancy):
            return []
        self.touched[key] = None
        by_host = Counter(rank.host for rank, _ in tenancy.ranks())
        ranks = max(by_host.values(), default=0)
        effects = tenancy.coordinator.evict(
            now=now, ranks=ranks, qualifies=qualifies, insists=insists
        )
        return self.run(effects, now)

    def admit(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Bring a stable tenancy on."""
        tenancy = self.all[key]
        if self._is_beyond_reach(tenancy):
            return []
        self.touched[key] = None
        parked = any(state is RankState.PARKED for _, state in tenancy.ranks())
        return self.run(tenancy.coordinator.admit(now=now, parked=parked), now)

    def _is_beyond_reach(self, tenancy: Tenancy) -> bool:
        """Whether a move must not begin here: another host leads it, or one of it is silent."""
        return not tenancy.led_here or not self.links.lost.isdisjoint(tenancy.coordinator.hosts)

    def take_back(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Turn back an eviction that nobody needs any more."""
        self.touched[key] = None
        return self.run(self.all[key].coordinator.take_back(now=now), now)

    def ask_all(self, *, now: float) -> list[Effect]:
        """After a restart: find out where all ranks are."""
        out: list[Effect] = []
        for key, tenancy in self.all.items():
            if not tenancy.led_here:
                out += self.run([self.look(key)], now)
            elif tenancy.participant.ranks or tenancy.is_abroad:
                self.touched[key] = None
                out += self.run(tenancy.coordinator.ask(now=now), now)
        return out

    def ask(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Find out where the ranks of a stable tenancy are, and bring it to one place."""
        self.touched[key] = None
        return self.run(self.all[key].coordinator.ask(now=now), now)

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

    # --- other hosts --------------------------------------------------------------------------

    def on_order(self, order: Order, lead: HostName, *, now: float) -> list[Effect]:
        """Take an order of another host's coordinator."""
        if order.host != self.host or self.is_stale(order, lead):
            return []
        out: list[Effect] = []
        if (tenancy := self.take_in(order, lead, out)) is None:
            return [Send(host=lead, message=self.refuse(order, lead))]
        if tenancy.part_of is not None:
            order = replace(order, tenancy=tenancy.key)
        return self.run([*out, order], now)

    def on_report(self, report: Report, host: HostName, *, now: float) -> list[Effect]:
        """Take another host's answer to an order of a coordinator of this one."""
        tenancy = self.all.get(report.tenancy)
        if report.host != host or tenancy is None or not tenancy.led_here:
            return []
        # Also what answers an order of before this host booted anew tells where ranks are.
        self.see_abroad(tenancy, host, report.states)
        if report.disowned and report.stamp == tenancy.coordinator.stamp:
            self.disowned.setdefault(report.tenancy, {})[host] = set(report.disowned)
        if not tenancy.coordinator.takes_part(host):
            return []
        effects = self._hear(report, tenancy, now)
        return self.run(effects, now) if effects else effects

    def remind(self, host: HostName) -> list[Effect]:
        """Return the orders that a host has not answered, to be told again."""
        return [
            Send(host=host, message=order)
            for tenancy in self.all.values()
            for order in tenancy.coordinator.order_for(host)
        ]

    def on_host_gone(self, host: HostName, *, now: float) -> list[Effect]:
        """A host is lost, or dead: no move waits for what it will not do."""
        out: list[Effect] = []
        for key, tenancy in list(self.all.items()):
            if host in tenancy.coordinator.hosts:
                self.touched[key] = None
                out += self.run(tenancy.coordinator.on_host_gone(now=now), now)
        return out

    def on_rank_gone_abroad(self, rank: RankId, *, now: float) -> list[Effect]:
        """A rank on another host is gone."""
        tenancy = self.all[self.abroad.pop(rank)]
        del tenancy.abroad[rank]
        return self._on_rank_gone(tenancy, rank, now)

    def thaw_alone(self, key: TenancyKey, *, now: float) -> list[Effect]:
        """Let ranks run whose freeze was ordered by a coordinator that is silent."""
        tenancy = self.all[key]
        stamp = tenancy.coordinator.stamp
        order = Order(host=self.host, tenancy=key, stamp=stamp, goal=Goal.FROZEN)
        return self.run(tenancy.participant.thaw_alone(order, now=now), now)

    # --- events -------------------------------------------------------------------------------

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
        if (tenancy := self._asker_of(event.op)) is None:
            return out
        if any(found.state is RankState.PARKED for found in event.found):
            tenancy.coordinator.on_parked_found()
        identified = _make_scanned(
            op=event.op,
            found=tuple(self._identified(event.found, tenancy.key)),
            unlisted=event.unlisted,
            failure=event.failure,
        )
        return out + self.run(tenancy.participant.on_scanned(identified, now=now), now)

    def _asker_of(self, op: OpId) -> Tenancy | None:
        """Return the tenancy that a step was begun for; None: it is a part of another one now."""
        tenancy = self.all.get(self.steps.pop(op))
        pending = tenancy.participant.pending if tenancy is not None else None
        return tenancy if pending is not None and pending.op == op else None

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
                yield process if process.job == key.job else replace(process, job=key.job)

    def on_promised(self, event: HostMemoryPromised, *, now: float) -> list[Effect]:
        """Know whether a tenancy could be parked; its job's next acquire depends on it."""
        if (tenancy := self.all.get(event.tenancy)) is None:
            return []
        tenancy.participant.shortage = event.failure
        self.tell_arbiters(tenancy)
        pinned = tenancy.coordinator.pinned
        if event.failure or pinned is None or pinned.cause is not Cause.NO_HOST_MEMORY:
            return []
        # What it was given up on for is there.
        self.touched[event.tenancy] = None
        return self.run(tenancy.coordinator.clear(now=now), now)

    def on_step(self, event: MemoryReserved | HooksRun, *, now: float) -> list[Effect]:
        """Hand a step's result to its tenancy."""
        if (tenancy := self._asker_of(event.op)) is None:
            return []
        return self.run(tenancy.participant.on_step(event, now=now), now)

    def on_operation(self, event: OperationFinished, *, now: float) -> list[Effect]:
        """Hand an operation's result to its rank."""
        del self.operations[event.op]
        # Not the one that it was started for: that may have become a part of another one since.
        tenancy = self.all[self.home[event.rank.process]]
        out = self.run(tenancy.participant.on_operation(event, now=now), now)
        if event.rank.process not in tenancy.participant.ranks:
            del self.home[event.rank.process]
            out += self._on_rank_gone(tenancy, event.rank, now)
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
            del self.home[process]
            out += self._on_rank_gone(tenancy, RankId(self.host, process), now)
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

    def _on_rank_gone(self, tenancy: Tenancy, gone: RankId, now: float) -> list[Effect]:
        self.tell_arbiters(tenancy)
        self.forget_reach(tenancy, gone)
        if not tenancy.led_here:
            return []
        states = [state for _, state in tenancy.ranks()]
        self.touched[tenancy.key] = None
        effects = tenancy.coordinator.on_ranks_lost(
            left=len(states), failed=states.count(RankState.FAILED), now=now
        )
        return self.run(effects, now)

    def run(self, effects: Iterable[Effect], now: float) -> list[Effect]:
        """Deliver orders and reports until nobody has anything to say; return what is left."""
        out: list[Effect] = []
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case _ if effect.__class__ in _PASSED_ON:
                    out.append(effect)
                case Order(host=host) if host != self.host:
                    out.append(_make_send(host=host, message=effect))
                case Order():
                    participant = self.all[effect.tenancy].participant
                    todo.extend(participant.on_order(effect, now=now))
                case Report():
                    todo.extend(self._answer(effect, now))
                case StartOperation():
                    self.operations[effect.op] = effect
                    out.append(effect)
                case ScanGroups() | ReserveHostMemory() | ReserveDeviceMemory() | RunHooks():
                    self.steps[effect.op] = effect.tenancy
                    out.append(effect)
                case Evicted() | EvictionFailed() | Admitted() | AdmissionFailed() | Blocked():
                    self.signals.append(effect)
                case _:
                    out.append(effect)
        return out

    def _answer(self, report: Report, now: float) -> list[Effect]:
        """Hand a report to the coordinator that it is for, here or elsewhere."""
        tenancy = self.all[report.tenancy]
        if tenancy.led_here:
            self.tell_arbiters(tenancy)
            return self._hear(report, tenancy, now)
        tenancy.coordinator.place = Place.OFF if tenancy.participant.away else Place.ON
        order = tenancy.participant.order
        assert order is not None, "only orders are answered"
        asked = report.stamp != NO_STAMP
        if order.goal in (Goal.ON, Goal.OFF, Goal.QUERY) or not asked:
            self.arrived[tenancy.key.job] = None
        others = any(self.arbiter_of(group) != tenancy.lead for group in tenancy.reach)
        if not asked or others or order.goal is Goal.QUERY:
            # Not only who leads it has to know, or that may not know who there is.
            self.tell_arbiters(tenancy)
        if not asked:
            return []
        if (whole := tenancy.part_of) is not None:
            rest = tuple(group for group in whole.groups if group not in tenancy.key.groups)
            report = replace(report, tenancy=whole, disowned=rest)
        return [Send(host=tenancy.lead, message=report)]

    def _hear(self, report: Report, tenancy: Tenancy, now: float) -> list[Effect]:
        coordinator = tenancy.coordinator
        effects = coordinator.on_report(report, now=now)
        if effects or coordinator.wanted is not None:
            # Else it was one answer of many, and the clocks run on as they are.
            self.touched[report.tenancy] = None
        return effects

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        for key, tenancy in self.all.items():
            tenancy.coordinator.check_invariants()
            tenancy.participant.check_invariants()
            busy = tenancy.participant.busy
            if tenancy.led_here:
                # A coordinator elsewhere may be gone, or have decided without this host.
                # BLOCKED it is at once, when one host reports that it cannot be moved.
                ended = (
                    tenancy.coordinator.stable and tenancy.coordinator.place is not Place.BLOCKED
                )
                assert not (busy and ended), "a move ends after its operations"
            for process in tenancy.participant.ranks:
                assert self.home[process] == key, "a rank is at home in one tenancy"
            for group in tenancy.reach:
                assert key in self.by_group[group], "it is found by each group that it may be on"
        for job, keys in self.by_job.items():
            groups = [group for key in keys for group in key.groups]
            assert len(groups) == len(set(groups)), f"tenancies of {job} share a group"
