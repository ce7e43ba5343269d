"""A driver of Ray under Slurm: it takes the turns, and its actors have the devices.

    sbatch --nodes=2 ray.sbatch python ray_train.py --steps 20

Only the driver speaks with tsliced. Its actors call nothing: they are children of Ray's raylets,
which are in the cgroup of the Slurm job, and so they are known to be this job's and moved with it.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import ray

from libtimeslice import connect

#: Parts of it have no types.
cluster: Any = ray
#: For a node to have joined, and for an actor to have been made.
LIMIT_S = 120


class Worker:
    """What has state on a device. One for each device, each a process of its own."""

    def __init__(self, number: int) -> None:
        # Ray has set CUDA_VISIBLE_DEVICES for it.
        import torch

        self._torch = torch
        torch.manual_seed(number)
        self._weights = torch.rand(4096, 4096, device="cuda")

    def roll_out(self) -> float:
        """Does what needs the device; returns what is rewarded."""
        return float((self._weights @ self._weights).mean())

    def train(self, reward: float) -> float:
        """Changes the state on the device; returns how it looks then."""
        self._weights += 1e-3 * reward
        return float(self._weights.sum(dtype=self._torch.float64))


def devices() -> int:
    """Returns how many devices there are, once all of the job's nodes have joined."""
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    end = time.monotonic() + LIMIT_S
    while sum(node["Alive"] for node in cluster.nodes()) < nodes:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of {nodes} nodes have joined within {LIMIT_S} s")
        time.sleep(0.2)
    return int(cluster.cluster_resources().get("GPU", 0))


def main(worker: type = Worker) -> None:
    """Trains with a worker on each device of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    # Where Ray is: RAY_ADDRESS, as ray.sbatch has set it.
    ray.init(log_to_driver=False)
    ts = connect()
    # State is made on the devices: that, too, is in a turn.
    with ts.lease(phase="load"):
        remote: Any = ray.remote(num_cpus=0, num_gpus=1)(worker)
        actors = [remote.remote(number) for number in range(devices())]
        ask(actors, "roll_out")
    for step in range(options.steps):
        with ts.lease(phase="rollout"):
            rewards = ask(actors, "roll_out")
        with ts.phase("reward"):
            reward = sum(rewards) / len(rewards)
            # Others have the devices meanwhile.
            time.sleep(0.5)
        with ts.lease(phase="training"):
            looks = ask(actors, "train", reward)
        ts.progress(step=step, reward=reward)
        print(f"step {step}:", *looks, flush=True)
    ts.close()


def ask(actors: list[Any], method: str, *arguments: object) -> list[float]:
    """Has all actors do something at once, and returns what each of them says."""
    told = [getattr(actor, method).remote(*arguments) for actor in actors]
    found: list[float] = ray.get(told, timeout=LIMIT_S)
    return found


if __name__ == "__main__":
    main()
