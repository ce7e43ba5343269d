"""When a round is complete, and who belongs to it."""

from __future__ import annotations

import pytest
from world import G1, job

from tsliced.core.model import Arrival, LeaseId, RequestId, RoundId, SessionId
from tsliced.core.rounds import Gang, Round
from tsliced.core.sessions import Lease

S1, S2, S3 = SessionId("s1"), SessionId("s2"), SessionId("s3")


def round_of(ranks: int, *members: SessionId, arrival: Arrival = Arrival.ALL) -> Round:
    made = Round(
        id=RoundId(1),
        job=job("a"),
        groups=(G1,),
        ranks=ranks,
        arrival=arrival,
        asked_at=0.0,
    )
    for session in members:
        lease = Lease(
            id=LeaseId(f"{session}.1"),
            session=session,
            request=RequestId(1),
            round=made.id,
            groups=(G1,),
            phase="",
            ranks=ranks,
            arrival=arrival,
            asked_at=0.0,
        )
        made.members[lease.id] = lease
        made.took_part.add(session)
    return made


@pytest.mark.parametrize(
    ("ranks", "live", "members", "arrival", "complete"),
    [
        (1, 1, 1, Arrival.ALL, True),
        (2, 2, 1, Arrival.ALL, False),
        (2, 2, 2, Arrival.ALL, True),
        (2, 1, 1, Arrival.ALL, True),  # the other one is gone
        (2, 0, 0, Arrival.ALL, False),  # nobody has asked
        (3, 3, 1, Arrival.FIRST, True),
        (3, 3, 0, Arrival.FIRST, False),
    ],
)
def test_a_round_is_complete_when_all_live_ranks_have_asked_or_at_the_first(
    ranks: int, live: int, members: int, arrival: Arrival, complete: bool
) -> None:
    made = round_of(ranks, *(S1, S2, S3)[:members], arrival=arrival)
    assert made.complete(live) is complete


def test_a_session_takes_part_once_and_only_while_there_is_room() -> None:
    made = round_of(2, S1)
    assert not made.may_join(S1)
    assert made.may_join(S2)
    made.took_part.add(S2)
    assert not made.may_join(S3)


def test_a_new_session_stands_in_for_one_that_is_gone() -> None:
    gang = Gang(sessions={S1}, lost=1)
    gang.join(S1, 2)
    assert gang.lost == 1
    gang.join(S2, 2)
    assert gang.lost == 0


def test_one_that_asks_late_stands_in_for_nobody() -> None:
    gang = Gang(sessions={S1}, lost=1)
    gang.join(S2, 3)
    assert gang.lost == 1
