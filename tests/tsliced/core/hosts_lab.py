"""Several simulated hosts whose machines talk to each other."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from simulated import job
from world import LIMITS, World

from tsliced.core.actions import Action, Send
from tsliced.core.events import HostDied, PeerConnected, PeerDisconnected, PeerLost, PeerSaid
from tsliced.core.messages import PeerMessage
from tsliced.core.model import (
    CoreLimits,
    DeviceId,
    GroupConfig,
    GroupName,
    HostName,
    LeaseId,
    ProcessId,
    RankState,
    RequestId,
    SessionId,
)

N1, N2, N3 = HostName("n1"), HostName("n2"), HostName("n3")


@dataclass(slots=True, kw_only=True)
class HostWorld(World):
    """One host of several."""

    outbox: list[Send] = field(default_factory=list)

    def do(self, action: Action) -> None:
        """Do one action; what is said to other hosts is sent by the lab."""
        if isinstance(action, Send):
            self.outbox.append(action)
        else:
            World.do(self, action)


def device(host: HostName, group: GroupName) -> DeviceId:
    """Return the one device that a host has of a group."""
    return DeviceId(f"GPU-{host}-{group}")


@dataclass(slots=True)
class Lab:
    """Hosts that are connected, each with one device of each group that is on it."""

    #: By group: its hosts, the arbiter first.
    groups: dict[GroupName, tuple[HostName, ...]]
    limits: CoreLimits = LIMITS
    worlds: dict[HostName, HostWorld] = field(init=False)
    #: What is on its way.
    wire: deque[tuple[HostName, HostName, PeerMessage]] = field(default_factory=deque)
    #: Everything that was delivered.
    said: list[tuple[HostName, HostName, PeerMessage]] = field(default_factory=list)
    #: Links that are down, both ways.
    cut: set[frozenset[HostName]] = field(default_factory=set)
    boots: dict[HostName, int] = field(default_factory=dict)
    #: How often each daemon was started again.
    starts: dict[HostName, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = sorted({host for hosts in self.groups.values() for host in hosts})
        pids, requests = itertools.count(100), itertools.count(1)
        self.worlds = {
            name: HostWorld(
                host=name,
                groups=self.config_of(name),
                limits=self.limits,
                pids=pids,
                requests=requests,
            )
            for name in names
        }
        for first, second in itertools.combinations(names, 2):
            self.connect(first, second)
        self.run()

    def __getitem__(self, host: HostName) -> HostWorld:
        return self.worlds[host]

    def config_of(self, host: HostName) -> tuple[GroupConfig, ...]:
        """Return the groups as a host is configured with them."""
        return tuple(
            GroupConfig(
                name=name,
                devices=(device(host, name),) if host in hosts else (),
                order=order,
                hosts=hosts,
            )
            for order, (name, hosts) in enumerate(self.groups.items())
        )

    # --- links --------------------------------------------------------------------------------

    def connect(self, first: HostName, second: HostName) -> None:
        """Let a link come up."""
        self.cut.discard(frozenset((first, second)))
        for host, other in ((first, second), (second, first)):
            boot = f"{other} boot {self.boots.get(other, 0)}"
            run = f"{boot}/{self.starts.get(other, 0)}"
            self[host].feed(PeerConnected(host=other, boot=boot, incarnation=run))

    def disconnect(self, first: HostName, second: HostName, *, lost: bool = False) -> None:
        """Let a link go down, and what is on its way with it; `lost`: for long."""
        link = frozenset((first, second))
        if link not in self.cut:
            self.collect()
            self.cut.add(link)
            self.wire = deque(item for item in self.wire if frozenset(item[:2]) != link)
            self[first].feed(PeerDisconnected(host=second))
            self[second].feed(PeerDisconnected(host=first))
        if lost:
            self[first].feed(PeerLost(host=second))
            self[second].feed(PeerLost(host=first))

    def isolate(self, host: HostName, *, lost: bool = False) -> None:
        """Cut a host off from all others."""
        for other in self.worlds:
            if other != host:
                self.disconnect(host, other, lost=lost)

    def rejoin(self, host: HostName) -> None:
        """Connect a host with all others again."""
        for other in self.worlds:
            if other != host and frozenset((host, other)) in self.cut:
                self.connect(host, other)

    def restart(self, host: HostName, *, links: bool = True, finish: bool = True) -> None:
        """Kill a daemon and start it again; its links come up anew, or not yet.

        `finish`: as `World.restart`.
        """
        self._vanish(host)
        self.starts[host] = self.starts.get(host, 0) + 1
        self[host].restart(finish=finish)
        if links:
            self.rejoin(host)

    def _vanish(self, host: HostName) -> None:
        """Let a daemon be gone: what it had to say is lost, and the others see that it is gone."""
        self.collect()
        self.wire = deque(item for item in self.wire if host not in item[:2])
        for other in self.worlds:
            link = frozenset((host, other))
            if other != host and link not in self.cut:
                self.cut.add(link)
                self[other].feed(PeerDisconnected(host=host))

    def reboot(self, host: HostName) -> None:
        """Let a host lose its power and come back: nothing that was there is left."""
        self._vanish(host)
        old = self[host]
        self.boots[host] = self.boots.get(host, 0) + 1
        self.worlds[host] = HostWorld(
            host=host,
            groups=old.groups,
            limits=self.limits,
            pids=old.pids,
            requests=old.requests,
            now=old.now,
            durable_ceiling=old.durable_ceiling,
        )
        self.rejoin(host)

    def declare_dead(self, host: HostName) -> None:
        """Let an operator tell all others that a host is gone for good."""
        for name, world in self.worlds.items():
            if name != host:
                world.feed(HostDied(host=host, by="root"))

    # --- what is said -------------------------------------------------------------------------

    def collect(self) -> None:
        """Put on the wire what the machines want to say."""
        for name, world in self.worlds.items():
            for send in world.outbox:
                if frozenset((name, send.host)) not in self.cut:
                    self.wire.append((name, send.host, send.message))
            world.outbox.clear()

    def deliver(self) -> bool:
        """Let the oldest message arrive; return whether there was one."""
        self.collect()
        if not self.wire:
            return False
        source, target, message = self.wire.popleft()
        self.said.append((source, target, message))
        self[target].feed(PeerSaid(host=source, message=message))
        return True

    def run(self, limit: int = 10_000) -> None:
        """Let everything happen that is under way."""
        for _ in range(limit):
            for world in self.worlds.values():
                if world.auto:
                    world.run()
            if not self.deliver():
                return
        raise AssertionError("it never comes to rest")

    def by_hand(self) -> None:
        """Let nothing more happen by itself: `step` does it."""
        for world in self.worlds.values():
            world.auto = False

    def by_itself(self) -> None:
        """Let everything happen by itself again."""
        for world in self.worlds.values():
            world.auto = True
        self.run()

    def step(self) -> bool:
        """Let the next thing happen, on one host or between two; return whether there was one."""
        for world in self.worlds.values():
            if world.inbox:
                world.read()
                return True
            if world.pending:
                world.finish()
                return True
        return self.deliver()

    def count_steps(self) -> int:
        """Let everything happen, one thing after the other; return how many things that were."""
        count = 0
        while self.step():
            count += 1
        return count

    def pass_time(self, seconds: float, *, step_s: float = 0.1) -> None:
        """Let time go by on all hosts alike."""
        for _ in range(round(seconds / step_s)):
            for world in self.worlds.values():
                world.pass_time(step_s)
            self.run()


# --- what most tests begin with -------------------------------------------------------------------

#: A group of the first two hosts, which the first one arbitrates.
G = GroupName("g")


def pair(limits: CoreLimits = LIMITS) -> Lab:
    """Return two hosts that share one group, which the first one arbitrates."""
    return Lab({G: (N1, N2)}, limits)


def hold(lab: Lab, name: str, host: HostName = N1) -> tuple[LeaseId, list[ProcessId]]:
    """Let a job acquire the group from a host and come up with a rank on each host."""
    lease = ask(lab, name, host)
    assert held(lab, lease, host)
    return lease, [come_up(lab, name, at) for at in (N1, N2)]


def ask(lab: Lab, name: str, host: HostName = N1, *, timeout_s: float | None = None) -> LeaseId:
    """Let a client of a job ask for the group from a host."""
    session = lab[host].session(job(name))
    lease = lab[host].acquire(session, G, timeout_s=timeout_s)
    lab.run()
    return lease


def come_up(lab: Lab, name: str, host: HostName) -> ProcessId:
    """Let a job make a context on a host's device, and the daemon see it."""
    rank = lab[host].context(job(name), device(host, G))
    lab[host].processes[rank].lawful = True
    lab[host].look()
    lab.run()
    return rank


