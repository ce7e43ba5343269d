"""A world for the core to live in: simulated devices, a journal and clients.

Every long action of the machine becomes one pending completion; a test lets them happen in order,
out of order, or never. The simulated driver knows what is physically true, independently of what
the core believes, and fails the test when two jobs are on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tsliced.core.actions import (
    Action,
    ConfirmCancel,
    ConfirmRelease,
    Effects,
    FaultRecord,
    Grant,
    LeaseEndedRecord,
    LeaseRecord,
    RankEndedRecord,
    RankRecord,
    Record,
    Refuse,
    ReserveDeviceMemory,
    ReserveHostMemory,
    ReserveNumbers,
    RunHooks,
    ScanGroups,
    SessionEndedRecord,
    SessionRecord,
    StartOperation,
    TenancyEndedRecord,
    TenancyRecord,
)
from tsliced.core.events import (
    AcquireRequested,
    Event,
    GroupsScanned,
    HooksRun,
    MemoryReserved,
    NumbersReserved,
    OperationFinished,
    ProcessExited,
    ReleaseRequested,
    SessionOpened,
    Started,
    TimePassed,
)
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.model import (
    Arrival,
    Cause,
    CoreLimits,
    DeviceId,
    FoundRank,
    GroupConfig,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    RequestId,
    SessionId,
    Verb,
)
from tsliced.core.recovery import recover

HOST = HostName("n1")
G1, G2, G3 = GroupName("g1"), GroupName("g2"), GroupName("g3")
D1, D2, D3 = DeviceId("GPU-1"), DeviceId("GPU-2"), DeviceId("GPU-3")
LIMITS = CoreLimits(block=8, max_answers=4, max_evict_tries=3)


def job(name: str, uid: int = 1000) -> JobKey:
    """Return a job's key."""
    return JobKey("", uid, name)


@dataclass(slots=True, kw_only=True)
class Process:
    """A simulated process with device state."""

    id: ProcessId
    job: JobKey | None
    devices: frozenset[DeviceId]
    state: RankState = RankState.RUNNING
    device_bytes: int = 100

    @property
    def on(self) -> frozenset[DeviceId]:
        """Devices that hold its memory."""
        return self.devices if self.state.holds_device else frozenset()


