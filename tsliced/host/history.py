"""The event history: what happened lately, for `tslicectl events`, reports and followers.

A bounded ring in memory. It belongs to the event loop's thread; storing is somebody else's: whole
batches are handed to `store`, which must not block.

Many are written and few are ever read, so they are kept as they come, and become maps when somebody
reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

Fact: TypeAlias = str | int | float | bool | None
#: ``{"seq": int, "at": float (unix seconds), "kind": str, "level": str, **facts}``
Event: TypeAlias = dict[str, Fact]
#: An event as it is kept: number, time, kind, level and facts.
Entry: TypeAlias = tuple[int, float, str, str, Mapping[str, Fact]]

#: ``write(kind, level, facts)`` adds an event.
Write: TypeAlias = Callable[[str, str, Mapping[str, Fact]], None]

#: Events that are handed to `store` together at the latest.
STORE_BATCH: Final = 256

_SEQ: Final = itemgetter(0)


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
    #: There are later ones already, or may be: nobody has looked further yet.
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """Which events somebody wants. What is empty or None lets all through."""

    #: Number of the first event.
    since: int = 0
    #: Unix seconds: not before, and before.
    after_unix: float | None = None
    before_unix: float | None = None
    groups: frozenset[str] = frozenset()
    #: Ids, ``UID/ID`` or ``CLUSTER/UID/ID``.
    jobs: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether it is about numbers alone."""
        timed = self.after_unix is not None or self.before_unix is not None
        return not (timed or self.groups or self.jobs or self.kinds)

    def chooses(self, entry: Entry) -> bool:
        """Whether an event is wanted."""
        _, at_unix, kind, _, facts = entry
        return (
            (self.after_unix is None or at_unix >= self.after_unix)
            and (self.before_unix is None or at_unix < self.before_unix)
            and (not self.kinds or kind in self.kinds)
            and (not self.groups or not self.groups.isdisjoint(groups_of(kind, facts)))
            and (not self.jobs or is_of_job(facts.get("job"), self.jobs))
        )


def groups_of(kind: str, facts: Mapping[str, Fact]) -> list[str]:
    """Return the groups that an event is about, by its facts."""
    # What jobs tell of themselves may have any names.
    named = facts.get("groups") or facts.get("group") if kind != "progress" else None
    return named.split(",") if isinstance(named, str) else []


def is_of_job(job: Fact, names: Iterable[str]) -> bool:
    """Whether a person who says one of these names may mean the job of an event."""
    return isinstance(job, str) and any(job == name or job.endswith(f"/{name}") for name in names)


class Follower:
    """Somebody who wants every event, or those that a query chooses, at their own speed.

    At most `limit` events wait. What does not fit is lost, and `take` gives one event of kind
    ``gap`` in its place, whose fact ``lost`` counts it.
    """

    def __init__(
        self, wake: Callable[[], None], limit: int, query: HistoryQuery | None = None
    ) -> None:
        self._query = query
        self._wake = wake
        self._limit = limit
        self._waiting: deque[Entry] = deque()
        self._lost = 0
        self._last_lost: Entry

    def offer(self, entry: Entry) -> None:
        """Queue an event, or count it as lost; wake the reader if it may be asleep."""
        if self._query is not None and not self._query.chooses(entry):
            return
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
    are full or `flush` is called. Without `recording` nothing is kept, stored or followed.
    """

    def __init__(
        self,
        limit: int,
        *,
        tail: Sequence[Entry] = (),
        first_seq: int = 1,
        store: Callable[[list[Entry]], None] | None = None,
        recording: bool = True,
    ) -> None:
        assert limit > 0, "a history of nothing"
        self._ring: deque[Entry] = deque(tail, maxlen=limit)
        self._next = first_seq
        self._store = store
        self._recording = recording
        self._unstored: list[Entry] = []
        self._followers: list[Follower] = []
        #: Gets each event when it is added.
        self.listener: Callable[[float, str, str, Mapping[str, Fact]], None] | None = None

    @property
    def next_seq(self) -> int:
        """Number of the event that comes next."""
        return self._next

    @property
    def oldest_seq(self) -> int:
        """Number of the oldest event in memory, or of the next one if there is none."""
        return self._ring[0][0] if self._ring else self._next

    def append(self, kind: str, level: str, facts: Mapping[str, Fact], at_unix: float) -> None:
        """Add an event and offer it to the followers. The facts are kept: do not change them."""
        if not self._recording:
            return
        entry = (self._next, at_unix, kind, level, facts)
        self._next += 1
        self._ring.append(entry)
        if self._store is not None:
            self._unstored.append(entry)
            if len(self._unstored) >= STORE_BATCH:
                self.flush()
        for follower in self._followers:
            follower.offer(entry)
        if self.listener is not None:
            self.listener(at_unix, kind, level, facts)

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
            start = bisect_left(ring, seq, key=_SEQ)
        events = [event_of(entry) for entry in islice(ring, start, start + limit)]
        end = start + len(events)
        if end >= len(ring):
            return Page(events, self._next)
        return Page(events, ring[end - 1][0] + 1, more=True)

    def chosen(self, query: HistoryQuery, limit: int) -> Page:
        """Return at most `limit` (at least 1) events in memory that a query chooses."""
        if query.is_plain:
            return self.since(query.since, limit)
        events: list[Event] = []
        start = 0 if query.since > self._next else bisect_left(self._ring, query.since, key=_SEQ)
        for entry in islice(self._ring, start, None):
            if query.chooses(entry):
                events.append(event_of(entry))
                if len(events) == limit:
                    return Page(events, entry[0] + 1, more=True)
        return Page(events, self._next)

    def follow(
        self, wake: Callable[[], None], *, limit: int, query: HistoryQuery | None = None
    ) -> Follower:
        """Add a follower, which gets every event that it chose from now on until `unfollow`.

        `wake` is called from within `append` when an event waits and none did before: it should
        only arrange for `Follower.take` to be called soon.
        """
        follower = Follower(wake, limit, query)
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """Forget a follower; one that is unknown is ignored, for it may end in two ways at once."""
        if follower in self._followers:
            self._followers.remove(follower)
