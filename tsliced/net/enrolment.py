"""Making a process known as a rank of a job: by its own word, or by somebody's who may say so."""

from __future__ import annotations

from typing import NamedTuple

from libtimeslice.protocol import Attach, Message, Register, error_reply, reply
from tsliced.core.events import RankRegistered
from tsliced.core.model import GroupName, JobKey, ProcessId
from tsliced.driver import Driver
from tsliced.host.backends.base import BackendError
from tsliced.host.device_access import AccessUnknownError
from tsliced.host.membership import Membership
from tsliced.host.processes import ProcessLimitError, identify, leader_of, uid_of
from tsliced.host.scan import ScanFailed, Scanner
from tsliced.net.authority import Authority
from tsliced.net.connection import Peer


class Refusal(NamedTuple):
    """Why a request cannot be met, for who made it."""

    code: str
    text: str


class Enrolment:
    """Checks and carries out `register` and `attach`."""

    def __init__(
        self, driver: Driver, authority: Authority, membership: Membership, scanner: Scanner
    ) -> None:
        self._driver = driver
        self._authority = authority
        self._membership = membership
        self._scanner = scanner

    async def enrol(self, peer: Peer, job: JobKey, request: Register | Attach) -> Message:
        """Return the answer to a `register` or `attach`."""
        process = peer.process
        if request.pid is not None and request.pid != peer.process.pid:
            named = self._named(peer, job, request.pid)
            if isinstance(named, Refusal):
                return error_reply(request.id, *named)
            process = named
        wanted = request.groups if isinstance(request, Attach) else None
        try:
            await self._authority.learn(process, peer.uid, job.uid)
            groups = self._authority.groups_of(process, job.uid)
        except AccessUnknownError as exc:
            return error_reply(request.id, "unavailable", str(exc))
        if wanted is not None:
            if unknown := [name for name in wanted if name not in groups]:
                known = ", ".join(groups) or "none"
                text = f"there is no group {unknown[0]!r} for uid {job.uid}; there are: {known}"
                return error_reply(request.id, "unknown_group", text)
            groups = tuple(map(GroupName, wanted))
        # A process of this host is on devices of this host.
        on_host = self._authority.here(groups)
        if wanted is not None and (elsewhere := [name for name in groups if name not in on_host]):
            text = (
                f"group {elsewhere[0]} has no devices on this host, where process {process.pid} is"
            )
            return error_reply(request.id, "unknown_group", text)
        if isinstance(request, Attach) and (refusal := await self._probe(process, job)) is not None:
            return error_reply(request.id, *refusal)
        return await self._put(process, job, on_host, request.id)

    def _named(self, peer: Peer, job: JobKey, pid: int) -> ProcessId | Refusal:
        """Return the process that a peer named, or why it may not be."""
        process, uid, leader = identify(pid), uid_of(pid), leader_of(pid)
        if process is None or uid is None or leader is None or identify(pid) != process:
            return Refusal("no_such_process", f"there is no process {pid}")
        if leader != pid:
            return Refusal("no_such_process", f"{pid} is a thread: name its process, {leader}")
        if not self._authority.may_act_for(peer.uid, uid):
            text = f"process {pid} belongs to uid {uid}, not to uid {peer.uid}"
            return Refusal("not_permitted", text)
        if uid != job.uid:
            text = f"process {pid} belongs to uid {uid}, and job {job} to uid {job.uid}"
            return Refusal("not_permitted", f"{text}: say hello for uid {uid}")
        return process

    async def _probe(self, process: ProcessId, job: JobKey) -> Refusal | None:
        backend = self._driver.around.backend
        backend.belongs(process, job)
        try:
            if await backend.probe(process):
                return None
        except BackendError as exc:
            return Refusal("unavailable", f"process {process.pid} cannot be looked at: {exc}")
        text = f"process {process.pid} {backend.nothing_to_move}"
        return Refusal("not_cuda", text)

    async def _put(
        self, process: ProcessId, job: JobKey, groups: tuple[GroupName, ...], request: int
    ) -> Message:
        try:
            self._membership.register(process, job)
            found = await self._scanner.look_at(process)
        except ProcessLimitError as exc:
            return error_reply(request, "would_exceed_limit", str(exc))
        except ScanFailed as exc:
            return error_reply(request, "unavailable", str(exc))
        self._scanner.register(process, job, groups)
        on = groups
        if found is not None:
            self._driver.around.backend.prepare(process)
            on = tuple(self._scanner.groups_of(found.devices))
            self._driver.post(RankRegistered(job=job, found=found, groups=on))
        return reply(
            request,
            rank={"pid": process.pid, "start_time": process.start_time},
            groups=list(on),
        )
