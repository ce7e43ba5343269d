"""Others on the devices, and processes that die: neither stops anybody for good."""

from __future__ import annotations

import pytest
from stories import ON_G1, PARKED, RUNNING, A, B, C, fails, parked, resident
from world import D1, G1, G2, LIMITS, Process, World, failure

from tsliced.core.actions import (
    ScanGroups,
    StartOperation,
    TellRankLost,
    TellStalled,
)
from tsliced.core.coordinator import Place
from tsliced.core.granting import MAX_ADMIT_TRIES
from tsliced.core.model import (
    Cause,
    ProcessId,
    Reason,
    Verb,
)

# --- company --------------------------------------------------------------------------------------


def test_a_stranger_on_the_devices_is_named_and_lets_nobody_be_restored() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    again = world.acquire(session)
    stranger = world.context(None, D1)
    world.release(lease)
    world.pass_time(0.1)
    assert world.waits(again)
    (told,) = world.all_of(TellStalled)
    assert told.reason.cause is Cause.STRANGER
    assert str(stranger.pid) in told.reason.text
    assert world.notes("stranger")[0].facts["pid"] == stranger.pid
    world.die(stranger)
    world.pass_time(LIMITS.retry_max_s)
    assert world.held(again)
    assert world.state(rank) is RUNNING


def test_a_stranger_that_stays_makes_the_job_give_up() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    again = world.acquire(session)
    world.context(None, D1)
    world.release(lease)
    world.pass_time(100.0)
    assert world.code(again) == "refused"
    assert len(world.ended(ScanGroups)) >= MAX_ADMIT_TRIES
    assert world.state(rank) is PARKED
    assert not world.machine.leasing.faults


def test_g11_devices_that_cannot_be_looked_at_are_no_fault_of_the_job_that_waits() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    again = world.acquire(session)
    world.device_memory = lambda _: failure(Cause.DRIVER)
    world.release(lease)
    world.pass_time(100.0)
    # It is refused as unavailable, and may ask again.
    assert world.code(again) == "unavailable"
    assert world.state(rank) is PARKED
    assert not world.machine.leasing.faults
    world.device_memory = lambda _: None
    assert world.held(world.acquire(session))


def test_a_holder_whose_place_is_taken_is_brought_back_once_it_is_free() -> None:
    world = World()
    session, (rank,) = resident(world)
    lease = world.acquire(session)
    # The daemon ended in the middle of a move, and somebody came meanwhile.
    world.processes[rank].state = PARKED
    other = world.context(B, D1)
    world.restart()
    world.pass_time(5.0)
    assert world.held(lease)
    assert world.state(rank) is PARKED
    assert len(world.ended(ScanGroups)) < 60, "it pauses between its tries"
    world.die(other)
    world.pass_time(LIMITS.retry_max_s * 2)
    assert world.state(rank) is RUNNING
    assert world.held(lease)


def test_g1_who_runs_already_is_not_let_on_before_the_devices_could_be_looked_at() -> None:
    world = World()
    own, other = world.context(A, D1), world.context(B, D1)
    world.processes.pop(other)
    world.look()
    world.processes[other] = Process(id=other, job=B, devices=frozenset({D1}))
    failures = [failure(Cause.DRIVER)]
    world.scans = lambda _: failures.pop() if failures else None
    lease = world.acquire(world.session(A))
    assert world.waits(lease)
    world.pass_time(LIMITS.retry_max_s)
    assert world.held(lease)
    assert world.state(own) is RUNNING
    assert world.state(other) is PARKED


def test_a_stranger_is_noted_once_until_it_is_gone() -> None:
    world = World()
    stranger = world.context(None, D1)
    for _ in range(3):
        world.look()
    assert len(world.notes("stranger")) == 1
    world.die(stranger)
    assert not world.machine.tenancies.strangers


def test_a_stranger_that_turns_out_to_be_somebodys_is_one_no_longer() -> None:
    world = World()
    process = world.context(None, D1)
    world.look()
    world.processes[process].job = A
    world.look()
    assert not world.machine.tenancies.strangers
    assert world.machine.tenancies.home[process] == ON_G1


def test_a_rank_whose_job_a_scan_cannot_tell_is_a_rank_all_the_same() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    world.acquire(session)
    world.release(lease)
    world.processes[rank].job = None
    world.look()
    assert not world.machine.tenancies.strangers
    waiter = world.acquire(world.session(B))
    world.release(next(iter(world.clients[session].held)))
    assert world.held(waiter)
    assert world.state(rank) is PARKED


