"""What the journal could not take is written with the next thing that is written."""

from __future__ import annotations

import pytest
from world import D1, G1, HOST, failure, job

from tsliced.core.actions import (
    FaultRecord,
    LeaseEndedRecord,
    LeaseRecord,
    RankEndedRecord,
    RankRecord,
    Record,
    RemainsRecord,
    SessionEndedRecord,
    SessionRecord,
    StrangerRecord,
    TenancyEndedRecord,
    TenancyRecord,
)
from tsliced.core.coordinator import NO_STAMP
from tsliced.core.model import (
    Arrival,
    Cause,
    Goal,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    RequestId,
    RoundId,
    SessionId,
    TenancyKey,
)
from tsliced.core.unwritten import Unwritten, subject_of

SESSION, LEASE = SessionId("s"), LeaseId("s.1")
KEY = TenancyKey(job("a"), (G1,))
RANK = RankId(HOST, ProcessId(1, 1))

PAIRS: list[tuple[Record, Record]] = [
    (
        SessionRecord(
            session=SESSION,
            job=job("a"),
            process=ProcessId(1, 1),
            secret=b"",
            groups=(G1,),
            hooks=False,
            agent=False,
        ),
        SessionEndedRecord(session=SESSION),
    ),
    (
        LeaseRecord(
            lease=LEASE,
            session=SESSION,
            request=RequestId(1),
            round=RoundId(1),
            place=1,
            groups=(G1,),
            phase="",
            ranks=1,
            arrival=Arrival.ALL,
            tokens=(),
        ),
        LeaseEndedRecord(
            lease=LEASE,
            session=SESSION,
            request=RequestId(1),
            slot=0,
            code="",
            text="",
            waiters=0,
            deferred=True,
        ),
    ),
    (
        TenancyRecord(tenancy=KEY, stamp=NO_STAMP, goal=Goal.ON),
        TenancyEndedRecord(tenancy=KEY),
    ),
    (
        RankRecord(
            rank=RANK,
            tenancy=KEY,
            devices=frozenset({D1}),
            device_bytes=1,
            state=RankState.RUNNING,
            verb=None,
        ),
        RankEndedRecord(rank=RANK),
    ),
    (
        FaultRecord(job=job("a"), reason=failure(Cause.DRIVER)),
        FaultRecord(job=job("a"), reason=None),
    ),
    (
        StrangerRecord(job=job("a"), process=ProcessId(1, 1)),
        StrangerRecord(job=job("a"), process=None),
    ),
    (
        RemainsRecord(job=job("a"), orphaned=True, survivors=(ProcessId(1, 1),)),
        RemainsRecord(job=job("a"), orphaned=False, survivors=()),
    ),
]


@pytest.mark.parametrize(("begin", "end"), PAIRS)
def test_a_later_record_of_the_same_thing_replaces_an_earlier_one(
    begin: Record, end: Record
) -> None:
    assert subject_of(begin) == subject_of(end)
    unwritten = Unwritten()
    unwritten.add([begin])
    unwritten.add([end])
    assert unwritten.take_with(()) == [end]
    unwritten.add([begin])
    assert unwritten.take_with([end]) == [end]
    assert not unwritten


def test_what_is_due_goes_before_what_comes_later() -> None:
    records = [begin for begin, _ in PAIRS]
    unwritten = Unwritten()
    unwritten.add(records[:3])
    assert unwritten
    assert unwritten.take_with(records[3:]) == records
    assert unwritten.take_with(()) == []
