"""Records to write into a journal, one plain example of each type."""

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
from tsliced.core.model import (
    Arrival,
    Cause,
    Counter,
    DeviceId,
    Drain,
    Goal,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    RequestId,
    RoundId,
    SessionId,
    Stamp,
    TenancyKey,
    Verb,
)

TRAINER = GroupName("trainer")
JOB = JobKey("slurm", 1000, "4711")
TENANCY = TenancyKey(JOB, (TRAINER,))
RANK = RankId(HostName("n1"), ProcessId(77, 123_456))


def session(name: str) -> SessionRecord:
    return SessionRecord(
        session=SessionId(name),
        job=JOB,
        process=ProcessId(42, 99_000),
        secret=b"\x00\xff",
        groups=(TRAINER,),
        hooks=True,
        agent=False,
    )


def session_ended(name: str) -> SessionEndedRecord:
    return SessionEndedRecord(session=SessionId(name))


def lease(number: int, *, session: str = "s-1", text: str = "rollout") -> LeaseRecord:
    return LeaseRecord(
        lease=LeaseId(f"l-{number}"),
        session=SessionId(session),
        request=RequestId(number),
        round=RoundId(number),
        place=number,
        groups=(TRAINER,),
        phase=text,
        ranks=1,
        arrival=Arrival.ALL,
        tokens=((TRAINER, Counter(7, number)),),
    )


def lease_ended(number: int, *, session: str = "s-1", slots: int = 128) -> LeaseEndedRecord:
    return LeaseEndedRecord(
        lease=LeaseId(f"l-{number}"),
        session=SessionId(session),
        request=RequestId(number),
        slot=number % slots,
        code="released",
        text="",
        waiters=2,
        deferred=False,
    )


def tenancy(*, step: int = 1) -> TenancyRecord:
    return TenancyRecord(
        tenancy=TENANCY,
        stamp=Stamp(0, Counter(7, 9), step),
        goal=Goal.OFF,
        pinned=Reason(cause=Cause.UNSUPPORTED, text="CUDA IPC is in use", rank=RANK),
    )


def rank(*, verb: Verb | None = Verb.FREEZE) -> RankRecord:
    return RankRecord(
        rank=RANK,
        tenancy=TENANCY,
        devices=frozenset({DeviceId("GPU-1"), DeviceId("GPU-0")}),
        device_bytes=80 << 30,
        state=RankState.RUNNING,
        verb=verb,
        bytes_on=((DeviceId("GPU-0"), 70 << 30), (DeviceId("GPU-1"), 10 << 30)),
        residue=((DeviceId("GPU-1"), 2 << 20),),
    )


def fault(*, cleared: bool = False) -> FaultRecord:
    reason = None if cleared else Reason(cause=Cause.RANK_LOST, text="rank 3 is gone")
    return FaultRecord(job=JOB, reason=reason)


def drain(*, over: bool = False) -> DrainRecord:
    wish = None if over else Drain(park=True, by="root", since_unix=1_800_000_000.5)
    return DrainRecord(group=TRAINER, drain=wish)


def stranger(*, gone: bool = False) -> StrangerRecord:
    return StrangerRecord(job=JOB, process=None if gone else RANK.process)


def remains(*, over: bool = False) -> RemainsRecord:
    return RemainsRecord(job=JOB, orphaned=not over, survivors=() if over else (RANK.process,))


def host() -> HostRecord:
    boot = "22222222-3333-4444-5555-666666666666"
    return HostRecord(host=HostName("n2"), boot=boot, incarnation=f"{boot}/1.5", dead_by=None)


def foreign_lease(*, over: bool = False) -> ForeignLeaseRecord:
    return ForeignLeaseRecord(
        lease=LeaseId("s-1.5"),
        session=SessionId("s-1"),
        request=RequestId(5),
        arbiter=None if over else HostName("n2"),
        tokens=((TRAINER, Counter(7, 5)),),
    )


def reservation(*, over: bool = False) -> ReservationRecord:
    return ReservationRecord(
        host=HostName("n2"),
        round=RoundId(3),
        group=TRAINER,
        job=JOB,
        place=4,
        token=Counter(7, 6),
        over=over,
    )


def handover(*, over: bool = False) -> HandoverRecord:
    return HandoverRecord(
        tenancy=TENANCY,
        stamp=Stamp(2, Counter(0, 0), 0),
        to=None if over else HostName("n2"),
        on=True,
        pinned=Reason(cause=Cause.NO_HOST_MEMORY, text="no room"),
    )


TENANCY_ENDED = TenancyEndedRecord(tenancy=TENANCY)
RANK_ENDED = RankEndedRecord(rank=RANK)

#: One of each type that stands for something, in the order in which a journal gives them back.
STANDING: tuple[Record, ...] = (
    session("s-1"),
    fault(),
    drain(),
    stranger(),
    remains(),
    tenancy(),
    rank(),
    host(),
    foreign_lease(),
    reservation(),
    handover(),
    lease(1),
    lease(2),
    lease_ended(0),
)
