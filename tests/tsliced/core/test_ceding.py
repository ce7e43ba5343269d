"""Who moves a tenancy: it is ceded to whoever has leased it, and nobody else is obeyed."""

from __future__ import annotations

import pytest
from arbiters_lab import (
    A,
    B,
    C,
    again,
    ask,
    assert_at_rest,
    come_up,
    give_back,
    hold,
    key,
    leads,
    said,
    states,
    three,
    two,
    until,
)
from hosts_lab import N1, N2, N3, Lab, device, held, say, session_of
from simulated import failure, job
from world import LIMITS

from tsliced.core.actions import HandoverRecord, RunHooks, TellStalled
from tsliced.core.coordinator import Place
from tsliced.core.events import PeerSaid
from tsliced.core.messages import (
    Cede,
    Ceded,
    CededTenancy,
    GiveBack,
    HandedOver,
    HandOver,
    NotCeded,
    PeerMessage,
    Presence,
    PresentRank,
    Taken,
)
from tsliced.core.model import (
    Cause,
    Counter,
    Goal,
    GroupName,
    HostName,
    LeaseId,
    ProcessId,
    RankState,
    RoundId,
    SessionId,
    Stamp,
)
from tsliced.core.signals import Order, Report

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED
LATE = Stamp(99, Counter(9, 9), 0)
ROUND = RoundId(99)
#: A group of the third host too, and one of it alone.
SHARED: dict[GroupName, tuple[HostName, ...]] = {A: (N1, N3), B: (N2, N3)}


def resumed(lab: Lab, host: HostName, session: SessionId) -> bool:
    """Return whether a session was told to resume since it was told to quiesce."""
    told = [run for run in lab[host].ended(RunHooks) if session in run.sessions]
    return bool(told) and not told[-1].quiesce


# --- with consent ---------------------------------------------------------------------------------


def test_a_part_then_all_then_another_part_are_each_moved_by_whoever_has_leased_them() -> None:
    lab = three()
    lease, _ = hold(lab, "a", N3, C)
    give_back(lab, lease, N3)
    together = again(lab, lease, N3, A, B, C)
    assert held(lab, together, N3)
    come_up(lab, "a", A)
    come_up(lab, "a", B)
    assert leads(lab, N3) == {(A, B, C): N1} or leads(lab, N3) == {(C,): N1}
    assert_at_rest(lab)
    give_back(lab, together, N3)
    part = again(lab, lease, N3, B, C)
    assert held(lab, part, N3)
    assert set(leads(lab, N2).values()) == {N2}
    assert_at_rest(lab)
    give_back(lab, part, N3)
    other = ask(lab, "b", N1, A, B, C)
    assert held(lab, other, N1)
    assert_at_rest(lab)


def test_a_process_that_comes_up_late_is_moved_by_whoever_has_its_group() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    rank = come_up(lab, "a", B)
    assert set(leads(lab, N2).values()) == {N1}
    other = ask(lab, "b", N2, B)
    give_back(lab, lease, N1)
    assert held(lab, other, N2)
    assert states(lab, [rank]) == [PARKED]
    assert_at_rest(lab)


def test_a_holder_gets_back_what_was_parked_where_nobody_knew_of_it() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    rank = come_up(lab, "a", B, host=N3)
    give_back(lab, lease, N1)
    other = ask(lab, "b", N1, A)
    assert states(lab, [rank]) == [PARKED]
    # Its arbiter forgets who moves it, and its host is away.
    lab.isolate(N3)
    lab.restart(N2, links=False)
    lab.connect(N1, N2)
    lab.run()
    mine = again(lab, lease, N1, B)
    lab.rejoin(N3)
    lab.rejoin(N2)
    lab.run()
    lab.pass_time(5.0)
    assert held(lab, mine, N1)
    assert held(lab, other, N1)
    assert states(lab, [rank]) == [RUNNING]
    assert_at_rest(lab)


def test_what_is_moving_is_ceded_when_it_has_arrived() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N2, B)
    other = ask(lab, "b", N2, B)
    lab.by_hand()
    lab[N2].release(lease)
    lab[N2].acquire(session_of(lease), A, B)
    lab.by_itself()
    assert held(lab, other, N2)
    give_back(lab, other, N2)
    assert states(lab, ranks) == [RUNNING]
    assert leads(lab, N2)[B,] == N1 if (B,) in leads(lab, N2) else leads(lab, N2)[A, B] == N1
    assert_at_rest(lab)


