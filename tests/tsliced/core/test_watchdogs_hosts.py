"""Watchdogs of ranks on other hosts than the one that moves their tenancy."""

from __future__ import annotations

import dataclasses

import arbiters_lab as arbiters
import pytest
from hosts_lab import N1, N2, G, Lab, ask, device, held, pair, release, session_of
from simulated import job
from world import LIMITS

from tsliced.core.actions import TellWarning
from tsliced.core.events import GroupsObserved, WatchdogTold
from tsliced.core.model import HostName, JobKey, LeaseId, ProcessId, RankState, SessionId
from tsliced.core.watchdogs import NEAR

A, B = job("a"), job("b")
HELD_S = 50.0
HOLD = dataclasses.replace(LIMITS, max_hold_s=10.0, hold_warning_s=1.0)


def others_hold(lab: Lab) -> None:
    """Let it be known that others hold the group for long."""
    lease = ask(lab, "c")
    lab.pass_time(HELD_S, step_s=5.0)
    release(lab, lease)
    lab[N1].close(session_of(lease))
    lab.run()


def rank_of(lab: Lab, owner: JobKey, host: HostName) -> tuple[SessionId, ProcessId]:
    """Let a client of a job make a context on its host's device, and the daemon see it."""
    session = lab[host].session(owner)
    pid = lab[host].process_of(session).pid
    rank = lab[host].context(owner, device(host, G), pid=pid)
    lab[host].processes[rank].lawful = True
    lab[host].look()
    lab.run()
    return session, rank


def tell(lab: Lab, host: HostName, session: SessionId, limit_s: float | None) -> None:
    """Let a client say how long its watchdogs wait."""
    lab[host].feed(WatchdogTold(session=session, limit_s=limit_s))
    lab.run()


def started_with(lab: Lab, host: HostName, limit_s: float) -> None:
    """Let the daemon see with which watchdogs the processes on a host were started."""
    found = lab[host].found(frozenset({device(host, G)}))
    seen = tuple(dataclasses.replace(process, watchdog_s=limit_s) for process in found)
    lab[host].feed(GroupsObserved(found=seen))
    lab.run()


def test_a_lease_is_not_taken_back_if_a_watchdog_on_another_host_would_not_outlast_it() -> None:
    lab = pair(HOLD)
    others_hold(lab)
    lease = ask(lab, "a")
    session, rank = rank_of(lab, A, N2)
    tell(lab, N2, session, HELD_S - 1)
    waiter = ask(lab, "b", N2)
    lab.pass_time(30.0, step_s=0.5)
    assert held(lab, lease, N1)
    (note,) = lab[N1].notes("pause_refused")
    assert (note.facts["rank"], note.facts["limit_s"]) == (f"n2:{rank.pid}", HELD_S - 1)
    # It says that it can wait for longer: then the lease is taken back after all.
    tell(lab, N2, session, 1000.0)
    lab.pass_time(2 * LIMITS.retry_max_s)
    assert held(lab, waiter, N2)


def test_a_process_on_another_host_that_never_asked_is_not_frozen_either() -> None:
    lab = pair()
    others_hold(lab)
    rank = lab[N2].context(A, device(N2, G))
    started_with(lab, N2, 10.0)
    waiter = ask(lab, "b")
    lab.pass_time(3 * LIMITS.retry_max_s)
    assert not held(lab, waiter, N1)
    assert lab[N2].state(rank) is RankState.RUNNING
    assert lab[N1].notes("pause_refused")[0].facts["rank"] == f"n2:{rank.pid}"


def parked(lab: Lab, limit_s: float | None) -> tuple[LeaseId, SessionId, ProcessId]:
    """Let job a, with a rank on the second host, be parked for job b."""
    lease = ask(lab, "a")
    session, rank = rank_of(lab, A, N2)
    tell(lab, N2, session, limit_s)
    release(lab, lease)
    assert held(lab, ask(lab, "b"), N1)
    assert lab[N2].state(rank) is RankState.PARKED
    return lease, session, rank


