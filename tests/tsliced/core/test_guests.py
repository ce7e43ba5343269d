"""What other hosts move on a group: it is asked away, known of, and taken over if they die."""

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
    said,
    states,
    three,
    two,
    until,
)
from hosts_lab import N1, N2, N3, Lab, device, held, say
from simulated import failure, job
from world import LIMITS

from tsliced.core.actions import TellStalled
from tsliced.core.coordinator import Place
from tsliced.core.events import HostDied, PeerSaid
from tsliced.core.messages import (
    Cede,
    Ceded,
    CededTenancy,
    Clear,
    HandOver,
    NotCleared,
    PeerMessage,
    Presence,
    PresentRank,
)
from tsliced.core.model import (
    Cause,
    Counter,
    GroupName,
    HostName,
    ProcessId,
    RankState,
    Reason,
    RoundId,
    Stamp,
    TenancyKey,
    Verb,
)
from tsliced.core.signals import Order

RUNNING, PARKED, FROZEN = RankState.RUNNING, RankState.PARKED, RankState.FROZEN
LATE = Stamp(99, Counter(0, 0), 0)
SHARED: dict[GroupName, tuple[HostName, ...]] = {A: (N1,), B: (N2, N3)}


# --- what is in the way ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", [N2, N3])
def test_what_another_host_moves_leaves_a_group_on_all_of_its_hosts(at: HostName) -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    ranks = [come_up(lab, "a", A), come_up(lab, "a", B, host=at)]
    give_back(lab, lease, N1)
    other = ask(lab, "b", N3, B)
    assert held(lab, other, N3)
    assert states(lab, ranks) == [PARKED, PARKED]
    assert_at_rest(lab)


