"""Groups over several hosts: who is let on, moved, and told, wherever it is."""

from __future__ import annotations

from hosts_lab import N1, N2, Lab, device
from simulated import job

from tsliced.core.model import GroupName, HostName, LeaseId, ProcessId, RankState

G = GroupName("g")
RUNNING, PARKED, FROZEN = RankState.RUNNING, RankState.PARKED, RankState.FROZEN


def lab() -> Lab:
    """Two hosts that share one group, which the first one arbitrates."""
    return Lab({G: (N1, N2)})


def hold(lab: Lab, name: str, host: HostName = N1) -> tuple[LeaseId, list[ProcessId]]:
    """Let a job acquire the group from a host and come up with a rank on each host."""
    session = lab[host].session(job(name))
    lease = lab[host].acquire(session, G)
    lab.run()
    return lease, [come_up(lab, name, host) for host in (N1, N2)]


def come_up(lab: Lab, name: str, host: HostName) -> ProcessId:
    """Let a job make a context on a host's device, and the daemon see it."""
    rank = lab[host].context(job(name), device(host, G))
    lab[host].look()
    lab.run()
    return rank


def held(lab: Lab, lease: LeaseId, host: HostName) -> bool:
    """Whether a client believes to hold a lease."""
    session, _, _ = lease.rpartition(".")
    return lease in lab[host].clients[session].held  # type: ignore[index]  # a session's id


def states(lab: Lab, ranks: list[ProcessId]) -> list[RankState]:
    """Return where ranks on the first host and the second are."""
    return [lab[host].state(rank) for host, rank in zip((N1, N2), ranks, strict=True)]


def test_a_job_with_ranks_on_two_hosts_leaves_and_comes_back_on_both() -> None:
    hosts = lab()
    first, ranks = hold(hosts, "a")
    second_session = hosts[N2].session(job("b"))
    second = hosts[N2].acquire(second_session, G)
    hosts.run()
    assert held(hosts, first, N1)
    assert states(hosts, ranks) == [RUNNING, RUNNING]
    hosts[N1].release(first)
    hosts.run()
    assert held(hosts, second, N2)
    assert states(hosts, ranks) == [PARKED, PARKED]
    others = [come_up(hosts, "b", host) for host in (N1, N2)]
    again = hosts[N1].acquire(hosts[N1].clients[first.rpartition(".")[0]].session, G)  # type: ignore[index]
    hosts.run()
    assert not held(hosts, again, N1)
    hosts[N2].release(second)
    hosts.run()
    assert held(hosts, again, N1)
    assert states(hosts, ranks) == [RUNNING, RUNNING]
    assert states(hosts, others) == [PARKED, PARKED]
