"""The switch: evict one tenancy, admit another, over the whole core."""

from __future__ import annotations

import pytest
from world import D1, D2, G1, G2, G3, World, failure, job

from tsliced.core.actions import (
    ConfirmRelease,
    Grant,
    ReserveDeviceMemory,
    ReserveHostMemory,
    RunHooks,
    ScanGroups,
    StartOperation,
    TellContended,
)
from tsliced.core.model import Arrival, Cause, RankState, SessionId, Verb

A, B, C = job("a"), job("b"), job("c")
RUNNING, FROZEN, PARKED = RankState.RUNNING, RankState.FROZEN, RankState.PARKED


def two_jobs(world: World) -> tuple[SessionId, SessionId]:
    """Let two jobs have been on the device: a is parked, b runs and holds."""
    first, second = world.session(A), world.session(B)
    lease = world.acquire(first)
    world.context(A, D1)
    world.release(lease)
    world.acquire(second)
    world.context(B, D1)
    return first, second


def test_a_job_without_a_context_is_granted_an_empty_group_at_once() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    assert world.held(lease)
    assert world.grants()[0].tokens[0][0] == G1


def test_two_jobs_take_turns_and_only_one_is_on_the_device() -> None:
    world = World()
    first, second = world.session(A), world.session(B)
    lease_a = world.acquire(first)
    rank_a = world.context(A, D1)
    lease_b = world.acquire(second)
    assert not world.held(lease_b)
    world.release(lease_a)
    assert world.held(lease_b)
    assert world.state(rank_a) is PARKED
    rank_b = world.context(B, D1)
    again_a = world.acquire(first)
    world.release(lease_b)
    assert world.held(again_a)
    assert world.state(rank_a) is RUNNING
    assert world.state(rank_b) is PARKED
    assert world.grants()[-1].restored


def test_a_switch_goes_step_by_step() -> None:
    world = World()
    first, second = two_jobs(world)
    (rank_a, rank_b) = (process.pid for process in world.processes)
    world.acquire(first)
    world.done.clear()
    world.auto = False
    world.release(world.clients[second].held.popitem()[0])
    steps = []
    while world.pending:
        action = world.pending[0]
        verb = getattr(action, "verb", None)
        steps.append(verb.value if verb else type(action).__name__)
        world.finish()
    assert steps == [
        "ScanGroups",
        "ReserveHostMemory",
        "freeze",
        "ScanGroups",
        "ReserveHostMemory",
        "snapshot",
        "ScanGroups",
        "ScanGroups",
        "ReserveDeviceMemory",
        "restore",
        "thaw",
    ]
    assert world.moves() == [
        (Verb.FREEZE, rank_b),
        (Verb.SNAPSHOT, rank_b),
        (Verb.RESTORE, rank_a),
        (Verb.THAW, rank_a),
    ]


def test_g7_a_release_without_waiters_moves_nothing_and_a_new_acquire_is_granted_at_once() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.look()
    world.done.clear()
    for _ in range(3):
        world.auto = False
        request = world.release(lease)
        (answer,) = world.answers(request)
        assert answer == ConfirmRelease(session=session, request=request, waiters=0, deferred=True)
        lease = world.acquire(session)
        assert world.held(lease)
        assert not [a for a in world.pending if isinstance(a, StartOperation | ScanGroups)]
    assert world.state(rank) is RUNNING
    grants = world.grants()
    assert {(grant.restored, grant.switch_s, grant.ack_s) for grant in grants} == {(False, 0, None)}


def test_a_job_that_nobody_waits_for_keeps_its_state_on_the_devices() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    rank = world.context(A, D1)
    world.release(lease)
    world.pass_time(10_000)
    assert world.state(rank) is RUNNING


def test_g4_jobs_are_served_in_the_order_in_which_they_asked() -> None:
    world = World()
    sessions = [world.session(job(f"j{number}")) for number in range(6)]
    leases = [world.acquire(session) for session in sessions]
    for lease in leases:
        assert world.held(lease)
        world.release(lease)
    assert [grant.lease for grant in world.grants()] == leases


def test_g2_the_tokens_of_a_group_rise_with_each_grant() -> None:
    world = World()
    session = world.session(A)
    for _ in range(30):
        world.release(world.acquire(session, G1, G2))
    for index in (0, 1):
        tokens = [grant.tokens[index][1] for grant in world.grants()]
        assert tokens == sorted(set(tokens))


