"""Who comes in: from the hello of a new client to a session, or to a refusal."""

from __future__ import annotations

from collections.abc import Callable

from libtimeslice.protocol import Hello
from tsliced.core.model import GroupName, JobKey
from tsliced.driver import Driver
from tsliced.host.device_access import AccessUnknownError
from tsliced.host.membership import Membership
from tsliced.host.processes import ProcessLimitError
from tsliced.net.allotment import Allotment
from tsliced.net.authority import Authority
from tsliced.net.connection import Connection, Peer
from tsliced.net.shares import Shares

#: Opens a session for a client of a job that may lease some groups.
Open = Callable[[Connection, Hello, JobKey, tuple[GroupName, ...]], None]


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """A client may not come in; the arguments are code and text."""


class Reception:
    """Greets clients. All methods belong to the event loop."""

    def __init__(
        self,
        driver: Driver,
        authority: Authority,
        membership: Membership,
        shares: Shares,
        allotment: Allotment,
        *,
        on_welcome: Open,
    ) -> None:
        self._driver = driver
        self._authority = authority
        self._membership = membership
        self._shares = shares
        self._allotment = allotment
        self._on_welcome = on_welcome

    def receive(self, connection: Connection, hello: Hello) -> None:
        """Take a client in, or refuse it; at once if all that matters is known about it."""
        peer = connection.peer
        assert peer is not None
        if not self._authority.serves(peer.uid):
            text = "this daemon serves nobody but the user who runs it"
            connection.refuse("not_permitted", text)
            return
        uids = (peer.uid,) if hello.uid is None else (peer.uid, hello.uid)
        try:
            is_known = self._allotment.knows(peer.process, peer.uid) and self._authority.knows(
                peer.process, *uids
            )
        except AccessUnknownError as exc:
            connection.refuse("unavailable", str(exc))
            return
        if is_known:
            self._greet(connection, hello, peer)
            return
        greeting = self._learn_and_greet(connection, hello, peer, uids)
        self._driver.around.tasks.create_task(greeting, name="learn about a client")

    async def _learn_and_greet(
        self, connection: Connection, hello: Hello, peer: Peer, uids: tuple[int, ...]
    ) -> None:
        try:
            await self._allotment.learn(peer.process, peer.uid)
            await self._authority.learn(peer.process, *uids)
            if connection.open:
                self._greet(connection, hello, peer)
        except AccessUnknownError as exc:
            connection.refuse("unavailable", str(exc))
        except Exception as exc:
            # The edge of this task: a mistake of ours about one client must not end the daemon.
            self._driver.note("bug", "error", reason=f"greeting a client: {exc!r}")
            connection.refuse("internal", "the daemon's log says why")

    def _greet(self, connection: Connection, hello: Hello, peer: Peer) -> None:
        try:
            job, groups = self._admit(hello, peer)
        except Refused as exc:
            connection.refuse(*exc.args)
        else:
            self._on_welcome(connection, hello, job, groups)

    def _admit(self, hello: Hello, peer: Peer) -> tuple[JobKey, tuple[GroupName, ...]]:
        """Return a client's job and the groups that it may lease. Raises `Refused`."""
        if (objection := self._shares.session_objection(peer.uid)) is not None:
            raise Refused("would_exceed_limit", objection)
        try:
            job = self._membership.default_job(peer.process, hello.job, hello.ranks)
            # The real user of a process may be another than the one that it connected as.
            uid = job.uid if hello.uid is None else hello.uid
            if not self._authority.may_act_for(peer.uid, uid):
                text = f"uid {peer.uid} may not act for uid {uid}; only root may"
                raise Refused("not_permitted", text)
            job = job._replace(uid=uid)
            groups = self._authority.groups_of(peer.process, uid)
            if hello.role != "tool":
                self._membership.register(peer.process, job)
        except (ValueError, LookupError) as exc:
            raise Refused("bad_request", str(exc)) from exc
        except ProcessLimitError as exc:
            raise Refused("would_exceed_limit", str(exc)) from exc
        except AccessUnknownError as exc:
            raise Refused("unavailable", str(exc)) from exc
        return job, groups
