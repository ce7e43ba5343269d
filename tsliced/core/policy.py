"""Pure choice of the next waiter of a group.

A policy sees the queue and says who is next; what bounds unfairness is enforced around it, so that
no policy can break G4: nobody is passed over more than `max_passed_over` times, and after
`max_wait_s` nobody who came later goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from tsliced.core.model import GroupName, JobKey, RoundId


@dataclass(slots=True, kw_only=True)
class Waiter:
    """One round in a group's queue."""

    round: RoundId
    job: JobKey
    #: When the round took its place: monotonic seconds.
    asked_at: float
    #: Order of arrival on this host; smaller came first.
    place: int
    #: How often somebody who came later was chosen before it.
    passed_over: int = 0


class Policy(Protocol):
    """Chooses from a queue that is never empty and is sorted by arrival."""

    def choose(self, group: GroupName, queue: Sequence[Waiter], *, now: float) -> Waiter:
        """Return one of the waiters."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """First come, first served."""

    def choose(self, group: GroupName, queue: Sequence[Waiter], *, now: float) -> Waiter:
        """Return the waiter that came first."""
        return queue[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessBounds:
    """The two limits of G4."""

    max_passed_over: int
    max_wait_s: float

    def choose(
        self, policy: Policy, group: GroupName, queue: Sequence[Waiter], *, now: float
    ) -> Waiter:
        """Return the policy's choice, unless somebody's patience is at its end."""
        first = queue[0]
        if now - first.asked_at >= self.max_wait_s or first.passed_over >= self.max_passed_over:
            return first
        chosen = policy.choose(group, queue, now=now)
        before = takewhile(lambda waiter: waiter is not chosen, queue)
        tired = (waiter for waiter in before if waiter.passed_over >= self.max_passed_over)
        return next(tired, chosen)
