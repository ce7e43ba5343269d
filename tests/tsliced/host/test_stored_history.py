"""The events on the disk, chosen by number, time, group, job and kind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tsliced.host import stored_history
from tsliced.host.durable_store import DurableStore
from tsliced.host.history import STORE_BATCH, Entry, Fact, History, HistoryQuery
from tsliced.host.journal import Journal, JournalLimits
from tsliced.host.journal_error import JournalCode, JournalError
from tsliced.host.stored_history import StoredHistory, read_page

#: Further events than there are.
END = 1_000_000


def entry(seq: int, kind: str = "granted", **facts: Fact) -> Entry:
    """Return an event that happened `seq` seconds after 1000."""
    return (seq, 1000.0 + seq, kind, "info", facts)


STORY = (
    entry(1, job="1000/a", groups="g1"),
    entry(2, "queued", job="lab/1001/a", groups="g1,g2"),
    entry(3, "progress", job="1000/a", groups="g2", step=3),
    entry(4, "device", group="g2", reason="too hot"),
    entry(5, "released", job="1000/a", groups="g1"),
    entry(6, job="lab/1001/a", groups="g1,g2"),
)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "journal.db"
    with closing(DurableStore(path, history_max_bytes=1 << 20)) as store:
        for start in range(0, len(STORY), 2):
            store.append_history(STORY[start : start + 2])
        yield path


def chosen(path: Path, query: HistoryQuery) -> list[object]:
    page = read_page(path, query, 100, end_seq=END)
    assert (page.next, page.more) == (END, False)
    return [event["seq"] for event in page.events]


@pytest.mark.parametrize(
    ("query", "seqs"),
    [
        (HistoryQuery(), [1, 2, 3, 4, 5, 6]),
        (HistoryQuery(since=4), [4, 5, 6]),
        (HistoryQuery(after_unix=1002.0, before_unix=1005.0), [2, 3, 4]),
        (HistoryQuery(after_unix=1006.5), []),
        (HistoryQuery(before_unix=1001.0), []),
        (HistoryQuery(groups=frozenset({"g1"})), [1, 2, 5, 6]),
        # What a job says of itself under that name is no group.
        (HistoryQuery(groups=frozenset({"g2"})), [2, 4, 6]),
        (HistoryQuery(jobs=frozenset({"a"})), [1, 2, 3, 5, 6]),
        (HistoryQuery(jobs=frozenset({"1000/a"})), [1, 3, 5]),
        (HistoryQuery(jobs=frozenset({"1001/a"})), [2, 6]),
        (HistoryQuery(jobs=frozenset({"lab/1001/a", "b"})), [2, 6]),
        (HistoryQuery(kinds=frozenset({"queued", "released"})), [2, 5]),
        (HistoryQuery(since=2, jobs=frozenset({"1000/a"}), groups=frozenset({"g1"})), [5]),
    ],
)
def test_events_are_chosen_by_number_time_group_job_and_kind_on_disk_and_in_memory(
    path: Path, query: HistoryQuery, seqs: list[int]
) -> None:
    assert chosen(path, query) == seqs
    page = History(100, tail=STORY, first_seq=END).chosen(query, 100)
    assert [event["seq"] for event in page.events] == seqs
    assert (page.next, page.more) == (END, False)


def test_pages_lead_from_one_to_the_next_and_give_every_event_once(path: Path) -> None:
    query, seen = HistoryQuery(jobs=frozenset({"a"})), []
    for _ in range(3):
        page = read_page(path, query, 2, end_seq=END)
        seen += [event["seq"] for event in page.events]
        query = HistoryQuery(since=page.next, jobs=query.jobs)
    assert seen == [1, 2, 3, 5, 6]
    assert not page.more
    memory = History(100, tail=STORY, first_seq=END).chosen(HistoryQuery(jobs=query.jobs), 2)
    assert ([event["seq"] for event in memory.events], memory.next, memory.more) == (
        [1, 2],
        3,
        True,
    )


def test_what_is_in_memory_is_not_read_from_the_disk(path: Path) -> None:
    page = read_page(path, HistoryQuery(), 100, end_seq=4)
    assert ([event["seq"] for event in page.events], page.next) == ([1, 2, 3], 4)


def test_no_page_looks_at_more_than_a_part_of_a_large_history(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_history, "MOST_LOOKED_AT", 3)
    page = read_page(path, HistoryQuery(jobs=frozenset({"nobody"})), 100, end_seq=END)
    assert page == ([], 5, True)


def test_events_that_cannot_be_read_are_an_error_that_says_so(path: Path) -> None:
    with closing(DurableStore(path, history_max_bytes=1 << 20)) as store:
        store._db.execute("UPDATE history SET events = ?", (b"\xc1",))
    with pytest.raises(JournalError, match="cannot be read") as caught:
        read_page(path, HistoryQuery(), 100, end_seq=END)
    assert caught.value.code is JournalCode.CORRUPT
    with pytest.raises(JournalError, match=r"missing\.db"):
        read_page(path.with_name("missing.db"), HistoryQuery(), 100, end_seq=END)


def test_events_are_dropped_when_they_are_too_old(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(DurableStore(path, history_max_bytes=1 << 20, history_max_age_s=60.0)) as store:
        for seq in (1, 2, 61, 62):
            store.append_history([entry(seq)])
        assert [seq for seq, *_ in store.history_tail(100)] == [2, 61, 62]
        assert chosen(path, HistoryQuery()) == [2, 61, 62]
        store.append_history([entry(1000)])
        assert [seq for seq, *_ in store.history_tail(100)] == [1000]
        row = store._db.execute("SELECT sum(length(events)) FROM history").fetchone()
        assert store._history_bytes == row[0]


def test_a_history_with_more_than_memory_holds_is_read_whole(tmp_path: Path) -> None:
    """Also what was added just now, and what never left memory."""
    count = 3 * STORE_BATCH + 7

    async def read_all() -> list[object]:
        history = journal.open_history(10)
        for number in range(1, count + 1):
            history.append("granted", "info", {"job": "1000/a"}, 1000.0 + number)
        history.flush()
        query, seen = HistoryQuery(), list[object]()
        while True:
            end = history.oldest_seq
            if query.since < end:
                page = await journal.read_history(query, 500, end_seq=end)
            else:
                page = history.chosen(query, 500)
            seen += [event["seq"] for event in page.events]
            query = HistoryQuery(since=page.next)
            if page.next > count:
                return seen

    with closing(
        Journal.open(tmp_path / "state", now_unix=2e9, boot="b", limits=JournalLimits())
    ) as journal:
        assert asyncio.run(read_all()) == list(range(1, count + 1))


def test_a_reader_can_be_closed_twice(path: Path) -> None:
    async def read() -> int:
        reader = StoredHistory(path)
        page = await reader.page(HistoryQuery(), 3, end_seq=END)
        reader.close()
        reader.close()
        return len(page.events)

    assert asyncio.run(read()) == 3
