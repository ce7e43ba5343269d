"""Groups that an operator closes: who may stay, who waits, and what is taken off."""

from __future__ import annotations

from stories import ON_G1, PARKED, RUNNING, A, B, C, fails, parked, resident
from world import D1, G1, G2, LIMITS, World, failure, job

from tsliced.core.actions import DrainRecord, StartOperation, TellContended, TellStalled
from tsliced.core.coordinator import Place
from tsliced.core.model import Cause, Drain, GroupName, Reason, Verb

BY_ROOT = Drain(park=False, by="root", since_unix=1.0)


def why_aside(group: GroupName = G1) -> Reason:
    return Reason(cause=Cause.DRAINED, text=f"group {group} is drained by root: nobody is let in")


def test_who_holds_a_drained_group_keeps_it_and_nobody_more_is_let_in() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    world.drain()
    session = world.session(B)
    waiter = world.acquire(session)
    assert world.held(holder)
    world.release(holder)
    assert world.waits(waiter)
    assert world.all_of(TellStalled) == [
        TellStalled(session=session, lease=waiter, job=B, reason=why_aside())
    ]
    assert world.journal["drain", G1] == DrainRecord(group=G1, drain=BY_ROOT)
    (note,) = world.notes("drained")
    assert note.facts == {"groups": G1, "by": "root", "park": False}


def test_a_drained_group_that_is_opened_lets_in_who_waited_in_the_order_of_arrival() -> None:
    world = World()
    world.drain()
    waiters = [world.acquire(world.session(job(f"j{number}"))) for number in range(3)]
    world.undrain()
    for waiter in waiters:
        assert world.held(waiter)
        world.release(waiter)
    assert ("drain", G1) not in world.journal
    assert [note.kind for note in world.notes("undrained")] == ["undrained"]


def test_a_wish_that_stands_already_changes_nothing() -> None:
    world = World()
    world.undrain()
    world.drain()
    world.drain()
    assert len(world.notes("drained")) == 1
    world.drain(park=True)
    assert len(world.notes("drained")) == 2


def test_a_waiter_of_a_drained_group_is_in_nobodys_way_elsewhere() -> None:
    world = World()
    holder = world.acquire(world.session(A), G1)
    joint = world.acquire(world.session(B), G1, G2)
    behind = world.acquire(world.session(C), G1)
    world.drain(G2)
    # It came first, but cannot have both; what it would have reserved goes to the next.
    world.release(holder)
    assert world.waits(joint)
    assert world.held(behind)
    world.undrain(G2)
    assert world.waits(joint)
    world.release(behind)
    assert world.held(joint)


def test_a_waiter_comes_back_to_its_old_place() -> None:
    world = World()
    holder = world.acquire(world.session(A), G1)
    joint = world.acquire(world.session(B), G1, G2)
    behind = world.acquire(world.session(C), G1)
    world.drain(G2)
    world.undrain(G2)
    world.release(holder)
    assert world.held(joint)
    assert world.waits(behind)


def test_only_what_is_open_again_as_a_whole_is_waited_for_again() -> None:
    world = World()
    world.drain(G1)
    world.drain(G2)
    joint = world.acquire(world.session(A), G1, G2)
    single = world.acquire(world.session(B), G2)
    world.undrain(G2)
    assert world.held(single)
    assert world.waits(joint)
    world.release(single)
    world.undrain(G1)
    assert world.held(joint)


def test_a_holder_is_told_that_nobody_waits_any_more() -> None:
    world = World()
    world.acquire(world.session(A))
    world.acquire(world.session(B))
    world.drain()
    assert [told.waiters for told in world.all_of(TellContended)] == [1, 0]
    world.undrain()
    assert [told.waiters for told in world.all_of(TellContended)] == [1, 0, 1]


def test_a_switch_that_is_under_way_is_turned_back() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.FREEZE)
    world.drain()
    world.auto = True
    world.run()
    assert world.waits(waiter)
    assert world.state(rank) is RUNNING
    assert (Verb.SNAPSHOT, rank.pid) not in world.moves()


def test_a_restore_that_is_under_way_is_finished_without_a_grant() -> None:
    world = World()
    session, (rank,), lease = parked(world)
    waiter = world.acquire(session)
    world.auto = False
    world.release(lease)
    world.run_until(StartOperation, Verb.RESTORE)
    world.drain()
    world.auto = True
    world.run()
    assert world.waits(waiter)
    assert world.state(rank) is RUNNING
    world.undrain()
    assert world.held(waiter)


def test_an_acquire_can_be_cancelled_or_run_out_of_time_while_its_group_is_drained() -> None:
    world = World()
    world.drain()
    cancelled = world.acquire(world.session(A))
    world.cancel(cancelled)
    assert world.code(cancelled) == "cancelled"
    late = world.acquire(world.session(A), timeout_s=5.0)
    world.pass_time(6.0)
    assert world.code(late) == "timeout"
    assert "drained by root" in world.refusals()[-1].text
    assert not world.machine.leasing.aside


