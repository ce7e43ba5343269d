"""The bounds of unfairness, whatever a policy wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from world import G1, job

from tsliced.core.model import GroupName, RoundId
from tsliced.core.policy import FairnessBounds, Fifo, Waiter


@dataclass(frozen=True, slots=True)
class Arbitrary:
    """Chooses anybody."""

    random: Random

    def choose(self, group: GroupName, queue: Sequence[Waiter], *, now: float) -> Waiter:
        return self.random.choice(queue)


@dataclass(frozen=True, slots=True)
class Last:
    """Chooses who came last."""

    def choose(self, group: GroupName, queue: Sequence[Waiter], *, now: float) -> Waiter:
        return queue[-1]


def waiter(number: int, *, asked_at: float = 0.0, passed_over: int = 0) -> Waiter:
    return Waiter(
        round=RoundId(number),
        job=job("a"),
        asked_at=asked_at,
        place=number,
        passed_over=passed_over,
    )


def test_fifo_chooses_who_came_first() -> None:
    queue = [waiter(1), waiter(2)]
    assert Fifo().choose(G1, queue, now=0.0) is queue[0]


def test_a_policy_is_followed_within_the_bounds() -> None:
    bounds = FairnessBounds(max_passed_over=2, max_wait_s=10.0)
    queue = [waiter(1, passed_over=1), waiter(2), waiter(3)]
    assert bounds.choose(Last(), G1, queue, now=9.9) is queue[2]


def test_g4_after_max_wait_nobody_who_came_later_goes_first() -> None:
    bounds = FairnessBounds(max_passed_over=2, max_wait_s=10.0)
    queue = [waiter(1), waiter(2)]
    assert bounds.choose(Last(), G1, queue, now=10.0) is queue[0]


def test_g4_the_first_is_passed_over_no_more_often_than_k_times() -> None:
    bounds = FairnessBounds(max_passed_over=2, max_wait_s=10.0)
    queue = [waiter(1, passed_over=2), waiter(2)]
    assert bounds.choose(Last(), G1, queue, now=0.0) is queue[0]


def test_g4_nor_is_anybody_else_who_stands_before_the_chosen_one() -> None:
    bounds = FairnessBounds(max_passed_over=2, max_wait_s=10.0)
    queue = [waiter(1), waiter(2, passed_over=2), waiter(3)]
    assert bounds.choose(Last(), G1, queue, now=0.0) is queue[1]


def test_g4_holds_under_a_policy_that_chooses_at_random() -> None:
    bounds = FairnessBounds(max_passed_over=3, max_wait_s=1e9)
    random = Random(7)
    queue = [waiter(number) for number in range(8)]
    for number in range(8, 500):
        chosen = bounds.choose(Arbitrary(random), G1, queue, now=0.0)
        for other in queue[: queue.index(chosen)]:
            other.passed_over += 1
            assert other.passed_over <= 3
        queue.remove(chosen)
        queue.append(waiter(number))
