"""What is left of a job: orphans, and the survivors of a lost rank."""

from __future__ import annotations

from dataclasses import replace

from stories import A, B, parked, resident
from world import D1, D2, G2, LIMITS, World

from tsliced.core.actions import EndProcesses
from tsliced.core.model import CoreLimits, ProcessId, SessionId

ENDING = replace(LIMITS, orphan_s=100.0, end_grace_s=5.0)
KILLING = replace(LIMITS, on_rank_lost="kill", rank_lost_s=50.0, end_grace_s=5.0)


def ended(world: World) -> list[tuple[bool, tuple[ProcessId, ...]]]:
    return [(action.kill, action.processes) for action in world.all_of(EndProcesses)]


def orphan(limits: CoreLimits = ENDING) -> tuple[World, ProcessId]:
    """Let a job's client be gone and its rank live."""
    world = World(limits=limits)
    session, (rank,) = resident(world)
    world.close(session)
    return world, rank


# --- orphans ----------------------------------------------------------------------------------


def test_a_job_without_a_client_is_named_after_a_moment_and_ended_after_its_time() -> None:
    world, rank = orphan()
    world.pass_time(1.9)
    assert not world.notes("orphaned")
    assert not world.machine.remains.is_orphaned(A)
    world.pass_time(0.2)
    (note,) = world.notes("orphaned")
    assert (note.facts["job"], note.facts["pids"]) == (str(A), str(rank.pid))
    assert note.facts["ends_in_s"] == 98.0
    assert world.machine.remains.is_orphaned(A)
    world.pass_time(97.0)
    assert not ended(world)
    world.pass_time(1.0)
    assert ended(world) == [(False, (rank,))]
    assert "no client of it is left for 100 s (orphan_s)" in str(
        world.notes("ending")[0].facts["reason"]
    )
    world.pass_time(1000.0)
    assert ended(world) == [(False, (rank,)), (True, (rank,))]
    world.die(rank)
    assert not world.machine.remains.jobs
    assert not [key for key in world.journal if key[0] == "remains"]


def test_a_parked_orphan_is_killed_at_once_since_it_can_handle_nothing() -> None:
    world = World(limits=ENDING)
    session, (rank,), _lease = parked(world)
    world.close(session)
    world.pass_time(101.0)
    assert ended(world) == [(True, (rank,))]


def test_an_orphan_is_only_shown_unless_a_time_is_set() -> None:
    world, _rank = orphan(LIMITS)
    world.pass_time(1e6)
    assert world.machine.remains.is_orphaned(A)
    assert world.notes("orphaned")[0].facts["ends_in_s"] is None
    assert not ended(world)


def test_who_leaves_and_ends_is_no_orphan() -> None:
    world, rank = orphan()
    world.pass_time(1.0)
    world.die(rank)
    world.pass_time(1000.0)
    assert not world.notes("orphaned")
    assert not ended(world)
    assert world.machine.deadline is None


def test_an_orphan_whose_client_comes_is_none() -> None:
    world, _rank = orphan()
    world.pass_time(50.0)
    assert ("remains", A) in world.journal
    world.close(world.session(A, tool=True))
    assert world.machine.remains.is_orphaned(A), "who only asks is no client"
    session = world.session(A)
    assert not world.machine.remains.is_orphaned(A)
    assert ("remains", A) not in world.journal
    world.pass_time(1000.0)
    assert not ended(world)
    # It may be orphaned again.
    world.close(session)
    world.pass_time(3.0)
    assert len(world.notes("orphaned")) == 2


def test_a_client_that_comes_within_the_moment_says_nothing() -> None:
    world, _rank = orphan()
    world.pass_time(1.0)
    world.session(A)
    world.pass_time(1000.0)
    assert not world.notes("orphaned")


def test_a_job_with_another_client_is_no_orphan() -> None:
    world = World(limits=ENDING)
    session, _ranks = resident(world)
    world.session(A)
    world.close(session)
    world.pass_time(1000.0)
    assert not world.notes("orphaned")


def test_ranks_that_never_had_a_client_are_no_orphans() -> None:
    world = World(limits=ENDING, freeze_strangers=True)
    world.context(A, D1)
    stranger = world.context(None, D2)
    world.look()
    world.close(world.session(B))
    lost = world.session(A, tool=True)
    world.close(lost)
    name = world.machine.tenancies.home[stranger].job
    world.close(world.session(name, tool=True))
    world.pass_time(1000.0)
    assert [note.facts["job"] for note in world.notes("orphaned")] == [str(A)]


def test_the_holder_that_dies_leaves_an_orphan_g3() -> None:
    world = World(limits=ENDING)
    session, (rank,) = resident(world)
    world.acquire(session)
    other = world.acquire(world.session(B))
    world.die(world.process_of(session))
    assert world.held(other), "its ranks leave like any others"
    world.pass_time(101.0)
    assert ended(world) == [(True, (rank,))]


def test_an_orphan_is_one_after_a_restart_with_a_clock_of_its_own() -> None:
    world, rank = orphan()
    world.pass_time(50.0)
    world.restart()
    assert world.machine.remains.is_orphaned(A)
    world.pass_time(99.0)
    assert not ended(world)
    world.pass_time(1.5)
    assert ended(world) == [(False, (rank,))]
    assert len(world.notes("orphaned")) == 1


