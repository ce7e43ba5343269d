"""A machine rebuilt from what the journal kept.

Nothing is decided here. Ranks are UNKNOWN until the driver has been asked, sessions are gone until
their clients come back, and whoever waited waits at the same place: `Started` sets it all going.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from tsliced.core.coordinator import NO_STAMP, Place
from tsliced.core.fronting import ForeignLease
from tsliced.core.machine import Machine
from tsliced.core.model import Goal, GroupName, RankState, RoundId, Token
from tsliced.core.rank import Rank
from tsliced.core.remains import Remnant
from tsliced.core.rounds import Borrower, Elsewhere, Round, RoundState
from tsliced.core.sessions import Lease, LeaseState, Session


def recover(machine: Machine, records: Iterable[Record], *, now: float) -> None:
    """Put the journal's state (not its history: one record per thing) into a fresh machine."""
    state = _State()
    for record in records:
        match record:
            case SessionRecord():
                state.sessions.append(record)
            case LeaseRecord():
                state.leases.append(record)
            case LeaseEndedRecord():
                state.ended.append(record)
            case TenancyRecord():
                state.tenancies.append(record)
            case RankRecord():
                state.ranks.append(record)
            case FaultRecord(job=job, reason=reason):
                assert reason is not None, "a cleared fault is not kept"
                machine.leasing.faults[job] = reason
                machine.leasing.faulted_at[job] = now
            case StrangerRecord(job=job, process=process):
                assert process is not None, "a stranger that is gone is not kept"
                machine.tenancies.stranger_jobs[job] = process
            case RemainsRecord(job=job, orphaned=orphaned):
                machine.remains.jobs[job] = Remnant(
                    orphaned_at=now if orphaned else None,
                    named=orphaned,
                    survivors=dict.fromkeys(record.survivors),
                )
            case DrainRecord(group=group, drain=drain):
                assert drain is not None, "a drain that is over is not kept"
                if group in machine.leasing.arbiters:
                    machine.leasing.drains[group] = drain
            case ForeignLeaseRecord():
                state.foreign.append(record)
            case ReservationRecord():
                state.reservations.append(record)
            case HandoverRecord():
                state.handovers.append(record)
            case HostRecord():
                machine.hosts.links.regain(record)
            case SessionEndedRecord() | TenancyEndedRecord() | RankEndedRecord():
                raise AssertionError("a journal's state has no ends in it")
            case _:
                assert_never(record)
    state.put_into(machine, now)


@dataclass(slots=True)
class _State:
    """The journal's records by kind: each needs those before it, in whatever order they came."""

    sessions: list[SessionRecord] = field(default_factory=list)
    ended: list[LeaseEndedRecord] = field(default_factory=list)
    tenancies: list[TenancyRecord] = field(default_factory=list)
    ranks: list[RankRecord] = field(default_factory=list)
    leases: list[LeaseRecord] = field(default_factory=list)
    foreign: list[ForeignLeaseRecord] = field(default_factory=list)
    reservations: list[ReservationRecord] = field(default_factory=list)
    handovers: list[HandoverRecord] = field(default_factory=list)

    def put_into(self, machine: Machine, now: float) -> None:
        for session in self.sessions:
            _session(machine, session, now)
        # By request, because a slot does not tell what is older.
        for ended in sorted(self.ended, key=lambda record: record.request):
            if (owner := machine.leasing.sessions.get(ended.session)) is not None:
                owner.recall(ended)
            else:
                machine.unwritten.add([SessionEndedRecord(session=ended.session)])
        for tenancy in self.tenancies:
            _tenancy(machine, tenancy, now)
        for rank in self.ranks:
            _rank(machine, rank)
        for known in machine.tenancies.all.values():
            if not known.participant.ranks and not known.is_abroad:
                # Whether it is alone on its devices is looked at when its job is let on again.
                known.coordinator.place, known.participant.away = Place.OFF, True
        # Holders first: they have their groups before anybody is put into a queue.
        for lease in sorted(self.leases, key=lambda r: (not r.tokens, r.place, r.lease)):
            _lease(machine, lease, now)
        for foreign in self.foreign:
            _foreign_lease(machine, foreign)
        for reservation in sorted(self.reservations, key=lambda r: (r.token is None, r.place)):
            _reservation(machine, reservation, now)
        for handover in self.handovers:
            _handover(machine, handover)


def _session(machine: Machine, record: SessionRecord, now: float) -> None:
    machine.leasing.put_session(
        Session(
            id=record.session,
            job=record.job,
            process=record.process,
            secret=record.secret,
            groups=record.groups,
            hooks=record.hooks,
            agent=record.agent,
            heartbeat_s=record.heartbeat_s,
            host=record.host,
            connected=False,
            regained=True,
        )
    )
    if record.host is None:
        machine.leasing.await_return(record.session, now)


def _tenancy(machine: Machine, record: TenancyRecord, now: float) -> None:
    if any(group not in machine.tenancies.order_of for group in record.tenancy.groups):
        # The configuration no longer has the group; its ranks are found again by a scan.
        return
    place = Place.OFF if record.goal is Goal.OFF else Place.ON
    lead = record.lead or machine.config.host
    tenancy = machine.tenancies.make(record.tenancy, place, lead)
    coordinator, participant = tenancy.coordinator, tenancy.participant
    coordinator.stamp, coordinator.goal = record.stamp, record.goal
    coordinator.pinned, coordinator.stopped_at = record.pinned, now
    participant.away = record.goal in (Goal.OFF, Goal.RESTORED)
    # Whether its sessions were told to resume is not kept; to be told again does no harm.
    participant.quiesced = record.stamp != NO_STAMP


