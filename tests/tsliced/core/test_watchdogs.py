"""Watchdogs of jobs' processes: who is left on the devices for one, and who is named."""

from __future__ import annotations

import dataclasses

import pytest
from stories import ON_G1, A, B, C, resident
from world import D1, D2, G1, G2, LIMITS, World

from tsliced.core.actions import NOTHING, TellLost, TellStalled, TellWarning
from tsliced.core.events import GroupsObserved, QualifyRequested, WatchdogTold
from tsliced.core.model import (
    Cause,
    DeviceId,
    Earlier,
    JobKey,
    LeaseId,
    ProcessId,
    RankState,
    SessionId,
)
from tsliced.core.watchdogs import MIN_HOLD_S, NEAR

HELD_S = 50.0
HOLD = dataclasses.replace(LIMITS, max_hold_s=10.0, hold_warning_s=1.0)


def others_hold(world: World, seconds: float = HELD_S, owner: JobKey = C) -> None:
    """Let it be known that others hold the group for so long."""
    session = world.session(owner)
    lease = world.acquire(session)
    world.pass_time(seconds)
    world.release(lease)
    world.close(session)


def tell(world: World, session: SessionId, limit_s: float | None) -> None:
    world.feed(WatchdogTold(session=session, limit_s=limit_s))


def holder(world: World, limit_s: float | None) -> tuple[SessionId, LeaseId, ProcessId]:
    """Let job a hold the group with a rank of its own client, whose watchdog waits so long."""
    session = world.session(A)
    lease = world.acquire(session)
    rank = world.context(A, D1, pid=world.process_of(session).pid)
    world.look()
    tell(world, session, limit_s)
    return session, lease, rank


# ---- max_hold


@pytest.mark.parametrize(
    ("limit_s", "stays"),
    [(HELD_S - 1, True), (HELD_S + 1, False), (None, False)],
    ids=["shorter", "longer", "none"],
)
def test_a_lease_is_not_taken_back_if_a_watchdog_would_not_outlast_the_park(
    limit_s: float | None, stays: bool
) -> None:
    world = World(limits=HOLD)
    others_hold(world)
    session, lease, _ = holder(world, limit_s)
    waiter = world.acquire(world.session(B))
    world.pass_time(30.0)
    assert world.held(lease) is stays
    assert world.held(waiter) is not stays
    assert bool(world.all_of(TellLost)) is not stays
    if not stays:
        assert world.notes("pause_refused") == []
        return
    (note,) = world.notes("pause_refused")
    facts = note.facts
    assert (note.level, facts["job"], facts["groups"]) == ("warning", str(A), G1)
    assert (facts["limit_s"], facts["hold_s"]) == (HELD_S - 1, HELD_S)
    (told,) = world.all_of(TellStalled)
    assert (told.lease, told.job, told.reason.cause) == (waiter, A, Cause.WATCHDOG)
    assert "after 49 s without its devices" in told.reason.text
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" in told.way_out
    # It says that it can wait for longer: then the lease is taken back after all.
    tell(world, session, 1000.0)
    world.pass_time(LIMITS.retry_max_s)
    assert world.held(waiter)


def test_watchdogs_are_heeded_only_if_that_is_configured() -> None:
    world = World(limits=dataclasses.replace(HOLD, heed_watchdogs=False))
    others_hold(world)
    holder(world, 1.0)
    waiter = world.acquire(world.session(B))
    world.pass_time(30.0)
    assert world.held(waiter)


def test_what_a_job_held_itself_says_nothing_of_how_long_it_would_be_parked() -> None:
    world = World(limits=HOLD)
    others_hold(world, owner=A)
    others_hold(world, MIN_HOLD_S / 2)
    holder(world, 1.0)
    waiter = world.acquire(world.session(B))
    world.pass_time(30.0)
    assert world.held(waiter)


def test_the_time_that_moving_takes_counts_too() -> None:
    world = World(limits=HOLD)
    _, ranks = resident(world)
    world.auto = False
    lease = world.acquire(world.session(B))
    world.pass_time(20.0)
    world.auto = True
    world.run()
    assert world.held(lease)
    assert world.state(ranks[0]) is RankState.PARKED
    world.pass_time(5.0)
    world.release(lease)
    world.die(ranks[0])
    holder(world, 30.0)
    waiter = world.acquire(world.session(C))
    world.pass_time(15.0)
    assert world.waits(waiter)
    (note,) = world.notes("pause_refused")
    assert (note.facts["hold_s"], note.facts["switch_s"]) == (5.0, 40.0)


