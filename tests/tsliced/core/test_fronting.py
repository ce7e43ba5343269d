"""Clients of one host that want groups of another: what is passed on, answered and remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hosts_lab import (
    N1,
    N2,
    N3,
    G,
    Lab,
    ask,
    assert_alone,
    device,
    held,
    hold,
    pair,
    release,
    session_of,
    states,
)
from simulated import failure, job
from world import LIMITS

from tsliced.core.actions import (
    ConfirmCancel,
    ConfirmRelease,
    DeclineTurn,
    EndSession,
    Grant,
    Refuse,
    TellContended,
    TellHoldWarning,
    TellLost,
)
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    GrantConfirmed,
    PeerSaid,
    ReleaseRequested,
    SessionClosed,
)
from tsliced.core.messages import HeldLeases, PeerMessage
from tsliced.core.model import (
    Cause,
    CoreLimits,
    Counter,
    GroupName,
    HostName,
    LeaseId,
    RankState,
    RequestId,
    SessionId,
)

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED


def say(lab: Lab, message: PeerMessage, *, source: HostName = N1, target: HostName = N2) -> None:
    """Let a host say something to another, whether or not it would."""
    lab[target].feed(PeerSaid(host=source, message=message))
    lab.run()


def lose_answers(lab: Lab, until: Callable[[], bool]) -> None:
    """Let the link break when the arbiter has done something and nobody has heard of it."""
    while not until():
        assert lab.deliver()
    lab.disconnect(N1, N2)


# --- asking ---------------------------------------------------------------------------------------


def test_what_could_not_be_passed_on_is_when_the_link_is_up() -> None:
    lab = pair()
    lab.disconnect(N1, N2)
    lease = ask(lab, "a", N2)
    assert not held(lab, lease, N2)
    lab.connect(N1, N2)
    lab.run()
    assert held(lab, lease, N2)


def test_an_acquire_whose_answer_was_lost_is_granted_once_g6() -> None:
    lab = pair()
    session = lab[N2].session(job("a"))
    lease = lab[N2].acquire(session, G)
    lose_answers(lab, lambda: lab[N1].held(lease))
    assert not held(lab, lease, N2)
    lab.connect(N1, N2)
    lab.run()
    assert held(lab, lease, N2)
    assert len(lab[N1].machine.leasing.leases) == 1


def test_a_client_that_asks_again_for_what_it_holds_gets_the_same_g6() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    tokens = lab[N2].clients[session_of(lease)].held[lease]
    number = int(lease.rpartition(".")[2])
    lab[N2].acquire(session_of(lease), G, request=number)
    lab.run()
    assert [grant.tokens for grant in lab[N2].grants()] == [tokens, tokens]


def test_the_arbiter_refuses_for_its_own_reasons_and_says_so_again_g6() -> None:
    lab = pair()
    session = lab[N2].session(job("a"))
    groups = (G,) * (LIMITS.max_groups_per_lease + 1)
    lease = lab[N2].acquire(session, *groups, request=7)
    lab.run()
    assert lab[N2].code(lease) == "would_exceed_limit"
    before = len(lab.said)
    lab[N2].acquire(session, *groups, request=7)
    lab.run()
    assert [refusal.code for refusal in lab[N2].refusals()] == ["would_exceed_limit"] * 2
    assert len(lab.said) == before, "it is remembered here"


def test_a_client_that_names_no_groups_asks_the_arbiter_of_its_first() -> None:
    lab = pair()
    session = lab[N2].session(job("a"))
    lab[N2].send(AcquireRequested(session=session, request=RequestId(1), groups=()))
    lab.run()
    assert held(lab, LeaseId(f"{session}.1"), N2)


def test_groups_of_its_own_are_asked_for_here() -> None:
    own = GroupName("own")
    lab = Lab({G: (N1, N2), own: (N2,)})
    session = lab[N2].session(job("a"))
    lease = lab[N2].acquire(session, own)
    assert held(lab, lease, N2)
    lab[N2].release(lease)
    assert not held(lab, lease, N2)
    assert not lab[N2].machine.fronting.leases


def test_who_is_unknown_or_may_lease_nothing_is_told_so_here() -> None:
    lab = pair()
    lab[N2].feed(AcquireRequested(session=SessionId("nobody"), request=RequestId(1), groups=(G,)))
    assert lab[N2].refusals()[-1].code == "session_unknown"
    lab[N2].groups = ()
    session = lab[N2].session(job("a"))
    lab[N2].feed(AcquireRequested(session=session, request=RequestId(1), groups=()))
    assert lab[N2].refusals()[-1].code == "unknown_group"


# --- giving back ----------------------------------------------------------------------------------


def test_a_release_whose_answer_was_lost_on_the_link_is_answered_and_nothing_is_lost_g6() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    request = lab[N2].release(lease)
    lose_answers(lab, lambda: not lab[N1].held(lease))
    lab.connect(N1, N2)
    lab.run()
    assert [type(answer) for answer in lab[N2].answers(request)] == [ConfirmRelease]
    assert not lab[N2].all_of(TellLost)


@pytest.mark.parametrize("restart", [False, True])
def test_a_release_that_is_said_again_gets_the_same_answer_g6(restart: bool) -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    ask(lab, "b", N1)
    request = release(lab, lease, N2)
    if restart:
        lab.restart(N2)
    lab[N2].release(lease, request=request)
    lab.run()
    first, second = lab[N2].answers(request)
    assert first == second
    assert isinstance(first, ConfirmRelease)
    assert first.waiters == 1


def test_what_somebody_else_holds_is_not_released() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    thief = lab[N2].session(job("b"))
    lab[N2].feed(ReleaseRequested(session=thief, request=RequestId(1), lease=lease))
    lab.run()
    assert lab[N2].refusals()[-1].code == "unknown_lease"
    assert lab[N1].held(lease)


def test_a_release_that_the_arbiter_knows_nothing_of_ends_the_lease_here_too() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    request = lab[N2].release(lease)
    lab[N2].outbox.clear()
    answer = Refuse(session=session_of(lease), request=request, code="unknown_lease", text="no")
    say(lab, answer)
    assert lab[N2].refusals()[-1] == answer
    assert not lab[N2].machine.fronting.leases


# --- taking back ----------------------------------------------------------------------------------


def test_a_cancelled_acquire_leaves_no_trace_and_is_said_to_be_so_again_g5_g6() -> None:
    lab = pair()
    ask(lab, "a")
    lease = ask(lab, "b", N2)
    request = lab[N2].cancel(lease)
    lab.run()
    assert lab[N2].code(lease) == "cancelled"
    assert lease not in lab[N1].machine.leasing.leases
    assert not lab[N2].machine.fronting.leases
    assert not lab[N2].machine.fronting.open
    acquire = RequestId(int(lease.rpartition(".")[2]))
    again = CancelRequested(session=session_of(lease), request=request, acquire=acquire)
    lab[N2].feed(again)
    answers = [a for a in lab[N2].answers(request) if isinstance(a, ConfirmCancel)]
    assert [answer.cancelled for answer in answers] == [True, True]


def test_what_is_granted_already_is_not_cancelled() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    request = lab[N2].cancel(lease)
    lab.run()
    (answer,) = lab[N2].answers(request)
    assert isinstance(answer, ConfirmCancel)
    assert not answer.cancelled
    assert held(lab, lease, N2)


def test_the_arbiter_says_that_the_time_of_an_acquire_is_over() -> None:
    lab = pair()
    ask(lab, "a")
    lease = ask(lab, "b", N2, timeout_s=5.0)
    lab.pass_time(6.5)
    assert lab[N2].code(lease) == "timeout"
    assert len(lab[N2].refusals()) == 1
    assert "does not answer" not in lab[N2].refusals()[0].text


def test_an_acquire_of_an_arbiter_that_is_away_ends_in_time_and_its_grant_is_handed_back_g5() -> (
    None
):
    lab = pair()
    first = ask(lab, "a")
    lease = ask(lab, "b", N2, timeout_s=5.0)
    lab.disconnect(N1, N2)
    lab[N1].release(first)
    lab[N2].pass_time(6.5)
    assert lab[N2].code(lease) == "timeout"
    assert "n1" in lab[N2].refusals()[-1].text
    lab.connect(N1, N2)
    lab.run()
    assert not lab[N1].machine.leasing.leases
    assert not lab[N2].machine.fronting.leases
    assert not held(lab, lease, N2)
    assert len(lab[N2].answers(RequestId(int(lease.rpartition(".")[2])))) == 1


def test_a_grant_that_crosses_the_end_of_its_time_is_handed_back_g5() -> None:
    lab = pair()
    lab.disconnect(N1, N2)
    lease = ask(lab, "a", N2, timeout_s=5.0)
    lab.connect(N1, N2)
    lab.by_hand()
    while not lab[N1].held(lease):
        lab.step()
    lab[N2].pass_time(6.5)
    assert lab[N2].code(lease) == "timeout"
    lab.by_itself()
    assert not lab[N1].machine.leasing.leases
    assert not lab[N2].machine.fronting.leases
    assert not held(lab, lease, N2)


@pytest.mark.parametrize("granted", [False, True], ids=["still waits", "was granted"])
@pytest.mark.parametrize("cancel_after_s", [1.0, 6.5], ids=["in time", "afterwards"])
def test_who_cancels_what_runs_out_of_time_at_a_slow_arbiter_is_answered_g5_g6(
    cancel_after_s: float, granted: bool
) -> None:
    lab = pair()
    holder = ask(lab, "a")
    lease = ask(lab, "b", N2, timeout_s=5.0)
    lab.by_hand()
    if granted:
        lab[N1].release(holder)
        while not lab[N1].held(lease):
            lab.step()
    lab[N2].pass_time(cancel_after_s)
    request = lab[N2].cancel(lease)
    lab[N2].pass_time(6.5 - cancel_after_s)
    lab.by_itself()
    assert lab[N2].answers(request) == [
        ConfirmCancel(session=session_of(lease), request=request, cancelled=not granted)
    ]
    assert not lab[N2].clients[session_of(lease)].open
    assert not lab[N2].machine.fronting.leases
    assert not lab[N1].held(lease)


def test_a_timeout_that_is_asked_for_again_is_not_longer_and_gets_the_same_answer_g6() -> None:
    lab = pair()
    lab.disconnect(N1, N2)
    lease = ask(lab, "a", N2, timeout_s=5.0)
    number = int(lease.rpartition(".")[2])
    lab[N2].pass_time(3.0)
    lab[N2].acquire(session_of(lease), G, timeout_s=5.0, request=number)
    lab[N2].pass_time(3.5)
    lab[N2].acquire(session_of(lease), G, timeout_s=5.0, request=number)
    assert [refusal.code for refusal in lab[N2].refusals()] == ["timeout", "timeout"]


# --- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "died", "closed while the link was down"])
def test_a_client_that_is_gone_holds_nothing_elsewhere_g3(how: str) -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    waiter = ask(lab, "b", N1)
    if how == "closed while the link was down":
        lab.disconnect(N1, N2)
    if how == "died":
        lab[N2].die(lab[N2].process_of(session_of(lease)))
    else:
        lab[N2].close(session_of(lease))
    if how == "closed while the link was down":
        lab.connect(N1, N2)
    lab.run()
    assert held(lab, waiter, N1)
    assert session_of(lease) not in lab[N1].machine.leasing.sessions
    assert not lab[N2].machine.fronting.leases


def test_a_client_that_is_gone_asks_for_nothing_any_more() -> None:
    lab = pair()
    lab.disconnect(N1, N2)
    lease = ask(lab, "a", N2)
    lab[N2].close(session_of(lease))
    lab.connect(N1, N2)
    lab.run()
    assert not lab[N2].machine.fronting.open
    assert not lab[N1].machine.leasing.leases


def test_an_arbiter_that_ends_a_session_is_not_the_end_of_its_client() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    session = session_of(lease)
    waiting = lab[N2].acquire(session, G)
    lab.run()
    request = lab[N2].release(lease)
    cancel = lab[N2].cancel(waiting)
    lab[N2].outbox.clear()
    say(lab, EndSession(session=session, text="it was time"))
    assert not lab[N2].machine.fronting.leases
    assert not lab[N2].machine.fronting.open
    assert lab[N2].code(waiting) == "lease_ended"
    for number in (request, cancel):
        assert isinstance(lab[N2].answers(number)[-1], Refuse)
    assert session in lab[N2].machine.leasing.sessions
    say(lab, SessionClosed(session=session), source=N2, target=N1)
    again = lab[N2].acquire(session, G)
    lab.run()
    assert held(lab, again, N2)


def test_an_arbiter_that_ends_a_session_ends_nothing_of_another_arbiter_or_session_g10() -> None:
    other = GroupName("other")
    lab = Lab({G: (N1, N2), other: (N3,)})
    session = lab[N2].session(job("a"))
    mine = lab[N2].acquire(session, G)
    lab.run()
    lab.disconnect(N2, N3)
    elsewhere = lab[N2].acquire(session, other)
    neighbour = ask(lab, "a", N2)
    say(lab, EndSession(session=session, text="it was time"))
    assert not held(lab, mine, N2)
    assert held(lab, neighbour, N2) or not lab[N2].code(neighbour)
    lab.connect(N2, N3)
    lab.run()
    assert held(lab, elsewhere, N2)


def test_an_acquire_that_ran_out_of_time_is_over_with_its_session_at_the_arbiter() -> None:
    lab = pair()
    ask(lab, "a")
    lease = ask(lab, "b", N2, timeout_s=5.0)
    lab.by_hand()
    lab[N2].pass_time(6.5)
    assert lab[N2].code(lease) == "timeout"
    lab[N2].feed(PeerSaid(host=N1, message=EndSession(session=session_of(lease), text="over")))
    assert not lab[N2].machine.fronting.leases
    assert len(lab[N2].refusals()) == 1


def test_a_grant_is_confirmed_by_its_own_client_alone() -> None:
    lab = pair()
    first = ask(lab, "a")
    second = ask(lab, "b", N2)
    lab[N2].clients[session_of(second)].confirms = False
    lab.pass_time(1.0)
    release(lab, first)
    lab[N2].feed(GrantConfirmed(session=lab[N2].session(job("c")), lease=second))
    lab.pass_time(LIMITS.ack_s + 1.0)
    assert not held(lab, second, N2)


def test_a_repeated_acquire_of_a_lease_that_is_lost_is_answered() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    number = int(lease.rpartition(".")[2])
    lab[N2].acquire(session_of(lease), G, request=number)
    lab[N2].outbox.clear()
    say(lab, EndSession(session=session_of(lease), text="it was time"))
    assert lab[N2].all_of(TellLost)[-1].lease == lease
    assert lab[N2].code(lease) == "lease_ended"


def test_what_an_arbiter_says_to_a_client_that_is_gone_ends_it_there() -> None:
    lab = pair()
    gone = SessionId("gone")
    say(lab, TellContended(session=gone, lease=LeaseId("gone.1"), groups=(G,), waiters=1))
    assert lab.said[-1] == (N2, N1, SessionClosed(session=gone))
    before = len(lab.said)
    say(lab, EndSession(session=gone, text="it is over"))
    assert len(lab.said) == before


# --- after a connection ---------------------------------------------------------------------------


def test_what_an_arbiter_holds_for_nobody_is_given_back() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    for name in (lease, LeaseId("no number")):
        lab[N2].machine.fronting.leases.pop(lease, None)
        say(lab, HeldLeases(leases=((session_of(lease), name),)))
        assert isinstance(lab.said[-2][2], ReleaseRequested)
    assert not lab[N1].machine.leasing.leases


def test_what_an_arbiter_no_longer_holds_is_lost_and_its_client_told() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    lab.disconnect(N1, N2)
    held_there = lab[N1].machine.leasing.leases[lease]
    lab[N1].machine.leasing.out = []
    lab[N1].machine.leasing.take_away(held_there, "an operator wants it", lab[N1].now)
    lab.connect(N1, N2)
    lab.run()
    assert not held(lab, lease, N2)
    assert lab[N2].all_of(TellLost)[-1].lease == lease
    assert not lab[N2].machine.fronting.leases


def test_who_waits_for_one_arbiter_is_not_concerned_by_what_another_holds() -> None:
    other = GroupName("other")
    lab = Lab({G: (N1, N2), other: (N3,)})
    lease = ask(lab, "a", N2)
    say(lab, HeldLeases(leases=()), source=N3)
    assert held(lab, lease, N2)


# --- what is passed on ----------------------------------------------------------------------------


def test_signs_of_life_reach_the_arbiter_and_their_absence_is_noticed() -> None:
    lab = pair()
    session = lab[N2].session(job("a"), heartbeat_s=10.0)
    lease = lab[N2].acquire(session, G)
    lab.run()
    for _ in range(4):
        lab.pass_time(8.0, step_s=1.0)
        lab[N2].beat(session)
        lab.run()
    assert held(lab, lease, N2)
    lab.pass_time(12.0, step_s=1.0)
    assert not held(lab, lease, N2)
    assert "no sign of life" in lab[N2].all_of(TellLost)[-1].text
    assert not lab[N2].machine.fronting.leases


def test_a_holder_elsewhere_is_warned_before_its_lease_is_taken_back() -> None:
    lab = pair(CoreLimits(max_hold_s=60.0, hold_warning_s=20.0))
    lease = ask(lab, "a", N2)
    waiter = ask(lab, "b", N1)
    lab.pass_time(45.0, step_s=1.0)
    assert lab[N2].all_of(TellHoldWarning)[-1].lease == lease
    lab.pass_time(20.0, step_s=1.0)
    assert not held(lab, lease, N2)
    assert held(lab, waiter, N1)


def test_a_grant_that_is_not_confirmed_is_handed_back_g5() -> None:
    lab = pair()
    first = ask(lab, "a")
    second, third = ask(lab, "b", N2), ask(lab, "c")
    lab[N2].clients[session_of(second)].confirms = False
    lab.pass_time(1.0)
    release(lab, first)
    assert held(lab, second, N2)
    lab.pass_time(LIMITS.ack_s + 1.0)
    assert not held(lab, second, N2)
    assert held(lab, third, N1)


def test_a_grant_that_is_confirmed_stays() -> None:
    lab = pair()
    first = ask(lab, "a")
    second = ask(lab, "b", N2)
    lab.pass_time(1.0)
    release(lab, first)
    lab.pass_time(LIMITS.ack_s + 1.0)
    assert held(lab, second, N2)


def test_a_grant_that_a_cut_has_lost_is_not_handed_back_and_waits_for_its_client_g3() -> None:
    lab = pair()
    first = ask(lab, "a")
    second, third = ask(lab, "b", N2), ask(lab, "c")
    lab.pass_time(1.0)
    lab.by_hand()
    lab[N1].release(first)
    while not lab[N1].machine.leasing.leases[second].tokens:
        assert lab.step()
    lab.disconnect(N1, N2)
    # As if nobody had noticed for as long as a grant may be without an answer.
    for session in lab[N1].machine.leasing.sessions.values():
        session.connected = True
    lab[N1].pass_time(LIMITS.ack_s + 1.0)
    lab.connect(N1, N2)
    lab.by_itself()
    assert held(lab, second, N2)
    assert not held(lab, third, N1)


def unconfirmed(lab: Lab) -> tuple[LeaseId, SessionId]:
    """Let a client of the second host be granted the group, and not confirm it yet."""
    first = ask(lab, "a")
    second = ask(lab, "b", N2)
    lab[N2].clients[session_of(second)].confirms = False
    lab.pass_time(1.0)
    release(lab, first)
    assert held(lab, second, N2)
    return second, session_of(second)


def test_a_client_that_comes_back_has_seen_its_grant() -> None:
    lab = pair()
    lease, session = unconfirmed(lab)
    lab[N2].disconnect(session)
    lab.pass_time(1.0)
    lab[N2].reconnect(session)
    lab.pass_time(LIMITS.ack_s + 1.0)
    assert held(lab, lease, N2)


def test_while_a_client_is_away_nobody_waits_for_it_to_confirm() -> None:
    lab = pair(dataclasses.replace(LIMITS, grace_s=3 * LIMITS.ack_s))
    lease, session = unconfirmed(lab)
    lab[N2].disconnect(session)
    lab.pass_time(LIMITS.ack_s + 1.0)
    assert lease in lab[N2].machine.fronting.leases
    lab.pass_time(2 * LIMITS.ack_s)
    assert lease not in lab[N2].machine.fronting.leases


def test_who_is_kept_still_need_not_confirm() -> None:
    lab = pair()
    lease, session = unconfirmed(lab)
    rank = lab[N2].context(job("b"), device(N2, G), pid=lab[N2].process_of(session).pid)
    lab[N2].look()
    lab.run()
    (tenancy,) = lab[N2].machine.tenancies.tenancies_of(job("b"))
    tenancy.participant.ranks[rank].state = PARKED
    lab.pass_time(LIMITS.ack_s + 1.0)
    assert held(lab, lease, N2)
    tenancy.participant.ranks[rank].state = RUNNING
    lab.pass_time(LIMITS.ack_s + 1.0)
    assert not held(lab, lease, N2)


def test_a_rank_gets_its_last_turn_of_the_arbiter_elsewhere() -> None:
    lab = pair()
    first, ranks = hold(lab, "a", N2)
    lab[N2].processes[ranks[1]].state = RUNNING
    release(lab, first, N2)
    second = ask(lab, "b", N1)
    assert states(lab, ranks) == [PARKED, PARKED]
    session = lab[N2].session(job("a"), pid=ranks[1].pid)
    turn = lab[N2].last_turn(session)
    release(lab, second)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert held(lab, turn, N2)


def test_a_rank_that_runs_needs_no_last_turn() -> None:
    lab = pair()
    _, ranks = hold(lab, "a", N2)
    session = lab[N2].session(job("a"), pid=ranks[1].pid)
    lab[N2].last_turn(session, request=9)
    lab.run()
    assert [d.request for d in lab[N2].all_of(DeclineTurn)] == [9]
    assert LeaseId(f"{session}.9") not in lab[N2].machine.fronting.leases
    other = lab[N2].session(job("a"))
    lab[N2].last_turn(other, request=10)
    assert [d.request for d in lab[N2].all_of(DeclineTurn)] == [9, 10], "it is no rank at all"


# --- who may say it -------------------------------------------------------------------------------


def three() -> tuple[Lab, LeaseId]:
    """Return hosts of which the third has no part in what a client of the second holds."""
    lab = Lab({G: (N1, N2), GroupName("other"): (N3,)})
    return lab, ask(lab, "a", N2)


@pytest.mark.parametrize("kind", ["lost", "ended", "grant"])
def test_another_host_than_the_arbiter_changes_nothing_of_a_lease_g10(kind: str) -> None:
    lab, lease = three()
    session = session_of(lease)
    tokens = lab[N2].clients[session].held[lease]
    forged = ((G, Counter(9, 9)),)
    messages: dict[str, PeerMessage] = {
        "lost": TellLost(session=session, lease=lease, text="ha"),
        "ended": EndSession(session=session, text="ha"),
        "grant": _grant(lease, forged),
    }
    say(lab, messages[kind], source=N3)
    assert held(lab, lease, N2)
    assert lab[N2].clients[session].held[lease] == tokens
    assert lab[N2].machine.fronting.leases[lease].tokens == tokens


def test_another_host_than_the_arbiter_answers_nothing_g10() -> None:
    lab, lease = three()
    session = session_of(lease)
    request = lab[N2].release(lease)
    lab[N2].outbox.clear()
    say(
        lab,
        ConfirmRelease(session=session, request=request, waiters=0, deferred=True),
        source=N3,
    )
    assert not lab[N2].answers(request)
    assert lease in lab[N2].machine.fronting.leases


def test_an_answer_to_nothing_is_nothing() -> None:
    lab, lease = three()
    session = session_of(lease)
    say(lab, Refuse(session=session, request=RequestId(99), code="refused", text="?"))
    assert not lab[N2].refusals()


def test_an_ended_lease_of_another_arbiter_is_not_lost_g10() -> None:
    lab, lease = three()
    say(lab, TellLost(session=session_of(lease), lease=LeaseId("s1.9"), text="never was"))
    assert not lab[N2].all_of(TellLost)
    assert held(lab, lease, N2)


# --- when the journal cannot be written -----------------------------------------------------------


@pytest.mark.parametrize("host", [N1, N2])
def test_a_grant_that_is_not_written_down_is_not_given_wherever_that_fails(host: HostName) -> None:
    lab = pair()
    first = ask(lab, "a")
    second, third = ask(lab, "a", N2), ask(lab, "a", N1)
    lab[host].journal_broken = failure(Cause.JOURNAL)
    release(lab, first)
    assert lab[N2].code(second) == "unavailable"
    assert held(lab, third, N1) == (host == N2)
    assert not held(lab, second, N2)
    assert not lab[N2].machine.fronting.leases
    assert_alone(lab)


def _grant(lease: LeaseId, tokens: tuple[tuple[GroupName, Counter], ...]) -> Grant:
    return Grant(
        session=session_of(lease),
        request=RequestId(int(lease.rpartition(".")[2])),
        lease=lease,
        tokens=tokens,
        waited_s=0.0,
        restored=False,
        switch_s=0.0,
        contended=False,
        ack_s=None,
    )
