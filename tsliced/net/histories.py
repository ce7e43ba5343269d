"""Pages of this host's event history, from memory or the disk: for its clients, and other hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from libtimeslice.protocol import EventsQuery
from tsliced.driver import Driver
from tsliced.host.history import HistoryQuery, Page
from tsliced.host.journal_error import JournalError

#: Events of the disk in one answer, at most: the loop has to encode them.
STORED_BATCH = 2000

#: Sends a page, and returns False if it is more than a frame holds.
SendPage: TypeAlias = Callable[[Page], bool]
#: Says why there is no page: a code of the wire to clients, and a text.
Refuse: TypeAlias = Callable[[str, str], object]


@dataclass(frozen=True, slots=True)
class Histories:
    """Answers questions about the history. Belongs to the event loop."""

    driver: Driver

    def answer(self, request: EventsQuery, send: SendPage, refuse: Refuse) -> None:
        """Send the page that was asked for, or why there is none: one of both, maybe at once.

        `send` is called with smaller and smaller pages until it takes one.
        """
        self.driver.catch_up()
        around = self.driver.around
        history, query = around.history, query_of(request)
        if request.since is None and query.is_plain:
            _send(send, history.since(None, request.limit))
        elif query.since >= history.oldest_seq:
            _send(send, history.chosen(query, request.limit))
        else:
            history.flush()
            reading = self._answer_stored(request, query, history.oldest_seq, send, refuse)
            around.tasks.create_task(reading, name="history")

    async def _answer_stored(
        self,
        request: EventsQuery,
        query: HistoryQuery,
        end_seq: int,
        send: SendPage,
        refuse: Refuse,
    ) -> None:
        """Answer from the disk and, as far as that goes into the answer, from memory."""
        around, limit = self.driver.around, min(request.limit, STORED_BATCH)
        try:
            page = await around.journal.read_history(query, limit, end_seq=end_seq)
        except JournalError as exc:
            refuse("unavailable", str(exc))
            return
        except Exception as exc:
            # The edge of this task: a mistake of ours in one request must not end the daemon.
            self.driver.note("bug", "error", reason=f"reading the history: {exc!r}")
            refuse("internal", "the daemon's log says why")
            return
        if around.history.oldest_seq > end_seq:
            # What was in memory when it was asked for is on the disk only by now.
            page = page._replace(more=True)
        elif not page.more:
            more = around.history.chosen(replace(query, since=end_seq), limit - len(page.events))
            page = Page([*page.events, *more.events], more.next, more.more)
        _send(send, page)


def query_of(request: EventsQuery) -> HistoryQuery:
    """Return which events a request is about."""
    return HistoryQuery(
        since=request.since or 0,
        after_unix=request.after,
        before_unix=request.before,
        groups=frozenset(request.groups),
        jobs=frozenset(request.jobs),
        kinds=frozenset(request.kinds),
    )


def _send(send: SendPage, page: Page) -> None:
    while not send(page):
        # A part is as good: `next` says where to go on.
        if half := len(page.events) // 2:
            page = Page(page.events[:half], int(str(page.events[half]["seq"])), more=True)
        else:
            # Whoever asked again would get no further: what no frame holds is left out.
            page = page._replace(events=[])
