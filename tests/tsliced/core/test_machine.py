"""The core of one host behind one `handle`: clocks, alarms and a journal that fails."""

from __future__ import annotations

import dataclasses
import sys
from random import Random

import pytest
from world import D1, D2, G1, G2, HOST, LIMITS, World, failure, job

from tsliced.core.actions import (
    NOTHING,
    ConfirmRelease,
    Effects,
    EndSession,
    Grant,
    Note,
    ReserveDeviceMemory,
    ReserveHostMemory,
    ReserveNumbers,
    RunHooks,
    ScanGroups,
    SessionEndedRecord,
    StartOperation,
    TellStalled,
)
from tsliced.core.books import TELL_EVERY_S
from tsliced.core.events import (
    AcquireRequested,
    Event,
    OperationHindered,
    RecordsFailed,
    ReleaseRequested,
    SessionClosed,
    Started,
    TimePassed,
)
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.model import (
    Cause,
    LeaseId,
    OpId,
    ProcessId,
    RankState,
    RequestId,
    RoundId,
    SessionId,
    TenancyKey,
    Verb,
)
from tsliced.core.timers import TimerKey, TimerKind

A, B = job("a"), job("b")
RUNNING, PARKED = RankState.RUNNING, RankState.PARKED
BROKEN = failure(Cause.JOURNAL)


def resident(world: World) -> tuple[SessionId, ProcessId]:
    session = world.session(A)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.look()
    world.release(lease)
    return session, rank


def test_nothing_is_due_and_nothing_is_done_before_anything_happens() -> None:
    config = MachineConfig(
        host=HOST, groups=World().groups, limits=LIMITS, generation=1, ceiling=100
    )
    machine = Machine(config, random=Random(0))
    assert machine.deadline is None
    assert machine.handle(Started(), now=0.0) == Effects(actions=(ReserveNumbers(ceiling=108),))
    assert machine.handle(TimePassed(), now=5.0) == Effects()


def test_the_same_events_have_the_same_effects() -> None:
    def live() -> list[object]:
        world = World(seed=5)
        seen: list[object] = []
        world.watch = seen.append
        world.verdict = lambda verb, process: (
            failure(Cause.FREEZE_TIMEOUT, process.id) if world.now < 3 else None
        )
        _, rank = resident(world)
        world.acquire(world.session(B), G1, G2)
        world.pass_time(60.0)
        world.die(rank)
        return seen

    assert live() == live()


def test_the_story_has_the_latest_events() -> None:
    world = World(limits=dataclasses.replace(LIMITS, story=2))
    world.session(A)
    world.pass_time(1.0)
    world.look()
    assert [type(event).__name__ for _, event in world.machine.story] == [
        "SessionOpened",
        "GroupsObserved",
    ]


def test_only_full_checks_look_at_everything_after_each_event() -> None:
    world = World()
    world.acquire(world.session(A))
    world.machine.leasing.rounds.clear()
    with pytest.raises(AssertionError):
        world.look()
    world.machine._full_checks = False
    world.look()


def calls_of(machine: Machine, event: Event, now: float) -> int:
    """Return how many functions, ours and built-in ones, are called to handle an event."""
    count = 0

    def profile(_frame: object, what: str, _argument: object) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    sys.setprofile(profile)
    try:
        machine.handle(event, now=now)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("waiters", [False, True], ids=["undisputed", "with waiters"])
def test_a_lease_costs_the_same_however_many_others_there_are(waiters: bool) -> None:
    costs = []
    for others in (10, 400):
        world = World(full_checks=False, limits=dataclasses.replace(LIMITS, block=10_000))
        session = world.session(A)
        lease = world.acquire(session, request=1)
        elsewhere = world.session(B)
        world.acquire(elsewhere, G2)
        for number in range(others):
            other = world.session(job(f"j{number % 20}"))
            world.acquire(other, G1 if waiters and number % 2 else G2)
        release = ReleaseRequested(session=session, request=RequestId(9000), lease=lease)
        again = AcquireRequested(session=session, request=RequestId(9001), groups=(G1,))
        costs.append([calls_of(world.machine, event, world.now) for event in (release, again)])
    # Only the clocks' heap and the queue's end may be a step or two deeper.
    few, many = costs
    assert all(abs(a - b) <= 5 for a, b in zip(few, many, strict=True)), costs


# --- the alarm ------------------------------------------------------------------------------------