@pytest.mark.parametrize(
    ("devices", "expected_s"), [((D1, D1), 40.0), ((D1, D2), 20.0)], ids=["shared", "apart"]
)
def test_until_a_job_was_moved_itself_what_others_of_its_kind_took_counts(
    devices: tuple[DeviceId, DeviceId], expected_s: float
) -> None:
    world = World(limits=HOLD)
    others_hold(world, 5.0)
    session = world.session(A)
    lease = world.acquire(session, G1, G2)
    for device, pid in zip(devices, (world.process_of(session).pid, None), strict=True):
        world.context(A, device, pid=pid)
    earlier = Earlier(qualified=True, switch_s=20.0)
    found = world.found(frozenset({D1, D2}))
    seen = tuple(dataclasses.replace(process, earlier=earlier) for process in found)
    world.feed(GroupsObserved(found=seen))
    tell(world, session, 24.0)
    waiter = world.acquire(world.session(B))
    world.pass_time(15.0)
    assert world.waits(waiter)
    (note,) = world.notes("pause_refused")
    assert (note.facts["hold_s"], note.facts["switch_s"]) == (5.0, expected_s)
    # From its first move on its own counts, which take no time here.
    tell(world, session, None)
    world.pass_time(30.0)
    assert world.held(waiter)
    again = world.acquire(session, G1, G2)
    world.release(waiter)
    assert world.held(again)
    assert not world.held(lease)
    (tenancy,) = world.machine.tenancies.tenancies_of(A)
    assert world.machine.leasing.switch_s(tenancy) == 0.0


def test_there_and_back_at_once_counts_as_two_moves() -> None:
    world = World(limits=dataclasses.replace(LIMITS, qualify=True))
    _, ranks = resident(world)
    world.auto = False
    world.feed(QualifyRequested(job=A))
    world.pass_time(20.0)
    world.auto = True
    world.run()
    assert world.state(ranks[0]) is RankState.RUNNING
    (tenancy,) = world.machine.tenancies.tenancies_of(A)
    assert world.machine.leasing.switch_s(tenancy) == 20.0


def test_a_part_of_the_job_elsewhere_is_no_reason() -> None:
    world = World(limits=HOLD)
    others_hold(world)
    session = world.session(A)
    elsewhere = world.acquire(session, G2)
    world.context(A, D2, pid=world.process_of(session).pid)
    tell(world, session, 1.0)
    world.look()
    world.acquire(world.session(A), G1)
    waiter = world.acquire(world.session(B), G1)
    world.pass_time(30.0)
    assert world.held(waiter)
    assert world.held(elsewhere)


# ---- who never asked


def started_with(world: World, watchdog_s: float) -> None:
    """Let the daemon see with what the processes on the device were started."""
    found = world.found(frozenset({D1}))
    seen = tuple(dataclasses.replace(process, watchdog_s=watchdog_s) for process in found)
    world.feed(GroupsObserved(found=seen))


def test_a_process_that_never_asked_is_not_frozen_if_its_watchdog_is_too_short() -> None:
    world = World()
    others_hold(world)
    rank = world.context(A, D1)
    started_with(world, 10.0)
    waiter = world.acquire(world.session(B))
    world.pass_time(3 * LIMITS.retry_max_s)
    assert world.waits(waiter)
    assert world.state(rank) is RankState.RUNNING
    assert len(world.notes("pause_refused")) == 1, "it is said once"
    assert [told.reason.cause for told in world.all_of(TellStalled)] == [Cause.WATCHDOG]
    # When its job asks for the group itself, it counts on being parked.
    world.acquire(world.session(A))
    world.pass_time(2 * LIMITS.retry_max_s)
    assert world.held(waiter)
    assert world.state(rank) is RankState.PARKED


def test_a_stranger_is_not_frozen_if_its_watchdog_is_too_short() -> None:
    world = World(freeze_strangers=True)
    others_hold(world)
    stranger = world.context(None, D1)
    started_with(world, 10.0)
    waiter = world.acquire(world.session(B))
    assert world.waits(waiter)
    assert world.state(stranger) is RankState.RUNNING
    started_with(world, 1000.0)
    world.pass_time(2 * LIMITS.retry_max_s)
    assert world.held(waiter)


def test_who_gave_its_lease_back_makes_room_whatever_its_watchdog() -> None:
    world = World()
    others_hold(world)
    _, lease, rank = holder(world, 1.0)
    world.release(lease)
    assert world.held(world.acquire(world.session(B)))
    assert world.state(rank) is RankState.PARKED


