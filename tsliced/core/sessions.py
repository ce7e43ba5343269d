"""Sessions and their leases: who speaks, what they asked for, what they were told.

A request is answered once and the answer is remembered: the same request sent again, over a new
connection or after a restart, gets the same answer. The name of a lease is made of its session and
request, so a repeated acquire can only ever mean the same lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tsliced.core.actions import LeaseEndedRecord, LeaseRecord, SessionRecord
from tsliced.core.model import (
    Arrival,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RequestId,
    RoundId,
    SessionId,
    Token,
)
from tsliced.core.value import maker

_make_lease_record = maker(LeaseRecord)
_make_lease_ended_record = maker(LeaseEndedRecord)

#: `LeaseEndedRecord.code` of a lease that ended as it should.
RELEASED = "released"


def lease_name(session: SessionId, request: RequestId) -> LeaseId:
    """Return the name of the lease that a session's request asks for."""
    return LeaseId(f"{session}.{request}")


class LeaseState(Enum):
    """Where a lease is in its life; an ended one is only remembered."""

    WAITING = "waiting"
    HELD = "held"


#: As with `RoundState`.
LEASE_WAITING, LEASE_HELD = LeaseState


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """One session's part in a round."""

    id: LeaseId
    session: SessionId
    request: RequestId
    round: RoundId
    groups: tuple[GroupName, ...]
    phase: str
    ranks: int
    arrival: Arrival
    asked_at: float
    state: LeaseState = LeaseState.WAITING
    tokens: tuple[tuple[GroupName, Token], ...] = ()
    granted_at: float = 0.0
    #: It has to wait, or had to: the history was told so.
    queued: bool = False
    #: A clock runs for its acquire.
    limited: bool = False
    #: A group that comes after one of these is held until after this lease: it must not wait.
    out_of_order: GroupName | None = None
    #: The client has to confirm the grant: it had to wait for it and may be gone.
    unconfirmed: bool = False

    def record(self, *, place: int, lost: int) -> LeaseRecord:
        """Return what must be kept of this lease and, in it, of its round."""
        return _make_lease_record(
            lease=self.id,
            session=self.session,
            request=self.request,
            round=self.round,
            place=place,
            groups=self.groups,
            phase=self.phase,
            ranks=self.ranks,
            arrival=self.arrival,
            tokens=self.tokens,
            lost=lost,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client, over all its connections."""

    id: SessionId
    job: JobKey
    process: ProcessId
    secret: bytes
    #: Groups that it may lease, in the configured order.
    groups: tuple[GroupName, ...]
    #: Where its client is, if that is not here: its front speaks for it.
    host: HostName | None = None
    hooks: bool = False
    agent: bool = False
    #: It only asks questions; not kept, since it ends with its connection.
    tool: bool = False
    #: It promised a sign of life at least so often while it holds anything.
    heartbeat_s: float | None = None
    #: How long watchdogs in its process wait, as it said; None: it has none, or did not say.
    watchdog_s: float | None = None
    #: The latest one; as long as it is held, all that keeps it from giving one moves this on.
    heard_at: float = 0.0
    #: When it last asked for a lease or gave one back.
    asked_at: float = 0.0
    connected: bool = True
    #: Taken back from the journal, which does not say whether it has asked together with others.
    regained: bool = False
    #: As the history has it.
    job_name: str = field(init=False)
    leases: dict[RequestId, Lease] = field(default_factory=dict)
    #: Answers to requests that are over, the latest `max_answers` of them.
    ended: dict[LeaseId, LeaseEndedRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job_name = str(self.job)

    def record(self) -> SessionRecord:
        """Return what must be kept of this session."""
        return SessionRecord(
            session=self.id,
            job=self.job,
            process=self.process,
            secret=self.secret,
            groups=self.groups,
            hooks=self.hooks,
            agent=self.agent,
            heartbeat_s=self.heartbeat_s,
            host=self.host,
        )

    def remember(
        self, lease: LeaseId, request: RequestId, *, code: str, text: str, limit: int,
        waiters: int = 0, deferred: bool = False,
    ) -> LeaseEndedRecord:  # fmt: skip
        """Note how a request ended, in place of the oldest answer if there are `limit`."""
        slot = len(self.ended)
        while len(self.ended) >= limit:
            slot = self.ended.pop(next(iter(self.ended))).slot
        record = _make_lease_ended_record(
            lease=lease,
            session=self.id,
            request=request,
            slot=slot,
            code=code,
            text=text,
            waiters=waiters,
            deferred=deferred,
        )
        self.ended[lease] = record
        return record

    def recall(self, record: LeaseEndedRecord) -> None:
        """Take an answer back from the journal; the oldest comes first."""
        self.ended[record.lease] = record