def test_a_job_that_is_parked_for_nearly_as_long_as_a_watchdog_elsewhere_waits_is_named() -> None:
    lab = pair()
    lease, _, rank = parked(lab, 30.0)
    lab.pass_time(NEAR * 30.0 - 1, step_s=0.5)
    assert lab[N1].notes("watchdog") == []
    lab.pass_time(2.0, step_s=0.5)
    (note,) = lab[N1].notes("watchdog")
    assert (note.facts["rank"], note.facts["limit_s"]) == (f"n2:{rank.pid}", 30.0)
    (told,) = lab[N1].all_of(TellWarning)
    assert told.session == session_of(lease)
    assert f"process {rank.pid} on n2 waits for 30 s" in told.text


def test_a_watchdog_that_is_told_there_while_parked_counts_from_the_beginning() -> None:
    lab = pair()
    _, session, _ = parked(lab, None)
    lab.pass_time(NEAR * 30.0 - 10, step_s=0.5)
    tell(lab, N2, session, 30.0)
    lab.pass_time(9.0, step_s=0.5)
    assert lab[N1].notes("watchdog") == []
    lab.pass_time(2.0, step_s=0.5)
    assert len(lab[N1].notes("watchdog")) == 1


def test_after_a_restart_of_either_host_a_watchdog_is_known_that_a_process_was_started_with() -> (
    None
):
    lab = pair(HOLD)
    lease = ask(lab, "a")
    rank = lab[N2].context(A, device(N2, G))
    lab[N2].processes[rank].lawful = True
    started_with(lab, N2, HELD_S - 1)
    for host in (N2, N1):
        lab.restart(host)
        lab.run()
    started_with(lab, N2, HELD_S - 1)
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(A)
    watchdog = lab[N1].machine.leasing.watchdog_of(tenancy)
    assert watchdog is not None
    assert (watchdog.rank.host, watchdog.limit_s) == (N2, HELD_S - 1)
    assert held(lab, lease, N1)


# ---- over arbiters of their own


def test_who_moves_a_job_over_arbiters_knows_of_watchdogs_wherever_they_are() -> None:
    lab = arbiters.two(HOLD)
    other = arbiters.ask(lab, "c", N1, arbiters.A, arbiters.B)
    lab.pass_time(HELD_S, step_s=5.0)
    arbiters.give_back(lab, other, N1)
    lab[N1].close(session_of(other))
    # First its own arbiter moves it, then the one of the joint lease.
    session = lab[N2].session(A)
    first = lab[N2].acquire(session, arbiters.B)
    lab.run()
    pid = lab[N2].process_of(session).pid
    rank = lab[N2].context(A, device(N2, arbiters.B), pid=pid)
    lab[N2].processes[rank].lawful = True
    lab[N2].look()
    tell(lab, N2, session, HELD_S - 1)
    arbiters.give_back(lab, first, N2)
    lease = arbiters.ask(lab, "a", N1, arbiters.A, arbiters.B)
    waiter = arbiters.ask(lab, "b", N1, arbiters.A)
    lab.pass_time(30.0, step_s=0.5)
    assert held(lab, lease, N1)
    assert not held(lab, waiter, N1)
    (note,) = lab[N1].notes("pause_refused")
    assert note.facts["rank"] == f"n2:{rank.pid}"


@pytest.mark.parametrize("limit_s", [HELD_S - 1, HELD_S + 1])
def test_an_arbiter_knows_for_how_long_rounds_of_other_hosts_hold_its_group(limit_s: float) -> None:
    lab = arbiters.two(HOLD)
    other = arbiters.ask(lab, "c", N1, arbiters.A, arbiters.B)
    lab.pass_time(HELD_S, step_s=5.0)
    arbiters.give_back(lab, other, N1)
    session = lab[N2].session(A)
    lease = lab[N2].acquire(session, arbiters.B)
    lab.run()
    pid = lab[N2].process_of(session).pid
    lab[N2].processes[lab[N2].context(A, device(N2, arbiters.B), pid=pid)].lawful = True
    lab[N2].look()
    tell(lab, N2, session, limit_s)
    arbiters.ask(lab, "b", N2, arbiters.B)
    lab.pass_time(30.0, step_s=0.5)
    assert held(lab, lease, N2) is (limit_s < HELD_S)
