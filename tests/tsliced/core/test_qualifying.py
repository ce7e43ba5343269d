"""Before a job makes room for another one it is seen to leave its devices and to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hosts_lab import N1, N2, Lab, ask, device, held, hold, pair, release, states
from world import D1, D2, G1, G2, HOST, LIMITS, World, failure, job

from tsliced.core.actions import StartOperation
from tsliced.core.coordinator import Place
from tsliced.core.events import QualifyRequested
from tsliced.core.model import (
    Cause,
    GroupName,
    HostName,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    Verb,
)
from tsliced.core.tenancy import Tenancy

A, B, C = job("a"), job("b"), job("c")
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


def test_a_job_that_came_back_with_its_turn_need_not_show_it_any_more() -> None:
    world = World(limits=FIRST, known_kind=True)
    _, lease = sharing(world)
    again = world.acquire(world.session(A))
    world.release(lease)
    assert world.held(again)
    assert tenancy_of(world).coordinator.qualified
    # Whatever is known of its kind from now on.
    world.known_kind = False
    world.look()
    other = world.acquire(world.session(B))
    world.release(again)
    assert world.held(other)
    assert world.notes("qualified") == []


def test_jobs_that_are_on_a_device_together_are_not_brought_back_beside_each_other_g1() -> None:
    world = World(limits=FIRST)
    ranks = [world.context(owner, D1) for owner in (A, C)]
    world.look()
    assert world.held(world.acquire(world.session(B)))
    assert [world.state(rank) for rank in ranks] == [PARKED, PARKED]
    assert Verb.RESTORE.value not in verbs(world)


def test_what_an_operator_has_parked_is_not_brought_back_first() -> None:
    world = World(limits=FIRST)
    lease = world.acquire(world.session(A))
    world.context(A, D1)
    world.look()
    world.release(lease)
    world.over.clear()
    world.drain(G1, park=True)
    assert verbs(world) == ["freeze", "snapshot"]


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


# ---- over several hosts


def switched(known: dict[HostName, bool]) -> tuple[Lab, list[RankState]]:
    """Let a job make room that has a rank on two hosts, of kinds that are known there or not."""
    lab = pair(FIRST)
    for host, is_known in known.items():
        lab[host].known_kind = is_known
    lease, ranks = hold(lab, "a")
    release(lab, lease)
    assert held(lab, ask(lab, "b", N2), N2)
    return lab, states(lab, ranks)


@pytest.mark.parametrize("unknown", [(), (N1,), (N2,)], ids=["none", "here", "elsewhere"])
def test_a_kind_that_is_unknown_on_any_host_is_tried_on_all_of_them(
    unknown: tuple[HostName, ...],
) -> None:
    lab, after = switched({host: host not in unknown for host in (N1, N2)})
    assert after == [PARKED, PARKED]
    for host in (N1, N2):
        cycle = [*CYCLE, "freeze", "snapshot"]
        assert verbs(lab[host]) == (cycle if unknown else ["freeze", "snapshot"])
    assert len(lab[N1].notes("qualified")) == bool(unknown)


@pytest.mark.parametrize("wanted", ["first", "second"])
def test_what_another_host_arbitrates_a_part_of_leaves_at_once(wanted: str) -> None:
    first, second = GroupName("first"), GroupName("second")
    lab = Lab({first: (N1, N2), second: (N2, N1)}, FIRST)
    lease = lab[N1].acquire(lab[N1].session(A), first, second)
    lab.run()
    rank = lab[N1].context(A, device(N1, first), device(N1, second))
    lab[N1].look()
    lab.run()
    lab[N1].release(lease)
    lab.run()
    lab[N1].over.clear()
    at = N1 if wanted == "first" else N2
    other = lab[at].acquire(lab[at].session(B), GroupName(wanted))
    lab.run()
    assert held(lab, other, at)
    assert lab[N1].state(rank) is PARKED
    assert verbs(lab[N1]) == ["freeze", "snapshot"]
