"""Hosts that are silent, gone, or back: what is concluded from it, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hosts_lab import (
    N1,
    N2,
    N3,
    G,
    Lab,
    ask,
    assert_alone,
    come_up,
    held,
    hold,
    pair,
    release,
    session_of,
    states,
)
from simulated import failure, job
from world import LIMITS

from tsliced.core.actions import Note, RunHooks, StartOperation, TellLost, TellRankLost, TellStalled
from tsliced.core.coordinator import Place
from tsliced.core.events import HostDied, PeerConnected, PeerDisconnected, PeerLost, PeerSaid
from tsliced.core.model import (
    Cause,
    Goal,
    GroupName,
    LeaseId,
    ProcessId,
    RankState,
    Reason,
    Stamp,
    TenancyKey,
    Verb,
)
from tsliced.core.signals import Report

RUNNING, PARKED, FROZEN = RankState.RUNNING, RankState.PARKED, RankState.FROZEN
A = TenancyKey(job("a"), (G,))


def place(lab: Lab, key: TenancyKey = A) -> Place:
    """Return where the arbiter has a tenancy."""
    return lab[N1].machine.tenancies.all[key].coordinator.place


def leaving(lab: Lab, *until: RankState) -> tuple[LeaseId, list[ProcessId]]:
    """Let job b wait and job a begin to leave, until its ranks are in these states."""
    first, ranks = hold(lab, "a")
    second = ask(lab, "b")
    lab.by_hand()
    lab[N1].release(first)
    while states(lab, ranks) != list(until):
        assert lab.step(), f"it came to rest at {states(lab, ranks)}"
    return second, ranks


# --- nothing moves --------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_nobody_is_let_onto_a_group_while_a_host_of_it_is_silent_g1(lost: bool) -> None:
    lab = pair()
    lab.disconnect(N1, N2, lost=lost)
    lease = ask(lab, "a")
    assert not held(lab, lease, N1)
    stalled = lab[N1].all_of(TellStalled)[-1]
    assert stalled.reason.cause is Cause.SILENT
    assert ("silent" if lost else "not connected") in stalled.reason.text
    assert "tslicectl" in stalled.way_out
    lab.connect(N1, N2)
    lab.run()
    assert held(lab, lease, N1)


def test_a_group_is_granted_only_when_its_other_host_has_said_who_is_there_g1() -> None:
    lab = pair()
    lab.disconnect(N1, N2)
    lab[N2].context(job("b"), *lab[N2].groups[0].devices)
    lab[N2].look()
    lease = ask(lab, "a")
    lab.by_hand()
    lab.connect(N1, N2)
    while lab.step():
        if held(lab, lease, N1):
            assert lab[N2].moves(), "the other was there"
    assert held(lab, lease, N1)


@pytest.mark.parametrize("client", [N1, N2])
def test_a_holder_keeps_its_lease_while_a_host_is_silent(client: str) -> None:
    lab = pair()
    host = N1 if client == N1 else N2
    lease, ranks = hold(lab, "a", host)
    waiter = ask(lab, "b", N1)
    lab.disconnect(N1, N2, lost=True)
    lab.pass_time(600.0, step_s=10.0)
    assert held(lab, lease, host)
    lab.connect(N1, N2)
    lab.run()
    assert held(lab, lease, host)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    release(lab, lease, host)
    assert held(lab, waiter, N1)


def test_a_round_over_several_groups_waits_aside_for_a_silent_host() -> None:
    other = GroupName("alone")
    lab = Lab({other: (N1,), G: (N1, N2)})
    lab.disconnect(N1, N2)
    session = lab[N1].session(job("a"))
    both = lab[N1].acquire(session, other, G)
    lab.run()
    assert lab[N1].all_of(TellStalled)[-1].reason.cause is Cause.SILENT
    alone = lab[N1].acquire(lab[N1].session(job("b")), other)
    lab.run()
    assert held(lab, alone, N1), "it is not reserved for one who cannot go on"
    lab.connect(N1, N2)
    release(lab, alone)
    assert held(lab, both, N1)


def test_no_move_begins_of_a_tenancy_of_which_a_host_is_lost() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    release(lab, first)
    lab[N1].drain(G, park=True)
    lab.run()
    assert states(lab, ranks) == [PARKED, PARKED]
    lab.disconnect(N1, N2, lost=True)
    lab[N1].undrain(G)
    lab[N1].retry(job("a"))
    lab.run()
    assert states(lab, ranks) == [PARKED, PARKED]
    assert place(lab) is Place.OFF


# --- lost in the middle of a move -----------------------------------------------------------------


def test_a_host_lost_before_anything_was_snapshotted_means_that_all_is_turned_back() -> None:
    lab = pair()
    second, ranks = leaving(lab, FROZEN, RUNNING)
    lab.disconnect(N1, N2, lost=True)
    lab.by_itself()
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert place(lab) is Place.ON
    assert not held(lab, second, N1)
    lab.connect(N1, N2)
    lab.pass_time(5.0)
    assert held(lab, second, N1)
    assert states(lab, ranks) == [PARKED, PARKED]


def test_what_is_frozen_for_a_silent_coordinator_runs_after_a_while_and_its_order_is_void() -> None:
    lab = pair()
    second, ranks = leaving(lab, FROZEN, FROZEN)
    lab.disconnect(N1, N2, lost=True)
    lab.by_itself()
    assert states(lab, ranks) == [RUNNING, FROZEN]
    lab.pass_time(LIMITS.alone_s - 1.0)
    assert states(lab, ranks) == [RUNNING, FROZEN]
    lab.pass_time(2.0)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert lab[N2].notes("thawed_alone")
    lab.connect(N1, N2)
    lab.pass_time(5.0)
    assert held(lab, second, N1)


@pytest.mark.parametrize("goal", [Goal.FROZEN, Goal.OFF])
def test_who_thawed_alone_obeys_no_order_of_that_epoch_any_more(goal: Goal) -> None:
    lab = pair()
    _, ranks = leaving(lab, FROZEN, FROZEN)
    order = lab[N2].machine.tenancies.all[A].participant.order
    assert order is not None
    lab.disconnect(N1, N2)
    for world in lab.worlds.values():
        world.auto = True
    lab[N2].pass_time(LIMITS.alone_s + 1.0)
    assert lab[N2].state(ranks[1]) is RUNNING
    step = order.stamp.step + (goal is Goal.OFF)
    stale = replace(order, goal=goal, stamp=Stamp(order.stamp.term, order.stamp.epoch, step))
    lab[N2].outbox.clear()
    lab[N2].feed(PeerSaid(host=N1, message=stale))
    report = lab[N2].outbox[-1].message
    assert isinstance(report, Report)
    assert report.failure is not None
    assert report.failure.cause is Cause.SILENT
    assert lab[N2].state(ranks[1]) is RUNNING


def test_a_host_that_is_back_before_it_thaws_alone_is_thawed_by_its_coordinator() -> None:
    lab = pair()
    _, ranks = leaving(lab, FROZEN, FROZEN)
    lab[N1].verdict = lambda *_: None
    lab.disconnect(N1, N2, lost=True)
    lab.by_itself()
    assert place(lab) is Place.ON
    cancelled = lab[N1].machine.leasing.leases
    for lease in list(cancelled):
        lab[N1].cancel(lease)
    lab.connect(N1, N2)
    lab.run()
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert not lab[N2].notes("thawed_alone")


def test_a_daemon_that_restarts_while_its_coordinator_is_silent_thaws_alone_too() -> None:
    lab = pair()
    second, ranks = leaving(lab, FROZEN, FROZEN)
    lab.disconnect(N1, N2, lost=True)
    lab.by_itself()
    lab.restart(N2, links=False)
    lab.run()
    assert lab[N2].state(ranks[1]) is FROZEN
    lab.pass_time(LIMITS.alone_s + 1.0)
    assert lab[N2].state(ranks[1]) is RUNNING
    lab.connect(N1, N2)
    lab.pass_time(5.0)
    assert held(lab, second, N1)
    assert states(lab, ranks) == [PARKED, PARKED]


def test_a_thaw_that_fails_when_it_is_alone_is_not_tried_for_ever() -> None:
    lab = pair()
    _, ranks = leaving(lab, FROZEN, FROZEN)
    lab.disconnect(N1, N2)
    lab.by_itself()
    lab[N2].verdict = lambda verb, _: (
        Reason(cause=Cause.DRIVER, text="no") if verb is Verb.THAW else None
    )
    lab[N2].pass_time(LIMITS.alone_s + 1.0)
    assert lab[N2].state(ranks[1]) is FROZEN
    assert lab[N2].moves().count((Verb.THAW, ranks[1].pid)) == 1


def test_what_thawed_alone_does_so_once() -> None:
    lab = pair()
    _, ranks = leaving(lab, FROZEN, FROZEN)
    lab.disconnect(N1, N2)
    lab[N1].auto = False
    lab[N2].auto = True
    lab[N2].pass_time(LIMITS.alone_s + 1.0)
    for connected in (True, False):
        event = PeerConnected(host=N1, boot="n1 boot 0")
        lab[N2].feed(event if connected else PeerDisconnected(host=N1))
    lab[N2].pass_time(LIMITS.alone_s + 1.0)
    assert lab[N2].state(ranks[1]) is RUNNING
    assert len(lab[N2].notes("thawed_alone")) == 1


def test_nobody_is_left_to_thaw_when_the_rank_died_first() -> None:
    lab = pair()
    _, ranks = leaving(lab, FROZEN, FROZEN)
    lab.disconnect(N1, N2)
    lab.by_itself()
    lab[N2].die(ranks[1])
    lab[N2].pass_time(LIMITS.alone_s + 1.0)
    assert not lab[N2].notes("thawed_alone")
    assert not lab[N2].machine.tenancies.all


def test_a_report_of_a_rank_that_is_gone_by_then_is_about_the_others() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second = come_up(lab, "a", N2)
    waiter = ask(lab, "b")
    lab.by_hand()
    lab[N1].release(first)
    while not any(isinstance(send.message, Report) for send in lab[N2].outbox):
        lab.step()
    # Its end is known here before the report is: as if that had been repeated.
    coordinator = lab[N1].machine.tenancies.all[A].coordinator
    report = Report(
        host=N2,
        tenancy=A,
        stamp=coordinator.stamp,
        failure=None,
        states=((ProcessId(9, 9), FROZEN), (ranks[1], FROZEN), (second, FROZEN)),
    )
    lab[N1].feed(PeerSaid(host=N2, message=report))
    lab.by_itself()
    assert held(lab, waiter, N1)
    assert lab[N2].state(second) is PARKED


def test_nothing_is_decided_while_a_host_is_lost_that_may_be_parked() -> None:
    lab = pair()
    second, ranks = leaving(lab, PARKED, FROZEN)
    lab.disconnect(N1, N2, lost=True)
    lab.by_itself()
    lab.pass_time(60.0, step_s=1.0)
    assert place(lab) is Place.SNAPSHOTTING
    assert not held(lab, second, N1)
    lab.connect(N1, N2)
    lab.pass_time(10.0)
    assert held(lab, second, N1)
    assert states(lab, ranks) == [PARKED, PARKED]


def test_a_host_lost_while_a_job_is_let_on_means_that_it_leaves_again() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    release(lab, first)
    second = ask(lab, "b")
    again = lab[N1].acquire(session_of(first), G)
    lab.run()
    lab.by_hand()
    lab[N1].release(second)
    while states(lab, ranks) != [FROZEN, PARKED]:
        lab.step()
    lab.disconnect(N1, N2, lost=True)
    lab.by_itself()
    assert lab[N1].state(ranks[0]) is PARKED
    assert not held(lab, again, N1)
    lab.connect(N1, N2)
    lab.pass_time(20.0)
    assert held(lab, again, N1)
    assert states(lab, ranks) == [RUNNING, RUNNING]


def test_a_flapping_link_is_no_reason_to_give_a_job_up() -> None:
    lab = pair()
    second, ranks = leaving(lab, FROZEN, RUNNING)
    for _ in range(LIMITS.max_evict_tries + 1):
        lab.disconnect(N1, N2, lost=True)
        lab.by_itself()
        assert place(lab) is Place.ON
        lab.by_hand()
        lab.connect(N1, N2)
        for _ in range(20):
            lab[N1].pass_time(1.0)
            lab.step()
            if place(lab) is Place.FREEZING:
                break
    lab.by_itself()
    lab.pass_time(60.0, step_s=1.0)
    assert not lab[N1].notes("pinned")
    assert held(lab, second, N1)
    assert states(lab, ranks) == [PARKED, PARKED]


# --- gone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
def test_what_was_on_a_host_that_is_gone_is_over_and_others_go_on_g3(declared: bool) -> None:
    lab = pair()
    first, _ = hold(lab, "a", N2)
    session = lab[N1].session(job("a"))
    lab[N1].acquire(session, G, ranks=2)
    second = ask(lab, "b")
    if declared:
        lab.isolate(N2, lost=True)
        assert not held(lab, second, N1)
        lab.declare_dead(N2)
    else:
        lab.reboot(N2)
    lab.run()
    assert lab[N1].notes("host_died")
    assert session_of(first) not in lab[N1].machine.leasing.sessions
    assert not lab[N1].machine.tenancies.abroad
    assert lab[N1].all_of(TellRankLost)
    assert held(lab, second, N1)


def test_a_host_that_is_gone_in_the_middle_of_a_move_does_not_hold_it_up() -> None:
    lab = pair()
    second, ranks = leaving(lab, PARKED, FROZEN)
    lab.isolate(N2, lost=True)
    lab.by_itself()
    assert not held(lab, second, N1)
    lab.declare_dead(N2)
    lab.run()
    assert held(lab, second, N1)
    assert lab[N1].state(ranks[0]) is PARKED


def test_a_dead_host_that_is_then_found_to_be_silent_stays_dead() -> None:
    lab = pair()
    lab.isolate(N2)
    lab.declare_dead(N2)
    lab[N1].feed(PeerLost(host=N2))
    first = ask(lab, "a")
    come_up(lab, "a", N1)
    second = ask(lab, "b")
    release(lab, first)
    assert held(lab, second, N1)


def test_who_says_that_a_connected_host_is_gone_is_told_otherwise() -> None:
    lab = pair()
    lease, _ = hold(lab, "a", N2)
    lab[N1].feed(HostDied(host=N2, by="root"))
    lab.run()
    assert [note.level for note in lab[N1].notes("host_alive")] == ["warning"]
    assert held(lab, lease, N2)


def test_a_host_that_was_declared_dead_and_is_back_has_lost_its_leases_and_joins_again() -> None:
    lab = pair()
    first, ranks = hold(lab, "a", N2)
    second = ask(lab, "b")
    lab.isolate(N2, lost=True)
    lab.declare_dead(N2)
    lab.run()
    assert held(lab, second, N1)
    assert held(lab, first, N2), "nobody can tell its client"
    lab.rejoin(N2)
    lab.run()
    assert not held(lab, first, N2)
    assert lab[N2].all_of(TellLost)[-1].lease == first
    third = lab[N2].acquire(session_of(first), G)
    release(lab, second)
    assert held(lab, third, N2)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert_alone(lab)


def test_what_was_parked_on_a_host_that_is_back_comes_back_where_its_job_runs() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    release(lab, first)
    second = ask(lab, "b")
    lab.isolate(N2, lost=True)
    lab.declare_dead(N2)
    again = lab[N1].acquire(session_of(first), G)
    release(lab, second)
    assert held(lab, again, N1)
    assert states(lab, ranks) == [RUNNING, PARKED]
    lab.rejoin(N2)
    lab.run()
    assert states(lab, ranks) == [RUNNING, RUNNING]


def test_callbacks_on_a_host_that_was_away_at_a_turn_back_are_told_to_resume() -> None:
    lab = pair()
    session = lab[N2].session(job("a"), hooks=True)
    first = lab[N2].acquire(session, G)
    lab.run()
    ranks = [come_up(lab, "a", host) for host in (N1, N2)]
    ask(lab, "b")
    frozen = failure(Cause.FREEZE_TIMEOUT, ranks[1], N2)
    lab[N2].verdict = lambda verb, _: frozen if verb is Verb.FREEZE else None
    lab.by_hand()
    release(lab, first, N2)
    participant = lab[N2].machine.tenancies.all[A].participant
    while participant.order is None or participant.order.goal is not Goal.RESTORED:
        lab.step()
    lab.isolate(N2, lost=True)
    lab.by_itself()
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert lab[N2].ended(RunHooks)[-1].quiesce
    lab.rejoin(N2)
    lab.run()
    assert not lab[N2].ended(RunHooks)[-1].quiesce


def test_what_an_arbiter_moved_without_ranks_here_is_forgotten_with_it_g9() -> None:
    lab = pair()
    lab.by_hand()
    lab[N1].acquire(lab[N1].session(job("a")), G)
    there = lab[N2].machine.tenancies.all
    while A not in there or there[A].participant.answer is None:
        assert lab.step()
    lab.reboot(N1)
    lab.by_itself()
    assert not there


def test_what_is_frozen_for_an_arbiter_that_boots_anew_meanwhile_runs_again() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    waiter = ask(lab, "b", N2)
    lab.by_hand()
    lab[N1].release(first)
    while not any(getattr(action, "verb", None) is Verb.FREEZE for action in lab[N2].pending):
        assert lab.step()
    # Nobody is left who asks for anything.
    lab[N2].close(session_of(waiter))
    lab.reboot(N1)
    while lab.deliver():
        pass
    assert lab[N2].state(ranks[1]) is RUNNING, "it is about to be frozen"
    lab.by_itself()
    assert [start.verb for start in lab[N2].ended(StartOperation)][-2:] == [Verb.FREEZE, Verb.THAW]
    assert lab[N2].state(ranks[1]) is RUNNING


def test_an_arbiter_that_is_gone_takes_with_it_what_it_had_given() -> None:
    lab = pair()
    lease, _ = hold(lab, "a", N2)
    waiter = ask(lab, "b", N2)
    lab.isolate(N1, lost=True)
    assert held(lab, lease, N2)
    lab.declare_dead(N1)
    assert not held(lab, lease, N2)
    assert "n1 is gone" in lab[N2].all_of(TellLost)[-1].text
    # Who waits goes on waiting: whoever is started there answers.
    assert lab[N2].code(waiter) is None


def test_a_job_whose_last_client_was_on_a_dead_host_is_orphaned() -> None:
    lab = pair()
    lab[N2].session(job("a"))
    for host in (N1, N2):
        come_up(lab, "a", host)
    lab.isolate(N2)
    lab.declare_dead(N2)
    lab.pass_time(5.0)
    assert lab[N1].machine.remains.is_orphaned(job("a"))


def test_hosts_that_share_nothing_hold_nothing_up() -> None:
    lab = Lab({G: (N1, N2), GroupName("other"): (N3,)})
    lab.isolate(N3, lost=True)
    lease = ask(lab, "a")
    assert held(lab, lease, N1)
    assert not [n for n in lab[N1].all_of(Note) if n.level == "error"]
