"""Leases over groups with different arbiters: reserved in order, moved together, given back."""

from __future__ import annotations

from hosts_lab import N1, N2, Lab, device
from simulated import job

from tsliced.core.model import GroupName, HostName, LeaseId, ProcessId, RankState, SessionId

A, B = GroupName("a"), GroupName("b")
RUNNING, PARKED = RankState.RUNNING, RankState.PARKED


def lab() -> Lab:
    """Two hosts, each with a group of its own."""
    return Lab({A: (N1,), B: (N2,)})


def session_of(lease: LeaseId) -> SessionId:
    """Return the session that a lease is of."""
    return SessionId(lease.rpartition(".")[0])


def held(lab: Lab, lease: LeaseId, host: HostName) -> bool:
    """Whether a client believes to hold a lease."""
    return lease in lab[host].clients[session_of(lease)].held


def come_up(lab: Lab, name: str, host: HostName, group: GroupName) -> ProcessId:
    """Let a job make a context on a host's device, and the daemon see it."""
    rank = lab[host].context(job(name), device(host, group))
    lab[host].look()
    lab.run()
    return rank


def test_two_jobs_that_lease_both_groups_alternate_and_move_as_one() -> None:
    hosts = lab()
    session = hosts[N1].session(job("a"))
    first = hosts[N1].acquire(session, A, B)
    hosts.run()
    assert held(hosts, first, N1)
    ranks = [come_up(hosts, "a", N1, A), come_up(hosts, "a", N2, B)]
    other = hosts[N2].session(job("b"))
    second = hosts[N2].acquire(other, A, B)
    hosts.run()
    assert not held(hosts, second, N2)
    hosts[N1].release(first)
    hosts.run()
    assert held(hosts, second, N2)
    assert [hosts[N1].state(ranks[0]), hosts[N2].state(ranks[1])] == [PARKED, PARKED]
    others = [come_up(hosts, "b", N1, A), come_up(hosts, "b", N2, B)]
    third = hosts[N1].acquire(session, A, B)
    hosts.run()
    hosts[N2].release(second)
    hosts.run()
    assert held(hosts, third, N1)
    assert [hosts[N1].state(ranks[0]), hosts[N2].state(ranks[1])] == [RUNNING, RUNNING]
    assert [hosts[N1].state(others[0]), hosts[N2].state(others[1])] == [PARKED, PARKED]


def test_a_part_that_is_leased_alone_is_moved_alone_again() -> None:
    hosts = lab()
    session = hosts[N1].session(job("a"))
    both = hosts[N1].acquire(session, A, B)
    hosts.run()
    ranks = [come_up(hosts, "a", N1, A), come_up(hosts, "a", N2, B)]
    hosts[N1].release(both)
    alone = hosts[N1].acquire(session, B)
    hosts.run()
    assert held(hosts, alone, N1)
    hosts[N1].release(alone)
    other = hosts[N2].session(job("b"))
    lease = hosts[N2].acquire(other, B)
    hosts.run()
    assert held(hosts, lease, N2)
    assert [hosts[N1].state(ranks[0]), hosts[N2].state(ranks[1])] == [RUNNING, PARKED]


def test_what_was_leased_together_leaves_together_though_only_a_part_is_wanted() -> None:
    hosts = lab()
    session = hosts[N1].session(job("a"))
    both = hosts[N1].acquire(session, A, B)
    hosts.run()
    ranks = [come_up(hosts, "a", N1, A), come_up(hosts, "a", N2, B)]
    again = hosts[N1].acquire(hosts[N1].session(job("a")), A, B)
    hosts[N1].release(both)
    hosts.run()
    hosts[N1].release(again)
    hosts.run()
    other = hosts[N2].session(job("b"))
    lease = hosts[N2].acquire(other, B)
    hosts.run()
    assert held(hosts, lease, N2)
    assert [hosts[N1].state(ranks[0]), hosts[N2].state(ranks[1])] == [PARKED, PARKED]
