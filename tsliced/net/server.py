"""The Unix socket: sessions of clients, their requests as events, the core's answers as messages.

Who a client is comes from the kernel (SO_PEERCRED), never from its words. Whatever a client sends,
the worst that happens is an error to it.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from typing import Any

from libtimeslice import __version__ as VERSION  # noqa: N812 - a constant
from libtimeslice.protocol import (
    PROTOCOL_VERSION,
    Ack,
    Acquire,
    Attach,
    Bye,
    Cancel,
    DrainOrder,
    EventsQuery,
    Heartbeat,
    Hello,
    JobOrder,
    LastTurn,
    Message,
    PhaseMark,
    Ping,
    Progress,
    PsQuery,
    QueueDepth,
    Register,
    Release,
    Reply,
    Request,
    ShowQuery,
    StatusQuery,
    error_reply,
    reply,
)
from tsliced.config import ServerLimits
from tsliced.core.actions import EndSession, RunHooks
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    GrantConfirmed,
    LastTurnRequested,
    ReleaseRequested,
    SessionClosed,
    SessionDisconnected,
    SessionOpened,
    SessionResumed,
    SignOfLife,
)
from tsliced.core.model import (
    Arrival,
    Cause,
    GroupName,
    JobKey,
    LeaseId,
    ProcessId,
    Reason,
    RequestId,
    SessionId,
)
from tsliced.core.sessions import LeaseState
from tsliced.core.value import maker
from tsliced.driver import ClientAction, Driver
from tsliced.host.history import Follower
from tsliced.host.membership import Membership
from tsliced.net.authority import Authority
from tsliced.net.connection import Connection, Peer, peer_of
from tsliced.net.enrolment import Enrolment
from tsliced.net.operations import Operations
from tsliced.net.peers import Peers, Unanswered
from tsliced.net.reception import Reception
from tsliced.net.replies import MESSAGES, job_message
from tsliced.net.shares import Share, Shares
from tsliced.net.survivors import Survivor, Vault, end, session_of
from tsliced.observe.status import StatusPage

CAPABILITIES = [
    "acquire",
    "rounds",
    "register",
    "attach",
    "events",
    "hooks",
    "heartbeat",
    "hold_warning",
    "last_turn",
    "operate",
]

#: Emptying a cache takes milliseconds, and is not worth waiting for long.
EMPTY_CACHE_LIMIT_S = 5.0
#: Events that wait for one follower; beyond that it loses some and is told how many.
FOLLOW_LIMIT = 4096
FOLLOW_BATCH = 256

#: By its name on the wire.
_ARRIVALS = {arrival.value: arrival for arrival in Arrival}

# Their fields come from the wire and are checked; a call of each type that only the type checker
# knows costs more than to make the event.
_make_acquire: Callable[..., AcquireRequested] = maker(AcquireRequested)
_make_release: Callable[..., ReleaseRequested] = maker(ReleaseRequested)


@dataclass(slots=True, eq=False)
class Client:
    """A session as the server sees it: the connection that it has now, and what is open on it."""

    session: SessionId
    peer: Peer
    share: Share
    job: JobKey
    connection: Connection | None
    hooks: bool = False
    #: Its process can empty its caching allocator when asked.
    empties_cache: bool = False
    tool: bool = False
    #: It promised signs of life.
    heartbeats: bool = False
    #: Requests that are not answered yet.
    open_requests: int = 0
    #: The daemon's own requests, by their ids.
    asked: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    last_asked: int = 0
    follower: Follower | None = None
    #: Its connections to daemons before this one, while it has not come back.
    survivors: list[Survivor] = field(default_factory=list)


class Server:
    """Serves clients. All methods belong to the event loop."""

    def __init__(
        self,
        driver: Driver,
        limits: ServerLimits,
        *,
        authority: Authority,
        membership: Membership,
        enrolment: Enrolment,
        operations: Operations,
        status: StatusPage,
        shares: Shares,
        vault: Vault,
    ) -> None:
        self.limits = limits
        #: Where other hosts are asked; None: there are no links.
        self.peers: Peers | None = None
        self._driver = driver
        self._membership = membership
        self._reception = Reception(driver, authority, membership, shares, on_welcome=self._open)
        self._enrolment = enrolment
        self._operations = operations
        self._status = status
        self._shares = shares
        self._vault = vault
        self._connections: dict[Connection, None] = {}
        self._clients: dict[SessionId, Client] = {}
        self._requests: dict[type, Callable[[Client, Any], None]] = {
            Acquire: self._on_acquire,
            Release: self._on_release,
            LastTurn: self._on_last_turn,
            Ack: self._on_ack,
            Cancel: self._on_cancel,
            Register: self._on_register,
            Attach: self._on_register,
            PhaseMark: self._on_phase,
            Progress: self._on_progress,
            QueueDepth: self._on_queue,
            Heartbeat: self._on_heartbeat,
            StatusQuery: self._on_status,
            PsQuery: self._on_ps,
            EventsQuery: self._on_events,
            ShowQuery: self._on_show,
            JobOrder: self._on_job_order,
            DrainOrder: self._on_drain_order,
            Ping: self._on_ping,
            Bye: self._on_bye,
            Reply: self._on_reply,
            Hello: self._on_second_hello,
        }

    def reconfigure(self, limits: ServerLimits) -> None:
        """Serve by other limits from now on; who is connected already stays."""
        self.limits = self._shares.limits = limits

    def recall_sessions(self) -> None:
        """After a restart: know the sessions that the journal kept; their clients come back."""
        for session in self._driver.machine.leasing.sessions.values():
            peer = Peer(process=session.process, uid=session.job.uid)
            share = self._shares.add_session(peer.uid)
            self._clients[session.id] = Client(
                session.id, peer, share, session.job, None, hooks=session.hooks
            )
            self._clients[session.id].heartbeats = session.heartbeat_s is not None
            self._membership.register(session.process, session.job)

    def adopt(self, kept: Iterable[tuple[str, socket.socket]]) -> int:
        """Know by their old connections which clients are there; return how many are.

        One that is not among them left, or was never kept: it has its grace to come back.
        """
        adopted = 0
        for name, sock in kept:
            client = self._clients.get(session_of(name))
            if client is None or _process_of(sock) != client.peer.process:
                self._vault.drop(name)
                end(sock)
                sock.close()
                continue

            def on_gone(survivor: Survivor, client: Client = client) -> None:
                self._on_survivor_gone(client, survivor)

            client.survivors.append(Survivor(name, sock, self._vault, on_gone))
            self._driver.post(SessionResumed(session=client.session))
            adopted += 1
        return adopted

    def _on_survivor_gone(self, client: Client, survivor: Survivor) -> None:
        client.survivors.remove(survivor)
        if not client.survivors:
            self._driver.post(SessionDisconnected(session=client.session))

    def _close_survivors(self, client: Client) -> None:
        for survivor in client.survivors:
            survivor.close()
        client.survivors.clear()

    def close(self) -> None:
        """Leave all connections; their sessions go on with the next daemon."""
        for connection in list(self._connections):
            connection.leave()
        for client in self._clients.values():
            for survivor in client.survivors:
                survivor.leave()
            client.survivors.clear()

    # --- connections (Desk) -------------------------------------------------------------------

    def admit(self, connection: Connection) -> str | None:
        """Enter a connection into the books, or return why there is no room for it."""
        assert connection.peer is not None
        refusal = self._shares.add_connection(connection.peer.uid)
        if refusal is None:
            self._connections[connection] = None
        return refusal

    def on_buffered(self, connection: Connection, *, much: bool) -> None:
        """Look after a connection that has much in its buffers."""
        if much:
            self._shares.add_hoard(connection)
        else:
            self._shares.remove_hoard(connection)

    def on_closed(self, connection: Connection) -> None:
        """Let the session wait for its client, if it has one."""
        self._shares.remove_hoard(connection)
        if connection in self._connections:
            assert connection.peer is not None
            del self._connections[connection]
            self._shares.remove_connection(connection.peer.uid)
        if connection.session is None:
            return
        client = self._clients.get(connection.session)
        if client is None or client.connection is not connection:
            return
        self._disconnect(client)
        # A tool has one connection, and nothing that it would come back for.
        ended = SessionClosed if client.tool else SessionDisconnected
        self._driver.post(ended(session=client.session))

    def _disconnect(self, client: Client) -> None:
        client.connection = None
        client.share.requests -= client.open_requests
        client.open_requests = 0
        for future in client.asked.values():
            future.cancel()
        client.asked.clear()
        if client.follower is not None:
            self._driver.around.history.unfollow(client.follower)
            client.follower = None

    # --- hello --------------------------------------------------------------------------------

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        """Resume a session, or open one."""
        peer = connection.peer
        assert peer is not None
        client = self._resumable(hello, peer)
        if client is not None:
            if client.connection is not None:
                # The old connection is dead, or a copy of the client tries: the newest one counts.
                client.connection.close()
                self._disconnect(client)
            self._close_survivors(client)
            client.connection, connection.session = connection, client.session
            # The journal does not have it.
            client.empties_cache = "empty_cache" in hello.caps
            self._driver.post(SessionResumed(session=client.session))
            self._welcome(client, resumed=True)
            self._keep(connection, hello)
            return
        self._reception.receive(connection, hello)

    def _resumable(self, hello: Hello, peer: Peer) -> Client | None:
        if hello.session is None or hello.secret is None:
            return None
        session = self._driver.machine.leasing.sessions.get(SessionId(hello.session))
        client = self._clients.get(SessionId(hello.session))
        if session is None or client is None:
            return None
        if not compare_digest(session.secret, hello.secret) or session.process != peer.process:
            return None
        return client

    def _open(
        self,
        connection: Connection,
        hello: Hello,
        job: JobKey,
        groups: tuple[GroupName, ...],
    ) -> None:
        peer = connection.peer
        assert peer is not None
        session = SessionId(secrets.token_hex(8))
        hooks, tool = "quiesce" in hello.caps, hello.role == "tool"
        share = self._shares.add_session(peer.uid)
        client = Client(session, peer, share, job, connection, hooks=hooks, tool=tool)
        client.empties_cache = "empty_cache" in hello.caps
        client.heartbeats = hello.heartbeat_s is not None
        self._clients[session] = client
        connection.session = session
        secret = secrets.token_bytes(16)
        self._driver.post(
            SessionOpened(
                session=session,
                job=job,
                process=peer.process,
                secret=secret,
                groups=groups,
                hooks=client.hooks,
                agent=hello.role == "agent",
                tool=tool,
                heartbeat_s=hello.heartbeat_s,
            )
        )
        self._welcome(client, resumed=False, secret=secret, groups=groups)
        self._keep(connection, hello)

    def _keep(self, connection: Connection, hello: Hello) -> None:
        # A tool opens a new session when it comes back: nothing of the old one is needed.
        if hello.role != "tool" and connection.session is not None and connection.open:
            connection.keep(self._vault, connection.session)

    def _welcome(
        self,
        client: Client,
        *,
        resumed: bool,
        secret: bytes | None = None,
        groups: Iterable[GroupName] = (),
    ) -> None:
        machine = self._driver.machine
        leases: list[Message] = []
        if resumed:
            session = machine.leasing.sessions[client.session]
            secret, groups = session.secret, session.groups
            leases = [
                {
                    "lease": lease.id,
                    "groups": list(lease.groups),
                    "tokens": {group: token.as_int() for group, token in lease.tokens},
                }
                for lease in session.leases.values()
                if lease.state is LeaseState.HELD
            ]
        assert client.connection is not None
        client.connection.send(
            {
                "t": "welcome",
                "version": list(PROTOCOL_VERSION),
                "daemon": f"tsliced/{VERSION}",
                "host": machine.config.host,
                "caps": CAPABILITIES,
                "session": client.session,
                "secret": secret,
                "resumed": resumed,
                "grace_s": machine.config.limits.grace_s,
                "job": job_message(client.job),
                "groups": list(groups),
                "leases": leases,
            }
        )

    # --- requests -----------------------------------------------------------------------------

    def on_request(self, connection: Connection, request: Request) -> None:
        """Hand a request to whom it concerns."""
        assert connection.session is not None
        client = self._clients.get(connection.session)
        if client is not None:
            self._requests[request.__class__](client, request)

    def _on_acquire(self, client: Client, request: Acquire) -> None:
        if not self._count(client, request.id):
            return
        groups = request.groups or ()
        if len(groups) > 1:
            # Unknown names sort last, and the core refuses them by name.
            order = self._driver.machine.tenancies.order_of
            groups = tuple(sorted(groups, key=lambda g: order.get(GroupName(g), len(order))))
        self._driver.post_request(
            _make_acquire(
                session=client.session,
                request=request.id,
                groups=groups,
                phase=request.phase or "",
                ranks=request.ranks or 1,
                arrival=_ARRIVALS[request.arrive],
                timeout_s=request.timeout_s,
            )
        )

    def _on_release(self, client: Client, request: Release) -> None:
        if self._count(client, request.id):
            self._driver.post_request(
                _make_release(session=client.session, request=request.id, lease=request.lease)
            )

    def _on_last_turn(self, client: Client, request: LastTurn) -> None:
        if self._count(client, request.id):
            self._driver.post_request(
                LastTurnRequested(
                    session=client.session,
                    request=RequestId(request.id),
                    leaving=request.leaving,
                    timeout_s=request.timeout_s,
                )
            )

    def _on_ack(self, client: Client, request: Ack) -> None:
        self._driver.post(GrantConfirmed(session=client.session, lease=LeaseId(request.lease)))

    def _on_cancel(self, client: Client, request: Cancel) -> None:
        if self._count(client, request.id):
            self._driver.post_request(
                CancelRequested(
                    session=client.session,
                    request=RequestId(request.id),
                    acquire=RequestId(request.acquire),
                )
            )

    def _count(self, client: Client, request: int) -> bool:
        limits, share = self.limits, client.share
        if client.open_requests >= limits.max_pending_requests:
            who, name, most = "this session", "max_pending_requests", limits.max_pending_requests
        elif share.requests >= limits.max_pending_requests_per_uid:
            who, name = f"uid {share.uid}", "max_pending_requests_per_uid"
            most = limits.max_pending_requests_per_uid
        else:
            client.open_requests += 1
            share.requests += 1
            return True
        text = f"{most} requests of {who} wait for an answer already, which is the limit {name}"
        self._send(client, error_reply(request, "would_exceed_limit", text))
        return False

    def _on_register(self, client: Client, request: Register | Attach) -> None:
        if not self._count(client, request.id):
            return

        async def enrol() -> None:
            try:
                answer = await self._enrolment.enrol(client.peer, client.job, request)
            except Exception as exc:
                # The edge of this task: a mistake of ours in one request must not end the daemon.
                self._driver.note("bug", "error", reason=f"enrolling a rank: {exc!r}")
                answer = error_reply(request.id, "internal", "the daemon's log says why")
            if client.open_requests:
                client.open_requests -= 1
                client.share.requests -= 1
            self._send(client, answer)

        self._driver.around.tasks.create_task(enrol(), name="enrol a rank")

    def _on_phase(self, client: Client, request: PhaseMark) -> None:
        self._driver.note(
            "phase", "info", job=str(client.job), name=request.name, begin=request.begin
        )
        self._heard(client)

    def _on_progress(self, client: Client, request: Progress) -> None:
        self._driver.note("progress", "info", **{**request.fields, "job": str(client.job)})
        self._heard(client)

    def _on_queue(self, client: Client, request: QueueDepth) -> None:
        self._driver.note(
            "queue",
            "info",
            job=str(client.job),
            name=request.name,
            depth=request.depth,
            target=request.target,
        )
        self._heard(client)

    def _on_heartbeat(self, client: Client, request: Heartbeat) -> None:
        self._heard(client)

    def _heard(self, client: Client) -> None:
        """Know that the client's own code goes on; what its library does by itself is no sign."""
        if client.heartbeats:
            self._driver.post(SignOfLife(session=client.session))

    def _on_status(self, client: Client, request: StatusQuery) -> None:
        host = request.host
        if host is None or host == self._driver.machine.config.host:
            self._send_whole(client, reply(request.id, status=self._status.status()))
        elif self.peers is None:
            text = f"there is no link to {host!r}: see [peers] in the configuration"
            self._send(client, error_reply(request.id, "not_found", text))
        else:
            self.peers.ask_status(host, partial(self._send_status, client, request.id))

    def _send_status(self, client: Client, request: int, found: Message | Unanswered) -> None:
        if isinstance(found, Unanswered):
            self._send(client, error_reply(request, found.code, found.text))
        else:
            self._send_whole(client, reply(request, status=found))

    def _on_ps(self, client: Client, request: PsQuery) -> None:
        self._send_whole(client, reply(request.id, ranks=self._status.ranks()))

    def _on_events(self, client: Client, request: EventsQuery) -> None:
        self._driver.write_notes()
        history, limit = self._driver.around.history, request.limit
        while True:
            page = history.since(request.since, limit)
            if self._send(client, reply(request.id, events=page.events, next=page.next)):
                break
            # More than a frame holds. A part is as good: `next` says where to go on.
            limit //= 2
        if request.follow and client.follower is None:
            loop = asyncio.get_running_loop()

            def wake() -> None:
                loop.call_soon(self._send_followed, client)

            client.follower = history.follow(wake, limit=FOLLOW_LIMIT)

    def _on_show(self, client: Client, request: ShowQuery) -> None:
        self._send_whole(client, self._operations.show(client.peer, request))

    def _on_job_order(self, client: Client, request: JobOrder) -> None:
        self._operations.on_job(client.peer, request, partial(self._send, client))

    def _on_drain_order(self, client: Client, request: DrainOrder) -> None:
        self._operations.on_drain(client.peer, request, partial(self._send_whole, client))

    def _send_followed(self, client: Client) -> None:
        follower = client.follower
        if follower is None:
            return
        events = follower.take(FOLLOW_BATCH)
        for event in events:
            self._send(client, {"t": "event", "event": event})
        if len(events) == FOLLOW_BATCH:
            asyncio.get_running_loop().call_soon(self._send_followed, client)

    def _on_ping(self, client: Client, request: Ping) -> None:
        self._send(client, reply(request.id))

    def _on_bye(self, client: Client, request: Bye) -> None:
        self._driver.post(SessionClosed(session=client.session))

    def _on_reply(self, client: Client, request: Reply) -> None:
        future = client.asked.pop(request.re, None)
        if future is not None and not future.done():
            future.set_result(request)

    def _on_second_hello(self, client: Client, request: Hello) -> None:
        if client.connection is not None:
            client.connection.refuse("bad_request", "a connection says hello once")

    def _send(self, client: Client, message: Message) -> bool:
        """Send a message to a client that is there; return False if it exceeds a frame."""
        if client.connection is None:
            return True
        return client.connection.send(message)

    def _send_whole(self, client: Client, answer: Message) -> None:
        if not self._send(client, answer):
            text = "there is more to tell than one message can hold"
            self._send(client, error_reply(answer["re"], "would_exceed_limit", text))

    # --- the core's answers (Clients) ---------------------------------------------------------

    def deliver(self, action: ClientAction) -> None:
        """Send an answer or news to a session; one without a connection misses it."""
        client = self._clients.get(action.session)
        if client is None:
            return
        if isinstance(action, EndSession):
            self._end(client)
            return
        message = MESSAGES[action.__class__](action)
        if client.open_requests and "re" in message:
            client.open_requests -= 1
            client.share.requests -= 1
        if client.connection is not None:
            client.connection.send(message)

    def _end(self, client: Client) -> None:
        del self._clients[client.session]
        connection = client.connection
        self._disconnect(client)
        self._shares.remove_session(client.share)
        self._close_survivors(client)
        if connection is not None:
            connection.close()

    async def run_hooks(self, action: RunHooks) -> Reason | None:
        """Ask sessions to quiesce or resume, all at once; return why it did not work out."""
        name = "quiesce" if action.quiesce else "resume"
        message: Message = {
            "t": name,
            "groups": list(action.tenancy.groups),
            "timeout_s": action.timeout_s,
        }
        clients = [self._clients.get(session) for session in action.sessions]
        asked = [self._ask(client, message) for client in clients if client is not None]
        answers = await asyncio.gather(*(self._answer(a, action.timeout_s) for a in asked))
        wrong = next((answer for answer in answers if answer is not None), None)
        if wrong is None:
            return None
        return Reason(cause=Cause.QUIESCE, text=f"its {name} callback: {wrong}")

    async def empty_cache(self, process: ProcessId) -> None:
        """Ask a rank that has an agent to free device memory that it keeps without need.

        One that does not answer in time is copied with all that it has.
        """
        able = [
            client
            for client in self._clients.values()
            if client.empties_cache and client.peer.process == process
        ]
        asked = [self._ask(client, {"t": "empty_cache"}) for client in able]
        await asyncio.gather(*(self._answer(a, EMPTY_CACHE_LIMIT_S) for a in asked))

    def _ask(self, client: Client, message: Message) -> asyncio.Future[Reply]:
        client.last_asked += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if client.connection is None:
            future.cancel()
            return future
        client.asked[client.last_asked] = future
        client.connection.send({**message, "id": client.last_asked})
        return future

    async def _answer(self, future: asyncio.Future[Reply], limit_s: float) -> str | None:
        try:
            answer = await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            return f"it did not answer within {limit_s:g} s"
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            return "its agent is not connected"
        return str(answer.error.get("message")) if answer.error is not None else None


def _process_of(sock: socket.socket) -> ProcessId | None:
    try:
        peer = peer_of(sock)
    except OSError:
        # It cannot be found out now; who is there comes back by itself.
        return None
    return peer.process if peer is not None else None
