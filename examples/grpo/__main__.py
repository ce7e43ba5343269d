"""Two training runs, first each alone and then sharing the devices: do they come to the same?

Starts a daemon of its own in a temporary directory, changes nothing outside of it, and cleans up.
Exits with 0 if everything that either run saved is the same both ways, to the bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from demo.__main__ import chosen, temporary_directory
from demo.daemon import Daemon, DemoError
from demo.hardware import ROOT, Hardware, NoHardwareError
from demo.report import count_switches, operation_lines, operations
from examples.grpo.compare import differences, load

#: Each job with the seed of all that is random in it.
JOBS = {"a": 1, "b": 2}
LIMIT_S = 600.0
KILL_LIMIT_S = 10.0


class Run:
    """The processes of one job, and what they write."""

    def __init__(
        self, job: str, options: argparse.Namespace, path: Path, environment: dict[str, str]
    ) -> None:
        self.job, self.path, self._ranks = job, path, options.ranks
        command = ["-m", "examples.grpo.train"]
        if options.ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={options.ranks}", *command]
        values = {"out": path, "seed": JOBS[job], "steps": options.steps, "lora": options.lora}
        arguments = [f"--{name}={value}" for name, value in values.items()]
        self._log = path.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command, *arguments, f"--device={options.device}"],
                cwd=ROOT,
                env={**os.environ, **environment, "TSLICE_JOB_ID": job},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Waits for its end. Raises DemoError if it fails, or takes too long."""
        try:
            status = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            raise DemoError(
                f"job {self.job} {'takes too long' if status is None else f'ended with {status}'}; "
                f"it wrote:\n{self._log.read_text(errors='replace')}"
            )

    def kill(self) -> None:
        """Ends what still runs of it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(KILL_LIMIT_S)

    def saved(self) -> list[Path]:
        """Returns the files of its ranks."""
        return [self.path.with_name(f"{self.path.name}.{rank}") for rank in range(self._ranks)]


def run_together(
    jobs: Sequence[str],
    options: argparse.Namespace,
    directory: Path,
    environment: dict[str, str],
) -> dict[str, Run]:
    """Runs jobs side by side to their end, and returns them by name."""
    directory.mkdir(exist_ok=True)
    runs: dict[str, Run] = {}
    began_at = time.monotonic()
    try:
        for job in jobs:
            runs[job] = Run(job, options, directory / job, environment)
        for run in runs.values():
            run.wait()
    finally:
        for run in runs.values():
            run.kill()
    print(f"job {' and '.join(jobs)}: {time.monotonic() - began_at:.1f} s", flush=True)
    return runs


def conduct(hardware: Hardware, options: argparse.Namespace, directory: Path) -> int:
    """Runs all jobs alone and then together; returns the exit code."""
    print(f"Devices: {hardware.description}", flush=True)
    print("Alone, without tsliced:", flush=True)
    off = {"TSLICE_MODE": "off", **hardware.environment}
    alone = {
        job: run_together([job], options, directory / "alone", off)[job].saved() for job in JOBS
    }
    backend = "torch" if hardware.is_real else "examples.grpo.cpu_backend:CpuTorchBackend"
    with Daemon(hardware, directory, backend=backend) as daemon:
        print("Sharing the devices:", flush=True)
        shares = {"TSLICE_SOCKET": str(daemon.socket), **hardware.environment}
        runs = run_together(list(JOBS), options, directory / "shared", shares)
        events, _ = daemon.events(0)
    print("\n".join(operation_lines(operations(events))))
    switches = count_switches(events)
    wrong = [
        f"{shared.name}{name}"
        for job, files in alone.items()
        for apart, shared in zip(files, runs[job].saved(), strict=True)
        for name in differences(load(apart), load(shared))
    ]
    verdict = "NO: " + ", ".join(wrong) if wrong else "yes"
    print(f"The same to the bit, with {switches} switches: {verdict}")
    if not switches:
        print("  but no state was ever moved, so that proves nothing")
    return 1 if wrong or not switches else 0


def main() -> int:
    """Runs the example and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo", description=__doc__)
    parser.add_argument("--hardware", choices=("nvidia", "cpu"), default="cpu")
    parser.add_argument("--steps", type=int, default=30, help="of each job (default 30)")
    parser.add_argument("--ranks", type=int, default=1, help="of each job, with DDP (default 1)")
    parser.add_argument("--lora", type=int, default=0, help="train and move adapters of this rank")
    options = parser.parse_args()
    options.device = "cuda" if options.hardware == "nvidia" else "cpu"
    # Without a GPU softcuda has the devices that the jobs take turns on, and the CPU the tensors.
    wanted = "nvidia" if options.hardware == "nvidia" else "softcuda"
    try:
        with temporary_directory() as directory, chosen(wanted, directory) as hardware:
            return conduct(hardware, options, directory)
    except (DemoError, NoHardwareError) as error:
        print(f"The example failed: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
