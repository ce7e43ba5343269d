"""What a round has of an arbiter elsewhere: when it is taken back, and when it is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from arbiters_lab import (
    A,
    B,
    C,
    ask,
    assert_at_rest,
    give_back,
    hold,
    holders,
    said,
    states,
    three,
    two,
    until,
)
from hosts_lab import N1, N2, N3, Lab, device, held, say
from simulated import failure, job
from world import LIMITS

from tsliced.core.actions import (
    ReservationRecord,
    TellContended,
    TellLost,
    TellStalled,
)
from tsliced.core.events import GroupsObserved, PeerSaid
from tsliced.core.messages import (
    Commit,
    Committed,
    GiveBack,
    NotReserved,
    PeerMessage,
    Reservations,
    Reserve,
    Reserved,
    StalledElsewhere,
    Unreserved,
    Waiting,
)
from tsliced.core.model import (
    Cause,
    Counter,
    GroupName,
    HostName,
    LeaseId,
    RankState,
    Reason,
    RoundId,
)

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED
#: Of no round.
NONE, TOKEN = RoundId(99), Counter(9, 9)


def on_its_way(lab: Lab, *groups: GroupName) -> LeaseId:
    """Let a job ask the first host for groups, and nothing more happen by itself."""
    session = lab[N1].session(job("a"))
    lab.by_hand()
    return lab[N1].acquire(session, *groups)


# --- until it is committed ------------------------------------------------------------------------


def test_what_is_reserved_for_a_host_that_is_lost_goes_to_the_next_g3() -> None:
    lab = three()
    taken = ask(lab, "b", N3, C)
    mine = on_its_way(lab, A, B, C)
    until(lab, Reserved)
    lab.by_itself()
    other = ask(lab, "c", N2, B)
    assert not held(lab, other, N2)
    lab.isolate(N1, lost=True)
    lab.run()
    assert held(lab, other, N2)
    lab.rejoin(N1)
    give_back(lab, taken, N3)
    assert not held(lab, mine, N1)
    give_back(lab, other, N2)
    assert held(lab, mine, N1)
    assert_at_rest(lab)


def test_a_host_that_is_away_for_a_moment_keeps_what_is_reserved_for_it() -> None:
    lab = two()
    mine = on_its_way(lab, A, B)
    until(lab, Reserved)
    lab.disconnect(N1, N2)
    lab.connect(N1, N2)
    lab.by_itself()
    assert held(lab, mine, N1)
    assert_at_rest(lab)


def test_a_drain_takes_back_what_is_not_committed() -> None:
    lab = three()
    taken = ask(lab, "b", N3, C)
    mine = on_its_way(lab, A, B, C)
    until(lab, Reserved)
    lab.by_itself()
    lab[N2].drain(B)
    lab.run()
    give_back(lab, taken, N3)
    assert not held(lab, mine, N1)
    assert Unreserved in {type(message) for _, _, message in lab.said}
    assert "drained" in str(lab[N1].all_of(TellStalled)[-1].reason)
    lab[N2].undrain(B)
    lab.run()
    assert held(lab, mine, N1)
    assert_at_rest(lab)


def test_what_was_taken_back_while_it_was_committed_is_asked_for_again() -> None:
    lab = two()
    mine = on_its_way(lab, A, B)
    until(lab, Reserved)
    lab.collect()
    lab[N2].drain(B)
    lab[N2].undrain(B)
    lab.by_itself()
    assert held(lab, mine, N1)
    assert_at_rest(lab)


def test_a_drain_does_not_take_back_what_is_held() -> None:
    lab = two()
    lease, _ = hold(lab, "a", N1, A, B)
    lab[N2].drain(B)
    lab.pass_time(5.0)
    assert held(lab, lease, N1)


# --- from then on ---------------------------------------------------------------------------------


def test_what_is_committed_is_kept_for_a_silent_host_until_there_is_a_proof_g1() -> None:
    lab = two()
    mine, _ = hold(lab, "a", N1, A, B)
    other = ask(lab, "b", N2, B)
    lab.disconnect(N1, N2, lost=True)
    lab.pass_time(60.0, step_s=1.0)
    assert not held(lab, other, N2)
    assert held(lab, mine, N1)
    lab.declare_dead(N1)
    lab.run()
    lab.pass_time(10.0)
    assert held(lab, other, N2)


def test_a_holder_that_was_taken_for_dead_is_told_when_it_is_back() -> None:
    lab = two()
    mine = ask(lab, "a", N1, A, B)
    other = ask(lab, "b", N2, B)
    lab.disconnect(N1, N2, lost=True)
    lab.declare_dead(N1)
    lab.run()
    assert held(lab, other, N2)
    lab.connect(N1, N2)
    lab.run()
    assert not held(lab, mine, N1)
    assert "given it to others" in lab[N1].all_of(TellLost)[-1].text
    assert held(lab, other, N2)
    assert_at_rest(lab)


def test_a_host_that_boots_anew_holds_nothing_elsewhere() -> None:
    lab = two()
    _, ranks = hold(lab, "a", N1, A, B)
    other = ask(lab, "b", N2, B)
    lab.reboot(N1)
    lab.run()
    lab.pass_time(10.0)
    assert held(lab, other, N2)
    assert states(lab, ranks[1:]) == [PARKED]
    assert_at_rest(lab)


def test_a_holder_is_told_that_an_arbiter_has_booted_anew() -> None:
    lab = two()
    mine = ask(lab, "a", N1, A, B)
    waiter = ask(lab, "b", N1, A, B)
    lab.reboot(N2)
    lab.run()
    assert not held(lab, mine, N1)
    assert "booted anew" in lab[N1].all_of(TellLost)[-1].text
    lab.pass_time(1.0)
    assert held(lab, waiter, N1)
    assert_at_rest(lab)


def test_who_waits_for_an_arbiter_that_boots_anew_waits_for_it_again() -> None:
    lab = three()
    taken = ask(lab, "b", N3, C)
    mine = on_its_way(lab, A, B, C)
    until(lab, Reserved)
    lab.by_itself()
    lab.reboot(N2)
    lab.run()
    assert not held(lab, mine, N1)
    give_back(lab, taken, N3)
    assert held(lab, mine, N1)
    assert_at_rest(lab)


@pytest.mark.parametrize("host", [N1, N2])
def test_a_restart_of_either_side_keeps_what_is_committed_g8(host: HostName) -> None:
    lab = two()
    mine, ranks = hold(lab, "a", N1, A, B)
    other = ask(lab, "b", N2, B)
    lab.restart(host)
    lab.pass_time(2.0)
    assert held(lab, mine, N1)
    assert not held(lab, other, N2)
    give_back(lab, mine, N1)
    assert held(lab, other, N2)
    assert states(lab, ranks)[1] is PARKED
    assert_at_rest(lab)


def lose_journal(lab: Lab, host: HostName) -> None:
    """Let a daemon start anew without anything that it had written."""
    lab[host].journal.clear()
    lab[host].generation += 1
    lab.restart(host, links=False)


def test_an_arbiter_that_lost_its_journal_learns_what_it_has_lent() -> None:
    lab = two()
    mine = ask(lab, "a", N1, A, B)
    lose_journal(lab, N2)
    lab.connect(N1, N2)
    lab.run()
    other = ask(lab, "b", N2, B)
    assert held(lab, mine, N1)
    assert not held(lab, other, N2)
    give_back(lab, mine, N1)
    assert held(lab, other, N2)
    assert_at_rest(lab)


def test_what_an_arbiter_without_journal_gave_to_others_is_lost() -> None:
    lab = two()
    mine = ask(lab, "a", N1, A, B)
    lose_journal(lab, N2)
    other = ask(lab, "b", N2, B)
    lab.connect(N1, N2)
    lab.run()
    assert held(lab, other, N2)
    assert not held(lab, mine, N1)
    assert_at_rest(lab)


def test_a_reservation_of_a_group_that_is_no_longer_arbitrated_here_is_struck() -> None:
    lab = two()
    hold(lab, "a", N1, A, B)
    record = next(r for r in lab[N2].journal.values() if isinstance(r, ReservationRecord))
    foreign = replace(record, group=A, token=None)
    lab[N2].keep(foreign)
    lab.restart(N2)
    lab.run()
    assert foreign not in lab[N2].journal.values()
    assert record in lab[N2].journal.values()


# --- rounds that cross ----------------------------------------------------------------------------


def test_rounds_of_three_jobs_over_three_arbiters_do_not_wait_in_a_circle() -> None:
    lab = three()
    wishes = {"a": (N1, (A, B)), "b": (N2, (B, C)), "c": (N3, (A, C))}
    sessions = {name: lab[host].session(job(name)) for name, (host, _) in wishes.items()}
    for _ in range(6):
        waiting = {n: lab[h].acquire(sessions[n], *groups) for n, (h, groups) in wishes.items()}
        for _ in wishes:
            lab.run()
            (name,) = [n for n, lease in waiting.items() if held(lab, lease, wishes[n][0])]
            lab[wishes[name][0]].release(waiting.pop(name))
        lab.run()
        assert_at_rest(lab)
    assert holders(lab) == {}


def test_epochs_and_tokens_that_run_out_are_waited_for_on_all_hosts() -> None:
    lab = two()
    for host in (N1, N2):
        lab[host].numbers = lambda _ask: failure(Cause.JOURNAL)
    for number in range(12):
        lease = ask(lab, "ab"[number % 2], N1, A, B)
        if not held(lab, lease, N1):
            break
        give_back(lab, lease, N1)
    assert not held(lab, lease, N1)
    for host in (N1, N2):
        lab[host].numbers = lambda _ask: None
    lab.pass_time(LIMITS.retry_max_s + 1.0, step_s=1.0)
    assert held(lab, lease, N1)
    assert_at_rest(lab)


def test_an_arbiter_without_tokens_lends_when_it_has_some() -> None:
    lab = two()
    lab[N2].numbers = lambda _ask: failure(Cause.JOURNAL)
    for _ in range(LIMITS.block):
        lease = ask(lab, "b", N2, B)
        if held(lab, lease, N2):
            give_back(lab, lease, N2)
        else:
            lab[N2].cancel(lease)
    mine = ask(lab, "a", N1, A, B)
    assert not held(lab, mine, N1)
    lab[N2].numbers = lambda _ask: None
    lab.pass_time(LIMITS.retry_max_s + 1.0, step_s=1.0)
    assert held(lab, mine, N1)
    assert_at_rest(lab)


def test_what_somebody_came_onto_meanwhile_is_kept_only_when_they_have_left() -> None:
    lab = two()
    mine = on_its_way(lab, A, B)
    until(lab, Reserved)
    intruder = lab[N2].context(job("x"), device(N2, B))
    lab[N2].processes[intruder].lawful = True
    lab[N2].look()
    lab[N2].clear(job("nobody"))
    lab.collect()
    while not said(lab, Commit):
        lab.deliver()
    assert not said(lab, Committed)
    lab.by_itself()
    assert held(lab, mine, N1)
    assert states(lab, [intruder]) == [PARKED]
    assert_at_rest(lab)


# --- what clients are told ------------------------------------------------------------------------


def test_a_holder_is_told_of_those_who_wait_at_another_arbiter() -> None:
    lab = two()
    mine = ask(lab, "a", N1, A, B)
    assert lab[N1].all_of(TellContended) == []
    other = ask(lab, "b", N2, B)
    assert [t.waiters for t in lab[N1].all_of(TellContended)] == [1]
    lab[N2].cancel(other)
    lab.run()
    assert [t.waiters for t in lab[N1].all_of(TellContended)][-1] == 0
    assert held(lab, mine, N1)


def test_the_longest_hold_counts_those_who_wait_at_another_arbiter() -> None:
    lab = two()
    for world in lab.worlds.values():
        world.groups = tuple(replace(group, max_hold_s=5.0) for group in world.groups)
        world.machine.leasing.max_hold_s = {A: 5.0, B: 5.0}
    mine = ask(lab, "a", N1, A, B)
    lab.pass_time(20.0, step_s=0.5)
    assert held(lab, mine, N1), "nobody waits"
    other = ask(lab, "b", N2, B)
    lab.pass_time(1.0)
    assert not held(lab, mine, N1)
    assert held(lab, other, N2)


def test_a_round_is_told_why_it_waits_at_another_arbiter() -> None:
    lab = two()
    first, ranks = hold(lab, "b", N2, B)
    give_back(lab, first, N2)
    lab[N2].verdict = lambda verb, process: failure(Cause.UNSUPPORTED, process.id, N2)
    mine = ask(lab, "a", N1, A, B)
    lab.pass_time(5.0)
    assert not held(lab, mine, N1)
    stalled = lab[N1].all_of(TellStalled)[-1]
    assert (stalled.lease, stalled.job) == (mine, job("b"))
    assert stalled.reason.cause is Cause.UNSUPPORTED
    assert stalled.way_out
    assert len(said(lab, StalledElsewhere)) == 1
    lab[N2].verdict = lambda _verb, _process: None
    lab[N2].clear(job("b"))
    lab.run()
    assert held(lab, mine, N1)
    assert states(lab, ranks) == [PARKED]


def test_what_an_arbiter_refuses_its_client_is_told() -> None:
    lab = two()
    fault = lab[N2].session(job("a"))
    lab[N2].machine.leasing.faults[job("a")] = failure(Cause.DRIVER)
    lab[N2].machine.leasing.faulted_at[job("a")] = 0.0
    mine = ask(lab, "a", N1, A, B)
    assert lab[N1].code(mine) == "job_faulted"
    lab[N2].close(fault)
    lab.run()
    assert_at_rest(lab)


def test_a_lost_device_of_another_arbiter_is_told() -> None:
    lab = two()
    mine = on_its_way(lab, A, B)
    (lost,) = lab[N2].devices_of((B,))
    lab[N2].feed(GroupsObserved(found=(), lost=((lost, "GPU is lost"),)))
    lab.by_itself()
    assert not held(lab, mine, N1)
    assert "GPU is lost" in str(lab[N1].all_of(TellStalled)[-1].reason)
    lab[N2].look()
    lab.run()
    lab.pass_time(10.0)
    assert held(lab, mine, N1)


# --- what nobody may say --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Committed(round=NONE, group=B, token=TOKEN),
        Unreserved(round=NONE, group=B),
        NotReserved(round=NONE, group=B, code="refused", text="no"),
        Waiting(round=NONE, group=B, waiters=3),
        StalledElsewhere(
            round=NONE,
            group=B,
            job=job("x"),
            reason=Reason(cause=Cause.DRAINED, text="no"),
            way_out="",
        ),
        GiveBack(round=NONE, group=A),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_said_of_no_round_changes_nothing_g10(message: PeerMessage) -> None:
    lab = two()
    mine = ask(lab, "a", N1, A, B)
    before = dict(lab[N1].journal)
    say(lab, N2, N1, message)
    assert lab[N1].journal == before
    assert held(lab, mine, N1)
    assert_at_rest(lab)


@pytest.mark.parametrize(
    "message",
    [
        Unreserved(round=RoundId(1), group=B),
        NotReserved(round=RoundId(1), group=B, code="refused", text="no"),
        Committed(round=RoundId(1), group=B, token=TOKEN),
        Waiting(round=RoundId(1), group=B, waiters=3),
    ],
    ids=lambda message: type(message).__name__,
)
def test_only_its_arbiter_speaks_for_a_group_g10(message: PeerMessage) -> None:
    lab = three()
    mine = ask(lab, "a", N1, A, B)
    say(lab, N3, N1, message)
    assert held(lab, mine, N1)
    assert_at_rest(lab)


def test_what_is_reserved_for_a_round_that_is_over_is_given_back() -> None:
    lab = two()
    say(lab, N2, N1, Reserved(round=NONE, group=B, token=TOKEN, leads=()))
    assert GiveBack(round=NONE, group=B) in [message for _, _, message in lab.said]


def test_what_this_host_does_not_arbitrate_it_does_not_reserve() -> None:
    lab = three()
    say(lab, N3, N1, Reserve(round=NONE, job=job("x"), group=B))
    refused = said(lab, NotReserved)[-1]
    assert isinstance(refused, NotReserved)
    assert refused.code == "unknown_group"


def test_what_was_never_reserved_cannot_be_committed() -> None:
    lab = two()
    say(lab, N2, N1, Commit(round=NONE, group=A, token=TOKEN))
    assert Unreserved(round=NONE, group=A) in [message for _, _, message in lab.said]


def test_a_wish_that_is_repeated_is_one_wish() -> None:
    lab = two()
    taken = ask(lab, "b", N2, B)
    wish = Reserve(round=NONE, job=job("x"), group=B)
    for _ in range(2):
        say(lab, N1, N2, wish)
    assert len(lab[N2].machine.leasing.borrowers) == 1
    say(lab, N1, N2, Reservations(wanted=()))
    assert lab[N2].machine.leasing.borrowers == {}
    assert held(lab, taken, N2)


def test_news_of_waiters_for_a_round_that_is_not_granted_is_no_news_for_its_client() -> None:
    lab = two()
    on_its_way(lab, A, B)
    until(lab, Reserved)
    (number,) = lab[N1].machine.leasing.rounds
    lab[N1].feed(PeerSaid(host=N2, message=Waiting(round=number, group=B, waiters=2)))
    assert lab[N1].all_of(TellContended) == []
    lab.by_itself()


# --- the journal ----------------------------------------------------------------------------------


def test_a_grant_over_hosts_that_cannot_be_written_is_refused_and_given_back() -> None:
    lab = two()
    lease = on_its_way(lab, A, B)
    until(lab, Committed)
    lab[N1].journal_broken = failure(Cause.JOURNAL)
    lab.by_itself()
    lab[N1].journal_broken = None
    lab.pass_time(LIMITS.retry_max_s + 1.0, step_s=1.0)
    assert lab[N1].code(lease) == "unavailable"
    assert_at_rest(lab)


def test_a_reservation_that_could_not_be_written_is_written_later() -> None:
    lab = two()
    lab[N2].journal_broken = failure(Cause.JOURNAL)
    mine = ask(lab, "a", N1, A, B)
    lab[N2].journal_broken = None
    lab.pass_time(LIMITS.retry_max_s + 1.0, step_s=1.0)
    kept = [r for r in lab[N2].journal.values() if isinstance(r, ReservationRecord)]
    assert held(lab, mine, N1)
    assert len(kept) == 1
    assert kept[0].token is not None


def test_what_is_lent_is_noted_with_the_host_that_has_it() -> None:
    lab = two()
    mine = ask(lab, "a", N1, A, B)
    assert [note.facts["host"] for note in lab[N2].notes("lent")] == [N1]
    give_back(lab, mine, N1)
    assert [note.facts["host"] for note in lab[N2].notes("given_back")] == [N1]