def test_a_call_that_does_not_come_back_is_named_and_nothing_is_cut_off() -> None:
    world = World()
    _, rank = resident(world)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.SNAPSHOT)
    world.processes[rank].device_bytes = 100
    world.pass_time(LIMITS.stuck_base_s + 1.0)
    (note,) = world.notes("stuck")
    assert note.level == "error"
    assert {key: note.facts[key] for key in ("job", "groups", "rank", "verb")} == {
        "job": "1000/a",
        "groups": "g1",
        "rank": f"n1:{rank.pid}",
        "verb": "snapshot",
    }
    (alarm,) = world.machine.alarms.stuck.values()
    assert alarm.text(world.now) == f"snapshot for 31 s: {alarm.reason}; {alarm.way_out}"
    assert "tslicectl kill 1000/a" in str(note.facts["way_out"])
    assert f"(pid {rank.pid} on n1)" in str(alarm.reason)
    told = [a for a in world.all_of(TellStalled) if a.reason.cause is Cause.STUCK]
    assert [(a.job, a.reason.text) for a in told] == [(A, alarm.text(LIMITS.stuck_base_s))]
    other = world.acquire(world.session(B), G2)
    world.auto = True
    world.run()
    assert world.held(other)
    assert world.held(waiter)
    (over,) = world.notes("unstuck")
    assert over.facts == {**note.facts, "seconds": over.facts["seconds"], "reason": "it ended"}
    assert not world.machine.alarms.stuck


def test_who_holds_is_not_told_of_a_question_that_does_not_come_back() -> None:
    world = World()
    session, rank = resident(world)
    lease = world.acquire(session)
    world.auto = False
    world.restart()
    world.run_until(StartOperation, Verb.QUERY)
    world.pass_time(LIMITS.stuck_base_s + 1.0)
    assert world.held(lease)
    assert [note.facts["rank"] for note in world.notes("stuck")] == [f"n1:{rank.pid}"]
    assert not world.all_of(TellStalled)


def hindered(world: World, reason: str | None) -> None:
    (op,) = world.machine.tenancies.operations
    world.feed(OperationHindered(op=op, reason=reason))


def test_a_process_that_is_stopped_in_a_call_is_named_at_once_and_until_it_can_run() -> None:
    world = World()
    _, rank = resident(world)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.SNAPSHOT)
    hindered(world, "it is stopped")
    hindered(world, "it is stopped")
    (note,) = world.notes("stuck")
    assert note.facts["reason"] == f"it is stopped (pid {rank.pid} on n1)"
    hindered(world, "its cgroup is frozen")
    assert len(world.notes("stuck")) == 2
    world.pass_time(LIMITS.stuck_base_s + 1.0)
    assert len(world.notes("stuck")) == 2, "why it is late is known"
    hindered(world, None)
    assert not world.machine.alarms.stuck
    assert world.notes("unstuck")[0].facts["reason"] == "its process can run again"
    hindered(world, None)
    world.pass_time(LIMITS.stuck_base_s + 1.0)
    assert "the driver has not come back" in str(world.notes("stuck")[2].facts["reason"])
    hindered(world, None)
    assert world.machine.alarms.stuck, "that it can run is not why it is late"
    (op,) = world.machine.tenancies.operations
    world.auto = True
    world.run()
    assert world.held(waiter)
    world.feed(OperationHindered(op=op, reason="it is stopped"))
    assert not world.machine.alarms.stuck, "it ended meanwhile"


def test_a_call_that_moves_much_may_take_longer() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.processes[rank].device_bytes = int(100 * LIMITS.stuck_bytes_per_s)
    world.look()
    world.release(lease)
    world.auto = False
    world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.SNAPSHOT)
    world.pass_time(LIMITS.stuck_base_s + 99.0)
    assert not world.notes("stuck")
    world.pass_time(2.0)
    assert world.notes("stuck")


# --- a journal that cannot be written -------------------------------------------------------------


def test_g2_a_grant_that_cannot_be_written_is_not_sent() -> None:
    world = World()
    session = world.session(A)
    world.release(world.acquire(session))
    granted = len(world.grants())
    world.journal_broken = BROKEN
    lease = world.acquire(session)
    assert len(world.grants()) == granted
    assert world.code(lease) == "unavailable"
    assert world.refusals()[0].text == "the daemon cannot write its journal: simulated journal"
    assert not world.machine.leasing.leases
    world.journal_broken = None
    assert world.held(world.acquire(session))


