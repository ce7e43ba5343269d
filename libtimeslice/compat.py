"""The calls and results of the llm-d time-slicing client, served by tsliced.

A program written for `timeslice.orchestrator` runs with two changes: the import, and the target,
which is the daemon's socket (`unix:/run/tsliced/tsliced.sock`). As there, `acquire` and `release`
are idempotent for a job and a group: they do not count. Blocks of `on_accelerators` nest.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import NoReturn

from libtimeslice.client import TimeSlice
from libtimeslice.environment import settings_from
from libtimeslice.errors import AcquireTimeout, ProtocolError, TimeSliceError, Unavailable
from libtimeslice.lease import Lease
from libtimeslice.protocol import Message


class OrchestratorError(Exception):
    """Root of the errors of this client; `code` is the daemon's, see `docs/protocol.md`."""

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class OrchestratorConnectionError(OrchestratorError):
    """The daemon cannot be reached, or cannot serve this now."""


class OrchestratorTimeoutError(OrchestratorError):
    """The call took longer than its time-out."""


class OrchestratorInvalidArgumentError(OrchestratorError):
    """The daemon does not understand the call."""


class OrchestratorInternalError(OrchestratorError):
    """The daemon failed."""


class GroupLockState(str, Enum):
    """State of a group."""

    UNSPECIFIED = "UNSPECIFIED"
    UNKNOWN = "UNKNOWN"
    IDLE = "IDLE"
    IDLE_YIELDED = "IDLE_YIELDED"
    LOCKED = "LOCKED"
    SWITCHING = "SWITCHING"


class AgentJobState(str, Enum):
    """State of a job's processes on one host."""

    UNSPECIFIED = "UNSPECIFIED"
    IDLE = "IDLE"
    RUNNING = "RUNNING"
    TRANSITIONING = "TRANSITIONING"
    SAVED = "SAVED"
    FAULTED = "FAULTED"


@dataclass(frozen=True)
class AcquireResult:
    """Answer to `acquire`."""

    success: bool
    #: From the request to the grant. A real figure: 0 if it took less than half a millisecond.
    waited_ms: int
    #: False if the state was on the devices still.
    context_restored: bool


@dataclass(frozen=True)
class YieldResult:
    """Answer to `release`."""

    success: bool
    #: Jobs in the queue just before.
    pending_waiters: int
    #: Nobody waited, so the state stays on the devices.
    snapshot_deferred: bool


@dataclass(frozen=True)
class SnapshotAgentJobState:
    """State of one job on one host."""

    agent: str
    job_id: str
    job_state: AgentJobState


@dataclass(frozen=True)
class GroupStatus:
    """State of one group. Jobs are "" where there is none."""

    group_id: str
    group_state: GroupLockState
    state_timestamp: datetime | None
    locking_job: str
    active_job: str
    waiter_queue_depth: int
    loaded_job: str


@dataclass(frozen=True)
class OrchestratorGroupStatus:
    """Answer to `get_status`."""

    group: GroupStatus
    agent_job_states: list[SnapshotAgentJobState]


