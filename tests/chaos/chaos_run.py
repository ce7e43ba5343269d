"""A storm: many clients on a few groups, and everything that may happen to them and the daemon.

``make chaos DURATION=60 SEED=n``. The seed says what is done when, and to whom; how the processes
run against each other it cannot say. After the storm everything is mended, and then:

* nothing in the clients' histories is impossible (`judging`),
* whoever was waiting has an answer within `ANSWER_LIMIT_S`,
* every client that is left has its state intact, or a coded fault that was injected into it,
* the daemon never ended by itself, and leaves no worker behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import HERE, REPOSITORY, Host, Pending, Rank, Settings, build_softcuda, path_with
from judging import lines_of

CLIENT = Path(__file__).with_name("chaos_client.py")
GROUPS = 4
CLIENTS = 40
#: From the end of the storm to the answer for the last of those who were waiting, on a machine that
#: has nothing else to do.
ANSWER_LIMIT_S = 5.0
#: For the last turn of every client.
FINISH_LIMIT_S = 60.0
SETTINGS: Settings = {
    "limits": {
        "freeze_timeout_s": 1.0,
        "retry_min_s": 0.05,
        "retry_max_s": 0.3,
        # Stopped and refused for as long as the storm lasts is no reason to be given up.
        "max_evict_tries": 1000,
        # Nobody is stopped for so long.
        "grace_s": 60.0,
        "ack_s": 60.0,
    },
    "scan": {"interval_s": 0.5},
    **{f"groups.g{number}": {"devices": [str(number)]} for number in range(GROUPS)},
}
#: What may happen, and how often in proportion.
KINDS = {
    "kill a client": 6,
    "stop a client": 6,
    "kill the daemon": 3,
    "stop the daemon": 1,
    "freeze the daemon": 1,
    "refuse locks": 2,
    "delay operations": 3,
    "fail a snapshot": 1,
    "fail a restore": 1,
    "hang": 1,
    "die in an operation": 2,
}
#: Words of the log that no storm explains.
BUGS = ("broken_invariant", " bug ", "Traceback (most")
#: The pause between two of them, seconds on average.
PAUSE_S = 0.35


@dataclass(slots=True)
class Seat:
    """A job's place in the storm; its process may be killed, and another takes the seat."""

    number: int
    homes: list[int]
    rank: Rank
    #: Until then it is stopped.
    stopped_until: float = 0.0
    #: It suffers from what was injected, and is killed then.
    doomed_at: float = 0.0
    finished: Pending | None = None

    @property
    def injured(self) -> bool:
        return self.doomed_at > 0


