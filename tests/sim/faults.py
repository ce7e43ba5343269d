"""Everything that can go wrong, by name, aimed at a tenancy that is being moved.

A fault returns whether there was anything that it could befall. What lasts is undone by itself
after a while, or when the simulation heals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chaos import CAUSES
from sim_host import SimHost
from simulated import Process, failure

from tsliced.core.model import HostName, Reason, TenancyKey, Verb

if TYPE_CHECKING:
    from cluster import Cluster


#: How long what passes by itself lasts, seconds at most: well beyond what counts as lost.
LASTS_S = 25.0


class Target:
    """What a fault is aimed at: a tenancy, its hosts, and its job."""

    def __init__(self, cluster: Cluster, tenancy: TenancyKey, coordinator: HostName) -> None:
        self.cluster, self.tenancy = cluster, tenancy
        self.random = cluster.random
        self.hosts = cluster.hosts_of(tenancy.groups)
        self.coordinator = cluster.by_name[coordinator]

    def host(self) -> SimHost:
        """Return one of its hosts: its coordinator's half of the time."""
        others = [host for host in self.hosts if host is not self.coordinator]
        if not others or self.random.random() < 0.5:
            return self.coordinator
        return self.random.choice(others)

    def host_with_ranks(self) -> SimHost:
        """Return a host on which a call can be made for its job, if there is any."""
        processes = self.processes()
        return self.random.choice(processes)[0] if processes else self.host()

    def link(self) -> tuple[HostName, HostName] | None:
        """Return the link between its coordinator and another of its hosts, in either direction."""
        others = [host.host for host in self.hosts if host is not self.coordinator]
        if not others:
            return None
        pair = [self.coordinator.host, self.random.choice(others)]
        self.random.shuffle(pair)
        return pair[0], pair[1]

    def lasts_s(self) -> float:
        """Return how long something lasts: often short, sometimes beyond every patience."""
        return self.random.random() ** 2 * LASTS_S

    def processes(self) -> list[tuple[SimHost, Process]]:
        """Return the processes of its job."""
        return [
            (host, process)
            for host in self.hosts
            for process in host.processes.values()
            if process.job == self.tenancy.job
        ]


Fault = Callable[[Target], bool]


def _drop_connection(target: Target) -> bool:
    if (link := target.link()) is None:
        return False
    target.cluster.network.drop(*link)
    return True


def _connect_again(target: Target) -> bool:
    if (link := target.link()) is None:
        return False
    target.cluster.network.renew(*link)
    return True


def _cut_one_way(target: Target) -> bool:
    if (link := target.link()) is None:
        return False
    _cut_for(target, [link])
    return True


def _partition(target: Target) -> bool:
    """Part the hosts into two sets that do not hear each other."""
    if (link := target.link()) is None:
        return False
    here = {link[0]}
    names = sorted(target.cluster.by_name)
    here |= {name for name in names if name != link[1] and target.random.random() < 0.5}
    apart = [(one, other) for one in names for other in names if (one in here) != (other in here)]
    _cut_for(target, apart)
    return True


def _cut_for(target: Target, directions: Sequence[tuple[HostName, HostName]]) -> None:
    network = target.cluster.network
    for source, sink in directions:
        network.cut(source, sink)

    def mend() -> None:
        for source, sink in directions:
            network.mend(source, sink)

    target.cluster.timeline.after(target.lasts_s(), mend)


def _kill_daemon(target: Target) -> bool:
    host = target.host()
    if not host.alive:
        return False
    if target.random.random() < 0.5:
        # In the middle of what it does next: between a record and what it announces.
        host.fuse = target.random.randint(1, 5)
        target.cluster.timeline.after(0.5, lambda: _kill(target, host))
    else:
        _kill(target, host)
    return True


def _kill(target: Target, host: SimHost) -> None:
    if host.alive:
        host.kill()
    target.cluster.start_later(host, target.lasts_s())


def _lose_power(target: Target) -> bool:
    host = target.host()
    if not host.powered:
        return False
    host.lose_power()
    target.cluster.oracle.on_power_lost()
    target.cluster.boot_later(host, 1.0 + target.lasts_s())
    return True


def _pause_daemon(target: Target) -> bool:
    host = target.host()
    if not host.alive or host.paused:
        return False
    host.pause()
    target.cluster.timeline.after(target.lasts_s(), host.go_on)
    return True


def _jump_clock(target: Target) -> bool:
    target.host().jump(target.random.choice((3.0, 30.0, 300.0)))
    return True


def _slow_down(target: Target) -> bool:
    host = target.host()
    host.slowness = 10.0

    def recover() -> None:
        host.slowness = 1.0

    target.cluster.timeline.after(target.lasts_s(), recover)
    return True


def _hang(target: Target) -> bool:
    host = target.host()
    host.hanging = 1
    target.cluster.timeline.after(target.random.random() * 120.0, host.let_calls_go)
    return True


def _fail(target: Target) -> bool:
    host = target.host_with_ranks()
    host.failing = target.random.choice((1, 1, 2, 5))
    return True


def _keep_memory(target: Target) -> bool:
    """Let snapshots claim to succeed that free no device memory."""
    host = target.host()
    host.noop_snapshots = True
    target.cluster.timeline.after(target.lasts_s(), host.free_memory)
    return True


def _fill_disk(target: Target) -> bool:
    host = target.host()
    host.fill_disk()
    target.cluster.timeline.after(target.lasts_s(), host.empty_disk)
    return True


def _kill_rank(target: Target) -> bool:
    processes = target.processes()
    if not processes:
        return False
    host, process = target.random.choice(processes)
    host.die(process.id)
    return True


def _kill_client(target: Target) -> bool:
    clients = target.cluster.clients_of(target.cluster.job_beside(target.tenancy))
    if not clients:
        return False
    host, client = target.random.choice(clients)
    host.die(client.process)
    return True


def _disconnect_client(target: Target) -> bool:
    clients = target.cluster.clients_of(target.cluster.job_beside(target.tenancy))
    here = [(h, c) for h, c in clients if c.connected and h.alive and not h.paused]
    if not here:
        return False
    host, client = target.random.choice(here)
    host.disconnect(client.session)
    return True


def _cancel(target: Target) -> bool:
    jobs = [job for job in target.cluster.jobs if set(job.groups) & set(target.tenancy.groups)]
    return any(job.cancel_one() for job in jobs)


FAULTS: dict[str, Fault] = {
    "connection lost": _drop_connection,
    "connected again": _connect_again,
    "cut one way": _cut_one_way,
    "partition": _partition,
    "daemon killed": _kill_daemon,
    "power lost": _lose_power,
    "daemon stopped": _pause_daemon,
    "clock jumps": _jump_clock,
    "slow calls": _slow_down,
    "call hangs": _hang,
    "call fails": _fail,
    "memory stays": _keep_memory,
    "disk full": _fill_disk,
    "rank dies": _kill_rank,
    "client dies": _kill_client,
    "client cut off": _disconnect_client,
    "cancelled": _cancel,
}
#: Those for which a tenancy must be on several hosts.
OF_LINKS = frozenset({"connection lost", "connected again", "cut one way", "partition"})


def verdict_of(host: SimHost) -> Callable[[Verb, Process], Reason | None]:
    """Return what says how calls on a host end: as planned, or by bad luck."""

    def verdict(verb: Verb, process: Process) -> Reason | None:
        if host.failing:
            host.failing -= 1
        elif host.random.random() >= host.bad_luck:
            return None
        return failure(host.random.choice(CAUSES[verb]), process.id, host.host)

    return verdict
