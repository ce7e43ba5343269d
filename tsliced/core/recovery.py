"""A machine rebuilt from what the journal kept.

Nothing is decided here. Ranks are UNKNOWN until the driver has been asked, sessions are gone until
their clients come back, and whoever waited waits at the same place: `Started` sets it all going.
"""

from __future__ import annotations

from collections.abc import Iterable

from tsliced.core.actions import (
    FaultRecord,
    LeaseEndedRecord,
    LeaseRecord,
    RankEndedRecord,
    RankRecord,
    Record,
    SessionEndedRecord,
    SessionRecord,
    TenancyEndedRecord,
    TenancyRecord,
)
from tsliced.core.coordinator import Place
from tsliced.core.machine import Machine
from tsliced.core.model import Goal, RankState, RoundId
from tsliced.core.rank import Rank
from tsliced.core.rounds import Round, RoundState
from tsliced.core.sessions import Lease, LeaseState, Session
from tsliced.core.timers import TimerKey, TimerKind


def recover(machine: Machine, records: Iterable[Record], *, now: float) -> None:
    """Put the journal's state (not its history: one record per thing) into a fresh machine."""
    leases: list[LeaseRecord] = []
    for record in records:
        match record:
            case SessionRecord():
                _session(machine, record, now)
            case LeaseRecord():
                leases.append(record)
            case LeaseEndedRecord():
                session = machine.leasing.sessions.get(record.session)
                if session is not None:
                    session.recall(record, limit=machine.config.limits.max_answers)
            case TenancyRecord():
                _tenancy(machine, record)
            case RankRecord():
                _rank(machine, record)
            case FaultRecord(job=job, reason=reason):
                if reason is not None:
                    machine.leasing.faults[job] = reason
            case SessionEndedRecord() | TenancyEndedRecord() | RankEndedRecord():
                raise AssertionError("a journal's state has no ends in it")
    # Holders first: they have their groups before anybody is put into a queue.
    for record in sorted(leases, key=lambda lease: (not lease.tokens, lease.place, lease.lease)):
        _lease(machine, record, now)


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
            connected=False,
        )
    )
    key = TimerKey(TimerKind.GRACE, record.session)
    machine.timers.set(key, now + machine.config.limits.grace_s)


def _tenancy(machine: Machine, record: TenancyRecord) -> None:
    if any(group not in machine.leasing.arbiters for group in record.tenancy.groups):
        # The configuration no longer has the group; its ranks are found again by a scan.
        return
    place = Place.OFF if record.goal is Goal.OFF else Place.ON
    coordinator = machine.tenancies.make(record.tenancy, place).coordinator
    coordinator.stamp, coordinator.pinned = record.stamp, record.pinned


def _rank(machine: Machine, record: RankRecord) -> None:
    tenancies = machine.tenancies
    if record.tenancy not in tenancies.all:
        if any(group not in machine.leasing.arbiters for group in record.tenancy.groups):
            return
        tenancies.make(record.tenancy, Place.ON)
    rank = Rank(
        id=record.rank,
        devices=record.devices,
        device_bytes=record.device_bytes,
        state=RankState.UNKNOWN,
        parked_bytes=record.device_bytes,
    )
    tenancies.all[record.tenancy].participant.ranks[record.rank.process] = rank
    tenancies.home[record.rank.process] = record.tenancy


def _lease(machine: Machine, record: LeaseRecord, now: float) -> None:
    leasing = machine.leasing
    session = leasing.sessions.get(record.session)
    if session is None or any(group not in leasing.arbiters for group in record.groups):
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
        # Whether the grant arrived is not known; its client will ask again or confirm.
        unconfirmed=bool(record.tokens),
    )
    leasing.put_lease(session, lease, _round(machine, record, session, now))


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
            place=record.place,
        )
        leasing.rounds[round_.id] = round_
    if record.tokens and round_.state is not RoundState.HELD:
        round_.state, round_.reserved = RoundState.HELD, len(round_.groups)
        for group in round_.groups:
            leasing.arbiters[group].chosen = round_.id
    elif not record.tokens and record.place and round_.state is RoundState.GATHERING:
        round_.state = RoundState.QUEUED
    if record.ranks > 1:
        leasing.regain_gang(round_, record.session)
    leasing.last_round = RoundId(max(leasing.last_round, round_.id))
    leasing.last_place = max(leasing.last_place, record.place)
    return round_
