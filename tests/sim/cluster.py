"""Several hosts, their network, and jobs that share their devices: made from a seed.

Nothing happens in here that does not come from the seed, so a life can be lived again to see more
of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from clients import Client
from faults import verdict_of
from jobs import Job, Seat
from network import Network, over_the_wire
from referee import Referee
from sim_host import SimHost
from simulated import job
from timeline import Timeline
from world import LIMITS

from tsliced.core.actions import Action
from tsliced.core.events import Event
from tsliced.core.model import (
    DeviceId,
    GroupConfig,
    GroupName,
    HostName,
    JobKey,
    ProcessId,
    RankState,
    SessionId,
    TenancyKey,
)

#: How many hosts there are, by how often.
HOSTS = {1: 1, 2: 5, 3: 4, 4: 1, 5: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which groups there are, and on which hosts their devices are."""

    hosts: tuple[HostName, ...]
    #: By group: its hosts, of which the first one arbitrates it.
    groups: dict[GroupName, tuple[HostName, ...]]

    def of_host(self, host: HostName) -> tuple[GroupConfig, ...]:
        """Return the configuration of a host's groups."""
        return tuple(
            GroupConfig(
                name=name,
                devices=(DeviceId(f"GPU-{host}-{name}"),) if host in hosts else (),
                order=order,
                hosts=hosts if hosts != (host,) else (),
            )
            for order, (name, hosts) in enumerate(self.groups.items())
        )


def draw_layout(random: Random, *, spanning: bool = True, apart: bool = True) -> Layout:
    """Draw a layout. `spanning`: groups over several hosts. `apart`: with different arbiters."""
    (count,) = random.choices(list(HOSTS), list(HOSTS.values()))
    hosts = tuple(HostName(f"n{number}") for number in range(1, count + 1))
    groups: dict[GroupName, tuple[HostName, ...]] = {}
    for number in range(1, random.choice((1, 2, 2, 3)) + 1):
        size = random.randint(min(2, count), count) if spanning else 1
        if number > 1 and random.random() < 0.3:
            size = 1
        first = random.choice(hosts) if apart or not groups else next(iter(groups.values()))[0]
        others = random.sample([host for host in hosts if host != first], size - 1)
        groups[GroupName(f"g{number}")] = (first, *others)
    return Layout(hosts=hosts, groups=groups)


