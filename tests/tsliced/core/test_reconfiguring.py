"""Another configuration for a machine that runs: taken as a whole, and never under its users."""

from __future__ import annotations

import dataclasses
import gc
from types import FunctionType, ModuleType

import pytest
from world import D1, D2, D3, G1, G2, G3, GROUPS, LIMITS, World, job

from tsliced.core.actions import DrainRecord, Effects, EndProcesses, StartOperation
from tsliced.core.events import Reconfigured
from tsliced.core.model import CoreLimits, DeviceId, GroupConfig, GroupName, SessionId, Verb
from tsliced.core.reconfiguring import objections

A, B = job("a"), job("b")
G4, D4 = GroupName("g4"), DeviceId("GPU-4")
FOURTH = GroupConfig(name=G4, devices=(D4,), order=3)


def reconfigure(
    world: World,
    *groups: GroupConfig,
    limits: CoreLimits = LIMITS,
    permitted: tuple[tuple[SessionId, tuple[GroupName, ...]], ...] = (),
) -> Effects:
    assert not list(objections(world.machine, groups))
    return world.feed(Reconfigured(groups=groups, limits=limits, permitted=permitted))


def objected(world: World, *groups: GroupConfig) -> str:
    return "; ".join(objections(world.machine, groups))


def with_devices(group: GroupConfig, *devices: DeviceId) -> GroupConfig:
    return dataclasses.replace(group, devices=devices)


def test_a_new_group_can_be_leased_by_those_who_may_and_an_idle_one_is_gone() -> None:
    world = World()
    session, other = world.session(A), world.session(B)
    reconfigure(world, GROUPS[0], FOURTH, permitted=((session, (G1, G4)), (other, (G1,))))
    lease = world.acquire(session, G4)
    world.run()
    assert world.held(lease)
    assert world.code(world.acquire(session, G2)) == "unknown_group"
    assert world.code(world.acquire(other, G4)) == "not_permitted"


def test_what_a_session_may_lease_is_kept_over_a_restart() -> None:
    world = World()
    session = world.session(A)
    groups = (*GROUPS, FOURTH)
    permitted = ((session, (G1, G4)), (SessionId("gone"), (G4,)))
    kept = world.machine.leasing.sessions[session].record()
    records = reconfigure(world, *groups, permitted=permitted).records
    assert records == (dataclasses.replace(kept, groups=(G1, G4)),)
    assert reconfigure(world, *groups, permitted=permitted).records == (), "and not twice"


def test_a_holder_and_a_waiter_go_on_while_other_groups_change() -> None:
    world = World()
    holder, waiter = world.session(A), world.session(B)
    held = world.acquire(holder, G1)
    world.context(A, D1)
    world.run()
    waits = world.acquire(waiter, G1)
    limits = dataclasses.replace(LIMITS, freeze_timeout_s=3.0, max_passed_over=1)
    reconfigure(world, GROUPS[0], with_devices(GROUPS[1], D2, D3), limits=limits)
    assert world.held(held)
    assert world.waits(waits)
    world.release(held)
    world.run()
    assert world.held(waits)
    freezes = [s for s in world.ended(StartOperation) if s.verb is Verb.FREEZE]
    assert [freeze.timeout_s for freeze in freezes] == [3.0]


@pytest.mark.parametrize("how", ["held", "waited for", "gathered for", "parked on"])
def test_a_group_in_use_is_neither_removed_nor_given_other_devices(how: str) -> None:
    world = World()
    session = world.session(A)
    if how == "gathered for":
        world.acquire(session, G1, ranks=2)
    else:
        lease = world.acquire(session, G1)
        world.context(A, D1)
        world.run()
        if how != "held":
            world.acquire(world.session(B), G1)
        if how == "parked on":
            world.release(lease)
            world.run()
    assert "g1 cannot be removed: " in objected(world, *GROUPS[1:])
    moved = (with_devices(GROUPS[0], D2), with_devices(GROUPS[1], D1), GROUPS[2])
    assert "g1 cannot get other devices: " in objected(world, *moved)
    assert not objected(world, with_devices(GROUPS[0], D1), GROUPS[2]), "others may go"


def test_state_without_a_lease_holds_its_group_too() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1)
    world.context(A, D1)
    world.run()
    world.release(lease)
    world.run()
    assert objected(world, *GROUPS[1:]) == (
        f"group g1 cannot be removed: state of job {A} belongs to it"
    )


def test_groups_in_use_keep_their_order_and_others_do_not_matter() -> None:
    world = World()
    session = world.session(A)
    world.acquire(session, G1, G3)
    first, second, third = GROUPS
    assert objected(world, third, second, first) == (
        "the order of g1, g3 cannot change: all of them are in use"
    )
    assert not objected(world, second, first, third, FOURTH)


def test_a_drained_group_can_be_removed_and_is_not_drained_when_it_comes_back() -> None:
    world = World()
    world.drain(G2, park=True)
    effects = reconfigure(world, GROUPS[0], GROUPS[2])
    assert effects.records == (DrainRecord(group=G2, drain=None),)
    reconfigure(world, *GROUPS)
    lease = world.acquire(world.session(A), G2)
    world.run()
    assert world.held(lease)


def test_the_longest_hold_can_be_set_and_taken_back() -> None:
    world = World()
    reconfigure(world, *GROUPS, limits=dataclasses.replace(LIMITS, max_hold_s=5.0))
    assert world.machine.leasing.max_hold_s == {G1: 5.0, G2: 5.0, G3: 5.0}
    own = dataclasses.replace(GROUPS[0], max_hold_s=7.0)
    reconfigure(world, own, *GROUPS[1:])
    assert world.machine.leasing.max_hold_s == {G1: 7.0}


def test_a_hold_that_was_granted_with_a_limit_ends_by_it_and_the_next_by_the_new_one() -> None:
    old = dataclasses.replace(LIMITS, max_hold_s=100.0)
    world = World(limits=old)
    lease = world.acquire(world.session(A))
    waiting = world.acquire(world.session(B))
    reconfigure(world, *GROUPS, limits=LIMITS)
    world.pass_time(99.0)
    assert world.held(lease)
    world.pass_time(2.0)
    assert world.held(waiting), "it was granted when there was a limit"
    world.acquire(world.session(A))
    world.pass_time(1e4)
    assert world.held(waiting)


def test_what_is_left_of_a_job_is_ended_by_the_new_limits() -> None:
    world = World()
    session = world.session(A)
    world.release(world.acquire(session))
    rank = world.context(A, D1)
    world.look()
    reconfigure(world, *GROUPS, limits=dataclasses.replace(LIMITS, orphan_s=50.0))
    world.close(session)
    world.pass_time(51.0)
    assert [action.processes for action in world.all_of(EndProcesses)][:1] == [(rank,)]


def reachable(root: object) -> set[int]:
    """Return the identities of all data that can be reached from an object."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen.add(id(one))
            todo += gc.get_referents(one)
    return seen


def test_nothing_goes_on_by_the_old_limits() -> None:
    old, new = dataclasses.replace(LIMITS), dataclasses.replace(LIMITS, grace_s=1.0)
    world = World(limits=old)
    world.acquire(world.session(A), G1)
    world.context(A, D1)
    world.look()
    machine = world.machine
    assert id(old) in reachable(machine)
    reconfigure(world, *GROUPS, limits=new)
    machine.story.clear()
    assert id(old) not in reachable(machine)
    assert id(new) in reachable(machine)
