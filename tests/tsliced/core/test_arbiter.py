"""The queue and the holder of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from world import G1, job

from tsliced.core.arbiter import Arbiter
from tsliced.core.model import GroupName, RoundId
from tsliced.core.policy import FairnessBounds, Fifo, Policy, Waiter

BOUNDS = FairnessBounds(max_passed_over=2, max_wait_s=100.0)
R1, R2, R3, R4 = (RoundId(number) for number in range(1, 5))


@dataclass(frozen=True, slots=True)
class Youngest:
    """Last come, first served."""

    def choose(self, group: GroupName, queue: Sequence[Waiter], *, now: float) -> Waiter:
        return queue[-1]


def arbiter(policy: Policy | None = None) -> Arbiter:
    return Arbiter(name=G1, policy=policy or Fifo(), bounds=BOUNDS)


def waiter(round_id: RoundId, *, place: int | None = None) -> Waiter:
    return Waiter(round=round_id, job=job("a"), asked_at=0.0, place=place or round_id)


def test_an_empty_queue_has_no_next() -> None:
    assert arbiter().choose(now=0.0) is None


def test_g4_fifo_chooses_by_arrival() -> None:
    group = arbiter()
    for round_id in (R1, R2, R3):
        group.enqueue(waiter(round_id))
    served = []
    for _ in range(3):
        served.append(group.choose(now=0.0))
        group.leave(group.chosen or R4)
    assert served == [R1, R2, R3]


def test_g1_nobody_is_chosen_while_somebody_has_the_group() -> None:
    group = arbiter()
    group.enqueue(waiter(R1))
    group.enqueue(waiter(R2))
    assert group.choose(now=0.0) == R1
    assert group.choose(now=0.0) is None
    assert group.chosen == R1


def test_who_comes_late_to_a_second_group_keeps_its_place() -> None:
    group = arbiter()
    group.enqueue(waiter(R1))
    assert group.choose(now=0.0) == R1
    for place, round_id in ((4, R4), (3, R3), (2, R2)):
        group.enqueue(waiter(round_id, place=place))
    assert list(group.queue) == [R2, R3, R4]
    group.check_invariants()


def test_who_leaves_the_queue_is_not_chosen_and_leaving_twice_is_harmless() -> None:
    group = arbiter()
    group.enqueue(waiter(R1))
    group.enqueue(waiter(R2))
    group.leave(R1)
    group.leave(R1)
    assert group.choose(now=0.0) == R2


def test_g4_those_before_the_chosen_one_are_passed_over_and_not_more_than_k_times() -> None:
    group = arbiter(Youngest())
    for round_id in (R1, R2):
        group.enqueue(waiter(round_id))
    served = []
    for later in range(10, 15):
        group.enqueue(waiter(RoundId(later)))
        served.append(group.choose(now=0.0))
        group.leave(served[-1] or R4)
    # Twice a latecomer goes first; then the first has been passed over often enough, then the next.
    assert served == [10, 11, R1, R2, 14]


@pytest.mark.parametrize("broken", ["waits while it has it", "waits while it is free", "order"])
def test_a_broken_invariant_is_found(broken: str) -> None:
    group = arbiter()
    group.queue = {R2: waiter(R2), R1: waiter(R1)}
    group.chosen = {"waits while it has it": R1, "waits while it is free": None}.get(broken, R3)
    with pytest.raises(AssertionError):
        group.check_invariants()


def test_a_free_group_is_claimed_without_a_queue_and_only_if_nobody_waits() -> None:
    group = arbiter()
    assert group.claim(R1)
    assert not group.claim(R2)
    group.enqueue(waiter(R3))
    group.leave(R1)
    assert not group.claim(R2)
    assert group.choose(now=0.0) == R3


def test_a_round_waits_once() -> None:
    group = arbiter()
    group.enqueue(waiter(R1))
    with pytest.raises(AssertionError, match="waits once"):
        group.enqueue(waiter(R1))
    group.choose(now=0.0)
    with pytest.raises(AssertionError, match="does not wait for it"):
        group.enqueue(waiter(R1))
