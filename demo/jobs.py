"""Starts the ranks of jobs as processes, watches them, and collects what they tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.daemon import DemoError
from demo.hardware import ROOT, Hardware
from demo.job import Pace, Result

RANKS = 2
#: Longest wait for one lease, seconds.
LEASE_LIMIT_S = 60.0
#: A process that is killed has so long to go; the kernel frees its memory first.
KILL_LIMIT_S = 10.0
TICK_S = 0.2
LOG_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of one or several jobs, side by side."""

    #: Names the files of this stage.
    name: str
    jobs: tuple[str, ...]
    iterations: int
    pace: Pace
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a stage."""

    seconds: float
    #: By job, in the order of ranks.
    results: dict[str, list[Result]]


class Ranks:
    """The processes of a stage."""

    def __init__(
        self, stage: Stage, hardware: Hardware, directory: Path, socket: Path | None
    ) -> None:
        self._stage = stage
        self._hardware = hardware
        self._socket = socket
        self._directory = directory
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts all ranks of all jobs at once."""
        for job in self._stage.jobs:
            for rank in range(RANKS):
                with self._file(job, rank, "log").open("wb") as log:
                    self._processes[job, rank] = subprocess.Popen(
                        self._command(job, rank),
                        cwd=ROOT,
                        env=self._environment(job, rank),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )

    def are_running(self) -> bool:
        """Tells whether any rank still runs; raises DemoError if one has failed."""
        codes = {key: process.poll() for key, process in self._processes.items()}
        for (job, rank), code in codes.items():
            if code:
                ending = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise DemoError(
                    f"rank {rank} of job {job} failed with {ending}; it wrote:\n"
                    f"{self._log_tail(job, rank)}"
                )
        return None in codes.values()

    def results(self) -> dict[str, list[Result]]:
        """Returns what the ranks told, when all have ended."""
        return {
            job: [
                Result(**json.loads(self._file(job, rank, "json").read_text()))
                for rank in range(RANKS)
            ]
            for job in self._stage.jobs
        }

    def kill(self) -> None:
        """Ends what still runs; a frozen rank hears nothing but SIGKILL."""
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait(KILL_LIMIT_S)

    def _command(self, job: str, rank: int) -> Sequence[str]:
        stage = self._stage
        values = {
            "job": job,
            "rank": rank,
            "iterations": stage.iterations,
            "state-mib": self._hardware.state_mib,
            "rollout": stage.pace.rollout_s,
            "reward": stage.pace.reward_s,
            "training": stage.pace.training_s,
            "timeout": LEASE_LIMIT_S,
            "result": self._file(job, rank, "json"),
        }
        return [
            sys.executable,
            "-m",
            "demo.job",
            *(f"--{name}={value}" for name, value in values.items()),
        ]

    def _environment(self, job: str, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            **self._hardware.environment,
            "TSLICE_SOCKET": str(self._socket or ""),
            "TSLICE_MODE": "off" if self._socket is None else "require",
            "TSLICE_JOB_ID": job,
            "WORLD_SIZE": str(RANKS),
            "RANK": str(rank),
        }

    def _file(self, job: str, rank: int, ending: str) -> Path:
        return self._directory / f"{self._stage.name}-{job}-{rank}.{ending}"

    def _log_tail(self, job: str, rank: int) -> str:
        lines = self._file(job, rank, "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:]) or "(nothing)"


@contextmanager
def running(
    stage: Stage, hardware: Hardware, directory: Path, socket: Path | None
) -> Iterator[Ranks]:
    """Starts the ranks of a stage and ends those that are left when the ``with`` ends."""
    ranks = Ranks(stage, hardware, directory, socket)
    try:
        ranks.start()
        yield ranks
    finally:
        ranks.kill()


def run_stage(
    stage: Stage,
    hardware: Hardware,
    directory: Path,
    socket: Path | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Outcome:
    """Runs a stage to its end, with a ``tick`` every now and then.

    Without the ``socket`` of a daemon the job has the devices to itself and every lease is granted
    at once. Raises DemoError if a rank fails or the stage takes longer than its limit.
    """
    began_at = time.monotonic()
    with running(stage, hardware, directory, socket) as ranks:
        while ranks.are_running():
            if time.monotonic() - began_at > stage.limit_s:
                raise DemoError(f"stage {stage.name} is not done after {stage.limit_s:.0f} s")
            tick()
            time.sleep(TICK_S)
        return Outcome(seconds=time.monotonic() - began_at, results=ranks.results())
