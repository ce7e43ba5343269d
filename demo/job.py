"""One rank of a job: what a researcher's training script does, with tsliced's calls in it.

Rollout and training run under a lease; between them the reward is computed on the host, and the
devices are free for others. Nothing else distinguishes it from a script that has them to itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from demo.cuda import DeviceBuffer, Driver
from demo.workload import BLOCK, Workload
from libtimeslice import TimeSlice, connect

#: What one iteration is said to make: the trajectories are noise.
TOKENS = 4096


@dataclass(frozen=True)
class Pace:
    """How long the phases of one iteration take, in seconds."""

    rollout_s: float
    reward_s: float
    training_s: float

    def scaled(self, factor: float) -> Pace:
        """Returns a pace whose phases take ``factor`` times as long."""
        return Pace(self.rollout_s * factor, self.reward_s * factor, self.training_s * factor)


@dataclass
class Result:
    """What a rank tells when it is done; times in seconds."""

    job: str
    rank: int
    digest: str
    #: Device work under leases, by this rank's own clock.
    busy_s: float = 0.0
    #: In the queue, switches included.
    waited_s: float = 0.0
    leases: int = 0
    #: Leases for which the state had to be brought back.
    restored: int = 0
    #: Name, whether it was on the devices, begin and end in Unix seconds.
    phases: list[tuple[str, bool, float, float]] = field(default_factory=list)
    #: What it told, and when.
    progress: list[tuple[float, dict[str, float]]] = field(default_factory=list)


class Rank:
    """One rank: its state on one device, and the clock of its device work."""

    def __init__(self, options: argparse.Namespace, ts: TimeSlice) -> None:
        self._options = options
        self._ts = ts
        self._pace = Pace(options.rollout, options.reward, options.training)
        self.result = Result(options.job, options.rank, digest="")

    def run(self) -> Result:
        """Loads the state, goes through all iterations and returns the result."""
        options = self._options
        with self._lease("load"):
            driver = Driver()
            ordinal = options.rank % driver.device_count()
            buffer = DeviceBuffer(driver, ordinal, options.state_mib * BLOCK)
            state = Workload(buffer, f"{options.job}/{options.rank}")
            state.load()
        for iteration in range(options.iterations):
            with self._lease("rollout"):
                sample = state.rollout(iteration)
                self._work(driver, state, self._pace.rollout_s)
            began_at = time.time()
            with self._ts.phase("reward"):
                reward = state.reward(sample)
                time.sleep(self._pace.reward_s)
            self.result.phases.append(("reward", False, began_at, time.time()))
            with self._lease("training"):
                state.train(iteration, reward)
                self._work(driver, state, self._pace.training_s)
            figures = {"step": iteration + 1, "reward": reward, "tokens": TOKENS}
            if options.rank == 0:
                self._ts.progress(**figures)
                self.result.progress.append((time.time(), figures))
        with self._lease("checksum"):
            self.result.digest = state.digest()
        return self.result

    def _work(self, driver: Driver, state: Workload, seconds: float) -> None:
        """Keeps the device busy for a time, as kernels would, without a trace in the state."""
        if driver.keep_busy(seconds):
            return
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            state.again()

    def _lease(self, phase: str) -> _Counted:
        return _Counted(self, phase)


class _Counted:
    """A lease that adds what it cost to the rank's result."""

    def __init__(self, rank: Rank, phase: str) -> None:
        self._rank = rank
        self._phase = phase
        self._lease = rank._ts.lease(phase=phase, timeout=rank._options.timeout)
        self._began_at = self._began_at_unix = 0.0

    def __enter__(self) -> None:
        lease = self._lease.__enter__()
        result = self._rank.result
        result.leases += 1
        result.waited_s += lease.waited_s
        result.restored += lease.restored
        self._began_at, self._began_at_unix = time.monotonic(), time.time()

    def __exit__(self, *exc_info: object) -> None:
        result, began_at = self._rank.result, self._began_at_unix
        result.busy_s += time.monotonic() - self._began_at
        result.phases.append((self._phase, True, began_at, time.time()))
        self._lease.__exit__(*exc_info)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of a rank."""
    parser = argparse.ArgumentParser(prog="demo.job", description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--state-mib", type=int, required=True, help="device state of this rank")
    parser.add_argument("--rollout", type=float, required=True, help="seconds of device work")
    parser.add_argument("--reward", type=float, required=True, help="seconds on the host alone")
    parser.add_argument("--training", type=float, required=True, help="seconds of device work")
    parser.add_argument("--timeout", type=float, default=60.0, help="longest wait for a lease")
    parser.add_argument("--result", type=Path, required=True, help="where the JSON goes")
    return parser.parse_args(arguments)


def main() -> int:
    """Runs one rank to its end."""
    options = parse(sys.argv[1:])
    with connect() as ts:
        result = Rank(options, ts).run()
    options.result.write_text(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
