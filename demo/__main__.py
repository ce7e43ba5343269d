"""The demo: two RL-like jobs on two devices, first one after the other, then sharing them.

Starts a daemon of its own in a temporary directory, changes nothing outside of it, and cleans up.
Exits with 0 if both jobs ended with the same device state both ways, to the bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from demo.daemon import Daemon, DemoError
from demo.hardware import HOST, ROOT, Hardware, NoHardwareError, choose
from demo.job import Pace
from demo.jobs import RANKS, Outcome, Stage, run_stage
from demo.recording import history_of
from demo.report import count_switches, duty_lines, operation_lines, operations
from demo.table import Screen
from libtimeslice.protocol import Message
from tsliced.observe import timeline
from tsliced.observe.report.figures import figures
from tsliced.observe.report.page import report as report_page
from tsliced.observe.trace import trace

JOBS = ("a", "b")
#: As in RL post-training: the devices are used for about 40 % of an iteration.
PACE = Pace(rollout_s=1.5, reward_s=3.6, training_s=0.9)
STAGE_LIMIT_S = 120.0
OUTPUT = ROOT / "build" / "demo"


def main() -> int:
    """Runs the demo and returns its exit code."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--hardware", choices=("auto", "nvidia", "softcuda"), default="auto")
    parser.add_argument("--iterations", type=int, default=3, help="of each job (default 3)")
    parser.add_argument(
        "--pace", type=float, default=1.0, help="multiplies the length of each phase (default 1)"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="where report and trace go (default build/demo)"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    screen = Screen(sys.stdout)
    try:
        with temporary_directory() as directory, chosen(options.hardware, directory) as hardware:
            plan = Plan(options.iterations, PACE.scaled(options.pace), options.output)
            return conduct(hardware, directory, plan, screen)
    except (DemoError, NoHardwareError) as error:
        screen.line(f"The demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        screen.line("Interrupted; everything is cleaned up.")
        return 128 + signal.SIGINT


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Makes a directory for all that the demo writes, short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="tsliced-demo-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@contextmanager
def chosen(wanted: str, directory: Path) -> Iterator[Hardware]:
    """Chooses the hardware and takes away what it left in memory."""
    hardware = choose(wanted, directory)
    try:
        yield hardware
    finally:
        if hardware.directory is not None:
            shutil.rmtree(hardware.directory, ignore_errors=True)


@dataclass(frozen=True)
class Plan:
    """What every job does."""

    iterations: int
    pace: Pace
    #: The directory of what is left for people to look at.
    output: Path

    def stage(self, name: str, *jobs: str) -> Stage:
        """Returns a stage in which these jobs run side by side."""
        return Stage(
            name=name,
            jobs=jobs,
            iterations=self.iterations,
            pace=self.pace,
            limit_s=STAGE_LIMIT_S,
        )


def conduct(hardware: Hardware, directory: Path, plan: Plan, screen: Screen) -> int:
    """Runs all stages and prints the report; returns the exit code."""
    screen.line(f"Devices: {hardware.description}")
    screen.line(
        f"Jobs: {' and '.join(JOBS)}, {RANKS} ranks each, {hardware.state_mib} MiB of device "
        f"state per rank, {plan.iterations} iterations of rollout {plan.pace.rollout_s:g} s, "
        f"reward {plan.pace.reward_s:g} s (host only), training {plan.pace.training_s:g} s"
    )
    alone = {}
    for job in JOBS:
        screen.line(f"Job {job} alone, without tsliced:")
        stage = plan.stage(f"alone-{job}", job)
        alone[job] = run_stage(stage, hardware, directory)
        screen.line(f"  done in {alone[job].seconds:.1f} s")
    with Daemon(hardware, directory) as daemon:
        screen.line(f"Jobs {' and '.join(JOBS)} together, sharing the devices:")
        screen.begin()
        history = History(daemon, screen)
        stage = plan.stage("shared", *JOBS)
        try:
            together = run_stage(stage, hardware, directory, daemon.socket, history.tick)
            history.finish()
        except DemoError:
            screen.line(f"The daemon's log ends with:\n{daemon.log_tail()}")
            raise
    write_results(plan.output, alone, history, screen)
    return report(screen, alone, together, history)


class History:
    """What the daemon says while the jobs share."""

    def __init__(self, daemon: Daemon, screen: Screen) -> None:
        self._daemon = daemon
        self._screen = screen
        self._next = daemon.events(0)[1]
        self.events: list[Message] = []
        self.began_at = self.ended_at = time.time()

    def tick(self) -> None:
        """Reads and shows the status, and reads what has happened."""
        self._screen.show(self._daemon.status())
        self._read()

    def finish(self) -> None:
        """Reads what is left, after the last job has ended."""
        self.ended_at = time.time()
        self._read()
        self._screen.line()

    def line(self) -> timeline.Timeline:
        """Returns the run as intervals."""
        return timeline.read(self.events, since_unix=self.began_at, until_unix=self.ended_at)

    def _read(self) -> None:
        events, self._next = self._daemon.events(self._next)
        self.events += events


def write_results(
    directory: Path, alone: dict[str, Outcome], history: History, screen: Screen
) -> None:
    """Leaves a report, a trace and the history of the shared run for people to look at."""
    directory.mkdir(parents=True, exist_ok=True)
    line = history.line()
    solo = [timeline.read(history_of(alone[job].results[job][0])) for job in alone]
    page = report_page(history.events, line, solo, host=HOST)
    (directory / "report.html").write_text(page, encoding="utf-8")
    (directory / "trace.json").write_text(json.dumps(trace(line, HOST)), encoding="utf-8")
    events = json.dumps({"schema": 1, "events": history.events})
    (directory / "history.json").write_text(events, encoding="utf-8")
    screen.line(f"Report: {directory / 'report.html'}")
    screen.line(f"Trace, for https://ui.perfetto.dev: {directory / 'trace.json'}")


def report(screen: Screen, alone: dict[str, Outcome], together: Outcome, history: History) -> int:
    """Prints the figures; returns 0 if every rank ended in the same state both ways, else 1."""
    busy = {
        job: sum(result.busy_s for result in results) / len(results)
        for job, results in together.results.items()
    }
    found = figures(history.events, history.line())
    screen.line()
    for line in [
        *duty_lines(found, busy),
        "  held: leased, or moved for a lease; useful: without the moves;",
        "  kernel: devices busy, by NVML for the group, by the ranks' own clocks for a job",
        "",
        *operation_lines(operations(history.events)),
        f"  {count_switches(history.events)} switches",
        "",
    ]:
        screen.line(line)
    one_by_one = sum(outcome.seconds for outcome in alone.values())
    screen.line(
        f"Shared: {together.seconds:.1f} s. One after the other: {one_by_one:.1f} s. "
        f"{one_by_one / together.seconds:.2f} times as fast."
    )
    return compare(screen, alone, together)


def compare(screen: Screen, alone: dict[str, Outcome], together: Outcome) -> int:
    """Prints whether the device states are the same both ways; returns the exit code."""
    wrong = [
        f"job {job} rank {apart.rank}: {apart.digest} alone, {shared.digest} shared"
        for job, outcome in alone.items()
        for apart, shared in zip(outcome.results[job], together.results[job], strict=True)
        if apart.digest != shared.digest
    ]
    ranks = sum(len(results) for results in together.results.values())
    restored = sum(r.restored for results in together.results.values() for r in results)
    verdict = "NO" if wrong else "yes"
    screen.line(
        f"Device state bit-identical to the run alone: {verdict} "
        f"(SHA-256 of {ranks} ranks, which were restored {restored} times)"
    )
    for line in wrong:
        screen.line(f"  {line}")
    if not restored:
        screen.line("  but no state was ever moved, so that proves nothing")
    return 1 if wrong or not restored else 0


if __name__ == "__main__":
    sys.exit(main())
