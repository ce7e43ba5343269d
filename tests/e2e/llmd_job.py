"""A job in the shape of llm-d's published example: two groups, two decorated phases, and a reward
between them; only the import and the target are of tsliced.

Run as ``llmd_job.py JOB STEPS``; it writes one word for each phase, and ``done``. Each phase runs
in a process of its own with state on the devices of its group, as an engine and a trainer do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from libtimeslice.compat import TimeSliceOrchestratorClient

STATE_MIB = 40

job, steps = sys.argv[1], int(sys.argv[2])
target = "unix:" + os.environ["TSLICE_SOCKET"]
samplers = TimeSliceOrchestratorClient(target, job_id=job, group_id="samplers")
trainers = TimeSliceOrchestratorClient(target, job_id=job, group_id="trainers")


class Engine:
    """A process that computes on a device when it is told to."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TSLICE_JOB_ID": job},
            text=True,
        )

    def load(self, seed: int) -> None:
        self.ask("context", device=self._device)
        self.ask("fill", mib=STATE_MIB, seed=seed)
        self.loaded = self.ask("digest")

    def compute(self) -> str:
        digest = self.ask("digest")
        return "intact" if digest == self.loaded else "broken"

    def ask(self, name: str, **arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["value"]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


sampler, trainer = Engine(device=0), Engine(device=1)


@samplers.on_accelerators()
def deploy_sampler() -> None:
    sampler.load(seed=hash(job) & 0xFFFF)


@trainers.on_accelerators()
def deploy_trainer() -> None:
    trainer.load(seed=hash(job) & 0xFFFF)


@samplers.on_accelerators()
def sample() -> str:
    return sampler.compute()


@trainers.on_accelerators()
def train() -> str:
    return trainer.compute()


def reward() -> str:
    return "rewarded"


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


deploy_sampler()
deploy_trainer()
for _ in range(steps):
    for phase in (sample, reward, train):
        say(phase())
say("done")
for engine in (sampler, trainer):
    engine.end()
for client in (samplers, trainers):
    client.close()
