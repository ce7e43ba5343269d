"""One rank of an RL-like job: its device state, and how each phase changes it.

The state depends on the seed and on nothing else: not on time, and not on how often a phase was
interrupted. So its SHA-256 at the end is the same whether the job shared its devices or not, and a
single byte that a snapshot lost or swapped would show.

Layout of the state: the weights, the trajectories in the last quarter, and one block of scratch.
"""

from __future__ import annotations

import hashlib
import random
from typing import Protocol

BLOCK = 1 << 20
#: How many changes one training step makes to the weights.
CHANGES = 24


class Memory(Protocol):
    """Device memory as `demo.cuda.DeviceBuffer` offers it; offsets and lengths in bytes."""

    size: int

    def fill(self, offset: int, value: int, length: int) -> None: ...
    def copy(self, target: int, source: int, length: int) -> None: ...
    def write(self, offset: int, data: bytes) -> None: ...
    def read(self, offset: int, length: int) -> bytes: ...


class Workload:
    """The device work of one rank. The memory holds at least eight blocks, and whole ones."""

    def __init__(self, memory: Memory, seed: str) -> None:
        self._memory = memory
        self._seed = seed
        if memory.size < 8 * BLOCK or memory.size % BLOCK:
            raise ValueError(f"{memory.size} bytes of state are not eight or more blocks of 1 MiB")
        self._blocks = memory.size // BLOCK - 1
        self._first_trajectory = self._blocks * 3 // 4
        #: Grows by every sample, so that state which was wrong and then overwritten shows as well.
        self._history = hashlib.sha256()

    def load(self) -> None:
        """Writes the first state: noise into every fourth block, constants into the others."""
        noise = random.Random(f"{self._seed}/load")
        for block in range(self._blocks):
            if block % 4:
                self._memory.fill(block * BLOCK, noise.randrange(256), BLOCK)
            else:
                self._memory.write(block * BLOCK, noise.randbytes(BLOCK))

    def rollout(self, iteration: int) -> bytes:
        """Fills the trajectories from new noise and the weights; returns a sample of them."""
        noise = random.Random(f"{self._seed}/rollout/{iteration}")
        self._memory.write(self._first_trajectory * BLOCK, noise.randbytes(BLOCK))
        for block in range(self._first_trajectory + 1, self._blocks):
            source = noise.choice([block - 1, noise.randrange(self._first_trajectory)])
            self._memory.copy(block * BLOCK, source * BLOCK, BLOCK)
        sample = self._memory.read(noise.randrange(self._blocks) * BLOCK, BLOCK)
        self._history.update(sample)
        return sample

    def reward(self, sample: bytes) -> float:
        """Judges a sample, on the host alone; returns a number from 0 up to 1."""
        return int.from_bytes(hashlib.sha256(sample).digest()[:6], "big") / (1 << 48)

    def train(self, iteration: int, reward: float) -> None:
        """Changes the weights by the trajectories and the reward."""
        choice = random.Random(f"{self._seed}/train/{iteration}/{reward!r}")
        for _ in range(CHANGES):
            target = choice.randrange(self._first_trajectory)
            source = choice.randrange(self._first_trajectory, self._blocks)
            self._memory.copy(target * BLOCK, source * BLOCK, BLOCK)
            # A part of a block, at no boundary of a page.
            offset = target * BLOCK + choice.randrange(BLOCK // 2)
            self._memory.fill(offset, choice.randrange(256), choice.randrange(1, BLOCK // 2))

    def again(self) -> None:
        """Does device work that leaves no trace: copies a block to the scratch block."""
        self._memory.copy(self._blocks * BLOCK, 0, BLOCK)

    def digest(self) -> str:
        """Returns the SHA-256 over the state without scratch and the samples of every iteration."""
        whole = self._history.copy()
        for block in range(self._blocks):
            whole.update(self._memory.read(block * BLOCK, BLOCK))
        return whole.hexdigest()
