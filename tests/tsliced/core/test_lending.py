"""Leases over groups with different arbiters: reserved in order, moved together, given back."""

from __future__ import annotations

from arbiters_lab import A, B, again, ask, come_up, give_back, hold, states, two
from hosts_lab import N1, N2, held

from tsliced.core.model import RankState

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED


def test_two_jobs_that_lease_both_groups_alternate_and_move_as_one() -> None:
    lab = two()
    first, ranks = hold(lab, "a", N1, A, B)
    second = ask(lab, "b", N2, A, B)
    assert not held(lab, second, N2)
    give_back(lab, first, N1)
    assert held(lab, second, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
    others = [come_up(lab, "b", group) for group in (A, B)]
    third = again(lab, first, N1, A, B)
    give_back(lab, second, N2)
    assert held(lab, third, N1)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert states(lab, others) == [PARKED, PARKED]


def test_a_part_that_is_leased_alone_is_moved_alone_again() -> None:
    lab = two()
    both, ranks = hold(lab, "a", N1, A, B)
    give_back(lab, both, N1)
    alone = again(lab, both, N1, B)
    assert held(lab, alone, N1)
    give_back(lab, alone, N1)
    other = ask(lab, "b", N2, B)
    assert held(lab, other, N2)
    assert states(lab, ranks) == [RUNNING, PARKED]


def test_what_was_leased_together_leaves_together_though_only_a_part_is_wanted() -> None:
    lab = two()
    first, ranks = hold(lab, "a", N1, A, B)
    second = ask(lab, "a", N1, A, B)
    give_back(lab, first, N1)
    give_back(lab, second, N1)
    other = ask(lab, "b", N2, B)
    assert held(lab, other, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