def release(lab: Lab, lease: LeaseId, host: HostName = N1) -> RequestId:
    """Let a client give its lease back."""
    request = lab[host].release(lease)
    lab.run()
    return request


def say(lab: Lab, source: HostName, target: HostName, message: PeerMessage) -> None:
    """Let one host say something to another one, and everything happen that follows."""
    lab[target].feed(PeerSaid(host=source, message=message))
    lab.run()


def session_of(lease: LeaseId) -> SessionId:
    """Return the session whose request a lease is named after."""
    return SessionId(lease.rpartition(".")[0])


def held(lab: Lab, lease: LeaseId, host: HostName) -> bool:
    """Whether a client of a host believes to hold a lease."""
    client = lab[host].clients.get(session_of(lease))
    return client is not None and lease in client.held


def states(lab: Lab, ranks: list[ProcessId]) -> list[RankState]:
    """Return where ranks on the first host and the second are."""
    return [lab[host].state(rank) for host, rank in zip((N1, N2), ranks, strict=True)]


def assert_alone(lab: Lab) -> None:
    """Assert that the clients that believe to hold the group are of one job."""
    holders = {
        client.job
        for world in lab.worlds.values()
        for client in world.clients.values()
        for tokens in client.held.values()
        if G in dict(tokens)
    }
    assert len(holders) <= 1, f"{holders} hold it at the same time"
