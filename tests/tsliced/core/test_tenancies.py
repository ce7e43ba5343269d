"""Who is moved together: a job's groups are divided by its leases and bound by its processes."""

from __future__ import annotations

import pytest
from world import D1, D2, D3, G1, G2, G3, World, failure, job

from tsliced.core.actions import (
    Action,
    FreeMemory,
    RankRecord,
    RunHooks,
    StartOperation,
    TellStalled,
    TenancyEndedRecord,
    TenancyRecord,
    WatchProcess,
)
from tsliced.core.coordinator import Place
from tsliced.core.events import GroupsObserved, RankRegistered
from tsliced.core.model import (
    Cause,
    DeviceId,
    FoundRank,
    Goal,
    GroupName,
    ProcessId,
    RankState,
    Reason,
    SessionId,
    TenancyKey,
    Verb,
)

A, B, C = job("a"), job("b"), job("c")
RUNNING, PARKED = RankState.RUNNING, RankState.PARKED


def tenancies(world: World) -> set[str]:
    return {str(key) for key in world.machine.tenancies.all}


def with_ranks(world: World, *devices: DeviceId) -> tuple[SessionId, list[ProcessId]]:
    """Let job a lease all groups once, and have a process on each of some devices."""
    session = world.session(A)
    lease = world.acquire(session, G1, G2, G3)
    ranks = [world.context(A, device) for device in devices]
    world.look()
    world.release(lease)
    return session, ranks


def found(process: ProcessId, *devices: DeviceId) -> FoundRank:
    return FoundRank(process=process, job=A, devices=frozenset(devices), device_bytes=1)


# --- division -------------------------------------------------------------------------------------


def test_a_lease_on_a_part_divides_a_tenancy_and_the_rest_stays_where_it_is() -> None:
    world = World()
    session, (one, two) = with_ranks(world, D1, D2)
    assert tenancies(world) == {"1000/a@g1+g2+g3"}
    world.acquire(session, G1)
    assert tenancies(world) == {"1000/a@g1", "1000/a@g2+g3"}
    waiter = world.acquire(world.session(B), G2)
    assert world.held(waiter)
    assert (world.state(one), world.state(two)) == (RUNNING, PARKED)


def test_a_division_is_written_down_with_where_each_rank_belongs() -> None:
    world = World()
    session, (one, two) = with_ranks(world, D1, D2)
    whole, part, rest = (TenancyKey(A, groups) for groups in ((G1, G2, G3), (G1,), (G2, G3)))
    for key in [key for key in world.journal if key[0] in ("session", "lease", "ended")]:
        del world.journal[key]
    stamp = world.machine.tenancies.all[whole].coordinator.stamp
    world.acquire(session, G1)
    kept = [record for record in world.journal.values() if not hasattr(record, "session")]
    assert [r for r in kept if isinstance(r, TenancyRecord)] == [
        TenancyRecord(tenancy=key, stamp=stamp, goal=Goal.ON) for key in (part, rest)
    ]
    homes = {r.rank.process: r.tenancy for r in kept if isinstance(r, RankRecord)}
    assert homes == {one: part, two: rest}
    assert FreeMemory(tenancy=whole, host=True, device=True) in world.done


def test_a_parked_tenancy_is_divided_too() -> None:
    world = World()
    session, (one, two) = with_ranks(world, D1, D2)
    other = world.acquire(world.session(B), G1, G2, G3)
    world.release(other)
    world.acquire(session, G2)
    assert (world.state(one), world.state(two)) == (PARKED, RUNNING)


def test_what_is_being_moved_is_divided_when_it_has_arrived() -> None:
    world = World()
    session, (one, two) = with_ranks(world, D1, D2)
    world.auto = False
    world.acquire(world.session(B), G2)
    world.run_until(StartOperation, Verb.SNAPSHOT)
    mine = world.acquire(session, G1)
    assert world.waits(mine)
    assert tenancies(world) >= {"1000/a@g1+g2+g3"}
    world.run()
    assert world.held(mine)
    assert (world.state(one), world.state(two)) == (RUNNING, PARKED)


