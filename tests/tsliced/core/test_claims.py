"""Groups on which a job is moved from elsewhere, whether anything of it is there or not."""

from __future__ import annotations

from arbiters_lab import (
    A,
    B,
    again,
    ask,
    assert_at_rest,
    come_up,
    give_back,
    said,
    states,
    two,
)
from hosts_lab import N1, N2, N3, Lab, held, say, session_of
from simulated import failure, job

from tsliced.core.events import PeerConnected, PeerSaid
from tsliced.core.messages import Cede, NotCeded, Reservations
from tsliced.core.model import Cause, Counter, Goal, RankState, RoundId, Stamp, TenancyKey
from tsliced.core.signals import Order, Report

RUNNING = RankState.RUNNING
LATE = Stamp(99, Counter(9, 9), 0)


def claims(lab: Lab) -> set[tuple[str, str]]:
    """Return the jobs and groups of the second host that the first one moves."""
    claimed = lab[N2].machine.tenancies.claimed
    return {(key.id, group) for (key, group), hosts in claimed.items() if N1 in hosts}


def test_who_has_leased_a_group_of_another_arbiter_moves_what_comes_there_until_that_is_asked() -> (
    None
):
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    assert claims(lab) == {("a", B)}
    alone = again(lab, lease, N1, B)
    assert held(lab, alone, N1)
    assert said(lab, Cede), "its arbiter asks for it before it is leased alone"
    assert claims(lab) == set()
    rank = come_up(lab, "a", B)
    assert states(lab, [rank]) == [RUNNING]
    assert_at_rest(lab)


def test_a_claim_outlives_the_arbiters_daemon_and_the_link() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    lab.restart(N2)
    lab.run()
    assert claims(lab) == {("a", B)}


def test_a_claim_ends_with_its_job() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    lab[N1].close(session_of(lease))
    lab.run()
    assert claims(lab) == set()


def test_a_claim_ends_with_its_host() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    lab.reboot(N1)
    lab.run()
    assert claims(lab) == set()


def test_a_claim_to_a_group_of_somebody_else_is_none() -> None:
    lab = two()
    say(lab, N1, N2, Reservations(wanted=(), claims=((job("a"), A), (job("a"), B))))
    assert claims(lab) == {("a", B)}


def test_what_is_blocked_is_not_taken_apart_for_somebody_else() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    ranks = [come_up(lab, "a", A), come_up(lab, "a", B)]
    give_back(lab, lease, N1)
    lab[N2].verdict = lambda _verb, _process: failure(Cause.FAILED)
    other = ask(lab, "b", N1, A)
    assert not held(lab, other, N1)
    say(lab, N2, N1, Cede(round=RoundId(9), job=job("a"), groups=(B,)))
    refused = said(lab, NotCeded)
    assert [message.code for message in refused if isinstance(message, NotCeded)] == ["blocked"]
    assert len(ranks) == 2


def test_a_connection_that_replaces_one_which_was_not_seen_to_end_is_a_new_one() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    lab[N1].feed(PeerConnected(host=N2, boot="another boot"))
    lab.run()
    assert not held(lab, lease, N1)


def test_a_freeze_of_which_others_move_a_part_is_obeyed_and_answered_with_what_they_move() -> None:
    lab, ranks = Lab({A: (N1, N2), B: (N3, N2)}), []
    for group, arbiter in ((A, N1), (B, N3)):
        give_back(lab, ask(lab, "a", arbiter, group), arbiter)
        ranks.append(come_up(lab, "a", group, host=N2))
    key = TenancyKey(job("a"), (A, B))
    say(lab, N1, N2, Order(host=N2, tenancy=key, stamp=LATE, goal=Goal.FROZEN))
    (report,) = [r for r in said(lab, Report) if isinstance(r, Report) and r.stamp == LATE]
    assert (report.failure, report.disowned) == (None, (B,))
    assert report.states == ((ranks[0], RankState.FROZEN),)
    assert lab[N2].state(ranks[1]) is RUNNING


def test_what_was_asked_of_a_job_without_ranks_is_answered_before_somebody_else_moves_it() -> None:
    lab = two()
    key = TenancyKey(job("a"), (A, B))
    session = lab[N2].session(job("a"))
    lab.by_hand()
    order = Order(host=N2, tenancy=key, stamp=LATE, goal=Goal.RESTORED)
    lab[N2].feed(PeerSaid(host=N1, message=order))
    lease = lab[N2].acquire(session, B)
    lab.by_itself()
    reports = [r for r in said(lab, Report) if isinstance(r, Report) and r.stamp == LATE]
    assert reports[0].disowned == (B,)
    assert held(lab, lease, N2)