def test_g11_a_tenancy_that_a_stranger_kept_from_returning_is_freed_when_it_is_gone() -> None:
    world = World()
    _, ranks = resident(world, ranks=2)
    fails(world, Verb.SNAPSHOT, Cause.FREEZE_TIMEOUT, times=1)
    first = world.verdict
    stranger: list[ProcessId] = []

    def verdict(verb: Verb, process: Process) -> Reason | None:
        if process.id != ranks[1]:
            return None
        if verb is Verb.SNAPSHOT and not stranger:
            stranger.append(world.context(None, D1))
        return first(verb, process)

    world.verdict = verdict
    waiter = world.acquire(world.session(B))
    world.pass_time(100.0)
    coordinator = world.machine.tenancies.all[ON_G1].coordinator
    assert coordinator.place is Place.BLOCKED
    world.die(stranger[0])
    world.pass_time(10.0)
    assert world.held(waiter)
    assert {world.state(rank) for rank in ranks} == {PARKED}


def test_g11_memory_that_only_the_books_call_parked_lets_nobody_on_until_it_is_gone() -> None:
    world = World()
    _, (rank,), lease = parked(world)
    other = world.acquire(world.session(C))
    world.processes[rank].leftover = True
    world.release(lease)
    # Who waits is not refused for it, however long it takes.
    world.pass_time(30 * LIMITS.retry_max_s)
    assert world.waits(other)
    world.processes[rank].leftover = False
    world.pass_time(LIMITS.retry_max_s)
    assert world.held(other)


def test_a_parked_process_that_is_still_listed_without_memory_is_no_company() -> None:
    world = World()
    _, (rank,), lease = parked(world)
    other = world.acquire(world.session(C))
    world.processes[rank].leftover = True
    world.processes[rank].device_bytes = 0
    world.release(lease)
    assert world.held(other)


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [Verb.FREEZE, Verb.SNAPSHOT, Verb.RESTORE, Verb.THAW])
@pytest.mark.parametrize("told_first", [True, False], ids=["exit first", "result first"])
def test_g3_a_rank_that_dies_in_any_operation_stops_nobody(verb: Verb, told_first: bool) -> None:
    world = World()
    if verb in (Verb.FREEZE, Verb.SNAPSHOT):
        resident(world, ranks=2)
        world.auto = False
        waiter = world.acquire(world.session(B))
    else:
        session, _, holder = parked(world, ranks=2)
        world.auto = False
        waiter = world.acquire(session)
        world.release(holder)
    world.run_until(StartOperation, verb)
    index = world.index_of(StartOperation, verb)
    start = world.pending[index]
    assert isinstance(start, StartOperation)
    victim = start.rank.process
    if told_first:
        world.die(victim)
        world.finish(index)
    else:
        del world.processes[victim]
        world.finish(index)
        world.die(victim)
    world.auto = True
    world.run()
    world.pass_time(100.0)
    assert world.held(waiter)
    assert not world.machine.leasing.faults
    assert not world.notes("blocked")
    (survivor,) = world.processes
    expected = PARKED if verb in (Verb.FREEZE, Verb.SNAPSHOT) else RUNNING
    assert world.state(survivor) is expected


def test_a_job_hears_that_a_rank_of_it_died() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1)
    elsewhere = world.acquire(session, G2)
    rank = world.context(A, D1)
    world.look()
    world.die(rank)
    assert world.all_of(TellRankLost) == [
        TellRankLost(
            session=session, lease=lease, pid=rank.pid, text=f"rank {rank.pid} of this job ended"
        )
    ]
    assert world.held(elsewhere)


def test_when_all_ranks_die_in_an_eviction_the_group_is_free_at_once() -> None:
    world = World()
    _, ranks = resident(world, ranks=2)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.FREEZE)
    for rank in ranks:
        world.die(rank)
    world.run()
    assert world.held(waiter)


def test_when_all_ranks_die_while_they_are_turned_back_the_group_is_free_at_once() -> None:
    world = World()
    _, ranks = resident(world, ranks=2)
    fails(world, Verb.SNAPSHOT, Cause.FREEZE_TIMEOUT, times=1)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.THAW)
    for rank in ranks:
        world.die(rank)
    world.run()
    assert world.held(waiter)
    assert world.now == 0.0
