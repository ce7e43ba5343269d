"""The backend for cuda-checkpoint, with ours in its place over softcuda."""

from __future__ import annotations

import asyncio
import contextlib
import os

import psutil
import pytest
from backend_lab import Place, cli_settings, reason_of
from harness import until

from tsliced.config.backends import BackendSettings, CliSettings
from tsliced.core.model import Cause, JobKey, RankState
from tsliced.host.backends.base import BackendError
from tsliced.host.backends.cli import CliBackend

MIB = 1 << 20
BOTH = pytest.mark.parametrize("calls", ["toggle", "actions"])


def test_with_toggles_a_job_with_two_ranks_is_refused_before_one_is_touched(place: Place) -> None:
    (_, first), (_, second) = place.rank(), place.rank()
    job = JobKey("", os.getuid(), "a")

    async def story(backend: CliBackend) -> None:
        backend.belongs(first.process, job)
        backend.belongs(second.process, job)
        outcome = await backend.freeze(first, timeout_s=5)
        assert outcome.observed is RankState.RUNNING
        cause, text = reason_of(outcome)
        assert cause is Cause.UNSUPPORTED
        assert f"another rank here, pid {second.process.pid}" in text
        backend.forget(second.process)
        assert (await backend.freeze(first, timeout_s=5)).observed is RankState.FROZEN

    place.tell_of(CliBackend, story, settings=cli_settings(place, "toggle"))


# The daemon that ends here leaves a program behind, on purpose.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("fails", [False, True], ids=["it worked", "it failed"])
def test_the_next_daemon_finds_out_what_a_toggle_did_g8(place: Place, fails: bool) -> None:
    rank, name = place.rank()
    chosen = cli_settings(place, "toggle")

    async def cut_off(backend: CliBackend) -> None:
        await backend.freeze(name, timeout_s=5)
        place.host.fault("checkpoint * * delay:700", *["checkpoint * * error:999"] * fails)
        toggling = asyncio.create_task(backend.snapshot(name))
        await asyncio.to_thread(until, lambda: children(), "the utility runs")
        toggling.cancel()
        await asyncio.wait({toggling})

    async def story(backend: CliBackend) -> None:
        # It waits for the utility of the daemon before.
        found = await backend.state(name)
        assert not children()
        assert found.failure is None
        assert found.observed is (RankState.FROZEN if fails else RankState.PARKED)
        place.host.fault()
        if not fails:
            assert (await backend.restore(name)).observed is RankState.FROZEN
        assert (await backend.thaw(name)).observed is RankState.RUNNING

    place.tell_of(CliBackend, cut_off, settings=chosen)
    place.tell_of(CliBackend, story, settings=chosen)
    assert len(rank.do("digest")) == 64


def children() -> list[int]:
    """Returns the utilities that are at work for this process."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--toggle" in child.cmdline():
                found.append(child.pid)
    return found


def test_a_utility_that_is_missing_is_named(place: Place) -> None:
    async def story(backend: CliBackend) -> None:
        raise AssertionError("it must not start")

    chosen = BackendSettings(cli=CliSettings(program="no-such-utility"))
    with pytest.raises(BackendError, match="no-such-utility is not there: install"):
        place.tell_of(CliBackend, story, settings=chosen)


@BOTH
def test_a_utility_that_cannot_be_run_any_more_leaves_the_rank_as_it_is(
    place: Place, calls: str
) -> None:
    _, name = place.rank()
    chosen = cli_settings(place, calls)

    async def story(backend: CliBackend) -> None:
        os.unlink(chosen.cli.program)
        outcome = await backend.snapshot(name)
        assert "cannot be run" in reason_of(outcome)[1]
        expected = RankState.RUNNING if calls == "toggle" else RankState.UNKNOWN
        assert outcome.observed is expected

    place.tell_of(CliBackend, story, settings=chosen)


def test_a_utility_that_says_what_is_not_so_is_not_believed(place: Place) -> None:
    _, name = place.rank()
    liar = place.host.directory / "liar"
    liar.write_text("#!/bin/sh\n[ $1 = --get-state ] && echo ${STATE:-running}\nexit 0\n")
    liar.chmod(0o755)
    chosen = BackendSettings(cli=CliSettings(program=str(liar), calls="actions"))

    async def story(backend: CliBackend) -> None:
        outcome = await backend.snapshot(name)
        assert outcome.observed is RankState.RUNNING
        assert reason_of(outcome)[1] == (
            "the utility says that checkpoint is done, and that it is running"
        )

    place.tell_of(CliBackend, story, settings=chosen)
    liar.write_text("#!/bin/sh\necho transitional\n")

    async def odd(backend: CliBackend) -> None:
        outcome = await backend.state(name)
        assert outcome.observed is RankState.UNKNOWN
        assert reason_of(outcome)[1] == "its state is 'transitional'"

    place.tell_of(CliBackend, odd, settings=chosen)


def test_files_of_processes_that_are_gone_are_forgotten_at_the_start(place: Place) -> None:
    _, name = place.rank()
    pid, start_time = name.process
    kept = [place.directory / f"cli-{pid}-{start_time}.{kind}" for kind in ("json", "lock")]
    gone = [
        place.directory / f"cli-{who}.{kind}"
        for who in (f"{pid}-1", "4194304-5")
        for kind in ("json", "lock")
    ]
    for path in [*kept, *gone]:
        path.write_text("{}")

    async def story(_backend: CliBackend) -> None:
        assert sorted(place.directory.iterdir()) == sorted(kept)

    place.tell_of(CliBackend, story, settings=cli_settings(place, "toggle"))
