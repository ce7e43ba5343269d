"""The event history: what happened lately, for `tslicectl events`, reports and followers.

A bounded ring in memory. It belongs to the event loop's thread; storing is somebody else's: whole
batches are handed to `store`, which must not block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

Fact: TypeAlias = str | int | float | bool | None
#: ``{"seq": int, "at": float (unix seconds), "kind": str, "level": str, **facts}``
Event: TypeAlias = dict[str, Fact]

#: Events that are handed to `store` together at the latest.
STORE_BATCH: Final = 256


class Page(NamedTuple):
    """Events in the order of their numbers, and the number to ask for next."""

    events: list[Event]
    next: int


class Follower:
    """Somebody who wants every event, at their own speed.

    At most `limit` events wait. What does not fit is lost, and `take` gives one event of kind
    ``gap`` in its place, whose fact ``lost`` counts it.
    """

    def __init__(self, wake: Callable[[], None], limit: int) -> None:
        self._wake = wake
        self._limit = limit
        self._waiting: deque[Event] = deque()
        self._lost = 0
        self._last_lost: Event = {}

    def offer(self, event: Event) -> None:
        """Queue an event, or count it as lost; wake the reader if it may be asleep."""
        if self._lost or len(self._waiting) >= self._limit:
            # Once one is lost all are, until the reader has seen the gap: the order stays right.
            self._lost += 1
            self._last_lost = event
            return
        self._waiting.append(event)
        if len(self._waiting) == 1:
            self._wake()

    def take(self, limit: int) -> list[Event]:
        """Return up to `limit` (at least 1) events that wait. Empty: `wake` is called again."""
        count = min(limit, len(self._waiting))
        events = [self._waiting.popleft() for _ in range(count)]
        if self._lost and len(events) < limit:
            events.append(self._gap())
        return events

    def _gap(self) -> Event:
        lost, self._lost = self._lost, 0
        # It has the number of the last lost event, so that reading on from there is right.
        return {
            "seq": self._last_lost["seq"],
            "at": self._last_lost["at"],
            "kind": "gap",
            "level": "warning",
            "lost": lost,
        }


class History:
    """The last `limit` events.

    `tail`: events of earlier runs, the oldest first; `first_seq`, the number of the next one, is
    above theirs. `store` gets every new event once, in batches of at most `STORE_BATCH` when they
    are full or `flush` is called.
    """

    def __init__(
        self,
        limit: int,
        *,
        tail: Sequence[Event] = (),
        first_seq: int = 1,
        store: Callable[[list[Event]], None] | None = None,
    ) -> None:
        assert limit > 0, "a history of nothing"
        self._ring: deque[Event] = deque(tail, maxlen=limit)
        self._next = first_seq
        self._store = store
        self._unstored: list[Event] = []
        self._followers: list[Follower] = []

    @property
    def next_seq(self) -> int:
        """Number of the event that comes next."""
        return self._next

    def append(self, kind: str, level: str, facts: Mapping[str, Fact], at_unix: float) -> Event:
        """Add an event and offer it to the followers; return it."""
        # The facts come first and the order is set beforehand: a fact of one of these names must
        # not take the place of what it is named after.
        event: Event = {"seq": 0, "at": 0.0, "kind": "", "level": "", **facts}
        event["seq"] = self._next
        event["at"] = at_unix
        event["kind"] = kind
        event["level"] = level
        self._next += 1
        self._ring.append(event)
        if self._store is not None:
            self._unstored.append(event)
            if len(self._unstored) >= STORE_BATCH:
                self.flush()
        for follower in self._followers:
            follower.offer(event)
        return event

    def flush(self) -> None:
        """Hand over what is not stored yet. Call it about every second, and before the end."""
        if self._store is not None and self._unstored:
            batch, self._unstored = self._unstored, []
            self._store(batch)

    def since(self, seq: int | None, limit: int) -> Page:
        """Return at most `limit` (at least 1) events numbered `seq` or above; None: the last ones.

        A number that was not given out yet is of a history that was lost: all of this one is new.
        """
        ring = self._ring
        if seq is None:
            start = max(0, len(ring) - limit)
        elif seq > self._next:
            start = 0
        else:
            start = bisect_left(ring, seq, key=_number)
        events = list(islice(ring, start, start + limit))
        reached_end = start + len(events) >= len(ring)
        return Page(events, self._next if reached_end else _number(events[-1]) + 1)

    def follow(self, wake: Callable[[], None], *, limit: int) -> Follower:
        """Add a follower, which gets every event from now on until `unfollow`.

        `wake` is called from within `append` when an event waits and none did before: it should
        only arrange for `Follower.take` to be called soon.
        """
        follower = Follower(wake, limit)
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """Forget a follower; one that is unknown is ignored, for it may end in two ways at once."""
        if follower in self._followers:
            self._followers.remove(follower)


def _number(event: Event) -> int:
    seq = event["seq"]
    assert isinstance(seq, int), "events are numbered by append"
    return seq
