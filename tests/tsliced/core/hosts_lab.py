"""Several simulated hosts whose machines talk to each other."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from world import LIMITS, World

from tsliced.core.actions import Action, Send
from tsliced.core.events import HostDied, PeerConnected, PeerDisconnected, PeerLost, PeerSaid
from tsliced.core.messages import PeerMessage
from tsliced.core.model import CoreLimits, DeviceId, GroupConfig, GroupName, HostName

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
            self[host].feed(PeerConnected(host=other, boot=boot))

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

    def restart(self, host: HostName) -> None:
        """Kill a daemon and start it again; its links come up anew."""
        self.isolate(host)
        self[host].outbox.clear()
        self[host].restart()
        self.rejoin(host)

    def reboot(self, host: HostName) -> None:
        """Let a host lose its power and come back: nothing that was there is left."""
        self.isolate(host)
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

    def pass_time(self, seconds: float, *, step_s: float = 0.1) -> None:
        """Let time go by on all hosts alike."""
        for _ in range(round(seconds / step_s)):
            for world in self.worlds.values():
                world.pass_time(step_s)
            self.run()
