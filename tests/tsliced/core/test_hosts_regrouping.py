"""Tenancies over several hosts that are divided and joined, on all of them alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hosts_lab import N1, N2, N3, G, Lab, ask, come_up, device, held, hold, pair, release
from simulated import job

from tsliced.core.actions import (
    HostRecord,
    ReserveHostMemory,
    ScanGroups,
    StartOperation,
)
from tsliced.core.events import KillRequested, PeerSaid, Reconfigured
from tsliced.core.model import (
    Counter,
    Goal,
    GroupName,
    LeaseId,
    ProcessId,
    RankState,
    SessionId,
    Stamp,
    TenancyKey,
    Verb,
)
from tsliced.core.reconfiguring import objections
from tsliced.core.signals import Order
from tsliced.core.unwritten import subject_of

H = GroupName("h")
RUNNING, PARKED, FROZEN = RankState.RUNNING, RankState.PARKED, RankState.FROZEN
GH, ONLY_G, ONLY_H = (TenancyKey(job("a"), groups) for groups in ((G, H), (G,), (H,)))
LATE = Counter(9, 9)


def two_groups() -> Lab:
    """Return two hosts that share two groups, which the first one arbitrates."""
    return Lab({G: (N1, N2), H: (N1, N2)})


def session_with(
    lab: Lab, *groups: GroupName
) -> tuple[SessionId, LeaseId, dict[GroupName, ProcessId]]:
    """Let a job hold groups, and come up with a rank for each on the second host."""
    session = lab[N1].session(job("a"))
    lease = lab[N1].acquire(session, *groups)
    lab.run()
    ranks = {group: lab[N2].context(job("a"), device(N2, group)) for group in groups}
    for process in ranks.values():
        lab[N2].processes[process].lawful = True
    lab[N2].look()
    lab.run()
    return session, lease, ranks


def tenancies(lab: Lab) -> list[dict[TenancyKey, set[ProcessId]]]:
    """Return which ranks of the second host are in which tenancy, as either host has it."""
    there = {
        key: {rank.process for rank in tenancy.abroad}
        for key, tenancy in lab[N1].machine.tenancies.all.items()
        if tenancy.abroad
    }
    here = {
        key: set(tenancy.participant.ranks)
        for key, tenancy in lab[N2].machine.tenancies.all.items()
        if tenancy.participant.ranks
    }
    return [there, here]


def order(lab: Lab, key: TenancyKey, goal: Goal, step: int = 0) -> None:
    """Let the second host have an order of the first."""
    stamp = Stamp(0, LATE, step)
    lab[N2].feed(PeerSaid(host=N1, message=Order(host=N2, tenancy=key, stamp=stamp, goal=goal)))


def test_what_is_leased_apart_is_divided_on_all_hosts_and_joined_again() -> None:
    lab = two_groups()
    session, lease, ranks = session_with(lab, G, H)
    lab[N1].release(lease)
    other = lab[N2].acquire(lab[N2].session(job("b")), G, H)
    lab.run()
    assert tenancies(lab) == [{GH: set(ranks.values())}] * 2
    assert [lab[N2].state(rank) for rank in ranks.values()] == [PARKED, PARKED]
    lab.disconnect(N1, N2)
    lab.connect(N1, N2)
    lab.run()
    assert tenancies(lab) == [{GH: set(ranks.values())}] * 2
    alone = lab[N1].acquire(session, G)
    lab[N2].release(other)
    lab.run()
    assert tenancies(lab) == [{ONLY_G: {ranks[G]}, ONLY_H: {ranks[H]}}] * 2
    assert [lab[N2].state(rank) for rank in ranks.values()] == [RUNNING, PARKED]
    lab[N1].release(alone)
    other = lab[N2].acquire(lab[N2].session(job("b")), G, H)
    lab.run()
    lab[N2].release(other)
    lab[N1].acquire(session, G, H)
    lab.run()
    assert tenancies(lab) == [{GH: set(ranks.values())}] * 2
    assert [lab[N2].state(rank) for rank in ranks.values()] == [RUNNING, RUNNING]


def test_a_process_on_two_groups_of_another_host_binds_them() -> None:
    lab = two_groups()
    session = lab[N1].session(job("a"))
    lab[N1].acquire(session, G)
    lab.run()
    rank = lab[N2].context(job("a"), device(N2, G), device(N2, H))
    lab[N2].look()
    lab.run()
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(job("a"))
    assert list(tenancy.beyond) == [H]
    both = lab[N1].acquire(session, H)
    lab.run()
    assert lab[N1].code(both) == "refused"
    lab[N2].die(rank)
    lab.run()
    assert not tenancy.beyond


@pytest.mark.parametrize("first", [G, H])
def test_a_rank_that_binds_groups_is_moved_with_those_with_whom_its_own_host_has_it(
    first: GroupName,
) -> None:
    lab = two_groups()
    session = lab[N1].session(job("a"))
    leases = [lab[N1].acquire(session, G), lab[N1].acquire(session, H)]
    lab.run()
    rank = lab[N2].context(job("a"), device(N2, first))
    lab[N2].look()
    lab.run()
    lab[N2].processes[rank].devices |= {device(N2, G), device(N2, H)}
    lab[N2].look()
    lab.restart(N1)
    lab.run()
    there, here = tenancies(lab)
    assert there == here == {TenancyKey(job("a"), (first,)): {rank}}
    for lease in leases:
        lab[N1].release(lease)
    other = ask(lab, "b")
    assert held(lab, other, N1)
    assert lab[N2].state(rank) is PARKED


def test_ranks_that_are_left_settle_where_they_are_when_one_that_bound_them_is_gone() -> None:
    lab = two_groups()
    session = lab[N1].session(job("a"))
    lab[N1].acquire(session, G)
    lab.run()
    ranks = [lab[N2].context(job("a"), device(N2, G), device(N2, H)) for _ in range(2)]
    lab[N2].look()
    lab.run()
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(job("a"))
    lab[N2].die(ranks[1])
    lab.run()
    assert tenancy.reach == (G, H)
    assert [rank.process for rank in tenancy.abroad] == ranks[:1]


def test_a_call_in_flight_ends_in_the_tenancy_that_its_rank_belongs_to_by_then() -> None:
    lab = two_groups()
    _, _, ranks = session_with(lab, G, H)
    lab.by_hand()
    order(lab, GH, Goal.FROZEN)
    lab[N2].run_until(StartOperation, Verb.FREEZE)
    order(lab, ONLY_G, Goal.ON, step=1)
    assert set(lab[N2].machine.tenancies.all) == {ONLY_G, ONLY_H}
    lab[N2].run()
    assert [lab[N2].state(rank) for rank in ranks.values()].count(FROZEN) <= 1
    made = lab[N2].machine.tenancies.all
    assert set(made[ONLY_G].participant.ranks) == {ranks[G]}
    assert set(made[ONLY_H].participant.ranks) == {ranks[H]}
    assert lab[N2].state(ranks[G]) is RUNNING


@pytest.mark.parametrize("kind", [ScanGroups, ReserveHostMemory])
def test_a_step_in_flight_of_a_tenancy_that_is_another_by_then_is_over(
    kind: type[ScanGroups] | type[ReserveHostMemory],
) -> None:
    lab = two_groups()
    _, _, ranks = session_with(lab, G, H)
    lab.by_hand()
    order(lab, GH, Goal.FROZEN)
    lab[N2].run_until(kind)
    order(lab, ONLY_G, Goal.QUERY, step=1)
    lab[N2].run()
    assert [lab[N2].state(rank) for rank in ranks.values()] == [RUNNING, RUNNING]
    order(lab, ONLY_G, Goal.FROZEN, step=2)
    lab[N2].run()
    assert [lab[N2].state(rank) for rank in ranks.values()] == [FROZEN, RUNNING]


def test_an_order_that_is_older_than_what_it_would_divide_is_refused() -> None:
    lab = two_groups()
    session_with(lab, G, H)
    order(lab, GH, Goal.QUERY, step=5)
    order(lab, ONLY_G, Goal.OFF, step=4)
    assert list(lab[N2].machine.tenancies.all) == [GH]


def test_an_order_over_what_this_host_leads_itself_is_refused_g10() -> None:
    own = GroupName("own")
    lab = Lab({G: (N1, N2), own: (N2,)})
    lab[N2].acquire(lab[N2].session(job("a")), own)
    come_up(lab, "a", N2)
    rank = lab[N2].context(job("a"), device(N2, own))
    lab[N2].look()
    order(lab, TenancyKey(job("a"), (G, own)), Goal.OFF)
    assert lab[N2].state(rank) is RUNNING


def test_what_another_host_leads_is_not_moved_from_here() -> None:
    own = GroupName("own")
    lab = Lab({G: (N1, N2), own: (N2,)})
    _, ranks = hold(lab, "a", N1)
    process = lab[N2].processes[ranks[1]]
    process.devices |= {device(N2, own)}
    lab[N2].look()
    lab.run()
    assert lab[N2].machine.tenancies.all[ONLY_G].reach == (G, own)
    lease = lab[N2].acquire(lab[N2].session(job("b")), own)
    lab.run()
    assert not lab[N2].held(lease)
    assert lab[N2].machine.tenancies.all[ONLY_G].coordinator.stable
    assert lab[N2].state(ranks[1]) is RUNNING


# --- operators ------------------------------------------------------------------------------------


def test_a_group_is_drained_where_it_is_arbitrated_and_nowhere_else() -> None:
    lab = pair()
    lab[N2].drain(G)
    assert not lab[N2].machine.leasing.drains
    lab[N1].drain(G)
    lease = ask(lab, "a", N2)
    assert not lab[N1].held(lease)
    lab[N1].undrain(G)
    lab.run()
    assert lab[N1].held(lease)


def test_a_retry_where_a_job_is_not_led_moves_nothing() -> None:
    lab = pair()
    lease, ranks = hold(lab, "a")
    ask(lab, "b", N1)
    release(lab, lease)
    lab[N2].retry(job("a"))
    lab.run()
    assert lab[N2].state(ranks[1]) is PARKED


def test_a_kill_for_a_job_of_this_host_alone_is_told_to_nobody() -> None:
    own = GroupName("own")
    lab = Lab({G: (N1, N2), own: (N2,)})
    lab[N2].acquire(lab[N2].session(job("a")), own)
    lab.run()
    before = len(lab.said)
    lab[N2].feed(KillRequested(job=job("a"), by="root", grace_s=1.0))
    lab.run()
    assert len(lab.said) == before


# --- another configuration ------------------------------------------------------------------------


def test_a_group_in_use_gets_no_other_hosts_and_an_idle_one_does() -> None:
    lab = pair()
    group = lab[N1].groups[0]
    wider = replace(group, hosts=(N1, N2, N3))
    assert not list(objections(lab[N1].machine, (wider,)))
    lease = ask(lab, "a", N2)
    for host in (N1, N2):
        (text,) = objections(lab[host].machine, (replace(lab[host].groups[0], hosts=(N2, N1)),))
        assert text.startswith("group g cannot get other hosts: job 1000/a has it")
    release(lab, lease, N2)
    lab = two_groups()
    ask(lab, "a", N2)
    idle = replace(lab[N2].groups[1], hosts=(N1,))
    assert not list(objections(lab[N2].machine, (lab[N2].groups[0], idle)))


def test_a_group_that_is_arbitrated_elsewhere_from_now_on_is_asked_for_there() -> None:
    lab = pair()
    for host in (N1, N2):
        groups = (replace(lab[host].groups[0], hosts=(N2, N1)),)
        lab[host].feed(Reconfigured(groups=groups, limits=lab.limits, permitted=()))
    lab.run()
    lab.disconnect(N1, N2)
    lab.connect(N1, N2)
    lab.run()
    lease = ask(lab, "a", N1)
    assert lab[N2].held(lease)


def test_records_about_hosts_and_leases_elsewhere_take_the_place_of_earlier_ones() -> None:
    lab = pair()
    first = HostRecord(host=N2, boot="1", incarnation="1/1", dead_by=None)
    assert subject_of(first) == subject_of(replace(first, boot="2"))
    assert subject_of(first) != subject_of(replace(first, host=N3))
    lease = ask(lab, "a", N2)
    record = lab[N2].machine.fronting.leases[lease].record()
    assert subject_of(record) == subject_of(replace(record, arbiter=None))
    assert subject_of(record) != lease, "which is that of a lease of here"
