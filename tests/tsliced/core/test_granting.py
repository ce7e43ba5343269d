"""What stands in the way of a grant: failures and faults, and the ways out of each."""

from __future__ import annotations

import pytest
from stories import FROZEN, ON_G1, PARKED, RUNNING, A, B, C, fails, parked, resident
from world import D1, D2, G1, G2, LIMITS, World, failure, job

from tsliced.core.actions import (
    FaultRecord,
    ReserveNumbers,
    ScanGroups,
    StartOperation,
    TellLost,
    TellStalled,
    TenancyRecord,
)
from tsliced.core.coordinator import Place
from tsliced.core.model import (
    Cause,
    LeaseId,
    ProcessId,
    RankState,
    Verb,
)

# --- a tenancy that cannot be moved off -----------------------------------------------------------


def test_a_freeze_that_times_out_is_turned_back_and_tried_again_after_a_pause() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.FREEZE, Cause.FREEZE_TIMEOUT, times=1)
    waiter = world.acquire(world.session(B))
    assert world.waits(waiter)
    assert world.state(rank) is RUNNING
    assert world.machine.deadline is not None
    assert 0.5 * LIMITS.retry_min_s <= world.machine.deadline <= 1.5 * LIMITS.retry_min_s
    world.pass_time(1.5 * LIMITS.retry_min_s)
    assert world.held(waiter)
    assert world.state(rank) is PARKED


def test_a_waiter_is_told_once_why_its_turn_does_not_come() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.FREEZE, Cause.FREEZE_TIMEOUT, times=2)
    session = world.session(B)
    waiter = world.acquire(session)
    world.pass_time(100.0)
    assert world.held(waiter)
    (told,) = world.all_of(TellStalled)
    assert (told.session, told.lease, told.job) == (session, waiter, A)
    assert told.reason == failure(Cause.FREEZE_TIMEOUT, rank)


def test_a_failed_snapshot_brings_back_what_was_snapshotted_already() -> None:
    world = World()
    _, ranks = resident(world, ranks=3)
    fails(world, Verb.SNAPSHOT, Cause.DRIVER, times=1)
    fail_first = world.verdict
    world.verdict = lambda verb, p: fail_first(verb, p) if p.id == ranks[1] else None
    waiter = world.acquire(world.session(B))
    assert {world.state(rank) for rank in ranks} == {RUNNING}
    assert (Verb.RESTORE, ranks[0].pid) in world.moves()
    world.pass_time(10.0)
    assert world.held(waiter)


@pytest.mark.parametrize("cause", [Cause.UNSUPPORTED, Cause.NOT_PERMITTED])
def test_what_another_try_cannot_mend_pins_the_tenancy_at_once(cause: Cause) -> None:
    world = World()
    session, (rank,) = resident(world)
    fails(world, Verb.SNAPSHOT, cause)
    waiter = world.acquire(world.session(B))
    reason = failure(cause, rank)
    assert world.state(rank) is RUNNING
    assert world.journal["tenancy", ON_G1] == TenancyRecord(
        tenancy=ON_G1,
        stamp=world.machine.tenancies.all[ON_G1].coordinator.stamp,
        goal=world.machine.tenancies.all[ON_G1].coordinator.goal,
        pinned=reason,
    )
    assert [note.level for note in world.notes("pinned")] == ["error"]
    assert world.waits(waiter)
    refused = world.acquire(session)
    assert world.code(refused) == "pinned"
    # A lease elsewhere is none of its business.
    assert world.held(world.acquire(session, G2))


def test_what_fails_too_often_pins_the_tenancy_too() -> None:
    world = World()
    resident(world)
    fails(world, Verb.FREEZE, Cause.FREEZE_TIMEOUT)
    world.acquire(world.session(B))
    world.pass_time(1000.0)
    assert len(world.moves()) == LIMITS.max_evict_tries
    assert len(world.notes("pinned")) == 1


