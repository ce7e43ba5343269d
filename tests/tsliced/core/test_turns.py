"""Turns that nobody asks for: of jobs that are parked and silent, and of strangers."""

from __future__ import annotations

from dataclasses import replace

from stories import PARKED, RUNNING, A, B, C, fails, parked, resident
from world import D1, D2, G1, G2, LIMITS, World, job

from tsliced.core.actions import StartOperation, TellContended
from tsliced.core.events import EndAsked, GroupsObserved
from tsliced.core.model import Cause, DeviceId, JobKey, ProcessId, Verb
from tsliced.core.rounds import RoundState

NAMED = replace(LIMITS, idle_park_s=60.0)
COURTEOUS = replace(NAMED, courtesy_turn_s=10.0)


def turn_of(world: World, owner: JobKey) -> RoundState | None:
    """Return how far a job's unasked turn is; None: it has none."""
    leasing = world.machine.leasing
    rounds = (leasing.rounds[round_id] for round_id in leasing.turns)
    return next((round_.state for round_ in rounds if round_.job == owner), None)


# --- who is idle ------------------------------------------------------------------------------


def test_a_parked_job_that_asks_for_nothing_is_named_once() -> None:
    world = World(limits=NAMED)
    _session, (rank, other), _lease = parked(world, ranks=2)
    world.pass_time(59.0)
    assert not world.notes("idle_parked")
    world.pass_time(1000.0)
    (note,) = world.notes("idle_parked")
    assert (note.facts["job"], note.facts["groups"]) == (str(A), G1)
    assert note.facts["pids"] == f"{rank.pid},{other.pid}"
    assert note.facts["since_s"] == 60.0
    assert list(world.machine.leasing.idle.values()) == [0.0]
    # There is no courtesy unless it is configured.
    assert turn_of(world, A) is None


def test_a_job_that_came_back_may_be_named_again() -> None:
    world = World(limits=NAMED)
    session, _ranks, lease = parked(world)
    world.pass_time(61.0)
    again = world.acquire(session)
    assert not world.machine.leasing.idle, "it asks"
    world.release(lease)
    world.release(again)
    world.acquire(world.session(C))
    world.pass_time(61.0)
    assert len(world.notes("idle_parked")) == 2


def test_a_job_that_waits_is_not_idle_and_may_be_once_it_gives_up() -> None:
    world = World(limits=NAMED)
    session, _ranks, _lease = parked(world)
    again = world.acquire(session)
    world.pass_time(100.0)
    assert not world.notes("idle_parked")
    world.cancel(again)
    world.pass_time(59.0)
    assert not world.notes("idle_parked")
    world.pass_time(1.0)
    assert world.notes("idle_parked")


def test_without_a_limit_nobody_is_named() -> None:
    world = World(limits=replace(COURTEOUS, idle_park_s=None))
    parked(world)
    world.pass_time(1e5)
    assert not world.notes("idle_parked")
    assert turn_of(world, A) is None


def test_a_parked_job_that_dies_is_idle_no_longer() -> None:
    world = World(limits=NAMED)
    session, (rank,), _lease = parked(world)
    world.pass_time(61.0)
    world.die(rank)
    world.close(session)
    assert not world.machine.leasing.idle


def test_a_job_without_a_client_is_idle_too() -> None:
    world = World(limits=COURTEOUS)
    session, (rank,), lease = parked(world)
    world.close(session)
    world.pass_time(61.0)
    assert world.notes("idle_parked")
    world.release(lease)
    assert world.state(rank) is RUNNING


# --- courtesy turns ---------------------------------------------------------------------------


def test_an_idle_job_gets_a_turn_in_the_queue_and_leaves_when_somebody_waits() -> None:
    world = World(limits=COURTEOUS)
    _session, (rank,), lease = parked(world)
    before = world.acquire(world.session(C))
    world.pass_time(61.0)
    assert turn_of(world, A) is RoundState.QUEUED
    assert [note.facts["turn_s"] for note in world.notes("turn_queued")] == [10.0]
    after = world.acquire(world.session(B))
    world.release(lease)
    # G4: nobody who came before is passed over.
    assert world.held(before)
    world.release(before)
    assert turn_of(world, A) is RoundState.HELD
    assert world.state(rank) is RUNNING
    world.pass_time(9.9)
    assert world.waits(after)
    world.pass_time(0.2)
    assert world.held(after)
    assert world.state(rank) is PARKED
    assert [note.facts["job"] for note in world.notes("turn_over")] == [str(A)]


