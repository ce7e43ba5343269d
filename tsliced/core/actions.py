"""What to do, in the imperative, and what must be written down before it is done.

The driver writes `Effects.records` first and runs `Effects.actions` only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from tsliced.core.model import (
    Arrival,
    DeviceId,
    Drain,
    Epoch,
    Goal,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    OpId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    RequestId,
    RoundId,
    SessionId,
    Stamp,
    TenancyKey,
    Token,
    Verb,
)
from tsliced.core.value import value

if TYPE_CHECKING:
    from tsliced.core.messages import PeerMessage

# --- records: kept over kill -9 of the daemon -------------------------------------------------


@value
class SessionRecord:
    """A session exists."""

    session: SessionId
    job: JobKey
    process: ProcessId
    secret: bytes
    groups: tuple[GroupName, ...]
    hooks: bool
    agent: bool
    heartbeat_s: float | None = None
    #: Where its client is, if that is not here.
    host: HostName | None = None


@value
class SessionEndedRecord:
    """A session and all that was remembered of it is gone."""

    session: SessionId


@value
class LeaseRecord:
    """A lease waits (`tokens` empty) or is held."""

    lease: LeaseId
    session: SessionId
    request: RequestId
    round: RoundId
    #: In the queue, by arrival; 0 while the round is still gathering.
    place: int
    groups: tuple[GroupName, ...]
    phase: str
    ranks: int
    arrival: Arrival
    tokens: tuple[tuple[GroupName, Token], ...]
    #: Of `ranks`, how many are gone for good.
    lost: int = 0


@value
class LeaseEndedRecord:
    """A lease is over; what its client was told, for a request that is sent again."""

    lease: LeaseId
    session: SessionId
    request: RequestId
    #: Which of the session's remembered ends this one replaces.
    slot: int
    #: An error code, or "released".
    code: str
    text: str
    waiters: int
    deferred: bool


@value
class TenancyRecord:
    """The order that stands for a tenancy, written before anybody is told of it."""

    tenancy: TenancyKey
    stamp: Stamp
    goal: Goal
    pinned: Reason | None = None
    #: Whose coordinator moves it, if that is not here.
    lead: HostName | None = None


@value
class TenancyEndedRecord:
    """A tenancy has neither ranks nor leases left."""

    tenancy: TenancyKey


@value
class RankRecord:
    """A rank, and what is about to be done to it (`verb`), if anything."""

    rank: RankId
    tenancy: TenancyKey
    devices: frozenset[DeviceId]
    device_bytes: int
    state: RankState
    verb: Verb | None
    #: What it has, and what its snapshot left, by device as far as that is known.
    bytes_on: tuple[tuple[DeviceId, int], ...] = ()
    residue: tuple[tuple[DeviceId, int], ...] = ()


@value
class RankEndedRecord:
    """A rank's process is gone."""

    rank: RankId


@value
class FaultRecord:
    """A job is refused until its processes are gone or an operator clears it (`reason` None)."""

    job: JobKey
    reason: Reason | None


@value
class StrangerRecord:
    """A job that stands for a stranger, or no longer does (`process` None)."""

    job: JobKey
    process: ProcessId | None


