"""Simulated time: what happens next, and when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Happening = Callable[[], None]


@dataclass(slots=True)
class Timeline:
    """Happenings in the order of their instants, then in the order in which they were planned."""

    now: float = 0.0
    _planned: list[tuple[float, int, Happening]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def at(self, instant: float, happening: Happening) -> None:
        """Plan something for an instant in seconds; what is past happens next."""
        heapq.heappush(self._planned, (max(instant, self.now), next(self._numbers), happening))

    def after(self, delay_s: float, happening: Happening) -> None:
        """Plan something for some seconds from now."""
        self.at(self.now + delay_s, happening)

    def run_until(self, instant: float, *, done: Callable[[], bool] = lambda: False) -> None:
        """Let everything up to an instant happen, or until `done`."""
        while self._planned and self._planned[0][0] <= instant and not done():
            self.now, _, happening = heapq.heappop(self._planned)
            happening()
        if not done():
            self.now = max(self.now, instant)