def test_a_turn_that_is_over_moves_nobody_while_nobody_waits() -> None:
    world = World(limits=COURTEOUS)
    _session, (rank,), lease = parked(world)
    world.release(lease)
    world.pass_time(61.0)
    moves = len(world.moves())
    world.pass_time(1000.0)
    assert world.state(rank) is RUNNING
    assert turn_of(world, A) is None
    assert len(world.moves()) == moves
    assert len(world.notes("turn")) == 1


def test_an_idle_job_gets_turns_again_and_again_until_it_asks() -> None:
    world = World(limits=COURTEOUS)
    session, (rank,), lease = parked(world)
    other = next(c.session for c in world.clients.values() if c.job == B)
    for _ in range(3):
        world.pass_time(61.0)
        again = world.acquire(other)
        world.release(lease)
        assert world.state(rank) is RUNNING
        world.pass_time(10.5)
        lease = again
        assert world.held(lease)
    assert len(world.notes("turn")) == 3
    own = world.acquire(session)
    world.pass_time(1000.0)
    assert turn_of(world, A) is None
    world.release(lease)
    assert world.held(own)


def test_holders_are_told_that_an_unasked_turn_waits() -> None:
    world = World(limits=COURTEOUS)
    _session, _ranks, lease = parked(world)
    world.pass_time(61.0)
    told = world.all_of(TellContended)[-1]
    assert (told.lease, told.waiters) == (lease, 1)


def test_a_job_that_asks_has_its_own_turn_instead() -> None:
    world = World(limits=COURTEOUS)
    session, (rank,), lease = parked(world)
    world.pass_time(61.0)
    world.release(lease)
    assert turn_of(world, A) is RoundState.HELD
    own = world.acquire(session)
    assert world.held(own)
    assert turn_of(world, A) is None
    assert world.state(rank) is RUNNING
    assert not world.grants()[-1].restored, "it was back already"


def test_a_job_that_dies_waits_for_no_turn() -> None:
    world = World(limits=COURTEOUS)
    session, (rank,), lease = parked(world)
    world.pass_time(61.0)
    after = world.acquire(world.session(C))
    world.die(rank)
    assert turn_of(world, A) is None
    world.release(lease)
    assert world.held(after)
    world.close(session)


def test_a_job_that_dies_in_its_turn_makes_room_at_once() -> None:
    world = World(limits=COURTEOUS)
    _session, (rank,), lease = parked(world)
    world.pass_time(61.0)
    after = world.acquire(world.session(C))
    world.release(lease)
    assert turn_of(world, A) is RoundState.HELD
    world.die(rank)
    assert world.held(after)


def test_a_turn_that_fails_is_tried_again_later() -> None:
    world = World(limits=COURTEOUS)
    _session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.NO_DEVICE_MEMORY, times=1)
    world.pass_time(61.0)
    world.release(lease)
    (note,) = world.notes("turn_failed")
    assert "no_device_memory" in str(note.facts["reason"])
    assert world.state(rank) is PARKED
    world.pass_time(9.0)
    assert turn_of(world, A) is None
    world.pass_time(2.0)
    assert world.state(rank) is RUNNING


def test_a_job_at_fault_gets_no_turn_until_the_fault_is_cleared() -> None:
    world = World(limits=COURTEOUS)
    session, (rank,), lease = parked(world)
    fails(world, Verb.RESTORE, Cause.DRIVER, times=1)
    own = world.acquire(session)
    world.release(lease)
    assert world.code(own) == "refused"
    world.pass_time(61.0)
    assert "job_faulted" in str(world.notes("turn_failed")[-1].facts["reason"])
    assert world.state(rank) is PARKED
    world.clear(A)
    world.pass_time(61.0)
    assert world.state(rank) is RUNNING


def test_a_job_in_several_groups_gets_a_turn_in_each() -> None:
    world = World(limits=COURTEOUS)
    session = world.session(A)
    for group, device in ((G1, D1), (G2, D2)):
        lease = world.acquire(session, group)
        world.context(A, device)
        world.look()
        world.release(lease)
    first, second = world.acquire(world.session(B), G1), world.acquire(world.session(B), G2)
    world.pass_time(61.0)
    assert len(world.machine.leasing.turns) == 2
    world.release(second)
    world.release(first)
    assert all(process.state is RUNNING for process in world.processes.values())


def test_after_a_restart_an_idle_job_gets_its_turn() -> None:
    world = World(limits=COURTEOUS)
    _session, (rank,), lease = parked(world)
    world.pass_time(61.0)
    world.restart()
    assert turn_of(world, A) is None
    world.pass_time(61.0)
    assert turn_of(world, A) is RoundState.QUEUED
    world.release(lease)
    assert world.state(rank) is RUNNING
    world.restart()
    assert world.state(rank) is RUNNING


