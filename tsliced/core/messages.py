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
    JobKey,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    SessionId,
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


PeerMessage: TypeAlias = (
    LiveSessions
    | HeldLeases
    | Presence
    | RankGone
    | EndJob
    | Order
    | Report
    | ClientEvent
    | ClientAction
)
