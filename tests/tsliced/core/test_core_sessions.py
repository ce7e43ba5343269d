"""Sessions: what is kept of them and how long answers are remembered."""

from __future__ import annotations

from world import G1, G2, job

from tsliced.core.actions import LeaseEndedRecord, LeaseRecord, SessionRecord
from tsliced.core.model import Arrival, LeaseId, ProcessId, RequestId, RoundId, SessionId
from tsliced.core.sessions import RELEASED, Lease, Session, lease_name

S = SessionId("s")


def session() -> Session:
    return Session(
        id=S,
        job=job("a"),
        process=ProcessId(1, 2),
        secret=b"x",
        groups=(G1, G2),
        hooks=True,
        agent=True,
    )


def remember(known: Session, request: int, *, limit: int = 3) -> LeaseEndedRecord:
    number = RequestId(request)
    return known.remember(lease_name(S, number), number, code=RELEASED, text="over", limit=limit)


def test_a_record_holds_all_that_a_restart_needs() -> None:
    assert session().record() == SessionRecord(
        session=S,
        job=job("a"),
        process=ProcessId(1, 2),
        secret=b"x",
        groups=(G1, G2),
        hooks=True,
        agent=True,
    )
    lease = Lease(
        id=LeaseId("s.1"),
        session=S,
        request=RequestId(1),
        round=RoundId(5),
        groups=(G1,),
        phase="rollout",
        ranks=2,
        arrival=Arrival.FIRST,
        asked_at=3.0,
    )
    assert lease.record(place=9, lost=1) == LeaseRecord(
        lease=LeaseId("s.1"),
        session=S,
        request=RequestId(1),
        round=RoundId(5),
        place=9,
        groups=(G1,),
        phase="rollout",
        ranks=2,
        arrival=Arrival.FIRST,
        tokens=(),
        lost=1,
    )


def test_g6_a_lease_is_named_after_its_request() -> None:
    assert lease_name(S, RequestId(7)) == "s.7"


def test_g9_only_so_many_answers_are_remembered_and_the_oldest_goes_first() -> None:
    known = session()
    slots = [remember(known, request).slot for request in range(1, 6)]
    assert list(known.ended) == ["s.3", "s.4", "s.5"]
    assert slots == [0, 1, 2, 0, 1]


def test_g6_answers_survive_a_restart_whichever_slot_they_are_in() -> None:
    known = session()
    records = [remember(known, request) for request in range(1, 6)][-3:]
    again = session()
    for record in sorted(records, key=lambda ended: ended.request):
        again.recall(record)
    # The next one takes the place of the oldest, not of the lowest slot.
    assert remember(again, 6).slot == records[0].slot
    assert list(again.ended) == ["s.4", "s.5", "s.6"]


def test_a_lower_limit_after_a_restart_is_kept_to() -> None:
    known = session()
    for request in range(1, 4):
        remember(known, request)
    remember(known, 4, limit=2)
    assert list(known.ended) == ["s.3", "s.4"]
