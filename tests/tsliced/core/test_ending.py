"""The end of processes: asked first, killed when they cannot or do not heed it."""

from __future__ import annotations

from stories import A, B, parked, resident
from world import D1, G1, World, job

from tsliced.core.actions import EndProcesses, StartOperation
from tsliced.core.books import TELL_EVERY_S
from tsliced.core.events import KillRequested
from tsliced.core.model import ProcessId, Verb


def end(world: World, *, name: str = "a", grace_s: float = 5.0) -> int:
    """End a job's processes, as whoever may do it has it done."""
    ending = world.machine.ending
    ending.leasing.out = []
    count = ending.end_job(job(name), text="because", grace_s=grace_s, now=world.now)
    for action in ending.leasing.out:
        world.do(action)  # type: ignore[arg-type]  # it writes no records
    return count


def signals(world: World) -> list[tuple[bool, tuple[ProcessId, ...]]]:
    return [(action.kill, action.processes) for action in world.all_of(EndProcesses)]


def test_a_running_job_is_asked_with_its_clients_and_killed_after_the_grace() -> None:
    world = World()
    session, ranks = resident(world, ranks=2)
    processes = (*ranks, world.process_of(session))
    assert end(world) == 3
    assert signals(world) == [(False, processes)]
    world.pass_time(4.9)
    assert len(signals(world)) == 1
    world.pass_time(0.2)
    assert signals(world)[1:] == [(True, processes)]
    (note,) = world.notes("ending")
    assert note.facts["reason"] == "because"
    assert note.facts["pids"] == ",".join(str(process.pid) for process in processes)
    assert [n.facts["pids"] for n in world.notes("killing")] == [note.facts["pids"]]


def test_who_ends_when_asked_is_not_killed() -> None:
    world = World()
    session, (rank,) = resident(world)
    end(world)
    world.die(rank)
    world.pass_time(6.0)
    assert signals(world)[1:] == [(True, (world.process_of(session),))]


def test_nothing_is_left_to_do_when_all_have_ended() -> None:
    world = World()
    session, (rank,) = resident(world)
    end(world)
    world.die(rank)
    other = world.process_of(world.session(B))
    world.die(other)
    world.die(world.process_of(session))
    world.pass_time(TELL_EVERY_S)
    assert not world.machine.ending.asked
    assert world.machine.deadline is None


def test_a_parked_process_cannot_heed_a_signal_and_is_killed_at_once() -> None:
    world = World()
    session, (rank,), _lease = parked(world)
    end(world)
    client = world.process_of(session)
    assert signals(world) == [(True, (rank,)), (False, (client,))]


def test_a_parked_process_alone_leaves_no_clock_behind() -> None:
    world = World()
    session, (rank,), _lease = parked(world)
    world.close(session)
    end(world)
    assert signals(world) == [(True, (rank,))]
    assert world.notes("ending")[0].facts["grace_s"] == 0.0
    assert not world.machine.ending.asked


def test_a_driver_call_in_flight_has_the_grace_to_end() -> None:
    world = World()
    _session, (rank,) = resident(world)
    world.auto = False
    world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.SNAPSHOT)
    end(world)
    (first,) = signals(world)
    assert first[0] is False
    assert rank in first[1]
    world.finish_next(StartOperation, Verb.SNAPSHOT)
    end(world)
    assert (True, (rank,)) in signals(world)
    world.pass_time(10.0)
    kills = [processes for kill, processes in signals(world) if kill]
    assert sum(rank in processes for processes in kills) == 1


def test_the_latest_grace_counts() -> None:
    world = World()
    resident(world)
    end(world, grace_s=100.0)
    end(world, grace_s=1.0)
    world.pass_time(1.0)
    assert signals(world)[-1][0] is True


def test_a_job_without_processes_has_nothing_to_end() -> None:
    world = World()
    assert end(world) == 0
    assert not world.done


def test_who_only_asks_questions_is_not_ended_with_the_job() -> None:
    world = World()
    session = world.session(A, tool=True)
    world.context(A, D1)
    world.look()
    end(world)
    ((_kill, processes),) = signals(world)
    assert world.process_of(session) not in processes
    assert world.machine.tenancies.by_group[G1]


def test_an_operator_has_a_job_ended_and_is_named() -> None:
    world = World()
    session, (rank,) = resident(world)
    world.feed(KillRequested(job=A, by="root", grace_s=2.0))
    assert signals(world) == [(False, (rank, world.process_of(session)))]
    (note,) = world.notes("ending")
    assert (note.facts["reason"], note.facts["grace_s"]) == ("root wants it", 2.0)
