"""What the journal could not take: kept here, and written with the next thing that is written.

So a later record never stands beside an earlier one that it contradicts, and a journal that works
again tells the truth again soon.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from tsliced.core.actions import (
    DrainRecord,
    FaultRecord,
    ForeignLeaseRecord,
    HandoverRecord,
    HostRecord,
    LeaseEndedRecord,
    LeaseRecord,
    RankEndedRecord,
    RankRecord,
    Record,
    RemainsRecord,
    ReservationRecord,
    SessionEndedRecord,
    SessionRecord,
    StrangerRecord,
    TenancyEndedRecord,
    TenancyRecord,
)
from tsliced.core.model import JobKey, LeaseId, RankId, SessionId, TenancyKey


def subject_of(
    record: Record,
) -> SessionId | LeaseId | TenancyKey | RankId | JobKey | tuple[object, ...]:
    """Return what a record is about; a later record about the same replaces it."""
    match record:
        case SessionRecord(session=session) | SessionEndedRecord(session=session):
            return session
        case LeaseRecord(lease=lease) | LeaseEndedRecord(lease=lease):
            return lease
        case TenancyRecord(tenancy=tenancy) | TenancyEndedRecord(tenancy=tenancy):
            return tenancy
        case RankRecord(rank=rank) | RankEndedRecord(rank=rank):
            return rank
        case FaultRecord(job=job):
            return job
        case ForeignLeaseRecord(lease=lease):
            return (ForeignLeaseRecord, lease)
        case ReservationRecord(host=host, round=number, group=group):
            return (ReservationRecord, host, number, group)
        case HandoverRecord(tenancy=tenancy):
            return (HandoverRecord, tenancy)
        case HostRecord(host=host):
            return (HostRecord, host)
        case StrangerRecord(job=job):
            return (StrangerRecord, job)
        case RemainsRecord(job=job):
            return (RemainsRecord, job)
        case DrainRecord(group=group):
            # Not the bare name, which might be a session's too.
            return (group,)
        case _:
            assert_never(record)


class Unwritten:
    """Records that are due, the latest of each subject."""

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: dict[object, Record] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def add(self, records: Iterable[Record]) -> None:
        """Take in what could not be written."""
        for record in records:
            subject = subject_of(record)
            self._records.pop(subject, None)
            self._records[subject] = record

    def take_with(self, records: Iterable[Record]) -> list[Record]:
        """Return all that is due and not out of date, and behind it `records`."""
        later = list(records)
        for record in later:
            self._records.pop(subject_of(record), None)
        due, self._records = self._records, {}
        return [*due.values(), *later]