def test_a_grant_that_is_told_again_beside_records_that_fail_is_told() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, request=7)
    machine, now = world.machine, world.now
    again = machine.handle(
        AcquireRequested(session=session, request=RequestId(7), groups=(G1,)), now=now
    )
    effects = machine.handle(
        RecordsFailed(
            records=(SessionEndedRecord(session=SessionId("x")),),
            actions=again.actions,
            failure=BROKEN,
        ),
        now=now,
    )
    assert [type(action) for action in effects.actions] == [Grant]
    assert world.held(lease)


def test_a_grant_that_was_not_written_of_a_lease_that_is_over_is_forgotten() -> None:
    world = World()
    session = world.session(A)
    world.release(world.acquire(session))
    machine = world.machine
    request = AcquireRequested(session=session, request=RequestId(7), groups=(G1,))
    effects = machine.handle(request, now=world.now)
    machine.handle(SessionClosed(session=session), now=world.now)
    failed = RecordsFailed(records=effects.records, actions=effects.actions, failure=BROKEN)
    assert machine.handle(failed, now=world.now) == NOTHING


def test_no_rank_is_frozen_or_snapshotted_without_a_record_of_it() -> None:
    for verb in (Verb.FREEZE, Verb.SNAPSHOT):
        world = World()
        _, rank = resident(world)
        world.auto = False
        waiter = world.acquire(world.session(B))
        if verb is Verb.SNAPSHOT:
            world.run_until(StartOperation, Verb.FREEZE)
        else:
            world.run_until(ScanGroups)
        world.journal_broken = BROKEN
        world.run()
        assert (verb, rank.pid) not in [
            (start.verb, start.rank.process.pid) for start in world.ended(StartOperation)
        ]
        world.journal_broken = None
        world.auto = True
        world.run()
        world.pass_time(2 * LIMITS.retry_max_s)
        assert world.held(waiter)


def test_the_way_back_needs_no_record() -> None:
    world = World()
    _, rank = resident(world)
    world.auto = False
    world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.SNAPSHOT)
    world.journal_broken = BROKEN
    world.run()
    assert world.state(rank) is RUNNING
    assert (Verb.RESTORE, rank.pid) in [
        (start.verb, start.rank.process.pid) for start in world.ended(StartOperation)
    ]


@pytest.mark.parametrize("kind", ["scan", "memory", "hooks", "device memory"])
def test_what_a_move_prepares_has_failed_when_that_cannot_be_written(kind: str) -> None:
    world = World()
    session, rank = resident(world)
    extra = world.session(A, hooks=True)
    if kind == "device memory":
        lease = world.acquire(world.session(B))
        world.journal_broken = BROKEN
        world.release(lease)
        waiter = world.acquire(session)
        assert world.state(rank) is PARKED
    else:
        world.journal_broken = BROKEN
        waiter = world.acquire(world.session(B))
        assert world.state(rank) is RUNNING
    assert not world.held(waiter)
    world.journal_broken = None
    world.pass_time(3 * LIMITS.retry_max_s)
    assert world.held(waiter)
    assert extra


@pytest.mark.parametrize("action", ["memory", "quiesce", "device"])
def test_steps_that_are_announced_beside_records_that_fail_have_failed(action: str) -> None:
    world = World()
    session, _ = resident(world)
    if action == "quiesce":
        world.session(A, hooks=True)
    if action == "device":
        other = world.acquire(world.session(B))
        world.auto = False
        world.acquire(session)
        world.release(other)
        world.run_until(ReserveDeviceMemory)
    else:
        world.auto = False
        world.acquire(world.session(B))
        world.run_until(RunHooks if action == "quiesce" else ReserveHostMemory)
    pending = world.pending.pop()
    world.feed(RecordsFailed(records=(), actions=(pending,), failure=BROKEN))
    world.auto = True
    world.run()
    world.pass_time(2 * LIMITS.retry_max_s)
    assert len(world.grants()) == (3 if action == "device" else 2)


def test_answers_are_given_although_they_cannot_be_written_and_are_made_up_for() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    world.journal_broken = BROKEN
    request = world.release(lease)
    (answer,) = world.answers(request)
    assert isinstance(answer, ConfirmRelease)
    assert ("lease", lease) in world.journal
    world.journal_broken = None
    world.pass_time(LIMITS.retry_max_s)
    assert ("lease", lease) not in world.journal
    assert not world.machine.unwritten


