"""The nouns of the core, as people read them."""

from __future__ import annotations

import pytest
from world import G1, G2, HOST, job

from tsliced.core.model import Cause, Counter, JobKey, ProcessId, RankId, RankState, Reason
from tsliced.core.model import TenancyKey as Key

RANK = RankId(HOST, ProcessId(7, 1))


def test_names_are_fit_for_a_log() -> None:
    assert str(RANK) == "n1:7"
    assert str(job("a")) == "1000/a"
    assert str(JobKey("east", 5, "a")) == "east/5/a"
    assert str(Key(job("a"), (G1, G2))) == "1000/a@g1+g2"
    assert str(Reason(cause=Cause.DRIVER, text="no")) == "no"
    assert str(Reason(cause=Cause.DRIVER, text="no", rank=RANK)) == "no (pid 7 on n1)"


def test_g2_a_counter_sorts_like_its_integer_and_a_generation_beats_any_number() -> None:
    counters = [Counter(1, 0), Counter(1, 2**32 - 1), Counter(2, 0)]
    assert counters == sorted(counters)
    integers = [counter.as_int() for counter in counters]
    assert integers == sorted(set(integers))


def test_only_a_parked_rank_is_surely_off_its_device() -> None:
    assert [state for state in RankState if not state.holds_device] == [RankState.PARKED]


@pytest.mark.parametrize(
    ("cause", "rank", "ours"),
    [
        (Cause.JOURNAL, RANK, True),
        (Cause.JOURNAL, None, True),
        (Cause.DRIVER, None, True),
        (Cause.DRIVER, RANK, False),
        (Cause.UNSUPPORTED, None, False),
    ],
)
def test_the_journal_and_the_look_at_the_devices_are_the_daemons_own_trouble(
    cause: Cause, rank: RankId | None, ours: bool
) -> None:
    assert Reason(cause=cause, text="", rank=rank).is_ours is ours