def test_a_holder_hears_when_somebody_waits_and_when_nobody_waits_any_more() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    waiters = [world.acquire(world.session(B)) for _ in range(2)]
    world.cancel(waiters[0])
    world.cancel(waiters[1])
    told = world.all_of(TellContended)
    assert [(t.lease, t.groups, t.waiters) for t in told] == [
        (holder, (G1,), 1),
        (holder, (G1,), 0),
    ]


def test_a_release_says_how_many_wait() -> None:
    world = World()
    holder = world.acquire(world.session(A), G1, G2)
    world.acquire(world.session(B), G1)
    world.acquire(world.session(C), G2)
    world.acquire(world.session(C), G1, G2)
    (answer,) = world.answers(world.release(holder))
    assert isinstance(answer, ConfirmRelease)
    assert (answer.waiters, answer.deferred) == (3, False)


def test_several_groups_are_held_all_or_none() -> None:
    world = World()
    one, two = world.acquire(world.session(A), G1), world.acquire(world.session(B), G2)
    both = world.acquire(world.session(C), G1, G2)
    world.release(one)
    assert world.waits(both)
    # It keeps what it has: nobody comes in between.
    late = world.acquire(world.session(A), G1)
    world.release(two)
    assert world.held(both)
    assert world.waits(late)
    world.release(both)
    assert world.held(late)


def test_leases_of_crossing_groups_cannot_wait_for_each_other() -> None:
    world = World()
    sessions = [world.session(job(f"j{number}")) for number in range(6)]
    wishes = [(G1, G2), (G2, G3), (G1, G3), (G1, G2, G3), (G3,), (G1,)]
    waiting = [world.acquire(s, *g) for s, g in zip(sessions, wishes, strict=True)]
    served = []
    while waiting:
        lease = next(lease for lease in waiting if world.held(lease))
        world.release(lease)
        waiting.remove(lease)
        served.append(lease)
    assert len(served) == 6


def test_g4_who_is_let_on_to_one_group_goes_on_to_the_next_before_those_behind_it() -> None:
    world = World()
    holder = world.acquire(world.session(A), G1, G2)
    both = world.acquire(world.session(B), G1, G2)
    one = world.acquire(world.session(C), G2)
    world.release(holder)
    assert world.held(both)
    assert world.waits(one)


def test_one_on_another_group_is_not_disturbed() -> None:
    world = World()
    other = world.acquire(world.session(C), G2)
    rank = world.context(C, D2)
    two_jobs(world)
    assert world.held(other)
    assert world.state(rank) is RUNNING


@pytest.mark.parametrize("seen", [True, False], ids=["seen before", "seen only now"])
def test_g1_contexts_that_were_there_before_any_lease_are_cleared_away_first(seen: bool) -> None:
    world = World(crowded=True)
    ranks = [world.context(owner, D1) for owner in (A, B)]
    sessions = [world.session(owner) for owner in (A, B)]
    if seen:
        world.look()
    lease_a = world.acquire(sessions[0])
    assert world.held(lease_a)
    assert [world.state(rank) for rank in ranks] == [RUNNING, PARKED]
    # Only who had to leave was moved.
    assert world.moves() == [(Verb.FREEZE, ranks[1].pid), (Verb.SNAPSHOT, ranks[1].pid)]
    lease_b = world.acquire(sessions[1])
    world.release(lease_a)
    assert world.held(lease_b)
    assert [world.state(rank) for rank in ranks] == [PARKED, RUNNING]


def test_all_ranks_are_frozen_before_one_is_snapshotted_and_restored_before_one_is_thawed() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1, G2)
    ranks = [world.context(A, device).pid for device in (D1, D2)]
    other = world.acquire(world.session(B), G1, G2)
    world.release(lease)
    world.acquire(session, G1, G2)
    world.release(other)
    assert [verb for verb, _ in world.moves()] == [
        verb for verb in (Verb.FREEZE, Verb.SNAPSHOT, Verb.RESTORE, Verb.THAW) for _ in ranks
    ]