def test_an_orphan_that_died_while_no_daemon_looked_is_forgotten() -> None:
    world, rank = orphan()
    world.pass_time(50.0)
    world.processes.pop(rank)
    world.restart()
    assert not world.machine.remains.jobs
    assert ("remains", A) not in world.journal


# --- survivors --------------------------------------------------------------------------------


def bereaved(limits: CoreLimits = KILLING) -> tuple[World, SessionId, list[ProcessId]]:
    """Let one of three ranks of a job die while it holds."""
    world = World(limits=limits)
    session, ranks = resident(world, ranks=3)
    world.acquire(session)
    world.pass_time(1.0)
    world.die(ranks[0])
    return world, session, ranks[1:]


def test_survivors_that_ask_for_nothing_are_ended_after_their_time() -> None:
    world, _session, left = bereaved()
    (note,) = world.notes("rank_lost")
    assert (note.facts["job"], note.facts["left"]) == (str(A), 2)
    assert world.machine.remains.has_lost(A)
    world.pass_time(49.0)
    assert not ended(world)
    world.pass_time(1.5)
    assert ended(world) == [(False, tuple(left))]
    assert "a rank was lost" in str(world.notes("ending")[0].facts["reason"])
    world.pass_time(1000.0)
    assert ended(world)[1:] == [(True, tuple(left))]


def test_survivors_are_waited_for_unless_they_are_to_be_ended() -> None:
    world, _session, left = bereaved(LIMITS)
    world.pass_time(1e6)
    assert not ended(world)
    assert world.machine.remains.has_lost(A)
    for rank in left:
        world.die(rank)
    assert not world.machine.remains.jobs
    assert not world.machine.remains.has_lost(A)


def test_a_job_that_goes_on_without_the_lost_rank_is_left_alone_as_long_as_it_asks() -> None:
    world, session, left = bereaved()
    for _ in range(5):
        world.pass_time(40.0)
        world.release(world.acquire(session, G2))
    assert not world.machine.remains.has_lost(A)
    assert not ended(world)
    world.pass_time(51.0)
    assert ended(world) == [(False, tuple(left))]


def test_time_in_which_it_waits_for_a_turn_does_not_count() -> None:
    world, session, left = bereaved()
    other = world.acquire(world.session(B), G2)
    waiting = world.acquire(session, G2)
    world.pass_time(500.0)
    assert not ended(world)
    world.cancel(waiting)
    world.pass_time(101.0)
    assert ended(world)[0] == (False, tuple(left))
    assert world.held(other)


def test_time_in_which_it_is_parked_does_not_count() -> None:
    world = World(limits=KILLING)
    session, ranks, lease = parked(world, ranks=2)
    world.die(ranks[0])
    world.pass_time(500.0)
    assert not ended(world)
    again = world.acquire(session)
    world.release(lease)
    assert world.held(again)
    world.pass_time(101.0)
    assert ended(world)[0] == (False, (ranks[1],))


def test_only_those_that_lived_at_the_loss_are_ended() -> None:
    world, _session, left = bereaved()
    world.context(A, D1)
    world.look()
    world.die(left[0])
    assert len(world.notes("rank_lost")) == 1
    world.pass_time(51.0)
    assert ended(world) == [(False, (left[1],))]


def test_another_loss_counts_anew() -> None:
    world, _session, left = bereaved()
    fresh = world.context(A, D1)
    world.look()
    world.pass_time(40.0)
    world.die(fresh)
    assert len(world.notes("rank_lost")) == 2
    world.pass_time(40.0)
    assert not ended(world)
    world.pass_time(11.0)
    assert ended(world) == [(False, tuple(left))]


def test_the_last_rank_of_a_job_leaves_no_survivors() -> None:
    world = World(limits=KILLING)
    _session, (rank,) = resident(world)
    world.die(rank)
    assert not world.machine.remains.jobs
    assert not world.notes("rank_lost")


def test_survivors_are_known_after_a_restart_with_a_clock_of_their_own() -> None:
    world, _session, left = bereaved()
    world.pass_time(40.0)
    world.processes.pop(left[0])
    world.restart()
    world.pass_time(49.0)
    assert not ended(world)
    world.pass_time(2.0)
    assert ended(world) == [(False, (left[1],))]


def test_an_orphan_that_lost_a_rank_is_ended_by_whichever_comes_first() -> None:
    limits = replace(KILLING, orphan_s=100.0)
    world, session, left = bereaved(limits)
    world.close(session)
    world.pass_time(49.5)
    assert world.machine.remains.is_orphaned(A)
    world.pass_time(1.0)
    assert ended(world) == [(False, tuple(left))]
    for rank in left:
        world.die(rank)
    assert not world.machine.remains.jobs


def test_a_tool_is_not_on_record_so_that_a_restart_takes_it_for_no_client() -> None:
    world = World()
    tool = world.session(A, tool=True)
    assert ("session", tool) not in world.journal
    world.restart()
    assert tool not in world.machine.leasing.sessions
