"""Who may have one group.

A round waits in the queue, is chosen, and then *has* the group until it ends: first reserved, while
its tenancies are being brought on, then held. Whose state is on the devices is not known here.

Safety rule: at most one round has the group, and nobody is chosen while one has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from tsliced.core.model import GroupName, RoundId
from tsliced.core.policy import FairnessBounds, Fifo, Policy, Waiter


@dataclass(slots=True, kw_only=True)
class Arbiter:
    """The queue and the holder of one group."""

    name: GroupName
    policy: Policy
    bounds: FairnessBounds
    #: Chosen: reserved for it or held by it.
    chosen: RoundId | None = None
    #: By round, in the order of arrival.
    queue: dict[RoundId, Waiter] = field(default_factory=dict)

    def claim(self, round_id: RoundId) -> bool:
        """Let a round have the group at once, if nobody has it or waits for it."""
        if self.chosen is not None or self.queue:
            return False
        self.chosen = round_id
        return True

    def enqueue(self, waiter: Waiter) -> None:
        """Put a round into the queue, behind all that arrived before it."""
        assert waiter.round not in self.queue, "a round waits once"
        assert waiter.round != self.chosen, "who has the group does not wait for it"
        last = next(reversed(self.queue.values()), None)
        self.queue[waiter.round] = waiter
        if last is not None and last.place > waiter.place:
            # A round that reserved another group first arrives here late but keeps its place.
            by_place = sorted(self.queue.values(), key=lambda entry: entry.place)
            self.queue = {entry.round: entry for entry in by_place}

    def choose(self, *, now: float) -> RoundId | None:
        """Choose the next round if nobody has the group; it has it from then on."""
        if self.chosen is not None or not self.queue:
            return None
        if len(self.queue) == 1 or isinstance(self.policy, Fifo):
            # The rest of the queue, which may be long, need not be looked at.
            chosen = next(iter(self.queue.values()))
        else:
            waiting = list(self.queue.values())
            chosen = self.bounds.choose(self.policy, self.name, waiting, now=now)
            for waiter in takewhile(lambda waiter: waiter is not chosen, waiting):
                waiter.passed_over += 1
        del self.queue[chosen.round]
        self.chosen = chosen.round
        return chosen.round

    def leave(self, round_id: RoundId) -> None:
        """Take a round out: out of the queue, or off the group."""
        if self.chosen == round_id:
            self.chosen = None
        else:
            self.queue.pop(round_id, None)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self.chosen not in self.queue
        assert self.chosen is not None or not self.queue, "a free group has no waiters"
        places = [waiter.place for waiter in self.queue.values()]
        assert places == sorted(places), "the queue is in the order of arrival"
