"""One joint request of a job for groups: its members, and how far it has come.

    GATHERING -> QUEUED -> MOVING -> HELD -> over
                    |         `-> GRANTING (no token left in the block) -> HELD
                    `<-> ASIDE (a group of it cannot be had; from MOVING and GRANTING too)

A round of several ranks is complete when all of them asked (or, by choice, at the first), is
granted to all at once, and is over when all have released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tsliced.core.model import (
    Arrival,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    Reason,
    RoundId,
    SessionId,
    TenancyKey,
    Token,
)
from tsliced.core.sessions import Lease
from tsliced.core.value import Word


class RoundState(Word):
    """Where a round is in its life."""

    GATHERING = "gathering"
    QUEUED = "queued"
    ASIDE = "aside"
    MOVING = "moving"
    GRANTING = "granting"
    HELD = "held"


#: Python 3.11 takes as long to look a member up in its enum as to call a function, and every
#: request asks for the states a dozen times.
GATHERING, QUEUED, ASIDE, MOVING, GRANTING, HELD = RoundState

_FIRST = Arrival.FIRST


@dataclass(slots=True, kw_only=True, eq=False)
class Elsewhere:
    """What a round has of an arbiter on another host."""

    arbiter: HostName
    #: It was asked for so that it would not be waited for.
    at_once: bool = False
    #: It is reserved.
    token: Token | None = None
    #: The arbiter was asked to keep it, ...
    committing: bool = False
    #: ... and does.
    committed: bool = False
    #: Hosts that move state which the job has there.
    leads: tuple[HostName, ...] = ()
    waiters: int = 0


class Borrower(NamedTuple):
    """A round of another host, and the group that it wants of an arbiter here."""

    host: HostName
    round: RoundId
    group: GroupName


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """A job's joint request."""

    id: RoundId
    job: JobKey
    #: In the order in which they are reserved.
    groups: tuple[GroupName, ...]
    ranks: int
    arrival: Arrival
    #: When it took its place in the queue; before that, when its first member asked.
    asked_at: float
    #: Order of arrival in the queue; 0 while it gathers.
    place: int = 0
    state: RoundState = RoundState.GATHERING
    #: Of `ranks`, how many are gone for good and are not waited for.
    lost: int = 0
    members: dict[LeaseId, Lease] = field(default_factory=dict)
    #: Sessions that took part; one that released its lease asks for the next round.
    took_part: set[SessionId] = field(default_factory=set)
    #: How many of `groups` it has, from the front.
    reserved: int = 0
    #: One for each group, while it is held.
    tokens: tuple[tuple[GroupName, Token], ...] = ()
    switch_began_at: float = 0.0
    #: Somebody had to be moved, off or on, before it could be granted.
    moved: bool = False
    #: State was brought back from host memory for it.
    restored: bool = False
    evict_tries: dict[TenancyKey, int] = field(default_factory=dict)
    admit_tries: int = 0
    #: It has paused before another try.
    paused: bool = False
    #: A turn that nobody asked for, without members: it is over after so long.
    turn_s: float | None = None
    turn_began_at: float = 0.0
    #: By group: what it has of arbiters on other hosts.
    elsewhere: dict[GroupName, Elsewhere] = field(default_factory=dict)
    #: Hosts that were asked for what they move of its job, and whether they have answered.
    ceding: dict[HostName, bool] = field(default_factory=dict)
    #: It stands for one of another host, for the group that this wants here.
    stands_for: Borrower | None = None
    #: There a group is held that comes after this one: it must not wait.
    at_once: bool = False
    #: Its host was told that it has the group.
    reserved_at_home: bool = False
    #: Its host wants to keep it, ...
    commit_asked: bool = False
    #: ... and does, since then.
    kept_at: float = 0.0
    #: What others on its devices were asked to take off, and have not answered.
    clearing: set[tuple[JobKey, GroupName]] = field(default_factory=set)
    #: Since when it is held, moved on by what does not count; None: no limit, or not held.
    hold_from: float | None = None
    #: How long it may be held while others wait, as it was configured when it was granted.
    max_hold_s: float | None = None
    #: It has been kept still since then, which does not count.
    still_since: float | None = None
    #: It was warned that its time will be over.
    warned: bool = False
    #: Its time is over, and it goes on only because nobody waits.
    overdue: bool = False
    #: What its members were last told about why it takes so long.
    stalled: Reason | None = None

    @property
    def borrower(self) -> Borrower:
        """The round of another host that it stands for: only for one that does."""
        assert self.stands_for is not None, "it stands for itself"
        return self.stands_for

    def may_join(self, session: SessionId) -> bool:
        """Whether a lease of this session belongs to this round rather than to the next."""
        if session in self.took_part:
            return False
        return len(self.took_part) < self.ranks

    @property
    def must_not_wait(self) -> bool:
        """Whether a group is held, by its job, that comes after one that it wants."""
        return self.at_once or any(lease.out_of_order for lease in self.members.values())

    def complete(self, live_ranks: int) -> bool:
        """Whether it can take its place in the queue."""
        if self.turn_s is not None:
            return True
        if self.ranks == 1 or self.arrival is _FIRST:
            return bool(self.members)
        return len(self.members) >= max(1, min(self.ranks, live_ranks))


@dataclass(slots=True, kw_only=True)
class Gang:
    """The sessions of one job that ask together for the same groups, over its rounds."""

    sessions: set[SessionId] = field(default_factory=set)
    #: Of those that a round counts on, how many are gone for good.
    lost: int = 0
    #: Those that are not over, the oldest first.
    rounds: list[RoundId] = field(default_factory=list)

    def join(self, session: SessionId, ranks: int) -> None:
        """Count a session in; a new one may stand in for one that is gone."""
        if session not in self.sessions:
            self.sessions.add(session)
            self.lost = min(self.lost, max(0, ranks - len(self.sessions)))
