"""Barriers that take long: they say for whom they wait, and nothing while nobody is waited for."""

from __future__ import annotations

from dataclasses import replace

from stories import ON_G1, A, B, resident
from world import G1, LIMITS, Process, World, failure

from tsliced.core.actions import RunHooks, ScanGroups, StartOperation
from tsliced.core.barriers import MAX_NAMED, awaited
from tsliced.core.coordinator import GOALS, Place
from tsliced.core.model import Cause, HostName, Reason, Verb

EVERY_S = LIMITS.barrier_report_s


def said(world: World) -> list[tuple[str, float, str]]:
    notes = world.notes("barrier")
    return [(str(n.facts["step"]), n.facts["seconds"], str(n.facts["missing"])) for n in notes]  # type: ignore[misc]  # seconds are a float


def evicting(world: World, *, ranks: int = 1) -> list[int]:
    _, processes = resident(world, ranks=ranks)
    world.auto = False
    world.acquire(world.session(B))
    return [process.pid for process in processes]


def test_a_barrier_that_waits_names_step_host_and_operation_again_and_again() -> None:
    world = World()
    (pid,) = evicting(world)
    world.run_until(StartOperation, Verb.FREEZE)
    world.pass_time(EVERY_S - 0.1)
    assert said(world) == [], "what does not take long is not spoken of"
    world.pass_time(0.1)
    world.pass_time(EVERY_S)
    assert said(world) == [
        ("freezing", EVERY_S, f"n1 (pid {pid} freeze 5.0 s)"),
        ("freezing", 2 * EVERY_S, f"n1 (pid {pid} freeze 10.0 s)"),
    ]
    (note, _) = world.notes("barrier")
    assert (note.level, note.facts["job"], note.facts["groups"]) == ("info", str(A), G1)


def test_each_step_of_a_move_has_a_clock_of_its_own() -> None:
    world = World()
    (pid,) = evicting(world)
    world.run_until(StartOperation, Verb.FREEZE)
    world.pass_time(EVERY_S - 1.0)
    world.run_until(StartOperation, Verb.SNAPSHOT)
    world.pass_time(EVERY_S - 1.0)
    assert said(world) == []
    world.pass_time(1.0)
    assert said(world) == [("snapshotting", EVERY_S, f"n1 (pid {pid} snapshot 5.0 s)")]
    world.run()
    world.pass_time(3 * EVERY_S)
    assert len(said(world)) == 1, "the move is over"


def test_a_barrier_that_waits_for_callbacks_or_a_look_says_so() -> None:
    world = World()
    evicting(world)
    world.run_until(ScanGroups)
    world.pass_time(EVERY_S)
    world.session(A, hooks=True)
    world.run_until(RunHooks)
    world.pass_time(EVERY_S)
    assert [missing for _, _, missing in said(world)] == ["n1 (scan)", "n1 (hooks)"]


def test_between_two_tries_nobody_is_waited_for() -> None:
    world = World()
    _, (_, late) = resident(world, ranks=2)

    def verdict(verb: Verb, process: Process) -> Reason | None:
        wrong = verb is Verb.THAW or (verb is Verb.FREEZE and process.id == late)
        return failure(Cause.DRIVER, process.id) if wrong else None

    world.verdict = verdict
    world.acquire(world.session(B))
    while (coordinator := world.machine.tenancies.all[ON_G1].coordinator).place in GOALS:
        assert coordinator.wanted is Place.TURNING_BACK, "it is brought back, after a pause"
        world.pass_time(LIMITS.retry_max_s)
    assert coordinator.place is Place.BLOCKED
    assert said(world) == []


def test_a_host_of_which_nothing_is_known_here_is_named_all_the_same() -> None:
    world = World()
    resident(world)
    tenancy = world.machine.tenancies.all[ON_G1]
    tenancy.coordinator.hosts = (HostName("n1"), HostName("n2"))
    world.auto = False
    world.acquire(world.session(B))
    assert [str(host) for host in awaited(tenancy, world.now)] == ["n1 (scan)", "n2"]
    tenancy.coordinator.place = Place.ON
    assert awaited(tenancy, world.now) == []


def test_of_very_many_ranks_some_are_named_and_the_others_counted() -> None:
    world = World()
    resident(world, ranks=1)
    tenancy = world.machine.tenancies.all[ON_G1]
    world.auto = False
    world.acquire(world.session(B))
    (host,) = awaited(tenancy, world.now)
    rank = next(iter(tenancy.participant.ranks.values())).id
    many = replace(host, step=None, operations=((rank, Verb.SNAPSHOT, 1.0),) * (MAX_NAMED + 3))
    one = f"pid {rank.process.pid} snapshot 1.0 s"
    assert str(many) == f"n1 ({', '.join([one] * MAX_NAMED)}, 3 more)"