@pytest.mark.parametrize("gone", [RoundId(0), ROUND])
def test_nothing_is_ceded_of_what_is_not_there(gone: RoundId) -> None:
    lab = two()
    say(lab, N1, N2, Cede(round=gone, job=job("x"), groups=(B,)))
    assert said(lab, Ceded) == [Ceded(round=gone, job=job("x"), tenancies=())]
    assert_at_rest(lab)


def test_what_is_bound_by_a_process_is_not_taken_apart() -> None:
    lab = Lab({A: (N1,), B: (N2,), C: (N2,)})
    lease = ask(lab, "a", N2, B, C)
    lab[N2].processes[lab[N2].context(job("a"), device(N2, B), device(N2, C))].lawful = True
    lab[N2].look()
    lab.run()
    give_back(lab, lease, N2)
    apart = again(lab, lease, N2, A, B)
    assert lab[N2].code(apart) == "refused"
    together = again(lab, lease, N2, A, B, C)
    assert held(lab, together, N2)
    assert_at_rest(lab)


def test_what_binds_groups_beyond_its_tenancy_is_not_taken_apart() -> None:
    lab = Lab({A: (N1,), B: (N2,), C: (N2,)})
    lease = ask(lab, "a", N2, B)
    lab[N2].context(job("a"), device(N2, B), device(N2, C))
    lab[N2].look()
    lab.run()
    give_back(lab, lease, N2)
    apart = again(lab, lease, N2, A, B)
    assert lab[N2].code(apart) == "refused"


def test_what_stands_still_is_not_ceded_and_its_job_is_told() -> None:
    lab = two()
    lease, (rank,) = hold(lab, "a", N2, B)
    give_back(lab, lease, N2)
    lab[N2].verdict = lambda verb, process: failure(Cause.FAILED, process.id, N2)
    other = ask(lab, "b", N2, B)
    lab.pass_time(5.0)
    assert not held(lab, other, N2)
    lab[N2].cancel(other)
    lab.run()
    (tenancy,) = lab[N2].machine.tenancies.tenancies_of(job("a"))
    assert tenancy.coordinator.place is Place.BLOCKED
    both = ask(lab, "a", N1, A, B)
    assert lab[N1].code(both) == "blocked"
    lab[N2].die(rank)
    lab.run()
    assert_at_rest(lab)


def test_sessions_that_were_told_to_quiesce_are_told_to_resume_by_whoever_moves_them_then() -> None:
    lab = Lab(SHARED)
    lab[N2].session(job("a"), hooks=True)
    lease = ask(lab, "a", N1, A, B)
    rank = come_up(lab, "a", B, host=N2)
    give_back(lab, lease, N1)
    other = ask(lab, "b", N1, A)
    assert states(lab, [rank]) == [PARKED]
    lab[N2].die(rank)
    mine = again(lab, lease, N1, B)
    assert held(lab, mine, N1)
    assert held(lab, other, N1)
    assert [run.quiesce for run in lab[N2].ended(RunHooks)] == [True, False]


# --- each step is repeated ------------------------------------------------------------------------


def test_a_handover_is_kept_until_it_is_taken_g8() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    lab.by_hand()
    lab[N1].release(lease)
    lab[N1].acquire(session_of(lease), B)
    until(lab, HandOver)
    assert any(isinstance(record, HandoverRecord) for record in lab[N1].journal.values())
    lab.restart(N1)
    lab.by_itself()
    lab.pass_time(5.0)
    assert not any(isinstance(record, HandoverRecord) for record in lab[N1].journal.values())
    assert leads(lab, N2) == {(B,): N2}
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert_at_rest(lab)


def test_a_host_to_which_something_was_going_may_die_on_the_way() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    rank = come_up(lab, "a", B, host=N3)
    lab.by_hand()
    lab[N1].release(lease)
    lab[N1].acquire(session_of(lease), B)
    until(lab, HandOver)
    lab.reboot(N2)
    lab.by_itself()
    lab.pass_time(10.0)
    assert states(lab, [rank]) == [RUNNING]
    assert_at_rest(lab)