def test_who_waits_for_a_move_that_cannot_be_written_down_is_told_once_and_goes_on_later() -> None:
    world = World()
    world.acquire(world.session(A))
    world.journal_broken = BROKEN
    lease = world.acquire(world.session(B), G2)
    world.pass_time(3 * LIMITS.retry_max_s)
    assert world.waits(lease)
    (told,) = world.all_of(TellStalled)
    assert (told.lease, told.reason) == (lease, BROKEN)
    world.journal_broken = None
    world.pass_time(3 * LIMITS.retry_max_s)
    assert world.held(lease)


def test_what_was_not_written_goes_before_the_next_thing_that_is() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    world.journal_broken = BROKEN
    world.close(session)
    assert world.all_of(EndSession)
    world.journal_broken = None
    other = world.acquire(world.session(B))
    world.restart()
    assert world.held(other)
    assert lease not in world.machine.leasing.leases
    assert session not in world.machine.leasing.sessions


def test_a_journal_that_stays_broken_is_tried_again_and_again() -> None:
    world = World()
    world.journal_broken = BROKEN
    world.session(A)
    world.pass_time(5 * LIMITS.retry_max_s)
    assert world.machine.unwritten
    assert world.machine.timers.get(TimerKey(TimerKind.JOURNAL, OpId(0))) is not None
    world.journal_broken = None
    world.pass_time(LIMITS.retry_max_s)
    assert world.machine.deadline is None


# --- clocks ---------------------------------------------------------------------------------------


def test_clocks_of_what_is_over_do_not_run() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    session = world.session(B)
    world.release(world.acquire(world.session(B), G2, timeout_s=50.0))
    world.acquire(session, timeout_s=50.0)
    world.disconnect(session)
    world.close(session)
    world.release(holder)
    world.pass_time(TELL_EVERY_S)
    assert world.machine.deadline is None


def test_what_comes_due_together_with_the_end_of_its_owner_is_harmless() -> None:
    world = World()
    world.acquire(world.session(A))
    session = world.session(B)
    world.acquire(session, timeout_s=LIMITS.grace_s)
    world.disconnect(session)
    world.pass_time(LIMITS.grace_s)
    assert world.machine.deadline is None
    assert not world.machine.leasing.arbiters[G1].queue


def test_a_pause_ends_with_its_round() -> None:
    world = World()
    _, rank = resident(world)
    world.pass_time(TELL_EVERY_S)
    world.verdict = lambda verb, process: (
        failure(Cause.FREEZE_TIMEOUT, process.id) if verb is Verb.FREEZE else None
    )
    waiter = world.acquire(world.session(B))
    before = world.machine.deadline
    world.cancel(waiter)
    assert before is not None
    assert world.state(rank) is RUNNING
    assert world.machine.timers.deadline is None


def test_a_clock_of_something_that_is_gone_is_harmless() -> None:
    world = World()
    leasing = world.machine.leasing
    assert leasing.tenancies.on_barrier(TenancyKey(A, (G1,)), now=0.0) == []
    leasing.on_retry_due(RoundId(99), 0.0)
    leasing.on_acquire_due(LeaseId("gone"), 0.0)
    leasing.on_confirm_due(LeaseId("gone"), 0.0)
    leasing.on_grace_due(SessionId("gone"), 0.0)
    assert leasing.out == []


def test_a_stalled_round_is_told_each_new_reason() -> None:
    world = World()
    _, rank = resident(world)
    causes = iter([Cause.FREEZE_TIMEOUT, Cause.DRIVER, Cause.DRIVER])
    world.verdict = lambda verb, process: (
        failure(next(causes), process.id) if verb is Verb.FREEZE else None
    )
    world.acquire(world.session(B))
    world.pass_time(100.0)
    told = [(action.reason.cause, action.way_out) for action in world.all_of(TellStalled)]
    assert [cause for cause, _ in told] == [Cause.FREEZE_TIMEOUT, Cause.DRIVER, Cause.DRIVER]
    assert [way_out != "" for _, way_out in told] == [True, False, True], "at last it is pinned"
    assert world.state(rank) is RUNNING


def test_notes_are_complete_sentences_of_facts() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1, G2)
    world.context(A, D2)
    world.release(lease)
    for note in world.all_of(Note):
        assert note.facts["job"] == "1000/a"
        assert note.facts["groups"] == "g1,g2"