# --- strangers --------------------------------------------------------------------------------

FREEZING = replace(LIMITS, stranger_turn_s=20.0)


def stranger_of(process: ProcessId) -> JobKey:
    return JobKey("lab", 0, f"stranger-{process.pid}")


def with_stranger() -> tuple[World, ProcessId]:
    world = World(limits=FREEZING, freeze_strangers=True)
    process = world.context(None, D1)
    world.look()
    return world, process


def test_a_stranger_makes_room_and_gets_turns_until_it_is_gone() -> None:
    world, stranger = with_stranger()
    (note,) = world.notes("stranger")
    assert note.facts["pid"] == stranger.pid
    session = world.session(A)
    lease = world.acquire(session)
    assert world.held(lease)
    assert world.state(stranger) is PARKED
    world.pass_time(0.1)
    assert turn_of(world, stranger_of(stranger)) is RoundState.QUEUED
    again = world.acquire(world.session(B))
    world.release(lease)
    assert world.state(stranger) is RUNNING
    world.look()
    world.pass_time(19.0)
    assert world.waits(again)
    world.pass_time(1.5)
    assert world.held(again)
    assert world.state(stranger) is PARKED
    world.die(stranger)
    assert not world.machine.leasing.turns
    assert not world.machine.tenancies.stranger_jobs
    assert not [key for key in world.journal if key[0] in ("stranger", "rank")]
    assert len(world.notes("stranger")) == 1


def test_a_stranger_that_nobody_needs_to_leave_stays() -> None:
    world, stranger = with_stranger()
    world.pass_time(1000.0)
    assert world.state(stranger) is RUNNING
    assert not world.moves()
    assert not world.notes("idle_parked")


def test_a_stranger_that_comes_while_a_job_is_parked_leaves_for_it() -> None:
    world = World(limits=FREEZING, freeze_strangers=True)
    session, (rank,), lease = parked(world)
    stranger = world.context(None, D1)
    again = world.acquire(session)
    world.release(lease)
    world.pass_time(5.0)
    assert world.held(again)
    assert world.state(rank) is RUNNING
    assert world.state(stranger) is PARKED


def test_a_restart_knows_a_parked_stranger() -> None:
    world, stranger = with_stranger()
    lease = world.acquire(world.session(A))
    world.restart()
    world.pass_time(0.1)
    assert world.machine.tenancies.stranger_jobs == {stranger_of(stranger): stranger}
    assert turn_of(world, stranger_of(stranger)) is RoundState.QUEUED
    world.release(lease)
    assert world.state(stranger) is RUNNING
    world.processes.pop(stranger)
    world.restart()
    assert not world.machine.tenancies.stranger_jobs
    assert ("stranger", stranger_of(stranger)) not in world.journal


def test_a_stranger_whose_record_is_all_that_is_left_is_forgotten() -> None:
    world, stranger = with_stranger()
    for key in [key for key in world.journal if key[0] != "stranger"]:
        del world.journal[key]
    world.processes.pop(stranger)
    world.restart()
    assert not world.machine.tenancies.stranger_jobs
    assert not world.journal


def test_a_stranger_that_says_hello_becomes_its_jobs_rank() -> None:
    world, stranger = with_stranger()
    session = world.session(A, pid=stranger.pid)
    assert not world.machine.tenancies.stranger_jobs
    lease = world.acquire(session)
    assert world.held(lease)
    assert world.state(stranger) is RUNNING
    assert not world.moves()


def test_a_parked_stranger_that_says_hello_gets_its_state_with_its_lease() -> None:
    world, stranger = with_stranger()
    lease = world.acquire(world.session(B))
    assert world.state(stranger) is PARKED
    session = world.session(A, pid=stranger.pid)
    assert not world.machine.leasing.turns, "it asks for itself"
    again = world.acquire(session)
    world.release(lease)
    assert world.held(again)
    assert world.grants()[-1].restored
    assert world.state(stranger) is RUNNING


def test_a_stranger_that_says_hello_while_it_is_moved_becomes_a_rank_afterwards() -> None:
    world, stranger = with_stranger()
    world.auto = False
    world.acquire(world.session(B))
    session = world.session(A, pid=stranger.pid)
    assert world.machine.tenancies.claims == {stranger: A}
    world.auto = True
    world.run()
    assert world.state(stranger) is PARKED
    assert not world.machine.tenancies.claims
    assert world.machine.tenancies.home[stranger].job == A
    again = world.acquire(session)
    assert world.waits(again)


