"""The core's one deadline, made of many: what is due when, by key."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from tsliced.core.model import GroupName, JobKey, LeaseId, OpId, RoundId, SessionId, TenancyKey
from tsliced.core.value import Word

K = TypeVar("K", bound=Hashable)

#: Cancelled entries stay in the heap until they come up; above this many it is rebuilt.
_SLACK = 1024


class TimerKind(Word):
    """What comes due."""

    ACQUIRE = "acquire"
    CONFIRM = "confirm"
    GRACE = "grace"
    BARRIER = "barrier"
    AWAITED = "awaited"
    ALONE = "alone"
    RETRY = "retry"
    PARK = "park"
    STUCK = "stuck"
    NUMBERS = "numbers"
    JOURNAL = "journal"
    ENDING = "ending"
    SILENCE = "silence"
    HOLD = "hold"
    IDLE = "idle"
    TURN = "turn"
    REMAINS = "remains"
    UNTOLD = "untold"
    WATCHDOG = "watchdog"


class TimerKey(NamedTuple):
    """One thing that comes due."""

    kind: TimerKind
    id: LeaseId | SessionId | TenancyKey | RoundId | OpId | JobKey | GroupName


class Timers(Generic[K]):
    """Instants by key. Setting a key again moves it; clearing an unknown key is harmless."""

    __slots__ = ("_at", "_heap", "_sequence")

    def __init__(self) -> None:
        self._at: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        # Breaks ties in the order of setting, so that equal instants stay deterministic.
        self._sequence = 0

    def set(self, key: K, at: float) -> None:
        """Make `key` due at the instant `at`."""
        self._sequence += 1
        self._at[key] = (at, self._sequence)
        heappush(self._heap, (at, self._sequence, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(when, seq, k) for k, (when, seq) in self._at.items()]
            heapify(self._heap)

    def clear(self, key: K) -> None:
        """Forget `key`."""
        self._at.pop(key, None)

    def get(self, key: K) -> float | None:
        """Return the instant at which `key` is due, if it is set."""
        entry = self._at.get(key)
        return entry[0] if entry else None

    @property
    def deadline(self) -> float | None:
        """The earliest instant that is due, or None."""
        while self._heap:
            at, sequence, key = self._heap[0]
            counts = self._at.get(key)
            if counts is not None and counts[1] == sequence:
                return at
            heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys that are due, the earliest first."""
        due: list[K] = []
        while (at := self.deadline) is not None and at <= now:
            _, _, key = heappop(self._heap)
            del self._at[key]
            due.append(key)
        return due