def test_a_round_that_gathers_queues_only_when_its_group_is_open_again() -> None:
    world = World()
    sessions = [world.session(A) for _ in range(2)]
    first = world.acquire(sessions[0], ranks=2)
    world.drain()
    second = world.acquire(sessions[1], ranks=2)
    assert world.waits(first)
    world.undrain()
    assert world.held(first)
    assert world.held(second)


def test_those_who_wait_for_drained_groups_count_against_the_limit() -> None:
    world = World(limits=LIMITS.__class__(max_waiters=1))
    world.drain()
    world.acquire(world.session(A))
    refused = world.acquire(world.session(B))
    assert world.code(refused) == "would_exceed_limit"


# --- parking --------------------------------------------------------------------------------------


def test_what_is_resident_is_parked_at_once_and_stays_so_when_the_group_is_open_again() -> None:
    world = World()
    session, (rank,) = resident(world)
    world.drain(park=True)
    assert world.state(rank) is PARKED
    world.undrain()
    assert world.state(rank) is PARKED
    assert world.held(world.acquire(session))
    assert world.state(rank) is RUNNING


def test_without_park_what_is_resident_stays() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.drain()
    assert world.state(rank) is RUNNING


def test_a_holder_is_parked_when_its_lease_is_over() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    rank = world.context(A, D1)
    world.look()
    world.drain(park=True)
    assert world.state(rank) is RUNNING
    world.release(holder)
    assert world.state(rank) is PARKED


def test_who_comes_onto_a_device_that_is_to_be_empty_is_parked_when_it_is_seen() -> None:
    world = World()
    world.session(A)
    world.drain(park=True)
    rank = world.context(A, D1)
    world.look()
    assert world.state(rank) is PARKED


def test_an_eviction_goes_on_for_a_drain_whose_waiter_has_left() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.auto = False
    waiter = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.FREEZE)
    world.drain(park=True)
    world.auto = True
    world.run()
    assert world.waits(waiter)
    assert world.state(rank) is PARKED


def test_parking_that_nobody_wants_any_more_is_turned_back() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.auto = False
    world.drain(park=True)
    world.run_until(StartOperation, Verb.FREEZE)
    world.undrain()
    world.auto = True
    world.run()
    assert world.state(rank) is RUNNING


def test_what_cannot_be_parked_is_tried_again_after_a_pause() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.FREEZE, Cause.FREEZE_TIMEOUT, times=1)
    world.drain(park=True)
    world.look()
    assert world.state(rank) is RUNNING
    assert world.moves().count((Verb.FREEZE, rank.pid)) == 1, "looks do not shorten the pause"
    world.pass_time(LIMITS.retry_max_s)
    assert world.state(rank) is PARKED


def test_g11_what_can_never_be_parked_is_pinned_and_an_operator_has_it_tried_again() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.SNAPSHOT, Cause.UNSUPPORTED, times=1)
    world.drain(park=True)
    world.pass_time(10 * LIMITS.retry_max_s)
    tenancy = world.machine.tenancies.all[ON_G1]
    assert tenancy.coordinator.pinned == failure(Cause.UNSUPPORTED, rank)
    assert world.moves().count((Verb.SNAPSHOT, rank.pid)) == 1
    world.retry(A)
    assert world.state(rank) is PARKED


def test_what_is_blocked_is_left_where_it_is() -> None:
    world = World()
    _, (rank,) = resident(world)
    fails(world, Verb.SNAPSHOT, Cause.FAILED, times=1)
    world.drain(park=True)
    tenancy = world.machine.tenancies.all[ON_G1]
    assert tenancy.coordinator.place is Place.BLOCKED
    world.look()
    world.die(rank)
    assert not world.machine.tenancies.residents(G1)


# --- restarts -------------------------------------------------------------------------------------


def test_g8_a_drain_outlives_the_daemon_and_waiters_keep_their_places() -> None:
    world = World()
    world.drain()
    waiters = [world.acquire(world.session(job(f"j{number}"))) for number in range(2)]
    world.restart()
    assert all(world.waits(waiter) for waiter in waiters)
    late = world.acquire(world.session(C))
    world.undrain()
    for waiter in (*waiters, late):
        assert world.held(waiter)
        world.release(waiter)


def test_what_is_to_be_parked_is_parked_by_the_next_daemon() -> None:
    world = World()
    _, (rank,) = resident(world)
    world.auto = False
    world.drain(park=True)
    world.run_until(StartOperation, Verb.FREEZE)
    world.auto = True
    world.restart(finish=False)
    assert world.state(rank) is PARKED


def test_a_drain_of_a_group_that_is_configured_no_longer_is_forgotten() -> None:
    world = World()
    world.drain()
    world.groups = tuple(group for group in world.groups if group.name != G1)
    world.restart()
    assert not world.machine.leasing.drains


def test_a_drain_that_could_not_be_written_down_is_written_later() -> None:
    world = World(journal_broken=failure(Cause.JOURNAL))
    world.drain()
    assert world.waits(world.acquire(world.session(A)))
    assert ("drain", G1) not in world.journal
    world.journal_broken = None
    world.session(B)
    assert world.journal["drain", G1] == DrainRecord(group=G1, drain=BY_ROOT)
