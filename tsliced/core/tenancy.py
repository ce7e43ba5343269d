"""One tenancy: where its state must be assumed to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tsliced.core.coordinator import Coordinator, Place
from tsliced.core.messages import PresentRank
from tsliced.core.model import (
    Cause,
    GroupName,
    HostName,
    RankId,
    RankState,
    Reason,
    TenancyKey,
)
from tsliced.core.participant import Participant

#: As with `RoundState`: every grant asks for them.
_ON, _OFF = Place.ON, Place.OFF


class Bound(Exception):  # noqa: N818 - a finding, not an error of the program
    """A job's groups cannot be taken apart as asked for."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def bound_by(groups: Iterable[GroupName], rank: RankId) -> Reason:
    """Return why groups cannot be taken apart: a rank has contexts in all of them."""
    text = f"one process has contexts in {' and '.join(groups)}: lease them together"
    return Reason(cause=Cause.BOUND_GROUPS, text=text, rank=rank)


@dataclass(slots=True, kw_only=True, eq=False)
class Tenancy:
    """What this host has of a tenancy: its part of the ranks, and perhaps what moves them all."""

    key: TenancyKey
    #: Moves nothing if another host leads: then it only tells where the ranks of this host are.
    coordinator: Coordinator
    participant: Participant
    #: Whose coordinator moves it.
    lead: HostName
    #: The tenancy elsewhere of which this is the part that its lead moves here; None: it is all.
    part_of: TenancyKey | None = None
    #: Ranks on other hosts, as these said last; known only where it is led.
    abroad: dict[RankId, PresentRank] = field(default_factory=dict)
    #: By host: why the ranks there could not be parked.
    shortages: dict[HostName, Reason] = field(default_factory=dict)

    @property
    def led_here(self) -> bool:
        """Whether the coordinator of this host moves it."""
        return self.lead == self.participant.host

    @property
    def is_abroad(self) -> bool:
        """Whether other hosts take part in moving it from here."""
        return any(host != self.participant.host for host in self.coordinator.hosts)

    @property
    def has_ranks(self) -> bool:
        """Whether a rank of it is known, on whatever host."""
        return bool(self.participant.ranks) or bool(self.abroad)

    def ranks(self) -> list[tuple[RankId, RankState]]:
        """Return its ranks on all hosts, with where each was seen last."""
        here = [(rank.id, rank.state) for rank in self.participant.ranks.values()]
        return [*here, *((rank, present.state) for rank, present in self.abroad.items())]

    @property
    def shortage(self) -> Reason | None:
        """Why some of its ranks could not be parked if somebody waited; None: nothing is known."""
        return self.participant.shortage or next(iter(self.shortages.values()), None)

    @property
    def beyond(self) -> dict[GroupName, RankId]:
        """Groups that are not its own and that a rank of it has a context in nevertheless."""
        return self.participant.beyond

    @property
    def reach(self) -> tuple[GroupName, ...]:
        """All groups on whose devices it may be."""
        groups, beyond = self.key.groups, self.participant.beyond
        return (*groups, *beyond) if beyond else groups

    @property
    def resident(self) -> bool:
        """Whether its state must be assumed to be on devices."""
        if self.coordinator.place is not _OFF or self.participant.on_devices:
            return True
        return bool(self.abroad) and any(p.state.holds_device for p in self.abroad.values())

    @property
    def runs_within(self) -> bool:
        """Whether its job may be granted what it covers, and it is on no other group's devices."""
        return self.coordinator.place is _ON and not self.participant.beyond

    @property
    def ready(self) -> bool:
        """Whether its job may be granted what it covers."""
        return self.coordinator.place is _ON