@dataclass(slots=True, kw_only=True)
class World:
    """One daemon's surroundings."""

    groups: tuple[GroupConfig, ...] = (
        GroupConfig(name=G1, devices=(D1,), order=0),
        GroupConfig(name=G2, devices=(D2,), order=1),
        GroupConfig(name=G3, devices=(D3,), order=2),
    )
    limits: CoreLimits = LIMITS
    generation: int = 1
    now: float = 0.0
    seed: int = 0
    #: Says how an operation fails, or None: it succeeds.
    verdict: Callable[[Verb, Process], Reason | None] = lambda _verb, _process: None
    host_memory: Callable[[ReserveHostMemory], Reason | None] = lambda _action: None
    device_memory: Callable[[ReserveDeviceMemory], Reason | None] = lambda _action: None
    hooks: Callable[[RunHooks], Reason | None] = lambda _action: None
    #: The result of a snapshot that the driver claims and does not make.
    noop_snapshots: bool = False
    #: Whether several jobs may have memory on a device (they did before we were asked).
    crowded: bool = False
    auto: bool = True
    machine: Machine = field(init=False)
    processes: dict[ProcessId, Process] = field(default_factory=dict)
    journal: dict[tuple[object, ...], Record] = field(default_factory=dict)
    durable_ceiling: int = 0
    pending: list[Action] = field(default_factory=list)
    #: Everything that was done, but for pending ones, which come when they end.
    done: list[Action] = field(default_factory=list)
    requests: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    pids: itertools.count[int] = field(default_factory=lambda: itertools.count(100))

    def __post_init__(self) -> None:
        self.machine = self._machine()
        self.feed(Started())

    def _machine(self) -> Machine:
        config = MachineConfig(
            host=HOST,
            groups=self.groups,
            limits=self.limits,
            generation=self.generation,
            ceiling=self.durable_ceiling,
        )
        return Machine(config, random=Random(self.seed), full_checks=True)

    # --- the daemon ---------------------------------------------------------------------------

    def feed(self, event: Event) -> Effects:
        """Hand an event over and do what comes back."""
        effects = self.machine.handle(event, now=self.now)
        for record in effects.records:
            self.keep(record)
        for action in effects.actions:
            self.do(action)
        if self.auto:
            self.run()
        return effects

    def do(self, action: Action) -> None:
        """Do one action, or let it be pending."""
        match action:
            case (
                StartOperation()
                | ScanGroups()
                | ReserveHostMemory()
                | ReserveDeviceMemory()
                | RunHooks()
                | ReserveNumbers()
            ):
                self.pending.append(action)
            case _:
                self.done.append(action)

    def run(self, limit: int = 10_000) -> None:
        """Let everything pending end, the oldest first."""
        for _ in range(limit):
            if not self.pending:
                return
            self.finish(0)
        raise AssertionError("it never comes to rest")

    def finish(self, index: int = 0) -> None:
        """Let one pending action end."""
        action = self.pending.pop(index)
        auto, self.auto = self.auto, False
        try:
            self.feed(self.result(action))
        finally:
            self.auto = auto

    def result(self, action: Action) -> Event:
        """Carry a long action out in the simulated world, and return how it ended."""
        match action:
            case StartOperation():
                return self._operate(action)
            case ScanGroups(op=op, tenancy=tenancy):
                devices = {d for g in self.groups if g.name in tenancy.groups for d in g.devices}
                return GroupsScanned(op=op, found=self.found(devices))
            case ReserveHostMemory(op=op):
                return MemoryReserved(op=op, failure=self.host_memory(action))
            case ReserveDeviceMemory(op=op):
                return MemoryReserved(op=op, failure=self.device_memory(action))
            case RunHooks(op=op):
                return HooksRun(op=op, failure=self.hooks(action))
            case ReserveNumbers(ceiling=ceiling):
                self.durable_ceiling = max(self.durable_ceiling, ceiling)
                return NumbersReserved(ceiling=ceiling)
            case _:
                raise AssertionError(action)

    def found(self, devices: set[DeviceId]) -> tuple[FoundRank, ...]:
        """Return what a scan of the devices sees."""
        return tuple(
            FoundRank(
                process=process.id,
                job=process.job,
                devices=process.on,
                device_bytes=process.device_bytes,
                uid=process.job.uid if process.job else 0,
                name="python",
            )
            for process in self.processes.values()
            if process.on & devices
        )

    def _operate(self, start: StartOperation) -> OperationFinished:
        process = self.processes.get(start.rank.process)
        if process is None:
            gone = Reason(cause=Cause.DRIVER, text="the process is gone", rank=start.rank)
            return OperationFinished(
                op=start.op, rank=start.rank, observed=RankState.UNKNOWN, failure=gone
            )
        failure = self.verdict(start.verb, process)
        if failure is None:
            self._move(start.verb, process)
        elif failure.cause is Cause.FAILED:
            process.state = RankState.FAILED
        observed = process.state
        if self.noop_snapshots and start.verb is Verb.SNAPSHOT:
            process.state = RankState.RUNNING
        return OperationFinished(
            op=start.op,
            rank=start.rank,
            observed=observed,
            failure=failure,
            moved_bytes=process.device_bytes,
            seconds=0.1,
        )

    def _move(self, verb: Verb, process: Process) -> None:
        legal = {
            Verb.FREEZE: (RankState.RUNNING, RankState.FROZEN),
            Verb.SNAPSHOT: (RankState.FROZEN, RankState.PARKED),
            Verb.RESTORE: (RankState.PARKED, RankState.FROZEN),
            Verb.THAW: (RankState.FROZEN, RankState.RUNNING),
        }
        if verb is Verb.QUERY:
            return
        before, after = legal[verb]
        assert process.state is before, f"{verb} of a process that is {process.state}"
        process.state = after
        if verb is Verb.RESTORE:
            self.check_exclusion()

    def check_exclusion(self) -> None:
        """Assert that no device holds the state of two jobs."""
        if self.crowded:
            return
        for device in (D1, D2, D3):
            jobs = {p.job for p in self.processes.values() if device in p.on}
            assert len(jobs) <= 1, f"{jobs} are on {device}"

    # --- the journal --------------------------------------------------------------------------

    def keep(self, record: Record) -> None:
        """Write a record as the journal would: one per thing."""
        match record:
            case SessionRecord():
                self.journal["session", record.session] = record
            case SessionEndedRecord(session=session):
                for key in [k for k in self.journal if session in k[1:2]]:
                    del self.journal[key]
            case LeaseRecord():
                self.journal["lease", record.lease] = record
            case LeaseEndedRecord():
                self.journal.pop(("lease", record.lease), None)
                if ("session", record.session) in self.journal:
                    self.journal["ended", record.session, record.slot] = record
            case TenancyRecord():
                self.journal["tenancy", record.tenancy] = record
            case TenancyEndedRecord(tenancy=tenancy):
                self.journal.pop(("tenancy", tenancy), None)
            case RankRecord():
                self.journal["rank", record.rank] = record
            case RankEndedRecord(rank=rank):
                self.journal.pop(("rank", rank), None)
            case FaultRecord(job=key, reason=reason):
                self.journal["fault", key] = record
                if reason is None:
                    del self.journal["fault", key]

    def restart(self) -> None:
        """Kill the daemon and start it again: what was pending still ends in the world."""
        for action in self.pending:
            if isinstance(action, StartOperation):
                self._operate(action)
        self.pending.clear()
        self.machine = self._machine()
        recover(self.machine, list(self.journal.values()), now=self.now)
        self.feed(Started())
        alive = set(self.processes) | set(self.machine.leasing.by_process)
        for process in list(self.machine.tenancies.home):
            if process not in alive:
                self.feed(ProcessExited(process=process))

    # --- clients ------------------------------------------------------------------------------

    def session(self, owner: JobKey, *, hooks: bool = False, pid: int | None = None) -> SessionId:
        """Open a session for a job."""
        number = next(self.pids) if pid is None else pid
        session = SessionId(f"s{number}")
        self.feed(
            SessionOpened(
                session=session,
                job=owner,
                process=ProcessId(number, 1),
                secret=b"secret",
                groups=tuple(group.name for group in self.groups),
                hooks=hooks,
            )
        )
        return session

    def context(self, owner: JobKey | None, *devices: DeviceId) -> ProcessId:
        """Let a process of a job make a context, unseen."""
        process = ProcessId(next(self.pids), 1)
        self.processes[process] = Process(id=process, job=owner, devices=frozenset(devices))
        return process

    def acquire(
        self,
        session: SessionId,
        *groups: GroupName,
        ranks: int = 1,
        arrival: Arrival = Arrival.ALL,
        timeout_s: float | None = None,
        request: int | None = None,
    ) -> LeaseId:
        """Ask for groups; return the name that the lease will have."""
        number = RequestId(next(self.requests) if request is None else request)
        self.feed(
            AcquireRequested(
                session=session,
                request=number,
                groups=groups or (G1,),
                ranks=ranks,
                arrival=arrival,
                timeout_s=timeout_s,
            )
        )
        return LeaseId(f"{session}.{number}")

    def release(self, lease: LeaseId, *, request: int | None = None) -> RequestId:
        """Give a lease back."""
        session, _, _ = lease.rpartition(".")
        number = RequestId(next(self.requests) if request is None else request)
        self.feed(ReleaseRequested(session=SessionId(session), request=number, lease=lease))
        return number

    def die(self, process: ProcessId) -> None:
        """Let a process end."""
        self.processes.pop(process, None)
        self.feed(ProcessExited(process=process))

    def pass_time(self, seconds: float) -> None:
        """Let time go by, with every timer at its instant."""
        end = self.now + seconds
        while (due := self.machine.deadline) is not None and due <= end:
            self.now = max(self.now, due)
            self.feed(TimePassed())
        self.now = end

    # --- what can be seen ---------------------------------------------------------------------

    def held(self, lease: LeaseId) -> bool:
        """Whether a lease is held."""
        entry = self.machine.leasing.leases.get(lease)
        return entry is not None and bool(entry.tokens)

    def grants(self) -> list[Grant]:
        """Return all grants that were sent."""
        return [action for action in self.done if isinstance(action, Grant)]

    def refusals(self) -> list[Refuse]:
        """Return all refusals that were sent."""
        return [action for action in self.done if isinstance(action, Refuse)]

    def answers(self, request: RequestId) -> list[Action]:
        """Return what was answered to a request."""
        kinds = (Grant, Refuse, ConfirmRelease, ConfirmCancel)
        return [a for a in self.done if isinstance(a, kinds) and a.request == request]

    def state(self, process: ProcessId) -> RankState:
        """Return what is physically true of a process."""
        return self.processes[process].state

    def rank(self, process: ProcessId) -> RankId:
        """Return the id that a process has as a rank."""
        return RankId(HOST, process)
