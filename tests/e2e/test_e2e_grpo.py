"""Real training runs that take turns (`examples/grpo`): they come to the same, to the bit.

Four of them share two groups at the same time: one that moves all of its tensors, one of two ranks,
one of adapters that moves nothing else, and one whose sampler and trainer have groups apart.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import REPOSITORY, Host, build_softcuda, own, path_with, until

from examples.grpo.compare import differences, load
from examples.grpo.grpo import Policy, adapt

#: Twelve processes import torch, half of them at a time.
pytestmark = pytest.mark.timeout(300)
LIMIT_S = 130.0

STEPS = 6
WIDTH, LORA = 64, 4


@dataclass(frozen=True)
class Job:
    """How a job is started."""

    seed: int
    program: str = "train"
    ranks: int = 1
    lora: int = 0
    #: What its processes call their jobs, where that is not its own name.
    ids: tuple[str, ...] = ()


JOBS = {
    "whole": Job(seed=1),
    "ranks": Job(seed=2, ranks=2),
    "adapters": Job(seed=3, lora=LORA),
    "split": Job(seed=4, program="split", ids=("split-sampler", "split-trainer")),
}


@dataclass(frozen=True)
class Story:
    """What the jobs saved, alone and together, and what the daemon did meanwhile."""

    alone: Mapping[str, list[Path]]
    together: Mapping[str, list[Path]]
    events: list[dict[str, Any]]

    def moved(self, job: str, verb: str) -> set[int]:
        """Returns how many bytes were moved of each rank of a job, in each of its moves."""
        return {
            event["bytes"]
            for event in self.events
            if (event["kind"], event.get("verb")) == ("operation", verb)
            and event["job"] in map(own, JOBS[job].ids or (job,))
        }


def start(name: str, directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts all processes of a job, which save what came of it into the directory."""
    job = JOBS[name]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
    values = {
        "out": directory / name,
        "seed": job.seed,
        "lora": job.lora,
        "steps": STEPS,
        "width": WIDTH,
    }
    command = [
        *[sys.executable, *(torchrun if job.ranks > 1 else [])],
        *[
            "-m",
            f"examples.grpo.{job.program}",
            *(f"--{key}={value}" for key, value in values.items()),
        ],
    ]
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env={
                **environment,
                "TSLICE_JOB_ID": name,
                "TSLICE_GROUPS": "trainer=g1;sampler=g2",
                "PYTHONPATH": path_with(REPOSITORY),
                # (torch says that there is no numpy, which nobody here needs.)
                "PYTHONWARNINGS": "ignore",
            },
            stdout=log,
            stderr=log,
        )


def finish(
    running: Mapping[str, subprocess.Popen[bytes]], directory: Path
) -> dict[str, list[Path]]:
    """Waits for jobs, and returns what each of their ranks saved."""
    for name, process in running.items():
        status = process.wait(LIMIT_S)
        assert status == 0, (directory / f"{name}.log").read_text(errors="replace")
    return {name: [directory / f"{name}.{n}" for n in range(JOBS[name].ranks)] for name in running}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Runs all jobs without a daemon, and then again under one."""
    host = Host(
        build_softcuda(),
        settings={"daemon": {"backend": "examples.grpo.cpu_backend:CpuTorchBackend"}},
    )
    started: list[subprocess.Popen[bytes]] = []

    def run(directory: Path, **environment: str) -> dict[str, subprocess.Popen[bytes]]:
        running = {name: start(name, directory, host.variables(**environment)) for name in JOBS}
        started.extend(running.values())
        return running

    try:
        directory = tmp_path_factory.mktemp("alone")
        alone = finish(run(directory, TSLICE_MODE="off"), directory)
        host.start_daemon()
        host.ask("drain", groups=None, device=None, park=False, why="until all are there")
        directory = tmp_path_factory.mktemp("together")
        running = run(directory)
        everybody = {own(each) for name, job in JOBS.items() for each in job.ids or (name,)}
        until(lambda: host.known_waiters() == everybody, "all are there", LIMIT_S)
        host.ask("undrain", groups=None, device=None)
        together = finish(running, directory)
        yield Story(alone, together, host.events())
    finally:
        for process in started:
            process.kill()
            process.wait()
        host.close()


@pytest.mark.parametrize("job", JOBS)
def test_a_training_run_that_shares_its_device_comes_to_what_it_does_alone_g12(
    story: Story, job: str
) -> None:
    for alone, together in zip(story.alone[job], story.together[job], strict=True):
        saved = load(together)
        assert len(saved["losses"]) == 2 * len(saved["rewards"]) == 2 * STEPS
        assert list(differences(load(alone), saved)) == []
    assert story.moved(job, "restore"), "it was away meanwhile"


def test_a_job_that_trains_adapters_moves_these_with_what_belongs_to_them_and_nothing_else(
    story: Story,
) -> None:
    (path,) = story.together["adapters"]
    told = torch.load(path, weights_only=True)
    learned = {name: t for name, t in told["policy"].items() if LORA in t.shape}
    size = sum(tensor.nbytes for tensor in learned.values())
    # Gradients go with what they are of; the optimizer has two moments and a count for each.
    regions = {"adapters": 2 * size, "optimizer": 2 * size + 4 * len(learned), "sampler": size}
    assert told["moved"] == regions
    assert max(story.moved("adapters", "snapshot")) == sum(regions.values())
    torch.manual_seed(JOBS["adapters"].seed)
    base = Policy(WIDTH)
    adapt(base, LORA)
    rest = {name: t for name, t in base.state_dict().items() if name not in learned}
    assert sum(tensor.nbytes for tensor in rest.values()) > 4 * size
    untouched = {name: t for name, t in told["policy"].items() if name not in learned}
    assert list(differences(dict(rest), untouched)) == []
