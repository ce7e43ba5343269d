"""The nouns of the core: identities, enums and value objects.

Everything here is immutable and knows no rules; the state machines live beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType, TypeAlias

from tsliced.core.value import Word, value

HostName = NewType("HostName", str)
#: A device's UUID as NVML and the driver write it: ``GPU-8-4-4-4-12``.
DeviceId = NewType("DeviceId", str)
GroupName = NewType("GroupName", str)
SessionId = NewType("SessionId", str)
LeaseId = NewType("LeaseId", str)
#: Names one long action and its single result; never used twice by one daemon.
OpId = NewType("OpId", int)
#: A client's number for one of its requests; a repeated one gets the same answer.
RequestId = NewType("RequestId", int)
#: One joint request of a job: all its ranks that ask together, or a single lease.
RoundId = NewType("RoundId", int)


class ProcessId(NamedTuple):
    """A process for life: a bare pid may name a stranger tomorrow."""

    pid: int
    #: Field 22 of ``/proc/PID/stat``, in clock ticks since boot.
    start_time: int


class RankId(NamedTuple):
    """One process of a job with a context on a group's devices."""

    host: HostName
    process: ProcessId

    def __str__(self) -> str:
        return f"{self.host}:{self.process.pid}"


class JobKey(NamedTuple):
    """The workload that competes. Equal ids of two users are two jobs."""

    cluster: str
    uid: int
    id: str

    def __str__(self) -> str:
        return f"{self.cluster}/{self.uid}/{self.id}" if self.cluster else f"{self.uid}/{self.id}"

    def is_called(self, name: str) -> bool:
        """Whether a person may mean this job: ID, UID/ID or CLUSTER/UID/ID."""
        return name in (self.id, f"{self.uid}/{self.id}", str(self))


class Counter(NamedTuple):
    """A number that never falls, not even when the journal is lost.

    `generation` is new with each journal and larger than any before it, `number` rises within it.
    """

    generation: int
    number: int

    def as_int(self) -> int:
        """Return one integer that sorts like the pair (64 bits)."""
        return self.generation << 32 | self.number


#: Fencing token of one grant of one group.
Token: TypeAlias = Counter
#: Number of one attempt, or one change of direction, of a tenancy's move.
Epoch: TypeAlias = Counter


class Stamp(NamedTuple):
    """Place of an order in a tenancy's history: a participant refuses anything lower."""

    #: How often it went from one host's coordinator to another's, whose epochs do not compare.
    term: int
    epoch: Epoch
    step: int


class TenancyKey(NamedTuple):
    """A job's ranks on the groups that it leases as one; `groups` is in the configured order."""

    job: JobKey
    groups: tuple[GroupName, ...]

    def __str__(self) -> str:
        return f"{self.job}@{'+'.join(self.groups)}"

    def names(self) -> dict[str, str]:
        """Return the facts by which notes name it."""
        return {"job": str(self.job), "groups": ",".join(self.groups)}


class RankState(Word):
    """What the driver was last seen to say of a rank's device context."""

    RUNNING = "running"
    FROZEN = "frozen"
    PARKED = "parked"
    FAILED = "failed"
    #: The daemon started anew, or a call was cut off, and the driver has not been asked yet.
    UNKNOWN = "unknown"

    @property
    def holds_device(self) -> bool:
        """Whether device memory must be assumed to be in use."""
        return self is not RankState.PARKED


class Verb(Word):
    """One operation of a snapshot backend on one rank."""

    FREEZE = "freeze"
    SNAPSHOT = "snapshot"
    RESTORE = "restore"
    THAW = "thaw"
    QUERY = "query"


class Goal(Word):
    """Where a coordinator wants all ranks of a tenancy to be."""

    FROZEN = "frozen"
    OFF = "off"
    RESTORED = "restored"
    ON = "on"
    #: Move nothing; say what is there (a coordinator that started anew).
    QUERY = "query"


class Arrival(Word):
    """When a round of several ranks takes its place in the queue."""

    ALL = "all"
    FIRST = "first"


class Cause(Word):
    """Stable codes of what went wrong; they travel to clients and into logs."""

    FREEZE_TIMEOUT = "freeze_timeout"
    UNSUPPORTED = "unsupported"
    NO_HOST_MEMORY = "no_host_memory"
    NO_DEVICE_MEMORY = "no_device_memory"
    NOT_PERMITTED = "not_permitted"
    STOPPED = "stopped"
    DRIVER = "driver"
    FAILED = "failed"
    NOT_FREED = "not_freed"
    STRANGER = "stranger"
    OCCUPIED = "occupied"
    QUIESCE = "quiesce"
    BOUND_GROUPS = "bound_groups"
    JOURNAL = "journal"
    SILENT = "silent"
    STUCK = "stuck"
    CANCELLED = "cancelled"
    RANK_LOST = "rank_lost"
    DRAINED = "drained"
    DEVICE_LOST = "device_lost"
    WATCHDOG = "watchdog"


