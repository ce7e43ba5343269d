"""What one host does for one tenancy: it drives its ranks to the ordered goal, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from participant_lab import (
    BACK_NOW,
    FREE_DEVICE,
    FROZEN,
    KEY,
    P1,
    P2,
    P3,
    PARKED,
    PARKED_NOW,
    RUNNING,
    SESSION,
    Lab,
    found,
    reserve_host,
    scan,
)
from world import D1, D2, G2, HOST, LIMITS, failure, job

from tsliced.core.actions import (
    FreeMemory,
    Note,
    RankEndedRecord,
    RankRecord,
    ReserveDeviceMemory,
    ReserveHostMemory,
    RunHooks,
    ScanGroups,
)
from tsliced.core.events import OperationFinished
from tsliced.core.model import (
    Cause,
    Counter,
    FoundRank,
    Goal,
    JobKey,
    OpId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    Stamp,
    Verb,
)
from tsliced.core.participant import MAX_SCANS
from tsliced.core.signals import Order, Report


def test_frozen_finds_the_ranks_reserves_memory_freezes_one_by_one_and_looks_again() -> None:
    lab = Lab()
    assert lab.order(Goal.FROZEN) == [scan(1)]
    assert lab.scanned(1, found(P1), found(P2)) == [reserve_host(2, P1, P2)]
    assert lab.reserved(2) == lab.start(3, P1, Verb.FREEZE)
    assert lab.ended(3, P1, FROZEN) == lab.start(4, P2, Verb.FREEZE, peer_frozen=True)
    assert lab.ended(4, P2, FROZEN) == [scan(5)]
    assert lab.scanned(5, found(P1), found(P2)) == [lab.at()]


def test_off_snapshots_sees_the_devices_free_and_settles_what_was_reserved() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    # It cannot grow any more, and others may have taken memory since: once more.
    assert lab.order(Goal.OFF, step=1) == [reserve_host(5, P1)]
    assert lab.reserved(5) == lab.start(6, P1, Verb.SNAPSHOT)
    assert lab.ended(6, P1, PARKED) == [scan(7, P1)]
    assert lab.scanned(7) == [PARKED_NOW, FREE_DEVICE, lab.at(step=1)]
    assert lab.participant.away


def test_what_no_longer_fits_when_it_is_frozen_is_not_snapshotted() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    lab.order(Goal.OFF, step=1)
    failed = failure(Cause.NO_HOST_MEMORY)
    assert lab.reserved(5, failed) == [lab.at(step=1, failed=failed)]


def test_restored_looks_at_the_devices_reserves_room_and_restores() -> None:
    lab = Lab()
    lab.rank(P1, PARKED)
    assert lab.order(Goal.RESTORED) == [replace(scan(1), recent=True)]
    room = ReserveDeviceMemory(op=OpId(2), tenancy=KEY, demands=((RankId(HOST, P1), ((D1, 90),)),))
    assert lab.scanned(1) == [room]
    assert lab.reserved(2) == lab.start(3, P1, Verb.RESTORE)
    assert lab.ended(3, P1, FROZEN) == [lab.at()]


def test_those_that_drain_are_frozen_while_the_others_run_and_have_the_time_for_it() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    second, third = (replace(found(process), drains=True) for process in (P2, P3))
    lab.scanned(1, found(P1), found(P2), second, third)
    assert lab.reserved(2) == lab.start(3, P2, Verb.FREEZE)
    assert lab.ended(3, P2, FROZEN) == lab.start(4, P3, Verb.FREEZE)
    assert lab.ended(4, P3, FROZEN) == lab.start(5, P1, Verb.FREEZE, peer_frozen=True)


def test_on_thaws_all_at_once() -> None:
    lab = Lab()
    lab.rank(P1, FROZEN)
    lab.rank(P2, FROZEN)
    lab.participant.order = Order(host=HOST, tenancy=KEY, stamp=lab.stamp(), goal=Goal.RESTORED)
    effects = lab.order(Goal.ON)
    assert effects == [*lab.start(1, P1, Verb.THAW), *lab.start(2, P2, Verb.THAW)]
    assert lab.ended(2, P2, RUNNING) == []
    assert lab.ended(1, P1, RUNNING) == [BACK_NOW, FREE_DEVICE, lab.at()]
    assert not lab.participant.away


@pytest.mark.parametrize(
    ("goal", "verb"), [(Goal.OFF, Verb.SNAPSHOT), (Goal.RESTORED, Verb.RESTORE)]
)
def test_ranks_that_share_no_device_are_moved_in_parallel_and_others_one_by_one(
    goal: Goal, verb: Verb
) -> None:
    lab = Lab()
    before, after = (FROZEN, PARKED) if goal is Goal.OFF else (PARKED, FROZEN)
    lab.participant.order = Order(host=HOST, tenancy=KEY, stamp=lab.stamp(), goal=Goal.FROZEN)
    for process, device in ((P1, D1), (P2, D1), (P3, D2)):
        lab.rank(process, before, device)
    effects = lab.order(goal)
    if goal is Goal.OFF:
        assert effects == [reserve_host(1, P1, P2, P3)]
        effects = lab.reserved(1)
        op = 2
    else:
        lab.scanned(1)
        effects = lab.reserved(2)
        op = 3
    assert effects == [*lab.start(op, P1, verb), *lab.start(op + 1, P3, verb)]
    assert lab.ended(op, P1, after) == []
    assert lab.ended(op + 1, P3, after) == lab.start(op + 2, P2, verb)


def test_g6_an_order_that_is_repeated_is_answered_again_and_a_lower_one_is_refused() -> None:
    lab = Lab()
    lab.rank(P1)
    answer = lab.order(Goal.ON)
    order = lab.participant.order
    assert order is not None
    assert answer == [BACK_NOW, FREE_DEVICE, lab.at()]
    assert lab.participant.on_order(order, now=0.0) == [lab.at()]
    lower = Order(host=HOST, tenancy=KEY, stamp=Stamp(0, Counter(1, 0), 9), goal=Goal.OFF)
    assert lab.participant.on_order(lower, now=0.0) == []
    assert lab.participant.order == order


def test_an_order_that_is_being_carried_out_is_not_answered_yet() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    order = lab.participant.order
    assert order is not None
    assert lab.participant.on_order(order, now=0.0) == []


def test_what_is_in_flight_ends_before_a_new_order_is_begun() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.reserved(2)
    assert lab.order(Goal.RESTORED) == []
    # It came too late to answer FROZEN; that it is frozen counts all the same.
    assert lab.ended(3, P1, FROZEN) == [lab.at()]


def test_a_failure_answers_only_the_epoch_that_it_was_started_for() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.reserved(2)
    lab.order(Goal.RESTORED)
    late = failure(Cause.FREEZE_TIMEOUT, P1)
    assert lab.ended(3, P1, RUNNING, late) == [lab.at()]


def test_a_failed_operation_is_a_cannot_and_stays_one_for_the_epoch() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.reserved(2)
    failed = failure(Cause.FREEZE_TIMEOUT, P1)
    assert lab.ended(3, P1, RUNNING, failed) == [lab.at(failed=failed)]
    assert lab.order(Goal.OFF, step=1) == [lab.at(step=1, failed=failed)]
    assert lab.order(Goal.RESTORED) == [lab.at()]


@pytest.mark.parametrize("step", ["scan", "memory", "hooks"])
def test_a_step_that_fails_is_a_cannot_and_nothing_is_frozen(step: str) -> None:
    lab = Lab()
    lab.participant.hook_sessions[SESSION] = None
    failed = failure(Cause.NO_HOST_MEMORY)
    lab.order(Goal.FROZEN)
    if step == "scan":
        effects = lab.scanned(1, failed=failed)
    else:
        lab.scanned(1, found(P1))
        effects = lab.reserved(2, failed if step == "memory" else None)
        if step == "hooks":
            effects = lab.hooks(3, failed)
    assert effects == [lab.at(failed=failed)]


def test_a_step_of_an_older_order_says_nothing_about_the_newer_one() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    assert lab.order(Goal.ON) == []
    assert lab.scanned(1, failed=failure(Cause.DRIVER)) == [BACK_NOW, FREE_DEVICE, lab.at()]


def test_memory_that_was_refused_is_asked_for_again() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.reserved(2, failure(Cause.NO_HOST_MEMORY))
    lab.order(Goal.FROZEN)
    assert lab.scanned(3, found(P1)) == [reserve_host(4, P1)]


def test_memory_is_reserved_for_each_eviction_anew() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    lab.order(Goal.RESTORED)
    lab.order(Goal.ON, step=1)
    lab.ended(5, P1, RUNNING)
    lab.order(Goal.FROZEN)
    assert lab.scanned(6, found(P1)) == [reserve_host(7, P1)]


def test_what_came_back_only_in_part_is_reserved_for_again_before_it_leaves() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    lab.park_one()
    lab.order(Goal.RESTORED)
    lab.scanned(8)
    lab.reserved(9)
    lab.ended(10, P1, FROZEN)
    assert lab.order(Goal.OFF) == [reserve_host(11, P1)]


def test_room_on_the_devices_that_was_refused_keeps_the_host_memory() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    lab.park_one()
    lab.order(Goal.RESTORED)
    lab.scanned(8)
    failed = failure(Cause.NO_DEVICE_MEMORY)
    assert lab.reserved(9, failed) == [lab.at(failed=failed)]
    assert lab.order(Goal.OFF) == [scan(10, P1)]


def test_a_rank_that_has_grown_is_reserved_for_before_it_is_frozen() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.participant.put(found(P1, device_bytes=150))
    demand = ReserveHostMemory(op=OpId(3), tenancy=KEY, demands=((RankId(HOST, P1), 150),))
    assert lab.reserved(2) == [demand]


def test_a_late_rank_is_frozen_too_before_frozen_is_answered() -> None:
    lab = Lab()
    lab.freeze_one()
    assert lab.scanned(4, found(P1), found(P2)) == [reserve_host(5, P1, P2)]
    assert lab.reserved(5) == lab.start(6, P2, Verb.FREEZE, peer_frozen=True)
    assert lab.ended(6, P2, FROZEN) == [scan(7)]
    assert lab.scanned(7, found(P1), found(P2)) == [lab.at()]


def test_a_rank_that_is_late_for_off_is_frozen_and_snapshotted_too() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    lab.order(Goal.OFF, step=1)
    lab.reserved(5)
    lab.ended(6, P1, PARKED)
    assert lab.scanned(7, found(P2)) == lab.start(8, P2, Verb.FREEZE)
    assert lab.ended(8, P2, FROZEN) == [reserve_host(9, P2)]
    assert lab.reserved(9) == lab.start(10, P2, Verb.SNAPSHOT)
    assert lab.ended(10, P2, PARKED) == [scan(11, P1, P2)]
    assert lab.scanned(11) == [PARKED_NOW, FREE_DEVICE, lab.at(step=1)]


def test_g9_a_job_that_makes_processes_faster_than_they_freeze_is_given_up_on() -> None:
    lab = Lab()
    lab.freeze_one()
    op, pid = 4, 2
    for _ in range(MAX_SCANS):
        newcomer = ProcessId(pid, 1)
        effects = lab.scanned(op, found(P1), found(newcomer))
        if isinstance(effects[-1], Report):
            break
        lab.reserved(op + 1)
        lab.ended(op + 2, newcomer, FROZEN)
        op, pid = op + 3, pid + 1
    (answer,) = effects
    assert isinstance(answer, Report)
    assert answer.failure is not None
    assert answer.failure.cause is Cause.FREEZE_TIMEOUT
    assert pid == MAX_SCANS


def test_g12_memory_that_is_still_there_after_a_snapshot_is_not_called_off() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    lab.order(Goal.OFF, step=1)
    lab.reserved(5)
    lab.ended(6, P1, PARKED)
    (answer,) = lab.scanned(7, found(P1))
    assert isinstance(answer, Report)
    assert answer.failure is not None
    assert answer.failure.cause is Cause.NOT_FREED
    assert answer.failure.rank == RankId(HOST, P1)
    assert "100 bytes are still on its devices" in answer.failure.text
    assert "no more than 50 may be" in answer.failure.text


@pytest.mark.parametrize(("owner", "cause"), [(job("b"), Cause.OCCUPIED), (None, Cause.STRANGER)])
def test_g1_nothing_is_restored_where_anybody_else_is(owner: JobKey | None, cause: Cause) -> None:
    lab = Lab()
    lab.rank(P1, PARKED)
    lab.order(Goal.RESTORED)
    (answer,) = lab.scanned(1, found(P2, owner=owner))
    assert isinstance(answer, Report)
    assert answer.failure == Reason(
        cause=cause, text="pid 2 (python) of uid 1000 is on the devices"
    )


def test_its_own_processes_are_no_company_nor_is_one_without_a_context() -> None:
    lab = Lab()
    lab.rank(P1, PARKED)
    lab.rank(P2)
    lab.order(Goal.RESTORED)
    other = FoundRank(process=P3, job=job("b"), devices=frozenset(), device_bytes=0)
    (room,) = lab.scanned(1, found(P2), found(P2, owner=None), other)
    assert isinstance(room, ReserveDeviceMemory)


def test_g1_a_newcomer_looks_at_the_devices_too() -> None:
    lab = Lab()
    assert lab.order(Goal.RESTORED) == [replace(scan(1), forgotten=True, recent=True)]
    assert lab.scanned(1, found(P1)) == [lab.at()]


def test_one_that_never_left_does_not_look_before_it_goes_on() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1))
    assert lab.order(Goal.RESTORED) == [lab.at()]


def test_ranks_beyond_the_groups_have_their_devices_looked_at_as_well() -> None:
    lab = Lab()
    lab.rank(P1, PARKED, D1, D2)
    lab.participant.beyond[G2] = RankId(HOST, P1)
    assert lab.order(Goal.RESTORED) == [
        ScanGroups(op=OpId(1), tenancy=KEY, beyond=(G2,), recent=True)
    ]


def test_the_driver_is_asked_about_a_rank_that_nobody_knows_about() -> None:
    lab = Lab()
    lab.rank(P1, RankState.UNKNOWN)
    lab.rank(P2, RankState.UNKNOWN)
    effects = lab.order(Goal.QUERY)
    assert effects == [*lab.start(1, P1, Verb.QUERY), *lab.start(2, P2, Verb.QUERY)]
    assert lab.ended(1, P1, PARKED) == []
    assert lab.ended(2, P2, FROZEN) == [lab.at()]


def test_a_call_that_was_cut_off_is_followed_by_a_question() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.reserved(2)
    stopped = failure(Cause.STOPPED, P1)
    assert lab.ended(3, P1, RankState.UNKNOWN, stopped) == [lab.at(failed=stopped)]
    assert lab.order(Goal.RESTORED) == lab.start(4, P1, Verb.QUERY)
    assert lab.ended(4, P1, FROZEN) == [lab.at()]


@pytest.mark.parametrize("goal", list(Goal))
def test_a_rank_that_is_broken_for_good_can_be_brought_to_no_goal(goal: Goal) -> None:
    lab = Lab()
    lab.rank(P1, RankState.FAILED)
    (answer,) = lab.order(goal)
    assert isinstance(answer, Report)
    assert answer.failure is not None
    assert (answer.failure.cause, answer.failure.rank) == (Cause.FAILED, RankId(HOST, P1))


def test_nobody_is_thawed_beside_a_parked_rank() -> None:
    lab = Lab()
    lab.rank(P1, PARKED)
    lab.rank(P2)
    (answer,) = lab.order(Goal.ON)
    assert isinstance(answer, Report)
    assert answer.failure is not None
    assert answer.failure.rank == RankId(HOST, P1)


def hook(op: int, *, quiesce: bool, epoch: int = 1) -> RunHooks:
    return RunHooks(
        op=OpId(op),
        tenancy=KEY,
        sessions=(SESSION,),
        quiesce=quiesce,
        timeout_s=LIMITS.quiesce_timeout_s,
        epoch=Counter(1, epoch),
    )


def test_sessions_quiesce_before_the_freeze_and_resume_after_the_thaw() -> None:
    lab = Lab()
    lab.participant.hook_sessions[SESSION] = None
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    assert lab.reserved(2) == [hook(3, quiesce=True)]
    assert lab.hooks(3) == lab.start(4, P1, Verb.FREEZE)
    lab.ended(4, P1, FROZEN)
    lab.scanned(5, found(P1))
    lab.order(Goal.RESTORED)
    lab.order(Goal.ON, step=1)
    assert lab.ended(6, P1, RUNNING) == [hook(7, quiesce=False, epoch=2)]
    assert lab.hooks(7) == [BACK_NOW, FREE_DEVICE, lab.at(step=1)]
    assert not lab.participant.owes_resume


def test_the_history_is_told_how_long_sessions_took_to_quiesce_and_to_resume() -> None:
    lab = Lab()
    lab.participant.hook_sessions[SESSION] = None
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.reserved(2)
    lab.hooks(3, after_s=1.5)
    facts: dict[str, str | int | float | None] = {
        "job": "1000/a",
        "groups": "g1",
        "host": "n1",
        "cause": None,
        "reason": None,
    }
    facts["epoch"] = Counter(1, 1).as_int()
    assert lab.told == Note(
        kind="hooks", level="info", facts={**facts, "verb": "quiesce", "seconds": 1.5}
    )
    lab.ended(4, P1, FROZEN)
    lab.scanned(5, found(P1))
    lab.order(Goal.RESTORED)
    lab.order(Goal.ON, step=1)
    lab.ended(6, P1, RUNNING)
    failed = failure(Cause.QUIESCE)
    lab.hooks(7, failed, after_s=0.25)
    facts |= {"epoch": Counter(1, 2).as_int(), "cause": failed.cause.value, "reason": str(failed)}
    assert lab.told == Note(
        kind="hooks", level="warning", facts={**facts, "verb": "resume", "seconds": 0.25}
    )


def test_a_session_that_cannot_quiesce_is_told_to_resume_all_the_same() -> None:
    lab = Lab()
    lab.participant.hook_sessions[SESSION] = None
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1))
    lab.reserved(2)
    failed = failure(Cause.QUIESCE)
    assert lab.hooks(3, failed) == [lab.at(failed=failed)]
    lab.order(Goal.RESTORED)
    assert lab.order(Goal.ON, step=1) == [hook(4, quiesce=False, epoch=2)]


def test_a_job_that_cannot_resume_runs_all_the_same() -> None:
    lab = Lab()
    lab.rank(P1)
    lab.participant.hook_sessions[SESSION] = None
    lab.participant.quiesced = True
    assert lab.order(Goal.ON) == [hook(1, quiesce=False)]
    assert lab.hooks(1, failure(Cause.QUIESCE)) == [BACK_NOW, FREE_DEVICE, lab.at()]
    assert not lab.participant.owes_resume


def test_without_ranks_nobody_is_asked_to_quiesce_and_without_sessions_nobody_resumes() -> None:
    lab = Lab()
    lab.participant.hook_sessions[SESSION] = None
    lab.order(Goal.FROZEN)
    assert lab.scanned(1) == [scan(2)]
    del lab.participant.hook_sessions[SESSION]
    lab.scanned(2)
    lab.participant.quiesced = True
    assert lab.order(Goal.ON) == [BACK_NOW, FREE_DEVICE, lab.at()]


def test_a_dead_rank_needs_no_move_and_the_last_one_frees_the_memory() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    lab.scanned(1, found(P1), found(P2))
    lab.reserved(2)
    participant = lab.participant
    assert participant.on_rank_exited(P2, now=0.0) == [RankEndedRecord(rank=RankId(HOST, P2))]
    assert participant.on_rank_exited(P1, now=0.0) == []
    assert participant.on_devices
    event = OperationFinished(
        op=OpId(3), rank=RankId(HOST, P1), observed=RankState.UNKNOWN, failure=failure(Cause.DRIVER)
    )
    _, ended, free, rescan = participant.on_operation(event, now=0.0)
    assert ended == RankEndedRecord(rank=RankId(HOST, P1))
    assert free == FreeMemory(tenancy=KEY, host=True, device=True)
    # What became of the dead one is no failure of the order.
    assert rescan == scan(4)
    assert not participant.on_devices


def test_what_was_seen_of_a_rank_is_kept_and_a_new_device_is_written_down() -> None:
    lab = Lab()
    participant = lab.participant
    (record,) = participant.put(found(P1))
    assert record == RankRecord(
        rank=RankId(HOST, P1),
        tenancy=KEY,
        devices=frozenset({D1}),
        device_bytes=100,
        state=RUNNING,
        verb=None,
    )
    assert participant.put(found(P1, device_bytes=120)) == []
    assert participant.put(found(P1, device_bytes=0)) == []
    assert participant.ranks[P1].device_bytes == 120
    (grown,) = participant.put(found(P1, D2))
    assert isinstance(grown, RankRecord)
    assert grown.devices == {D1, D2}


@pytest.mark.parametrize("parked", [True, False], ids=["parked", "being frozen"])
def test_what_is_seen_of_a_rank_that_is_being_moved_changes_nothing(parked: bool) -> None:
    lab = Lab()
    if parked:
        lab.rank(P1, PARKED)
    else:
        lab.order(Goal.FROZEN)
        lab.scanned(1, found(P1))
        lab.reserved(2)
    assert lab.participant.put(found(P1, D2)) == []
    assert lab.participant.ranks[P1].devices == {D1}


def test_broken_invariants_are_found() -> None:
    lab = Lab()
    lab.rank(P1, FROZEN)
    with pytest.raises(AssertionError, match="without an order"):
        lab.participant.check_invariants()
    answer = lab.at()
    lab.participant.answer = answer
    with pytest.raises(AssertionError, match="only orders"):
        lab.participant.check_invariants()
    lab.order(Goal.QUERY)
    lab.participant.answer = answer
    with pytest.raises(AssertionError, match="standing order"):
        lab.participant.check_invariants()


def test_a_step_has_one_result() -> None:
    lab = Lab()
    lab.order(Goal.FROZEN)
    with pytest.raises(AssertionError, match="one result"):
        lab.scanned(2)


def test_of_several_failures_the_first_is_told_when_all_have_ended() -> None:
    lab = Lab()
    lab.participant.order = Order(host=HOST, tenancy=KEY, stamp=lab.stamp(), goal=Goal.FROZEN)
    lab.rank(P1, FROZEN, D1)
    lab.rank(P2, FROZEN, D2)
    lab.order(Goal.OFF)
    lab.reserved(1)
    first, second = failure(Cause.UNSUPPORTED, P2), failure(Cause.DRIVER, P1)
    assert lab.ended(3, P2, FROZEN, first) == []
    assert lab.ended(2, P1, FROZEN, second) == [lab.at(failed=first)]
