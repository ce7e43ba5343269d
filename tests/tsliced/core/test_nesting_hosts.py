"""Leases inside of leases, against the order, of groups whose arbiters are on other hosts."""

from __future__ import annotations

from arbiters_lab import A, B, C, ask, assert_at_rest, give_back, hold, said, states, three, until
from hosts_lab import N1, N2, N3, Lab, held, session_of
from simulated import job
from test_nesting import nest

from tsliced.core.events import AcquireRequested
from tsliced.core.messages import NotReserved, Reserve, Reserved
from tsliced.core.model import Arrival, GroupName, HostName, LeaseId, RankState, RequestId


def code(lab: Lab, lease: LeaseId, host: HostName) -> str | None:
    """Return the code of the refusal that a client got."""
    lab.run()
    return lab[host].code(lease)


def ask_inside(lab: Lab, outer: LeaseId, host: HostName, *groups: GroupName) -> LeaseId:
    """Let the client of a lease on C ask for groups inside of it, without waiting for an answer."""
    number = RequestId(next(lab[host].requests))
    session = session_of(outer)
    lab[host].send(AcquireRequested(session=session, request=number, groups=groups, holding=(C,)))
    return LeaseId(f"{session}.{number}")


def test_what_is_free_on_several_hosts_is_granted_though_a_later_group_is_held() -> None:
    lab = three()
    resident, ranks = hold(lab, "r", N2, B)
    give_back(lab, resident, N2)
    outer = ask(lab, "a", N1, C)
    inner = ask_inside(lab, outer, N1, A, B)
    lab.run()
    assert held(lab, inner, N1)
    assert states(lab, ranks) == [RankState.PARKED], "somebody's state is no reason to wait"
    give_back(lab, inner, N1)
    assert_at_rest(lab)


def test_who_would_wait_at_another_host_is_refused_at_once() -> None:
    lab = three()
    other = ask(lab, "b", N2, B)
    outer = ask(lab, "a", N1, C)
    inner = ask_inside(lab, outer, N1, A, B)
    assert code(lab, inner, N1) == "would_deadlock"
    assert "comes before c, and c is held" in lab[N1].refusals()[-1].text
    assert held(lab, outer, N1)
    assert held(lab, other, N2)
    assert held(lab, ask(lab, "d", N1, A), N1), "nothing of it is left"
    assert_at_rest(lab)


def test_two_jobs_that_nest_in_opposite_orders_over_hosts_do_not_wait_for_ever() -> None:
    lab = three()
    one, two = ask(lab, "a", N1, A), ask(lab, "b", N2, C)
    waits = LeaseId(nest(lab[N1], session_of(one), C, A))
    lab.run()
    assert not held(lab, waits, N1)
    assert code(lab, nest(lab[N2], session_of(two), A, C), N2) == "would_deadlock"
    give_back(lab, two, N2)
    assert held(lab, waits, N1)
    assert_at_rest(lab)


def test_a_drain_elsewhere_is_not_waited_for_against_the_order() -> None:
    lab = three()
    outer = ask(lab, "a", N1, C)
    lab[N2].drain(B)
    lab.run()
    assert code(lab, ask_inside(lab, outer, N1, A, B), N1) == "would_deadlock"
    assert_at_rest(lab)


def test_a_host_that_is_cut_off_is_not_waited_for_against_the_order() -> None:
    lab = three()
    outer = ask(lab, "a", N1, C)
    lab.by_hand()
    inner = ask_inside(lab, outer, N1, A, B)
    until(lab, Reserve)
    lab.disconnect(N1, N2)
    assert lab[N1].code(inner) == "would_deadlock"
    lab.connect(N1, N2)
    lab.by_itself()
    assert_at_rest(lab)


def test_what_is_taken_back_before_it_is_kept_is_not_waited_for_against_the_order() -> None:
    lab = three()
    outer = ask(lab, "a", N1, C)
    lab.by_hand()
    inner = ask_inside(lab, outer, N1, A, B)
    until(lab, Reserved)
    lab[N2].drain(B)
    lab.by_itself()
    assert lab[N1].code(inner) == "would_deadlock"
    assert_at_rest(lab)


def test_after_an_arbiters_restart_nobody_waits_there_against_the_order() -> None:
    lab = three()
    outer = ask(lab, "a", N1, C)
    lab.by_hand()
    resident = lab[N2].session(job("r"))
    lab[N2].acquire(resident, B)
    inner = ask_inside(lab, outer, N1, A, B)
    until(lab, Reserve)
    lab.restart(N2)
    lab.by_itself()
    assert lab[N1].code(inner) == "would_deadlock"
    assert_at_rest(lab)


def test_after_a_restart_of_its_own_host_a_client_says_again_what_it_holds() -> None:
    lab = three()
    busy = ask(lab, "b", N2, B)
    outer = ask(lab, "a", N1, C)
    lab.by_hand()
    inner = ask_inside(lab, outer, N1, A, B)
    lab.restart(N1)
    lab.by_itself()
    assert lab[N1].code(inner) == "would_deadlock"
    assert held(lab, busy, N2)
    assert_at_rest(lab)


def test_those_of_a_round_that_hold_nothing_later_wait_on() -> None:
    lab = three()
    busy, outer = ask(lab, "b", N2, B), ask(lab, "a", N1, C)
    sessions = session_of(outer), lab[N1].session(job("a"))
    leases: list[LeaseId] = []
    for session, holding in zip(sessions, ((C,), ()), strict=True):
        number = RequestId(next(lab[N1].requests))
        lab[N1].send(
            AcquireRequested(
                session=session,
                request=number,
                groups=(A, B),
                ranks=2,
                arrival=Arrival.FIRST,
                holding=holding,
            )
        )
        leases.append(LeaseId(f"{session}.{number}"))
    lab.run()
    assert lab[N1].code(leases[0]) == "would_deadlock"
    assert lab[N1].waits(leases[1])
    give_back(lab, busy, N2)
    assert held(lab, leases[1], N1)
    assert_at_rest(lab)


def test_who_joins_a_round_that_waits_elsewhere_is_refused_and_the_round_waits_on() -> None:
    lab = three()
    busy, outer = ask(lab, "b", N2, B), ask(lab, "a", N1, C)
    first = lab[N1].acquire(lab[N1].session(job("a")), A, B, ranks=2, arrival=Arrival.FIRST)
    lab.run()
    number = RequestId(next(lab[N1].requests))
    lab[N1].send(
        AcquireRequested(
            session=session_of(outer),
            request=number,
            groups=(A, B),
            ranks=2,
            arrival=Arrival.FIRST,
            holding=(C,),
        )
    )
    lab.run()
    assert lab[N1].code(LeaseId(f"{session_of(outer)}.{number}")) == "would_deadlock"
    assert [m.at_once for m in said(lab, Reserve) if isinstance(m, Reserve)] == [False, True, False]
    assert [type(m).__name__ for m in said(lab, NotReserved)] == ["NotReserved"]
    give_back(lab, busy, N2)
    assert held(lab, first, N1)
    assert_at_rest(lab)


def test_a_group_that_nobody_here_knows_stands_in_no_order() -> None:
    lab = three()
    session = lab[N1].session(job("a"))
    lease = nest(lab[N1], session, A, GroupName("elsewhere"))
    lab.run()
    assert held(lab, lease, N1)


def test_a_lease_of_another_hosts_arbiter_counts_as_held() -> None:
    lab = three()
    lease = ask(lab, "a", N3, A, B)
    assert lab[N3].machine.groups_of([lease]) == (A, B)
