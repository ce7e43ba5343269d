"""Rounds over several groups of which one stands still: the others go on without them."""

from __future__ import annotations

import pytest
from stories import A, B, C, fails, parked, resident
from world import D2, G1, G2, LIMITS, World, job

from tsliced.core.actions import ScanGroups, StartOperation, TellStalled
from tsliced.core.model import Cause, LeaseId, RankState, Verb

D = job("d")


def causes_told(world: World, lease: LeaseId) -> list[Cause]:
    return [action.reason.cause for action in world.all_of(TellStalled) if action.lease == lease]


def mend(world: World) -> None:
    world.verdict = lambda _verb, _process: None


@pytest.mark.parametrize("early", [True, False], ids=["waits already", "comes later"])
def test_g11_who_waits_for_a_pinned_job_keeps_no_other_group_from_others(early: bool) -> None:
    world = World()
    resident(world)
    fails(world, Verb.FREEZE, Cause.UNSUPPORTED)
    single = None if early else world.acquire(world.session(B), G1)
    both = world.acquire(world.session(C), G1, G2)
    other = world.acquire(world.session(D), G2)
    assert world.waits(both)
    assert world.held(other)
    assert causes_told(world, both) == [Cause.UNSUPPORTED]
    told = next(a for a in world.all_of(TellStalled) if a.lease == both)
    assert told.job == A
    assert "tslicectl retry 1000/a" in told.way_out
    (note,) = world.notes("set_aside")
    assert (note.facts["lease"], note.facts["reason"]) == (both, str(told.reason))
    mend(world)
    world.clear(A)
    assert [note.facts["lease"] for note in world.notes("queued_again")] == [both]
    world.release(other)
    if single is not None:
        assert world.waits(both)
        world.release(single)
    assert world.held(both)


def test_g11_who_waits_for_a_blocked_group_keeps_no_other_group_from_others() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.SNAPSHOT, Cause.FAILED)
    both = world.acquire(world.session(B), G2, G1)
    other = world.acquire(world.session(C), G2)
    assert world.held(other)
    assert causes_told(world, both) == [Cause.FAILED]
    world.restart()
    assert world.waits(both)
    world.die(rank)
    world.release(other)
    assert world.held(both)


def test_g11_a_call_that_does_not_come_back_holds_up_its_own_group_only() -> None:
    world = World()
    _, ranks = resident(world)
    world.auto = False
    both = world.acquire(world.session(B), G1, G2)
    world.run_until(StartOperation, Verb.SNAPSHOT)
    world.pass_time(LIMITS.stuck_base_s + 1.0)
    assert causes_told(world, both) == [Cause.STUCK]
    other = world.acquire(world.session(C), G2)
    world.finish_next(ScanGroups)
    assert world.held(other)
    assert causes_told(world, world.acquire(world.session(D), G1, G2)) == [Cause.STUCK]
    world.auto = True
    world.run()
    world.release(other)
    assert world.held(both)
    assert {world.state(rank) for rank in ranks} == {RankState.PARKED}
    assert not world.machine.leasing.hung


def test_g11_a_tenancy_hangs_until_the_last_of_its_calls_has_come_back() -> None:
    world = World()
    resident(world, ranks=2)
    world.auto = False
    world.restart()
    world.run_until(StartOperation, Verb.QUERY)
    world.pass_time(LIMITS.stuck_base_s + 1.0)
    both = world.acquire(world.session(B), G1, G2)
    assert len(world.machine.alarms.stuck) == 2
    world.finish_next(StartOperation, Verb.QUERY)
    assert list(world.machine.leasing.aside) == [world.machine.leasing.leases[both].round]
    world.auto = True
    world.run()
    assert not world.machine.leasing.hung
    assert not world.machine.leasing.aside


def test_g11_a_lost_device_keeps_its_own_group_only() -> None:
    world = World()
    holder = world.acquire(world.session(A), G1)
    both = world.acquire(world.session(B), G1, G2)
    world.look(D2)
    single = world.acquire(world.session(C), G1)
    world.release(holder)
    assert causes_told(world, both) == [Cause.DEVICE_LOST]
    assert world.held(single)
    world.release(single)
    world.look()
    assert world.held(both)


def test_what_its_own_job_left_somewhere_is_nobody_elses_to_mend() -> None:
    world = World()
    session, _, lease = parked(world)
    world.context(A, D2)
    fails(world, Verb.FREEZE, Cause.UNSUPPORTED)
    world.look()
    # Job a waits for both; a third one finds that what a has on the second cannot be moved.
    both = world.acquire(session, G1, G2)
    third = world.acquire(world.session(C), G2)
    assert causes_told(world, third) == [Cause.UNSUPPORTED]
    assert not world.machine.leasing.aside
    world.cancel(third)
    world.release(lease)
    assert world.held(both)
