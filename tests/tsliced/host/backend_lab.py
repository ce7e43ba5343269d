"""Devices and ranks for tests of snapshot backends, without a daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from cuda_utility import write_utility
from harness import Host, Rank
from in_process import LIMIT_S, until

from tsliced.config.backends import BackendSettings, CliSettings
from tsliced.core.model import Cause, HostName, ProcessId, RankId
from tsliced.host.backends.base import Backend, BackendContext, Outcome
from tsliced.host.backends.cuda import CudaBackend
from tsliced.host.devices import Devices
from tsliced.host.measuring import Measuring
from tsliced.host.processes import identify

B = TypeVar("B", bound=Backend)
Story = Callable[[B], Awaitable[None]]


class Place:
    """Devices and ranks without a daemon, and the directory of a backend's files."""

    def __init__(self, host: Host, library: Path) -> None:
        self.host = host
        self.library = library
        self.directory = host.directory / "state" / "workers"
        self.directory.mkdir(parents=True)

    def rank(self, mib: int = 8) -> tuple[Rank, RankId]:
        """Start a rank with device state."""
        rank = self.host.rank()
        rank.do("context")
        rank.do("fill", mib=mib)
        return rank, rank_id(rank)

    def tell(
        self, story: Story[CudaBackend], *, library: str | None = None, leave: bool = False
    ) -> None:
        """Run a story on a backend; with `leave` its workers are not waited for."""
        self.tell_of(CudaBackend, story, library=library, leave=leave)

    def tell_of(
        self,
        kind: Callable[[BackendContext], B],
        story: Story[B],
        *,
        settings: BackendSettings | None = None,
        library: str | None = None,
        leave: bool = False,
    ) -> None:
        """Run a story on a backend of any kind, which may measure what is on the devices."""

        async def run() -> None:
            devices = Devices(str(self.library.with_name("libnvidia-ml.so.1")))
            await devices.start()
            try:
                await run_on(devices)
            finally:
                await devices.close()

        async def run_on(devices: Devices) -> None:
            backend = kind(
                BackendContext(
                    directory=self.directory,
                    cuda_library=library or str(self.library),
                    settings=settings or BackendSettings(),
                    measure=Measuring(devices).bytes_of,
                )
            )
            try:
                await backend.start()
                async with asyncio.timeout(LIMIT_S):
                    await story(backend)
            finally:
                workers = [] if leave else self.host.workers()
                await backend.close()
                await until(lambda: not any(map(exists, workers)), "all are reaped")

        asyncio.run(run())


class UselessBackend(CudaBackend):
    """Finds nothing that it could move."""

    async def probe(self, process: ProcessId) -> bool:
        return False


def cli_settings(place: Place, calls: str) -> BackendSettings:
    """Return how the backend for the utility is told of ours, which takes these calls."""
    program = write_utility(place.host, place.library.parent, calls=calls)
    return BackendSettings(cli=CliSettings(program=str(program), calls=calls))


def exists(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def rank_id(rank: Rank) -> RankId:
    """Return what the daemon calls a rank."""
    process = identify(rank.pid)
    assert process is not None
    return RankId(HostName("n1"), process)


def reason_of(outcome: Outcome) -> tuple[Cause, str]:
    """Return why something failed, as it must have."""
    assert outcome.failure is not None
    return outcome.failure.cause, outcome.failure.text
