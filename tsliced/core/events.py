"""What happened, in the past tense: the only inputs of the core.

Whoever starts a long action posts exactly one event with its `op` when it ends, however it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tsliced.core.actions import Action, Record
from tsliced.core.model import (
    Arrival,
    CoreLimits,
    DeviceId,
    Drain,
    FoundRank,
    GroupConfig,
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
    SessionId,
    TenancyKey,
)
from tsliced.core.value import value

if TYPE_CHECKING:
    from tsliced.core.messages import PeerMessage


@value
class Started:
    """The daemon runs; what the journal kept has been given to the machine before."""


@value
class TimePassed:
    """The instant in `Machine.deadline` came."""


@value
class SessionOpened:
    """A client said hello; its identity comes from the kernel, not from its words."""

    session: SessionId
    job: JobKey
    process: ProcessId
    #: What the client must show to take its session up again after a lost connection.
    secret: bytes
    #: Groups that this session may lease, in the configured order.
    groups: tuple[GroupName, ...]
    #: The session can be asked to quiesce and to resume.
    hooks: bool = False
    #: A helper connection of a process whose leases belong to another session.
    agent: bool = False
    #: It asks questions and leases nothing.
    tool: bool = False
    #: It will give a sign of life at least so often while it holds anything.
    heartbeat_s: float | None = None


@value
class SessionDisconnected:
    """A connection ended without goodbye. The process may still live."""

    session: SessionId


@value
class SessionResumed:
    """A client came back with its session's secret."""

    session: SessionId


@value
class SessionClosed:
    """A client said goodbye."""

    session: SessionId


@value
class ProcessExited:
    """The kernel reported a process's end (its pidfd became readable)."""

    process: ProcessId


@value
class AcquireRequested:
    """A client asked for groups."""

    session: SessionId
    request: RequestId
    #: In the configured order, without duplicates, known to exist; empty: all of the session.
    groups: tuple[GroupName, ...] = ()
    phase: str = ""
    ranks: int = 1
    arrival: Arrival = Arrival.ALL
    timeout_s: float | None = None
    #: What the client holds until after it has given this back.
    holding: tuple[GroupName, ...] = ()


@value
class LastTurnRequested:
    """A client is about to end its work: it wants its process's state back, should that be away."""

    session: SessionId
    request: RequestId
    #: The process ends now: let it have the devices until it is gone also if it runs on them.
    leaving: bool = False
    timeout_s: float | None = None


@value
class GrantConfirmed:
    """A client said that it has a grant in hand."""

    session: SessionId
    lease: LeaseId


@value
class SignOfLife:
    """A client's own code showed that it goes on."""

    session: SessionId


@value
class WatchdogTold:
    """A client said how long watchdogs in its process wait; None: there is none that it knows."""

    session: SessionId
    limit_s: float | None


@value
class ReleaseRequested:
    """A client gave its lease back."""

    session: SessionId
    request: RequestId
    lease: LeaseId


@value
class CancelRequested:
    """A client no longer wants what it asked for with the request `acquire`."""

    session: SessionId
    request: RequestId
    acquire: RequestId


@value
class RankRegistered:
    """A process was named as a rank of a job; the driver knows CUDA in it if `found.devices`."""

    job: JobKey
    found: FoundRank
    #: Groups that it may be on while it shows no devices.
    groups: tuple[GroupName, ...]


@value
class GroupsObserved:
    """The regular look at the devices of all groups; lists every process on them."""

    found: tuple[FoundRank, ...]
    #: Devices that are there no more, with the driver's word for it; nobody is seen on them.
    lost: tuple[tuple[DeviceId, str], ...] = ()


@value
class GroupsScanned:
    """`ScanGroups` ended. A failed scan found nothing out, not nothing."""

    op: OpId
    found: tuple[FoundRank, ...] = ()
    #: Device memory in use that no process is listed for, where that can be told.
    unlisted: tuple[tuple[DeviceId, int], ...] = ()
    failure: Reason | None = None


@value
class MemoryReserved:
    """`ReserveHostMemory` or `ReserveDeviceMemory` ended."""

    op: OpId
    failure: Reason | None = None


@value
class HostMemoryPromised:
    """Host memory was promised to a tenancy's next snapshot, or could not be."""

    tenancy: TenancyKey
    failure: Reason | None = None


