"""A client in the storm: takes turns as it likes until it is told to finish, and checks its state.

Run as ``chaos_client.py SEED HOMES GROUPS``: the numbers of the groups on whose devices it has its
state (``-`` for none), and how many groups there are. A line on standard input tells it to finish:
it takes a last turn and answers with one line, as `harness.Rank` reads it: ``{"value": RESULT}``.

What it does is drawn from its seed; what happens to it is not.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from types import FrameType

import rank
from history import Recorder

import libtimeslice

STATE_MIB = 1
#: Codes of refusals after which this process cannot go on, for a fault that somebody injected.
FATAL = ("job_faulted", "pinned", "blocked", "refused", "no_device_memory", "no_host_memory")
#: Refusals that say nothing about the job.
PASSING = ("timeout", "cancelled", "unavailable", "shutting_down")
#: In the reason of a refusal: its turn came while it was stopped.
STOPPED = "SIGCONT"


class Fault(Exception):  # noqa: N818 - how it ended, no mistake of the program
    """This process cannot go on."""


class Interrupted(Exception):  # noqa: N818 - a signal, like KeyboardInterrupt
    """The alarm went off: the wait is given up."""


class ChaosClient:
    """One job of one process."""

    def __init__(self, seed: int, homes: list[int], groups: int) -> None:
        self.random = random.Random(seed)
        self.homes, self.groups = homes, groups
        self.finish = threading.Event()
        self.digest = ""
        self.turns = 0
        self._seed = seed
        self._recorder: Recorder = rank.recorder()

    def run(self) -> str:
        """Takes turns until the end, and returns how it ended."""
        try:
            if self.homes:
                self._load()
            while not self.finish.is_set():
                self._turn(self._wish())
                self.finish.wait(self.random.choice((0.0, 0.01, 0.1)))
            self._turn(self._names(self.homes), last=True)
        except Fault as fault:
            return str(fault)
        return "intact"

    def _load(self) -> None:
        """Makes its state in a first turn, on the devices of its own groups."""
        lease = None
        while lease is None:
            lease = self._take(self._names(self.homes))
        for number in self.homes:
            rank.context(number)
            rank.fill(STATE_MIB, self._seed)
        self.digest = rank.digest()
        rank.give_back(lease)

    def _names(self, numbers: list[int]) -> list[str]:
        names = [f"g{number}" for number in numbers or [self.random.randrange(self.groups)]]
        self.random.shuffle(names)
        return names

    def _wish(self) -> list[str]:
        """Returns groups to ask for: its own, and rarely more, for all or nothing."""
        more = [n for n in range(self.groups) if self.random.random() < 0.05]
        return self._names(sorted({*self.homes, *more}))

    def _turn(self, names: list[str], *, last: bool = False) -> None:
        timeout = None if last else self.random.choice((None, None, None, 5.0, 0.5, 0.05, 0.0))
        lease = self._take(names, timeout=timeout, patience_s=None if last else self._patience())
        if lease is None:
            if last:
                self._turn(names, last=True)
            return
        if self.random.random() < 0.2:
            # Nested in it: counted by the library alone.
            inner = self._take(names[:1])
            self._use()
            if inner is not None:
                rank.give_back(inner)
        self._use()
        self.finish.wait(self.random.choice((0.0, 0.0, 0.005, 0.03)))
        self._use()
        rank.give_back(lease)
        self.turns += 1

    def _patience(self) -> float | None:
        """Returns after what time the wait is given up by a signal, if so."""
        return self.random.uniform(0.001, 0.3) if self.random.random() < 0.1 else None

    def _use(self) -> None:
        """Looks at its state on the devices."""
        if self.digest and rank.digest() != self.digest:
            self._recorder.write("broken")
            raise Fault("broken")

    def _take(
        self, names: list[str], *, timeout: float | None = None, patience_s: float | None = None
    ) -> libtimeslice.Lease | None:
        try:
            if patience_s is not None:
                signal.setitimer(signal.ITIMER_REAL, patience_s)
            try:
                return rank.take(names, timeout=timeout)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            # It may have come right behind the grant.
            while rank.client().holding:
                rank.client().release()
        except libtimeslice.TimeSliceError as error:
            if error.code in FATAL and STOPPED not in str(error):
                raise Fault(str(error.code)) from error
            if error.code not in (*PASSING, "refused"):
                self._recorder.write("unexpected", code=error.code, message=str(error))
                raise Fault(f"unexpected {error.code}: {error}") from error
            time.sleep(self.random.uniform(0, 0.05))
        return None


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise Interrupted


def main() -> None:
    seed, homes, groups = sys.argv[1:]
    numbers = [int(number) for number in homes.split(",") if number != "-"]
    client = ChaosClient(int(seed), numbers, int(groups))
    signal.signal(signal.SIGALRM, interrupt)

    def listen() -> None:
        sys.stdin.readline()
        client.finish.set()

    threading.Thread(target=listen, daemon=True).start()
    result = client.run()
    sys.stdout.write(json.dumps({"value": {"result": result, "turns": client.turns}}) + "\n")
    sys.stdout.flush()
    # Whoever ends it does so by a signal: its state stays until then.
    threading.Event().wait()


if __name__ == "__main__":
    main()
