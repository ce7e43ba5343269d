"""The core's one deadline, made of many."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tsliced.core.timers import Timers


def test_the_deadline_is_the_earliest_and_what_is_due_comes_in_order() -> None:
    assert Timers[str]().deadline is None
    timers: Timers[str] = Timers()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        timers.set(key, at)
    assert timers.deadline == 1.0
    assert timers.pop_due(2.0) == ["a", "b"]
    assert timers.pop_due(2.0) == []
    assert timers.deadline == 3.0


def test_equal_instants_come_in_the_order_of_setting() -> None:
    timers: Timers[int] = Timers()
    for key in (3, 1, 2):
        timers.set(key, 1.0)
    assert timers.pop_due(1.0) == [3, 1, 2]


def test_a_key_has_one_instant_the_latest_that_was_set() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    assert timers.get("a") == 5.0
    assert timers.pop_due(4.0) == []
    assert timers.pop_due(5.0) == ["a"]
    assert timers.get("a") is None


def test_a_cleared_key_never_comes_and_clearing_an_unknown_one_is_harmless() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.clear("a")
    timers.clear("b")
    assert timers.deadline is None
    assert timers.pop_due(9.0) == []


def test_what_was_cancelled_is_given_up_before_it_fills_memory() -> None:
    timers: Timers[int] = Timers()
    for at in range(5000):
        timers.set(0, float(at))
    timers.set(1, 1.0)
    assert len(timers._heap) < 2000
    assert timers.pop_due(1e9) == [1, 0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(0, 3), st.integers(0, 20)),
            st.tuples(st.just("clear"), st.integers(0, 3), st.just(0)),
            st.tuples(st.just("due"), st.just(0), st.integers(0, 20)),
        ),
        max_size=40,
    )
)
def test_timers_agree_with_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    plain: dict[int, int] = {}
    for what, key, at in steps:
        match what:
            case "set":
                timers.set(key, at)
                plain[key] = at
            case "clear":
                timers.clear(key)
                plain.pop(key, None)
            case _:
                due = timers.pop_due(at)
                assert sorted(due) == sorted(k for k, when in plain.items() if when <= at)
                assert [plain[k] for k in due] == sorted(plain[k] for k in due)
                for k in due:
                    del plain[k]
        assert timers.deadline == min(plain.values(), default=None)
