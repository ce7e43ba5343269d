"""The database of durable numbers and stored events."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import msgpack
import pytest

from tsliced.host import durable_store
from tsliced.host.durable_store import RUN_STRIDE, DurableStore, Numbers
from tsliced.host.history import Entry
from tsliced.host.journal_error import JournalCode, JournalError

NUMBERS = Numbers(boot="b", generation=5, ceiling=4096)


def open_store(path: Path, *, history_max_bytes: int = 1 << 20) -> DurableStore:
    return DurableStore(path, history_max_bytes=history_max_bytes)


def event(seq: int, **facts: str) -> Entry:
    return (seq, 1.5, "granted", "info", facts)


def test_numbers_are_there_after_reopening(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal.db")
    assert store.numbers() is None
    store.save_numbers(NUMBERS)
    store.close()
    store = open_store(tmp_path / "journal.db")
    assert store.numbers() == NUMBERS
    store.close()


def test_every_save_of_numbers_is_one_counted_fsync(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal.db")
    for _ in range(3):
        store.save_numbers(NUMBERS)
    assert (store.fsync_count, len(store.fsync_s)) == (3, 3)
    assert all(0 < seconds < 60 for seconds in store.fsync_s)
    store.close()


def test_storing_events_does_not_leave_numbers_without_their_fsync(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal.db")
    store.append_history([event(1)])
    # 2 is FULL, https://www.sqlite.org/pragma.html#pragma_synchronous
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def test_the_tail_of_the_events_comes_back_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal.db")
    for first in range(1, 100, 10):
        store.append_history([event(seq) for seq in range(first, first + 10)])
    assert [seq for seq, *_ in store.history_tail(15)] == list(range(86, 101))
    assert store.history_tail(1) == [event(100)]
    assert len(store.history_tail(1000)) == 100
    store.close()


def test_a_run_numbers_its_events_above_all_that_an_earlier_one_may_have_given_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.db"
    firsts = []
    for _ in range(3):
        # Killed before it stored anything, each of them.
        store = open_store(path)
        firsts.append(store.begin_run())
        store.close()
    assert firsts == [1, RUN_STRIDE, 2 * RUN_STRIDE]
    store = open_store(path)
    store.append_history([event(5 * RUN_STRIDE)])
    assert store.begin_run() == 6 * RUN_STRIDE
    store.close()


def test_the_oldest_batches_make_room_also_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for start in range(1, 201, 50):
        store = open_store(path, history_max_bytes=10_000)
        for seq in range(start, start + 50):
            store.append_history([event(seq, text="x" * 400)])
        store.close()
    store = open_store(path)
    kept = [seq for seq, *_ in store.history_tail(1000)]
    store.close()
    assert kept == list(range(201 - len(kept), 201))
    assert 15 < len(kept) < 25
    assert path.stat().st_size < 100_000


def test_a_batch_above_the_limit_is_stored_and_dropped_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal.db", history_max_bytes=100)
    store.append_history([event(1, text="x" * 400)])
    assert store.history_tail(10) == []
    store.close()


def test_a_database_of_a_newer_version_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={durable_store.TABLES_VERSION + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="newer tsliced") as caught:
        open_store(path)
    assert caught.value.code is JournalCode.NEWER
    assert path.read_bytes() == before


def test_an_older_database_is_brought_up_and_keeps_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.db"
    store = open_store(path)
    store.save_numbers(NUMBERS)
    store.close()
    version = durable_store.TABLES_VERSION
    monkeypatch.setattr(durable_store, "TABLES_VERSION", version + 1)
    monkeypatch.setitem(durable_store._MIGRATIONS, version, "CREATE TABLE extra (x INTEGER);")
    store = open_store(path)
    assert store.numbers() == NUMBERS
    assert store._db.execute("SELECT * FROM extra").fetchall() == []
    assert store._db.execute("PRAGMA user_version").fetchone() == (version + 1,)
    store.close()


def test_events_that_were_stored_as_maps_are_dropped_and_the_numbers_stay(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = open_store(path)
    store.save_numbers(NUMBERS)
    as_map = {"seq": 1, "at": 1.5, "kind": "granted", "level": "info"}
    store._db.executescript(
        "DROP TABLE history;"
        "CREATE TABLE history (first INTEGER PRIMARY KEY, last INTEGER, events BLOB);"
        "PRAGMA user_version=1"
    )
    store._db.execute("INSERT INTO history VALUES (1, 1, ?)", (msgpack.packb([as_map]),))
    store.close()
    store = open_store(path)
    assert store.history_tail(10) == []
    assert store.numbers() == NUMBERS
    store.close()


@pytest.mark.parametrize("damage", [b"not a database, but long enough" * 40, b"\0" * 100])
def test_a_file_that_is_no_database_is_called_corrupt(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(damage)
    with pytest.raises(JournalError) as caught:
        open_store(path)
    assert caught.value.code is JournalCode.CORRUPT


def test_a_database_that_is_damaged_in_the_middle_is_called_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = open_store(path)
    for seq in range(50):
        store.append_history([event(seq, text="x" * 400)])
    store.close()
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(12_000))
    with pytest.raises(JournalError) as caught:
        open_store(path)
    assert caught.value.code is JournalCode.CORRUPT


def test_stored_events_that_are_not_events_are_an_error_of_the_journal(tmp_path: Path) -> None:
    store = open_store(tmp_path / "journal.db")
    store._db.execute("INSERT INTO history (first, last, events) VALUES (1, 1, ?)", (b"\xc1",))
    with pytest.raises(JournalError, match="cannot be read"):
        store.history_tail(10)
    store.close()
