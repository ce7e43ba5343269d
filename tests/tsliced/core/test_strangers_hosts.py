"""Strangers on hosts that are not the arbiter's: they leave, get turns, and find their jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hosts_lab import N1, N2, G, Lab, ask, device, held, hold, pair, release, states
from simulated import job
from world import LIMITS

from tsliced.core.model import HostName, JobKey, ProcessId, RankState

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED
FREEZING = replace(LIMITS, stranger_turn_s=20.0, orphan_s=60.0)
A, B = job("a"), job("b")


def freezing() -> Lab:
    """Return two hosts that share a group and take strangers off it."""
    lab = pair(FREEZING)
    for world in lab.worlds.values():
        world.freeze_strangers = world.machine.tenancies.freeze = True
    return lab


def stranger_on(lab: Lab, host: HostName, pid: int | None = None) -> ProcessId:
    """Let a process of no known job be seen on a host's device."""
    stranger = lab[host].context(None, device(host, G), pid=pid)
    lab[host].look()
    lab.run()
    return stranger


def stranger_of(process: ProcessId, host: HostName) -> JobKey:
    return JobKey("lab", 0, f"stranger-{process.pid}-{host}")


def turns(lab: Lab) -> set[JobKey]:
    """Return for which jobs the arbiter has turns that nobody asked for."""
    return {key.job for key in lab[N1].machine.leasing.turns.values()}


@pytest.mark.parametrize("restarted", [None, N1, N2])
def test_a_stranger_on_another_host_makes_room_and_gets_turns_until_it_is_gone(
    restarted: HostName | None,
) -> None:
    lab = freezing()
    stranger = stranger_on(lab, N2)
    lease = ask(lab, "a")
    assert held(lab, lease, N1)
    assert lab[N2].state(stranger) is PARKED
    if restarted is not None:
        lab.restart(restarted)
        lab.run()
    lab.pass_time(1.0)
    assert turns(lab) == {stranger_of(stranger, N2)}
    again = ask(lab, "b")
    release(lab, lease)
    assert lab[N2].state(stranger) is RUNNING
    lab.pass_time(19.0, step_s=0.5)
    assert not held(lab, again, N1)
    lab.pass_time(2.0, step_s=0.5)
    assert held(lab, again, N1)
    assert lab[N2].state(stranger) is PARKED
    lab[N2].die(stranger)
    lab.run()
    assert turns(lab) == set()
    assert not lab[N2].machine.tenancies.stranger_jobs
    assert not lab[N1].machine.tenancies.abroad


def test_strangers_of_two_hosts_with_the_same_number_are_two() -> None:
    lab = freezing()
    strangers = [stranger_on(lab, host, pid=4711) for host in (N1, N2)]
    assert held(lab, ask(lab, "a"), N1)
    assert states(lab, strangers) == [PARKED, PARKED]
    lab.pass_time(1.0)
    mine = JobKey("lab", 0, "stranger-4711-n1")
    assert turns(lab) == {mine, stranger_of(strangers[1], N2)}


def test_a_stranger_on_another_host_is_nobodys_orphan() -> None:
    lab = freezing()
    stranger = stranger_on(lab, N2)
    assert held(lab, ask(lab, "a"), N1)
    lab.restart(N1)
    lab.pass_time(300.0, step_s=5.0)
    assert not lab[N1].notes("orphaned")
    assert stranger in lab[N2].processes


def test_a_stranger_on_another_host_that_says_hello_is_its_jobs_rank_and_has_no_turns() -> None:
    lab = freezing()
    stranger = stranger_on(lab, N2)
    lease = ask(lab, "b")
    lab.pass_time(1.0)
    session = lab[N2].session(A, pid=stranger.pid)
    mine = lab[N2].acquire(session, G)
    lab.run()
    assert turns(lab) == set()
    assert lab[N2].state(stranger) is PARKED
    release(lab, lease)
    assert held(lab, mine, N2)
    assert lab[N2].state(stranger) is RUNNING
    assert {key.job for key in lab[N1].machine.tenancies.abroad.values()} == {A}


def test_a_parked_stranger_joins_a_job_that_holds_and_comes_back_to_it() -> None:
    lab = freezing()
    stranger = stranger_on(lab, N2)
    lease, ranks = hold(lab, "a")
    assert lab[N2].state(stranger) is PARKED
    lab[N2].processes[stranger].job = A
    lab[N2].session(A, pid=stranger.pid)
    lab.run()
    assert held(lab, lease, N1)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert lab[N2].state(stranger) is RUNNING


def test_a_stranger_is_nobody_elses_while_the_arbiters_host_moves_it() -> None:
    lab = freezing()
    stranger = stranger_on(lab, N2)
    lab.by_hand()
    lease = lab[N1].acquire(lab[N1].session(B), G)
    while lab[N2].state(stranger) is RUNNING:
        assert lab.step()
    # It is frozen here, and the arbiter has not said yet what comes next.
    lab[N2].session(A, pid=stranger.pid)
    assert lab[N2].machine.tenancies.home[stranger].job == stranger_of(stranger, N2)
    lab.by_itself()
    assert held(lab, lease, N1)
    assert lab[N2].machine.tenancies.home[stranger].job == A
    assert lab[N2].state(stranger) is PARKED


def test_a_stranger_that_comes_while_a_job_holds_leaves_before_the_next_one() -> None:
    lab = freezing()
    first, _ = hold(lab, "a")
    stranger = stranger_on(lab, N2)
    second = ask(lab, "b", N2)
    release(lab, first)
    assert held(lab, second, N2)
    assert lab[N2].state(stranger) is PARKED
