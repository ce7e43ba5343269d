"""The daemon's log: one key=value line per transition, on standard error.

The standard library's logging costs more than the whole rest of a request, so lines are made here
and written in batches, once per turn of the event loop. Under systemd each line begins with its
priority as sd-daemon(3) has it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TextIO

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_NAMES: Final = {level: f"{level.upper():7}" for level in LEVELS}
_PRIORITIES: Final = {"debug": "<7>", "info": "<6>", "warning": "<4>", "error": "<3>"}

Fact = str | int | float | bool | None


class Log:
    """Collects lines until `flush`. `stream` None: standard error."""

    def __init__(self, level: str = "info", *, stream: TextIO | None = None) -> None:
        self._least = LEVELS[level]
        self._stream = stream if stream is not None else sys.stderr
        self._lines: list[str] = []
        # The journal adds the time itself and wants to be told the priority.
        self._to_journal = "JOURNAL_STREAM" in os.environ
        # Formatting the time of day costs more than the rest of a line.
        self._second, self._prefix = -1, ""

    def set_level(self, level: str) -> None:
        """Write lines of a level and above from now on."""
        self._least = LEVELS[level]

    def write(self, level: str, kind: str, facts: Mapping[str, Fact]) -> None:
        """Add a line; facts that are None are left out."""
        if LEVELS[level] < self._least:
            return
        words = []
        for key, value in facts.items():
            if isinstance(value, str):
                words.append(f"{key}={_quoted(value)}")
            elif isinstance(value, float):
                words.append(f"{key}={value:.6g}")
            elif value is not None:
                words.append(f"{key}={value}")
        head = _PRIORITIES[level] if self._to_journal else f"{self._clock()} {_NAMES[level]} "
        self._lines.append(f"{head}{kind} {' '.join(words)}\n")

    def _clock(self) -> str:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._prefix = second, time.strftime("%H:%M:%S", time.localtime(now))
        return f"{self._prefix}.{int((now - second) * 1000):03d}"

    def flush(self) -> None:
        """Write what was collected. A log that cannot be written stops nobody."""
        if not self._lines:
            return
        text = "".join(self._lines)
        self._lines.clear()
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return


@lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    # Jobs, groups and ranks come again and again.
    return text if text and " " not in text and text.isprintable() else repr(text)
