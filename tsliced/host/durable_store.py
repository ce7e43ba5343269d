"""What must outlive a power cut, and the event history: one sqlite database.

Only one thread uses a store after it is open, the journal's helper, because a commit that waits for
the disk (synchronous=FULL) must never happen on the event loop. See `kept_log` for the rest of the
journal and why it is not in here.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack

from tsliced.host.history import Entry
from tsliced.host.journal_error import JournalCode, JournalError, from_os_error, from_sqlite_error
from tsliced.host.kept_log import newer_text

#: Version of the tables, in ``PRAGMA user_version``. Records have their own, in `record_codec`.
TABLES_VERSION: Final = 3

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS numbers (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    boot TEXT NOT NULL,
    generation INTEGER NOT NULL,
    ceiling INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS history (
    first INTEGER PRIMARY KEY,
    last INTEGER NOT NULL,
    events BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS run (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    first INTEGER NOT NULL
);
"""

#: By tables version: the SQL that brings a database to the next one.
_MIGRATIONS: Final[dict[int, str]] = {
    0: _TABLES,
    # Events were maps, and are entries.
    1: "DELETE FROM history;",
    # When they happened. Of what is there already that is not known: from then on it grows old.
    2: """
ALTER TABLE history ADD COLUMN begin_at REAL NOT NULL DEFAULT 0;
ALTER TABLE history ADD COLUMN end_at REAL NOT NULL DEFAULT 0;
UPDATE history SET end_at = strftime('%s', 'now');
CREATE INDEX history_by_end ON history (end_at);
""",
}

#: The only other user is an operator's tool that reads.
_BUSY_TIMEOUT_S: Final = 5.0
_FSYNCS_REMEMBERED: Final = 256