def test_what_a_grant_says_about_the_switch() -> None:
    world = World()
    first, second = two_jobs(world)
    world.acquire(first)
    world.auto = False
    world.pass_time(5.0)
    world.release(world.clients[second].held.popitem()[0])
    world.pass_time(2.0)
    world.run()
    grant = world.grants()[-1]
    assert (grant.waited_s, grant.switch_s, grant.restored, grant.contended) == (7, 2, True, False)
    assert grant.ack_s == world.limits.ack_s


def test_a_rank_that_joins_a_round_that_is_held_did_not_wait_for_its_switch() -> None:
    world = World()
    first, second = two_jobs(world)
    world.acquire(first, ranks=2, arrival=Arrival.FIRST)
    world.auto = False
    world.release(world.clients[second].held.popitem()[0])
    world.pass_time(2.0)
    world.run()
    assert world.grants()[-1].switch_s == 2
    world.pass_time(3.0)
    world.acquire(world.session(A), ranks=2, arrival=Arrival.FIRST)
    late = world.grants()[-1]
    assert (late.waited_s, late.switch_s) == (0, 0)


def test_a_context_that_was_made_unseen_is_found_before_the_next_job_comes_on() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    world.release(lease)
    rank = world.context(A, D1)
    assert world.held(world.acquire(world.session(B)))
    assert world.state(rank) is PARKED


def test_a_context_that_appears_while_others_are_snapshotted_is_taken_along() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    world.context(A, D1)
    world.look()
    world.auto = False
    world.release(lease)
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.SNAPSHOT)
    late = world.context(A, D1)
    world.run()
    assert world.held(waiter)
    assert world.state(late) is PARKED


def test_g1_one_that_appears_after_the_last_look_is_found_before_the_next_job_is_restored() -> None:
    world = World()
    first, second = two_jobs(world)
    waiter = world.acquire(first)
    world.auto = False
    world.release(world.clients[second].held.popitem()[0])
    world.run_until(StartOperation, Verb.SNAPSHOT)
    world.finish()
    world.finish_next(ScanGroups)
    late = world.context(B, D1)
    world.run()
    assert world.held(waiter)
    assert world.state(late) is PARKED


def test_sessions_with_hooks_quiesce_before_and_resume_after() -> None:
    world = World()
    session = world.session(A, hooks=True)
    lease = world.acquire(session)
    world.context(A, D1)
    other = world.session(B)
    world.release(lease)
    lease = world.acquire(other)
    assert [hook.quiesce for hook in world.ended(RunHooks)] == [True]
    world.release(lease)
    world.acquire(session)
    assert [hook.quiesce for hook in world.ended(RunHooks)] == [True, False]


def test_a_session_that_cannot_quiesce_stays_on_and_is_told_to_resume() -> None:
    world = World()
    session = world.session(A, hooks=True)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.hooks = lambda action: failure(Cause.QUIESCE) if action.quiesce else None
    world.release(lease)
    waiter = world.acquire(world.session(B))
    assert world.waits(waiter)
    assert world.state(rank) is RUNNING
    hooks = world.ended(RunHooks)
    assert [hook.quiesce for hook in hooks] == [True, False]
    assert hooks[0].sessions == (session,)


def test_host_memory_is_reserved_again_for_each_eviction() -> None:
    world = World()
    sessions = two_jobs(world)
    for turn in range(4):
        waiter = world.acquire(sessions[turn % 2])
        world.release(world.clients[sessions[(turn + 1) % 2]].held.popitem()[0])
        assert world.held(waiter)
    # Once more for the first switch, in which both jobs came.
    # And each time before the freeze and again before the snapshot.
    assert [len(action.demands) for action in world.ended(ReserveHostMemory)] == [1] * 10


def test_room_on_the_devices_is_asked_for_by_what_the_snapshot_moved() -> None:
    world = World()
    first, second = two_jobs(world)
    world.acquire(first)
    world.release(world.clients[second].held.popitem()[0])
    (room,) = world.ended(ReserveDeviceMemory)
    rank = world.rank(next(iter(world.processes)))
    assert room.demands == ((rank, ((D1, 100),)),)


