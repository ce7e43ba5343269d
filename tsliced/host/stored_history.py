"""The stored part of the event history, for whoever asks for more than memory has.

A connection of its own, which only reads, in a thread of its own: neither the event loop nor the
journal's helper, whom grants may wait for, has to wait for a large history.
"""

from __future__ import annotations

import math
import sqlite3
import time
from pathlib import Path
from typing import Final

from tsliced.host.call_thread import CallThread
from tsliced.host.durable_store import unpack_entries
from tsliced.host.history import Event, HistoryQuery, Page, event_of
from tsliced.host.journal_error import JournalCode, JournalError, from_sqlite_error

#: Events that are looked at for one page; whoever wants more asks again.
MOST_LOOKED_AT: Final = 20_000
#: Between two batches the event loop gets the interpreter.
_PAUSE_S: Final = 0.0002
_TIMEOUT_S: Final = 20.0

_BATCHES: Final = """
SELECT last, events FROM history
WHERE last >= ? AND first < ? AND end_at >= ? AND begin_at < ? ORDER BY first
"""


class StoredHistory:
    """Reads pages of the events in a journal's database."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = CallThread("history")
        self._thread.start()

    async def page(self, query: HistoryQuery, limit: int, *, end_seq: int) -> Page:
        """Return at most `limit` (at least 1) events below number `end_seq` that a query chooses.

        Raises `JournalError`, and TimeoutError if the disk does not answer.
        """
        return await self._thread.call(
            lambda: read_page(self._path, query, limit, end_seq=end_seq), _TIMEOUT_S
        )

    def close(self) -> None:
        """Let the thread end. May be repeated."""
        if self._thread.is_running:
            self._thread.stop()


def read_page(path: Path, query: HistoryQuery, limit: int, *, end_seq: int) -> Page:
    """Do what `StoredHistory.page` does, in the caller's thread."""
    after = -math.inf if query.after_unix is None else query.after_unix
    before = math.inf if query.before_unix is None else query.before_unix
    events: list[Event] = []
    looked_at = 0
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            batches = db.execute(_BATCHES, (query.since, end_seq, after, before))
            for last, packed in batches:
                batch = unpack_entries(packed)
                found = (e for e in batch if query.since <= e[0] < end_seq and query.chooses(e))
                events += map(event_of, found)
                looked_at += len(batch)
                if len(events) >= limit:
                    return _first_of(events, limit)
                if looked_at >= MOST_LOOKED_AT:
                    return Page(events, last + 1, more=True)
                time.sleep(_PAUSE_S)
        finally:
            db.close()
    except sqlite3.Error as exc:
        raise from_sqlite_error(exc, "read", path) from exc
    except ValueError as exc:  # msgpack's
        text = f"{path} holds events that cannot be read: {exc}"
        raise JournalError(JournalCode.CORRUPT, text) from exc
    return Page(events, max(end_seq, query.since))


def _first_of(events: list[Event], limit: int) -> Page:
    last = int(str(events[limit - 1]["seq"]))
    return Page(events[:limit], last + 1, more=True)