@dataclass(slots=True, eq=False)
class Cluster:
    """All that there is in one life."""

    seed: int
    spanning: bool = True
    apart: bool = True
    full_checks: bool = True
    #: Looks at each host after each event.
    after: Callable[[SimHost, Event], None] = lambda _host, _event: None
    #: Hears of everything that is handed over and comes back.
    watch: Callable[[HostName, Event | Action], None] = lambda _host, _what: None
    #: Hears what happens beside that, in words.
    note: Callable[[str, str], None] = lambda _where, _text: None
    random: Random = field(init=False)
    timeline: Timeline = field(init=False)
    network: Network = field(init=False)
    layout: Layout = field(init=False)
    hosts: tuple[SimHost, ...] = field(init=False)
    by_name: dict[HostName, SimHost] = field(init=False)
    oracle: Referee = field(init=False)
    jobs: list[Job] = field(init=False)
    _alone_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.random, self.timeline = Random(self.seed), Timeline()
        self.network = Network(self.timeline, self.random, self._note, over_the_wire)
        self.network.delay_s = self.random.choice((0.01, 0.1, 1.0))
        self.layout = draw_layout(self.random, spanning=self.spanning, apart=self.apart)
        # Also shorter than silence that counts as lost, to be seen more often.
        self._alone_s = self.random.choice((4.0, 20.0))
        pids, requests = itertools.count(100), itertools.count(1)
        self.hosts = tuple(self._host(name, pids, requests) for name in self.layout.hosts)
        self.by_name = {host.host: host for host in self.hosts}
        self.oracle = Referee(world=self.hosts[0], worlds=self.hosts)
        self.network.join(self.hosts)
        self.jobs = [self._job(name) for name in "abc"[: self.random.choice((2, 3))]]
        for host in self.hosts:
            host.watch = self._watcher_of(host.host)
            host.boot_up()
        for one in self.jobs:
            one.begin()

    def _host(self, name: HostName, pids: Iterator[int], requests: Iterator[int]) -> SimHost:
        host = SimHost(
            host=name,
            groups=self.layout.of_host(name),
            limits=replace(LIMITS, block=16, alone_s=self._alone_s, qualify=self.seed % 2 == 0),
            seed=self.seed,
            full_checks=self.full_checks,
            pids=pids,
            requests=requests,
            timeline=self.timeline,
            network=self.network,
            random=self.random,
            after=lambda host, event: self.after(host, event),
            told=self._on_told,
            note=self._note,
            held_by=self.held_by,
            skew_s=self.random.random() * 1000.0,
        )
        host.verdict = verdict_of(host)
        return host

    def _note(self, where: str, text: str) -> None:
        self.note(where, text)

    def _watcher_of(self, host: HostName) -> Callable[[Event | Action], None]:
        def watch(what: Event | Action) -> None:
            self.watch(host, what)
            self.oracle.hear(host, what)

        return watch

    # --- jobs ---------------------------------------------------------------------------------

    def _job(self, name: str) -> Job:
        random = self.random
        first, *others = self.layout.groups
        # Two of them at least have something to share.
        groups: tuple[GroupName, ...] = (
            first if name in "ab" else random.choice([first, *others]),
        )
        # A driver of ranks on other hosts may be on one that has nothing of the group.
        anywhere = random.random() < 0.2
        seats = [Seat(random.choice(self.hosts if anywhere else self.hosts_of(groups)))]
        wants = [groups]
        if random.random() < 0.4:
            wants += self._ways_to_lease(seats[0].host)
        elif random.random() < 0.5:
            seats = [Seat(host) for host in self.hosts_of(groups)] or seats
        return Job(
            key=job(name),
            seats=seats,
            wants=wants,
            hosts=self.hosts,
            turns=random.randint(3, 5),
            timeline=self.timeline,
            random=random,
            make_context=self.make_context,
            impatience=random.choice((0.0, 0.1, 0.3)),
            hooks=random.random() < 0.4,
        )

    def _ways_to_lease(self, front: SimHost) -> list[tuple[GroupName, ...]]:
        """Return what a job leases from turn to turn: single groups and several at once."""
        names = [group.name for group in front.groups]
        ways = [tuple(names), *((name,) for name in names)]
        return self.random.sample(ways, min(len(ways), self.random.randint(1, 3)))

    def _on_told(self, client: Client, action: Action) -> None:
        for one in self.jobs:
            if one.key == client.job:
                one.on_told(client, action)

    def held_by(self, owner: JobKey) -> set[GroupName]:
        """Return what a job's clients believe to hold."""
        return {
            group
            for _, client in self.clients_of(owner)
            for tokens in client.held.values()
            for group, _ in tokens
        }

    def make_context(
        self, host: SimHost, owner: JobKey, groups: Collection[GroupName], own: ProcessId | None
    ) -> None:
        """Let a job have a process on each of the groups' devices of a host."""
        devices = sorted(host.devices_of(groups))
        binds = len(devices) > 1 and self.random.random() < 0.2
        for wanted in [devices] if binds else [[device] for device in devices]:
            there = [p for p in host.processes.values() if p.job == owner]
            if any(not process.devices.isdisjoint(wanted) for process in there):
                continue
            pid = own.pid if own is not None and own not in host.processes else None
            host.context(owner, *wanted, pid=pid)
            host.look_soon()

    # --- what is where ------------------------------------------------------------------------

    def hosts_of(self, groups: Collection[GroupName]) -> list[SimHost]:
        """Return the hosts that have devices of the groups."""
        names = {host for group in groups for host in self.layout.groups[group]}
        return [host for host in self.hosts if host.host in names]

    def clients_of(self, owner: JobKey) -> list[tuple[SimHost, Client]]:
        """Return a job's clients and where they are."""
        return [
            (host, client)
            for host in self.hosts
            for client in host.clients.values()
            if client.job == owner
        ]

    def job_beside(self, tenancy: TenancyKey) -> JobKey:
        """Return the tenancy's job, or one that it may be moved for."""
        return self.random.choice([tenancy.job, *(one.key for one in self.jobs)])

    # --- daemons that come back ---------------------------------------------------------------

    def start_later(self, host: SimHost, delay_s: float) -> None:
        """Let a daemon be started again after a while."""

        def start() -> None:
            if host.powered and not host.alive:
                host.start()

        self.timeline.after(delay_s, start)

    def boot_later(self, host: SimHost, delay_s: float) -> None:
        """Let a machine have power again after a while."""

        def boot() -> None:
            if not host.powered:
                host.boot_up()

        self.timeline.after(delay_s, boot)

    # --- after the storm ----------------------------------------------------------------------

    def set_bad_luck(self, share: float) -> None:
        """Let this share of all calls fail by themselves."""
        for host in self.hosts:
            host.bad_luck = share

    def heal(self) -> None:
        """Undo everything that is wrong, and let nothing go wrong by itself any more."""
        self.network.mend_all()
        for host in self.hosts:
            host.slowness, host.bad_luck, host.failing, host.hanging = 1.0, 0.0, 0, 0
            host.fuse, host.journal_broken = None, None
            host.free_memory()
            host.go_on()
            if not host.powered:
                host.boot_up()
            elif not host.alive:
                host.start()
            host.let_calls_go()
        self.mend()

    def mend(self) -> None:
        """Do what an operator does: end what is broken for good, and let all be tried again."""
        self.note("all", "what is broken is ended, and all faults are cleared")
        for host in self.hosts:
            for process in list(host.processes.values()):
                if process.state is RankState.FAILED:
                    host.die(process.id)
            for one in self.jobs:
                host.clear(one.key)
            host.look_soon()

    def unrest(self) -> str:
        """Return what is not at rest, in words."""
        return "; ".join(one.unrest() for one in self.jobs if not one.content) or "too few switches"

    def send_all_away(self) -> None:
        """Let all clients and all processes leave, in any order."""
        for host in self.hosts:
            for client in list(host.clients.values()):
                if not client.ended and self.random.random() < 0.5:
                    host.close(client.session)
            processes = {*host.processes, *(client.process for client in host.clients.values())}
            for process in sorted(processes):
                self.timeline.after(self.random.random(), partial(host.die, process))

    def make_up_for_lost_records(self) -> None:
        """Start the daemons again whose journals missed something."""
        for host in self.hosts:
            if host.was_broken:
                host.kill()
                host.start()

    def owner_of(self, session: SessionId) -> JobKey | None:
        """Return whose session it is."""
        clients = (host.clients.get(session) for host in self.hosts)
        return next((client.job for client in clients if client is not None), None)
