"""The event history: what happened lately, for `tslicectl events`, reports and followers.

A bounded ring in memory. It belongs to the event loop's thread; storing is somebody else's: whole
batches are handed to `store`, which must not block.

Many are written and few are ever read, so they are kept as they come, and become maps when somebody
reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

Fact: TypeAlias = str | int | float | bool | None
#: ``{"seq": int, "at": float (unix seconds), "kind": str, "level": str, **facts}``
Event: TypeAlias = dict[str, Fact]
#: An event as it is kept: number, time, kind, level and facts.
Entry: TypeAlias = tuple[int, float, str, str, Mapping[str, Fact]]

#: Events that are handed to `store` together at the latest.
STORE_BATCH: Final = 256


def event_of(entry: Entry) -> Event:
    """Return an event as a map. A fact cannot take the place of what it is named after."""
    seq, at_unix, kind, level, facts = entry
    event: Event = {"seq": 0, "at": 0.0, "kind": "", "level": "", **facts}
    event["seq"], event["at"], event["kind"], event["level"] = seq, at_unix, kind, level
    return event


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
        self._waiting: deque[Entry] = deque()
        self._lost = 0
        self._last_lost: Entry

    def offer(self, entry: Entry) -> None:
        """Queue an event, or count it as lost; wake the reader if it may be asleep."""
        if self._lost or len(self._waiting) >= self._limit:
            # Once one is lost all are, until the reader has seen the gap: the order stays right.
            self._lost += 1
            self._last_lost = entry
            return
        self._waiting.append(entry)
        if len(self._waiting) == 1:
            self._wake()

    def take(self, limit: int) -> list[Event]:
        """Return up to `limit` (at least 1) events that wait. Empty: `wake` is called again."""
        count = min(limit, len(self._waiting))
        events = [event_of(self._waiting.popleft()) for _ in range(count)]
        if self._lost and len(events) < limit:
            events.append(self._gap())
        return events

    def _gap(self) -> Event:
        lost, self._lost = self._lost, 0
        # It has the number of the last lost event, so that reading on from there is right.
        seq, at_unix, *_ = self._last_lost
        return event_of((seq, at_unix, "gap", "warning", {"lost": lost}))


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
        tail: Sequence[Entry] = (),
        first_seq: int = 1,
        store: Callable[[list[Entry]], None] | None = None,
    ) -> None:
        assert limit > 0, "a history of nothing"
        self._ring: deque[Entry] = deque(tail, maxlen=limit)
        self._next = first_seq
        self._store = store
        self._unstored: list[Entry] = []
        self._followers: list[Follower] = []

    @property
    def next_seq(self) -> int:
        """Number of the event that comes next."""
        return self._next

    def append(self, kind: str, level: str, facts: Mapping[str, Fact], at_unix: float) -> None:
        """Add an event and offer it to the followers. The facts are kept: do not change them."""
        entry = (self._next, at_unix, kind, level, facts)
        self._next += 1
        self._ring.append(entry)
        if self._store is not None:
            self._unstored.append(entry)
            if len(self._unstored) >= STORE_BATCH:
                self.flush()
        for follower in self._followers:
            follower.offer(entry)

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
            start = bisect_left(ring, seq, key=itemgetter(0))
        events = [event_of(entry) for entry in islice(ring, start, start + limit)]
        end = start + len(events)
        return Page(events, self._next if end >= len(ring) else ring[end - 1][0] + 1)

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
