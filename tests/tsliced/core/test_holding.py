"""The clocks that run against who holds: signs of life, and the longest hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stories import PARKED, A, B, C, resident
from world import D1, D2, G1, G2, GROUPS, LIMITS, World

from tsliced.core.actions import TellHoldWarning, TellLost
from tsliced.core.books import TELL_EVERY_S
from tsliced.core.events import TimePassed
from tsliced.core.model import Arrival, LeaseId, ProcessId

#: Holds of g1 end after 100 s, with a warning at 90 s.
LIMITED = (replace(GROUPS[0], max_hold_s=100.0), *GROUPS[1:])
WARNED = replace(LIMITS, hold_warning_s=10.0)


def limited() -> World:
    return World(groups=LIMITED, limits=WARNED)


def lost(world: World) -> list[LeaseId]:
    return [told.lease for told in world.all_of(TellLost)]


# --- signs of life ----------------------------------------------------------------------------


def test_g3_a_holder_that_gives_no_sign_of_life_loses_its_lease_at_once() -> None:
    world = World()
    session = world.session(A, heartbeat_s=5.0)
    lease = world.acquire(session)
    rank = world.context(A, D1)
    world.look()
    world.pass_time(4.9)
    assert world.held(lease)
    world.pass_time(0.2)
    assert lost(world) == [lease]
    (told,) = world.all_of(TellLost)
    assert "no sign of life for 5.0 s" in told.text
    assert "heartbeat_s" in told.text
    (note,) = world.notes("revoked")
    assert (note.facts["cause"], note.level) == ("silent", "warning")
    # Nobody waits, so nothing moves; the next one has its ranks evicted like any others.
    assert not world.moves()
    other = world.acquire(world.session(B))
    assert world.held(other)
    assert world.state(rank) is PARKED
    # What it held is refused from then on.
    refused = world.release(lease)
    assert world.refusals()[-1].code == "lease_ended"
    assert world.refusals()[-1].request == refused


def test_signs_of_life_keep_a_lease() -> None:
    world = World()
    session = world.session(A, heartbeat_s=5.0)
    lease = world.acquire(session)
    for _ in range(10):
        world.pass_time(4.0)
        world.beat(session)
    assert world.held(lease)
    world.pass_time(5.0)
    assert lost(world) == [lease]


def test_what_a_client_asks_for_is_a_sign_of_life() -> None:
    world = World()
    session = world.session(A, heartbeat_s=5.0)
    lease = world.acquire(session)
    world.pass_time(4.0)
    other = world.acquire(session, G2)
    world.pass_time(4.0)
    world.release(other)
    world.pass_time(4.0)
    assert world.held(lease)
    world.pass_time(2.0)
    assert lost(world) == [lease]


def test_all_leases_of_a_silent_client_are_lost() -> None:
    world = World()
    session = world.session(A, heartbeat_s=5.0)
    leases = [world.acquire(session, G1), world.acquire(session, G2)]
    world.pass_time(6.0)
    assert lost(world) == leases


def test_who_promised_nothing_may_be_silent() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    world.beat(session)
    world.pass_time(1e6)
    assert world.held(lease)


def test_who_holds_nothing_may_be_silent() -> None:
    world = World()
    session = world.session(A, heartbeat_s=5.0)
    world.release(world.acquire(session))
    world.disconnect(session)
    world.reconnect(session)
    world.pass_time(100.0)
    blocker = world.acquire(world.session(B))
    waiting = world.acquire(session)
    world.pass_time(100.0)
    assert not lost(world)
    world.release(blocker)
    assert world.held(waiting)
    world.pass_time(4.9)
    assert world.held(waiting)


def test_a_client_that_is_gone_leaves_no_clock() -> None:
    world = World()
    session = world.session(A, heartbeat_s=5.0)
    world.acquire(session)
    world.close(session)
    world.beat(session)
    world.pass_time(TELL_EVERY_S)
    assert world.machine.deadline is None


def test_without_a_connection_another_clock_runs_and_this_one_starts_anew() -> None:
    world = World(limits=replace(LIMITS, grace_s=60.0))
    session = world.session(A, heartbeat_s=5.0)
    lease = world.acquire(session)
    world.disconnect(session)
    world.pass_time(20.0)
    assert world.held(lease)
    world.reconnect(session)
    world.pass_time(4.9)
    assert world.held(lease)
    world.pass_time(0.2)
    assert lost(world) == [lease]


def test_a_promise_outlives_a_restart() -> None:
    world = World()
    session = world.session(A, heartbeat_s=5.0)
    lease = world.acquire(session)
    world.pass_time(4.0)
    world.restart()
    world.pass_time(4.9)
    assert world.held(lease)
    world.pass_time(0.2)
    assert lost(world) == [lease]


def held_and_parked(world: World, heartbeat_s: float | None) -> tuple[LeaseId, ProcessId]:
    """Let a job hold g1 through a process that is parked with what it has on g2."""
    session = world.session(A, heartbeat_s=heartbeat_s, pid=50)
    world.release(world.acquire(session, G2))
    process = world.context(A, D2, pid=50)
    world.look()
    assert world.held(world.acquire(world.session(B), G2))
    assert world.state(process) is PARKED
    lease = world.acquire(session, G1)
    assert world.held(lease)
    return lease, process


def test_g9_no_sign_of_life_is_expected_of_a_process_that_is_parked() -> None:
    world = World()
    lease, process = held_and_parked(world, 5.0)
    world.pass_time(100.0)
    assert world.held(lease)
    other = next(c for c in world.clients.values() if c.job == B)
    world.release(next(iter(other.held)))
    third = world.session(A)
    world.acquire(third, G2)
    assert world.state(process) is not PARKED
    # It starts anew when it is back.
    world.pass_time(4.9)
    assert world.held(lease)
    world.pass_time(0.2)
    assert lost(world) == [lease]


# --- the longest hold -------------------------------------------------------------------------


def test_a_long_hold_ends_after_a_warning_when_somebody_waits() -> None:
    world = limited()
    session, (rank,) = resident(world)
    lease = world.acquire(session)
    waiting = world.acquire(world.session(B))
    world.pass_time(89.0)
    assert not world.all_of(TellHoldWarning)
    world.pass_time(1.5)
    (told,) = world.all_of(TellHoldWarning)
    assert (told.session, told.lease, told.groups) == (session, lease, (G1,))
    assert told.ends_in_s == pytest.approx(10.0)
    assert told.waiters == 1
    assert world.notes("hold_warning")[0].facts["lease"] == lease
    world.pass_time(9.0)
    assert world.held(lease)
    world.pass_time(1.0)
    assert lost(world) == [lease]
    (note,) = world.notes("revoked")
    assert note.facts["cause"] == "max_hold"
    assert "max_hold_s is 100" in str(note.facts["reason"])
    assert world.held(waiting)
    assert world.state(rank) is PARKED
    world.release(lease)
    assert world.refusals()[-1].code == "lease_ended"


def test_a_long_hold_goes_on_until_somebody_waits() -> None:
    world = limited()
    lease = world.acquire(world.session(A))
    world.pass_time(1000.0)
    assert world.held(lease)
    assert len(world.all_of(TellHoldWarning)) == 1
    waiting = world.acquire(world.session(B))
    world.pass_time(0.0)
    assert lost(world) == [lease]
    assert world.held(waiting)


def test_a_hold_that_ends_in_time_leaves_no_clock() -> None:
    world = limited()
    world.release(world.acquire(world.session(A)))
    world.pass_time(TELL_EVERY_S)
    assert world.machine.deadline is None


def test_both_clocks_may_come_due_together() -> None:
    world = limited()
    session = world.session(A, heartbeat_s=95.0)
    lease = world.acquire(session)
    world.acquire(world.session(B))
    world.pass_time(91.0)
    world.now = 101.0
    world.feed(TimePassed())
    assert lost(world) == [lease]


def test_g8_what_a_holder_could_not_be_told_is_not_taken_from_it_before_its_grace() -> None:
    world = World(groups=LIMITED, limits=replace(WARNED, grace_s=60.0))
    session = world.session(A)
    lease = world.acquire(session)
    waiting = world.acquire(world.session(B))
    world.pass_time(80.0)
    world.disconnect(session)
    world.pass_time(50.0)
    assert world.held(lease)
    assert not world.all_of(TellHoldWarning)
    world.reconnect(session)
    world.pass_time(0.0)
    assert world.held(waiting)
    assert lost(world) == [lease]
    assert [told.ends_in_s for told in world.all_of(TellHoldWarning)] == [0.0]


def test_a_member_that_does_not_come_back_keeps_no_round_from_its_end() -> None:
    world = World(groups=LIMITED, limits=replace(WARNED, grace_s=60.0))
    stays, goes = world.session(A), world.session(A)
    lease = world.acquire(stays, ranks=2, arrival=Arrival.FIRST)
    world.acquire(goes, ranks=2, arrival=Arrival.FIRST)
    waiting = world.acquire(world.session(B))
    world.pass_time(80.0)
    world.disconnect(goes)
    world.pass_time(59.0)
    assert world.held(lease)
    world.pass_time(100.0)
    assert world.held(waiting)


def test_only_groups_with_a_limit_have_one() -> None:
    world = limited()
    lease = world.acquire(world.session(A), G2)
    world.acquire(world.session(B), G2)
    world.pass_time(1000.0)
    assert world.held(lease)


def test_a_lease_over_several_groups_has_the_shortest_of_their_limits() -> None:
    groups = (*LIMITED[:1], replace(GROUPS[1], max_hold_s=50.0), *GROUPS[2:])
    world = World(groups=groups, limits=WARNED)
    lease = world.acquire(world.session(A), G1, G2)
    world.acquire(world.session(B), G1)
    world.pass_time(49.0)
    assert world.held(lease)
    world.pass_time(1.0)
    assert lost(world) == [lease]


def test_the_limit_of_all_groups_holds_where_a_group_has_none_of_its_own() -> None:
    world = World(limits=replace(WARNED, max_hold_s=20.0), groups=LIMITED)
    lease = world.acquire(world.session(A), G2)
    own = world.acquire(world.session(A), G1)
    world.acquire(world.session(B), G2)
    world.acquire(world.session(B), G1)
    world.pass_time(21.0)
    assert lost(world) == [lease]
    assert world.held(own)


def test_a_warning_is_not_longer_than_the_hold() -> None:
    world = World(groups=LIMITED, limits=replace(LIMITS, hold_warning_s=500.0))
    world.acquire(world.session(A))
    world.pass_time(0.0)
    (told,) = world.all_of(TellHoldWarning)
    assert told.ends_in_s == pytest.approx(100.0)


def test_a_round_is_taken_back_from_all_its_members() -> None:
    world = limited()
    leases = [
        world.acquire(world.session(A), ranks=2, arrival=Arrival.FIRST),
        world.acquire(world.session(A), ranks=2, arrival=Arrival.FIRST),
    ]
    assert all(map(world.held, leases))
    world.acquire(world.session(B))
    world.pass_time(101.0)
    assert lost(world) == leases
    assert len(world.all_of(TellHoldWarning)) == 2


def test_a_hold_starts_anew_with_the_daemon() -> None:
    world = limited()
    lease = world.acquire(world.session(A))
    world.acquire(world.session(B))
    world.pass_time(80.0)
    world.restart()
    world.pass_time(99.0)
    assert world.held(lease)
    world.pass_time(1.5)
    assert lost(world) == [lease]


def test_g9_time_in_which_the_holder_is_parked_does_not_count() -> None:
    world = limited()
    lease, _process = held_and_parked(world, None)
    world.acquire(world.session(C), G1)
    world.pass_time(500.0)
    assert world.held(lease)
    assert not world.all_of(TellHoldWarning)
    other = next(c for c in world.clients.values() if c.job == B)
    world.release(next(iter(other.held)))
    third = world.session(A)
    world.acquire(third, G2)
    world.pass_time(99.0)
    assert world.held(lease)
    world.pass_time(1.5)
    assert lost(world) == [lease]


def test_time_in_which_the_holder_is_looked_for_does_not_count() -> None:
    world = limited()
    session, _ranks = resident(world)
    lease = world.acquire(session)
    world.acquire(world.session(B))
    world.auto = False
    world.restart()
    while world.inbox:
        world.read()
    # The driver does not answer: nothing is taken back meanwhile.
    world.pass_time(150.0)
    assert not world.all_of(TellHoldWarning)
    world.auto = True
    world.run()
    world.pass_time(99.0)
    assert world.held(lease)
    assert len(world.all_of(TellHoldWarning)) == 1
    world.pass_time(1.5)
    assert lost(world) == [lease]


def test_a_move_elsewhere_gives_no_time_back() -> None:
    world = limited()
    session = world.session(A)
    lease = world.acquire(session, G1)
    world.acquire(world.session(C), G1)
    second = world.session(A)
    world.release(world.acquire(second, G2))
    world.context(A, D2)
    world.look()
    world.pass_time(60.0)
    world.auto = False
    world.acquire(world.session(B), G2)
    world.pass_time(20.0)
    world.auto = True
    world.run()
    world.pass_time(20.5)
    assert lost(world) == [lease]
