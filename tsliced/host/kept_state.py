"""What a sequence of journal records says is still true.

The journal folds every batch that it has written into one `KeptState`. It is the source of
snapshots, so that the log can be cut, and it is what a start replays the log into.
"""

from __future__ import annotations

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
from tsliced.core.model import (
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    RankId,
    RoundId,
    SessionId,
    TenancyKey,
)


class KeptState:
    """The records that stand, by what they are about. Nothing fails: unknown ends are no-ops."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, SessionRecord] = {}
        self._faults: dict[JobKey, FaultRecord] = {}
        self._strangers: dict[JobKey, StrangerRecord] = {}
        self._remains: dict[JobKey, RemainsRecord] = {}
        self._drains: dict[GroupName, DrainRecord] = {}
        self._tenancies: dict[TenancyKey, TenancyRecord] = {}
        self._ranks: dict[RankId, RankRecord] = {}
        self._foreign: dict[LeaseId, ForeignLeaseRecord] = {}
        self._hosts: dict[HostName, HostRecord] = {}
        self._reservations: dict[tuple[HostName, RoundId, GroupName], ReservationRecord] = {}
        self._handovers: dict[TenancyKey, HandoverRecord] = {}
        self._leases: dict[LeaseId, LeaseRecord] = {}
        #: By session and slot, so that a session's answers go with it in one step.
        self._ended: dict[SessionId, dict[int, LeaseEndedRecord]] = {}

    def apply(self, record: Record) -> None:
        """Fold one record in."""
        match record:  # those of every acquire and release first, then of every switch
            case LeaseRecord():
                self._leases[record.lease] = record
            case LeaseEndedRecord():
                self._leases.pop(record.lease, None)
                self._ended.setdefault(record.session, {})[record.slot] = record
            case RankRecord():
                self._ranks[record.rank] = record
            case TenancyRecord():
                self._tenancies[record.tenancy] = record
            case SessionRecord():
                self._sessions[record.session] = record
            case SessionEndedRecord():
                self._sessions.pop(record.session, None)
                self._ended.pop(record.session, None)
            case TenancyEndedRecord():
                self._tenancies.pop(record.tenancy, None)
            case RankEndedRecord():
                self._ranks.pop(record.rank, None)
            case FaultRecord(reason=None):
                self._faults.pop(record.job, None)
            case FaultRecord():
                self._faults[record.job] = record
            case StrangerRecord(process=None):
                self._strangers.pop(record.job, None)
            case StrangerRecord():
                self._strangers[record.job] = record
            case RemainsRecord() if record.is_empty:
                self._remains.pop(record.job, None)
            case RemainsRecord():
                self._remains[record.job] = record
            case ForeignLeaseRecord(arbiter=None):
                self._foreign.pop(record.lease, None)
            case ForeignLeaseRecord():
                self._foreign[record.lease] = record
            case ReservationRecord(over=True):
                self._reservations.pop((record.host, record.round, record.group), None)
            case ReservationRecord():
                self._reservations[record.host, record.round, record.group] = record
            case HandoverRecord(to=None):
                self._handovers.pop(record.tenancy, None)
            case HandoverRecord():
                self._handovers[record.tenancy] = record
            case HostRecord():
                self._hosts[record.host] = record
            case DrainRecord(drain=None):
                self._drains.pop(record.group, None)
            case DrainRecord():
                self._drains[record.group] = record
            case _:
                assert_never(record)

    def records(self) -> tuple[Record, ...]:
        """Return what stands, in an order in which each record finds what it refers to.

        Leases come in the order of their rounds, which is the order of the queue.
        """
        return (
            *self._sessions.values(),
            *self._faults.values(),
            *self._drains.values(),
            *self._strangers.values(),
            *self._remains.values(),
            *self._tenancies.values(),
            *self._ranks.values(),
            *self._hosts.values(),
            *self._foreign.values(),
            *self._reservations.values(),
            *self._handovers.values(),
            *sorted(self._leases.values(), key=lambda lease: lease.round),
            *(ended for slots in self._ended.values() for ended in slots.values()),
        )