def test_a_pin_is_inherited_by_both_parts() -> None:
    world = World()
    session, _ = with_ranks(world, D1, D2)
    world.verdict = lambda verb, process: (
        failure(Cause.UNSUPPORTED, process.id) if verb is Verb.SNAPSHOT else None
    )
    waiter = world.acquire(world.session(B), G3)
    # It asked for the part before it was known that all of it is pinned.
    world.machine.tenancies.cover(A, (G1,), world.machine.leasing.out)
    pinned = [t.coordinator.pinned for t in world.machine.tenancies.all.values()]
    assert sum(reason is not None for reason in pinned) == 2
    assert world.waits(waiter)
    assert world.code(world.acquire(session, G1)) == "pinned"


def test_sessions_told_to_quiesce_are_told_to_resume_in_each_part() -> None:
    world = World()
    session = world.session(A, hooks=True)
    lease = world.acquire(session, G1, G2)
    world.context(A, D1)
    world.context(A, D2)
    world.release(lease)
    other = world.acquire(world.session(B), G1, G2)
    world.release(other)
    lease = world.acquire(session, G1)
    world.release(lease)
    world.acquire(session, G2)
    assert [hook.quiesce for hook in world.ended(RunHooks)] == [True, False, False]


# --- processes that bind groups -------------------------------------------------------------------


def test_a_process_on_two_groups_binds_them_and_a_lease_on_one_is_refused() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1, G2)
    rank = world.context(A, D1, D2)
    world.look()
    world.release(lease)
    refused = world.acquire(session, G1)
    assert world.code(refused) == "refused"
    text = f"one process has contexts in g1 and g2: lease them together (pid {rank.pid} on n1)"
    assert world.refusals()[0].text == text
    assert world.held(world.acquire(session, G1, G2))


def test_contexts_on_groups_that_were_never_leased_make_a_tenancy_of_them_all() -> None:
    world = World()
    world.context(A, D1, D3)
    world.look()
    assert tenancies(world) == {"1000/a@g1+g3"}
    assert world.machine.tenancies.all[TenancyKey(A, (G1, G3))].resident


def reaching(world: World) -> tuple[SessionId, ProcessId]:
    """Let job a hold g1 with a process that has made a context on g2 as well."""
    session = world.session(A)
    world.acquire(session, G1)
    rank = world.context(A, D1, D2)
    world.processes[rank].lawful = False
    world.look()
    return session, rank


def lease_of(world: World, session: SessionId) -> None:
    for lease in list(world.clients[session].held):
        world.release(lease)


def test_g1_who_reaches_beyond_its_groups_is_in_the_way_there_but_a_holder_is_not_moved() -> None:
    world = World()
    session, rank = reaching(world)
    waiter = world.acquire(world.session(B), G2)
    assert world.waits(waiter)
    assert world.state(rank) is RUNNING
    (told,) = world.all_of(TellStalled)
    assert told.reason == Reason(
        cause=Cause.BOUND_GROUPS,
        text="it holds g1, and a process of it has contexts elsewhere too",
        rank=world.rank(rank),
    )
    lease_of(world, session)
    assert world.held(waiter)
    assert world.state(rank) is PARKED


def test_nor_is_one_that_holds_what_it_reaches_and_not_what_others_want() -> None:
    world = World()
    session = world.session(A)
    one = world.acquire(session, G1)
    two = world.acquire(session, G2)
    rank = world.context(A, D1, D2)
    world.look()
    world.release(one)
    waiter = world.acquire(world.session(B), G1)
    assert world.waits(waiter)
    assert world.state(rank) is RUNNING
    world.release(two)
    assert world.held(waiter)
    assert world.state(rank) is PARKED


def test_g1_neither_of_the_groups_is_leased_without_the_other_from_then_on() -> None:
    world = World()
    session, rank = reaching(world)
    lease_of(world, session)
    for group in (G1, G2):
        assert world.code(world.acquire(session, group)) == "refused"
    other = world.acquire(world.session(B), G2)
    both = world.acquire(session, G1, G2)
    assert world.waits(both)
    world.release(other)
    assert world.held(both)
    assert world.state(rank) is RUNNING


def test_leased_together_they_become_one_tenancy() -> None:
    world = World()
    session, rank = reaching(world)
    lease_of(world, session)
    world.acquire(session, G1, G2)
    assert tenancies(world) == {"1000/a@g1+g2"}
    assert world.machine.tenancies.home[rank] == TenancyKey(A, (G1, G2))
    assert TenancyEndedRecord(tenancy=TenancyKey(A, (G1,))).tenancy not in {
        key[1] for key in world.journal if key[0] == "tenancy"
    }