@pytest.mark.parametrize(
    ("hooks", "remedy"),
    [(False, "register on_pause and on_resume"), (True, "its on_pause callbacks must stop all")],
    ids=["without callbacks", "with callbacks"],
)
def test_g11_ranks_that_are_never_frozen_in_time_are_pinned_and_all_who_ask_hear_what_helps(
    hooks: bool, remedy: str
) -> None:
    world = World()
    resident(world, ranks=2)
    if hooks:
        world.session(A, hooks=True)
    fails(world, Verb.FREEZE, Cause.FREEZE_TIMEOUT)
    waiter = world.acquire(world.session(B))
    world.pass_time(1000.0)
    first, last = world.all_of(TellStalled)
    assert remedy in first.way_out, "it is tried again, and may not work out for ever"
    assert last.lease == waiter
    assert f"given up after {LIMITS.max_evict_tries} tries: simulated" in last.reason.text
    (pinned,) = world.notes("pinned")
    assert last.way_out == pinned.facts["way_out"]
    assert remedy in last.way_out
    assert "tslicectl retry 1000/a" in last.way_out
    stop = world.machine.leasing.explain_stop(world.machine.tenancies.all[ON_G1], world.now)
    assert stop is not None
    assert stop.way_out == last.way_out


def test_g11_an_operator_clears_a_pin_and_all_tries_begin_anew() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.FREEZE, Cause.FREEZE_TIMEOUT, times=LIMITS.max_evict_tries + 1)
    waiter = world.acquire(world.session(B))
    world.pass_time(1000.0)
    assert world.waits(waiter)
    world.clear(A)
    assert len(world.moves()) == LIMITS.max_evict_tries + 1
    assert len(world.notes("pinned")) == 1
    world.pass_time(10.0)
    assert world.held(waiter)
    assert world.state(rank) is PARKED


def test_g11_a_pin_goes_with_the_process() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.SNAPSHOT, Cause.UNSUPPORTED)
    waiter = world.acquire(world.session(B))
    world.die(rank)
    assert world.held(waiter)


def test_g11_trouble_with_the_devices_themselves_pins_nobody() -> None:
    world = World()
    resident(world)
    world.scans = lambda _: failure(Cause.DRIVER)
    waiter = world.acquire(world.session(B))
    world.pass_time(10_000.0)
    assert not world.notes("pinned")
    world.scans = lambda _: None
    world.pass_time(2 * LIMITS.retry_max_s)
    assert world.held(waiter)


def test_pauses_grow_to_their_limit_and_stay_there() -> None:
    world = World()
    resident(world)
    world.scans = lambda _: failure(Cause.DRIVER)
    world.acquire(world.session(B))
    world.pass_time(5_000.0)
    tries = len(world.ended(ScanGroups))
    world.pass_time(100 * LIMITS.retry_max_s)
    assert 60 <= len(world.ended(ScanGroups)) - tries <= 200


def test_without_host_memory_nobody_is_frozen() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.host_memory = lambda _: failure(Cause.NO_HOST_MEMORY)
    waiter = world.acquire(world.session(B))
    assert world.moves() == []
    world.host_memory = lambda _: None
    world.pass_time(LIMITS.retry_max_s)
    assert world.held(waiter)
    assert world.state(rank) is PARKED


def test_a_freeze_barrier_that_takes_too_long_is_turned_back_when_the_call_ends() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.FREEZE)
    world.pass_time(LIMITS.quiesce_timeout_s + LIMITS.freeze_timeout_s + LIMITS.barrier_margin_s)
    assert world.machine.tenancies.all[ON_G1].coordinator.place is Place.TURNING_BACK
    world.run()
    assert world.state(rank) is RUNNING
    assert (Verb.SNAPSHOT, rank.pid) not in world.moves()
    assert world.waits(waiter)


def test_g12_a_snapshot_that_freed_nothing_is_not_believed() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.noop_snapshots = True
    waiter = world.acquire(world.session(B))
    assert world.waits(waiter)
    assert world.state(rank) is RUNNING
    (told,) = world.all_of(TellStalled)
    assert told.reason.cause is Cause.NOT_FREED
    world.noop_snapshots = False
    world.pass_time(LIMITS.retry_max_s)
    assert world.held(waiter)


def test_a_pin_that_two_rounds_are_stopped_by_is_noted_once() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1, G2)
    world.context(A, D1)
    world.context(A, D2)
    world.look()
    world.release(lease)
    fails(world, Verb.SNAPSHOT, Cause.UNSUPPORTED)
    world.auto = False
    waiters = [world.acquire(world.session(owner), g) for owner, g in ((B, G1), (C, G2))]
    world.run()
    assert len(world.notes("pinned")) == 1
    assert all(world.waits(waiter) for waiter in waiters)
    assert len(world.all_of(TellStalled)) == 2


