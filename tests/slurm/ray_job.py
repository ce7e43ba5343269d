"""The driver of examples/slurm, with workers that have their state on softcuda's devices."""

from __future__ import annotations

import os

import rank

from examples.slurm.ray_train import main

#: Those of two jobs do not fit on a device of 64 MiB.
STATE_MIB = 40


class Worker:
    """As that of the example."""

    def __init__(self, number: int) -> None:
        rank.context()
        rank.fill(STATE_MIB, seed=100 * int(os.environ["SLURM_JOB_ID"]) + number)
        self._digest = rank.digest()

    def roll_out(self) -> float:
        assert rank.digest() == self._digest, "its state is as it left it"
        return 1.0

    def train(self, reward: float) -> float:
        assert rank.digest() == self._digest
        return float(os.getpid())


if __name__ == "__main__":
    main(Worker)
