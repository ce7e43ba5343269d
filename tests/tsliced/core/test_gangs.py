"""Rounds: the ranks of a job that ask together are granted together."""

from __future__ import annotations

from world import D1, G1, G2, LIMITS, World, job

from tsliced.core.model import Arrival, LeaseId, RankState, SessionId

A, B = job("a"), job("b")


def gang(world: World, count: int) -> list[SessionId]:
    return [world.session(A) for _ in range(count)]


def ask(world: World, session: SessionId, ranks: int = 2, **more: Arrival) -> LeaseId:
    return world.acquire(session, G1, ranks=ranks, arrival=more.get("arrival", Arrival.ALL))


def test_a_round_is_granted_when_all_ranks_have_asked_with_one_token() -> None:
    world = World()
    first, second = gang(world, 2)
    one = ask(world, first)
    assert world.waits(one)
    two = ask(world, second)
    assert world.held(one)
    assert world.held(two)
    tokens = {grant.tokens for grant in world.grants()}
    assert len(tokens) == 1


def test_a_round_that_is_not_complete_stands_in_nobodys_way() -> None:
    world = World()
    one = ask(world, gang(world, 1)[0])
    other = world.acquire(world.session(B))
    assert world.held(other)
    assert world.waits(one)


def test_g4_a_round_takes_its_place_when_its_last_rank_asks() -> None:
    world = World()
    first, second = gang(world, 2)
    holder = world.acquire(world.session(B))
    one = ask(world, first)
    between = world.acquire(world.session(B))
    two = ask(world, second)
    world.release(holder)
    assert world.held(between)
    world.release(between)
    assert world.held(one)
    assert world.held(two)


def test_at_the_first_arrival_the_round_is_granted_and_the_others_join_it() -> None:
    world = World()
    first, second = gang(world, 2)
    one = ask(world, first, arrival=Arrival.FIRST)
    assert world.held(one)
    two = ask(world, second, arrival=Arrival.FIRST)
    assert world.held(two)
    assert world.grants()[0].tokens == world.grants()[1].tokens


def test_a_round_is_over_when_all_have_released() -> None:
    world = World()
    leases = [ask(world, session) for session in gang(world, 2)]
    other = world.acquire(world.session(B))
    world.release(leases[0])
    assert world.waits(other)
    world.release(leases[1])
    assert world.held(other)


def test_one_that_asks_again_early_belongs_to_the_next_round() -> None:
    world = World()
    first, second = gang(world, 2)
    one, two = (ask(world, session) for session in (first, second))
    world.release(one)
    again = ask(world, first)
    assert world.waits(again)
    world.release(two)
    assert world.waits(again)
    also = ask(world, second)
    assert world.held(again)
    assert world.held(also)


def test_a_slow_rank_joins_the_round_that_it_was_meant_for_not_the_next() -> None:
    world = World()
    sessions = gang(world, 3)
    one, two = (ask(world, s, 3, arrival=Arrival.FIRST) for s in sessions[:2])
    world.release(one)
    again = ask(world, sessions[0], 3, arrival=Arrival.FIRST)
    assert world.waits(again)
    slow = ask(world, sessions[2], 3, arrival=Arrival.FIRST)
    assert world.held(slow)
    world.release(two)
    world.release(slow)
    assert world.held(again)


def test_a_rank_that_died_is_not_waited_for() -> None:
    world = World()
    sessions = gang(world, 3)
    one, two = (ask(world, session, 3) for session in sessions[:2])
    # It asked for another round before, so it is known to be one of them.
    three = ask(world, sessions[2], 3)
    for lease in (one, two, three):
        world.release(lease)
    again = [ask(world, session, 3) for session in sessions[:2]]
    assert all(world.waits(lease) for lease in again)
    world.die(world.process_of(sessions[2]))
    assert all(world.held(lease) for lease in again)


def test_a_rank_that_died_while_it_waited_is_not_counted_as_there() -> None:
    world = World()
    sessions = gang(world, 3)
    one, _ = (ask(world, session, 3) for session in sessions[:2])
    world.die(world.process_of(sessions[1]))
    assert world.waits(one)
    three = ask(world, sessions[2], 3)
    assert world.held(one)
    assert world.held(three)


