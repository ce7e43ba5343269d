"""A world for the core to live in: simulated devices, a journal and clients.

Every long action of the machine becomes one pending completion; a test lets them happen in order,
out of order, or never. The simulated driver knows what is physically true, independently of what
the core believes, and fails the test when two jobs are on one device.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from clients import Client, Request
from kept import keep
from simulated import CUT_OFF, MOVES, UNKNOWN
from simulated import HOST as HOST
from simulated import Process as Process
from simulated import failure as failure
from simulated import job as job

from tsliced.core.actions import (
    Action,
    ConfirmCancel,
    ConfirmRelease,
    Effects,
    Grant,
    Note,
    Record,
    Refuse,
    ReserveDeviceMemory,
    ReserveHostMemory,
    ReserveNumbers,
    RunHooks,
    ScanGroups,
    StartOperation,
)
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    DrainOrdered,
    Event,
    FaultCleared,
    GroupsObserved,
    GroupsScanned,
    HooksRun,
    LastTurnRequested,
    MemoryReserved,
    NumbersReserved,
    OperationFinished,
    ProcessExited,
    RecordsFailed,
    ReleaseRequested,
    RetryRequested,
    SessionClosed,
    SessionDisconnected,
    SessionOpened,
    SignOfLife,
    Started,
    TimePassed,
)
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.model import (
    Arrival,
    Cause,
    CoreLimits,
    DeviceId,
    Drain,
    Earlier,
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
    TenancyKey,
    Verb,
)
from tsliced.core.policy import Policy
from tsliced.core.recovery import recover

G1, G2, G3 = GroupName("g1"), GroupName("g2"), GroupName("g3")
D1, D2, D3 = DeviceId("GPU-1"), DeviceId("GPU-2"), DeviceId("GPU-3")
GROUPS = (
    GroupConfig(name=G1, devices=(D1,), order=0),
    GroupConfig(name=G2, devices=(D2,), order=1),
    GroupConfig(name=G3, devices=(D3,), order=2),
)
#: A job makes room in one move; `test_qualifying` has those that come back first.
LIMITS = CoreLimits(block=8, max_answers=4, max_evict_tries=3, qualify=False)

A = TypeVar("A", bound=Action)


class Crash(Exception):  # noqa: N818 - what happens, not what is wrong
    """The daemon was killed."""


@dataclass(slots=True, kw_only=True)
class World:
    """One daemon's surroundings."""

    host: HostName = HOST
    groups: tuple[GroupConfig, ...] = GROUPS
    limits: CoreLimits = LIMITS
    policies: dict[GroupName, Policy] = field(default_factory=dict)
    generation: int = 1
    now: float = 0.0
    seed: int = 0
    #: Says how an operation fails, or None: it succeeds.
    verdict: Callable[[Verb, Process], Reason | None] = lambda _verb, _process: None
    host_memory: Callable[[ReserveHostMemory], Reason | None] = lambda _action: None
    device_memory: Callable[[ReserveDeviceMemory], Reason | None] = lambda _action: None
    hooks: Callable[[RunHooks], Reason | None] = lambda _action: None
    scans: Callable[[ScanGroups], Reason | None] = lambda _action: None
    numbers: Callable[[ReserveNumbers], Reason | None] = lambda _action: None
    #: Why the journal takes nothing at present.
    journal_broken: Reason | None = None
    #: The driver claims snapshots and does not make them.
    noop_snapshots: bool = False
    #: Whether several jobs may have memory on a device (they did before we were asked).
    crowded: bool = False
    #: Others of the kind of every process were seen to leave devices and to come back.
    known_kind: bool = False
    #: Strangers on the devices become jobs of their own.
    freeze_strangers: bool = False
    #: There is a history.
    recording: bool = True
    auto: bool = True
    #: Whether the core checks its own invariants after every event.
    full_checks: bool = True
    #: The daemon is killed after so many more records and actions.
    fuse: int | None = None
    #: Looks at everything that is handed over and everything that comes back.
    watch: Callable[[Event | Action], None] = lambda _what: None
    machine: Machine = field(init=False)
    clients: dict[SessionId, Client] = field(default_factory=dict)
    processes: dict[ProcessId, Process] = field(default_factory=dict)
    journal: dict[tuple[object, ...], Record] = field(default_factory=dict)
    durable_ceiling: int = 0
    pending: list[Action] = field(default_factory=list)
    #: Long actions that have ended.
    over: list[Action] = field(default_factory=list)
    #: What clients and watchers have sent and the daemon has not read.
    inbox: deque[Event] = field(default_factory=deque)
    #: Everything that was done, but for pending ones, which come when they end.
    done: list[Action] = field(default_factory=list)
    requests: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    pids: Iterator[int] = field(default_factory=lambda: itertools.count(100))

    def __post_init__(self) -> None:
        self.machine = self._machine()
        self.feed(Started())

    def _machine(self) -> Machine:
        config = MachineConfig(
            host=self.host,
            groups=self.groups,
            limits=self.limits,
            generation=self.generation,
            ceiling=self.durable_ceiling,
            policies=self.policies,
            cluster="lab",
            freeze_strangers=self.freeze_strangers,
            recording=self.recording,
        )
        return Machine(config, random=Random(self.seed), full_checks=self.full_checks)

    # --- the daemon ---------------------------------------------------------------------------

    def feed(self, event: Event) -> Effects:
        """Hand an event over and do what comes back."""
        self.watch(event)
        effects = self.machine.handle(event, now=self.now)
        if effects.records and self.journal_broken is not None:
            failed = RecordsFailed(
                records=effects.records, actions=effects.actions, failure=self.journal_broken
            )
            self.feed(failed)
        else:
            for record in effects.records:
                self.keep(record)
                self._burn()
            for action in effects.actions:
                self.do(action)
                self._burn()
        if self.auto:
            self.run()
        return effects

    def _burn(self) -> None:
        if self.fuse is None:
            return
        self.fuse -= 1
        if self.fuse <= 0:
            self.fuse = None
            raise Crash

    def do(self, action: Action) -> None:
        """Do one action, or let it be pending."""
        self.watch(action)
        match action:
            case StartOperation():
                self._check_start(action)
                self.pending.append(action)
            case (
                ScanGroups()
                | ReserveHostMemory()
                | ReserveDeviceMemory()
                | RunHooks()
                | ReserveNumbers()
            ):
                self.pending.append(action)
            case _:
                self.done.append(action)
                client = self.clients.get(getattr(action, "session", SessionId("")))
                if client is not None:
                    client.take(action, self.post)

    def post(self, event: Event) -> None:
        """Let a client say something that the daemon reads later."""
        self.inbox.append(event)

    def run(self, limit: int = 10_000) -> None:
        """Let everything pending end, the oldest first."""
        for _ in range(limit):
            if self.inbox:
                self.read()
            elif self.pending:
                self.finish(0)
            else:
                return
        raise AssertionError("it never comes to rest")

    def read(self) -> None:
        """Let the daemon read one event from its inbox."""
        self._by_hand(lambda: self.inbox.popleft())

    def finish(self, index: int = 0) -> None:
        """Let one pending action end."""
        self._by_hand(lambda: self.result(self.pending.pop(index)))

    def _by_hand(self, make: Callable[[], Event]) -> None:
        auto, self.auto = self.auto, False
        try:
            self.feed(make())
        finally:
            self.auto = auto

    def finish_next(self, kind: type[Action], verb: Verb | None = None) -> None:
        """Let the oldest pending action of a kind end."""
        self.finish(self.index_of(kind, verb))

    def index_of(self, kind: type[Action], verb: Verb | None = None) -> int:
        """Return where the oldest pending action of a kind is."""
        for index, action in enumerate(self.pending):
            if isinstance(action, kind) and verb in (None, getattr(action, "verb", None)):
                return index
        raise AssertionError(f"no {kind.__name__} is pending: {self.pending}")

    def run_until(self, kind: type[Action], verb: Verb | None = None) -> None:
        """Let pending actions end until one of a kind is pending."""
        for _ in range(1000):
            for action in self.pending:
                if isinstance(action, kind) and verb in (None, getattr(action, "verb", None)):
                    return
            if self.inbox:
                self.read()
            else:
                self.finish(0)

    def result(self, action: Action) -> Event:
        """Carry a long action out in the simulated world, and return how it ended."""
        self.over.append(action)
        match action:
            case StartOperation():
                return self._operate(action)
            case ScanGroups(op=op, tenancy=tenancy):
                if (failed := self.scans(action)) is not None:
                    return GroupsScanned(op=op, failure=failed)
                devices = self.devices_of((*tenancy.groups, *action.beyond))
                found = self.found(devices)
                if action.forgotten:
                    found += self.forgotten(tenancy)
                return GroupsScanned(op=op, found=found)
            case ReserveHostMemory(op=op):
                return MemoryReserved(op=op, failure=self.host_memory(action))
            case ReserveDeviceMemory(op=op):
                return MemoryReserved(op=op, failure=self.device_memory(action))
            case RunHooks(op=op):
                return HooksRun(op=op, failure=self.hooks(action))
            case ReserveNumbers(ceiling=ceiling):
                if (failed := self.numbers(action)) is not None:
                    return NumbersReserved(ceiling=ceiling, failure=failed)
                self.durable_ceiling = max(self.durable_ceiling, ceiling)
                return NumbersReserved(ceiling=ceiling)
            case _:
                raise AssertionError(action)

    # --- devices ------------------------------------------------------------------------------

    def devices_of(self, groups: Collection[GroupName]) -> frozenset[DeviceId]:
        """Return the devices of groups."""
        return frozenset(d for g in self.groups if g.name in groups for d in g.devices)

    def found(self, devices: frozenset[DeviceId]) -> tuple[FoundRank, ...]:
        """Return what a scan of the devices sees."""
        seen = [process for process in self.processes.values() if process.on & devices]
        for process in seen:
            process.seen = True
        return tuple(
            FoundRank(
                process=process.id,
                job=process.job,
                devices=process.on,
                device_bytes=process.device_bytes if process.holds else process.residue_bytes,
                uid=process.job.uid if process.job else 0,
                name="python",
                earlier=Earlier(qualified=self.known_kind),
            )
            for process in seen
        )

    def forgotten(self, tenancy: TenancyKey) -> tuple[FoundRank, ...]:
        """Return what the driver says of a job's parked processes that nobody knows."""
        known = self.machine.tenancies.home
        return tuple(
            FoundRank(process=p.id, job=p.job, devices=p.devices, device_bytes=0, state=p.state)
            for p in self.processes.values()
            if p.job == tenancy.job and p.state is RankState.PARKED and p.id not in known
        )

    def look(self, *lost: DeviceId) -> None:
        """Let the daemon have its regular look at all devices, of which some are lost."""
        devices = frozenset(device for group in self.groups for device in group.devices)
        gone = tuple((device, "GPU is lost") for device in lost)
        self.feed(GroupsObserved(found=self.found(devices - set(lost)), lost=gone))

    def _check_start(self, start: StartOperation) -> None:
        """Assert that a restore is started only onto devices that are free of others."""
        process = self.processes.get(start.rank.process)
        if start.verb is not Verb.RESTORE or process is None or self.crowded:
            return
        for other in self.processes.values():
            alien = other.lawful and other.job != process.job and other.holds
            alien = alien and not other.devices.isdisjoint(process.devices)
            assert not alien, f"{process} is restored where {other} is"

    def _operate(self, start: StartOperation) -> OperationFinished:
        process = self.processes.get(start.rank.process)
        if process is None:
            gone = Reason(cause=Cause.DRIVER, text="the process is gone", rank=start.rank)
            return OperationFinished(
                op=start.op, rank=start.rank, observed=RankState.UNKNOWN, failure=gone
            )
        failed = self.verdict(start.verb, process)
        if failed is None:
            self._move(start.verb, process)
        elif failed.cause is Cause.FAILED:
            process.state = RankState.FAILED
        return OperationFinished(
            op=start.op,
            rank=start.rank,
            observed=process.state if failed is None or failed.cause is not CUT_OFF else UNKNOWN,
            failure=failed,
            moved_bytes=process.device_bytes,
            seconds=0.1,
        )

    def _move(self, verb: Verb, process: Process) -> None:
        if verb is Verb.QUERY:
            return
        before, after = MOVES[verb]
        assert process.state is before, f"{verb} of a process that is {process.state}"
        process.state = after
        if verb is Verb.SNAPSHOT:
            process.leftover = self.noop_snapshots
        elif verb is Verb.RESTORE:
            process.leftover = False

    # --- the journal --------------------------------------------------------------------------

    def keep(self, record: Record) -> None:
        """Write a record as the journal would."""
        keep(self.journal, record)

    def restart(self, *, finish: bool | Callable[[Action], bool] = True) -> None:
        """Kill the daemon and start it again.

        `finish`: whether an operation that was pending still ends in the world (its worker lives
        on), or was never begun.
        """
        for action in self.pending:
            ends = finish if isinstance(finish, bool) else finish(action)
            if isinstance(action, StartOperation) and ends:
                self._operate(action)
        self.end_daemon()
        self.start_daemon()
        for client in self.clients.values():
            if not client.ended:
                self.inbox.extend(self._come_back(client))
        self.feed(Started())

    def end_daemon(self) -> None:
        """Take away what no daemon has any more that was killed."""
        self.pending.clear()
        self.inbox.clear()
        for client in self.clients.values():
            client.connected = False

    def start_daemon(self) -> None:
        """Make a machine of what was kept; `Started` is still to be handed over."""
        for process in self.processes.values():
            process.seen = ("rank", self.rank(process.id)) in self.journal
        self.machine = self._machine()
        recover(self.machine, list(self.journal.values()), now=self.now)
        watched = {*self.machine.tenancies.home, *self.machine.leasing.by_process}
        alive = {*self.processes, *(client.process for client in self.clients.values())}
        self.inbox.extend(ProcessExited(process=gone) for gone in sorted(watched - alive))

    # --- clients ------------------------------------------------------------------------------

    def session(
        self,
        owner: JobKey,
        *,
        hooks: bool = False,
        pid: int | None = None,
        tool: bool = False,
        agent: bool = False,
        heartbeat_s: float | None = None,
    ) -> SessionId:
        """Open a session for a job."""
        number = next(self.pids) if pid is None else pid
        session, process = SessionId(f"s{next(self.pids)}"), ProcessId(number, 1)
        self.clients[session] = Client(session=session, job=owner, process=process)
        self.feed(
            SessionOpened(
                session=session,
                job=owner,
                process=process,
                secret=b"secret",
                groups=tuple(group.name for group in self.groups),
                hooks=hooks,
                tool=tool,
                agent=agent,
                heartbeat_s=heartbeat_s,
            )
        )
        return session

    def process_of(self, session: SessionId) -> ProcessId:
        """Return a client's process."""
        return self.clients[session].process

    def context(
        self, owner: JobKey | None, *devices: DeviceId, pid: int | None = None
    ) -> ProcessId:
        """Let a process of a job make a context, unseen."""
        process = ProcessId(next(self.pids) if pid is None else pid, 1)
        groups = {group.name for group in self.groups for d in group.devices if d in devices}
        self.processes[process] = Process(
            id=process,
            job=owner,
            devices=frozenset(devices),
            came_strange=owner is None,
            lawful=owner is not None and groups <= self.groups_held_by(owner),
        )
        return process

    def groups_held_by(self, owner: JobKey) -> set[GroupName]:
        """Return what a job's clients believe to hold."""
        held = (c.held.values() for c in self.clients.values() if c.job == owner)
        return {group for leases in held for tokens in leases for group, _ in tokens}

    def send(self, request: Request) -> None:
        """Let a client send a request; without a connection it is sent later."""
        client = self.clients[request.session]
        client.ask(request)
        if client.connected:
            self.feed(request)

    def acquire(
        self,
        session: SessionId,
        *groups: GroupName,
        ranks: int = 1,
        arrival: Arrival = Arrival.ALL,
        timeout_s: float | None = None,
        request: int | None = None,
        phase: str = "",
    ) -> LeaseId:
        """Ask for groups; return the name that the lease will have."""
        number = RequestId(next(self.requests) if request is None else request)
        self.send(
            AcquireRequested(
                session=session,
                request=number,
                groups=groups or (G1,),
                ranks=ranks,
                arrival=arrival,
                timeout_s=timeout_s,
                phase=phase,
            )
        )
        return LeaseId(f"{session}.{number}")

    def last_turn(
        self,
        session: SessionId,
        *,
        leaving: bool = False,
        timeout_s: float | None = None,
        request: int | None = None,
    ) -> LeaseId:
        """Ask for a last turn; return the name that its lease will have."""
        number = RequestId(next(self.requests) if request is None else request)
        self.feed(
            LastTurnRequested(session=session, request=number, leaving=leaving, timeout_s=timeout_s)
        )
        return LeaseId(f"{session}.{number}")

    def beat(self, session: SessionId) -> None:
        """Let a client give a sign of life."""
        self.feed(SignOfLife(session=session))

    def release(self, lease: LeaseId, *, request: int | None = None) -> RequestId:
        """Give a lease back."""
        session, _, _ = lease.rpartition(".")
        number = RequestId(next(self.requests) if request is None else request)
        self.send(ReleaseRequested(session=SessionId(session), request=number, lease=lease))
        return number

    def cancel(self, lease: LeaseId) -> RequestId:
        """Take an acquire back."""
        session, _, acquire = lease.rpartition(".")
        number = RequestId(next(self.requests))
        self.send(
            CancelRequested(
                session=SessionId(session), request=number, acquire=RequestId(int(acquire))
            )
        )
        return number

    def disconnect(self, session: SessionId) -> None:
        """Cut a client's connection."""
        self.clients[session].connected = False
        # What it had sent and was not read is lost with the connection.
        self.inbox = deque(e for e in self.inbox if getattr(e, "session", None) != session)
        self.feed(SessionDisconnected(session=session))

    def reconnect(self, session: SessionId) -> None:
        """Let a client come back and send again what it has no answer to."""
        for event in self._come_back(self.clients[session]):
            self.feed(event)

    def _come_back(self, client: Client) -> list[Event]:
        session = self.machine.leasing.sessions.get(client.session)
        leases = session.leases.values() if session is not None else ()
        held = [lease.id for lease in leases if lease.tokens]
        held += [lease.id for lease in self.machine.fronting.held_by(client.session)]
        lost = client.held.keys() - set(held)
        client.lost += lost
        for lease in lost:
            del client.held[lease]
        return client.come_back(held, self.requests)

    def close(self, session: SessionId) -> None:
        """Let a client say goodbye."""
        self.clients[session].end()
        self.inbox = deque(e for e in self.inbox if getattr(e, "session", None) != session)
        self.feed(SessionClosed(session=session))

    def die(self, process: ProcessId) -> None:
        """Let a process end, with its sessions' clients and its device state."""
        self.processes.pop(process, None)
        self.clients = {s: c for s, c in self.clients.items() if c.process != process}
        self.feed(ProcessExited(process=process))

    def clear(self, owner: JobKey) -> None:
        """Let an operator clear what a job is held back for."""
        self.feed(FaultCleared(job=owner))

    def retry(self, owner: JobKey) -> None:
        """Let an operator have what failed for a job tried again now."""
        self.feed(RetryRequested(job=owner))

    def drain(self, group: GroupName = G1, *, park: bool = False) -> None:
        """Let an operator drain a group."""
        drain = Drain(park=park, by="root", since_unix=1.0)
        self.feed(DrainOrdered(group=group, drain=drain))

    def undrain(self, group: GroupName = G1) -> None:
        """Let an operator open a group again."""
        self.feed(DrainOrdered(group=group, drain=None))

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

    def waits(self, lease: LeaseId) -> bool:
        """Whether a lease is waited for."""
        entry = self.machine.leasing.leases.get(lease)
        return entry is not None and not entry.tokens

    def all_of(self, kind: type[A]) -> list[A]:
        """Return everything of a kind that was done."""
        return [action for action in self.done if isinstance(action, kind)]

    def ended(self, kind: type[A]) -> list[A]:
        """Return every long action of a kind that has ended."""
        return [action for action in self.over if isinstance(action, kind)]

    def grants(self) -> list[Grant]:
        """Return all grants that were sent."""
        return self.all_of(Grant)

    def refusals(self) -> list[Refuse]:
        """Return all refusals that were sent."""
        return self.all_of(Refuse)

    def notes(self, kind: str) -> list[Note]:
        """Return all lines of a kind in the log."""
        return [note for note in self.all_of(Note) if note.kind == kind]

    def code(self, lease: LeaseId) -> str | None:
        """Return the code with which an acquire was refused last."""
        session, _, request = lease.rpartition(".")
        codes = [
            r.code for r in self.refusals() if r.session == session and r.request == int(request)
        ]
        return codes[-1] if codes else None

    def answers(self, request: RequestId) -> list[Action]:
        """Return what was answered to a request."""
        kinds = (Grant, Refuse, ConfirmRelease, ConfirmCancel)
        return [a for a in self.done if isinstance(a, kinds) and a.request == request]

    def moves(self) -> list[tuple[Verb, int]]:
        """Return the operations of the ranks so far, in order: verb and pid."""
        return [
            (Verb(str(note.facts["verb"])), int(str(note.facts["rank"]).partition(":")[2]))
            for note in self.notes("operation")
        ]

    def state(self, process: ProcessId) -> RankState:
        """Return what is physically true of a process."""
        return self.processes[process].state

    def rank(self, process: ProcessId) -> RankId:
        """Return the id that a process has as a rank."""
        return RankId(self.host, process)