def test_a_participant_that_dies_is_not_waited_for() -> None:
    lab = Lab({A: (N1,), B: (N2, N3)})
    lease = ask(lab, "a", N1, A, B)
    come_up(lab, "a", B, host=N3)
    lab.by_hand()
    lab[N1].release(lease)
    part = lab[N1].acquire(session_of(lease), B)
    until(lab, Cede)
    lab.isolate(N3, lost=True)
    while lab.step():
        pass
    assert not held(lab, part, N1)
    lab.declare_dead(N3)
    lab.by_itself()
    lab.pass_time(5.0)
    assert held(lab, part, N1)
    assert lab[N1].machine.leads.due == {}


# --- what nobody may say --------------------------------------------------------------------------


def test_nobody_is_obeyed_on_the_word_of_a_stranger_g10() -> None:
    lab = three()
    _, ranks = hold(lab, "a", N1, A, B)
    say(lab, N3, N2, HandOver(tenancy=key(B), stamp=LATE, to=N3))
    assert set(leads(lab, N2).values()) == {N1}
    order = Order(host=N2, tenancy=key(B), stamp=LATE, goal=Goal.OFF)
    say(lab, N3, N2, order)
    (report,) = [m for s, t, m in lab.said if isinstance(m, Report) and t == N3]
    assert isinstance(report, Report)
    assert (report.states, report.disowned) == ((), (B,))
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert_at_rest(lab)


def test_who_arbitrates_nothing_moves_nothing_g10() -> None:
    lab = Lab({A: (N1, N2), B: (N1, N3)})
    before = len(lab.said)
    say(lab, N3, N2, Order(host=N2, tenancy=key(A), stamp=LATE, goal=Goal.FROZEN))
    assert leads(lab, N2) == {}
    assert lab.said[before:] == []


def test_a_handover_that_is_said_again_is_answered_again_and_changes_nothing() -> None:
    lab = three()
    hold(lab, "a", N1, A, B)
    before = dict(lab[N2].journal)
    old = HandOver(tenancy=key(A, B), stamp=Stamp(0, Counter(0, 0), 0), to=N3)
    say(lab, N1, N2, old)
    assert HandedOver(tenancy=old.tenancy, stamp=old.stamp) in said(lab, HandedOver)
    assert lab[N2].journal == before


def test_a_participant_is_handed_over_by_the_part() -> None:
    lab = Lab({A: (N1,), B: (N2, N3)})
    lease = ask(lab, "a", N1, A, B)
    rank = come_up(lab, "a", B, host=N3)
    again_b = ask(lab, "b", N2, B)
    give_back(lab, lease, N1)
    assert states(lab, [rank]) == [PARKED]
    give_back(lab, again_b, N2)
    part = again(lab, lease, N1, B)
    assert held(lab, part, N1)
    assert leads(lab, N3) == {(B,): N2}
    assert_at_rest(lab)