def test_a_round_of_a_third_host_has_what_a_second_one_moves_taken_off() -> None:
    lab = three()
    lease, ranks = hold(lab, "a", N1, A, C)
    give_back(lab, lease, N1)
    other = ask(lab, "b", N2, B, C)
    assert held(lab, other, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
    assert_at_rest(lab)


def test_what_cannot_be_taken_off_is_pinned_and_those_who_wait_are_told() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    lab[N2].verdict = lambda verb, process: (
        failure(Cause.UNSUPPORTED, process.id, N2) if verb is Verb.FREEZE else None
    )
    give_back(lab, lease, N1)
    other = ask(lab, "b", N2, B)
    lab.pass_time(5.0)
    assert not held(lab, other, N2)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    stalled = lab[N2].all_of(TellStalled)[-1]
    assert (stalled.job, stalled.reason.cause) == (job("a"), Cause.UNSUPPORTED)
    assert stalled.way_out
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(job("a"))
    assert tenancy.coordinator.pinned is not None
    # Who asks later is told at once.
    lab[N2].cancel(other)
    lab.run()
    third = ask(lab, "c", N2, B)
    assert lab[N2].all_of(TellStalled)[-1].lease == third
    lab[N2].verdict = lambda _verb, _process: None
    lab[N1].clear(job("a"))
    lab.run()
    lab.pass_time(5.0)
    assert held(lab, third, N2)
    assert_at_rest(lab)


def test_what_could_not_be_taken_off_is_tried_again_after_a_pause() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    tries: list[Verb] = []

    def stumble(verb: Verb, process: object) -> Reason | None:
        tries.extend([verb] if verb is Verb.FREEZE else [])
        return failure(Cause.DRIVER) if verb is Verb.FREEZE and len(tries) < 3 else None

    lab[N2].verdict = stumble
    give_back(lab, lease, N1)
    other = ask(lab, "b", N2, B)
    lab.pass_time(30.0)
    assert held(lab, other, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
    assert_at_rest(lab)


def test_too_many_tries_pin_what_another_host_moves() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    lab[N2].verdict = lambda verb, process: (
        failure(Cause.FREEZE_TIMEOUT, process.id, N2) if verb is Verb.FREEZE else None
    )
    give_back(lab, lease, N1)
    ask(lab, "b", N2, B)
    lab.pass_time(120.0, step_s=1.0)
    (tenancy,) = lab[N1].machine.tenancies.tenancies_of(job("a"))
    assert tenancy.coordinator.given_up
    assert states(lab, ranks) == [RUNNING, RUNNING]
    given_up = [m.given_up for m in said(lab, NotCleared) if isinstance(m, NotCleared)]
    assert given_up.index(True) == LIMITS.max_evict_tries - 1


def test_what_nobody_waits_for_any_more_is_not_taken_off() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    lab.by_hand()
    session = lab[N1].session(job("b"))
    waiter = lab[N1].acquire(session, A)
    while not any(world.pending for world in lab.worlds.values()):
        lab.step()
    lab[N1].cancel(waiter)
    say(lab, N2, N1, Clear(job=job("a"), group=B))
    lab.by_itself()
    assert states(lab, ranks) == [PARKED, PARKED]
    assert not lab[N1].machine.leads.unwelcome


def test_a_part_that_a_process_binds_to_what_is_held_stays_and_who_waits_is_told_why() -> None:
    lab = Lab({A: (N1,), B: (N2, N1)})
    lease = ask(lab, "a", N1, A)
    assert held(lab, lease, N1)
    lab[N1].context(job("a"), device(N1, A), device(N1, B))
    lab[N1].look()
    lab.run()
    other = ask(lab, "b", N2, B)
    lab.pass_time(3.0)
    assert not held(lab, other, N2)
    assert lab[N2].all_of(TellStalled)[-1].reason.cause is Cause.BOUND_GROUPS
    give_back(lab, lease, N1)
    lab.pass_time(30.0, step_s=1.0)
    assert held(lab, other, N2)


def test_who_is_asked_for_what_it_knows_nothing_of_says_so() -> None:
    lab = two()
    say(lab, N2, N1, Clear(job=job("x"), group=B))
    (answer,) = said(lab, NotCleared)
    assert isinstance(answer, NotCleared)
    assert (answer.reason.cause, answer.given_up) == (Cause.SILENT, False)
    assert_at_rest(lab)


def test_who_finds_nothing_to_take_off_says_so() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    say(lab, N2, N1, Clear(job=job("a"), group=B))
    (answer,) = said(lab, NotCleared)
    assert isinstance(answer, NotCleared)
    assert (answer.reason.cause, answer.given_up) == (Cause.SILENT, False)
    assert_at_rest(lab)


def test_what_is_asked_away_may_be_a_part_of_what_has_yet_to_be_taken() -> None:
    lab = two()
    lease = ask(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    rank = lab[N2].context(job("a"), device(N2, B))
    lab.by_hand()
    lab[N1].acquire(lab[N1].session(job("b")), A)
    until(lab, Order)
    key, there = TenancyKey(job("a"), (B,)), lab[N2].machine.tenancies
    lab[N2].look()
    (tenancy,) = there.tenancies_of(job("a"))
    present = there.present(tenancy.participant.ranks[rank], tenancy, None)
    part = CededTenancy(tenancy=key, stamp=LATE, on=True, pinned=None, ranks=((N2, present),))
    ceded = Ceded(round=RoundId(99), job=job("a"), tenancies=(part,))
    lab[N1].feed(PeerSaid(host=N2, message=ceded))
    lab[N1].feed(PeerSaid(host=N2, message=Clear(job=job("a"), group=B)))
    lab.by_itself()
    assert lab[N2].state(rank) is PARKED
    assert said(lab, NotCleared) == []


def test_who_has_taken_off_what_was_asked_for_does_not_say_anything_else() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    say(lab, N2, N1, Clear(job=job("a"), group=B))
    assert states(lab, ranks) == [PARKED, PARKED]
    assert said(lab, NotCleared) == []


# --- what nobody may say --------------------------------------------------------------------------


def test_only_its_arbiter_has_a_group_cleared_g10() -> None:
    lab = three()
    lease, ranks = hold(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    say(lab, N3, N1, Clear(job=job("a"), group=B))
    assert states(lab, ranks) == [RUNNING, RUNNING]
    say(lab, N2, N1, Clear(job=job("a"), group=B))
    assert states(lab, ranks) == [PARKED, PARKED]


def test_what_could_not_be_cleared_for_nobody_is_no_news_g10() -> None:
    lab = two()
    lease = ask(lab, "b", N2, B)
    waiter = ask(lab, "c", N2, B)
    news = NotCleared(
        job=job("a"), group=B, reason=failure(Cause.DRIVER), way_out="", given_up=False
    )
    say(lab, N1, N2, news)
    assert lab[N2].all_of(TellStalled) == []
    assert held(lab, lease, N2)
    assert not held(lab, waiter, N2)


def test_what_has_gone_meanwhile_is_no_news() -> None:
    lab = two()
    lease, (_, rank) = hold(lab, "a", N1, A, B)
    give_back(lab, lease, N1)
    lab.by_hand()
    lab[N2].acquire(lab[N2].session(job("b")), B)
    until(lab, Clear)
    lab[N2].processes.pop(rank)
    lab[N2].die(rank)
    news = NotCleared(
        job=job("a"), group=B, reason=failure(Cause.DRIVER), way_out="", given_up=False
    )
    lab[N2].feed(PeerSaid(host=N1, message=news))
    assert lab[N2].all_of(TellStalled) == []
    lab.by_itself()
    assert_at_rest(lab)


# --- who moves it ---------------------------------------------------------------------------------


def test_a_host_that_takes_the_arbiter_to_move_a_late_rank_is_told_who_does() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    first = come_up(lab, "a", B, host=N2)
    late = come_up(lab, "a", B, host=N3)
    assert said(lab, HandOver)
    (tenancy,) = lab[N3].machine.tenancies.tenancies_of(job("a"))
    assert tenancy.lead == N1
    assert_at_rest(lab)
    give_back(lab, lease, N1)
    other = ask(lab, "b", N2, B)
    assert held(lab, other, N2)
    assert states(lab, [first, late]) == [PARKED, PARKED]
    assert_at_rest(lab)


def test_a_late_rank_beside_a_guest_is_moved_by_whoever_moves_that() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    first = come_up(lab, "a", B, host=N3)
    give_back(lab, lease, N1)
    lease = again(lab, lease, N1, A, B)
    second = come_up(lab, "a", B, host=N2)
    assert {t.lead for t in lab[N2].machine.tenancies.tenancies_of(job("a"))} == {N1}
    give_back(lab, lease, N1)
    ask(lab, "b", N2, B)
    assert states(lab, [first, second]) == [PARKED, PARKED]
    assert_at_rest(lab)


def test_what_a_dead_host_moved_the_arbiter_moves_from_then_on_g11() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    ranks = [come_up(lab, "a", B, host=host) for host in (N2, N3)]
    other = ask(lab, "b", N2, B)
    give_back(lab, lease, N1)
    assert states(lab, ranks) == [PARKED, PARKED]
    lab.isolate(N1, lost=True)
    lab.declare_dead(N1)
    lab.run()
    assert {t.lead for t in lab[N2].machine.tenancies.tenancies_of(job("a"))} == {N2}
    give_back(lab, other, N2)
    mine = ask(lab, "a", N2, B)
    assert held(lab, mine, N2)
    assert states(lab, ranks) == [RUNNING, RUNNING]


def test_what_was_frozen_for_a_host_that_died_runs_again() -> None:
    lab = two()
    lease, ranks = hold(lab, "a", N1, A, B)
    lab.by_hand()
    lab[N1].release(lease)
    lab[N1].acquire(lab[N1].session(job("b")), A, B)
    while lab[N2].state(ranks[1]) is not FROZEN:
        lab.step()
    lab.isolate(N1, lost=True)
    lab.declare_dead(N1)
    lab.by_itself()
    lab.pass_time(5.0)
    assert states(lab, ranks[1:]) == [RUNNING]
    (tenancy,) = lab[N2].machine.tenancies.tenancies_of(job("a"))
    assert (tenancy.lead, tenancy.coordinator.place) == (N2, Place.ON)


def test_guests_of_a_host_that_boots_anew_are_gone() -> None:
    lab = Lab({A: (N1, N3), B: (N2, N1)})
    lease = ask(lab, "a", N1, A, B)
    come_up(lab, "a", B, host=N1)
    assert lab[N2].machine.tenancies.guests[B]
    waiter = ask(lab, "b", N2, B)
    lab.reboot(N1)
    lab.run()
    assert not lab[N2].machine.tenancies.guests.get(B)
    lab.pass_time(5.0)
    assert held(lab, waiter, N2)
    assert not held(lab, lease, N1)
    assert_at_rest(lab)


def test_what_is_moved_from_two_places_is_not_taken_over_by_halves() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    come_up(lab, "a", B, host=N2)
    elsewhere = HostName("n4")
    rank = PresentRank(
        process=ProcessId(4711, 1),
        job=job("a"),
        state=RUNNING,
        device_bytes=1,
        groups=(B,),
        lead=elsewhere,
        term=3,
    )
    say(lab, N3, N2, Presence(group=B, ranks=(rank,), clients=(), shortages=()))
    for dead in (HostName("n5"), elsewhere):
        lab[N2].feed(HostDied(host=dead, by="root"))
        assert {t.lead for t in lab[N2].machine.tenancies.tenancies_of(job("a"))} == {N1}
    assert held(lab, lease, N1)


def test_ranks_on_another_host_obey_the_arbiter_when_their_lead_is_dead() -> None:
    lab = Lab(SHARED)
    ask(lab, "a", N1, A, B)
    ranks = [come_up(lab, "a", B, host=host) for host in (N2, N3)]
    lab.isolate(N1, lost=True)
    lab.declare_dead(N1)
    lab.run()
    other = ask(lab, "b", N2, B)
    lab.pass_time(5.0)
    assert held(lab, other, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
    assert [rank.host for rank in lab[N2].machine.tenancies.abroad] == [N3]


def test_what_is_asked_away_waits_for_a_host_that_is_lost() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    rank = come_up(lab, "a", B, host=N2)
    give_back(lab, lease, N1)
    lab.disconnect(N1, N3, lost=True)
    other = ask(lab, "b", N2, B)
    assert not held(lab, other, N2)
    assert states(lab, [rank]) == [RUNNING]
    lab.connect(N1, N3)
    lab.run()
    assert held(lab, other, N2)
    assert_at_rest(lab)


def deliver(lab: Lab, source: HostName, target: HostName, kind: type[PeerMessage]) -> None:
    """Let what one host says to another arrive until a message of a kind has, before all else."""
    lab.collect()
    for item in [item for item in lab.wire if item[:2] == (source, target)]:
        lab.wire.remove(item)
        lab[target].feed(PeerSaid(host=source, message=item[2]))
        if isinstance(item[2], kind):
            return
    raise AssertionError(f"{source} does not say any {kind.__name__} to {target}")


def test_a_rank_that_obeys_a_host_before_that_has_taken_its_job_is_moved_by_it_then() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    ranks = [come_up(lab, "a", A), come_up(lab, "a", B, host=N2)]
    give_back(lab, lease, N1)
    lab.by_hand()
    part = lab[N2].acquire(lab[N2].session(job("a")), B)
    deliver(lab, N2, N1, Cede)
    deliver(lab, N1, N3, HandOver)
    late = lab[N3].context(job("a"), device(N3, B))
    lab[N3].look()
    deliver(lab, N3, N2, Presence)
    assert [guest.lead for guest in lab[N2].machine.tenancies.guests[B].values()] == [N2]
    lab.by_itself()
    assert held(lab, part, N2)
    assert_at_rest(lab)
    give_back(lab, part, N2)
    assert held(lab, ask(lab, "b", N3, B), N3)
    assert states(lab, [*ranks, late]) == [RUNNING, PARKED, PARKED]


def test_a_rank_that_obeys_a_host_too_early_is_moved_by_it_when_nobody_else_does() -> None:
    lab = Lab(SHARED)
    lease = ask(lab, "a", N1, A, B)
    hooks = lab[N2].session(job("a"), hooks=True)
    come_up(lab, "a", A)
    rank, _ = (come_up(lab, "a", B, host=host) for host in (N2, N3))
    give_back(lab, lease, N1)
    ask(lab, "b", N1, A)
    lab[N2].die(rank)
    say(lab, N1, N3, HandOver(tenancy=TenancyKey(job("a"), (B,)), stamp=LATE, to=N2))
    late = come_up(lab, "a", B, host=N3)
    waiter = ask(lab, "c", N2, B)
    assert not held(lab, waiter, N2), "another host is taken to move what is in its way"
    lab[N2].close(hooks)
    lab.pass_time(5.0, step_s=1.0)
    assert held(lab, waiter, N2)
    assert lab[N3].state(late) is PARKED


def test_a_rank_on_two_groups_is_moved_by_whoever_moves_its_job_on_one_of_them() -> None:
    lab = Lab({A: (N1,), B: (N2, N3), C: (N3,)})
    ask(lab, "a", N1, A, B)
    come_up(lab, "a", B, host=N2)
    rank = PresentRank(
        process=ProcessId(999, 1),
        job=job("a"),
        state=RUNNING,
        device_bytes=1,
        groups=(B, C),
        lead=N2,
        term=0,
    )
    for group in (B, C):
        say(lab, N3, N2, Presence(group=group, ranks=(rank,), clients=(), shortages=()))
    there = lab[N2].machine.tenancies
    assert [tenancy.lead for tenancy in there.tenancies_of(job("a"))] == [N1]
    assert there.leads_of(job("a"), (B,)) == [N1]


def test_presence_without_ranks_leaves_no_guests() -> None:
    lab = Lab(SHARED)
    ask(lab, "a", N1, A, B)
    come_up(lab, "a", B, host=N3)
    assert lab[N2].machine.tenancies.guests[B]
    say(lab, N3, N2, Presence(group=B, ranks=(), clients=(), shortages=()))
    assert B not in lab[N2].machine.tenancies.guests
