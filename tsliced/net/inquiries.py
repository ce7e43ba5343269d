"""What clients want to know: states, ranks, events, and all about one thing."""

from __future__ import annotations

import asyncio
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
from tsliced.host.history import Page
from tsliced.net.client import Client
from tsliced.net.histories import Histories, query_of
from tsliced.net.operations import Operations
from tsliced.net.peers import Peers, Unanswered
from tsliced.observe.status import StatusPage

#: Events that wait for one follower; beyond that it loses some and is told how many.
FOLLOW_LIMIT = 4096
FOLLOW_BATCH = 256


class Inquiries:
    """Answers questions; changes nothing. All methods belong to the event loop."""

    def __init__(
        self, driver: Driver, status: StatusPage, operations: Operations, peers: Peers | None
    ) -> None:
        self._driver = driver
        self._status = status
        self._operations = operations
        self._peers = peers
        self._histories = Histories(driver)

    def on_status(self, client: Client, request: StatusQuery) -> None:
        """Show the state of all groups, here or on another host."""
        host = request.host
        if host is None or host == self._driver.machine.config.host:
            client.send_whole(reply(request.id, status=self._status.status()))
        elif self._peers is None:
            self._refuse(client, request.id, "not_found", _no_link(host))
        else:
            self._peers.ask_status(host, partial(self._send_status, client, request.id))

    def _send_status(self, client: Client, request: int, found: Message | Unanswered) -> None:
        if isinstance(found, Unanswered):
            self._refuse(client, request, found.code, found.text)
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
        if request.host not in (None, self._driver.machine.config.host):
            self._ask_events(client, request, str(request.host))
            return
        send = partial(self._send_page, client, request.id)
        self._histories.answer(request, send, partial(self._refuse, client, request.id))
        if request.follow and client.follower is None:
            loop, query = asyncio.get_running_loop(), query_of(request)

            def wake() -> None:
                loop.call_soon(self._send_followed, client)

            wanted = None if query.is_plain else query
            history = self._driver.around.history
            client.follower = history.follow(wake, limit=FOLLOW_LIMIT, query=wanted)

    def _ask_events(self, client: Client, request: EventsQuery, host: str) -> None:
        if request.follow:
            text = "of other hosts there is what has happened, and not what happens from now on"
            self._refuse(client, request.id, "bad_request", text)
        elif self._peers is None:
            self._refuse(client, request.id, "not_found", _no_link(host))
        else:
            self._peers.ask_events(host, request, partial(self._send_asked, client, request.id))

    def _send_asked(self, client: Client, request: int, found: Message | Unanswered) -> None:
        if isinstance(found, Unanswered):
            self._refuse(client, request, found.code, found.text)
        else:
            client.send_whole(reply(request, **{name: found.get(name) for name in Page._fields}))

    def _send_page(self, client: Client, request: int, page: Page) -> bool:
        return client.send(reply(request, **page._asdict()))

    def _refuse(self, client: Client, request: int, code: str, text: str) -> None:
        client.send(error_reply(request, code, text))

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


def _no_link(host: str) -> str:
    return f"there is no link to {host!r}: see [peers] in the configuration"
