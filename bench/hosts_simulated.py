"""Switches over many hosts, all in this process: real cores and real messages, but no network.

Each host has the core that its daemon would have, and what hosts say goes through the codec of
their links. Operations take no time, so what is left is what daemons compute.

Participants work one after the other here, and at the same time on machines of their own. So a
switch is reckoned to take what the coordinator's host computes and, for each round trip, what the
slowest participant computes. This is counted in processor time, because other programs share the
machine and nothing here ever waits.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from libtimeslice.protocol import HEADER_BYTES
from tsliced.core.actions import (
    Action,
    Grant,
    ReserveDeviceMemory,
    ReserveHostMemory,
    ReserveNumbers,
    ScanGroups,
    Send,
    StartOperation,
)
from tsliced.core.events import (
    AcquireRequested,
    Event,
    GroupsScanned,
    MemoryReserved,
    NumbersReserved,
    OperationFinished,
    PeerConnected,
    PeerSaid,
    RankRegistered,
    ReleaseRequested,
    SessionOpened,
    Started,
)
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.model import (
    CoreLimits,
    DeviceId,
    FoundRank,
    GroupConfig,
    GroupName,
    HostName,
    JobKey,
    ProcessId,
    RankState,
    RequestId,
    SessionId,
    Verb,
)
from tsliced.core.value import maker
from tsliced.daemon import GC_THRESHOLDS
from tsliced.net.peer_codec import Encoder, decode_untrusted
from tsliced.net.peer_messages import Frames, Say

GROUP = GroupName("g")
JOBS = tuple(JobKey("bench", 1000, name) for name in ("first", "second"))
FRAME_BYTES = 1 << 20
#: Where each operation leads, at once.
OUTCOMES = {
    Verb.FREEZE: RankState.FROZEN,
    Verb.SNAPSHOT: RankState.PARKED,
    Verb.RESTORE: RankState.FROZEN,
    Verb.THAW: RankState.RUNNING,
}

#: As `Peers` makes them.
_make_said = maker(PeerSaid)


class Frame(NamedTuple):
    """What one host says to another."""

    source: HostName
    target: HostName
    data: bytes


@dataclass(slots=True, kw_only=True)
class SwitchCost:
    """What one switch took, from the release to the grant."""

    #: Processor time of the coordinator's host: its core and its end of the codec.
    coordinator_s: float = 0.0
    #: The same by the clock on the wall.
    coordinator_wall_s: float = 0.0
    #: Processor time of the slowest participant of each round trip, added up.
    participants_s: float = 0.0
    #: Orders to all other hosts, and the reports of all of them.
    round_trips: int = 0
    #: How many messages of each kind were said.
    said: Counter[str] = field(default_factory=Counter)

    @property
    def overhead_s(self) -> float:
        """How long it takes beyond its operations and the network."""
        return self.coordinator_s + self.participants_s


class Host:
    """One host, whose operations are done as soon as they are wanted."""

    def __init__(self, name: HostName, hosts: tuple[HostName, ...]) -> None:
        devices = (DeviceId(f"GPU-{name}"),)
        group = GroupConfig(name=GROUP, devices=devices, order=0, hosts=hosts)
        config = MachineConfig(
            host=name, groups=(group,), limits=CoreLimits(qualify=False), generation=1, ceiling=0
        )
        self.name = name
        self.grants: list[Grant] = []
        self._machine = Machine(config, random=Random(0))
        self._encoder, self._frames = Encoder(), Frames(max_bytes=FRAME_BYTES)
        #: What has ended here and its core does not know yet.
        self._ended: deque[Event] = deque([Started()])

    def hear(self, frames: Iterable[Frame]) -> list[Frame]:
        """Takes in what other hosts say, and returns what they are told then."""
        return self.feed(map(self._decode, frames))

    def feed(self, events: Iterable[Event]) -> list[Frame]:
        """Hands events to the core, and returns what other hosts are told."""
        sends: list[Send] = []
        handle, now = self._machine.handle, time.monotonic()
        for event in events:
            for action in handle(event, now=now).actions:
                if isinstance(action, Send):
                    sends.append(action)
                else:
                    self._do(action)
        encode, seal = self._encoder.encode, self._frames.seal
        return [Frame(self.name, send.host, seal(encode(send.message))) for send in sends]

    def work(self) -> list[Frame]:
        """Lets operations end, and those that follow; returns what other hosts are told then."""
        said: list[Frame] = []
        while self._ended:
            said += self.feed([self._ended.popleft()])
        return said

    def kind_of(self, frame: Frame) -> str:
        """Returns what a message is called on the wire."""
        return self._say(frame).kind

    def _say(self, frame: Frame) -> Say:
        message = self._frames.decode_untrusted(frame.data[HEADER_BYTES:])
        assert isinstance(message, Say), "cores say nothing else"
        return message

    def _decode(self, frame: Frame) -> Event:
        said = decode_untrusted(self._say(frame), speaker=frame.source, listener=self.name)
        return _make_said(host=frame.source, message=said)

    def _do(self, action: Action) -> None:
        match action:
            case StartOperation(op=op, rank=rank, verb=verb):
                done = OperationFinished(op=op, rank=rank, observed=OUTCOMES[verb])
                self._ended.append(done)
            case ScanGroups(op=op):
                self._ended.append(GroupsScanned(op=op))
            case ReserveHostMemory(op=op) | ReserveDeviceMemory(op=op):
                self._ended.append(MemoryReserved(op=op))
            case ReserveNumbers(ceiling=ceiling):
                self._ended.append(NumbersReserved(ceiling=ceiling))
            case Grant():
                self.grants.append(action)
            case _:
                # Answers to clients, lines for the log, and what is watched.
                pass


class Cluster:
    """Hosts that share a group, with a rank of either of two jobs on each; one of them holds it."""

    def __init__(self, count: int) -> None:
        names = tuple(HostName(f"n{number:04}") for number in range(count))
        self._hosts = {name: Host(name, names) for name in names}
        #: The group's first host, which moves both jobs. Both clients are there.
        self._first = self._hosts[names[0]]
        self._requests = 0
        self._holder, self._waiter = JOBS
        for host in self._hosts.values():
            self._talk(host.work())
        for name in names[1:]:
            # The others have nothing to say to each other.
            self._talk(self._first.feed([PeerConnected(host=name, boot="boot")]))
            self._talk(self._hosts[name].feed([PeerConnected(host=names[0], boot="boot")]))
        for number, job in enumerate(JOBS, 1):
            process = ProcessId(number, 1)
            self._ask(
                SessionOpened(
                    session=_session(job), job=job, process=process, secret=b"", groups=(GROUP,)
                )
            )
        self._acquire(self._holder)
        # Each comes onto the devices when it holds them for the first time.
        for _ in JOBS:
            self._come_up(self._holder)
            self._pass_on()

    def switch(self) -> SwitchCost:
        """Lets the waiter ask, and the holder release. Raises RuntimeError without a switch."""
        cost = self._pass_on()
        if not self._first.grants[-1].restored:
            raise RuntimeError(f"a grant without a switch: {self._first.grants[-1]}")
        return cost

    def _pass_on(self) -> SwitchCost:
        first, cost = self._first, SwitchCost()
        held = first.grants[-1]
        self._acquire(self._waiter)
        release = ReleaseRequested(
            session=held.session, request=self._next_request(), lease=held.lease
        )
        said = self._coordinate(cost, lambda: first.feed([release]))
        while True:
            answers = self._participate(said, cost)
            if first.grants[-1] is not held:
                break
            if not answers:
                raise RuntimeError(f"the group was not granted after {cost}")
            said = self._coordinate(cost, lambda answers=answers: first.hear(answers))  # type: ignore[misc]  # of a lambda
        self._holder, self._waiter = self._waiter, self._holder
        return cost

    def _coordinate(self, cost: SwitchCost, act: Callable[[], list[Frame]]) -> list[Frame]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        said = act()
        cost.coordinator_s += time.process_time() - cpu_s
        cost.coordinator_wall_s += time.perf_counter() - wall_s
        return said

    def _participate(self, said: Sequence[Frame], cost: SwitchCost) -> list[Frame]:
        """Lets each host do what it is told, and returns the answers of all."""
        answers, slowest_s = self._timed_work(self._first, [])
        for frame in said:
            of_host, spent_s = self._timed_work(self._hosts[frame.target], [frame])
            answers += of_host
            slowest_s = max(slowest_s, spent_s)
        cost.participants_s += slowest_s
        kinds = Counter(map(self._first.kind_of, [*said, *answers]))
        cost.said += kinds
        cost.round_trips += kinds["order"] > 0
        # What participants leave to the collector is nothing that the coordinator has to look at.
        gc.freeze()
        return answers

    def _timed_work(self, host: Host, frames: Sequence[Frame]) -> tuple[list[Frame], float]:
        began_s = time.process_time()
        answers = host.hear(frames)
        answers += host.work()
        return answers, time.process_time() - began_s

    # --- what happens between switches --------------------------------------------------------

    def _come_up(self, job: JobKey) -> None:
        """Lets a job have a rank on each host."""
        for number, host in enumerate(self._hosts.values()):
            process = ProcessId(100 + 2 * number + JOBS.index(job), 1)
            found = FoundRank(process=process, job=job, devices=frozenset(), device_bytes=1 << 30)
            self._talk(host.feed([RankRegistered(job=job, found=found, groups=(GROUP,))]))

    def _acquire(self, job: JobKey) -> None:
        self._ask(AcquireRequested(session=_session(job), request=self._next_request()))

    def _next_request(self) -> RequestId:
        self._requests += 1
        return RequestId(self._requests)

    def _ask(self, event: Event) -> None:
        self._talk(self._first.feed([event]))
        self._talk(self._first.work())

    def _talk(self, said: Iterable[Frame]) -> None:
        """Lets hosts answer each other until nobody has anything to say."""
        on_its_way = deque(said)
        while on_its_way:
            frame = on_its_way.popleft()
            host = self._hosts[frame.target]
            on_its_way += host.hear([frame])
            on_its_way += host.work()


def _session(job: JobKey) -> SessionId:
    return SessionId(job.id)


@contextmanager
def collected_as_in_a_daemon() -> Iterator[None]:
    """Lets the garbage collector look as often as in a daemon, and at what comes from now on."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def simulate(hosts: int, switches: int) -> list[SwitchCost]:
    """Returns what each of so many switches over so many hosts takes."""
    cluster = Cluster(hosts)
    with collected_as_in_a_daemon():
        return [cluster.switch() for _ in range(switches)]
