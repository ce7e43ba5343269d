"""A daemon's inside without its socket: a driver on a real journal, and stand-ins for the rest.

The devices and the backend are of memory and do as they are told; processes, their deaths, and to
which jobs they belong are real.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

from tsliced.config.ways import Ways
from tsliced.core.actions import ClientAction, Grant, Refuse, RunHooks
from tsliced.core.events import AcquireRequested, ReleaseRequested, SessionOpened, Started
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.model import (
    CoreLimits,
    DeviceId,
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
)
from tsliced.core.recovery import recover
from tsliced.driver import Driver, Surroundings
from tsliced.host.backends.base import Backend, BackendContext, Outcome
from tsliced.host.devices import DeviceProcess, DeviceReading, DevicesError
from tsliced.host.journal import Journal, JournalLimits
from tsliced.host.kinds import Kinds
from tsliced.host.membership import Membership
from tsliced.host.memory import DeviceLedger, DramLedger, HostMemory, SnapshotMargin
from tsliced.host.preflight import HostFacts
from tsliced.host.processes import identify
from tsliced.host.ray import RayMargin
from tsliced.host.scan import Scanner
from tsliced.log import Log
from tsliced.qualifying import Qualifying
from tsliced.reserving import Ledgers

LIMIT_S = 20.0
MIB = 1 << 20
TOTAL_BYTES = 64 * MIB
HOST = HostName("n1")
G1, G2 = GroupName("g1"), GroupName("g2")
D1, D2 = DeviceId("GPU-1"), DeviceId("GPU-2")
GROUPS = (
    GroupConfig(name=G1, devices=(D1,), order=0),
    GroupConfig(name=G2, devices=(D2,), order=1),
)

Found = TypeVar("Found")


def job(name: str) -> JobKey:
    """Return the key of a job of this user."""
    return JobKey("", os.getuid(), name)


async def until(condition: Callable[[], Found], what: str) -> Found:
    """Let the loop turn until something that no event announces is true; return it."""
    end = asyncio.get_running_loop().time() + LIMIT_S
    while not (found := condition()):
        assert asyncio.get_running_loop().time() < end, f"{what}: not within {LIMIT_S} s"
        await asyncio.sleep(0.002)
    return found


@contextmanager
def process_of(name: str) -> Iterator[ProcessId]:
    """A process whose environment says to which job it belongs."""
    sleeper = subprocess.Popen(
        # It ends when this process does, however that ends.
        ["cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TSLICE_JOB_ID": name},
    )
    try:
        # Popen comes back when the kernel has begun to make it another program.
        environ = Path(f"/proc/{sleeper.pid}/environ")
        end = time.monotonic() + LIMIT_S
        while f"TSLICE_JOB_ID={name}".encode() not in environ.read_bytes():
            assert time.monotonic() < end, "cat did not start"
            time.sleep(0.001)
        process = identify(sleeper.pid)
        assert process is not None
        yield process
    finally:
        sleeper.kill()
        sleeper.communicate(timeout=LIMIT_S)


@dataclass
class FakeDevices:
    """Devices whose memory is a table of who has how much."""

    #: By device and pid; None: the driver doesn't say how much.
    used: dict[DeviceId, dict[int, int | None]] = field(default_factory=lambda: {D1: {}, D2: {}})
    #: Raised by each look at the devices.
    error: DevicesError | None = None
    stale_s: float = 0.0
    utilization_pct: int | None = None

    async def observe(
        self, uuids: Collection[DeviceId], *, utilization: bool = False
    ) -> dict[DeviceId, DeviceReading]:
        """Return a reading of each device."""
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return {uuid: self._reading(uuid) for uuid in uuids}

    def _reading(self, uuid: DeviceId) -> DeviceReading:
        used = sum(count or 0 for count in self.used[uuid].values())
        return DeviceReading(
            uuid=uuid,
            total_bytes=TOTAL_BYTES,
            used_bytes=used,
            free_bytes=TOTAL_BYTES - used,
            processes=tuple(
                DeviceProcess(pid=pid, used_bytes=count) for pid, count in self.used[uuid].items()
            ),
            utilization_pct=self.utilization_pct,
            stale_s=self.stale_s,
        )

    def put(self, process: ProcessId, count: int, device: DeviceId = D1) -> None:
        """Let a process use so much of a device."""
        self.used[device][process.pid] = count

    def take(self, process: ProcessId) -> dict[DeviceId, int]:
        """Free all that a process uses, and return what it was."""
        return {
            uuid: by.pop(process.pid) or 0 for uuid, by in self.used.items() if process.pid in by
        }


class FakeBackend(Backend):
    """Moves state between the fake devices and a table of what is parked."""

    def __init__(self, devices: FakeDevices, directory: Path) -> None:
        super().__init__(BackendContext(directory=directory, measure=self.measure))
        self.devices = devices
        self.states: dict[ProcessId, RankState] = {}
        self.parked: dict[ProcessId, dict[DeviceId, int]] = {}
        #: ``freeze 123`` and so on, as they were begun.
        self.calls: list[str] = []
        self.prepared: set[ProcessId] = set()
        self.forgotten: set[ProcessId] = set()
        #: By verb: what happens instead.
        self.instead: dict[str, Exception | Outcome] = {}
        #: Operations wait for it.
        self.gate = asyncio.Event()
        self.gate.set()
        self.counts_bytes = False
        #: What of each restored process does not come back.
        self.lost_bytes = 0

    async def measure(self, process: ProcessId) -> dict[DeviceId, int] | None:
        used = self.devices.used.items()
        return {uuid: by[process.pid] or 0 for uuid, by in used if process.pid in by}

    def prepare(self, process: ProcessId) -> None:
        self.prepared.add(process)

    def forget(self, process: ProcessId) -> None:
        self.forgotten.add(process)

    async def probe(self, process: ProcessId) -> bool:
        if isinstance(instead := self.instead.get("probe"), Exception):
            raise instead
        return any(process.pid in used for used in self.devices.used.values())

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        return await self._do("freeze", rank, RankState.FROZEN)

    async def snapshot(self, rank: RankId) -> Outcome:
        outcome = await self._do("snapshot", rank, RankState.PARKED)
        if outcome.failure is None:
            self.parked[rank.process] = self.devices.take(rank.process)
        return outcome

    async def restore(self, rank: RankId) -> Outcome:
        outcome = await self._do("restore", rank, RankState.FROZEN)
        if outcome.failure is None:
            for device, count in self.parked.pop(rank.process).items():
                self.devices.put(rank.process, count - self.lost_bytes, device)
        return outcome

    async def thaw(self, rank: RankId) -> Outcome:
        return await self._do("thaw", rank, RankState.RUNNING)

    async def state(self, rank: RankId) -> Outcome:
        observed = self.states.get(rank.process, RankState.RUNNING)
        return Outcome(observed=observed)

    async def _do(self, verb: str, rank: RankId, after: RankState) -> Outcome:
        self.calls.append(f"{verb} {rank.process.pid}")
        await self.gate.wait()
        instead = self.instead.get(verb)
        if isinstance(instead, Exception):
            raise instead
        outcome = instead or Outcome(observed=after)
        self.states[rank.process] = outcome.observed
        return outcome


@dataclass
class FakeClients:
    """Collects what the core says to clients."""

    said: list[ClientAction] = field(default_factory=list)
    #: What sessions answer when they are asked to quiesce or resume.
    hooks_failure: Reason | None = None

    def deliver(self, action: ClientAction) -> None:
        self.said.append(action)

    async def empty_cache(self, process: ProcessId) -> None:
        pass

    async def run_hooks(self, action: RunHooks) -> Reason | None:
        return self.hooks_failure

    def of(self, kind: type[Found]) -> list[Found]:
        """Return what was said of one kind, in order."""
        return [action for action in self.said if isinstance(action, kind)]


@dataclass
class Inside:
    """A driver and what it acts upon."""

    driver: Driver
    devices: FakeDevices
    backend: FakeBackend
    clients: FakeClients
    log: io.StringIO
    broken: asyncio.Event
    _requests: int = 0

    @property
    def machine(self) -> Machine:
        return self.driver.machine

    def open(self, name: str, process: ProcessId | None = None) -> SessionId:
        """Open a session of a job for a process, without one for this process."""
        me = process or identify(os.getpid())
        assert me is not None
        session = SessionId(f"session-{name}")
        self.driver.post(
            SessionOpened(
                session=session,
                job=job(name),
                process=me,
                secret=b"secret",
                groups=tuple(group.name for group in self.machine.config.groups),
            )
        )
        return session

    def ask(
        self, session: SessionId, *groups: GroupName, timeout_s: float | None = None
    ) -> RequestId:
        """Ask for groups, and return the request's id."""
        self._requests += 1
        request = RequestId(self._requests)
        self.driver.post(
            AcquireRequested(
                session=session, request=request, groups=groups or (G1,), timeout_s=timeout_s
            )
        )
        return request

    async def answer(self, request: RequestId) -> Grant | Refuse:
        """Wait for the answer to a request."""

        def find() -> Grant | Refuse | None:
            answers = (a for a in self.clients.said if isinstance(a, Grant | Refuse))
            return next((a for a in answers if a.request == request), None)

        found = await until(find, f"request {request} is answered")
        assert found is not None
        return found

    async def grant(self, session: SessionId, *groups: GroupName) -> Grant:
        """Ask for groups and wait for the grant."""
        answer = await self.answer(self.ask(session, *groups))
        assert isinstance(answer, Grant), answer
        return answer

    def release(self, session: SessionId, lease: LeaseId) -> None:
        """Give a lease back."""
        self._requests += 1
        self.driver.post(
            ReleaseRequested(session=session, request=RequestId(self._requests), lease=lease)
        )

    async def make_room(self, name: str, rank: ProcessId, count: int) -> SessionId:
        """Let a job with state on a device give its lease back, and another one have its turn.

        Return the session of the first one.
        """
        self.devices.put(rank, count)
        session = self.open(name, rank)
        self.release(session, (await self.grant(session)).lease)
        other = self.open(f"not-{name}")
        self.release(other, (await self.grant(other)).lease)
        return session