@pytest.mark.parametrize(
    "message",
    [
        NotCeded(round=ROUND, job=job("a"), code="refused", text="no"),
        Taken(tenancy=key(A, B), stamp=LATE),
        HandedOver(tenancy=key(A, B), stamp=LATE),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_answer_to_nothing_changes_nothing_g10(message: PeerMessage) -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    before = dict(lab[N1].journal)
    say(lab, N2, N1, message)
    assert lab[N1].journal == before
    assert held(lab, lease, N1)
    assert states(lab, ranks) == [RUNNING, RUNNING]


def test_what_is_ceded_twice_is_taken_once() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N2, B)
    give_back(lab, lease, N2)
    both = again(lab, lease, N2, A, B)
    assert held(lab, both, N2)
    ceded = next(m for m in said(lab, Ceded) if isinstance(m, Ceded) and m.tenancies)
    before = dict(lab[N1].journal)
    say(lab, N2, N1, ceded)
    assert lab[N1].journal == before
    assert said(lab, Taken)[-1] == said(lab, Taken)[0], "and said so again"
    assert states(lab, ranks) == [RUNNING]
    assert_at_rest(lab)


def test_a_tenancy_without_ranks_may_be_ceded_to_who_knew_nothing_of_it() -> None:
    lab = two()
    part = CededTenancy(
        tenancy=key(B, name="x"),
        stamp=Stamp(4, Counter(0, 0), 0),
        on=True,
        pinned=None,
        ranks=(),
    )
    say(lab, N2, N1, Ceded(round=RoundId(0), job=job("x"), tenancies=(part,)))
    assert leads(lab, N1, "x") == {(B,): N1}
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(job("x"))
    assert tenancy.coordinator.stamp.term > 4


# --- claims to what others move -------------------------------------------------------------------


def test_a_claim_to_a_group_on_which_others_are_obeyed_is_given_up() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    first = come_up(lab, "a", A, host=N3)
    give_back(lab, lease, N1)
    mine = again(lab, lease, N1, B)
    assert held(lab, mine, N1)
    second = come_up(lab, "a", B, host=N3)
    other = ask(lab, "b", N1, A)
    lab.pass_time(10.0)
    assert held(lab, other, N1)
    assert states(lab, [first, second]) == [PARKED, RUNNING]
    assert_at_rest(lab)


def test_who_waits_for_a_host_that_moves_what_is_in_the_way_is_told_that_it_is_away() -> None:
    lab = two()
    lease, _ = hold(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    lab.disconnect(N1, N2)
    other = ask(lab, "b", N2, B)
    assert not held(lab, other, N2)
    assert "host n1, which moves" in str(lab[N2].all_of(TellStalled)[-1].reason)
    lab.connect(N1, N2)
    lab.run()
    assert held(lab, other, N2)
    assert_at_rest(lab)


# --- what crosses ---------------------------------------------------------------------------------


def test_what_goes_to_one_host_is_not_ceded_to_another_before_it_has_arrived() -> None:
    lab = three()
    lease, _ = hold(lab, "a", N1, A, B)
    lab.by_hand()
    lab[N1].release(lease)
    lab[N1].acquire(session_of(lease), B)
    until(lab, HandOver)
    lab[N1].feed(PeerSaid(host=N3, message=Cede(round=ROUND, job=job("a"), groups=(B,))))
    assert list(lab[N1].machine.leads.asked) == [(N3, ROUND)]
    lab.by_itself()
    assert said(lab, Ceded)[-1] == Ceded(round=ROUND, job=job("a"), tenancies=())
    assert_at_rest(lab)


def test_what_is_ceded_while_it_moves_is_taken_when_it_has_arrived() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    lab.by_hand()
    lab[N1].release(lease)
    lab[N1].acquire(lab[N1].session(job("b")), A)
    until(lab, Order)
    part = CededTenancy(tenancy=key(B), stamp=LATE, on=True, pinned=None, ranks=())
    lab[N1].feed(PeerSaid(host=N2, message=Ceded(round=ROUND, job=job("a"), tenancies=(part,))))
    assert lab[N1].machine.leads.arriving
    lab.by_itself()
    assert Taken(tenancy=key(B), stamp=LATE) in said(lab, Taken)
    assert states(lab, ranks) == [PARKED, PARKED]
    assert_at_rest(lab)


def test_of_two_hosts_that_cede_to_each_other_the_later_word_counts() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N2, B)
    rank = come_up(lab, "a", B, host=N2)
    lab.disconnect(N2, N3)
    lab.by_hand()
    lab[N2].machine.leads.on_cede(N1, Cede(round=ROUND, job=job("a"), groups=(B,)))
    lab[N2].look()
    assert lab[N2].machine.leads.handovers
    part = CededTenancy(tenancy=key(B), stamp=LATE, on=True, pinned=None, ranks=())
    lab[N2].feed(
        PeerSaid(host=N1, message=Ceded(round=RoundId(0), job=job("a"), tenancies=(part,)))
    )
    assert lab[N2].machine.leads.handovers == {}
    assert leads(lab, N2) == {(B,): N2}
    lab.connect(N2, N3)
    lab.by_itself()
    assert Ceded(round=ROUND, job=job("a"), tenancies=()) in said(lab, Ceded)
    assert held(lab, lease, N2)
    assert states(lab, [rank]) == [RUNNING]
    assert_at_rest(lab)


def test_what_another_host_has_taken_since_is_not_taken_again() -> None:
    lab = two()
    hold(lab, "a", N1, A, B)
    before = leads(lab, N2)
    old = CededTenancy(
        tenancy=key(A, B), stamp=Stamp(0, Counter(0, 0), 0), on=True, pinned=None, ranks=()
    )
    say(lab, N3, N2, Ceded(round=ROUND, job=job("a"), tenancies=(old,)))
    assert leads(lab, N2) == before
    assert_at_rest(lab)


def test_a_part_of_what_others_go_on_moving_is_taken_without_the_rest() -> None:
    lab = Lab({A: (N1, N2), B: (N1, N3)})
    lease = ask(lab, "a", N1, A, B)
    rank = come_up(lab, "a", A, host=N2)
    give_back(lab, lease, N1)
    other = ask(lab, "b", N1, A)
    assert leads(lab, N2) == {(A, B): N1}
    part = CededTenancy(tenancy=key(B), stamp=LATE, on=True, pinned=None, ranks=())
    lab[N2].feed(PeerSaid(host=N1, message=Ceded(round=ROUND, job=job("a"), tenancies=(part,))))
    assert leads(lab, N2) == {(A,): N1}
    assert held(lab, other, N1)
    assert states(lab, [rank]) == [PARKED]


def test_where_nothing_is_left_of_a_job_it_obeys_whoever_it_is_leased_by_next() -> None:
    lab = Lab({C: (N3,), A: (N1,), B: (N2,)})
    lease = ask(lab, "a", N1, A, B)
    hooks = lab[N2].session(job("a"), hooks=True)
    ranks = [(N1, come_up(lab, "a", A)), (N2, come_up(lab, "a", B))]
    give_back(lab, lease, N1)
    ask(lab, "b", N1, A)
    for host, rank in ranks:
        lab[host].die(rank)
        lab.run()
    assert (leads(lab, N1), leads(lab, N2)) == ({}, {(A, B): N1})
    assert not resumed(lab, N2, hooks)
    both = again(lab, lease, N1, C, B)
    assert held(lab, both, N1)
    assert resumed(lab, N2, hooks)
    come_up(lab, "a", B)
    assert leads(lab, N2) == {(C, B): N3}
    assert_at_rest(lab)


def test_who_has_yet_to_hear_of_what_it_moves_is_asked_again_after_a_pause() -> None:
    lab = Lab({A: (N1, N3), B: (N2,)})
    rank = PresentRank(
        process=ProcessId(4711, 1),
        job=job("a"),
        state=PARKED,
        device_bytes=1,
        groups=(A,),
        lead=N2,
        term=3,
    )
    say(lab, N3, N1, Presence(group=A, ranks=(rank,), clients=(), shortages=()))
    lease = ask(lab, "a", N1, A)
    lab[N1].clear(job("x"))
    assert not held(lab, lease, N1)
    assert len(said(lab, Cede)) == 1, "not while it pauses"
    lab.pass_time(5.0)
    assert len(said(lab, Cede)) > 1
    say(lab, N3, N1, Presence(group=A, ranks=(), clients=(), shortages=()))
    lab.pass_time(5.0)
    assert held(lab, lease, N1)
    assert_at_rest(lab)


def test_a_handover_that_cannot_be_written_goes_on_and_is_written_later() -> None:
    lab = two()
    lease, _ = hold(lab, "a", N1, A, B)
    lab[N1].journal_broken = failure(Cause.JOURNAL)
    give_back(lab, lease, N1)
    part = ask(lab, "a", N2, B)
    assert held(lab, part, N2)
    lab[N1].journal_broken = None
    lab.pass_time(LIMITS.retry_max_s + 1.0, step_s=1.0)
    assert leads(lab, N2) == {(B,): N2}
    assert not any(isinstance(record, HandoverRecord) for record in lab[N1].journal.values())
    assert_at_rest(lab)


# --- what is obeyed -------------------------------------------------------------------------------


def test_a_job_without_anything_here_may_ask_for_what_was_being_moved_from_elsewhere() -> None:
    lab = two()
    session = lab[N1].session(job("a"))
    lab.by_hand()
    lease = lab[N1].acquire(session, A, B)
    until(lab, Order)
    assert lab[N2].pending, "its devices are looked at"
    lab[N1].cancel(lease)
    while not said(lab, GiveBack):
        lab.deliver()
    mine = lab[N2].acquire(lab[N2].session(job("a")), B)
    lab.by_itself()
    assert held(lab, mine, N2)
    assert leads(lab, N2) == {(B,): N2}
    assert_at_rest(lab)


def test_nothing_is_made_of_groups_on_which_others_move_a_rank() -> None:
    lab = two()
    hold(lab, "a", N1, A, B)
    assert lab[N2].machine.tenancies.cover(job("a"), (B,), []) is None


def disown(lab: Lab, *groups: GroupName) -> None:
    """Let the third host say that it obeys somebody else on groups of what the first one moves."""
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(job("a"))
    stamp = tenancy.coordinator.stamp
    report = Report(
        host=N3, tenancy=tenancy.key, stamp=stamp, failure=None, states=(), disowned=groups
    )
    say(lab, N3, N1, report)


def shared(*hosts: HostName) -> tuple[Lab, LeaseId]:
    """Let a job have ranks of the second group on hosts, and no lease any more."""
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    for host in hosts:
        come_up(lab, "a", B, host=host)
    give_back(lab, lease, N1)
    return lab, lease


def test_what_a_host_disowns_is_dropped_with_what_is_known_of_it() -> None:
    lab, _ = shared(N3)
    disown(lab, B)
    assert leads(lab, N1) == {(A,): N1}
    assert lab[N1].machine.tenancies.abroad == {}


def test_what_is_disowned_by_one_host_stays_for_the_others() -> None:
    lab, _ = shared(N2, N3)
    disown(lab, B)
    assert leads(lab, N1) == {(A, B): N1}
    assert [rank.host for rank in lab[N1].machine.tenancies.abroad] == [N2]


def test_what_is_disowned_altogether_is_nobodys_here() -> None:
    lab, _ = shared(N3)
    disown(lab, A, B)
    assert leads(lab, N1) == {}


def split() -> tuple[Lab, LeaseId, list[ProcessId]]:
    """Let a host obey two others, each for a part of what one of them moves."""
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    ranks = [come_up(lab, "a", group, host=host) for group, host in ((A, N3), (B, N2), (B, N3))]
    give_back(lab, lease, N1)
    say(lab, N1, N3, HandOver(tenancy=key(B), stamp=LATE, to=N2))
    assert leads(lab, N1) == {(A, B): N1}
    assert leads(lab, N3) == {(A,): N1, (B,): N2}
    return lab, lease, ranks


def test_what_others_move_on_one_host_does_not_keep_the_rest_on_its_devices() -> None:
    lab, _, ranks = split()
    other = ask(lab, "b", N1, A)
    assert held(lab, other, N1)
    assert states(lab, ranks) == [PARKED, PARKED, RUNNING]


def test_the_part_that_a_host_moves_is_handed_over_without_what_others_move() -> None:
    lab, _, _ = split()
    later = LATE._replace(term=100)
    say(lab, N1, N3, HandOver(tenancy=key(A, B), stamp=later, to=N2))
    assert leads(lab, N3) == {(A,): N2, (B,): N2}


def test_an_order_that_a_part_obeys_is_answered_for_the_whole_also_when_it_is_said_again() -> None:
    lab, _, (on_a, _, _) = split()
    lab.said.clear()
    whole = Order(host=N3, tenancy=key(A, B), stamp=LATE, goal=Goal.QUERY)
    for _ in range(2):
        say(lab, N1, N3, whole)
    assert said(lab, Report) == 2 * [
        Report(
            host=N3,
            tenancy=key(A, B),
            stamp=LATE,
            failure=None,
            states=((on_a, RUNNING),),
            disowned=(B,),
        )
    ]


def test_a_part_that_obeys_later_orders_does_not_let_a_move_go_on_without_it() -> None:
    lab, _ = shared(N3)
    say(lab, N1, N3, HandOver(tenancy=key(A, B), stamp=LATE, to=N1))
    lower = LATE._replace(term=1)
    say(lab, N1, N3, Order(host=N3, tenancy=key(A, B), stamp=lower, goal=Goal.FROZEN))
    report = said(lab, Report)[-1]
    assert isinstance(report, Report)
    assert report.stamp == lower
    assert report.failure is not None


def test_what_a_job_holds_is_not_given_up_though_it_is_disowned() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    disown(lab, B)
    assert held(lab, lease, N1)
    assert leads(lab, N1) == {(A, B): N1}


def test_what_stands_still_is_not_given_up_though_it_is_disowned() -> None:
    lab, _ = shared(N3)
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(job("a"))
    lab[N1].machine.leasing.pin(tenancy.key, failure(Cause.UNSUPPORTED), 0.0)
    disown(lab, B)
    assert leads(lab, N1) == {(A, B): N1}


def test_a_rank_that_obeys_another_host_is_that_ones() -> None:
    lab, _ = shared(N3)
    (rank,) = lab[N1].machine.tenancies.abroad
    present = PresentRank(
        process=rank.process,
        job=job("a"),
        state=RUNNING,
        device_bytes=1,
        groups=(B,),
        lead=N2,
        term=7,
    )
    say(lab, N3, N1, Presence(group=B, ranks=(present,), clients=(), shortages=()))
    assert lab[N1].machine.tenancies.abroad == {}
