"""What the daemons of two hosts tell each other about sessions and ranks.

A client that wants groups whose arbiter is elsewhere is served through the daemon of its own host,
its front. That passes the client's requests on, as the events that they would be here, and gets the
actions back that the client is answered with. Orders and reports (`signals`) travel as they are.

Whatever is said may be lost with a connection. So nothing is said once only: after each connect
both sides say first what must be known to both (`LiveSessions`, `Presence`), and then repeat what
stands and has no answer.
"""

from __future__ import annotations

from typing import TypeAlias

from tsliced.core.actions import ClientAction
from tsliced.core.events import ClientEvent
from tsliced.core.model import (
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    RoundId,
    SessionId,
    Stamp,
    TenancyKey,
    Token,
)
from tsliced.core.signals import Order, Report
from tsliced.core.value import value


@value
class LiveSessions:
    """All sessions of the host that says so: the client of any other that it spoke for is gone.

    The first message of each connection, in both directions.
    """

    sessions: tuple[SessionId, ...]


@value
class HeldLeases:
    """All leases that sessions of the host it goes to hold at the one that says so."""

    leases: tuple[tuple[SessionId, LeaseId], ...]


@value
class PresentRank:
    """A rank that is known on the host that says so."""

    process: ProcessId
    job: JobKey
    state: RankState
    device_bytes: int
    #: All groups on whose devices it is.
    groups: tuple[GroupName, ...]
    #: Whose coordinator moves it, as far as that host knows, ...
    lead: HostName
    #: ... and in which term.
    term: int
    #: How long a watchdog in it waits; None: not known.
    watchdog_s: float | None = None
    #: Its job stands for it alone: it is of no known one.
    stranger: bool = False
    #: The groups with whose tenancy it is moved there; empty: that host does not say.
    home: tuple[GroupName, ...] = ()


@value
class Presence:
    """All ranks on the devices that one host has of a group, for the group's arbiter."""

    group: GroupName
    ranks: tuple[PresentRank, ...]
    #: Jobs of these ranks that have a client on that host.
    clients: tuple[JobKey, ...]
    #: Jobs that could not be parked there, and why.
    shortages: tuple[tuple[JobKey, str], ...]


@value
class RankGone:
    """A rank of a job died, on whatever host: those that are left may wait for it for ever."""

    job: JobKey
    groups: tuple[GroupName, ...]
    rank: RankId


@value
class EndJob:
    """All processes of a job are to be ended, for an operator or its own user."""

    job: JobKey
    #: Why, for the log.
    text: str
    grace_s: float
    #: Who gets it tells the other hosts that it knows to have a part of the job.
    onward: bool


@value
class HostGone:
    """An operator says that nothing is left of a host; `by`: who, and why.

    Told to all, and by each who takes the word: not every two hosts have a link.
    """

    host: HostName
    by: str
    #: The run of its daemon that the word is about; None: it is just said, of whichever was last.
    incarnation: str | None


# --- groups that a round takes from an arbiter elsewhere --------------------------------------


@value
class Reserve:
    """A round of the host that says so wants a group of the arbiter that it goes to."""

    round: RoundId
    job: JobKey
    group: GroupName
    #: It has it, and says so in case that the arbiter has forgotten.
    token: Token | None = None
    #: It must not wait for it: refused with `would_deadlock` if it would have to.
    at_once: bool = False


@value
class Reserved:
    """The group is the round's, and nobody else is on it, but for what its own host leads.

    Until the round commits to it, it may be taken back.
    """

    round: RoundId
    group: GroupName
    #: To be granted with.
    token: Token
    #: Other hosts that move state which the job has on the group.
    leads: tuple[HostName, ...]


@value
class Commit:
    """The round has all of its groups, and begins to use this one."""

    round: RoundId
    group: GroupName
    token: Token


@value
class Committed:
    """The group is the round's until it gives it back."""

    round: RoundId
    group: GroupName
    token: Token


@value
class Unreserved:
    """The round does not have the group, or no longer; it waits for it, if it still wants it."""

    round: RoundId
    group: GroupName


@value
class NotReserved:
    """The round cannot have the group."""

    round: RoundId
    group: GroupName
    code: str
    text: str


@value
class GiveBack:
    """The round does not want the group any more."""

    round: RoundId
    group: GroupName


@value
class Reservations:
    """All that rounds of the host that says so have or want of the arbiter that it goes to."""

    wanted: tuple[tuple[RoundId, GroupName], ...]
    #: Jobs that the host moves on the arbiter's groups, or will, with ranks there or without.
    claims: tuple[tuple[JobKey, GroupName], ...] = ()


@value
class Waiting:
    """How many wait for a group that a round has."""

    round: RoundId
    group: GroupName
    waiters: int


@value
class StalledElsewhere:
    """Why a round does not get a group."""

    round: RoundId
    group: GroupName
    job: JobKey
    reason: Reason
    way_out: str


# --- tenancies that another host is to move ---------------------------------------------------


@value
class Clear:
    """An arbiter wants what a job has on its group taken off, by the host that moves it."""

    job: JobKey
    group: GroupName


@value
class NotCleared:
    """It could not be taken off. `given_up`: it stays until somebody does something about it."""

    job: JobKey
    group: GroupName
    reason: Reason
    way_out: str
    given_up: bool


@value
class Cede:
    """A round's host wants to move itself what its job has on groups."""

    round: RoundId
    job: JobKey
    groups: tuple[GroupName, ...]


@value
class NotCeded:
    """Its groups cannot be taken apart so, or it stands still."""

    round: RoundId
    job: JobKey
    code: str
    text: str


@value
class HandOver:
    """The host that moves a tenancy tells a participant who does from now on."""

    tenancy: TenancyKey
    stamp: Stamp
    to: HostName


@value
class HandedOver:
    """A participant has taken note of it."""

    tenancy: TenancyKey
    stamp: Stamp


@value
class CededTenancy:
    """A tenancy, to whom moves it from now on. All participants know of it."""

    tenancy: TenancyKey
    stamp: Stamp
    on: bool
    pinned: Reason | None
    ranks: tuple[tuple[HostName, PresentRank], ...]


@value
class Ceded:
    """All that the host had to cede for a round."""

    round: RoundId
    job: JobKey
    tenancies: tuple[CededTenancy, ...]


@value
class Taken:
    """A tenancy that was ceded is in good hands."""

    tenancy: TenancyKey
    stamp: Stamp


PeerMessage: TypeAlias = (
    LiveSessions
    | HeldLeases
    | Presence
    | RankGone
    | EndJob
    | HostGone
    | Order
    | Report
    | Reserve
    | Reserved
    | Commit
    | Committed
    | Unreserved
    | NotReserved
    | GiveBack
    | Reservations
    | Waiting
    | StalledElsewhere
    | Clear
    | NotCleared
    | Cede
    | NotCeded
    | HandOver
    | HandedOver
    | Ceded
    | Taken
    | ClientEvent
    | ClientAction
)