def test_the_ranks_of_a_job_whose_client_is_dead_make_room() -> None:
    world = World()
    others_hold(world)
    session = world.session(A)
    world.acquire(session)
    rank = world.context(A, D1)
    started_with(world, 10.0)
    world.die(world.process_of(session))
    world.pass_time(60.0)
    assert world.notes("orphaned"), "nobody can ask for it any more"
    assert world.held(world.acquire(world.session(B)))
    assert world.state(rank) is RankState.PARKED


# ---- who is parked for too long


def parked(world: World, limit_s: float | None) -> tuple[SessionId, ProcessId, LeaseId]:
    session, lease, rank = holder(world, limit_s)
    world.release(lease)
    other = world.acquire(world.session(B))
    assert world.state(rank) is RankState.PARKED
    return session, rank, other


def test_who_is_parked_for_nearly_as_long_as_its_watchdog_waits_is_named_and_told_once() -> None:
    world = World()
    session, rank, _ = parked(world, 30.0)
    world.session(A, agent=True)
    world.pass_time(NEAR * 30.0 - 1)
    assert world.notes("watchdog") == []
    world.pass_time(1.0)
    (note,) = world.notes("watchdog")
    assert (note.level, note.facts["job"], note.facts["limit_s"]) == ("warning", str(A), 30.0)
    assert note.facts["parked_s"] == pytest.approx(NEAR * 30.0), "there is time yet"
    (told,) = world.all_of(TellWarning)
    assert (told.session, told.code) == (session, "watchdog")
    assert f"process {rank.pid} waits for 30 s" in told.text
    world.pass_time(300.0)
    assert len(world.notes("watchdog")) == 1


def test_who_is_back_in_time_is_not_named() -> None:
    world = World()
    session, _, other = parked(world, 30.0)
    mine = world.acquire(session)
    world.pass_time(20.0)
    world.release(other)
    assert world.held(mine)
    world.pass_time(100.0)
    assert world.notes("watchdog") == []


def test_a_watchdog_that_is_told_while_parked_counts_from_the_beginning() -> None:
    world = World()
    session, _, _ = parked(world, None)
    world.pass_time(20.0)
    tell(world, session, 30.0)
    world.pass_time(3.0)
    tell(world, session, 60.0)
    world.pass_time(10.0)
    assert world.notes("watchdog") == [], "it can wait for longer by now"
    world.pass_time(30.0)
    (note,) = world.notes("watchdog")
    assert note.facts["parked_s"] == pytest.approx(NEAR * 60.0)


def test_a_watchdog_that_is_taken_back_names_nobody() -> None:
    world = World()
    session, _, _ = parked(world, 30.0)
    tell(world, session, None)
    world.pass_time(100.0)
    assert world.notes("watchdog") == []


@pytest.mark.parametrize("limit_s", [30.0, None], ids=["with a watchdog", "without"])
def test_a_parked_process_that_dies_is_not_named(limit_s: float | None) -> None:
    world = World()
    _, rank, other = parked(world, limit_s)
    world.die(rank)
    world.pass_time(100.0)
    assert ON_G1 not in world.machine.tenancies.all
    assert world.notes("watchdog") == []
    world.release(other)
    world.acquire(world.session(C))
    assert ON_G1 not in world.machine.leasing.parked_at, "nothing is kept of it"


def test_when_the_process_with_the_shortest_watchdog_is_gone_the_next_one_counts() -> None:
    world = World()
    session, lease, _ = holder(world, 60.0)
    hasty = world.session(A, agent=True)
    world.context(A, D1, pid=world.process_of(hasty).pid)
    tell(world, hasty, 20.0)
    world.look()
    world.release(lease)
    world.acquire(world.session(B))
    world.die(world.process_of(hasty))
    world.pass_time(40.0)
    assert world.notes("watchdog") == []
    world.pass_time(10.0)
    (told,) = world.all_of(TellWarning)
    assert (told.session, "waits for 60 s" in told.text) == (session, True)


def test_the_word_of_an_unknown_session_is_passed_over() -> None:
    world = World()
    told = WatchdogTold(session=SessionId("nobody"), limit_s=1.0)
    assert world.feed(told) == NOTHING


def test_the_shortest_watchdog_counts_and_a_process_knows_better_than_its_environment() -> None:
    world = World()
    session = world.session(A)
    world.acquire(session)
    rank = world.context(A, D1, pid=world.process_of(session).pid)
    started_with(world, 10.0)
    leasing, tenancy = world.machine.leasing, world.machine.tenancies.all[ON_G1]
    watchdog = leasing.watchdog_of(tenancy)
    assert watchdog is not None
    assert (watchdog.rank.process, watchdog.limit_s) == (rank, 10.0)
    tell(world, session, 20.0)
    watchdog = leasing.watchdog_of(tenancy)
    assert watchdog is not None
    assert watchdog.limit_s == 20.0
