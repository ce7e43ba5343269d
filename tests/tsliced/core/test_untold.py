"""What the history is told of leases that nobody waits for: late, and of many of them at once."""

from __future__ import annotations

from stories import A, B, resident
from world import D2, G1, G2, World

from tsliced.core.actions import Note
from tsliced.core.books import TELL_EVERY_S
from tsliced.core.model import Arrival, GroupName, LeaseId, SessionId


def told(world: World) -> list[tuple[str, object]]:
    """Return what the history has of leases since the first one: kinds and leases, in order."""
    kinds = ("queued", "granted", "released", "held")
    notes = [note for note in world.all_of(Note) if note.kind in kinds]
    first = next(number for number, note in enumerate(notes) if note.kind == "released")
    return [(note.kind, note.facts["lease"]) for note in notes[first + 1 :]]


def settled(world: World) -> SessionId:
    """Let job a be on both groups, so that it waits for neither."""
    session, _ = resident(world)
    lease = world.acquire(session, G2)
    world.context(A, D2)
    world.look()
    world.release(lease)
    return session


def short(
    world: World, session: SessionId, group: GroupName = G1, *, held_s: float = 0.25
) -> LeaseId:
    """Let a lease be granted at once and given back soon."""
    lease = world.acquire(session, group)
    world.now += held_s
    world.release(lease)
    return lease


def test_short_leases_are_one_event_with_their_number_length_and_the_last_of_them() -> None:
    world = World()
    session, _ = resident(world)
    short(world, session)
    last = short(world, session, held_s=0.5)
    assert told(world) == []
    world.pass_time(TELL_EVERY_S)
    assert told(world) == [("held", last)]
    (note,) = world.notes("held")
    assert note.level == "debug"
    assert note.facts == {
        "job": str(A),
        "groups": "g1",
        "leases": 2,
        "held_s": 0.75,
        "ranks": 1,
        "lease": last,
        "token": world.grants()[-1].tokens[0][1].as_int(),
        "phase": None,
    }
    assert world.machine.deadline is None, "there is nothing more to tell"


def test_leases_of_other_phases_are_told_of_apart() -> None:
    world = World()
    session, _ = resident(world)
    for phase in ("rollout", "train", "rollout"):
        lease = world.acquire(session, G1, phase=phase)
        world.now += 0.25
        world.release(lease)
    world.pass_time(TELL_EVERY_S)
    told_of = [(n.facts["phase"], n.facts["leases"]) for n in world.notes("held")]
    assert told_of == [("rollout", 2), ("train", 1)]


def test_without_a_history_only_leases_that_had_to_wait_are_told_of_and_at_once() -> None:
    world = World(recording=False)
    session, _ = resident(world)
    before = len(world.notes("granted"))
    short(world, session)
    lease = world.acquire(session, G1)
    waiter = world.acquire(world.session(B), G1)
    world.release(lease)
    assert [note.facts["lease"] for note in world.notes("granted")[before:]] == [waiter]
    assert world.notes("released") + world.notes("held") == []


def test_without_a_history_a_lease_that_state_moved_for_is_told_of_at_once_too() -> None:
    world = World(recording=False)
    resident(world)
    told = len(world.notes("granted"))

    def slow(_action: object) -> None:
        world.now += 1.0

    world.scans = slow
    lease = world.acquire(world.session(B))
    assert world.held(lease)
    (note,) = world.notes("granted")[told:]
    assert (note.facts["lease"], note.level) == (lease, "info")
    assert world.machine.untold(now=world.now) == []


def test_leases_of_other_groups_are_told_of_apart() -> None:
    world = World()
    session = settled(world)
    seen = len(told(world))
    first, second = short(world, session, G1), short(world, session, G2)
    world.pass_time(TELL_EVERY_S)
    assert told(world)[seen:] == [("held", first), ("held", second)]
    assert [note.facts["groups"] for note in world.notes("held")] == ["g1", "g2"]


def test_a_lease_that_lasts_is_told_of_while_it_is_held_and_when_it_ends() -> None:
    world = World()
    session, _ = resident(world)
    lease = world.acquire(session)
    world.pass_time(TELL_EVERY_S)
    assert told(world) == [("granted", lease)]
    assert world.notes("granted")[-1].facts["held_s"] == TELL_EVERY_S
    world.pass_time(5.0)
    world.release(lease)
    assert told(world) == [("granted", lease), ("released", lease)]
    assert world.notes("released")[-1].facts["held_s"] == TELL_EVERY_S + 5.0


def test_one_that_was_granted_later_is_told_of_later() -> None:
    world = World()
    session = settled(world)
    seen = len(told(world))
    first = world.acquire(session, G1)
    world.pass_time(TELL_EVERY_S / 2)
    second = world.acquire(session, G2)
    world.pass_time(TELL_EVERY_S / 2)
    assert told(world)[seen:] == [("granted", first)]
    world.pass_time(TELL_EVERY_S)
    assert told(world)[seen:] == [("granted", first), ("granted", second)]
    assert world.machine.deadline is None


def test_who_holds_what_somebody_begins_to_wait_for_is_told_before_that() -> None:
    world = World()
    session, _ = resident(world)
    holder = world.acquire(session)
    world.now += 0.25
    waiter = world.acquire(world.session(B))
    assert told(world) == [("granted", holder), ("queued", waiter)]
    assert world.notes("granted")[-1].facts["held_s"] == 0.25
    world.now += 0.25
    world.release(holder)
    assert told(world)[2:] == [("released", holder), ("granted", waiter)]
    assert "held_s" not in world.notes("granted")[-1].facts, "it is told at once"


def test_what_was_over_before_somebody_had_to_wait_is_told_before_that() -> None:
    world = World()
    session, _ = resident(world)
    over = short(world, session)
    waiter = world.acquire(world.session(B))
    assert told(world) == [("held", over), ("queued", waiter), ("granted", waiter)]


def test_a_lease_that_does_not_end_by_its_release_has_both_its_events() -> None:
    world = World()
    session, _ = resident(world)
    lease = world.acquire(session)
    world.close(session)
    assert told(world) == [("granted", lease), ("released", lease)]
    assert world.notes("released")[-1].facts["cause"] == "lease_ended"


def test_so_has_one_that_joined_a_round_which_others_wait_for() -> None:
    world = World()
    session, _ = resident(world)
    first = world.acquire(session, ranks=2, arrival=Arrival.FIRST)
    waiter = world.acquire(world.session(B))
    joined = world.acquire(world.session(A), ranks=2, arrival=Arrival.FIRST)
    assert told(world) == [("granted", first), ("queued", waiter)]
    world.release(joined)
    assert told(world)[2:] == [("granted", joined), ("released", joined)]


def test_when_the_daemon_ends_all_is_told() -> None:
    world = World()
    session, _ = resident(world)
    over = short(world, session)
    held = world.acquire(session)
    notes = world.machine.untold(now=world.now + 0.5)
    assert [(note.kind, note.facts["lease"]) for note in notes] == [
        ("held", over),
        ("granted", held),
    ]
    assert notes[-1].facts["held_s"] == 0.5
    assert world.machine.untold(now=world.now) == []


def test_after_a_restart_a_lease_that_is_held_is_not_told_of_again() -> None:
    world = World()
    session, _ = resident(world)
    lease = world.acquire(session)
    world.pass_time(TELL_EVERY_S)
    world.restart()
    world.reconnect(session)
    world.pass_time(TELL_EVERY_S)
    world.release(lease)
    assert told(world) == [("granted", lease), ("released", lease)]
