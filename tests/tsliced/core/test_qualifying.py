"""Before a job makes room for another one it is seen to leave its devices and to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import D1, D2, G1, G2, HOST, LIMITS, World, failure, job

from tsliced.core.actions import StartOperation
from tsliced.core.coordinator import Place
from tsliced.core.events import QualifyRequested
from tsliced.core.model import Cause, LeaseId, ProcessId, RankId, RankState, Reason, Verb
from tsliced.core.tenancy import Tenancy

A, B = job("a"), job("b")
RUNNING, PARKED = RankState.RUNNING, RankState.PARKED
FIRST = replace(LIMITS, qualify=True)


def verbs(world: World) -> list[str]:
    """Return the operations that were carried out."""
    return [action.verb.value for action in world.over if isinstance(action, StartOperation)]


def sharing(world: World) -> tuple[ProcessId, LeaseId]:
    """Let a job have been on the device, and another one wait for it; return both."""
    first, second = world.session(A), world.session(B)
    lease = world.acquire(first)
    rank = world.context(A, D1)
    world.release(lease)
    world.over.clear()
    return rank, world.acquire(second)


def tenancy_of(world: World) -> Tenancy:
    """Return the only tenancy of the job that has to leave."""
    tenancies = world.machine.tenancies
    (key,) = tenancies.by_job[A]
    return tenancies.all[key]


CYCLE = ["freeze", "snapshot", "restore", "thaw"]


def test_the_first_to_make_room_comes_back_once_before_anybody_else_is_let_on() -> None:
    world = World(limits=FIRST)
    rank, lease = sharing(world)
    assert world.held(lease)
    assert verbs(world) == [*CYCLE, "freeze", "snapshot"]
    assert [note.facts["job"] for note in world.notes("qualified")] == [str(A)]
    assert world.state(rank) is PARKED
    # From then on nobody has to try it again.
    world.context(B, D1)
    again = world.acquire(world.session(A))
    world.over.clear()
    world.release(lease)
    assert world.held(again)
    third = world.acquire(world.session(B))
    world.release(again)
    assert world.held(third)
    assert len(world.notes("qualified")) == 2
    assert verbs(world)[-4:] == ["freeze", "snapshot", "restore", "thaw"]


def test_nobody_is_moved_for_it_while_nobody_else_wants_the_devices_g7() -> None:
    world = World(limits=FIRST)
    session = world.session(A)
    lease = world.acquire(session)
    world.context(A, D1)
    for _ in range(3):
        world.release(lease)
        lease = world.acquire(session)
    assert verbs(world) == []


def test_a_job_whose_kind_is_known_to_come_back_need_not_show_it() -> None:
    world = World(limits=FIRST, known_kind=True)
    _, lease = sharing(world)
    assert world.held(lease)
    assert verbs(world) == ["freeze", "snapshot"]
    assert world.notes("qualified") == []


def test_a_job_that_cannot_leave_is_pinned_as_ever() -> None:
    world = World(limits=FIRST)
    world.verdict = lambda verb, _process: (
        failure(Cause.UNSUPPORTED) if verb is Verb.SNAPSHOT else None
    )
    rank, lease = sharing(world)
    assert not world.held(lease)
    assert world.state(rank) is RUNNING
    assert tenancy_of(world).coordinator.pinned is not None
    assert not tenancy_of(world).coordinator.qualified


def test_a_job_that_leaves_and_cannot_come_back_is_at_fault_and_in_nobodys_way_g11() -> None:
    world = World(limits=FIRST)
    world.verdict = lambda verb, process: (
        Reason(cause=Cause.DRIVER, text="no", rank=RankId(HOST, process.id))
        if verb is Verb.RESTORE
        else None
    )
    rank, lease = sharing(world)
    assert world.held(lease), "its devices are free"
    assert world.state(rank) is PARKED
    assert A in world.machine.leasing.faults
    assert world.notes("qualified") == []


def test_who_waits_for_it_and_leaves_has_it_turned_back() -> None:
    world = World(limits=FIRST)
    first, second = world.session(A), world.session(B)
    held = world.acquire(first)
    rank = world.context(A, D1)
    world.release(held)
    world.auto = False
    lease = world.acquire(second)
    world.run_until(StartOperation, Verb.FREEZE)
    world.cancel(lease)
    world.auto = True
    world.run()
    assert world.state(rank) is RUNNING
    assert not tenancy_of(world).coordinator.qualified


@pytest.mark.parametrize("at", ["idle", "held", "parked", "pinned", "no ranks"])
def test_an_operator_may_ask_for_it_of_a_job_that_is_on_its_devices_and_idle(at: str) -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    if at != "no ranks":
        world.context(A, D1)
        world.look()
    if at != "held":
        world.release(lease)
    if at == "parked":
        other = world.acquire(world.session(B))
        assert world.held(other)
    if at == "pinned":
        world.machine.leasing.pin(tenancy_of(world).key, failure(Cause.UNSUPPORTED), 0.0)
    world.over.clear()
    world.feed(QualifyRequested(job=A))
    assert verbs(world) == (CYCLE if at == "idle" else [])
    if at == "idle":
        assert tenancy_of(world).coordinator.qualified
        assert tenancy_of(world).coordinator.place is Place.ON
        # Nobody who is unknown has to be asked for anything.
        world.feed(QualifyRequested(job=B))


def test_what_was_shown_stays_shown_when_a_tenancy_is_divided() -> None:
    world = World(limits=FIRST)
    session = world.session(A)
    both = world.acquire(session, G1, G2)
    world.context(A, D1)
    world.context(A, D2)
    world.look()
    world.release(both)
    world.feed(QualifyRequested(job=A))
    one = world.acquire(session, G1)
    world.release(one)
    tenancies = world.machine.tenancies
    parts = [tenancies.all[key] for key in tenancies.by_job[A]]
    assert len(parts) == 2
    assert all(part.coordinator.qualified for part in parts)


def test_a_daemon_that_is_killed_meanwhile_begins_anew_g8() -> None:
    world = World(limits=FIRST)
    world.auto = False
    first, second = world.session(A), world.session(B)
    held = world.acquire(first)
    world.run()
    rank = world.context(A, D1)
    world.run()
    world.release(held)
    lease = world.acquire(second)
    world.run_until(StartOperation, Verb.RESTORE)
    world.restart()
    world.auto = True
    world.run()
    assert world.held(lease)
    assert world.state(rank) is PARKED