#: Each run of the daemon numbers its events from the next multiple on, so that an event which a
#: kill -9 took before it was stored never shares its number with a later one.
RUN_STRIDE: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The part of the journal that fencing rests on."""

    #: Boot id of the machine's run that the kept records belong to.
    boot: str
    generation: int
    #: Numbers below it may be in use for tokens and epochs of this generation.
    ceiling: int


class DurableStore:
    """The database. Every method may block on the disk and raises `JournalError`."""

    def __init__(
        self, path: Path, *, history_max_bytes: int, history_max_age_s: float = math.inf
    ) -> None:
        self.path = path
        #: Commits that waited for the disk, and how long the last ones took, in seconds.
        self.fsync_count = 0
        self.fsync_s: deque[float] = deque(maxlen=_FSYNCS_REMEMBERED)
        self._history_max_bytes = history_max_bytes
        self._history_max_age_s = history_max_age_s
        self._db = _connect(path)
        try:
            with self._errors("open"):
                self._prepare()
                row = self._db.execute("SELECT sum(length(events)) FROM history").fetchone()
                self._history_bytes: int = row[0] or 0
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        (said,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if said != "ok":
            raise JournalError(JournalCode.CORRUPT, f"{self.path} is damaged: {said}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > TABLES_VERSION:
            raise JournalError(JournalCode.NEWER, newer_text(self.path, version))
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        for step in range(version, TABLES_VERSION):
            self._db.executescript(
                f"BEGIN; {_MIGRATIONS[step]} PRAGMA user_version={step + 1}; COMMIT;"
            )

    def numbers(self) -> Numbers | None:
        """Return what was saved last; None: this database is new."""
        with self._errors("read"):
            row = self._db.execute("SELECT boot, generation, ceiling FROM numbers").fetchone()
        return None if row is None else Numbers(boot=row[0], generation=row[1], ceiling=row[2])

    def save_numbers(self, numbers: Numbers) -> None:
        """Make numbers durable: they are on the disk when this returns."""
        row = (numbers.boot, numbers.generation, numbers.ceiling)
        started_at = time.monotonic()
        with self._errors("write to"):
            self._db.execute("REPLACE INTO numbers VALUES (1, ?, ?, ?)", row)
        self.fsync_s.append(time.monotonic() - started_at)
        self.fsync_count += 1

    def append_history(self, entries: Sequence[Entry]) -> None:
        """Store a batch of events as one row; drop the oldest rows above the limits.

        Without an fsync: a power cut may take the last batches, kill -9 takes none.
        """
        # Facts are plain values; anything else is kept as its text rather than lost.
        packed = msgpack.packb(entries, default=str, unicode_errors="surrogatepass")
        times = [at_unix for _, at_unix, *_ in entries]
        row = (entries[0][0], entries[-1][0], packed, min(times), max(times))
        with self._errors("write to"), self._without_fsync():
            self._db.execute(
                "REPLACE INTO history (first, last, events, begin_at, end_at) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )
            self._history_bytes += len(packed)
            self._drop_older_than(times[-1] - self._history_max_age_s)
            while self._history_bytes > self._history_max_bytes:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        query = "SELECT first, length(events) FROM history ORDER BY first LIMIT 1"
        first, size = self._db.execute(query).fetchone()
        self._db.execute("DELETE FROM history WHERE first = ?", (first,))
        self._history_bytes -= size

    def _drop_older_than(self, limit_unix: float) -> None:
        query = "DELETE FROM history WHERE end_at < ? RETURNING length(events)"
        self._history_bytes -= sum(size for (size,) in self._db.execute(query, (limit_unix,)))

    def begin_run(self) -> int:
        """Return the number of this run's first event, above all that were ever given out."""
        with self._errors("write to"), self._without_fsync():
            rows = "SELECT max(first) FROM run UNION ALL SELECT max(last) FROM history"
            highest = max(row[0] or 0 for row in self._db.execute(rows))
            first = (highest // RUN_STRIDE + 1) * RUN_STRIDE if highest else 1
            self._db.execute("REPLACE INTO run VALUES (1, ?)", (first,))
        return first

    def history_tail(self, limit: int) -> list[Entry]:
        """Return the last `limit` events, the oldest first."""
        batches: list[list[Entry]] = []
        count = 0
        with self._errors("read"):
            for (packed,) in self._db.execute("SELECT events FROM history ORDER BY first DESC"):
                if count >= limit:
                    break
                batch = unpack_entries(packed)
                batches.append(batch)
                count += len(batch)
        entries = [entry for batch in reversed(batches) for entry in batch]
        return entries[-limit:]

    def close(self) -> None:
        """Move the write-ahead log into the database and close it."""
        with self._errors("close"):
            self._db.close()

    @contextlib.contextmanager
    def _without_fsync(self) -> Iterator[None]:
        self._db.execute("PRAGMA synchronous=NORMAL")
        try:
            yield
        finally:
            self._db.execute("PRAGMA synchronous=FULL")

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise from_sqlite_error(exc, doing, self.path) from exc
        except ValueError as exc:  # msgpack's
            text = f"{self.path} holds events that cannot be read: {exc}"
            raise JournalError(JournalCode.CORRUPT, text) from exc


def unpack_entries(packed: bytes) -> list[Entry]:
    """Return the events of one row. Raises ValueError."""
    entries: list[Entry] = msgpack.unpackb(packed, use_list=False, unicode_errors="surrogatepass")
    return entries


def _connect(path: Path) -> sqlite3.Connection:
    try:
        # sqlite gives its side files the mode of the database, so its own is set first.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as exc:
        raise from_os_error(exc, "open", path) from exc
    try:
        return sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as exc:
        raise from_sqlite_error(exc, "open", path) from exc


def set_aside(path: Path, *, now_unix: float) -> Path:
    """Rename a damaged database and its side files to ``NAME.corrupt-UNIX``; return the path."""
    aside = path.with_name(f"{path.name}.corrupt-{int(now_unix)}")
    try:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    except OSError as exc:
        raise from_os_error(exc, "rename", path) from exc
    return aside
