"""One tenancy: where its state must be assumed to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tsliced.core.coordinator import Coordinator, Place
from tsliced.core.model import Cause, GroupName, RankId, Reason, TenancyKey
from tsliced.core.participant import Participant

#: As with `RoundState`: every grant asks for it.
_ON = Place.ON


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
    """A coordinator and, while all hosts are this one, its only participant."""

    key: TenancyKey
    coordinator: Coordinator
    participant: Participant

    @property
    def beyond(self) -> dict[GroupName, RankId]:
        """Groups that are not its own and that a rank of it has a context in nevertheless."""
        return self.participant.beyond

    @property
    def reach(self) -> tuple[GroupName, ...]:
        """All groups on whose devices it may be."""
        return (*self.key.groups, *self.beyond)

    @property
    def resident(self) -> bool:
        """Whether its state must be assumed to be on devices."""
        return self.coordinator.place is not Place.OFF or self.participant.on_devices

    @property
    def runs_within(self) -> bool:
        """Whether its job may be granted what it covers, and it is on no other group's devices."""
        return self.coordinator.place is _ON and not self.participant.beyond

    @property
    def ready(self) -> bool:
        """Whether its job may be granted what it covers."""
        return self.coordinator.place is _ON
