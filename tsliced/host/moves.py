"""How far snapshots and restores have come: their bytes, their pace, and what is left.

No driver says it. While a snapshot goes on, its target's own memory grows by what was saved, which
the kernel counts; while a restore goes on, it shrinks, but maybe only at the end. Where that shows
nothing, the pace of earlier moves has to do, which is why each is remembered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tsliced.core.model import ProcessId, Verb
from tsliced.host.procfs import PROC, HeldFiles

#: What of the latest move goes into the pace that is expected.
_SHARE_OF_LATEST: Final = 0.5
#: Less than this is no move to learn from: what counts then is all that is not the copy.
_LEAST_BYTES: Final = 1 << 20
#: Memory is taken in large pieces: what it grew by says nothing in the first moment, seconds.
_EARLY_S: Final = 0.5
#: A move that is not over has not moved all.
_MOST_DONE: Final = 0.99
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

#: The operations that move bytes.
MOVING: Final = (Verb.SNAPSHOT, Verb.RESTORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one operation has come, by what is known."""

    verb: Verb
    total_bytes: int
    done_bytes: int
    seconds: float
    #: None: nothing was moved yet, and nothing was ever moved before.
    bytes_per_s: float | None
    #: Whether the bytes were seen to move; else they are an estimate.
    measured: bool


@dataclass(slots=True, kw_only=True)
class _Move:
    verb: Verb
    total_bytes: int
    began_at: float
    #: The target's memory at the beginning.
    resident_bytes: int
    #: How long others of its kind took for as much; None: not known.
    expected_s: float | None


@dataclass(slots=True)
class Moves:
    """The operations in flight that move bytes. All methods belong to the event loop."""

    clock: Callable[[], float] = time.monotonic
    proc: str = PROC
    #: By verb, bytes per second of one rank.
    paces: dict[Verb, float] = field(default_factory=dict)
    _moves: dict[ProcessId, _Move] = field(default_factory=dict)
    _files: HeldFiles = field(default_factory=HeldFiles)

    def begin(
        self, process: ProcessId, verb: Verb, total_bytes: int, expected_s: float | None = None
    ) -> None:
        """Follow an operation that begins now, until `end`.

        `expected_s`: how long earlier moves of the process, or of others of its kind, took for as
        much. It counts before the pace of all that was ever moved.
        """
        if verb in MOVING:
            self._moves[process] = _Move(
                verb=verb,
                total_bytes=total_bytes,
                began_at=self.clock(),
                resident_bytes=self._resident_bytes(process),
                expected_s=expected_s,
            )

    def end(self, process: ProcessId) -> None:
        """Know that the operation on a process is over."""
        self._moves.pop(process, None)

    def __bool__(self) -> bool:
        """Whether any bytes are being moved."""
        return bool(self._moves)

    def recall(self, events: Iterable[Mapping[str, object]]) -> None:
        """Take in how fast earlier moves were, from the event history."""
        verbs = {verb.value: verb for verb in MOVING}
        for event in events:
            verb = verbs.get(str(event.get("verb")))
            if event["kind"] == "operation" and verb is not None and event.get("reason") is None:
                self.learn(verb, int(str(event["bytes"])), float(str(event["seconds"])))

    def learn(self, verb: Verb, moved_bytes: int, seconds: float) -> None:
        """Take in how fast a move was that is over."""
        if verb not in MOVING or moved_bytes < _LEAST_BYTES or seconds <= 0:
            return
        pace = moved_bytes / seconds
        before = self.paces.get(verb, pace)
        self.paces[verb] = before + _SHARE_OF_LATEST * (pace - before)

    def of(self, process: ProcessId) -> Progress | None:
        """Return how far the operation on a rank has come; None if none moves bytes."""
        move = self._moves.get(process)
        if move is None:
            return None
        seconds = self.clock() - move.began_at
        moved = abs(self._resident_bytes(process) - move.resident_bytes)
        # Less than this may be anything that the process does for itself.
        measured = seconds >= _EARLY_S and moved >= max(_LEAST_BYTES, move.total_bytes // 100)
        pace = moved / seconds if measured else self._expected_pace(move)
        if not measured:
            moved = int(pace * seconds) if pace is not None else 0
        return Progress(
            verb=move.verb,
            total_bytes=move.total_bytes,
            done_bytes=min(moved, int(move.total_bytes * _MOST_DONE)),
            seconds=seconds,
            bytes_per_s=pace,
            measured=measured,
        )

    def _expected_pace(self, move: _Move) -> float | None:
        if move.expected_s:
            return move.total_bytes / move.expected_s
        return self.paces.get(move.verb)

    def _resident_bytes(self, process: ProcessId) -> int:
        """Return the memory of a process that is resident; 0 if it is gone or hidden."""
        try:
            words = (self._files.read(f"{self.proc}/{process.pid}/statm") or b"").split()
        except PermissionError:
            return 0
        return int(words[1]) * _PAGE if len(words) > 1 else 0
