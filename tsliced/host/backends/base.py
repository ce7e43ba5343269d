"""What a snapshot backend is: the one protocol behind which devices differ.

A backend moves the device state of one process at a time. It is asked for one operation per rank at
a time, never cuts one off, and always says what it observed afterwards: a call that returned is not
yet proof. New backends register under the entry point group ``tsliced.backends``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, TypeAlias

from libtimeslice.protocol import Message
from tsliced.config.backends import ENTRY_POINTS, BackendSettings
from tsliced.core.model import (
    Cause,
    DeviceId,
    GroupName,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    Verb,
)

#: Returns what NVML says that a process has on each device; None: it cannot say just now.
Measure: TypeAlias = Callable[[ProcessId], Awaitable[Mapping[DeviceId, int] | None]]


async def cannot_measure(_process: ProcessId) -> None:
    """Measure where there is no NVML."""
    return


class BackendError(Exception):
    """A backend cannot be used, on this host or for a process; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What a backend may know of the daemon."""

    #: A directory of its own, mode 0700, for what must outlive the daemon.
    directory: Path
    #: Path of libcuda.so.1; None: the system's.
    cuda_library: str | None = None
    #: ``[backends]`` of the configuration: its own table is all that a backend should look at.
    settings: BackendSettings = field(default_factory=BackendSettings)
    measure: Measure = cannot_measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one operation ended."""

    #: As the driver said after the operation, whatever became of it.
    observed: RankState
    failure: Reason | None = None
    #: Device bytes that were moved, where the backend knows; 0 where it does not.
    moved_bytes: int = 0
    seconds: float = 0.0


class AgentAwayError(Exception):
    """A process cannot be asked; the text says why."""

    def __init__(self, text: str, *, never_came: bool) -> None:
        super().__init__(text)
        #: It has no agent that could be waited for.
        self.never_came = never_came


class Agents(Protocol):
    """The agents of libtimeslice in the ranks of this host."""

    def has_agent(self, process: ProcessId) -> bool:
        """Return whether a process has an agent that may move tensors, be it away just now."""
        ...

    async def ask(self, process: ProcessId, message: Message, limit_s: float | None) -> Message:
        """Return a process's answer to a request, which may be an error.

        The request is repeated when a connection was lost before the answer, so it must be one that
        may be repeated. `limit_s` None: until the process is gone. Raises `AgentAwayError`.
        """
        ...


class Neighbours(Protocol):
    """What is known of those who share devices with a process."""

    def groups_of(self, process: ProcessId) -> tuple[GroupName, ...]:
        """Return the groups that a process is on; none if it is not known as a rank."""
        ...

    async def objection(self, process: ProcessId, left: Mapping[DeviceId, int]) -> str | None:
        """Say why a parked process may not leave so many bytes on its devices, if so."""
        ...


class Backend(ABC):
    """One way to move device state. All methods belong to the event loop and never block it."""

    #: Whether NVML lists the processes whose state this backend moves, and their memory.
    seen_by_nvml = True
    #: Whether a process does the moving itself, and has to run for it. Another backend can take
    #: what such a one leaves, after it, and has to have brought that back before it.
    in_process = False
    #: What is said of a process for which `probe` returns False.
    nothing_to_move = "has no CUDA context: nothing of it could be moved"

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    async def start(self) -> None:  # noqa: B027 - most have nothing to do
        """Get ready. Raises `BackendError` if it cannot work on this host."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what it holds. Operations in flight go on where they can."""

    def meet(self, agents: Agents) -> None:  # noqa: B027 - most need none
        """Hear who passes questions on to the ranks' own agents. Called once, after `start`."""

    def join(self, neighbours: Neighbours) -> None:  # noqa: B027 - most need none
        """Hear who knows what else is on the devices. Called once, after `start`."""

    def prepare(self, process: ProcessId) -> None:  # noqa: B027 - most have nothing to do
        """Hear that this process may have to be moved some time."""

    def forget(self, process: ProcessId) -> None:  # noqa: B027 - most have nothing to do
        """Hear that this process is gone."""

    @abstractmethod
    async def probe(self, process: ProcessId) -> bool:
        """Return whether the process has device state that this backend could move.

        Raises `BackendError` if that cannot be told just now.
        """

    @abstractmethod
    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        """Stop a rank's device work, within the limit; after a time-out it runs as before."""

    @abstractmethod
    async def snapshot(self, rank: RankId) -> Outcome:
        """Move a frozen rank's device state to host memory."""

    @abstractmethod
    async def restore(self, rank: RankId) -> Outcome:
        """Bring a parked rank's device state back, frozen."""

    @abstractmethod
    async def thaw(self, rank: RankId) -> Outcome:
        """Let a frozen rank's device work go on."""

    @abstractmethod
    async def state(self, rank: RankId) -> Outcome:
        """Ask the driver where a rank is."""

    async def is_hidden(self, _process: ProcessId) -> bool:
        """Return whether one that registered is a rank though NVML does not list it."""
        return not self.seen_by_nvml

    async def drains(self, _process: ProcessId) -> bool:
        """Return whether a freeze lets a process end what it is at, for which others must run."""
        return self.in_process

    async def companions(self, process: ProcessId) -> frozenset[ProcessId]:
        """Return the processes that one moves with: all of them have to run when one is moved."""
        return frozenset({process})

    def way_of(self, _process: ProcessId) -> str | None:
        """Return how a process is being moved, if there are several ways."""
        return None

    def hindrance(self, process: ProcessId) -> str | None:
        """Say why an operation on this process cannot go on just now, and what helps; if so."""
        return None

    def belongs(self, process: ProcessId, job: JobKey) -> None:  # noqa: B027 - as above
        """Hear of which job a process is, before an operation on it."""

    async def run(
        self, verb: Verb, rank: RankId, timeout_s: float | None, job: JobKey | None = None
    ) -> Outcome:
        """Run the operation that a verb names; `job`: whose rank it is, where that is known."""
        if job is not None:
            self.belongs(rank.process, job)
        match verb:
            case Verb.FREEZE:
                assert timeout_s is not None, "a freeze always has a limit"
                return await self.freeze(rank, timeout_s=timeout_s)
            case Verb.SNAPSHOT:
                return await self.snapshot(rank)
            case Verb.RESTORE:
                return await self.restore(rank)
            case Verb.THAW:
                return await self.thaw(rank)
            case Verb.QUERY:
                return await self.state(rank)


def failed(rank: RankId, cause: Cause, text: str, observed: RankState) -> Outcome:
    """Return the outcome of an operation that did not succeed."""
    return Outcome(observed=observed, failure=Reason(cause=cause, text=text, rank=rank))


def load_backend(name: str, context: BackendContext) -> Backend:
    """Return the backend with an entry point's name, or of a class given as ``module:Class``.

    Raises `BackendError`, naming what there is.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            raise BackendError(f"backend {name!r} cannot be loaded: {exc}") from exc
    else:
        found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
        if name not in found:
            known = ", ".join(sorted(found)) or "none; is the package installed?"
            raise BackendError(f"there is no backend {name!r}; known: {known}")
        kind = found[name].load()
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        raise BackendError(f"{name!r} is not a subclass of tsliced.host.backends.base.Backend")
    return kind(context)