def test_g1_what_a_snapshot_left_behind_keeps_nobody_off_also_after_a_restart() -> None:
    world = World()
    first, second = two_jobs(world)
    for process in world.processes.values():
        process.residue_bytes = 30
    waiter = world.acquire(first)
    world.release(world.clients[second].held.popitem()[0])
    assert world.held(waiter)
    world.release(waiter)
    lease = world.acquire(second)
    assert world.held(lease)
    (parked,) = (p.id for p in world.processes.values() if p.state is RankState.PARKED)
    left = ((D1, 30),)
    for _ in range(2):
        (rank,) = world.machine.tenancies.ranks_of(world.machine.tenancies.home[parked])
        assert rank.residue == left
        world.restart()
    world.release(lease)
    world.processes[parked].residue_bytes = 31
    # More than is known of is somebody on the devices.
    again = world.acquire(first)
    assert world.held(again), "its own never keeps it off"


@pytest.mark.parametrize("phase", [ScanGroups, ReserveHostMemory, (StartOperation, Verb.FREEZE)])
def test_g5_a_waiter_that_leaves_before_the_snapshot_turns_the_switch_back(
    phase: type | tuple[type, Verb],
) -> None:
    world = World()
    lease = world.acquire(world.session(A))
    rank = world.context(A, D1)
    world.look()
    world.auto = False
    world.release(lease)
    waiter = world.acquire(world.session(B))
    kind, verb = phase if isinstance(phase, tuple) else (phase, None)
    world.run_until(kind, verb)
    world.cancel(waiter)
    world.run()
    assert world.state(rank) is RUNNING
    assert (Verb.SNAPSHOT, rank.pid) not in world.moves()
    assert world.machine.leasing.arbiters[G1].chosen is None
    assert world.notes("eviction_failed")[0].level == "info"


@pytest.mark.parametrize("verb", [Verb.SNAPSHOT])
def test_g5_one_that_leaves_later_lets_it_finish_to_an_empty_group(verb: Verb) -> None:
    world = World()
    lease = world.acquire(world.session(A))
    rank = world.context(A, D1)
    world.auto = False
    world.release(lease)
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, verb)
    world.cancel(waiter)
    world.run()
    assert world.state(rank) is PARKED
    assert not world.machine.tenancies.residents(G1)
    assert not world.held(waiter)


@pytest.mark.parametrize("verb", [Verb.RESTORE, Verb.THAW])
def test_g5_one_that_leaves_while_it_is_brought_on_stays_there_without_a_lease(verb: Verb) -> None:
    world = World()
    first, second = two_jobs(world)
    waiter = world.acquire(first)
    world.auto = False
    world.release(world.clients[second].held.popitem()[0])
    world.run_until(StartOperation, verb)
    world.cancel(waiter)
    world.run()
    rank_a, rank_b = world.processes
    assert (world.state(rank_a), world.state(rank_b)) == (RUNNING, PARKED)
    assert len(world.grants()) == 2


def test_a_switch_that_another_waiter_needs_too_is_not_turned_back() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    rank = world.context(A, D1)
    world.look()
    world.auto = False
    world.release(lease)
    waiters = [world.acquire(world.session(owner)) for owner in (B, C)]
    world.run_until(StartOperation, Verb.FREEZE)
    world.cancel(waiters[0])
    world.run()
    assert world.held(waiters[1])
    assert [verb for verb, _ in world.moves()] == [Verb.FREEZE, Verb.SNAPSHOT]
    assert world.state(rank) is PARKED


def test_a_job_that_asks_again_while_it_is_moved_off_comes_back_after_the_others() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.look()
    world.auto = False
    world.release(lease)
    other = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.FREEZE)
    again = world.acquire(session)
    world.cancel(other)
    world.run()
    assert world.held(again)
    assert world.state(rank) is RUNNING
    assert (Verb.SNAPSHOT, rank.pid) not in world.moves()


def test_nothing_is_said_twice_about_a_grant() -> None:
    world = World()
    two_jobs(world)
    kinds = [type(action) for action in world.done if isinstance(action, Grant)]
    assert len(kinds) == 2


def test_what_a_lost_journal_left_parked_is_restored_before_its_job_is_granted() -> None:
    world = World()
    first, second = world.session(A), world.session(B)
    lease = world.acquire(first, G1)
    parked = world.context(A, D1)
    world.look()
    world.release(lease)
    world.release(world.acquire(second, G1))
    assert world.state(parked) is PARKED
    world.journal.clear()
    world.restart()
    world.run()
    granted = world.acquire(world.session(A), G1)
    assert world.held(granted)
    assert world.grants()[-1].restored
    assert world.state(parked) is RUNNING
