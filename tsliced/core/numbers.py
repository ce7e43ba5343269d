"""Tokens, epochs and operation ids: numbers that no run of the daemon gives out twice.

Safety rule: a number is given out only below the ceiling, and the ceiling is durable before it is
raised here. The next block is asked for at half use, so that no grant and no move waits for a disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import ReserveNumbers
from tsliced.core.events import NumbersReserved
from tsliced.core.model import Counter, OpId


@dataclass(slots=True, kw_only=True)
class Numbers:
    """One host's supply. A restart goes on at the ceiling and skips what was left of a block."""

    generation: int
    ceiling: int
    block: int
    _next: int = field(init=False)
    _asked: bool = field(init=False, default=False)
    #: The most that was asked for at once and could not be had.
    _short_of: int = field(init=False, default=0)
    _next_op: int = field(init=False, default=1)
    #: Half of the block is used, or more was wanted than there is.
    low: bool = field(init=False)

    def __post_init__(self) -> None:
        self._next = self.ceiling
        self.low = True

    def take(self) -> Counter | None:
        """Return the next number, or None while the block is exhausted."""
        numbers = self.take_several(1)
        return numbers[0] if numbers else None

    def take_several(self, count: int) -> list[Counter] | None:
        """Return the next `count` numbers, or None, and none is used up, while they are too few."""
        first, after = self._next, self._next + count
        if after > self.ceiling:
            self._short_of, self.low = max(self._short_of, count), True
            return None
        self._next = after
        if self.ceiling - after <= self.block >> 1:
            self.low = True
        if count == 1:
            return [Counter(self.generation, first)]
        return [Counter(self.generation, number) for number in range(first, after)]

    def take_op(self) -> OpId:
        """Return an operation id; these live no longer than this run of the daemon."""
        self._next_op += 1
        return OpId(self._next_op - 1)

    def left(self) -> int:
        """Return how many numbers can be taken before the next block."""
        return self.ceiling - self._next

    def ask(self) -> ReserveNumbers | None:
        """Return the action that reserves the next block, once for each block, at half use."""
        enough = self.left() > self.block // 2 and self.left() >= self._short_of
        if self._asked or enough:
            return None
        self._asked = True
        return ReserveNumbers(ceiling=self.ceiling + max(self.block, self._short_of))

    def on_reserved(self, event: NumbersReserved) -> None:
        """Raise the ceiling. After a failure nothing is asked for before `let_go`."""
        if event.failure is None:
            assert event.ceiling >= self.ceiling, "a ceiling never falls"
            self.ceiling = event.ceiling
            self._asked, self._short_of = False, 0
            self.low = self.left() <= self.block >> 1

    def let_go(self) -> None:
        """Ask again, some time after a failure."""
        self._asked = False