def test_one_off_and_one_on_become_one_that_is_brought_on() -> None:
    world = World()
    session = world.session(A)
    first, second = world.acquire(session, G1), world.acquire(session, G2)
    ranks = [world.context(A, D1), world.context(A, D2)]
    world.release(second)
    world.release(world.acquire(world.session(B), G2))
    assert world.state(ranks[1]) is PARKED
    third = world.context(A, D1, D2)
    world.processes[third].lawful = False
    world.look()
    world.release(first)
    both = world.acquire(session, G1, G2)
    assert world.held(both)
    assert {world.state(rank) for rank in (*ranks, third)} == {RUNNING}
    assert tenancies(world) == {"1000/a@g1+g2"}


def test_they_become_one_only_when_none_of_them_is_moving() -> None:
    world = World()
    session, rank = reaching(world)
    lease_of(world, session)
    world.auto = False
    other = world.acquire(world.session(B), G1)
    world.run_until(StartOperation, Verb.FREEZE)
    both = world.acquire(session, G1, G2)
    world.cancel(other)
    assert world.waits(both)
    world.run()
    assert world.held(both)
    assert world.state(rank) is RUNNING
    assert tenancies(world) == {"1000/a@g1+g2"}


def test_what_is_blocked_is_not_made_one_with_anything() -> None:
    world = World()
    session, _ = reaching(world)
    lease_of(world, session)
    world.verdict = lambda verb, process: (
        failure(Cause.FAILED, process.id) if verb is Verb.SNAPSHOT else None
    )
    world.auto = False
    other = world.acquire(world.session(B), G1)
    # It waits already when what it needs is blocked; who asks later is refused at once.
    both = world.acquire(session, G1, G2)
    world.auto = True
    world.run()
    world.cancel(other)
    assert world.code(both) == "blocked"
    assert world.code(world.acquire(session, G1, G2)) == "blocked"
    assert world.machine.tenancies.all[TenancyKey(A, (G1,))].coordinator.place is Place.BLOCKED


def test_a_group_is_bound_only_as_long_as_a_process_reaches_it() -> None:
    world = World()
    session, rank = reaching(world)
    others = [world.context(A, D1, D2) for _ in range(2)]
    for other in others:
        world.processes[other].lawful = False
    world.look()
    waiter = world.acquire(world.session(B), G2)
    for process in (others[0], rank):
        world.die(process)
        assert world.waits(waiter)
    world.die(others[1])
    assert world.held(waiter)
    lease_of(world, session)
    assert world.held(world.acquire(session, G1))


def test_who_waits_for_another_group_too_does_not_keep_its_reach() -> None:
    world = World()
    session, rank = reaching(world)
    lease_of(world, session)
    world.acquire(world.session(C), G3)
    waits = world.acquire(session, G1, G3)
    other = world.acquire(world.session(B), G2)
    assert world.waits(waits)
    assert world.held(other)
    assert world.state(rank) is PARKED


def test_g1_what_reaches_beyond_is_restored_only_where_nobody_else_is() -> None:
    world = World()
    session, rank = reaching(world)
    lease_of(world, session)
    other = world.session(B)
    one = world.acquire(other, G1)
    two = world.acquire(other, G2)
    world.context(B, D2)
    world.release(one)
    both = world.acquire(session, G1, G2)
    assert world.waits(both)
    assert world.state(rank) is PARKED
    world.release(two)
    assert world.held(both)


def test_a_reach_is_known_after_a_restart_too() -> None:
    world = World()
    session, _ = reaching(world)
    world.restart()
    waiter = world.acquire(world.session(B), G2)
    assert world.waits(waiter)
    lease_of(world, session)
    assert world.held(waiter)


# --- how ranks are found --------------------------------------------------------------------------


def test_a_registered_process_is_watched_and_belongs_where_its_devices_are() -> None:
    world = World()
    process = ProcessId(5, 1)
    effects = world.feed(RankRegistered(job=A, found=found(process, D2), groups=(G1, G2, G3)))
    assert effects.actions == (WatchProcess(process=process),)
    assert world.machine.tenancies.home[process] == TenancyKey(A, (G2,))


