"""Daemons of several hosts that are killed in the middle of things and start again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

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
    device,
    held,
    hold,
    pair,
    release,
    session_of,
    states,
)
from simulated import job

from tsliced.core.actions import (
    ForeignLeaseRecord,
    HostRecord,
    SessionEndedRecord,
    StartOperation,
)
from tsliced.core.events import PeerSaid, ProcessExited
from tsliced.core.model import (
    Cause,
    Counter,
    Goal,
    GroupName,
    HostName,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    TenancyKey,
)
from tsliced.core.signals import Order, Report

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED

Story = tuple[Lab, list[ProcessId], Callable[[], bool]]


def swap() -> Story:
    """Let job a leave both hosts, and job b come back to both, whose client is on the second."""
    lab = pair()
    first, others = hold(lab, "b", N2)
    release(lab, first, N2)
    lease, ranks = hold(lab, "a")
    again = lab[N2].acquire(session_of(first), G)
    lab.run()
    assert states(lab, others) == [PARKED, PARKED]
    lab.by_hand()
    lab[N1].release(lease)
    return lab, [*ranks, *others], lambda: held(lab, again, N2)


def steps_of(story: Callable[[], Story]) -> int:
    """Return how many things happen until a story is over."""
    lab, _, over = story()
    steps = lab.count_steps()
    assert over()
    return steps


@pytest.mark.parametrize("finish", [True, False], ids=["calls end", "calls never began"])
@pytest.mark.parametrize("host", [N1, N2])
def test_a_switch_ends_well_after_a_restart_of_either_host_at_any_step_g8(
    host: HostName, finish: bool
) -> None:
    for crash_after in range(steps_of(swap) + 1):
        lab, ranks, over = swap()
        for _ in range(crash_after):
            lab.step()
            assert_alone(lab)
        lab.restart(host, finish=finish)
        lab.by_itself()
        assert_alone(lab)
        lab.pass_time(10.0, step_s=0.5)
        assert over(), f"not after {crash_after} steps"
        assert states(lab, ranks[:2]) == [PARKED, PARKED], crash_after
        assert states(lab, ranks[2:]) == [RUNNING, RUNNING], crash_after
        assert_alone(lab)


@pytest.mark.parametrize("host", [N1, N2])
def test_a_restart_at_rest_changes_nothing_g8(host: HostName) -> None:
    lab = pair()
    lease, ranks = hold(lab, "a", N2)
    waiter = ask(lab, "b", N1)
    lab.restart(host)
    lab.pass_time(60.0, step_s=1.0)
    assert held(lab, lease, N2)
    assert not held(lab, waiter, N1)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    release(lab, lease, N2)
    assert held(lab, waiter, N1)
    assert states(lab, ranks) == [PARKED, PARKED]


def test_a_holder_that_came_up_unseen_runs_on_whenever_it_is_seen_after_a_restart_g8() -> None:
    for seen_after in count(1):
        lab = pair()
        lease = ask(lab, "a")
        ranks = [lab[host].context(job("a"), device(host, G)) for host in (N1, N2)]
        lab.by_hand()
        lab.restart(N1)
        steps = [lab.step() for _ in range(seen_after)]
        at_rest = not all(steps)
        for host in (N1, N2):
            lab[host].look()
        lab.by_itself()
        lab.pass_time(30.0, step_s=1.0)
        assert held(lab, lease, N1)
        assert states(lab, ranks) == [RUNNING, RUNNING]
        moved = [lab[host].moves() for host in (N1, N2)]
        assert moved == [[], []], f"seen after {seen_after} steps"
        if at_rest:
            break


def test_both_hosts_may_restart_at_once_g8() -> None:
    lab = pair()
    lease, ranks = hold(lab, "a", N2)
    waiter = ask(lab, "b", N2)
    lab.restart(N1, links=False)
    lab.restart(N2, links=False)
    lab.connect(N1, N2)
    lab.pass_time(5.0)
    assert held(lab, lease, N2)
    release(lab, lease, N2)
    assert held(lab, waiter, N2)
    assert states(lab, ranks) == [PARKED, PARKED]


def test_a_restarted_arbiter_keeps_the_place_of_who_waits_elsewhere_g8() -> None:
    lab = pair()
    lease, _ = hold(lab, "a")
    second, third = ask(lab, "b", N2), ask(lab, "c", N1)
    lab.restart(N1)
    lab.run()
    release(lab, lease)
    assert held(lab, second, N2)
    release(lab, second, N2)
    assert held(lab, third, N1)


def test_who_waits_keeps_its_place_when_its_own_daemon_restarts_g8() -> None:
    lab = pair()
    lease, _ = hold(lab, "a")
    second, third = ask(lab, "b", N2), ask(lab, "c", N1)
    lab.restart(N2)
    lab.run()
    release(lab, lease)
    assert held(lab, second, N2)
    assert not held(lab, third, N1)


@pytest.mark.parametrize("linked", [True, False])
def test_a_grant_that_comes_while_its_client_is_away_is_kept_for_it_g8(linked: bool) -> None:
    lab = pair()
    lease = ask(lab, "a")
    second = ask(lab, "b", N2)
    lab[N2].clients[session_of(second)].ended = True  # it does not come back yet
    lab.restart(N2, links=linked)
    lab[N1].release(lease)
    lab.rejoin(N2)
    lab.run()
    come_back(lab, second)
    assert held(lab, second, N2)


def test_what_was_granted_while_its_front_was_away_is_there_when_its_client_is_back_g8() -> None:
    lab = pair()
    second = ask(lab, "b", N2)
    lab[N2].clients[session_of(second)].ended = True  # it does not come back yet
    # The daemon was killed before it had written the grant down.
    lab[N2].keep(replace(_foreign(lab, second), tokens=()))
    lab.restart(N2)
    lab.run()
    known = lab[N2].machine.fronting.held_by(session_of(second))
    assert [lease.id for lease in known] == [second]
    come_back(lab, second)
    assert held(lab, second, N2)


def come_back(lab: Lab, lease: LeaseId) -> None:
    """Let a client of the second host connect again that was away."""
    lab[N2].clients[session_of(lease)].ended = False
    lab[N2].reconnect(session_of(lease))
    lab.run()


def _foreign(lab: Lab, lease: LeaseId) -> ForeignLeaseRecord:
    record = lab[N2].journal["foreign", lease]
    assert isinstance(record, ForeignLeaseRecord)
    return record


def test_a_client_that_died_while_its_daemon_was_away_has_no_place_elsewhere() -> None:
    lab = pair()
    first, _ = hold(lab, "a")
    second, third = ask(lab, "b", N2), ask(lab, "c", N1)
    process = lab[N2].process_of(session_of(second))
    lab.restart(N2, links=False)
    lab.connect(N1, N2)
    lab[N2].feed(ProcessExited(process=process))
    lab[N2].clients.pop(session_of(second))
    lab.run()
    assert session_of(second) not in lab[N1].machine.leasing.sessions
    release(lab, first)
    assert held(lab, third, N1)


def test_who_gave_up_before_a_restart_is_not_given_anything_after_it_g5() -> None:
    lab = pair()
    first, _ = hold(lab, "a")
    lab.disconnect(N1, N2)
    second = ask(lab, "b", N2, timeout_s=5.0)
    lab.pass_time(10.0)
    assert lab[N2].code(second) == "timeout"
    lab.restart(N2)
    lab.run()
    assert second not in lab[N2].machine.fronting.leases
    release(lab, first)
    assert not lab[N1].machine.leasing.leases


def test_what_is_kept_of_leases_elsewhere_goes_with_them() -> None:
    lab = pair()
    lease, _ = hold(lab, "a", N2)
    assert ("foreign", lease) in lab[N2].journal
    release(lab, lease, N2)
    assert ("foreign", lease) not in lab[N2].journal


def test_a_lease_elsewhere_whose_session_is_gone_is_over() -> None:
    lab = pair()
    lease, _ = hold(lab, "a", N2)
    session = session_of(lease)
    lab[N2].keep(SessionEndedRecord(session=session))
    del lab[N2].clients[session]
    lab.restart(N2)
    lab.run()
    assert not lab[N2].machine.fronting.leases
    assert ("foreign", lease) not in lab[N2].journal
    assert not lab[N1].machine.leasing.leases


def test_which_run_of_a_host_was_seen_last_outlives_a_restart() -> None:
    lab = pair()
    lease, _ = hold(lab, "a", N2)
    assert isinstance(lab[N1].journal["host", N2], HostRecord)
    lab.restart(N1, links=False)
    lab.reboot(N2)
    lab.run()
    assert lab[N1].notes("host_died")
    assert lease not in lab[N1].machine.leasing.leases
    assert not lab[N1].machine.tenancies.abroad


def test_a_tenancy_that_another_host_led_is_led_by_it_after_a_restart() -> None:
    lab = pair()
    _, ranks = hold(lab, "a")
    second = ask(lab, "b")
    session = next(iter(lab[N1].clients))
    release(lab, LeaseId(next(iter(lab[N1].clients[session].held))))
    assert held(lab, second, N1)
    lab.restart(N2, links=False)
    (tenancy,) = lab[N2].machine.tenancies.all.values()
    assert (tenancy.lead, tenancy.led_here) == (N1, False)
    assert lab[N2].state(ranks[1]) is PARKED


def test_a_session_of_another_host_claims_no_process_of_this_one() -> None:
    lab = pair()
    lab[N1].freeze_strangers = lab[N1].machine.tenancies.freeze = True
    lab[N1].context(None, *lab[N1].groups[0].devices, pid=4711)
    lab[N1].look()
    session = lab[N2].session(job("b"), pid=4711)
    lab[N2].acquire(session, G)
    lab.run()
    lab.restart(N1)
    lab.run()
    assert {key.job.id for key in lab[N1].machine.tenancies.home.values()} == {"stranger-4711-n1"}


def test_a_driver_outside_of_the_group_keeps_its_lease_when_any_daemon_restarts_g8() -> None:
    lab = Lab({G: (N1, N2), GroupName("other"): (N3,)})
    lease, ranks = hold(lab, "a", N3)
    for host in (N1, N2, N3):
        lab.restart(host)
        lab.pass_time(1.0)
    assert held(lab, lease, N3)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert ("foreign", lease) in lab[N3].journal


def test_a_rank_that_died_while_its_daemon_was_away_is_known_to_be_gone_everywhere() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second = ask(lab, "b")
    lab[N2].processes.pop(ranks[1])
    lab.restart(N2)
    lab.run()
    assert not lab[N1].machine.tenancies.abroad
    release(lab, first)
    assert held(lab, second, N1)
    come_up(lab, "b", N2)


def test_g1_nobody_is_restored_where_a_coordinator_that_forgot_it_brings_somebody_else() -> None:
    lab = pair()
    ranks = []
    for name in ("a", "b"):
        lease, (_, rank) = hold(lab, name)
        release(lab, lease)
        ranks.append(rank)
    ask(lab, "c")
    lab.by_hand()
    world = lab[N2]
    for number, name in enumerate(("a", "b")):
        # Between the two the first host has booted anew, with all ranks parked.
        key = TenancyKey(job(name), (G,))
        stamp = lab[N1].machine.tenancies.all[key].coordinator.stamp
        stamp = stamp._replace(epoch=Counter(1, 1000 + number), step=0)
        order = Order(host=N2, tenancy=key, stamp=stamp, goal=Goal.RESTORED)
        world.feed(PeerSaid(host=N1, message=order))
    while any(not isinstance(action, StartOperation) for action in world.pending):
        world.finish()
    assert [action.rank.process for action in world.pending] == ranks[:1]  # type: ignore[union-attr]
    (report,) = (s.message for s in world.outbox if isinstance(s.message, Report))
    assert report.failure is not None
    assert report.failure.cause is Cause.OCCUPIED
    assert str(ranks[0].pid) in report.failure.text


def test_an_answer_to_an_order_of_before_the_arbiter_booted_anew_tells_where_ranks_are() -> None:
    lab = pair()
    lease, (_, rank) = hold(lab, "a")
    release(lab, lease)
    ask(lab, "b")
    lab.reboot(N1)
    lab.run()
    key, there = TenancyKey(job("a"), (G,)), RankId(N2, rank)
    tenancies = lab[N1].machine.tenancies
    assert tenancies.all[key].abroad[there].state is PARKED
    stamp = tenancies.all[key].coordinator.stamp._replace(epoch=Counter(1, 1000), step=0)
    states = ((rank, RankState.FROZEN),)
    report = Report(host=N2, tenancy=key, stamp=stamp, failure=None, states=states)
    lab[N1].feed(PeerSaid(host=N2, message=report))
    assert tenancies.all[key].abroad[there].state is RankState.FROZEN
    assert tenancies.all[key].resident