def rank_of(record: RankRecord) -> Rank:
    """Return a rank as the journal has it; where it is now only the driver knows."""
    return Rank(
        id=record.rank,
        devices=record.devices,
        device_bytes=record.device_bytes,
        state=RankState.UNKNOWN,
        parked_bytes=record.device_bytes,
        bytes_on=record.bytes_on,
        residue=record.residue,
    )


def _rank(machine: Machine, record: RankRecord) -> None:
    tenancies = machine.tenancies
    if record.tenancy not in tenancies.all:
        if any(group not in tenancies.order_of for group in record.tenancy.groups):
            return
        tenancies.make(record.tenancy, Place.ON)
    tenancies.regain(rank_of(record), record.tenancy)


def _lease(machine: Machine, record: LeaseRecord, now: float) -> None:
    leasing = machine.leasing
    session = leasing.sessions.get(record.session)
    if session is None:
        # Its end could not be written.
        machine.unwritten.add([_end_of(record), SessionEndedRecord(session=record.session)])
        return
    if any(group not in machine.tenancies.order_of for group in record.groups):
        text, limit = "its group is no longer configured", machine.config.limits.max_answers
        ended = session.remember(
            record.lease, record.request, code="lease_ended", text=text, limit=limit
        )
        machine.unwritten.add([ended])
        return
    lease = Lease(
        id=record.lease,
        session=record.session,
        request=record.request,
        round=record.round,
        groups=record.groups,
        phase=record.phase,
        ranks=record.ranks,
        arrival=record.arrival,
        asked_at=now,
        state=LeaseState.HELD if record.tokens else LeaseState.WAITING,
        tokens=record.tokens,
        granted_at=now,
        queued=True,
    )
    leasing.put_lease(session, lease, _round(machine, record, session, now))


def _foreign_lease(machine: Machine, record: ForeignLeaseRecord) -> None:
    assert record.arbiter is not None, "a lease that is over is not kept"
    if record.session not in machine.leasing.sessions:
        # Its end could not be written.
        machine.unwritten.add([replace(record, arbiter=None)])
        return
    machine.fronting.regain(
        ForeignLease(
            id=record.lease,
            session=record.session,
            request=record.request,
            arbiter=record.arbiter,
            tokens=record.tokens,
        )
    )


def _have(machine: Machine, round_: Round, group: GroupName, token: Token) -> None:
    """Let a round have a group that it held."""
    leasing = machine.leasing
    arbiter = leasing.arbiters.get(group)
    if arbiter is not None:
        arbiter.chosen = round_.id
        return
    there = Elsewhere(
        arbiter=machine.tenancies.arbiter_of(group), token=token, committing=True, committed=True
    )
    round_.elsewhere[group], leasing.borrowed[group] = there, round_.id


def _reservation(machine: Machine, record: ReservationRecord, now: float) -> None:
    leasing = machine.leasing
    if record.group not in leasing.arbiters:
        machine.unwritten.add([replace(record, over=True)])
        return
    leasing.last_round = RoundId(leasing.last_round + 1)
    borrower = Borrower(record.host, record.round, record.group)
    round_ = leasing.stand_in(borrower, record.job, leasing.last_round)
    round_.place, round_.asked_at = record.place, now
    leasing.last_place = max(leasing.last_place, record.place)
    if record.token is not None:
        leasing.arbiters[record.group].chosen = round_.id
        leasing.keep_for(round_, record.token, now)


def _handover(machine: Machine, record: HandoverRecord) -> None:
    assert record.to is not None, "a handover that is over is not kept"
    machine.leads.resume(record, record.to)


def _end_of(record: LeaseRecord) -> LeaseEndedRecord:
    return LeaseEndedRecord(
        lease=record.lease,
        session=record.session,
        request=record.request,
        slot=0,
        code="lease_ended",
        text="its session is gone",
        waiters=0,
        deferred=False,
    )


def _round(machine: Machine, record: LeaseRecord, session: Session, now: float) -> Round:
    leasing = machine.leasing
    round_ = leasing.rounds.get(record.round)
    if round_ is None:
        round_ = Round(
            id=record.round,
            job=session.job,
            groups=record.groups,
            ranks=record.ranks,
            arrival=record.arrival,
            asked_at=now,
        )
        leasing.rounds[round_.id] = round_
    # Of what was written at once, only a part may have been kept.
    round_.place = max(round_.place, record.place)
    round_.lost = max(round_.lost, record.lost)
    if record.tokens:
        machine.tenancies.regain_held(session.job, record.groups)
        round_.state, round_.tokens = RoundState.HELD, record.tokens
        round_.reserved = len(round_.groups)
        for group, token in record.tokens:
            _have(machine, round_, group, token)
    elif round_.place and round_.state is RoundState.GATHERING:
        round_.state = RoundState.QUEUED
    if record.ranks > 1:
        leasing.regain_gang(round_)
    leasing.last_round = RoundId(max(leasing.last_round, round_.id))
    leasing.last_place = max(leasing.last_place, round_.place)
    return round_