@value
class HooksRun:
    """`RunHooks` ended."""

    op: OpId
    failure: Reason | None = None


@value
class OperationFinished:
    """`StartOperation` ended. `observed` is what the driver said after it, success or not."""

    op: OpId
    rank: RankId
    observed: RankState
    failure: Reason | None = None
    #: Device bytes that were moved.
    moved_bytes: int = 0
    seconds: float = 0.0


@value
class OperationHindered:
    """The process of an operation in flight is seen to be unable to run, or to run again.

    An operation that has ended meanwhile is hindered no more; that is no mistake.
    """

    op: OpId
    #: None: it can run again.
    reason: str | None


@value
class NumbersReserved:
    """`ReserveNumbers` is durable: no number below `ceiling` will be used after a restart."""

    ceiling: int
    failure: Reason | None = None


@value
class RecordsFailed:
    """The journal could not take `records`; of what they announce, `actions`, nothing was done."""

    records: tuple[Record, ...]
    actions: tuple[Action, ...]
    failure: Reason


@value
class FaultCleared:
    """An operator took a job's fault, or a tenancy's PINNED or BLOCKED, back: try again."""

    job: JobKey


@value
class QualifyRequested:
    """It is to be seen whether a job can leave its devices and come back."""

    job: JobKey


@value
class RetryRequested:
    """An operator wants what failed for a job to be tried again now: cleared, and no pause kept."""

    job: JobKey


@value
class KillRequested:
    """An operator, or the job's own user, wants all processes of a job ended."""

    job: JobKey
    #: Who it was, for the log.
    by: str
    grace_s: float
    #: Those on other hosts too.
    onward: bool = True


@value
class EndAsked:
    """The processes of a job were asked to end, by whoever started them: a scheduler does so.

    What they do until they end, such as to save, may use the devices without a lease.
    """

    job: JobKey


@value
class DrainOrdered:
    """An operator wants nobody more on a group, or (`drain` None) lets jobs in again."""

    group: GroupName
    drain: Drain | None


@value
class Reconfigured:
    """The configuration has changed; see `reconfiguring`."""

    groups: tuple[GroupConfig, ...]
    limits: CoreLimits
    #: What each session may lease from now on. What it has, it keeps.
    permitted: tuple[tuple[SessionId, tuple[GroupName, ...]], ...]


@value
class PeerConnected:
    """The link to another host is up. Of what was said before, anything may be lost.

    `boot`: the boot id of its system, so that it is known whether the processes there are others.
    `incarnation`: which run of its daemon it is.
    """

    host: HostName
    boot: str
    incarnation: str = ""


@value
class PeerDisconnected:
    """The link to another host is down. Its daemon, and what it has, may live."""

    host: HostName


@value
class PeerLost:
    """Another host has been silent for longer than it may be. What it has may live."""

    host: HostName


@value
class HostDied:
    """It is certain that all processes of another host are gone; `by`: who or what says so."""

    host: HostName
    by: str


@value
class PeerSaid:
    """The daemon of another host said something; who it is was proved."""

    host: HostName
    message: PeerMessage


#: What a client asks for or says, here or by the daemon of its own host.
ClientEvent: TypeAlias = (
    SessionOpened
    | SessionClosed
    | AcquireRequested
    | LastTurnRequested
    | GrantConfirmed
    | SignOfLife
    | ReleaseRequested
    | CancelRequested
)

#: What becomes of a link and of the host at its other end.
PeerEvent: TypeAlias = PeerConnected | PeerDisconnected | PeerLost | HostDied | PeerSaid

Event: TypeAlias = (
    Started
    | TimePassed
    | ClientEvent
    | PeerEvent
    | SessionDisconnected
    | SessionResumed
    | WatchdogTold
    | ProcessExited
    | RankRegistered
    | GroupsObserved
    | GroupsScanned
    | MemoryReserved
    | HostMemoryPromised
    | HooksRun
    | OperationFinished
    | OperationHindered
    | NumbersReserved
    | RecordsFailed
    | FaultCleared
    | RetryRequested
    | QualifyRequested
    | KillRequested
    | EndAsked
    | DrainOrdered
    | Reconfigured
)