#: Causes that another try cannot mend.
LASTING = frozenset({Cause.UNSUPPORTED, Cause.NOT_PERMITTED, Cause.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something could not be done, fit to be shown to a user."""

    cause: Cause
    text: str
    rank: RankId | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is our trouble (journal, links, look at devices) and no fault of a job."""
        ours = self.cause in (Cause.JOURNAL, Cause.SILENT)
        return ours or (self.cause is Cause.DRIVER and self.rank is None)

    def at(self, host: HostName) -> Reason:
        """Return the same with the host named, if no rank says where it is."""
        if self.rank is not None:
            return self
        return Reason(cause=self.cause, text=f"{self.text} (on {host})")

    def __str__(self) -> str:
        where = f" (pid {self.rank.process.pid} on {self.rank.host})" if self.rank else ""
        return f"{self.text}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What was seen of a process, or of others of its kind, before."""

    #: They left devices and came back.
    qualified: bool
    #: What that takes for what it has on devices now; None: not known.
    switch_s: float | None = None


@value
class FoundRank:
    """A process that a scan found to hold, or to be about to hold, device state."""

    process: ProcessId
    #: None: it belongs to no job that we know, a stranger.
    job: JobKey | None
    #: Devices on which it has memory; empty for a registered rank without a context yet.
    devices: frozenset[DeviceId]
    #: Device memory in use, by NVML; 0 where NVML does not say.
    device_bytes: int
    #: The same by device; empty where it is not known how it is divided.
    bytes_on: tuple[tuple[DeviceId, int], ...] = ()
    uid: int = -1
    name: str = ""
    #: How long a watchdog in it waits, by what it was started with; None: not known.
    watchdog_s: float | None = None
    #: PARKED: the driver said so of a process that nothing is known of any more.
    state: RankState = RankState.RUNNING
    #: A freeze lets it end what it is at, for which the job's other ranks may have to run.
    drains: bool = False
    #: What was seen of its kind; None: nobody has looked.
    earlier: Earlier | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """An operator's wish that nobody more is let onto a group."""

    #: What is on its devices when its lease is over is taken off, though nobody waits for them.
    park: bool
    #: Who wishes it and why, fit to be shown to those who wait.
    by: str
    #: By the clock on the wall: it outlives the daemon.
    since_unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Devices that are arbitrated as one, in the order in which groups are reserved."""

    name: GroupName
    #: Those of this host; of others only their own daemons know them.
    devices: tuple[DeviceId, ...]
    order: int
    #: All hosts that have devices of it; the first one is its arbiter. Empty: this host alone.
    hosts: tuple[HostName, ...] = ()
    #: Longest hold while others wait; None: `CoreLimits.max_hold_s`.
    max_hold_s: float | None = None

    def arbiter(self, here: HostName) -> HostName:
        """Return the host that arbitrates it, as seen from the host `here`."""
        return self.hosts[0] if self.hosts else here


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Every limit of the core, with its unit."""

    #: Waiting or held leases of one group.
    max_waiters: int = 20_000
    max_leases_per_session: int = 64
    #: Waiting or held.
    max_leases_per_uid: int = 8192
    #: Answers kept for a session, for requests that are sent again.
    max_answers: int = 128
    #: One lease lists at most so many groups.
    max_groups_per_lease: int = 64
    freeze_timeout_s: float = 10.0
    #: The same while another rank of the job is frozen: one that waits for that is never done.
    peer_freeze_timeout_s: float = 2.0
    quiesce_timeout_s: float = 30.0
    #: A participant whose coordinator is silent for so long thaws what it was to freeze.
    alone_s: float = 20.0
    #: Time-out of one FROZEN barrier; None: derived from the ranks that must be frozen, ...
    barrier_timeout_s: float | None = None
    #: ... with this for all that is done beside.
    barrier_margin_s: float = 15.0
    #: While a barrier is waited for, it is said so often whom it waits for.
    barrier_report_s: float = 5.0
    max_evict_tries: int = 10
    retry_min_s: float = 0.5
    retry_max_s: float = 10.0
    #: A session whose connection is gone but whose process lives keeps its leases so long.
    grace_s: float = 10.0
    #: A grant that had to wait is handed back unless the client confirms it.
    ack_s: float = 10.0
    #: Alarm for a driver call: `stuck_base_s` plus bytes at `stuck_bytes_per_s`.
    stuck_base_s: float = 30.0
    stuck_bytes_per_s: float = 0.5e9
    #: A snapshot that leaves more than this on the devices, or half of what was there, is none.
    max_residue_bytes: int = 64 << 20
    max_wait_s: float = 3600.0
    max_passed_over: int = 8
    #: Longest hold of a group while others wait; None: no limit.
    max_hold_s: float | None = None
    #: A holder is told so long before its lease may be taken back for it.
    hold_warning_s: float = 30.0
    #: Leave jobs on their devices that never asked for them, or hold them for too long, where a
    #: watchdog of theirs would not outlast the time that they may be parked for.
    heed_watchdogs: bool = True
    #: Before a job makes room for another one for the first time it leaves its devices and comes
    #: back, so that one that could not is found out while nobody else depends on it.
    qualify: bool = True
    #: A job that is parked and asks for nothing for so long is named; None: never.
    idle_park_s: float | None = 600.0
    #: Turn that it gets then, in case that it is blocked; 0: none.
    courtesy_turn_s: float = 0.0
    #: The same for a job that was asked to end, at once.
    ending_turn_s: float = 30.0
    #: Turn of a stranger that was taken off the devices; 0: none.
    stranger_turn_s: float = 60.0
    #: A job whose clients are all gone is ended after so long; None: never.
    orphan_s: float | None = None
    #: What becomes of the ranks that are left when one died: "wait", or "kill" after `rank_lost_s`.
    on_rank_lost: str = "wait"
    rank_lost_s: float = 300.0
    #: From SIGTERM to SIGKILL of a process that is ended.
    end_grace_s: float = 10.0
    #: Tokens and epochs that are reserved by one durable write.
    block: int = 4096
    #: Transitions kept for the story of a broken invariant.
    story: int = 64
