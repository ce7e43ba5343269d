"""The Unix socket: sessions of clients, their requests as events, the core's answers as messages.

Who a client is comes from the kernel (SO_PEERCRED), never from its words. Whatever a client sends,
the worst that happens is an error to it.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable
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
    HostDeath,
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
    SlurmNotice,
    StatusQuery,
    WatchdogNotice,
    error_reply,
    reply,
)
from tsliced.config import ServerLimits
from tsliced.core.actions import ClientAction, EndSession, RunHooks
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
    WatchdogTold,
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
from tsliced.core.sessions import Session
from tsliced.core.value import maker
from tsliced.driver import Driver
from tsliced.host.backends.base import AgentAwayError
from tsliced.host.membership import Membership
from tsliced.net.adoption import adopt
from tsliced.net.advising import Advising
from tsliced.net.allotment import Allotment
from tsliced.net.authority import Authority
from tsliced.net.client import Client, ask_all, ask_first, reach_all
from tsliced.net.connection import Connection, Peer
from tsliced.net.enrolment import Enrolment
from tsliced.net.inquiries import Inquiries
from tsliced.net.operations import Operations
from tsliced.net.peers import Peers
from tsliced.net.reception import Reception
from tsliced.net.replies import MESSAGES, held_leases, job_message
from tsliced.net.shares import Shares
from tsliced.net.survivors import Vault
from tsliced.net.tidings import Tidings
from tsliced.net.waiting import Waiting
from tsliced.observe.status import StatusPage
from tsliced.observe.told import Told

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

#: By its name on the wire.
_ARRIVALS = {arrival.value: arrival for arrival in Arrival}

# Their fields come from the wire and are checked; a call of each type that only the type checker
# knows costs more than to make the event.
_make_acquire: Callable[..., AcquireRequested] = maker(AcquireRequested)
_make_release: Callable[..., ReleaseRequested] = maker(ReleaseRequested)


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
        allotment: Allotment,
        status: StatusPage,
        shares: Shares,
        vault: Vault,
        told: Told,
        peers: Peers | None = None,
    ) -> None:
        self.limits = limits
        #: Where other hosts are asked; None: there are no links.
        self.peers = peers
        self.status = status
        self.told = told
        self._driver = driver
        self._authority = authority
        self._membership = membership
        self._allotment = allotment
        self._reception = Reception(
            driver, authority, membership, shares, allotment, on_welcome=self._open
        )
        self._enrolment, self._operations = enrolment, operations
        self._inquiries = Inquiries(driver, status, operations, peers)
        self._tidings = Tidings(driver, told)
        self.waiting = Waiting(driver.machine, status.moving, self._tell)
        self.advising = Advising(driver, self._tell, lambda: self.limits.yield_warning_s)
        self._shares = shares
        self._vault = vault
        self._connections: dict[Connection, None] = {}
        self._clients: dict[SessionId, Client] = {}
        self._requests = self._handlers()

    def _handlers(self) -> dict[type, Callable[[Client, Any], None]]:
        """Return to whom each kind of request is handed."""
        return {
            Acquire: self._on_acquire,
            Release: self._on_release,
            LastTurn: self._on_last_turn,
            Ack: self._on_ack,
            Cancel: self._on_cancel,
            Register: self._on_register,
            Attach: self._on_register,
            PhaseMark: self._tidings.on_phase,
            Progress: self._tidings.on_progress,
            QueueDepth: self._tidings.on_queue,
            Heartbeat: self._tidings.on_heartbeat,
            WatchdogNotice: self._tidings.on_watchdog,
            StatusQuery: self._inquiries.on_status,
            PsQuery: self._inquiries.on_ps,
            EventsQuery: self._inquiries.on_events,
            ShowQuery: self._inquiries.on_show,
            JobOrder: self._on_job_order,
            DrainOrder: self._on_drain_order,
            HostDeath: self._on_host_death,
            SlurmNotice: self._on_slurm_notice,
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
        """Know by their old connections which clients are there; return how many are."""
        return adopt(kept, self._clients, self._driver, self._vault)

    def close(self) -> None:
        """Leave all connections; their sessions go on with the next daemon."""
        self._tidings.close()
        self._allotment.close()
        for connection in list(self._connections):
            connection.leave()
        for client in self._clients.values():
            client.leave_survivors()

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
        client.disconnect()
        self._inquiries.unfollow(client)

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
            client.close_survivors()
            client.connect(connection)
            connection.session = client.session
            # The journal does not have it.
            client.note_capabilities(hello.caps)
            self._driver.post(SessionResumed(session=client.session))
            self._driver.post(WatchdogTold(session=client.session, limit_s=hello.watchdog_s))
            session = self._driver.machine.leasing.sessions[client.session]
            self._welcome(client, secret=session.secret, groups=session.groups, resumed=session)
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
        client.note_capabilities(hello.caps)
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
        if hello.watchdog_s is not None:
            self._driver.post(WatchdogTold(session=session, limit_s=hello.watchdog_s))
        self._welcome(client, secret=secret, groups=groups)
        self._keep(connection, hello)

    def _keep(self, connection: Connection, hello: Hello) -> None:
        # A tool opens a new session when it comes back: nothing of the old one is needed.
        if hello.role != "tool" and connection.session is not None and connection.open:
            connection.keep(self._vault, connection.session)

    def _welcome(
        self,
        client: Client,
        *,
        secret: bytes,
        groups: Collection[GroupName],
        resumed: Session | None = None,
    ) -> None:
        config = self._driver.machine.config
        assert client.connection is not None
        client.connection.send(
            {
                "t": "welcome",
                "version": list(PROTOCOL_VERSION),
                "daemon": f"tsliced/{VERSION}",
                "host": config.host,
                "caps": CAPABILITIES,
                "session": client.session,
                "secret": secret,
                "resumed": resumed is not None,
                "grace_s": config.limits.grace_s,
                "job": job_message(client.job),
                "groups": list(groups),
                "usual_groups": list(self._usual_groups(client.job, groups)),
                "leases": self._held_by(resumed) if resumed is not None else [],
            }
        )

    def _held_by(self, session: Session) -> list[Message]:
        """Return what a session holds, of this host's arbiters and of others."""
        return held_leases(session, self._driver.machine.fronting.held_by(session.id))

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
        machine, groups = self._driver.machine, request.groups or ()
        if len(groups) > 1:
            # Unknown names sort last, and the core refuses them by name.
            order = machine.tenancies.order_of
            groups = tuple(sorted(groups, key=lambda g: order.get(GroupName(g), len(order))))
        elif not groups and self._authority.any_elsewhere:
            session = machine.leasing.sessions.get(client.session)
            groups = self._usual_groups(client.job, session.groups) if session is not None else ()
        self._driver.post_request(
            _make_acquire(
                session=client.session,
                request=request.id,
                groups=groups,
                phase=request.phase or "",
                ranks=request.ranks or 1,
                arrival=_ARRIVALS[request.arrive],
                timeout_s=request.timeout_s,
                holding=machine.groups_of(request.inside) if request.inside else (),
            )
        )

    def _usual_groups(self, job: JobKey, permitted: Collection[GroupName]) -> tuple[GroupName, ...]:
        """Return what is leased if no groups are named: those of the Slurm job's hosts.

        Without one, those of this host, if it has any: who means other hosts too says so, and by
        default nobody takes the whole cluster.
        """
        usual = self._allotment.usual_groups(job, permitted)
        return usual or self._authority.here(permitted)

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
        client.send(error_reply(request, "would_exceed_limit", text))
        return False

    def _on_register(self, client: Client, request: Register | Attach) -> None:
        if not self._count(client, request.id):
            return

        work = self._enrolment.enrol(client.peer, client.job, request)
        self._answer_later(client, request.id, work, "enrolling a rank")

    def _on_slurm_notice(self, client: Client, request: SlurmNotice) -> None:
        if self._count(client, request.id):
            work = self._allotment.on_notice(client.peer, request)
            self._answer_later(client, request.id, work, "a Slurm job")

    def _answer_later(
        self, client: Client, request: int, work: Coroutine[Any, Any, Message], what: str
    ) -> None:
        async def answer() -> None:
            try:
                message = await work
            except Exception as exc:
                # The edge of this task: a mistake of ours in one request must not end the daemon.
                self._driver.note("bug", "error", reason=f"{what}: {exc!r}")
                message = error_reply(request, "internal", "the daemon's log says why")
            if client.open_requests:
                client.open_requests -= 1
                client.share.requests -= 1
            client.send(message)

        self._driver.around.tasks.create_task(answer(), name=what)

    def _on_job_order(self, client: Client, request: JobOrder) -> None:
        self._operations.on_job(client.peer, request, client.send)

    def _on_drain_order(self, client: Client, request: DrainOrder) -> None:
        self._operations.on_drain(client.peer, request, client.send_whole)

    def _on_host_death(self, client: Client, request: HostDeath) -> None:
        self._operations.on_host_death(client.peer, request, client.send)

    def _on_ping(self, client: Client, request: Ping) -> None:
        client.send(reply(request.id))

    def _on_bye(self, client: Client, request: Bye) -> None:
        self._driver.post(SessionClosed(session=client.session))

    def _on_reply(self, client: Client, request: Reply) -> None:
        client.on_reply(request)

    def _on_second_hello(self, client: Client, request: Hello) -> None:
        if client.connection is not None:
            client.connection.refuse("bad_request", "a connection says hello once")

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

    def _tell(self, session: SessionId, message: Message) -> None:
        client = self._clients.get(session)
        if client is not None:
            client.send(message)

    def _end(self, client: Client) -> None:
        del self._clients[client.session]
        if not client.tool:
            others = self._driver.machine.leasing.sessions_of(client.job)
            self._tidings.on_gone(client, was_last=all(other.tool for other in others))
        connection = client.connection
        self._disconnect(client)
        client.end()
        self._shares.remove_session(client.share)
        client.close_survivors()
        if connection is not None:
            connection.close()

    async def run_hooks(self, action: RunHooks) -> Reason | None:
        """Ask sessions to quiesce or resume, all at once; return why it did not work out."""
        name = "quiesce" if action.quiesce else "resume"
        message: Message = {
            "t": name,
            "groups": list(action.tenancy.groups),
            "timeout_s": action.timeout_s,
            "move": action.epoch.as_int(),
        }
        clients = [c for s in action.sessions if (c := self._clients.get(s)) is not None]
        # Whoever was told to pause is told to go on, also if it is away just now.
        again = not action.quiesce
        answers = await reach_all(clients, message, action.timeout_s, again=again)
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
        await ask_all(able, {"t": "empty_cache"}, EMPTY_CACHE_LIMIT_S)

    # --- questions of the backend (Agents) ----------------------------------------------------

    def has_agent(self, process: ProcessId) -> bool:
        """Return whether a rank has an agent that may move tensors; see `Agents`."""
        return bool(self._agents_of(process))

    async def ask(self, process: ProcessId, message: Message, limit_s: float | None) -> Message:
        """Ask a rank's agent about its tensors; see `Agents`."""
        clients = self._agents_of(process)
        # Who is away may have been followed by another one.
        clients.sort(key=lambda client: (client.connection is None, not client.moves_tensors))
        answer = await ask_first(clients, message, limit_s)
        if answer is not None:
            return answer.fields
        what = "its agent is away or did not answer" if clients else "it has no agent"
        raise AgentAwayError(f"{what} (process {process.pid})", never_came=not clients)

    def _agents_of(self, process: ProcessId) -> list[Client]:
        of_process = (c for c in self._clients.values() if c.peer.process == process)
        return [client for client in of_process if self._may_move_tensors(client)]

    def _may_move_tensors(self, client: Client) -> bool:
        if client.moves_tensors is not None:
            return client.moves_tensors
        # It has not come back since a restart, which agents do by themselves, and soon.
        session = self._driver.machine.leasing.sessions.get(client.session)
        return session is not None and session.agent
