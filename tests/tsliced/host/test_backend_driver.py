"""What holds for all backends that have the driver move a process, each over softcuda."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from backend_lab import Place, cli_settings, reason_of
from harness import resident_bytes

from tsliced.core.model import Cause, RankId, RankState
from tsliced.host.backends.base import Backend, Outcome
from tsliced.host.backends.cli import CliBackend
from tsliced.host.backends.cuda import CudaBackend

MIB = 1 << 20

EACH = pytest.mark.parametrize("way", ["cuda", "toggle", "actions"])


def tell(place: Place, way: str, story: Callable[[Backend], Awaitable[None]]) -> None:
    """Runs a story on the backend that calls the driver, or on that of the utility."""
    if way == "cuda":
        place.tell_of(CudaBackend, story)
    else:
        place.tell_of(CliBackend, story, settings=cli_settings(place, way))


@EACH
def test_a_rank_is_taken_off_and_brought_back_whole_g12(place: Place, way: str) -> None:
    rank, name = place.rank(mib=32)
    digest = rank.do("digest")

    async def story(backend: Backend) -> None:
        assert await backend.probe(name.process)
        assert (await backend.state(name)).observed is RankState.RUNNING
        assert (await backend.freeze(name, timeout_s=5)).observed is RankState.FROZEN
        before = resident_bytes(rank.pid)
        parked = await backend.snapshot(name)
        assert (parked.observed, parked.failure) == (RankState.PARKED, None)
        assert parked.seconds > 0 or way != "cuda", "the utility does not tell"
        assert resident_bytes(rank.pid) - before > 28 * MIB
        assert place.host.used_bytes() == 0
        assert (await backend.state(name)).observed is RankState.PARKED
        assert (await backend.restore(name)).observed is RankState.FROZEN
        assert (await backend.thaw(name)).observed is RankState.RUNNING
        assert (await backend.state(name)).observed is RankState.RUNNING

    tell(place, way, story)
    assert rank.do("digest") == digest


@EACH
@pytest.mark.parametrize(
    ("code", "cause"),
    [(801, Cause.UNSUPPORTED), (800, Cause.NOT_PERMITTED), (304, Cause.DRIVER)],
)
def test_what_the_driver_refuses_has_a_cause_and_the_rank_stays_g12(
    place: Place, way: str, code: int, cause: Cause
) -> None:
    rank, name = place.rank()
    digest = rank.do("digest")

    async def story(backend: Backend) -> None:
        await backend.freeze(name, timeout_s=5)
        place.host.fault(f"checkpoint * * error:{code}")
        outcome = await backend.snapshot(name)
        assert outcome.observed is RankState.FROZEN
        assert reason_of(outcome)[0] is cause
        assert str(code) in reason_of(outcome)[1]
        assert (await backend.thaw(name)).observed is RankState.RUNNING

    tell(place, way, story)
    assert rank.do("digest") == digest


@pytest.mark.parametrize("way", ["cuda", "actions"])
def test_a_freeze_that_takes_too_long_leaves_the_rank_running(place: Place, way: str) -> None:
    rank, name = place.rank()
    rank.do("launch", ms=1500)

    async def story(backend: Backend) -> None:
        outcome = await backend.freeze(name, timeout_s=0.1)
        assert outcome.observed is RankState.RUNNING
        assert reason_of(outcome)[0] is Cause.FREEZE_TIMEOUT
        assert (await backend.freeze(name, timeout_s=20)).observed is RankState.FROZEN

    tell(place, way, story)


async def every_operation(backend: Backend, name: RankId) -> list[Outcome]:
    return [
        await backend.freeze(name, timeout_s=5),
        await backend.snapshot(name),
        await backend.restore(name),
        await backend.thaw(name),
        await backend.state(name),
    ]


@EACH
def test_a_process_that_cannot_run_or_is_gone_is_not_asked(place: Place, way: str) -> None:
    rank, name = place.rank()

    async def story(backend: Backend) -> None:
        await backend.freeze(name, timeout_s=5)
        rank.stop()
        outcomes = await every_operation(backend, name)
        assert [outcome.observed for outcome in outcomes] == [
            RankState.RUNNING,
            RankState.FROZEN,
            RankState.PARKED,
            RankState.FROZEN,
            RankState.UNKNOWN,
        ], "as it was, for nothing was tried"
        for outcome in outcomes:
            cause, text = reason_of(outcome)
            assert cause is Cause.STOPPED
            assert "SIGCONT" in text
        assert backend.hindrance(name.process) is not None
        os.kill(rank.pid, signal.SIGCONT)
        assert (await backend.thaw(name)).failure is None
        rank.kill()
        backend.forget(name.process)
        for outcome in await every_operation(backend, name):
            assert "its process has ended" in reason_of(outcome)[1]

    tell(place, way, story)
