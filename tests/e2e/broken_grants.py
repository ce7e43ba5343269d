"""Backends that move state as they should, in daemons that break a promise about grants.

They prove that the judgement of the clients' histories finds what it is there to find.
"""

from __future__ import annotations

from libtimeslice.protocol import Message
from tsliced.core.actions import Grant, Refuse
from tsliced.core.arbiter import Arbiter
from tsliced.core.model import RoundId
from tsliced.host.backends.cuda import CudaBackend
from tsliced.net.replies import MESSAGES

TOKEN = 7


class SecondHolder(CudaBackend):
    """Who waited in vain is told that it holds the group."""

    async def start(self) -> None:
        def granted(action: Refuse) -> Message:
            return {
                "re": action.request,
                "lease": f"{action.session}.{action.request}",
                "groups": ["g1"],
                "tokens": {"g1": 1 << 62},
            }

        MESSAGES[Refuse] = granted
        await super().start()


class SameToken(CudaBackend):
    """All grants have one token."""

    async def start(self) -> None:
        tell = MESSAGES[Grant]
        MESSAGES[Grant] = lambda action: {**tell(action), "tokens": {"g1": TOKEN}}
        await super().start()


class LastFirst(CudaBackend):
    """Who came last goes first."""

    async def start(self) -> None:
        choose = Arbiter.choose

        def choose_last(self: Arbiter, *, now: float) -> RoundId | None:
            self.queue = dict(reversed(self.queue.items()))
            try:
                return choose(self, now=now)
            finally:
                self.queue = dict(reversed(self.queue.items()))

        Arbiter.choose = choose_last  # type: ignore[method-assign]  # this daemon is the test's own
        await super().start()


class Silent(CudaBackend):
    """A grant is not told."""

    async def start(self) -> None:
        MESSAGES[Grant] = lambda _: {"t": "gossip"}
        await super().start()
