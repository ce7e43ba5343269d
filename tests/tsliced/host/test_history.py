"""The event history in memory."""

from __future__ import annotations

import pytest

from tsliced.host.history import STORE_BATCH, Entry, Event, Fact, Follower, History, event_of

FACTS: dict[str, Fact] = {"job": "1000/4711", "restored": True, "waited_s": 0.5, "phase": None}


def fill(history: History, count: int) -> list[Event]:
    return [append(history, {"n": n}, 100.0 + n) for n in range(count)]


def append(history: History, facts: dict[str, Fact], at_unix: float) -> Event:
    """Add an event and return it as it is read."""
    history.append("granted", "info", facts, at_unix)
    return history.since(None, 1).events[0]


def numbers(events: list[Event]) -> list[object]:
    return [event["seq"] for event in events]


def drain(follower: Follower, limit: int) -> list[Event]:
    """Read until nothing waits, `limit` at a time."""
    events: list[Event] = []
    while taken := follower.take(limit):
        assert len(taken) <= limit
        events += taken
    return events


def test_an_event_has_its_number_time_kind_level_and_facts() -> None:
    assert append(History(10), FACTS, 12.5) == {
        "seq": 1,
        "at": 12.5,
        "kind": "granted",
        "level": "info",
        **FACTS,
    }


def test_a_fact_cannot_take_the_place_of_a_number_or_a_time() -> None:
    event = append(History(10), {"seq": 7, "at": 0.0, "kind": "x"}, 12.5)
    assert event == {"seq": 1, "at": 12.5, "kind": "granted", "level": "info"}


def test_only_the_last_events_are_kept() -> None:
    history = History(3)
    events = fill(history, 10)
    assert history.since(None, 100)[:2] == (events[-3:], 11)


def test_reading_on_from_next_gives_every_event_once() -> None:
    history = History(100)
    events = fill(history, 10)
    seen: list[Event] = []
    following = 1
    for _ in range(4):
        page, following, _ = history.since(following, 3)
        seen += page
    assert seen == events
    assert history.since(following, 3)[:2] == ([], following)
    more = fill(history, 1)
    assert history.since(following, 3)[:2] == (more, following + 1)


@pytest.mark.parametrize("seq", [0, 1, 5, 8])
def test_what_is_too_old_to_be_kept_is_skipped(seq: int) -> None:
    history = History(3)
    events = fill(history, 10)
    assert history.since(seq, 100)[:2] == (events[7:], 11)


def test_without_a_number_the_last_events_are_given() -> None:
    history = History(100)
    events = fill(history, 10)
    assert history.since(None, 4)[:2] == (events[-4:], 11)
    assert History(10).since(None, 4)[:2] == ([], 1)


def test_a_number_of_a_lost_history_gives_all_of_this_one() -> None:
    history = History(100)
    events = fill(history, 3)
    assert history.since(5_000_000, 100)[:2] == (events, 4)


def test_events_of_an_earlier_run_come_before_those_of_this_one() -> None:
    tail: list[Entry] = [(n, 12.5, "granted", "info", FACTS) for n in (1, 2, 3)]
    history = History(10, tail=tail, first_seq=1000)
    (event,) = fill(history, 1)
    assert event["seq"] == 1000
    assert history.since(2, 100)[:2] == ([*map(event_of, tail[1:]), event], 1001)
    assert history.since(500, 100)[:2] == ([event], 1001)


def test_each_event_is_stored_once_in_bounded_batches() -> None:
    batches: list[list[Entry]] = []
    history = History(10, store=batches.append)
    events = fill(history, 2 * STORE_BATCH + 5)
    assert [len(batch) for batch in batches] == [STORE_BATCH, STORE_BATCH]
    history.flush()
    history.flush()
    assert [event_of(entry) for batch in batches for entry in batch] == events
    assert len(batches) == 3


def test_a_follower_gets_every_event_from_then_on_until_it_is_forgotten() -> None:
    history = History(10)
    fill(history, 2)
    follower = history.follow(lambda: None, limit=10)
    events = fill(history, 3)
    assert drain(follower, 2) == events
    history.unfollow(follower)
    history.unfollow(follower)
    fill(history, 1)
    assert drain(follower, 2) == []


def test_a_follower_is_woken_once_for_all_that_waits() -> None:
    woken: list[int] = []
    history = History(10)
    follower = history.follow(lambda: woken.append(1), limit=10)
    fill(history, 3)
    assert len(woken) == 1
    drain(follower, 10)
    fill(history, 2)
    assert len(woken) == 2


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 4, 5, 100])
def test_a_slow_follower_loses_events_and_is_told_how_many(at_a_time: int) -> None:
    """G9: its queue does not grow."""
    history = History(1000)
    follower = history.follow(lambda: None, limit=4)
    events = fill(history, 11)
    gap = {"seq": 11, "at": events[-1]["at"], "kind": "gap", "level": "warning", "lost": 7}
    assert drain(follower, at_a_time) == [*events[:4], gap]
    later = fill(history, 2)
    assert drain(follower, at_a_time) == later
    assert history.since(12, 10).events == later


def test_a_follower_that_lost_events_gets_none_before_it_has_seen_the_gap() -> None:
    history = History(1000)
    follower = history.follow(lambda: None, limit=2)
    events = fill(history, 3)
    assert follower.take(1) == events[:1]
    # There is room again, but this one would come before the gap.
    fill(history, 1)
    rest = drain(follower, 10)
    assert numbers(rest) == [2, 4]
    assert rest[1]["lost"] == 2


def test_a_slow_follower_does_not_take_events_from_others() -> None:
    history = History(1000)
    slow = history.follow(lambda: None, limit=1)
    quick = history.follow(lambda: None, limit=1000)
    events = fill(history, 50)
    assert drain(quick, 7) == events
    assert slow.take(10)[1]["lost"] == 49
