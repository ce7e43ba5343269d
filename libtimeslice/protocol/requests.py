"""What a client sends, as values. `libtimeslice.protocol.parsing` makes them of messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from libtimeslice.fields import Message

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_options: bool) -> Callable[[object], object]:
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def _value(cls: type[T]) -> type[T]:
    """Makes a dataclass that is frozen for the type checker alone.

    A dataclass that is frozen at run time takes more than twice as long to be made, and so does one
    whose fields are given as keywords. The daemon makes one for each request.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_value
class Hello:
    """First message of a connection."""

    version: tuple[int, int]
    client: str
    caps: tuple[str, ...]
    job: str | None
    uid: int | None
    role: Literal["client", "agent", "tool"]
    session: str | None
    secret: bytes | None
    ranks: int | None
    heartbeat_s: float | None
    watchdog_s: float | None


@_value
class Acquire:
    """Asks for a lease; answered when it is granted. `groups` None: all that the job may use."""

    id: int
    groups: tuple[str, ...] | None
    phase: str | None
    ranks: int | None
    arrive: Literal["all", "first"]
    timeout_s: float | None
    #: Leases of this session that are held until after this one is given back.
    inside: tuple[str, ...] = ()


@_value
class Release:
    """Gives a lease back."""

    id: int
    lease: str


@_value
class LastTurn:
    """Wants this process's state back before it ends, if it is away; answered as an acquire.

    `leaving`: it ends now, and keeps the devices until it is gone also if its state is there.
    """

    id: int
    leaving: bool
    timeout_s: float | None


@_value
class Cancel:
    """Withdraws the acquire with the id `acquire`."""

    id: int
    acquire: int


@_value
class Register:
    """Makes a process known as a rank of the job; `pid` None is the caller itself."""

    id: int
    pid: int | None


@_value
class Attach:
    """Makes a process that never calls us known as a rank; `groups` None: find out."""

    id: int
    pid: int
    groups: tuple[str, ...] | None


@_value
class PhaseMark:
    """A named phase began or ended (notification)."""

    name: str
    begin: bool


@_value
class Progress:
    """Figures of the job's own, for reports (notification)."""

    fields: dict[str, float | int | str | bool]


@_value
class QueueDepth:
    """Backlog between two stages of the job, in its own items (notification)."""

    name: str
    depth: float
    target: float | None


@_value
class Heartbeat:
    """The client's own code goes on (notification)."""


@_value
class WatchdogNotice:
    """How long watchdogs in the client's process wait; None: none is known (notification)."""

    limit_s: float | None


@_value
class StatusQuery:
    """Asks for the state of all groups; `host` None: of the daemon that is asked."""

    id: int
    host: str | None


@_value
class PsQuery:
    """Asks for all known ranks."""

    id: int


@_value
class EventsQuery:
    """Asks for history from number `since` on; with `follow`, also for what is to come.

    `host` None: of the daemon that is asked; of others there is only what has happened.
    """

    id: int
    since: int | None
    follow: bool
    limit: int
    #: Unix seconds: not before, and before.
    after: float | None = None
    before: float | None = None
    #: Of these alone; empty: of all.
    groups: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    host: str | None = None


@_value
class ShowQuery:
    """Asks for all that is known of one thing."""

    id: int
    kind: Literal["job", "group", "device", "session", "lease", "host"]
    name: str


@_value
class JobOrder:
    """Asks for something to be done about a job: by its own user, or an operator."""

    id: int
    verb: Literal["retry", "clear", "kill", "qualify"]
    #: Its id, ``UID/ID``, or ``CLUSTER/UID/ID``.
    job: str
    #: Of a kill: from the request to end until the end.
    grace_s: float


@_value
class DrainOrder:
    """Asks for groups to be closed to those who do not hold them, or to be opened again."""

    id: int
    open: bool
    #: None, with no device either: all.
    groups: tuple[str, ...] | None
    #: By UUID or index: the group that it is in.
    device: str | None
    park: bool
    #: For those who wait.
    why: str | None


@_value
class HostDeath:
    """Says that all processes of a host are gone for good: by an operator."""

    id: int
    host: str
    #: For the log.
    why: str | None


@_value
class SlurmNotice:
    """Tells of a Slurm job on the daemon's host: by the scheduler's hooks, as root."""

    id: int
    #: ``began``: before anything of it runs here; ``ended``: nothing of it should be left here.
    verb: Literal["began", "ended"]
    #: Slurm's number of it.
    job: str
    uid: int
    #: All hosts of it as Slurm abbreviates them, and what this one is called among them.
    nodes: str | None
    node: str | None
    account: str | None


@_value
class Ping:
    """Asks for an empty answer."""

    id: int


@_value
class Bye:
    """Ends the session and releases its leases (notification)."""


@_value
class Ack:
    """Confirms that the grant of a lease arrived (notification)."""

    lease: str


@_value
class Reply:
    """Answers the daemon's request with the id `re`; `error` is None if it succeeded."""

    re: int
    error: dict[str, object] | None
    fields: Message


Request = (
    Hello
    | Acquire
    | Release
    | LastTurn
    | Cancel
    | Register
    | Attach
    | PhaseMark
    | Progress
    | QueueDepth
    | Heartbeat
    | WatchdogNotice
    | StatusQuery
    | PsQuery
    | EventsQuery
    | ShowQuery
    | JobOrder
    | DrainOrder
    | HostDeath
    | SlurmNotice
    | Ping
    | Bye
    | Ack
    | Reply
)