def test_an_eviction_that_fails_is_no_try_of_the_jobs_own_round() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1, G2)
    ranks = [world.context(A, D1), world.context(A, D2)]
    world.look()
    world.release(lease)
    fails(world, Verb.SNAPSHOT, Cause.FREEZE_TIMEOUT, times=1)
    world.auto = False
    world.acquire(world.session(B), G1)
    world.run_until(StartOperation, Verb.FREEZE)
    mine = world.acquire(session, G2)
    world.run()
    assert world.held(mine)
    assert world.state(ranks[1]) is RUNNING
    (told,) = world.all_of(TellStalled)
    assert told.lease != mine


def test_an_admission_that_fails_when_nobody_wants_it_any_more_is_no_try_of_the_next_round() -> (
    None
):
    world = World()
    session, (rank,), holder = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER)
    again = world.acquire(session)
    world.auto = False
    world.release(holder)
    world.run_until(StartOperation, Verb.RESTORE)
    world.cancel(again)
    other = world.acquire(world.session(C))
    world.run()
    assert world.held(other)
    assert world.state(rank) is PARKED
    assert not world.machine.leasing.faults


# --- a rank that is broken for good ---------------------------------------------------------------


@pytest.mark.parametrize("verb", [Verb.SNAPSHOT, Verb.THAW])
def test_g11_a_broken_context_blocks_the_group_until_its_process_is_gone(verb: Verb) -> None:
    world = World()
    session, ranks = resident(world, ranks=2)
    fails(world, verb, Cause.FAILED, times=1)
    if verb is Verb.THAW:
        # It is thawed only because the other one could not be frozen.
        breaks = world.verdict
        world.verdict = lambda what, process: (
            failure(Cause.FREEZE_TIMEOUT, process.id)
            if (what, process.id) == (Verb.FREEZE, ranks[1])
            else breaks(what, process)
        )
    waiter = world.acquire(world.session(B))
    assert world.machine.tenancies.all[ON_G1].coordinator.place is Place.BLOCKED
    assert [note.level for note in world.notes("blocked")] == ["error"]
    (told,) = world.all_of(TellStalled)
    assert told.reason.cause is Cause.FAILED
    # Its own job cannot go on either.
    world.cancel(waiter)
    refused = world.acquire(session)
    assert world.code(refused) == "blocked"
    waiter = world.acquire(world.session(B))
    world.verdict = lambda _verb, _process: None
    world.die(next(rank for rank in ranks if world.state(rank) is RankState.FAILED))
    assert world.held(waiter)
    (other,) = world.processes
    assert world.state(other) is PARKED


def test_an_operator_who_clears_a_block_that_is_still_there_finds_it_again() -> None:
    world = World()
    resident(world)
    fails(world, Verb.SNAPSHOT, Cause.FAILED)
    waiter = world.acquire(world.session(B))
    world.clear(A)
    assert len(world.notes("blocked")) == 2
    assert world.waits(waiter)


def test_a_part_of_what_is_blocked_is_refused_for_that_reason() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1, G2)
    world.context(A, D1)
    world.context(A, D2)
    world.release(lease)
    fails(world, Verb.SNAPSHOT, Cause.FAILED)
    world.acquire(world.session(B), G1)
    refused = world.acquire(session, G2)
    assert world.code(refused) == "blocked"


def test_a_thaw_that_goes_on_failing_blocks_and_clearing_it_tries_again() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.THAW, Cause.DRIVER)
    lose = world.verdict
    world.verdict = lambda verb, process: (
        failure(Cause.FREEZE_TIMEOUT, process.id) if verb is Verb.SNAPSHOT else lose(verb, process)
    )
    waiter = world.acquire(world.session(B))
    world.pass_time(1000.0)
    assert world.machine.tenancies.all[ON_G1].coordinator.place is Place.BLOCKED
    assert world.state(rank) is FROZEN
    world.verdict = lambda _verb, _process: None
    world.clear(A)
    world.pass_time(10.0)
    assert world.held(waiter)


# --- a tenancy that cannot be brought on ----------------------------------------------------------


def test_a_failed_restore_is_the_jobs_fault_and_the_next_one_is_served() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER)
    failed = world.acquire(session)
    behind = world.acquire(session)
    other = world.acquire(world.session(C))
    world.release(lease)
    assert world.code(failed) == "refused"
    # What else the job had asked for is refused for the fault, without another try.
    assert world.code(behind) == "job_faulted"
    assert world.held(other)
    assert world.state(rank) is PARKED
    assert world.journal["fault", A] == FaultRecord(job=A, reason=failure(Cause.DRIVER, rank))
    assert world.code(world.acquire(session)) == "job_faulted"


