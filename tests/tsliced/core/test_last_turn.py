"""Last turns: a process whose state is away gets it back before it ends."""

from __future__ import annotations

from dataclasses import replace

from stories import PARKED, RUNNING, A, B, C
from world import D1, D2, G1, G2, LIMITS, World

from tsliced.core.actions import DeclineTurn, StartOperation
from tsliced.core.model import Arrival, LeaseId, ProcessId, SessionId, Verb


def declined(world: World, lease: LeaseId) -> bool:
    session, _, request = lease.rpartition(".")
    answer = DeclineTurn(session=SessionId(session), request=int(request))  # type: ignore[arg-type]
    return answer in world.all_of(DeclineTurn)


def rank_with_client(world: World, *, pid: int = 50) -> tuple[SessionId, ProcessId]:
    """Let a process of job a have a client and state on g1."""
    session = world.session(A, pid=pid)
    lease = world.acquire(session)
    process = world.context(A, D1, pid=pid)
    world.look()
    world.release(lease)
    return session, process


def test_a_parked_process_gets_its_state_back_and_keeps_it_until_it_is_gone() -> None:
    world = World()
    session, process = rank_with_client(world)
    holder = world.acquire(world.session(B))
    assert world.state(process) is PARKED
    last = world.last_turn(session)
    after = world.acquire(world.session(C))
    assert world.waits(last)
    world.release(holder)
    assert world.held(last)
    assert world.grants()[-1].restored
    assert world.state(process) is RUNNING
    world.pass_time(1e4)
    assert world.waits(after)
    world.die(process)
    assert world.held(after)


def test_who_is_no_rank_needs_no_last_turn() -> None:
    world = World()
    rank_with_client(world)
    other = world.session(A)
    assert declined(world, world.last_turn(other, leaving=True))


def test_who_runs_needs_no_last_turn_unless_it_leaves() -> None:
    world = World()
    session, process = rank_with_client(world)
    assert declined(world, world.last_turn(session))
    last = world.last_turn(session, leaving=True)
    assert world.held(last)
    waiting = world.acquire(world.session(B))
    assert world.waits(waiting)
    world.die(process)
    assert world.held(waiting)


def test_g4_who_runs_and_leaves_passes_nobody_over() -> None:
    world = World()
    session, process = rank_with_client(world)
    world.auto = False
    world.acquire(world.session(B))
    waiting = world.acquire(world.session(C))
    # It is on its way off: that is waited for, and then its turn in the queue.
    last = world.last_turn(session, leaving=True)
    world.auto = True
    world.run()
    assert world.waits(last)
    assert world.waits(waiting)
    assert world.state(process) is PARKED


def test_who_leaves_while_its_own_job_holds_stays_with_it() -> None:
    world = World()
    session, process = rank_with_client(world)
    lease = world.acquire(session)
    last = world.last_turn(session, leaving=True)
    assert world.held(last)
    world.release(lease)
    waiting = world.acquire(world.session(B))
    assert world.waits(waiting)
    world.die(process)
    assert world.held(waiting)


def test_who_leaves_while_others_are_chosen_and_cannot_come_needs_none() -> None:
    world = World()
    session, _process = rank_with_client(world)
    world.auto = False
    other = world.acquire(world.session(B), G1)
    world.cancel(other)
    world.run()
    world.auto = True
    world.acquire(world.session(C), G2)
    blocker = world.acquire(world.session(B), G1, G2)
    assert world.waits(blocker), "it has g1 and waits for g2"
    assert declined(world, world.last_turn(session, leaving=True))


def test_a_last_turn_of_a_process_that_is_being_taken_off_is_waited_for() -> None:
    world = World()
    session, process = rank_with_client(world)
    world.auto = False
    holder = world.acquire(world.session(B))
    world.run_until(StartOperation, Verb.FREEZE)
    last = world.last_turn(session)
    world.auto = True
    world.run()
    world.release(holder)
    assert world.held(last)
    assert world.state(process) is RUNNING


def test_ranks_that_end_together_do_not_wait_for_each_other() -> None:
    world = World()
    first, one = rank_with_client(world, pid=50)
    second, two = rank_with_client(world, pid=51)
    holder = world.acquire(world.session(B))
    lasts = [world.last_turn(first), world.last_turn(second)]
    assert len(world.machine.leasing.arbiters[G1].queue) == 1
    world.release(holder)
    assert all(map(world.held, lasts))
    waiting = world.acquire(world.session(C))
    world.die(one)
    assert world.waits(waiting)
    world.die(two)
    assert world.held(waiting)


def test_a_last_turn_takes_nobodys_place_in_a_round() -> None:
    world = World()
    session, _process = rank_with_client(world)
    holder = world.acquire(world.session(B))
    early = world.acquire(world.session(A), ranks=2, arrival=Arrival.FIRST)
    last = world.last_turn(session)
    late = world.acquire(world.session(A), ranks=2, arrival=Arrival.FIRST)
    world.release(holder)
    assert all(map(world.held, (early, last, late)))
    world.restart()
    assert all(map(world.held, (early, last, late)))


def test_a_last_turn_is_not_waited_for_beyond_its_time() -> None:
    world = World()
    session, _process = rank_with_client(world)
    world.acquire(world.session(B))
    last = world.last_turn(session, timeout_s=10.0)
    world.pass_time(11.0)
    assert world.code(last) == "timeout"


def test_g6_a_repeated_request_has_the_same_answer() -> None:
    world = World()
    session, process = rank_with_client(world)
    holder = world.acquire(world.session(B))
    last = world.last_turn(session, request=1000)
    world.last_turn(session, request=1000)
    assert len(world.machine.leasing.arbiters[G1].queue) == 1
    world.release(holder)
    world.last_turn(session, request=1000)
    first, second = [g for g in world.grants() if g.lease == last]
    assert first.tokens == second.tokens
    world.release(last)
    world.last_turn(session, request=1000)
    assert world.refusals()[-1].code == "lease_ended"
    world.die(process)
    world.last_turn(session)
    assert world.refusals()[-1].code == "session_unknown"


def test_a_process_on_several_groups_gets_all_of_them_back() -> None:
    world = World()
    session = world.session(A, pid=50)
    lease = world.acquire(session, G1, G2)
    process = world.context(A, D1, D2, pid=50)
    world.look()
    world.release(lease)
    holder = world.acquire(world.session(B), G1)
    last = world.last_turn(session)
    world.release(holder)
    assert world.held(last)
    assert [group for group, _ in world.grants()[-1].tokens] == [G1, G2]
    assert world.state(process) is RUNNING


def test_who_asks_for_a_last_turn_needs_no_courtesy() -> None:
    world = World(limits=replace(LIMITS, idle_park_s=60.0, courtesy_turn_s=10.0))
    session, process = rank_with_client(world)
    holder = world.acquire(world.session(B))
    world.pass_time(61.0)
    assert world.machine.leasing.turns
    last = world.last_turn(session)
    assert not world.machine.leasing.turns
    world.release(holder)
    assert world.held(last)
    assert world.state(process) is RUNNING
