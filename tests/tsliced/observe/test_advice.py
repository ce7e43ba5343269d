"""What jobs hear of what they do, once."""

from __future__ import annotations

from itertools import count

from tsliced.host.history import Event
from tsliced.observe.advice import SHORT_HOLDS, Advice, Advisor

TOKENS = count(1)
A = "1000/a"


def turn(
    advisor: Advisor, held_s: float, switch_s: float, job: str = A, ranks: int = 1
) -> list[Advice]:
    """Lets a job have a turn; returns what it hears."""
    token, heard = next(TOKENS), []
    leases = [f"{token}.{rank}" for rank in range(ranks)]
    for kind in ("granted", "released"):
        for lease in leases:
            event: Event = {"kind": kind, "job": job, "lease": lease, "at": 0.0, "token": token}
            event |= {"switch_s": switch_s} if kind == "granted" else {"held_s": held_s}
            if (advice := advisor.add(event)) is not None:
                heard.append(advice)
    return heard


def test_the_third_lease_that_is_shorter_than_its_switch_is_told_and_no_other() -> None:
    advisor = Advisor()
    assert turn(advisor, 1.0, 5.0) == turn(advisor, 60.0, 5.0) == turn(advisor, 2.0, 5.0) == []
    (advice,) = turn(advisor, 1.5, 5.0)
    assert (advice.job, advice.code) == (A, SHORT_HOLDS)
    assert "3 of its leases" in advice.text
    assert "held for 1.50 s after a switch of 5.00 s" in advice.text
    assert "of 45 s or more" in advice.text
    assert turn(advisor, 1.0, 5.0) == []


def test_each_job_counts_for_itself_and_ranks_of_a_round_once() -> None:
    advisor = Advisor()
    for _ in range(2):
        assert turn(advisor, 1.0, 5.0, ranks=8) == turn(advisor, 1.0, 5.0, "1000/b") == []
    assert len(turn(advisor, 1.0, 5.0, ranks=8)) == 1
    assert len(turn(advisor, 1.0, 5.0, "1000/b")) == 1


def test_leases_without_a_switch_and_switches_of_milliseconds_are_no_matter() -> None:
    advisor = Advisor()
    for _ in range(5):
        assert turn(advisor, 0.001, 0.0) == turn(advisor, 0.001, 0.05) == []


def test_the_books_do_not_grow_without_end() -> None:
    advisor = Advisor()
    for number in range(5000):
        turn(advisor, 1.0, 5.0, f"1000/{number}")
    assert len(advisor._jobs) <= 4096