@dataclass(slots=True)
class Storm:
    """One run. `seed` and `duration_s` say what happens."""

    seed: int
    duration_s: float
    host: Host
    random: random.Random
    seats: list[Seat] = field(default_factory=list)
    #: Lines of the faults file, and when each of them ends.
    faults: dict[str, float] = field(default_factory=dict)
    #: Processes that were given a fault of their own.
    injured: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    answered_s: float = 0.0
    results: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    _started: int = 0
    _frozen_until: float = 0.0

    # --- the storm ----------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Runs it all, and returns what is wrong."""
        self.host.start_daemon()
        for number in range(CLIENTS):
            self.seats.append(Seat(number, self._homes(number), self._start(number)))
        end = time.monotonic() + self.duration_s
        for pause_s, kind in self._schedule():
            self._pass_time(min(pause_s, max(0.0, end - time.monotonic())))
            if time.monotonic() >= end:
                break
            self.counts[kind] += 1
            ACTS[kind](self)
            self._watch_daemon()
        self._mend()
        return [*self._await_answers(), *self._await_results(), *self._judge()]

    def _schedule(self) -> Iterator[tuple[float, str]]:
        kinds, weights = list(KINDS), list(KINDS.values())
        while True:
            pause_s = self.random.expovariate(1 / PAUSE_S)
            yield pause_s, self.random.choices(kinds, weights)[0]

    def _homes(self, number: int) -> list[int]:
        """Returns on which groups' devices a client has its state."""
        if number % 8 == 6:
            return []
        first = number % GROUPS
        return [first, (first + 1) % GROUPS] if number % 8 == 7 else [first]

    def _start(self, number: int) -> Rank:
        self._started += 1
        seed = self.seed * 1_000_003 + self._started
        homes = ",".join(map(str, self._homes(number))) or "-"
        return self.host.rank(
            f"job{number}",
            program=str(CLIENT),
            arguments=[str(seed), homes, str(GROUPS)],
            PYTHONPATH=path_with(HERE),
        )

    def _pass_time(self, seconds: float) -> None:
        """Lets time pass, and what is to end meanwhile end."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for seat in self.seats:
                if 0 < seat.stopped_until <= now:
                    self._continue(seat)
                if 0 < seat.doomed_at <= now:
                    self._replace(seat)
            over = [line for line, end in self.faults.items() if end <= now]
            for line in over:
                del self.faults[line]
            if over:
                self.host.fault(*self.faults)
            if 0 < self._frozen_until <= now:
                self._thaw_daemon()
            if now >= until:
                return
            time.sleep(min(0.02, until - now))

    def _watch_daemon(self) -> None:
        daemon = self.host.daemon
        assert daemon is not None
        assert daemon.poll() is None, f"the daemon ended by itself, with status {daemon.poll()}"

    # --- what happens -------------------------------------------------------------------------

    def _seat(self, *, at_home: bool = False) -> Seat:
        fit = [s for s in self.seats if not s.stopped_until and not s.injured]
        fit = [s for s in fit if s.homes] if at_home else fit
        return self.random.choice(fit or self.seats)

    def kill_client(self) -> None:
        self._replace(self._seat())

    def _replace(self, seat: Seat) -> None:
        seat.rank.close()
        seat.stopped_until = seat.doomed_at = 0.0
        seat.rank = self._start(seat.number)

    def stop_client(self) -> None:
        seat = self._seat()
        if not seat.stopped_until:
            seat.rank.stop()
            seat.stopped_until = time.monotonic() + self.random.uniform(0.02, 1.0)

    def _continue(self, seat: Seat) -> None:
        seat.stopped_until = 0.0
        seat.rank.process.send_signal(signal.SIGCONT)

    def kill_daemon(self) -> None:
        self._frozen_until = 0.0
        self.host.kill_daemon()
        self.host.start_daemon()

    def stop_daemon(self) -> None:
        self._thaw_daemon()
        assert self.host.stop_daemon() == 0, "the daemon ended badly"
        self.host.start_daemon()

    def freeze_daemon(self) -> None:
        assert self.host.daemon is not None
        self.host.daemon.send_signal(signal.SIGSTOP)
        self._frozen_until = time.monotonic() + self.random.uniform(0.02, 0.5)

    def _thaw_daemon(self) -> None:
        self._frozen_until = 0.0
        assert self.host.daemon is not None
        self.host.daemon.send_signal(signal.SIGCONT)

    def _inject(self, action: str, *, for_s: float, doom: bool = False, hurts: bool = True) -> None:
        seat = self._seat(at_home=True)
        operation, _, what = action.partition(" ")
        self.faults[f"{operation} {seat.rank.pid} * {what}"] = time.monotonic() + for_s
        self.host.fault(*self.faults)
        if hurts:
            self.injured.add(seat.rank.pid)
        if doom and not seat.injured:
            # Who cannot leave its devices would be in the others' way for ever.
            seat.doomed_at = time.monotonic() + for_s + self.random.uniform(0.0, 1.0)

    def refuse_locks(self) -> None:
        self._inject("lock error:600", for_s=self.random.uniform(0.1, 1.0), hurts=False)

    def delay_operations(self) -> None:
        operation = self.random.choice(("lock", "checkpoint", "restore", "unlock", "state"))
        delay_ms = self.random.randrange(10, 400)
        self._inject(f"{operation} delay:{delay_ms}", for_s=1.0, hurts=False)

    def fail_snapshot(self) -> None:
        code = self.random.choice((2, 304, 801, 999))
        action = self.random.choice(("error", "fail"))
        self._inject(f"checkpoint {action}:{code}", for_s=1.0, doom=True)

    def fail_restore(self) -> None:
        self._inject(f"restore error:{self.random.choice((2, 304, 999))}", for_s=1.0)

    def hang(self) -> None:
        operation = self.random.choice(("lock", "checkpoint", "restore", "unlock"))
        self._inject(f"{operation} hang", for_s=1.0, doom=True)

    def die(self) -> None:
        operation = self.random.choice(("lock", "checkpoint", "restore", "unlock"))
        action = self.random.choice(("segv", "die-before", "die-after"))
        self._inject(f"{operation} {action}", for_s=1.0, doom=True)

    # --- afterwards ---------------------------------------------------------------------------

    def _mend(self) -> None:
        """Ends all that was injected; nothing new goes wrong from here on."""
        self.faults.clear()
        self.host.fault()
        self._thaw_daemon()
        for seat in self.seats:
            if seat.stopped_until:
                self._continue(seat)
            if seat.doomed_at or seat.rank.process.poll() is not None:
                self._replace(seat)
        self._watch_daemon()

    def _await_answers(self) -> list[str]:
        """Waits for the answers to all that was asked before the end of the storm."""
        began_at, limit_s = time.monotonic(), ANSWER_LIMIT_S * busyness()
        for seat in self.seats:
            # What they ask from now on is their last turn.
            seat.finished = seat.rank.start("finish")
        while True:
            waiting = [a for a in self.host.judge().pending() if a.invoked_at < began_at]
            self.answered_s = time.monotonic() - began_at
            if not waiting:
                return []
            if self.answered_s > limit_s:
                return [f"no answer within {limit_s:.1f} s: {a}" for a in waiting]
            time.sleep(0.05)

    def _await_results(self) -> list[str]:
        problems = []
        end = time.monotonic() + FINISH_LIMIT_S
        for seat in self.seats:
            name, pid = f"job{seat.number}", seat.rank.pid
            assert seat.finished is not None
            try:
                told = seat.finished.wait(max(0.1, end - time.monotonic()))
            except AssertionError as error:
                problems.append(f"{name} (pid {pid}): {error}")
                continue
            result = told["result"]
            self.results[result] += 1
            self.turns += told["turns"]
            if result != "intact" and (pid not in self.injured or result == "broken"):
                problems.append(f"{name} (pid {pid}) ended with {result!r}, which nothing explains")
        return problems

    def _judge(self) -> list[str]:
        judged = self.host.judge()
        log = self.host.log.read_text(errors="replace").splitlines()
        robbed = [a for a in judged.acquires if a.taken_back and a.alive]
        return [
            *map(str, judged.violations),
            *(f"taken back though it lives: {a}" for a in robbed if a.pid not in self.injured),
            *(f"in the log: {line}" for line in log if any(mark in line for mark in BUGS)),
            *map(str, lines_of(self.host.histories, "broken")),
        ]

    def report(self) -> str:
        """Returns what happened, in a few lines."""
        judged = self.host.judge()
        grants = sum(acquire.granted for acquire in judged.acquires)
        happened = ", ".join(f"{name}: {count}" for name, count in sorted(self.counts.items()))
        ends = ", ".join(f"{name}: {count}" for name, count in self.results.most_common())
        return (
            f"seed {self.seed}: {len(judged.acquires)} acquires, {grants} grants in "
            f"{self.duration_s:g} s by {self._started} processes\n  {happened}\n  clients left: "
            f"{ends}; the last waiter had its answer {self.answered_s:.2f} s after the storm\n  "
            f"processes that want a core: {busyness():.1f}"
        )


ACTS: dict[str, Callable[[Storm], None]] = {
    "kill a client": Storm.kill_client,
    "stop a client": Storm.stop_client,
    "kill the daemon": Storm.kill_daemon,
    "stop the daemon": Storm.stop_daemon,
    "freeze the daemon": Storm.freeze_daemon,
    "refuse locks": Storm.refuse_locks,
    "delay operations": Storm.delay_operations,
    "fail a snapshot": Storm.fail_snapshot,
    "fail a restore": Storm.fail_restore,
    "hang": Storm.hang,
    "die in an operation": Storm.die,
}


def busyness() -> float:
    """Returns how many processes want each core, at least one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run(seed: int, duration_s: float, *, backend: str = "cuda") -> list[str]:
    """Runs a storm, prints what happened in it, and returns what is wrong."""
    print(f"chaos: seed {seed}, {duration_s:g} s", flush=True)
    settings = {**SETTINGS, "daemon": {"backend": backend}}
    host = Host(build_softcuda(), settings=settings, SOFTCUDA_DEVICES=str(GROUPS))
    storm = Storm(seed=seed, duration_s=duration_s, host=host, random=random.Random(seed))
    problems: list[str] = []
    try:
        problems = storm.run()
        print(storm.report(), flush=True)
    except BaseException as error:
        problems = [f"{type(error).__name__}: {error}"]
        if not isinstance(error, Exception):
            raise
    finally:
        if problems:
            kept = REPOSITORY / "build" / f"chaos-{seed}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(host.directory, kept, ignore=shutil.ignore_patterns("*.memory", "s"))
            print(f"histories, log and journal are in {kept}", flush=True)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            # It prints its log; what is of it is kept.
            try:
                host.close()
            except AssertionError as error:
                problems.append(str(error))
    return problems


def main() -> int:
    """Runs a storm from the command line; the exit status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--duration", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=None, help="drawn by chance if none is given")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    problems = run(seed, options.duration)
    for problem in problems:
        print(problem)
    if problems:
        print(f"FAILED: again with make chaos DURATION={options.duration:g} SEED={seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