def test_g11_a_fault_is_the_jobs_alone() -> None:
    world = World()
    session, _, lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER)
    world.acquire(session)
    world.release(lease)
    assert world.held(world.acquire(world.session(C)))
    assert world.held(world.acquire(world.session(job("a", uid=2000)), G2))


def test_g11_a_fault_is_cleared_by_an_operator() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER, times=1)
    world.acquire(session)
    world.release(lease)
    world.clear(A)
    assert ("fault", A) not in world.journal
    assert world.held(world.acquire(session))
    assert world.state(rank) is RUNNING
    world.clear(A)


def test_g11_what_is_tried_again_is_brought_back_at_once_where_nobody_is() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER, times=2)
    world.acquire(session)
    world.release(lease)
    # It still fails: that is a fault again, for whoever asks next.
    world.retry(A)
    assert world.code(world.acquire(session)) == "job_faulted"
    assert len(world.notes("faulted")) == 2
    world.retry(A)
    assert world.state(rank) is RUNNING
    assert len(world.notes("cleared")) == 2
    assert world.held(world.acquire(session))


def test_g11_what_is_tried_again_is_brought_back_only_where_nobody_is() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER, times=1)
    world.acquire(session)
    world.release(lease)
    holder = world.acquire(world.session(B))
    world.retry(A)
    assert world.state(rank) is PARKED
    world.release(holder)
    world.context(B, D1)
    world.look()
    world.retry(A)
    assert world.state(rank) is PARKED
    world.drain()
    world.retry(A)
    assert world.state(rank) is PARKED


def test_g11_an_operator_ends_the_pause_before_another_try() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.FREEZE, Cause.FREEZE_TIMEOUT, times=1)
    waiter = world.acquire(world.session(B))
    assert world.waits(waiter)
    world.retry(A)
    assert world.held(waiter)
    assert world.state(rank) is PARKED


def test_g11_an_operator_ends_the_pause_of_a_move_that_cannot_turn_back() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.verdict = lambda verb, p: (
        failure(Cause.DRIVER, p.id) if verb in (Verb.SNAPSHOT, Verb.THAW) else None
    )
    world.acquire(world.session(B))
    tenancy = world.machine.tenancies.all[ON_G1]
    assert tenancy.coordinator.wanted is not None
    world.verdict = lambda _verb, _process: None
    world.retry(A)
    assert world.state(rank) is RUNNING
    # Nothing waits for a pause any more: another try changes nothing.
    world.retry(A)


def test_g11_what_holds_a_job_back_is_said_with_how_long_and_the_way_out() -> None:
    world = World()
    session, _, lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER)
    world.acquire(session)
    world.release(lease)
    world.pass_time(7.0)
    world.acquire(session)
    text = world.refusals()[-1].text
    assert "(pid" in text
    assert "for 7 s now" in text
    assert "tslicectl kill 1000/a" in text
    assert "tslicectl clear 1000/a" in text
    (note,) = world.notes("faulted")
    assert "tslicectl kill 1000/a" in str(note.facts["way_out"])
    tenancy = world.machine.tenancies.all[ON_G1]
    assert world.machine.leasing.explain_stop(tenancy, world.now) is None, "it is only parked"


def test_g11_a_fault_is_gone_with_the_rank_that_it_is_about() -> None:
    world = World()
    session, (first, second), lease = parked(world, ranks=2)
    fails(world, Verb.RESTORE, Cause.DRIVER, times=1)
    world.acquire(session)
    world.release(lease)
    fault = world.machine.leasing.faults[A]
    assert fault.rank is not None
    at_fault = fault.rank.process
    other = second if at_fault == first else first
    world.die(other)
    assert A in world.machine.leasing.faults
    world.die(at_fault)
    assert A not in world.machine.leasing.faults
    assert ("fault", A) not in world.journal
    assert world.held(world.acquire(session))


def test_g11_a_fault_is_gone_with_all_that_was_of_the_job() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    world.verdict = lambda verb, _: failure(Cause.UNSUPPORTED) if verb is Verb.RESTORE else None
    world.acquire(session)
    world.release(lease)
    world.die(rank)
    assert A in world.machine.leasing.faults
    world.close(session)
    assert A not in world.machine.leasing.faults
    assert ("fault", A) not in world.journal


def test_g11_a_fault_is_gone_when_the_last_process_dies_after_the_last_session() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER)
    world.acquire(session)
    world.release(lease)
    world.close(session)
    assert A in world.machine.leasing.faults
    world.die(rank)
    assert A not in world.machine.leasing.faults


