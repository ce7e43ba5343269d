"""The mover of one tenancy, over two hosts: each goal is a barrier, and one CANNOT turns it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from world import G1, LIMITS, failure, job

from tsliced.core.actions import Note, TenancyRecord
from tsliced.core.coordinator import MAX_RECOVERIES, NO_STAMP, Coordinator, Place
from tsliced.core.model import (
    Cause,
    Counter,
    Goal,
    GroupName,
    HostName,
    ProcessId,
    RankState,
    Reason,
    Stamp,
    TenancyKey,
)
from tsliced.core.numbers import Numbers
from tsliced.core.signals import (
    AdmissionFailed,
    Admitted,
    Blocked,
    Effect,
    Evicted,
    EvictionFailed,
    Order,
    Report,
)

KEY = TenancyKey(job("a"), (G1,))
N1, N2 = HostName("n1"), HostName("n2")
RUNNING, FROZEN, PARKED = RankState.RUNNING, RankState.FROZEN, RankState.PARKED
BROKEN = failure(Cause.DRIVER, ProcessId(1, 1))


@dataclass(slots=True, kw_only=True)
class Move:
    """A coordinator and what it has said."""

    place: Place = Place.ON
    epochs: int = 100
    now: float = 0.0
    coordinator: Coordinator = field(init=False)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(
            tenancy=KEY,
            hosts=(N1, N2),
            numbers=Numbers(generation=1, ceiling=0, block=8),
            limits=LIMITS,
            place=self.place,
        )
        self.coordinator.numbers.ceiling = self.epochs

    def orders(self, effects: list[Effect]) -> tuple[Stamp, Goal]:
        """Return what was ordered: written down first, then to both hosts alike."""
        record, *orders = effects
        stamp, goal = self.coordinator.stamp, GOAL_OF[self.coordinator.place]
        assert isinstance(record, TenancyRecord)
        assert (record.tenancy, record.stamp) == (KEY, stamp)
        assert orders == [
            Order(host=host, tenancy=KEY, stamp=stamp, goal=goal) for host in (N1, N2)
        ]
        return stamp, goal

    def report(
        self, host: HostName, *states: RankState, failed: Reason | None = None,
        stamp: Stamp | None = None, disowned: tuple[GroupName, ...] = (), untried: bool = False,
    ) -> list[Effect]:  # fmt: skip
        """Let a host answer the standing order."""
        report = Report(
            host=host,
            tenancy=KEY,
            stamp=stamp or self.coordinator.stamp,
            failure=failed,
            states=tuple((ProcessId(i, 1), state) for i, state in enumerate(states)),
            disowned=disowned,
            untried=untried,
        )
        effects = self.coordinator.on_report(report, now=self.now)
        self.coordinator.check_invariants()
        return effects

    def arrive(self, *states: RankState) -> list[Effect]:
        """Let both hosts be AT the standing goal."""
        assert self.report(N1, *states) == []
        return self.report(N2, *states)

    def evict(self) -> list[Effect]:
        return self.coordinator.evict(now=self.now, ranks=4)

    def admit(self) -> list[Effect]:
        return self.coordinator.admit(now=self.now, parked=True)

    def wait(self) -> list[Effect]:
        """Let the deadline come."""
        assert self.coordinator.deadline is not None
        self.now = self.coordinator.deadline
        return self.coordinator.on_deadline(now=self.now)


GOAL_OF = {
    Place.FREEZING: Goal.FROZEN,
    Place.SNAPSHOTTING: Goal.OFF,
    Place.TURNING_BACK: Goal.RESTORED,
    Place.REVIVING: Goal.ON,
    Place.RESTORING: Goal.RESTORED,
    Place.THAWING: Goal.ON,
    Place.WITHDRAWING: Goal.OFF,
    Place.ASKING: Goal.QUERY,
}


def stamp(epoch: int, step: int = 0) -> Stamp:
    return Stamp(0, Counter(1, epoch), step)


#: What an eviction takes its time for.
OUT = ("freeze_s", "snapshot_s")


def note(kind: str, epoch: int, *took: str, level: str = "info", reason: str | None = None) -> Note:
    facts: dict[str, str | int | float | bool | None] = {
        "job": "1000/a",
        "groups": "g1",
        "epoch": Counter(1, epoch).as_int(),
        "seconds": 0.0,
        **dict.fromkeys(took, 0.0),
        "cause": BROKEN.cause.value if reason else None,
        "reason": reason,
    }
    return Note(kind=kind, level=level, facts=facts)


def test_an_eviction_freezes_all_before_it_snapshots_any() -> None:
    move = Move()
    assert move.orders(move.evict()) == (stamp(0), Goal.FROZEN)
    assert move.report(N1, FROZEN) == []
    assert move.orders(move.report(N2, FROZEN)) == (stamp(0, 1), Goal.OFF)
    assert move.report(N2, PARKED) == []
    assert move.report(N1, PARKED) == [note("evicted", 0, *OUT), Evicted(tenancy=KEY)]
    assert (move.coordinator.place, move.coordinator.moves) == (Place.OFF, 1)


def test_the_history_is_told_what_a_move_took_its_time_for() -> None:
    move = Move()
    move.evict()
    move.now = 2.0
    move.arrive(FROZEN)
    move.now = 7.0
    told, _ = move.arrive(PARKED)
    assert isinstance(told, Note)
    facts = {name: told.facts[name] for name in ("seconds", *OUT)}
    assert facts == {"seconds": 7.0, "freeze_s": 2.0, "snapshot_s": 5.0}
    move.admit()
    assert move.coordinator.taken == {}, "another move"


def test_an_admission_restores_all_before_it_thaws_any() -> None:
    move = Move(place=Place.OFF)
    assert move.orders(move.admit()) == (stamp(0), Goal.RESTORED)
    assert move.orders(move.arrive(FROZEN)) == (stamp(0, 1), Goal.ON)
    note_of_it = note("admitted", 0, "restore_s", "thaw_s")
    assert move.arrive(RUNNING) == [note_of_it, Admitted(tenancy=KEY, restored=True)]
    assert (move.coordinator.place, move.coordinator.moves) == (Place.ON, 1)


@pytest.mark.parametrize("in_snapshot", [False, True])
def test_what_fails_on_one_host_turns_an_eviction_back_on_all_under_a_new_epoch(
    in_snapshot: bool,
) -> None:
    move = Move()
    move.evict()
    took = (*OUT[: 1 + in_snapshot], "restore_s", "thaw_s")
    if in_snapshot:
        move.arrive(FROZEN)
    old = move.coordinator.stamp
    # It does not wait for the other host.
    assert move.orders(move.report(N1, RUNNING, failed=BROKEN)) == (stamp(1), Goal.RESTORED)
    assert move.report(N2, FROZEN, stamp=old) == []
    assert move.orders(move.arrive(FROZEN)) == (stamp(1, 1), Goal.ON)
    assert move.arrive(RUNNING) == [
        note("eviction_failed", 1, *took, level="warning", reason=str(BROKEN)),
        EvictionFailed(tenancy=KEY, reason=BROKEN),
    ]
    assert move.coordinator.place is Place.ON


def test_a_freeze_may_take_as_long_as_it_is_configured_to() -> None:
    move = Move()
    move.coordinator.limits = replace(LIMITS, barrier_timeout_s=7.0)
    move.evict()
    assert move.coordinator.deadline == 7.0


def test_a_freeze_that_takes_too_long_is_turned_back_and_names_who_is_missing() -> None:
    move = Move()
    move.evict()
    limits = LIMITS
    assert move.coordinator.deadline == (
        limits.quiesce_timeout_s + 4 * limits.freeze_timeout_s + limits.barrier_margin_s
    )
    move.report(N2, FROZEN)
    assert move.coordinator.on_deadline(now=move.coordinator.deadline - 0.1) == []
    assert move.orders(move.wait()) == (stamp(1), Goal.RESTORED)
    reason = move.coordinator.reason
    assert reason is not None
    assert reason.cause is Cause.FREEZE_TIMEOUT
    assert reason.text.endswith("missing: n1")


def test_nothing_but_freezing_runs_out_of_time() -> None:
    move = Move()
    move.evict()
    move.arrive(FROZEN)
    assert move.coordinator.deadline is None
    assert move.coordinator.on_deadline(now=1e9) == []


def test_an_eviction_that_nobody_needs_is_turned_back_while_that_is_free() -> None:
    move = Move()
    assert move.coordinator.take_back(now=0.0) == []
    move.evict()
    assert move.orders(move.coordinator.take_back(now=0.0)) == (stamp(1), Goal.RESTORED)
    assert move.coordinator.take_back(now=0.0) == []
    move.arrive(RUNNING)
    (said, outcome) = move.arrive(RUNNING)
    assert isinstance(said, Note)
    assert said.level == "info"
    assert isinstance(outcome, EvictionFailed)
    assert outcome.reason.cause is Cause.CANCELLED


def test_once_it_is_being_snapshotted_an_eviction_is_finished() -> None:
    move = Move()
    move.evict()
    move.arrive(FROZEN)
    assert move.coordinator.take_back(now=0.0) == []


@pytest.mark.parametrize(
    ("disowned", "then"), [((), Place.RESTORING), ((G1,), Place.OFF)], ids=["all", "a part"]
)
def test_who_moves_only_a_part_of_the_ranks_does_not_bring_it_back_to_see_whether_it_can(
    disowned: tuple[GroupName, ...], then: Place
) -> None:
    move = Move()
    move.coordinator.evict(now=0.0, ranks=4, qualifies=True)
    move.arrive(FROZEN)
    assert move.report(N1, disowned=disowned) == []
    move.report(N2, PARKED, untried=True)
    assert move.coordinator.place is then


def test_an_admission_that_fails_is_withdrawn_to_off() -> None:
    move = Move(place=Place.OFF)
    move.admit()
    assert move.orders(move.report(N1, PARKED, failed=BROKEN)) == (stamp(1), Goal.OFF)
    assert move.arrive(PARKED) == [
        note("admission_failed", 1, "restore_s", "snapshot_s", level="warning", reason=str(BROKEN)),
        AdmissionFailed(tenancy=KEY, reason=BROKEN),
    ]
    assert move.coordinator.place is Place.OFF


def test_what_runs_everywhere_is_not_moved_when_it_finds_company() -> None:
    move = Move(place=Place.OFF)
    move.admit()
    occupied = failure(Cause.OCCUPIED)
    assert move.report(N1, RUNNING) == []
    assert move.report(N2, RUNNING, failed=occupied) == [
        AdmissionFailed(tenancy=KEY, reason=replace(occupied, text=f"{occupied.text} (on n2)"))
    ]
    assert move.coordinator.place is Place.ON


@pytest.mark.parametrize("other", [(), (PARKED,)], ids=["nobody", "parked"])
def test_unless_it_is_known_to_run_everywhere_it_is_withdrawn(other: tuple[RankState, ...]) -> None:
    move = Move(place=Place.OFF)
    move.admit()
    if other:
        move.report(N1, *other)
    effects = move.report(N2, RUNNING, failed=failure(Cause.OCCUPIED))
    assert move.orders(effects) == (stamp(1), Goal.OFF)


def test_a_thaw_that_fails_is_tried_again_until_all_run() -> None:
    move = Move(place=Place.OFF)
    move.admit()
    move.arrive(FROZEN)
    assert move.report(N1, FROZEN, failed=BROKEN) == []
    # Reports of the dead attempt change nothing.
    assert move.report(N2, RUNNING) == []
    assert move.coordinator.deadline == 2 * LIMITS.retry_min_s
    assert move.orders(move.wait()) == (stamp(1), Goal.ON)
    assert isinstance(move.arrive(RUNNING)[1], Admitted)


def test_a_direction_that_cannot_be_changed_is_tried_so_often_and_then_blocked() -> None:
    move = Move()
    move.evict()
    move.report(N1, RUNNING, failed=failure(Cause.FREEZE_TIMEOUT))
    pauses = []
    for _ in range(MAX_RECOVERIES - 1):
        assert move.report(N1, FROZEN, failed=BROKEN) == []
        pauses.append((move.coordinator.deadline or 0.0) - move.now)
        move.orders(move.wait())
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    text = "simulated driver (it began with: simulated freeze_timeout (on n1))"
    both = replace(BROKEN, text=text)
    assert move.report(N1, FROZEN, failed=BROKEN) == [Blocked(tenancy=KEY, reason=both)]
    assert move.coordinator.place is Place.BLOCKED
    assert move.coordinator.deadline is None


def test_g11_trouble_of_the_daemon_itself_never_blocks_a_tenancy() -> None:
    move = Move(place=Place.OFF)
    move.admit()
    move.report(N1, PARKED, failed=failure(Cause.JOURNAL))
    for _ in range(50):
        assert move.report(N1, PARKED, failed=failure(Cause.JOURNAL)) == []
        move.orders(move.wait())
    assert isinstance(move.arrive(PARKED)[1], AdmissionFailed)


def test_a_context_that_is_broken_for_good_blocks_at_once() -> None:
    move = Move()
    move.evict()
    failed = failure(Cause.FAILED, ProcessId(1, 1))
    move.report(N1, RankState.FAILED, failed=failed)
    assert move.report(N1, RankState.FAILED, failed=failed) == [Blocked(tenancy=KEY, reason=failed)]


def test_one_whose_place_is_taken_cannot_be_turned_back_and_leaves_altogether() -> None:
    move = Move()
    move.evict()
    move.report(N1, RUNNING, failed=BROKEN)
    assert move.report(N1, PARKED, failed=failure(Cause.OCCUPIED)) == []
    assert move.orders(move.wait()) == (stamp(2), Goal.OFF)
    assert move.arrive(PARKED)[1] == AdmissionFailed(tenancy=KEY, reason=BROKEN)


@pytest.mark.parametrize(
    ("states", "goal"),
    [
        ((PARKED, PARKED), Goal.OFF),
        ((PARKED, FROZEN), Goal.RESTORED),
        ((FROZEN, FROZEN), Goal.RESTORED),
        ((RUNNING, PARKED), Goal.RESTORED),
        # It may have come up unseen, and nothing is taken off that was not frozen everywhere.
        ((), Goal.ON),
    ],
)
def test_after_a_restart_it_asks_all_hosts_and_goes_where_it_can(
    states: tuple[RankState, ...], goal: Goal
) -> None:
    move = Move()
    assert move.orders(move.coordinator.ask(now=0.0)) == (stamp(0), Goal.QUERY)
    assert move.report(N1, *states[:1]) == []
    assert move.orders(move.report(N2, *states[1:])) == (stamp(1), goal)
    if goal is Goal.OFF:
        assert move.arrive(PARKED) == [Evicted(tenancy=KEY)]
    else:
        if goal is Goal.RESTORED:
            move.arrive(FROZEN)
        assert move.arrive(RUNNING) == [Admitted(tenancy=KEY, restored=False)]


def test_what_was_off_and_has_no_ranks_stays_off_after_a_restart() -> None:
    move = Move(place=Place.OFF)
    move.coordinator.ask(now=0.0)
    assert move.orders(move.arrive()) == (stamp(1), Goal.OFF)
    assert move.arrive() == [Evicted(tenancy=KEY)]


def test_a_question_that_fails_is_asked_again() -> None:
    move = Move()
    move.coordinator.ask(now=0.0)
    assert move.report(N1, failed=BROKEN) == []
    assert move.orders(move.wait()) == (stamp(1), Goal.QUERY)


def test_a_question_does_not_wipe_out_the_order_that_stands() -> None:
    move = Move(place=Place.OFF)
    move.admit()
    record, *_ = move.coordinator._turn(Place.ASKING, 0.0)
    assert record == TenancyRecord(tenancy=KEY, stamp=stamp(1), goal=Goal.RESTORED)


@pytest.mark.parametrize(("place", "goal"), [(Place.ON, Goal.ON), (Place.OFF, Goal.OFF)])
def test_before_any_order_its_record_says_where_it_is(place: Place, goal: Goal) -> None:
    assert Move(place=place).coordinator.record() == TenancyRecord(
        tenancy=KEY, stamp=NO_STAMP, goal=goal
    )


def test_g2_without_an_epoch_nothing_is_ordered_and_it_goes_on_when_there_is_one() -> None:
    move = Move(epochs=0)
    assert move.evict() == []
    assert not move.coordinator.stable
    assert move.coordinator.on_numbers(now=0.0) == []
    move.coordinator.numbers.ceiling = 8
    assert move.orders(move.coordinator.on_numbers(now=3.0)) == (stamp(0), Goal.FROZEN)
    # The time for freezing runs from the order.
    assert move.coordinator.deadline == 3.0 + 30.0 + 40.0 + 15.0
    assert move.coordinator.on_numbers(now=3.0) == []


def test_new_epochs_do_not_cut_a_pause_short() -> None:
    move = Move(place=Place.OFF)
    move.admit()
    move.arrive(FROZEN)
    move.report(N1, FROZEN, failed=BROKEN)
    assert move.coordinator.on_numbers(now=0.0) == []


def test_an_eviction_can_be_taken_back_while_it_waits_for_an_epoch() -> None:
    move = Move(epochs=0)
    move.evict()
    assert move.coordinator.take_back(now=0.0) == []
    move.coordinator.numbers.ceiling = 8
    assert move.orders(move.coordinator.on_numbers(now=0.0)) == (stamp(0), Goal.RESTORED)


def blocked() -> Move:
    move = Move()
    failed = failure(Cause.FAILED, ProcessId(1, 1))
    move.evict()
    move.report(N1, RankState.FAILED, failed=failed)
    move.report(N1, RankState.FAILED, failed=failed)
    assert move.coordinator.place is Place.BLOCKED
    return move


def test_g11_clearing_a_blocked_tenancy_asks_where_it_is() -> None:
    move = blocked()
    assert move.orders(move.coordinator.clear(now=0.0)) == (stamp(2), Goal.QUERY)
    assert move.coordinator.clear(now=0.0) == []


def test_g11_the_death_of_a_broken_rank_is_the_way_out() -> None:
    move = blocked()
    assert move.coordinator.on_ranks_lost(left=2, failed=1, now=0.0) == []
    effects = move.coordinator.on_ranks_lost(left=1, failed=0, now=0.0)
    assert move.orders(effects) == (stamp(2), Goal.QUERY)


def test_g11_a_pin_goes_with_a_rank_or_by_an_operator_and_that_is_written_down() -> None:
    for by_operator in (True, False):
        coordinator = Move().coordinator
        coordinator.pinned = BROKEN
        assert coordinator.record().pinned == BROKEN
        results = [
            coordinator.clear(now=0.0)
            if by_operator
            else coordinator.on_ranks_lost(left=1, failed=0, now=0.0)
            for _ in range(2)
        ]
        assert results == [[TenancyRecord(tenancy=KEY, stamp=NO_STAMP, goal=Goal.ON)], []]


@pytest.mark.parametrize("place", [Place.TURNING_BACK, Place.REVIVING])
def test_g3_nobody_is_brought_back_when_nobody_is_left(place: Place) -> None:
    move = Move()
    move.evict()
    move.report(N1, RUNNING, failed=BROKEN)
    if place is Place.REVIVING:
        move.arrive(RUNNING)
    assert move.coordinator.place is place
    assert move.coordinator.on_ranks_lost(left=1, failed=0, now=0.0) == []
    effects = move.coordinator.on_ranks_lost(left=0, failed=0, now=0.0)
    assert move.orders(effects)[1] is Goal.QUERY
    move.arrive()
    assert move.arrive() == [Evicted(tenancy=KEY)]


def test_g3_a_death_cuts_the_pause_before_another_try_short() -> None:
    move = Move()
    move.evict()
    move.report(N1, RUNNING, failed=BROKEN)
    move.report(N1, FROZEN, failed=BROKEN)
    effects = move.coordinator.on_ranks_lost(left=1, failed=0, now=0.0)
    assert move.orders(effects) == (stamp(2), Goal.RESTORED)


def test_a_stable_tenancy_hears_no_reports() -> None:
    assert Move().report(N1, RUNNING) == []


def test_a_move_begins_only_where_the_one_before_it_has_ended() -> None:
    move = Move()
    move.evict()
    with pytest.raises(AssertionError, match="ends before"):
        move.admit()


def test_broken_invariants_are_found() -> None:
    coordinator = Move().coordinator
    coordinator.wanted = Place.FREEZING
    with pytest.raises(AssertionError, match="wants nothing"):
        coordinator.check_invariants()
    coordinator.wanted, coordinator.place = None, Place.BLOCKED
    with pytest.raises(AssertionError):
        coordinator.check_invariants()