class TimeSliceOrchestratorClient:
    """Takes the llm-d client's calls. Ids may come with the client or with each call."""

    def __init__(
        self,
        target: str,
        job_id: str | None = None,
        group_id: str | None = None,
        channel_options: object = None,
    ) -> None:
        """Takes the path of the daemon's socket, with or without `unix:`; connects when needed.

        `channel_options` are gRPC's, and have no meaning here.
        """
        del channel_options
        self.target = target
        self.job_id = job_id
        self.group_id = group_id
        self._lock = threading.Lock()
        self._clients: dict[str | None, TimeSlice] = {}
        self._leases: dict[tuple[str, str], Lease] = {}

    def __enter__(self) -> TimeSliceOrchestratorClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases what is held and closes the connections. May be repeated."""
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
            self._leases.clear()
        for client in clients:
            client.close()

    def acquire(
        self,
        job_id: str | None = None,
        group_id: str | None = None,
        timeout_sec: float | None = None,
    ) -> AcquireResult:
        """Waits for exclusive use of a group. Succeeds at once if the job holds it by `acquire`.

        Raises ValueError without a job or a group, or an OrchestratorError.
        """
        job, group = self._job(job_id), self._group(group_id)
        held = self._leases.get((job, group))
        if held is not None and held.state.value in ("held", "uncertain"):
            return AcquireResult(success=True, waited_ms=0, context_restored=False)
        with _translated():
            lease = self._client(job).acquire(group, timeout=timeout_sec)
        self._leases[job, group] = lease
        return _acquired(lease)

    def release(
        self,
        job_id: str | None = None,
        group_id: str | None = None,
        timeout_sec: float | None = None,
    ) -> YieldResult:
        """Gives the group back; does nothing if it is not held. Never waits for long.

        Raises ValueError without a job or a group, or an OrchestratorError.
        """
        del timeout_sec
        job, group = self._job(job_id), self._group(group_id)
        lease = self._leases.pop((job, group), None)
        with _translated():
            released = None if lease is None else self._client(job).release(lease)
        if released is None:
            return YieldResult(success=True, pending_waiters=0, snapshot_deferred=True)
        return YieldResult(
            success=True,
            pending_waiters=released.waiters,
            snapshot_deferred=released.deferred,
        )

    @contextlib.contextmanager
    def on_accelerators(
        self,
        job_id: str | None = None,
        group_id: str | None = None,
        timeout_sec: float | None = None,
    ) -> Iterator[AcquireResult]:
        """Context manager and decorator: `acquire` before, `release` after. Nests."""
        job, group = self._job(job_id), self._group(group_id)
        with _translated():
            context = self._client(job).lease(group, timeout=timeout_sec)
            lease = context.__enter__()
        try:
            yield _acquired(lease)
        finally:
            with _translated():
                context.__exit__(None, None, None)

    def get_status(
        self, group_id: str | None = None, timeout_sec: float | None = None
    ) -> OrchestratorGroupStatus:
        """The state of a group. Raises ValueError without a group, or an OrchestratorError."""
        del timeout_sec
        name = self._group(group_id)
        status = self._status()
        for group in status.get("groups") or ():
            if group.get("name") == name:
                return _group_status(name, group, status)
        raise OrchestratorError(f"there is no group {name!r}", code="unknown_group")

    def list_groups(self, timeout_sec: float | None = None) -> list[str]:
        """The names of all groups. Raises an OrchestratorError."""
        del timeout_sec
        groups = self._status().get("groups") or ()
        return [str(group["name"]) for group in groups if "name" in group]

    def _status(self) -> Message:
        with _translated():
            return self._client(self.job_id).status()

    def _client(self, job: str | None) -> TimeSlice:
        with self._lock:
            client = self._clients.get(job)
            if client is None:
                client = self._clients[job] = TimeSlice(settings_from(socket=self.target, job=job))
            return client

    def _job(self, given: str | None) -> str:
        return given or self.job_id or _missing("job_id")

    def _group(self, given: str | None) -> str:
        return given or self.group_id or _missing("group_id")


def _missing(what: str) -> NoReturn:
    raise ValueError(f"{what} must be given to the client or to the call")


def _acquired(lease: Lease) -> AcquireResult:
    return AcquireResult(
        success=True, waited_ms=round(lease.waited_s * 1000), context_restored=lease.restored
    )


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeSliceError as error:
        raise _translate(error) from error


def _translate(error: TimeSliceError) -> OrchestratorError:
    kind: type[OrchestratorError] = OrchestratorError
    if isinstance(error, Unavailable):
        kind = OrchestratorConnectionError
    elif isinstance(error, AcquireTimeout):
        kind = OrchestratorTimeoutError
    elif isinstance(error, ProtocolError):
        kind = OrchestratorInvalidArgumentError
    elif error.code == "internal":
        kind = OrchestratorInternalError
    return kind(str(error), code=error.code)


#: What the daemon calls the states of a group, by what they mean to the llm-d client.
_GROUP_STATES = {
    "held": GroupLockState.LOCKED,
    "free": GroupLockState.IDLE,
    "reserved": GroupLockState.SWITCHING,
    "switching": GroupLockState.SWITCHING,
    "blocked": GroupLockState.UNKNOWN,
}
#: The same for jobs that have no state on the devices.
_JOB_STATES = {"parked": AgentJobState.SAVED, "faulted": AgentJobState.FAULTED}


def _group_status(name: str, group: Message, status: Message) -> OrchestratorGroupStatus:
    """Maps the daemon's view of a group. Fields that are missing are unspecified, not an error."""
    holder = _job_name(group.get("holder"))
    resident = [_job_name(job) for job in _listed(group.get("resident"))]
    loaded = holder if holder in resident else next(iter(resident), "")
    state = _GROUP_STATES.get(str(group.get("state")).lower(), GroupLockState.UNSPECIFIED)
    if state is GroupLockState.IDLE and resident:
        state = GroupLockState.IDLE_YIELDED
    found = GroupStatus(
        group_id=name,
        group_state=state,
        state_timestamp=_since(group.get("since_s", group.get("lease_since_s"))),
        locking_job=holder,
        active_job=holder or loaded,
        waiter_queue_depth=_count(group.get("waiters")),
        loaded_job=loaded,
    )
    agents = _jobs(str(status.get("host", name)), resident, status)
    return OrchestratorGroupStatus(group=found, agent_job_states=agents)


def _jobs(host: str, resident: list[str], status: Message) -> list[SnapshotAgentJobState]:
    """The jobs on a group's devices, and those of the host that are parked or faulted."""
    found = dict.fromkeys(resident, AgentJobState.RUNNING)
    for job in _listed(status.get("jobs")):
        if isinstance(job, dict):
            state = _JOB_STATES.get(str(job.get("state")).lower())
            if state is not None:
                found[_job_name(job.get("job"))] = state
    return [
        SnapshotAgentJobState(agent=host, job_id=job, job_state=state)
        for job, state in found.items()
    ]


def _job_name(job: object) -> str:
    """A job's id, whether the daemon names it by a string or by its key."""
    if isinstance(job, dict):
        return str(job.get("id") or job.get("job") or "")
    return "" if job is None else str(job)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _count(waiters: object) -> int:
    """The length of the queue, whether it is told as a number or as a list of jobs."""
    if isinstance(waiters, list):
        return len(waiters)
    return waiters if isinstance(waiters, int) else 0


def _since(seconds: object) -> datetime | None:
    if not isinstance(seconds, (int, float)):
        return None
    return datetime.now(timezone.utc) - timedelta(seconds=seconds)