def test_a_stranger_that_said_hello_before_a_restart_becomes_a_rank_after_it() -> None:
    world, stranger = with_stranger()
    world.auto = False
    world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.SNAPSHOT)
    world.session(A, pid=stranger.pid)
    world.auto = True
    world.restart()
    assert world.machine.tenancies.home[stranger].job == A
    assert not world.machine.tenancies.stranger_jobs


def test_a_stranger_that_dies_while_it_is_moved_claims_nothing() -> None:
    world, stranger = with_stranger()
    world.auto = False
    world.acquire(world.session(B))
    world.session(A, pid=stranger.pid)
    world.die(stranger)
    world.auto = True
    world.run()
    assert not world.machine.tenancies.claims
    assert not world.machine.tenancies.stranger_jobs


def test_a_parked_stranger_joins_a_job_that_holds_and_comes_back_to_it() -> None:
    world, stranger = with_stranger()
    session = world.session(A)
    lease = world.acquire(session)
    world.context(A, D1)
    world.look()
    assert world.held(lease)
    assert world.state(stranger) is PARKED
    # It is another process of the job that holds.
    world.processes[stranger].job = A
    world.session(A, pid=stranger.pid)
    assert world.held(lease)
    assert world.state(stranger) is RUNNING


def test_a_stranger_that_is_registered_is_its_jobs_rank() -> None:
    world, stranger = with_stranger()
    world.processes[stranger].job = C
    world.look()
    assert world.machine.tenancies.home[stranger].job == C
    assert not world.machine.tenancies.stranger_jobs


def test_strangers_elsewhere_and_tools_are_left_alone() -> None:
    world, stranger = with_stranger()
    world.session(A, pid=stranger.pid, tool=True)
    assert world.machine.tenancies.stranger_jobs
    elsewhere = world.context(None, DeviceId("GPU-of-no-group"))
    world.feed(GroupsObserved(found=world.found(frozenset({DeviceId("GPU-of-no-group")}))))
    assert elsewhere not in world.machine.tenancies.home
    assert len(world.notes("stranger")) == 2


def test_without_turns_for_strangers_they_stay_parked() -> None:
    world = World(limits=replace(LIMITS, stranger_turn_s=0.0), freeze_strangers=True)
    stranger = world.context(None, D1)
    world.look()
    world.release(world.acquire(world.session(A)))
    world.pass_time(1000.0)
    assert world.state(stranger) is PARKED
    assert not world.machine.leasing.turns


def test_a_resident_job_is_not_idle() -> None:
    world = World(limits=NAMED)
    resident(world)
    world.pass_time(1000.0)
    assert not world.notes("idle_parked")
    assert job("a") == A


# --- jobs that were asked to end ------------------------------------------------------------------


def test_a_parked_job_that_is_asked_to_end_gets_a_turn_at_once_behind_all_who_wait() -> None:
    world = World(limits=replace(NAMED, ending_turn_s=5.0))
    _session, (rank,), lease = parked(world)
    before = world.acquire(world.session(C))
    world.feed(EndAsked(job=A))
    world.pass_time(0.1)
    assert turn_of(world, A) is RoundState.QUEUED
    assert not world.notes("idle_parked"), "it is not said to be idle"
    world.release(lease)
    assert world.held(before)
    world.release(before)
    assert world.state(rank) is RUNNING
    world.die(rank)
    assert turn_of(world, A) is None
    assert not world.machine.leasing.told_to_end


def test_a_job_that_is_asked_to_end_while_it_holds_gets_a_turn_as_soon_as_it_was_parked() -> None:
    world = World(limits=replace(NAMED, ending_turn_s=5.0))
    session, (rank,) = resident(world)
    lease = world.acquire(session)
    world.feed(EndAsked(job=A))
    other = world.acquire(world.session(B))
    world.release(lease)
    assert world.held(other)
    assert world.state(rank) is PARKED
    world.pass_time(0.1)
    assert turn_of(world, A) is RoundState.QUEUED
    world.release(other)
    assert world.state(rank) is RUNNING


def test_nothing_is_kept_of_a_job_that_is_asked_to_end_and_has_nothing_on_devices() -> None:
    world = World(limits=NAMED)
    world.session(A)
    world.feed(EndAsked(job=A))
    assert not world.machine.leasing.told_to_end


def test_without_a_time_for_it_a_job_that_is_asked_to_end_gets_no_turn() -> None:
    world = World(limits=replace(NAMED, ending_turn_s=0.0))
    parked(world)
    world.feed(EndAsked(job=A))
    world.pass_time(100.0)
    assert turn_of(world, A) is None
