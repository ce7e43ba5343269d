"""A rank whose loop queues collectives ahead of its device, as a training loop does.

It takes commands as ``rank.py`` does, and these besides. Its collectives spin on the device until
every rank has queued them, so a rank that is frozen keeps its peers on theirs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import rank

from libtimeslice import PausableStep, Pause

#: So many collectives are queued before the host waits for the first of them.
RUN_AHEAD = 4


class Loop:
    """The loop of one rank, in a thread of its own."""

    def __init__(self, group: Path, ranks: int, number: int, gap_s: float) -> None:
        self.group, self.ranks, self.number, self.gap_s = group, ranks, number, gap_s
        #: Collectives that were queued, and how many are to be; None: more and more.
        self.queued = 0
        self.enough: int | None = None
        self.step: PausableStep | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        rank.context()  # a context is current in one thread only
        while self.enough is None or self.queued < self.enough:
            with self.step or contextlib.nullcontext():
                name = os.fsencode(self.group)
                rank.call("softcudaAllReduce", name, self.ranks, self.number, RUN_AHEAD)
                self.queued += 1
            time.sleep(self.gap_s)

    def agree(self, number: int, pause: Pause, deadline: float) -> int:
        """Agrees by files, as ranks do that share nothing but a directory."""
        files = [self.group.with_suffix(f".{pause.move}.{peer}") for peer in range(self.ranks)]
        own = files[self.number]
        new = own.with_name(f"{own.name}.new")
        new.write_text(str(number))
        new.rename(own)
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, "not all ranks say where they are"
            time.sleep(0.005)
        return max(int(file.read_text()) for file in files)

    def finish_device_work(self) -> None:
        """Waits until the device has done what was queued."""
        rank.context()
        rank.call("cuCtxSynchronize")


loops: list[Loop] = []


@rank.command
def loop(group: str, ranks: int, number: int, gap_s: float, pausable: bool) -> None:
    """Begins to queue collectives; with a step that the daemon can pause, or without."""
    made = Loop(Path(group), ranks, number, gap_s)
    if pausable:
        made.step = rank.client().pausable_step(agree=made.agree, finish=made.finish_device_work)
    loops.append(made)
    made.thread.start()


@rank.command
def queued() -> int:
    """Returns how many collectives were queued so far."""
    return loops[-1].queued


@rank.command
def finish(at: int) -> int:
    """Ends the loop behind a collective, and returns how many were queued then."""
    ending = loops[-1]
    ending.enough = at
    ending.thread.join(20)
    assert not ending.thread.is_alive(), f"it hangs at {ending.queued} of {at}"
    return ending.queued


if __name__ == "__main__":
    rank.main()