def test_nor_is_one_that_said_goodbye_or_stayed_away() -> None:
    for leave in (World.close, World.disconnect):
        world = World()
        first, second = gang(world, 2)
        for lease in [ask(world, session) for session in (first, second)]:
            world.release(lease)
        again = ask(world, first)
        leave(world, second)
        world.pass_time(LIMITS.grace_s)
        assert world.held(again)


def test_the_next_round_does_not_wait_for_the_dead_either_until_it_is_replaced() -> None:
    world = World()
    first, second = gang(world, 2)
    for lease in [ask(world, session) for session in (first, second)]:
        world.release(lease)
    world.die(world.process_of(second))
    alone = ask(world, first)
    assert world.held(alone)
    world.release(alone)
    newcomer = world.session(A)
    one = ask(world, newcomer)
    assert world.waits(one)
    two = ask(world, first)
    assert world.held(one)
    assert world.held(two)


def test_a_round_that_waits_is_left_when_one_of_it_cancels_and_joined_when_it_asks_again() -> None:
    world = World()
    first, second = gang(world, 2)
    one = ask(world, first)
    world.cancel(one)
    assert not world.machine.leasing.rounds
    two = ask(world, second)
    again = ask(world, first)
    assert world.held(two)
    assert world.held(again)


def test_one_that_cancels_in_the_queue_may_come_back_to_the_same_place() -> None:
    world = World()
    holder = world.acquire(world.session(B))
    first, second = gang(world, 2)
    one, two = (ask(world, session) for session in (first, second))
    behind = world.acquire(world.session(B))
    world.cancel(one)
    again = ask(world, first)
    world.release(holder)
    assert world.held(two)
    assert world.held(again)
    assert world.waits(behind)


def test_ranks_that_ask_for_different_groups_are_different_rounds() -> None:
    world = World()
    first, second = gang(world, 2)
    one = world.acquire(first, G1, ranks=2)
    two = world.acquire(second, G2, ranks=2)
    assert world.waits(one)
    assert world.waits(two)


def test_g8_a_round_survives_a_restart_at_every_stage() -> None:
    world = World()
    first, second = gang(world, 2)
    one = ask(world, first)
    world.restart()
    two = ask(world, second)
    assert world.held(one)
    assert world.held(two)
    world.restart()
    other = world.acquire(world.session(B))
    world.release(one)
    again = ask(world, first)
    world.restart()
    world.release(two)
    assert world.held(other)
    world.release(other)
    also = ask(world, second)
    assert world.held(again)
    assert world.held(also)


def test_g8_who_is_gone_is_known_after_a_restart_too() -> None:
    world = World()
    sessions = gang(world, 3)
    one = ask(world, sessions[0], 3)
    two = ask(world, sessions[1], 3)
    world.die(world.process_of(sessions[1]))
    world.restart()
    three = ask(world, sessions[2], 3)
    assert world.held(one)
    assert world.held(three)
    assert not world.held(two)


def test_g8_one_that_dies_after_a_restart_without_having_asked_is_not_waited_for() -> None:
    world = World()
    first, second = gang(world, 2)
    one = ask(world, first)
    world.restart()
    world.die(world.process_of(second))
    assert world.held(one)


def test_an_agent_is_no_rank_of_a_round() -> None:
    world = World()
    first, second = gang(world, 2)
    one = ask(world, first)
    world.machine.leasing.sessions[second].agent = True
    world.journal["session", second] = world.machine.leasing.sessions[second].record()
    world.restart()
    world.die(world.process_of(second))
    assert world.waits(one)


def test_the_death_of_a_session_of_another_gang_changes_nothing() -> None:
    world = World()
    first, second = gang(world, 2)
    one = world.acquire(first, G1, ranks=2)
    world.acquire(second, G2, ranks=2)
    world.die(world.process_of(second))
    assert world.waits(one)


def test_one_set_of_groups_is_switched_for_the_whole_round() -> None:
    world = World()
    sessions = gang(world, 2)
    leases = [ask(world, session) for session in sessions]
    ranks = [world.context(A, D1) for _ in range(2)]
    other = world.acquire(world.session(B))
    for lease in leases:
        world.release(lease)
    assert world.held(other)
    assert {world.state(rank) for rank in ranks} == {RankState.PARKED}
    again = [ask(world, session) for session in sessions]
    world.release(other)
    assert all(world.held(lease) for lease in again)
    assert {world.state(rank) for rank in ranks} == {RankState.RUNNING}