def test_one_without_devices_belongs_to_the_groups_that_were_named() -> None:
    world = World()
    process = ProcessId(5, 1)
    world.feed(RankRegistered(job=A, found=found(process), groups=(G1, G2)))
    assert world.machine.tenancies.home[process] == TenancyKey(A, (G1, G2))
    session = world.session(A)
    world.acquire(session, G2)
    assert world.machine.tenancies.home[process] == TenancyKey(A, (G2,))


@pytest.mark.parametrize("devices", [(), (DeviceId("GPU-of-nobody"),)])
def test_one_that_is_on_none_of_our_groups_is_left_alone(devices: tuple[DeviceId, ...]) -> None:
    world = World()
    effects = world.feed(GroupsObserved(found=(found(ProcessId(5, 1), *devices),)))
    assert effects.actions == ()
    assert not world.machine.tenancies.home


def test_a_newcomer_joins_the_tenancy_that_has_its_group() -> None:
    world = World()
    _, (rank,) = with_ranks(world, D1)
    late = world.context(A, D3)
    world.look()
    registry = world.machine.tenancies
    assert registry.home[late] == registry.home[rank]
    assert {known.id.process for known in registry.ranks_of(registry.home[rank])} == {rank, late}


def test_g1_a_job_that_runs_already_is_looked_at_before_its_first_lease() -> None:
    world = World(crowded=True)
    world.context(A, D1)
    world.look()
    other = world.context(B, D1)
    world.processes[other].seen = False
    lease = world.acquire(world.session(A))
    assert world.held(lease)
    assert world.state(other) is PARKED


def test_what_a_job_without_sessions_and_processes_had_is_forgotten() -> None:
    world = World()
    session, (rank,) = with_ranks(world, D1)
    world.die(rank)
    assert tenancies(world) == {"1000/a@g1+g2+g3"}
    world.close(session)
    assert tenancies(world) == set()
    assert not [key for key in world.journal if key[0] == "tenancy"]


def test_a_tenancy_that_owes_its_sessions_a_word_is_kept_for_it() -> None:
    world = World()
    session = world.session(A, hooks=True)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.release(lease)
    other = world.acquire(world.session(B))
    world.die(rank)
    assert "1000/a@g1" in tenancies(world)
    world.release(other)
    world.acquire(session)
    assert [hook.quiesce for hook in world.ended(RunHooks)] == [True, False]


def test_hooks_come_and_go_with_their_sessions() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    world.context(A, D1)
    world.look()
    late = world.session(A, hooks=True)
    other = world.session(A, hooks=True)
    world.close(other)
    world.release(lease)
    world.acquire(world.session(B))
    (hook,) = world.ended(RunHooks)
    assert hook.sessions == (late,)
    world.close(late)
    assert not world.machine.tenancies.hooks


def test_what_is_leased_together_is_all_restored_before_any_of_it_runs() -> None:
    world = World()
    session, ranks = world.session(A), []
    for group, device in ((G1, D1), (G2, D2)):
        lease = world.acquire(session, group)
        ranks.append(world.context(A, device))
        world.look()
        world.release(lease)
    assert tenancies(world) == {"1000/a@g1", "1000/a@g2"}
    world.release(world.acquire(world.session(B), G1, G2))
    quick, slow = ranks
    world.auto = False
    together = world.acquire(session, G1, G2)

    def can_end(action: Action) -> bool:
        return not (isinstance(action, StartOperation) and action.rank.process == slow)

    while (ready := next((i for i, a in enumerate(world.pending) if can_end(a)), None)) is not None:
        world.finish(ready)
    assert world.state(quick) is RankState.FROZEN, "restored, but not thawed before the other"
    assert world.state(slow) is PARKED
    world.run()
    assert world.held(together)
    assert world.state(quick) is world.state(slow) is RUNNING


def test_broken_invariants_are_found() -> None:
    world = World()
    with_ranks(world, D1)
    registry = world.machine.tenancies
    (key,) = registry.all
    process = next(iter(registry.home))
    registry.home[process] = TenancyKey(A, (G1,))
    with pytest.raises(AssertionError, match="at home in one"):
        registry.check_invariants()
    registry.home[process] = key
    del registry.by_group[G2][key]
    with pytest.raises(AssertionError, match="found by each group"):
        registry.check_invariants()
    registry.by_group[G2][key] = registry.all[key]
    registry.by_job[A][TenancyKey(A, (GroupName("g1"),))] = None
    with pytest.raises(AssertionError, match="share a group"):
        registry.check_invariants()
