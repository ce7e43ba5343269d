"""The quicker way to make values: it makes the same."""

from __future__ import annotations

import pytest
from world import G1, job

from tsliced.core.actions import LeaseRecord, Note
from tsliced.core.events import AcquireRequested
from tsliced.core.model import Arrival, LeaseId, RequestId, RoundId, SessionId
from tsliced.core.rounds import Round, RoundState
from tsliced.core.value import maker


def test_a_maker_makes_what_the_class_makes() -> None:
    session, request = SessionId("s"), RequestId(1)
    make_record, make_event = maker(LeaseRecord), maker(AcquireRequested)
    for lost in (0, 2):
        assert make_record(
            lease=LeaseId("l"), session=session, request=request, round=RoundId(3), place=4,
            groups=(G1,), phase="p", ranks=5, arrival=Arrival.FIRST, tokens=(), lost=lost,
        ) == LeaseRecord(
            lease=LeaseId("l"), session=session, request=request, round=RoundId(3), place=4,
            groups=(G1,), phase="p", ranks=5, arrival=Arrival.FIRST, tokens=(), lost=lost,
        )  # fmt: skip
    assert make_event(session=session, request=request) == AcquireRequested(
        session=session, request=request
    )


def test_what_a_maker_makes_shares_no_default() -> None:
    make = maker(Round)
    one, other = (
        make(id=RoundId(n), job=job("a"), groups=(G1,), ranks=1, arrival=Arrival.ALL, asked_at=0.0)
        for n in (1, 2)
    )
    one.took_part.add(SessionId("s"))
    one.members.clear()
    assert other.took_part == set()
    assert one.members is not other.members
    assert other.state is RoundState.GATHERING
    given = {SessionId("t")}
    third = make(
        id=RoundId(3), job=job("a"), groups=(G1,), ranks=1, arrival=Arrival.ALL, asked_at=0.0,
        took_part=given,
    )  # fmt: skip
    assert third.took_part is given


def test_a_maker_refuses_what_the_class_refuses() -> None:
    make = maker(Note)
    with pytest.raises(TypeError, match="facts"):
        make(kind="k", level="info")  # type: ignore[call-arg]  # that is what is tested
    with pytest.raises(TypeError, match="colour"):
        make(kind="k", level="info", facts={}, colour=1)  # type: ignore[call-arg]  # as above