@value
class RemainsRecord:
    """What is left of a job: no client (`orphaned`), ranks that lost one. Neither: nothing."""

    job: JobKey
    orphaned: bool
    survivors: tuple[ProcessId, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be remembered."""
        return not self.orphaned and not self.survivors


@value
class DrainRecord:
    """Nobody more is let onto a group, or again (`drain` None)."""

    group: GroupName
    drain: Drain | None


@value
class ForeignLeaseRecord:
    """A lease that a session of this host waits for or holds elsewhere, or no longer does."""

    lease: LeaseId
    session: SessionId
    request: RequestId
    #: None: it is over.
    arbiter: HostName | None
    #: Empty while it waits.
    tokens: tuple[tuple[GroupName, Token], ...]


@value
class HostRecord:
    """Which run of another host's system, and of its daemon, was seen last; empty: none.

    `dead_by`: who says that nothing of it is left; None: nobody, or it has been back since.
    """

    host: HostName
    boot: str
    incarnation: str
    dead_by: str | None


@value
class ReservationRecord:
    """A round of another host has or wants a group of this arbiter, or no longer (`over`)."""

    host: HostName
    round: RoundId
    group: GroupName
    job: JobKey
    place: int
    #: It has the group, for good; None: it waits.
    token: Token | None
    over: bool = False


@value
class HandoverRecord:
    """A tenancy goes to another host's coordinator, or has gone there (`to` None)."""

    tenancy: TenancyKey
    stamp: Stamp
    to: HostName | None
    on: bool
    pinned: Reason | None


Record: TypeAlias = (
    SessionRecord
    | SessionEndedRecord
    | LeaseRecord
    | LeaseEndedRecord
    | TenancyRecord
    | TenancyEndedRecord
    | RankRecord
    | RankEndedRecord
    | FaultRecord
    | DrainRecord
    | StrangerRecord
    | RemainsRecord
    | ForeignLeaseRecord
    | HostRecord
    | ReservationRecord
    | HandoverRecord
)

# --- actions: towards clients -----------------------------------------------------------------


@value
class Grant:
    """Answer an acquire: the lease is held. `ack_s`: it must be confirmed within that time."""

    session: SessionId
    request: RequestId
    lease: LeaseId
    tokens: tuple[tuple[GroupName, Token], ...]
    waited_s: float
    restored: bool
    switch_s: float
    contended: bool
    ack_s: float | None


@value
class Refuse:
    """Answer a request with a coded error."""

    session: SessionId
    request: RequestId
    code: str
    text: str


@value
class ConfirmRelease:
    """Answer a release."""

    session: SessionId
    request: RequestId
    #: Waiters of the lease's groups before the release.
    waiters: int
    #: Nobody waits, so the state stays on the devices.
    deferred: bool


@value
class DeclineTurn:
    """Answer a request for a last turn: the process needs none."""

    session: SessionId
    request: RequestId


@value
class ConfirmCancel:
    """Answer a cancel. Not `cancelled`: the acquire had ended, or its grant is on the wire."""

    session: SessionId
    request: RequestId
    cancelled: bool


@value
class TellContended:
    """Tell a holder how many wait for what it holds."""

    session: SessionId
    lease: LeaseId
    groups: tuple[GroupName, ...]
    waiters: int


@value
class TellStalled:
    """Tell a waiter why its turn does not come: the tenancy before it cannot be moved."""

    session: SessionId
    lease: LeaseId
    job: JobKey
    reason: Reason
    #: What somebody has to do about it; empty: it is tried again by itself.
    way_out: str = ""


@value
class TellLost:
    """Tell a session that a lease of it is over without its doing."""

    session: SessionId
    lease: LeaseId
    text: str


@value
class TellHoldWarning:
    """Tell a holder that its lease may be taken back: from then on, as soon as anybody waits."""

    session: SessionId
    lease: LeaseId
    groups: tuple[GroupName, ...]
    ends_in_s: float
    waiters: int


@value
class TellRankLost:
    """Tell a session that a process of its job is gone: its peers may wait for it for ever."""

    session: SessionId
    lease: LeaseId
    pid: int
    text: str


@value
class TellWarning:
    """Tell a client something of its job that a person should look at."""

    session: SessionId
    code: str
    text: str


@value
class EndSession:
    """Forget a session: close its connection if there is one."""

    session: SessionId
    text: str


#: Answers and news for clients.
ClientAction: TypeAlias = (
    Grant
    | Refuse
    | ConfirmRelease
    | ConfirmCancel
    | DeclineTurn
    | TellContended
    | TellStalled
    | TellLost
    | TellHoldWarning
    | TellRankLost
    | TellWarning
    | EndSession
)

# --- actions: between hosts -------------------------------------------------------------------


@value
class Send:
    """Say something to the daemon of another host; without a connection it is lost."""

    host: HostName
    message: PeerMessage


# --- actions: long ones, each ends in one event with its op -----------------------------------


@value
class StartOperation:
    """Run one backend operation on one rank. Only a freeze is bounded; nothing else is cut off."""

    op: OpId
    rank: RankId
    tenancy: TenancyKey
    verb: Verb
    timeout_s: float | None


@value
class ScanGroups:
    """Find every process with state on the tenancy's groups, and the job's registered ranks.

    Waits a bounded time for the processes in `expect_gone` to vanish from the devices, or to have
    no more than `residue_bytes` there; and for what nobody is listed for on each device to be no
    more than that above what it was, `unlisted`.
    """

    op: OpId
    tenancy: TenancyKey
    expect_gone: frozenset[ProcessId] = frozenset()
    residue_bytes: int = 0
    unlisted: tuple[tuple[DeviceId, int], ...] = ()
    #: Groups of other tenancies on which ranks of this one are too: look there as well.
    beyond: tuple[GroupName, ...] = ()
    #: It is to be let on, and no rank of it is known: one may be parked that was forgotten.
    forgotten: bool = False
    #: What was seen moments ago will do, if no operation has begun or ended since.
    recent: bool = False


@value
class ReserveHostMemory:
    """Reserve host memory for a snapshot of each rank, or say what is missing."""

    op: OpId
    tenancy: TenancyKey
    #: Device bytes by rank; margins are the ledger's.
    demands: tuple[tuple[RankId, int], ...]


@value
class ReserveDeviceMemory:
    """Check that the devices have room for the tenancy's return, and keep it free for it."""

    op: OpId
    tenancy: TenancyKey
    #: Bytes by device, for each rank.
    demands: tuple[tuple[RankId, tuple[tuple[DeviceId, int], ...]], ...]


@value
class RunHooks:
    """Ask the sessions' processes to quiesce, or to resume, within `timeout_s`."""

    op: OpId
    tenancy: TenancyKey
    sessions: tuple[SessionId, ...]
    quiesce: bool
    timeout_s: float
    #: Of the try that it belongs to: by it the ranks know that they mean the same one.
    epoch: Epoch


@value
class ReserveNumbers:
    """Make `ceiling` durable: numbers below it may then be used for tokens and epochs."""

    ceiling: int


# --- actions: bookkeeping ---------------------------------------------------------------------


@value
class FreeMemory:
    """Drop what the ledgers hold for a tenancy: all of it, or its claim on device memory only."""

    tenancy: TenancyKey
    host: bool
    device: bool


@value
class SettleHostMemory:
    """Say whether what is reserved for a tenancy is in use: it is real memory once it is parked.

    When it has come back, the driver has given the memory up, and it is promised again.
    """

    tenancy: TenancyKey
    parked: bool


@value
class WatchProcess:
    """Post `ProcessExited` once when this process ends."""

    process: ProcessId


@value
class EndProcesses:
    """Signal each of these very processes: SIGTERM, or SIGKILL if `kill`."""

    processes: tuple[ProcessId, ...]
    kill: bool


#: What an event of the history says of one thing.
Fact: TypeAlias = str | int | float | bool | None


@value
class Note:
    """One line for the log and the event history."""

    kind: str
    #: "info", "warning" (handled, but look) or "error" (someone must act).
    level: str
    facts: Mapping[str, Fact]


Action: TypeAlias = (
    ClientAction
    | Send
    | StartOperation
    | ScanGroups
    | ReserveHostMemory
    | ReserveDeviceMemory
    | RunHooks
    | ReserveNumbers
    | FreeMemory
    | SettleHostMemory
    | WatchProcess
    | EndProcesses
    | Note
)


@value
class Effects:
    """What the driver must do: write `records`, then run `actions`, each in order."""

    records: tuple[Record, ...] = ()
    actions: tuple[Action, ...] = ()


NOTHING = Effects()
