"""A machine rebuilt from what the journal kept."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from world import D1, D2, G1, G2, GROUPS, HOST, LIMITS, World, failure, job

from tsliced.core.actions import (
    FaultRecord,
    LeaseEndedRecord,
    LeaseRecord,
    RankEndedRecord,
    RankRecord,
    Record,
    RunHooks,
    SessionEndedRecord,
    SessionRecord,
    StartOperation,
    TenancyEndedRecord,
    TenancyRecord,
    WatchProcess,
)
from tsliced.core.coordinator import NO_STAMP, Place
from tsliced.core.events import Started
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.model import (
    Arrival,
    Cause,
    Counter,
    Goal,
    GroupName,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    RequestId,
    RoundId,
    SessionId,
    Stamp,
    TenancyKey,
    Verb,
)
from tsliced.core.recovery import recover

A, B = job("a"), job("b")
RUNNING, FROZEN, PARKED = RankState.RUNNING, RankState.FROZEN, RankState.PARKED
S, P = SessionId("s"), ProcessId(5, 1)
KEY = TenancyKey(A, (G1,))
LEASE = LeaseId("s.1")


def machine() -> Machine:
    config = MachineConfig(host=HOST, groups=GROUPS, limits=LIMITS, generation=1, ceiling=8)
    return Machine(config, random=Random(0), full_checks=True)


def session() -> SessionRecord:
    return SessionRecord(
        session=S, job=A, process=P, secret=b"x", groups=(G1, G2), hooks=True, agent=True
    )


def lease(*, tokens: bool = False, place: int = 3, group: GroupName = G1) -> LeaseRecord:
    return LeaseRecord(
        lease=LEASE,
        session=S,
        request=RequestId(1),
        round=RoundId(4),
        place=place,
        groups=(group,),
        phase="p",
        ranks=1,
        arrival=Arrival.ALL,
        tokens=((group, Counter(1, 1)),) if tokens else (),
    )


def tenancy(goal: Goal, *, group: GroupName = G1) -> TenancyRecord:
    return TenancyRecord(
        tenancy=TenancyKey(A, (group,)), stamp=Stamp(0, Counter(1, 3), 1), goal=goal
    )


def rank(*, group: GroupName = G1) -> RankRecord:
    return RankRecord(
        rank=RankId(HOST, P),
        tenancy=TenancyKey(A, (group,)),
        devices=frozenset({D1}),
        device_bytes=70,
        state=RUNNING,
        verb=Verb.FREEZE,
    )


def recovered(*records: Record) -> Machine:
    made = machine()
    recover(made, records, now=100.0)
    return made


def test_an_empty_journal_is_an_empty_machine() -> None:
    made = recovered()
    assert not made.leasing.sessions
    assert not made.tenancies.all
    assert made.deadline is None


def test_g8_a_session_is_away_until_its_client_comes_back_in_time() -> None:
    made = recovered(session())
    known = made.leasing.sessions[S]
    assert not known.connected
    assert known.record() == session()
    assert made.deadline == 100.0 + LIMITS.grace_s


@pytest.mark.parametrize("in_reverse", [False, True])
def test_g8_a_holder_holds_and_its_token_is_the_same_in_whatever_order_records_come(
    in_reverse: bool,
) -> None:
    records = [session(), tenancy(Goal.ON), rank(), lease(tokens=True)]
    made = recovered(*reversed(records) if in_reverse else records)
    assert made.leasing.leases[LEASE].tokens == ((G1, Counter(1, 1)),)
    assert made.leasing.arbiters[G1].chosen == RoundId(4)
    assert not made.leasing.leases[LEASE].unconfirmed
    ranks = made.tenancies.all[KEY].participant.ranks
    assert [(known.state, known.device_bytes) for known in ranks.values()] == [
        (RankState.UNKNOWN, 70)
    ]


def test_new_rounds_and_places_are_numbered_behind_those_that_are_known() -> None:
    made = recovered(session(), lease())
    assert (made.leasing.last_round, made.leasing.last_place) == (4, 3)


def test_when_it_starts_it_watches_all_processes_once_and_asks_about_all_ranks() -> None:
    made = recovered(session(), tenancy(Goal.ON), rank(), lease(tokens=True))
    made.numbers.ceiling = 16
    effects = made.handle(Started(), now=100.0)
    # A question leaves the order that stands.
    assert effects.records == (
        TenancyRecord(tenancy=KEY, stamp=Stamp(0, Counter(1, 8), 0), goal=Goal.ON),
    )
    watch, query, *_ = effects.actions
    assert watch == WatchProcess(process=P)
    assert isinstance(query, StartOperation)
    assert (query.rank.process, query.verb) == (P, Verb.QUERY)


def test_g2_epochs_go_on_above_those_before() -> None:
    world = World()
    world.acquire(world.session(A))
    world.context(A, D1)
    world.look()
    before = max(record.stamp for record in world.journal.values() if hasattr(record, "stamp"))
    world.restart()
    after = [r.stamp for r in world.journal.values() if isinstance(r, TenancyRecord)]
    assert min(after) > before


@pytest.mark.parametrize(
    ("goal", "place", "away"),
    [
        (Goal.FROZEN, Place.ON, False),
        (Goal.OFF, Place.OFF, True),
        (Goal.RESTORED, Place.ON, True),
        (Goal.ON, Place.ON, False),
    ],
)
def test_the_order_that_stood_says_whether_the_devices_must_be_looked_at(
    goal: Goal, place: Place, away: bool
) -> None:
    made = recovered(tenancy(goal), rank())
    known = made.tenancies.all[KEY]
    assert (known.coordinator.place, known.coordinator.goal) == (place, goal)
    assert known.participant.away is away
    assert known.participant.quiesced


def test_a_tenancy_that_was_never_ordered_anything_owes_nobody_a_word() -> None:
    made = recovered(TenancyRecord(tenancy=KEY, stamp=NO_STAMP, goal=Goal.ON), rank())
    assert not made.tenancies.all[KEY].participant.quiesced


def test_a_rank_of_a_tenancy_without_a_record_is_assumed_to_be_on() -> None:
    made = recovered(rank())
    assert made.tenancies.all[KEY].coordinator.place is Place.ON


def test_g1_a_holder_without_ranks_may_have_made_a_context_unseen() -> None:
    for records in ([tenancy(Goal.ON)], []):
        made = recovered(session(), lease(tokens=True), *records)
        assert [t.key for t in made.tenancies.residents(G1)] == [KEY]


def test_g1_who_held_without_a_known_rank_is_looked_at_before_the_next_comes_on() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    process = world.context(A, D1)
    world.restart()
    waiter = world.acquire(world.session(B))
    world.release(holder)
    assert world.held(waiter)
    assert world.state(process) is PARKED


def test_what_is_without_ranks_and_lease_is_forgotten() -> None:
    made = recovered(dataclasses.replace(session(), hooks=False), tenancy(Goal.ON))
    effects = made.handle(Started(), now=100.0)
    assert TenancyEndedRecord(tenancy=KEY) in effects.records
    assert not made.tenancies.all


def test_a_pin_and_a_fault_are_known_again() -> None:
    reason = failure(Cause.UNSUPPORTED, P)
    made = recovered(
        session(),
        dataclasses.replace(tenancy(Goal.ON), pinned=reason),
        rank(),
        FaultRecord(job=A, reason=reason),
    )
    assert made.tenancies.all[KEY].coordinator.pinned == reason
    assert made.leasing.faults == {A: reason}


def test_a_fault_that_nothing_is_left_of_is_cleared_when_it_starts() -> None:
    made = recovered(FaultRecord(job=A, reason=failure(Cause.DRIVER)))
    effects = made.handle(Started(), now=100.0)
    assert effects.records == (FaultRecord(job=A, reason=None),)
    assert not made.leasing.faults


def test_answers_are_remembered_the_oldest_first() -> None:
    def ended(request: int, slot: int, of: SessionId = S) -> LeaseEndedRecord:
        return LeaseEndedRecord(
            lease=LeaseId(f"{of}.{request}"),
            session=of,
            request=RequestId(request),
            slot=slot,
            code="released",
            text="",
            waiters=0,
            deferred=True,
        )

    gone = SessionId("gone")
    made = recovered(session(), ended(9, 0), ended(8, 1), ended(7, 0, gone))
    assert list(made.leasing.sessions[S].ended) == ["s.8", "s.9"]
    # Of a session that is gone nothing is remembered, and the journal is told so.
    assert made.unwritten.take_with(()) == [SessionEndedRecord(session=gone)]


def test_a_lease_whose_session_is_gone_is_ended() -> None:
    made = recovered(lease(tokens=True))
    assert not made.leasing.leases
    due = made.unwritten.take_with(())
    assert [type(record) for record in due] == [LeaseEndedRecord, SessionEndedRecord]


def test_what_was_due_to_the_journal_goes_with_the_first_thing_that_is_written() -> None:
    world = World()
    holder = world.session(A)
    world.acquire(holder)
    del world.journal["session", holder]
    world.restart()
    world.session(B)
    assert not [key for key in world.journal if key[0] == "lease"]


def test_groups_that_are_configured_no_longer_are_left_out_and_their_leases_ended() -> None:
    nowhere = GroupName("nowhere")
    made = recovered(
        session(), lease(tokens=True, group=nowhere), tenancy(Goal.ON, group=nowhere),
        rank(group=nowhere),
    )  # fmt: skip
    assert not made.leasing.leases
    assert not made.tenancies.all
    (answer,) = made.leasing.sessions[S].ended.values()
    assert (answer.code, answer.text) == ("lease_ended", "its group is no longer configured")
    assert made.unwritten.take_with(()) == [answer]


@pytest.mark.parametrize(
    "record",
    [
        SessionEndedRecord(session=S),
        TenancyEndedRecord(tenancy=KEY),
        RankEndedRecord(rank=RankId(HOST, P)),
        FaultRecord(job=A, reason=None),
    ],
)
def test_a_journals_state_has_no_ends_in_it(record: Record) -> None:
    with pytest.raises(AssertionError):
        recovered(record)


# --- whole restarts -------------------------------------------------------------------------------


def test_g8_holders_and_waiters_keep_lease_and_place() -> None:
    world = World()
    holder = world.acquire(world.session(A), G1, G2)
    waiters = [world.acquire(world.session(job(f"j{number}"))) for number in range(4)]
    other = world.acquire(world.session(B), G2)
    world.restart()
    assert world.held(holder)
    assert all(world.waits(lease) for lease in (*waiters, other))
    world.release(holder)
    assert world.held(other)
    for waiter in waiters:
        assert world.held(waiter)
        world.release(waiter)


def test_g6_a_release_that_was_not_answered_is_answered_after_the_restart() -> None:
    world = World()
    client = world.session(A)
    lease_id = world.acquire(client)
    world.clients[client].connected = False
    request = world.release(lease_id)
    assert world.answers(request) == []
    world.restart()
    assert len(world.answers(request)) == 1
    assert not world.held(lease_id)


@pytest.mark.parametrize("finish", [True, False], ids=["the worker lives on", "never begun"])
@pytest.mark.parametrize("verb", [Verb.FREEZE, Verb.SNAPSHOT, Verb.RESTORE, Verb.THAW])
def test_g8_a_switch_that_was_interrupted_is_carried_through(verb: Verb, finish: bool) -> None:
    world = World()
    first, second = world.session(A), world.session(B)
    world.acquire(first)
    rank_a = world.context(A, D1)
    world.release(next(iter(world.clients[first].held)))
    world.acquire(second)
    rank_b = world.context(B, D1)
    world.look()
    waiter = world.acquire(first)
    world.auto = False
    world.release(next(iter(world.clients[second].held)))
    world.run_until(StartOperation, verb)
    world.auto = True
    world.restart(finish=finish)
    assert world.held(waiter)
    assert (world.state(rank_a), world.state(rank_b)) == (RUNNING, PARKED)


def test_ranks_of_a_dead_process_are_gone_after_the_restart() -> None:
    world = World()
    holder = world.session(A)
    lease_id = world.acquire(holder)
    process = world.context(A, D1)
    world.look()
    world.release(lease_id)
    del world.processes[process]
    world.restart()
    assert not world.machine.tenancies.home
    assert ("rank", world.rank(process)) not in world.journal


def test_sessions_that_were_told_to_quiesce_are_told_to_resume() -> None:
    world = World()
    first = world.session(A, hooks=True)
    lease_id = world.acquire(first)
    world.context(A, D1)
    world.auto = False
    world.acquire(world.session(B))
    world.release(lease_id)
    world.run_until(StartOperation, Verb.FREEZE)
    world.restart(finish=False)
    world.over.clear()
    world.auto = True
    world.run()
    assert [hook.quiesce for hook in world.ended(RunHooks)][:1] == [False]


def test_those_of_a_held_round_whose_grant_was_not_written_hold_it_too() -> None:
    world = World()
    sessions = [world.session(A) for _ in range(2)]
    leases = [world.acquire(one, ranks=2) for one in sessions]
    record = world.journal["lease", leases[1]]
    assert isinstance(record, LeaseRecord)
    world.journal["lease", leases[1]] = dataclasses.replace(record, tokens=())
    world.restart()
    assert all(world.held(one) for one in leases)
    assert len({grant.tokens for grant in world.grants()}) == 1


def test_a_round_that_was_written_down_only_in_part_keeps_its_place() -> None:
    world = World()
    holder = world.acquire(world.session(B))
    sessions = [world.session(A) for _ in range(2)]
    leases = [world.acquire(one, ranks=2) for one in sessions]
    record = world.journal["lease", leases[0]]
    assert isinstance(record, LeaseRecord)
    world.journal["lease", leases[0]] = dataclasses.replace(record, place=0)
    world.restart()
    behind = world.acquire(world.session(B), G1)
    world.release(holder)
    assert all(world.held(one) for one in leases)
    assert world.waits(behind)


def test_g1_two_that_are_parked_are_not_both_brought_back_by_a_restart() -> None:
    world = World()
    for owner in (A, B):
        one = world.session(owner)
        lease_id = world.acquire(one)
        world.context(owner, D1)
        world.release(lease_id)
    world.release(world.acquire(world.session(job("c"))))
    world.restart()
    assert {world.state(process) for process in world.processes} == {PARKED}


def test_a_device_that_a_parked_rank_had_is_what_it_needs_again() -> None:
    world = World()
    holder = world.session(A)
    lease_id = world.acquire(holder, G1, G2)
    process = world.context(A, D1, D2)
    world.release(lease_id)
    other = world.acquire(world.session(B), G1, G2)
    world.restart()
    again = world.acquire(holder, G1, G2)
    world.release(other)
    assert world.held(again)
    assert world.state(process) is RUNNING


def test_callbacks_of_a_tenancy_that_was_divided_are_told_to_resume_after_a_restart_g8() -> None:
    world = World()
    session = world.session(A, hooks=True)
    both = world.acquire(session, G1, G2)
    world.context(A, D1)
    world.look()
    world.release(both)
    other = world.acquire(world.session(B))
    world.context(B, D1)
    world.look()
    alone = world.acquire(session)
    world.auto = False
    world.release(other)
    world.run_until(StartOperation, Verb.FREEZE)
    world.restart()
    world.auto = True
    world.run()
    assert world.held(alone)
    assert [hooks.quiesce for hooks in world.ended(RunHooks)] == [True, False]
