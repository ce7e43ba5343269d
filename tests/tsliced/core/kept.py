"""The journal of the simulated world: what a sequence of records leaves standing."""

from __future__ import annotations

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


def keep(journal: dict[tuple[object, ...], Record], record: Record) -> None:
    """Write a record as the journal would: one per thing."""
    match record:
        case SessionRecord():
            journal["session", record.session] = record
        case SessionEndedRecord(session=session):
            journal.pop(("session", session), None)
            for key in [k for k in journal if k[:2] == ("ended", session)]:
                del journal[key]
        case LeaseRecord():
            journal["lease", record.lease] = record
        case LeaseEndedRecord():
            journal.pop(("lease", record.lease), None)
            journal["ended", record.session, record.slot] = record
        case TenancyRecord():
            journal["tenancy", record.tenancy] = record
        case TenancyEndedRecord(tenancy=tenancy):
            journal.pop(("tenancy", tenancy), None)
        case RankRecord():
            journal["rank", record.rank] = record
        case RankEndedRecord(rank=rank):
            journal.pop(("rank", rank), None)
        case FaultRecord(job=key, reason=reason):
            journal["fault", key] = record
            if reason is None:
                del journal["fault", key]
        case StrangerRecord(job=key, process=process):
            journal["stranger", key] = record
            if process is None:
                del journal["stranger", key]
        case RemainsRecord(job=key):
            journal["remains", key] = record
            if record.is_empty:
                del journal["remains", key]
        case ForeignLeaseRecord(lease=lease, arbiter=arbiter):
            journal["foreign", lease] = record
            if arbiter is None:
                del journal["foreign", lease]
        case ReservationRecord(host=host, round=number, group=group, over=over):
            journal["reservation", host, number, group] = record
            if over:
                del journal["reservation", host, number, group]
        case HandoverRecord(tenancy=tenancy, to=to):
            journal["handover", tenancy] = record
            if to is None:
                del journal["handover", tenancy]
        case HostRecord(host=host):
            journal["host", host] = record
        case DrainRecord(group=group, drain=drain):
            journal["drain", group] = record
            if drain is None:
                del journal["drain", group]
