"""torch's tensors, moved by the job's own process.

A rank that manages tensors (`ts.torch.manage`, see `libtimeslice/parking.py`) has an agent, which
answers the daemon on a thread of its own; it does the moving and says where the tensors are. The
driver is not needed, and what is not managed stays on the device: the context, communicators, and
whatever else the job has there.

That no code of the job uses what is away is the rank's to see to: its agent refuses to freeze what
was not paused, and to resume what is away. This end asks, repeats what a lost connection may have
swallowed, and believes only the state that it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from libtimeslice.protocol import Message
from tsliced.core.model import Cause, ProcessId, RankId, RankState, Reason
from tsliced.host.backends.base import (
    AgentAwayError,
    Agents,
    Backend,
    BackendContext,
    BackendError,
    Outcome,
    failed,
)
from tsliced.host.processes import RunState, run_state

#: A rank that runs answers a question between two callbacks of its job.
QUERY_LIMIT_S: Final = 20.0

#: No process moves more bytes, or for more seconds.
_MOST: Final = 1 << 50

_STATES: Final = {
    "running": RankState.RUNNING,
    "paused": RankState.RUNNING,
    "frozen": RankState.FROZEN,
    "parked": RankState.PARKED,
}

#: By the code of the agent's error; all others are the job's trouble of some kind.
_CAUSES: Final = {
    "not_found": Cause.UNSUPPORTED,
    "refused": Cause.UNSUPPORTED,
    "unavailable": Cause.QUIESCE,
    "no_host_memory": Cause.NO_HOST_MEMORY,
    "no_device_memory": Cause.NO_DEVICE_MEMORY,
}

_HOW: Final = "it has to call ts.torch.manage(model, optimizer, ...) of libtimeslice"

_HINDRANCES: Final = {
    RunState.STOPPED: "it is stopped by a signal, and its agent cannot answer; send it SIGCONT",
    RunState.FROZEN: "its cgroup is frozen, and its agent cannot answer; thaw the cgroup first",
}


class TorchBackend(Backend):
    """Ranks that move their tensors themselves, asked through their agents."""

    in_process = True
    nothing_to_move = f"manages no tensors: {_HOW}"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._agents: Agents | None = None

    def meet(self, agents: Agents) -> None:
        """Hear who passes questions on to the ranks' agents."""
        self._agents = agents

    async def probe(self, process: ProcessId) -> bool:
        """Ask the process whether it manages tensors; one without an agent does not."""
        if self._agents is not None and not self._agents.has_agent(process):
            return False
        if (stopped := self.hindrance(process)) is not None:
            raise BackendError(stopped)
        try:
            answer = await self._ask(process, "query", QUERY_LIMIT_S)
        except AgentAwayError:
            return False
        return "err" not in answer

    def hindrance(self, process: ProcessId) -> str | None:
        """Look whether the agent can run."""
        return _HINDRANCES.get(run_state(process.pid))

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Have it confirmed that the rank stands still, and will until it is thawed."""
        return await self._order(rank, "freeze", timeout_s, standing=RankState.RUNNING)

    async def snapshot(self, rank: RankId) -> Outcome:
        """Have the tensors copied to the host, and their memory freed."""
        return await self._order(rank, "snapshot", None, standing=RankState.FROZEN)

    async def restore(self, rank: RankId) -> Outcome:
        """Have the memory made anew, and the tensors copied back."""
        return await self._order(rank, "restore", None, standing=RankState.PARKED)

    async def thaw(self, rank: RankId) -> Outcome:
        """Let the rank go on, as soon as it is told to resume."""
        return await self._order(rank, "thaw", QUERY_LIMIT_S, standing=RankState.FROZEN)

    async def state(self, rank: RankId) -> Outcome:
        """Ask where the tensors are."""
        return await self._order(rank, "query", QUERY_LIMIT_S)

    async def _order(
        self,
        rank: RankId,
        order: str,
        limit_s: float | None,
        *,
        standing: RankState = RankState.UNKNOWN,
    ) -> Outcome:
        """Give an order, and return what came of it; `standing` is where the rank is before."""
        if (stopped := self.hindrance(rank.process)) is not None:
            return failed(rank, Cause.STOPPED, stopped, standing)
        try:
            answer = await self._ask(rank.process, order, limit_s)
        except AgentAwayError as exc:
            if exc.never_came and order in ("freeze", "query"):
                # Nobody was there who could have frozen it.
                return failed(rank, Cause.UNSUPPORTED, f"{exc}: {_HOW}", RankState.RUNNING)
            # The order may be carried out yet.
            return failed(rank, Cause.DRIVER, str(exc), RankState.UNKNOWN)
        error = answer.get("err")
        if error is None:
            return Outcome(
                observed=_state_in(answer),
                moved_bytes=int(_amount(answer.get("bytes"))),
                seconds=_amount(answer.get("seconds")),
            )
        return self._refused(rank, error if isinstance(error, Mapping) else {})

    def _refused(self, rank: RankId, error: Mapping[str, object]) -> Outcome:
        code, text = str(error.get("code")), str(error.get("message"))
        if code == "not_found":
            text = f"{text}: {_HOW}"
        cause = _CAUSES.get(code, Cause.DRIVER)
        return Outcome(observed=_state_in(error), failure=Reason(cause=cause, text=text, rank=rank))

    async def _ask(self, process: ProcessId, order: str, limit_s: float | None) -> Message:
        if self._agents is None:
            raise AgentAwayError("only a daemon that runs can ask it", never_came=False)
        return await self._agents.ask(process, {"t": "tensors", "do": order}, limit_s)


def _state_in(answer_untrusted: Mapping[str, object]) -> RankState:
    return _STATES.get(str(answer_untrusted.get("state")), RankState.UNKNOWN)


def _amount(value_untrusted: object) -> float:
    """Return a number of bytes or seconds, or 0 for what is none."""
    if isinstance(value_untrusted, int | float) and 0 <= value_untrusted <= _MOST:
        return value_untrusted
    return 0
