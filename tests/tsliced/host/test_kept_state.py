"""What a row of journal records says is still true."""

from __future__ import annotations

import random

from journal_records import (
    RANK_ENDED,
    STANDING,
    TENANCY_ENDED,
    drain,
    fault,
    foreign_lease,
    handover,
    lease,
    lease_ended,
    rank,
    remains,
    reservation,
    session,
    session_ended,
    stranger,
    tenancy,
)

from tsliced.core.actions import Record
from tsliced.host.kept_state import KeptState


def standing_after(*records: Record) -> tuple[Record, ...]:
    state = KeptState()
    for record in records:
        state.apply(record)
    return state.records()


def test_records_come_back_so_that_each_finds_what_it_refers_to() -> None:
    for seed in range(20):
        shuffled = random.Random(seed).sample(STANDING, len(STANDING))
        assert standing_after(*shuffled) == STANDING


def test_a_later_record_replaces_the_one_about_the_same_thing() -> None:
    assert standing_after(tenancy(step=1), tenancy(step=2)) == (tenancy(step=2),)
    assert standing_after(rank(), rank(verb=None)) == (rank(verb=None),)
    assert standing_after(lease(1), lease(1, text="eval")) == (lease(1, text="eval"),)


def test_what_ended_is_gone() -> None:
    ends = (
        TENANCY_ENDED,
        RANK_ENDED,
        fault(cleared=True),
        drain(over=True),
        stranger(gone=True),
        remains(over=True),
        foreign_lease(over=True),
        reservation(over=True),
        handover(over=True),
        session_ended("s-1"),
    )
    begun = (tenancy(), rank(), fault(), stranger(), remains(), session("s-1"))
    of_other_hosts = (foreign_lease(), reservation(), handover())
    assert standing_after(*ends) == ()
    assert standing_after(*begun, *of_other_hosts, *ends) == ()


def test_the_end_of_a_lease_takes_the_lease_away_and_stays_as_the_answer() -> None:
    assert standing_after(lease(1), lease(2), lease_ended(1)) == (lease(2), lease_ended(1))


def test_an_answer_replaces_only_the_one_in_its_slot_of_its_session() -> None:
    ends = [lease_ended(number, slots=2) for number in range(3)]
    other = lease_ended(2, session="s-2", slots=2)
    assert standing_after(*ends, other) == (ends[2], ends[1], other)


def test_the_end_of_a_session_takes_its_answers_and_nobody_elses() -> None:
    mine, theirs = lease_ended(1), lease_ended(1, session="s-10")
    assert standing_after(session("s-1"), mine, theirs, session_ended("s-1")) == (theirs,)


def test_leases_come_in_the_order_of_their_rounds() -> None:
    assert standing_after(lease(3), lease(1), lease(2)) == (lease(1), lease(2), lease(3))
