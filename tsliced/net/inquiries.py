"""What clients want to know: states, ranks, events, and all about one thing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from libtimeslice.protocol import (
    EventsQuery,
    Message,
    PsQuery,
    ShowQuery,
    StatusQuery,
    error_reply,
    reply,
)
from tsliced.driver import Driver
from tsliced.host.history import HistoryQuery, Page
from tsliced.host.journal_error import JournalError
from tsliced.net.client import Client
from tsliced.net.operations import Operations
from tsliced.net.peers import Peers, Unanswered
from tsliced.observe.status import StatusPage

#: Events that wait for one follower; beyond that it loses some and is told how many.
FOLLOW_LIMIT = 4096
FOLLOW_BATCH = 256
#: Events of the disk in one answer, at most: the loop has to encode them.
STORED_BATCH = 2000


class Inquiries:
    """Answers questions; changes nothing. All methods belong to the event loop."""

    def __init__(
        self, driver: Driver, status: StatusPage, operations: Operations, peers: Peers | None
    ) -> None:
        self._driver = driver
        self._status = status
        self._operations = operations
        self._peers = peers

    def on_status(self, client: Client, request: StatusQuery) -> None:
        """Show the state of all groups, here or on another host."""
        host = request.host
        if host is None or host == self._driver.machine.config.host:
            client.send_whole(reply(request.id, status=self._status.status()))
        elif self._peers is None:
            text = f"there is no link to {host!r}: see [peers] in the configuration"
            client.send(error_reply(request.id, "not_found", text))
        else:
            self._peers.ask_status(host, partial(self._send_status, client, request.id))

    def _send_status(self, client: Client, request: int, found: Message | Unanswered) -> None:
        if isinstance(found, Unanswered):
            client.send(error_reply(request, found.code, found.text))
        else:
            client.send_whole(reply(request, status=found))

    def on_ps(self, client: Client, request: PsQuery) -> None:
        """Show all known ranks."""
        client.send_whole(reply(request.id, ranks=self._status.ranks()))

    def on_show(self, client: Client, request: ShowQuery) -> None:
        """Show all that is known of one thing."""
        client.send_whole(self._operations.show(client.peer, request))

    def on_events(self, client: Client, request: EventsQuery) -> None:
        """Send history, and from now on what is added to it if that is asked for."""
        self._driver.catch_up()
        history, query = self._driver.around.history, _query_of(request)
        if request.since is None and query.is_plain:
            self._send_events(client, request, history.since(None, request.limit))
        elif query.since >= history.oldest_seq:
            self._send_events(client, request, history.chosen(query, request.limit))
        else:
            history.flush()
            reading = self._send_stored(client, request, query, history.oldest_seq)
            self._driver.around.tasks.create_task(reading, name="history")
        if request.follow and client.follower is None:
            loop = asyncio.get_running_loop()

            def wake() -> None:
                loop.call_soon(self._send_followed, client)

            wanted = None if query.is_plain else query
            client.follower = history.follow(wake, limit=FOLLOW_LIMIT, query=wanted)

    async def _send_stored(
        self, client: Client, request: EventsQuery, query: HistoryQuery, end_seq: int
    ) -> None:
        """Answer from the disk and, as far as that goes into the answer, from memory."""
        around, limit = self._driver.around, min(request.limit, STORED_BATCH)
        try:
            page = await around.journal.read_history(query, limit, end_seq=end_seq)
        except JournalError as exc:
            client.send(error_reply(request.id, "unavailable", str(exc)))
            return
        except Exception as exc:
            # The edge of this task: a mistake of ours in one request must not end the daemon.
            self._driver.note("bug", "error", reason=f"reading the history: {exc!r}")
            client.send(error_reply(request.id, "internal", "the daemon's log says why"))
            return
        if around.history.oldest_seq > end_seq:
            # What was in memory when it was asked for is on the disk only by now.
            page = page._replace(more=True)
        elif not page.more:
            more = around.history.chosen(replace(query, since=end_seq), limit - len(page.events))
            page = Page([*page.events, *more.events], more.next, more.more)
        self._send_events(client, request, page)

    def _send_events(self, client: Client, request: EventsQuery, page: Page) -> None:
        events, following, more = page
        while not client.send(reply(request.id, events=events, next=following, more=more)):
            # More than a frame holds. A part is as good: `next` says where to go on.
            following = int(str(events[len(events) // 2]["seq"]))
            events, more = events[: len(events) // 2], True

    def unfollow(self, client: Client) -> None:
        """Send a client no more events."""
        if client.follower is not None:
            self._driver.around.history.unfollow(client.follower)
            client.follower = None

    def _send_followed(self, client: Client) -> None:
        follower = client.follower
        if follower is None:
            return
        events = follower.take(FOLLOW_BATCH)
        for event in events:
            client.send({"t": "event", "event": event})
        if len(events) == FOLLOW_BATCH:
            asyncio.get_running_loop().call_soon(self._send_followed, client)


def _query_of(request: EventsQuery) -> HistoryQuery:
    return HistoryQuery(
        since=request.since or 0,
        after_unix=request.after,
        before_unix=request.before,
        groups=frozenset(request.groups),
        jobs=frozenset(request.jobs),
        kinds=frozenset(request.kinds),
    )