def test_a_context_that_a_restore_breaks_blocks_the_group() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.FAILED)
    failed = world.acquire(session)
    other = world.acquire(world.session(C))
    world.release(lease)
    assert world.code(failed) == "blocked"
    assert world.waits(other)
    world.die(rank)
    assert world.held(other)


def test_without_room_on_the_devices_a_job_is_refused_with_that_code_and_no_fault() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    world.device_memory = lambda _: failure(Cause.NO_DEVICE_MEMORY)
    refused = world.acquire(session)
    world.release(lease)
    assert world.code(refused) == "no_device_memory"
    assert world.state(rank) is PARKED
    world.device_memory = lambda _: None
    assert world.held(world.acquire(session))


def test_devices_that_cannot_be_looked_at_let_nobody_on_and_are_no_fault() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    again = world.acquire(session)
    world.scans = lambda _: failure(Cause.DRIVER)
    world.release(lease)
    world.pass_time(1000.0)
    assert world.waits(again)
    world.scans = lambda _: None
    world.pass_time(2 * LIMITS.retry_max_s)
    assert world.held(again)
    assert world.state(rank) is RUNNING
    assert not world.machine.leasing.faults


def test_a_restore_that_fails_because_the_process_died_is_nobodys_fault() -> None:
    world = World()
    session, ranks, lease = parked(world, ranks=2)
    again = world.acquire(session)
    world.auto = False
    world.release(lease)
    world.run_until(StartOperation, Verb.RESTORE)
    # The call notices it before the kernel's message is read.
    del world.processes[ranks[0]]
    world.finish()
    world.die(ranks[0])
    world.run()
    assert world.held(again)
    assert not world.machine.leasing.faults
    assert world.state(ranks[1]) is RUNNING


def test_a_freeze_that_fails_because_the_process_died_is_tried_again_at_once() -> None:
    world = World()
    _, ranks = resident(world, ranks=2)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.FREEZE)
    del world.processes[ranks[0]]
    world.finish()
    world.die(ranks[0])
    world.run()
    assert world.held(waiter)
    assert world.now == 0.0
    assert not world.all_of(TellStalled)


# --- tokens ---------------------------------------------------------------------------------------


def test_g2_without_a_durable_block_there_is_no_grant() -> None:
    world = World()
    sessions = [world.session(job(f"j{number}")) for number in range(4)]
    world.numbers = lambda _: failure(Cause.JOURNAL)
    leases = []
    for session in sessions:
        leases.append(world.acquire(session, G2))
        world.release(leases[-1])
    assert any(world.waits(lease) for lease in leases)
    assert world.notes("journal")[0].level == "error"
    world.numbers = lambda _: None
    world.pass_time(LIMITS.retry_max_s)
    for lease in leases:
        if world.held(lease):
            world.release(lease)
    assert len(world.grants()) == 4


def test_g1_who_comes_onto_the_devices_while_a_round_waits_for_tokens_is_cleared_away() -> None:
    world = World(crowded=True)
    session = world.session(A)
    world.release(world.acquire(session))
    world.auto = False
    while world.machine.numbers.take() is not None:
        pass
    waiter = world.acquire(session)
    assert world.waits(waiter)
    rank = world.context(B, D1)
    world.look()
    world.run()
    assert world.held(waiter)
    assert world.state(rank) is PARKED
    assert world.ended(ReserveNumbers)


# --- what a holder may lose -----------------------------------------------------------------------


def holder_parked_by_others(world: World) -> tuple[LeaseId, ProcessId]:
    """Let somebody else park a holder's process, and the daemon find it so when it starts."""
    session = world.session(A)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.look()
    world.processes[rank].state = PARKED
    return lease, rank


def test_a_holder_whose_state_is_found_parked_is_brought_back() -> None:
    world = World()
    lease, rank = holder_parked_by_others(world)
    world.restart()
    assert world.held(lease)
    assert world.state(rank) is RUNNING


def test_a_holder_that_cannot_be_brought_back_loses_its_lease_and_is_told() -> None:
    world = World()
    lease, rank = holder_parked_by_others(world)
    fails(world, Verb.RESTORE, Cause.DRIVER)
    waiter = world.acquire(world.session(B))
    world.restart()
    assert world.all_of(TellLost)[0].lease == lease
    assert world.held(waiter)
    assert world.state(rank) is PARKED
    assert A in world.machine.leasing.faults
