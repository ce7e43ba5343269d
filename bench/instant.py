"""A snapshot backend that takes no time, so that a switch costs what its control costs."""

from __future__ import annotations

from tsliced.core.model import ProcessId, RankId, RankState
from tsliced.host.backends.base import Backend, BackendContext, Outcome


class InstantBackend(Backend):
    """Says that everything is done, and remembers what it said.

    It moves nothing, so it is for processes that have nothing on a device.
    """

    #: It goes by who registered.
    seen_by_nvml = False

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._states: dict[RankId, RankState] = {}

    async def probe(self, process: ProcessId) -> bool:
        """Takes every process for one with device state."""
        return True

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Calls the rank frozen."""
        return self._become(rank, RankState.FROZEN)

    async def snapshot(self, rank: RankId) -> Outcome:
        """Calls the rank parked."""
        return self._become(rank, RankState.PARKED)

    async def restore(self, rank: RankId) -> Outcome:
        """Calls the rank frozen on its device."""
        return self._become(rank, RankState.FROZEN)

    async def thaw(self, rank: RankId) -> Outcome:
        """Calls the rank running."""
        return self._become(rank, RankState.RUNNING)

    async def state(self, rank: RankId) -> Outcome:
        """Repeats what the rank was called last."""
        return Outcome(observed=self._states.get(rank, RankState.RUNNING))

    def _become(self, rank: RankId, state: RankState) -> Outcome:
        self._states[rank] = state
        return Outcome(observed=state)