def _ledgers() -> Ledgers:
    return Ledgers(
        host=DramLedger(HostMemory()),
        ray=RayMargin(HostMemory(), when="never", ratio=0.0),
        device=DeviceLedger(),
        margin=SnapshotMargin(ratio=0.0, bytes=0),
    )


def _qualifying(machine: Machine, directory: Path) -> Qualifying:
    return Qualifying(
        machine=machine,
        kinds=Kinds(directory / "kinds.json"),
        ways=Ways(default=(("fake",),)),
        facts=HostFacts(driver="580.95.05"),
    )


@asynccontextmanager
async def inside(
    directory: Path,
    *,
    groups: tuple[GroupConfig, ...] = GROUPS,
    limits: CoreLimits | None = None,
    devices: FakeDevices | None = None,
    log_level: str = "debug",
) -> AsyncIterator[Inside]:
    """Run a driver on the journal in `directory`."""
    devices = devices or FakeDevices()
    backend = FakeBackend(devices, directory)
    membership = Membership("")
    journal = Journal.open(directory / "state", now_unix=1.0, limits=JournalLimits())
    config = MachineConfig(
        host=HOST,
        groups=groups,
        limits=limits
        or CoreLimits(retry_min_s=0.01, retry_max_s=0.05, max_evict_tries=3, qualify=False),
        generation=journal.generation,
        ceiling=journal.ceiling,
    )
    machine = Machine(config, random=Random(0), full_checks=True)
    recover(machine, journal.load(), now=time.monotonic())
    stream, broken = io.StringIO(), asyncio.Event()
    qualifying = _qualifying(machine, directory)
    # The stand-in has the one method that a scanner needs.
    scanner = Scanner(groups, devices, membership, backend)  # type: ignore[arg-type]
    scanner.recall = qualifying.recall
    try:
        async with asyncio.TaskGroup() as tasks:
            around = Surroundings(
                journal=journal,
                history=journal.open_history(1000),
                backend=backend,
                scanner=scanner,
                membership=membership,
                ledgers=_ledgers(),
                log=Log(log_level, stream=stream),
                tasks=tasks,
                qualifying=qualifying,
            )
            driver = Driver(machine, around, on_broken=broken.set)
            clients = FakeClients()
            driver.clients = clients
            driver.post(Started())
            try:
                yield Inside(driver, devices, backend, clients, stream, broken)
            finally:
                driver.close()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
    finally:
        around.log.flush()
        journal.close()
        # pytest shows this for a test that failed.
        sys.stdout.write(stream.getvalue())
