"""A snapshot backend that claims success and moves nothing. The tests must not believe it."""

from __future__ import annotations

import tsliced.host.scan
from tsliced.core.model import ProcessId, RankId, RankState
from tsliced.host.backends.base import Backend, BackendContext, Outcome

# How long the daemon lets a device take to show that its memory is free.
tsliced.host.scan.GONE_LIMIT_S = 0.3  # type: ignore[misc]  # this daemon is the test's own


class NoopBackend(Backend):
    """Says that everything is done."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._states: dict[RankId, RankState] = {}

    async def probe(self, process: ProcessId) -> bool:
        return True

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        return self._become(rank, RankState.FROZEN)

    async def snapshot(self, rank: RankId) -> Outcome:
        return self._become(rank, RankState.PARKED)

    async def restore(self, rank: RankId) -> Outcome:
        return self._become(rank, RankState.FROZEN)

    async def thaw(self, rank: RankId) -> Outcome:
        return self._become(rank, RankState.RUNNING)

    async def state(self, rank: RankId) -> Outcome:
        return Outcome(observed=self._states.get(rank, RankState.RUNNING))

    def _become(self, rank: RankId, state: RankState) -> Outcome:
        self._states[rank] = state
        return Outcome(observed=state)


class BlindNoopBackend(NoopBackend):
    """The same, and says that NVML would not show it."""

    seen_by_nvml = False


class BrokenBackend(NoopBackend):
    """Breaks a promise that the daemon relies on."""

    def prepare(self, process: ProcessId) -> None:
        raise RuntimeError(f"not for process {process.pid}")
