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
from tsliced.net.client import Client
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
        history, limit = self._driver.around.history, request.limit
        while True:
            page = history.since(request.since, limit)
            if client.send(reply(request.id, events=page.events, next=page.next)):
                break
            # More than a frame holds. A part is as good: `next` says where to go on.
            limit //= 2
        if request.follow and client.follower is None:
            loop = asyncio.get_running_loop()

            def wake() -> None:
                loop.call_soon(self._send_followed, client)

            client.follower = history.follow(wake, limit=FOLLOW_LIMIT)

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
