"""Leases inside of leases: in the configured order they wait, against it they must not."""

from __future__ import annotations

from typing import Any

from world import D1, G1, G2, World, job

from tsliced.core.events import AcquireRequested
from tsliced.core.model import GroupName, LeaseId, RequestId, SessionId


def nest(
    world: World, session: SessionId, group: GroupName, *holding: GroupName, **more: Any
) -> LeaseId:
    """Ask for a group inside of leases on others."""
    number = RequestId(next(world.requests))
    world.send(
        AcquireRequested(session=session, request=number, groups=(group,), holding=holding, **more)
    )
    return LeaseId(f"{session}.{number}")


def test_two_jobs_that_nest_in_opposite_orders_do_not_wait_for_each_other_for_ever() -> None:
    world = World()
    one, other = world.session(job("a")), world.session(job("b"))
    world.acquire(one, G1)
    world.acquire(other, G2)
    inner = nest(world, one, G2, G1)
    refused = nest(world, other, G1, G2)
    assert world.waits(inner)
    assert world.code(refused) == "would_deadlock"
    text = world.refusals()[-1].text
    assert "g1 must be waited for, comes before g2, and g2 is held" in text
    assert "together" in text


def test_against_the_order_a_free_group_is_granted_though_somebodys_state_must_leave_it() -> None:
    world = World()
    resident = world.session(job("a"))
    lease = world.acquire(resident, G1)
    rank = world.context(job("a"), D1)
    world.look()
    world.release(lease)
    session = world.session(job("b"))
    world.acquire(session, G2)
    inner = nest(world, session, G1, G2)
    assert world.held(inner)
    assert world.state(rank).value == "parked"


def test_what_is_held_and_asked_for_again_does_not_count() -> None:
    world = World()
    holder, session = world.session(job("a")), world.session(job("b"))
    world.acquire(holder, G1)
    world.acquire(session, G2)
    number = RequestId(next(world.requests))
    world.send(AcquireRequested(session=session, request=number, groups=(G1, G2), holding=(G2,)))
    assert world.code(LeaseId(f"{session}.{number}")) is None


def test_a_drained_group_is_waited_for_by_nobody_who_holds_a_later_one() -> None:
    world = World()
    session = world.session(job("a"))
    world.acquire(session, G2)
    world.drain(G1)
    assert world.code(nest(world, session, G1, G2)) == "would_deadlock"


def test_the_machine_knows_the_groups_of_held_leases_alone() -> None:
    world = World()
    session, waiting = world.session(job("a")), world.session(job("b"))
    held, waits = world.acquire(session, G1, G2), world.acquire(waiting, G1)
    assert world.machine.groups_of([held, waits, "nothing"]) == (G1, G2)
