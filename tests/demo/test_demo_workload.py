"""The demo's workload must depend on its seed alone, and its digest on every byte."""

from __future__ import annotations

import pytest

from demo.workload import BLOCK, Workload

SIZE = 16 * BLOCK


class HostMemory:
    """Device memory for tests: an array of the host."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = bytearray(size)

    def fill(self, offset: int, value: int, length: int) -> None:
        self.data[offset : offset + length] = bytes([value]) * length

    def copy(self, target: int, source: int, length: int) -> None:
        assert target + length <= source or source + length <= target, "the ranges overlap"
        self.data[target : target + length] = self.data[source : source + length]

    def write(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


def run(seed: str, *, disturb_after: int | None = None, extra_work: int = 0) -> str:
    """Returns the digest after two iterations; flips one bit after an iteration if asked to."""
    memory = HostMemory(SIZE)
    workload = Workload(memory, seed)
    workload.load()
    for iteration in range(2):
        sample = workload.rollout(iteration)
        for _ in range(extra_work):
            workload.again()
        workload.train(iteration, workload.reward(sample))
        if iteration == disturb_after:
            memory.data[3 * BLOCK + 17] ^= 1
    return workload.digest()


def test_the_digest_is_the_same_for_the_same_seed_however_much_work_leaves_no_trace() -> None:
    assert run("a/0") == run("a/0", extra_work=5)


def test_the_digest_differs_between_ranks_and_jobs() -> None:
    assert len({run("a/0"), run("a/1"), run("b/0")}) == 3


def test_one_flipped_bit_at_the_end_changes_the_digest() -> None:
    assert run("a/0") != run("a/0", disturb_after=1)


def test_every_iteration_changes_both_parts_of_the_state() -> None:
    memory = HostMemory(SIZE)
    workload = Workload(memory, "a/0")
    workload.load()
    seen = [bytes(memory.data)]
    for iteration in range(3):
        reward = workload.reward(workload.rollout(iteration))
        workload.train(iteration, reward)
        seen.append(bytes(memory.data))
    weights = {state[: 11 * BLOCK] for state in seen}
    trajectories = {state[11 * BLOCK : 15 * BLOCK] for state in seen}
    assert len(weights) == len(trajectories) == 4


def test_rewards_lie_between_0_and_1_and_follow_the_sample() -> None:
    workload = Workload(HostMemory(SIZE), "a/0")
    rewards = [workload.reward(bytes([n])) for n in range(50)]
    assert len(set(rewards)) == 50
    assert all(0 <= reward < 1 for reward in rewards)


@pytest.mark.parametrize("size", [7 * BLOCK, 8 * BLOCK + 1, 0])
def test_a_state_of_a_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="blocks of 1 MiB"):
        Workload(HostMemory(size), "a/0")
