"""The backend of several: which way a rank goes, and what of it is left for the next daemon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from backend_lab import Place, rank_id, reason_of
from engines import EngineRank

from tsliced.config.backends import BackendSettings, EndpointSettings
from tsliced.config.ways import Ways, parse_way
from tsliced.core.model import Cause, DeviceId, GroupName, JobKey, ProcessId, RankId, RankState
from tsliced.host.backends.base import BackendContext, BackendError, Outcome
from tsliced.host.backends.composite import CompositeBackend, make_backend
from tsliced.host.backends.cuda import CudaBackend

SETTINGS = BackendSettings(endpoint=EndpointSettings(settle_s=1.0))
FROZEN, PARKED, RUNNING = RankState.FROZEN, RankState.PARKED, RankState.RUNNING

Story = Callable[[CompositeBackend], Awaitable[None]]


def ways(*texts: str) -> Ways:
    return Ways(default=tuple(map(parse_way, texts)))


class AnyLittle:
    """Lets so many bytes stay on the devices, whoever is there."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def groups_of(self, _process: ProcessId) -> tuple[GroupName, ...]:
        return (GroupName("g1"),)

    async def objection(self, _process: ProcessId, left: Mapping[DeviceId, int]) -> str | None:
        return None if sum(left.values()) <= self.allowed else "it is too much"


class Lab:
    """Devices, engines and ranks, and what is allowed to stay of them."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.allowed_mib = 0

    def tell(self, story: Story, *texts: str) -> None:
        """Run a story on a backend, or on the next daemon's."""

        async def with_neighbours(backend: CompositeBackend) -> None:
            backend.join(AnyLittle(self.allowed_mib << 20))
            await story(backend)

        made = partial(CompositeBackend, ways=ways(*(texts or ("endpoint+cuda", "cuda"))))
        self.place.tell_of(made, with_neighbours, settings=SETTINGS)

    def forget(self) -> None:
        """Lose what is written down of courses."""
        for path in self.place.directory.glob("course-*"):
            path.unlink()

    def engine(self, **how: Any) -> tuple[EngineRank, RankId]:
        """Start an engine that serves."""
        engine = EngineRank(self.place.host, "vllm", **how)
        engine.serve(weights=16, cache=8)
        return engine, rank_id(engine.rank)


@pytest.fixture
def lab(place: Place) -> Lab:
    return Lab(place)


async def frozen(backend: CompositeBackend, *names: RankId) -> None:
    for name in names:
        outcome = await backend.freeze(name, timeout_s=10)
        assert (outcome.observed, outcome.failure) == (FROZEN, None)


async def well(operation: Awaitable[Outcome], observed: RankState) -> Outcome:
    """Have an operation succeed, and leave the rank there."""
    outcome = await operation
    assert (outcome.observed, outcome.failure) == (observed, None)
    return outcome


def test_one_way_of_one_backend_is_that_backend(tmp_path: Path) -> None:
    context = BackendContext(directory=tmp_path)
    assert isinstance(make_backend(ways("cuda"), context), CudaBackend)
    assert isinstance(make_backend(ways("torch", "cuda"), context), CompositeBackend)


@pytest.mark.parametrize("text", ["cuda+torch", "torch+endpoint", "cuda+cli"])
def test_two_backends_that_make_no_sense_together_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BackendError, match="makes no sense"):
        make_backend(ways("cuda", text), BackendContext(directory=tmp_path))


def test_what_is_left_goes_by_the_second_part_only_if_it_may_not_stay(lab: Lab) -> None:
    engine, name = lab.engine()
    digest = engine.rank.do("digest")

    async def story(backend: CompositeBackend) -> None:
        await frozen(backend, name)
        outcome = await well(backend.snapshot(name), PARKED)
        assert outcome.moved_bytes >= 24 << 20
        await well(backend.state(name), PARKED)
        await well(backend.restore(name), FROZEN)
        await well(backend.thaw(name), RUNNING)
        await well(backend.state(name), RUNNING)

    lab.allowed_mib = 4
    lab.tell(story)
    assert not lab.place.host.workers(), "the driver was not needed"
    lab.allowed_mib = 0
    lab.tell(story)
    assert engine.rank.do("digest") == digest
    assert list(lab.place.directory.glob("course-*")) == []


def test_a_rank_goes_the_first_way_that_can_move_it(lab: Lab) -> None:
    engine, name = lab.engine(arguments=("--enable-lora",))
    plain, other = lab.place.rank()

    async def story(backend: CompositeBackend) -> None:
        assert await backend.drains(name.process)
        assert not await backend.drains(other.process)
        assert not await backend.is_hidden(name.process), "NVML lists it"
        await frozen(backend, name, other)
        assert engine.rank.do("requests") == [], "its adapters would not come back"
        for one in (name, other):
            await well(backend.snapshot(one), PARKED)
            await well(backend.restore(one), FROZEN)
            await well(backend.thaw(one), RUNNING)

    lab.tell(story)
    plain.do("digest")


def test_the_driver_is_not_asked_whether_a_process_drains(lab: Lab) -> None:
    _, name = lab.engine()
    _, other = lab.place.rank()

    async def story(backend: CompositeBackend) -> None:
        assert await backend.drains(name.process)
        assert not await backend.drains(other.process)
        assert lab.place.host.workers() == [], "each question is asked of a worker of its own"
        assert await backend.probe(other.process)
        assert len(lab.place.host.workers()) == 1, "that one takes the driver"

    lab.tell(story, "endpoint+cuda", "torch", "cuda")


def test_a_way_that_drains_does_not_count_behind_one_that_fits(lab: Lab) -> None:
    _, name = lab.engine()

    async def story(backend: CompositeBackend) -> None:
        assert not await backend.drains(name.process), "it goes by the driver"

    lab.tell(story, "cuda", "endpoint")


def test_what_no_way_can_move_is_told_with_the_reasons_of_all(lab: Lab) -> None:
    _, name = lab.engine(endpoint="vllm+http://10.1.2.3:8000")
    plain = lab.place.host.rank()
    other = rank_id(plain)

    async def story(backend: CompositeBackend) -> None:
        with pytest.raises(BackendError, match="not on this host"):
            await backend.probe(name.process)
        assert not await backend.drains(name.process)
        refused = await backend.freeze(name, timeout_s=1)
        assert refused.observed is RUNNING
        cause, text = reason_of(refused)
        assert cause is Cause.UNSUPPORTED
        assert "not on this host" in text
        assert "was not known" not in text
        assert not await backend.probe(other.process)
        cause, text = reason_of(await backend.freeze(other, timeout_s=1))
        assert cause is Cause.UNSUPPORTED
        assert "nothing that a backend of this host could move" in text
        for operation in (backend.state, backend.snapshot, backend.restore, backend.thaw):
            outcome = await operation(other)
            assert (outcome.observed, reason_of(outcome)[0]) == (
                RankState.UNKNOWN,
                Cause.UNSUPPORTED,
            )
        assert reason_of(await backend.state(name))[0] is Cause.DRIVER

    lab.tell(story, "endpoint", "torch")


def test_what_is_left_and_nobody_can_move_is_named(lab: Lab) -> None:
    engine, name = lab.engine()

    async def story(backend: CompositeBackend) -> None:
        await frozen(backend, name)
        outcome = await backend.snapshot(name)
        assert outcome.observed is FROZEN, "a thaw brings it back"
        assert reason_of(outcome) == (
            Cause.NOT_FREED,
            "it is too much, and backend_lab:UselessBackend can move nothing of it",
        )
        await well(backend.thaw(name), RUNNING)

    lab.tell(story, "endpoint+backend_lab:UselessBackend")
    assert engine.rank.do("digest")


@pytest.mark.parametrize("allowed_mib", [0, 4])
def test_the_next_daemon_finds_a_rank_wherever_it_was_left_g8(lab: Lab, allowed_mib: int) -> None:
    engine, name = lab.engine()
    digest = engine.rank.do("digest")
    lab.allowed_mib = allowed_mib

    async def leave(backend: CompositeBackend) -> None:
        await frozen(backend, name)

    async def park(backend: CompositeBackend) -> None:
        await well(backend.state(name), FROZEN)
        await well(backend.snapshot(name), PARKED)

    async def bring_back(backend: CompositeBackend) -> None:
        await well(backend.state(name), PARKED)
        await well(backend.restore(name), FROZEN)

    async def thaw(backend: CompositeBackend) -> None:
        await well(backend.state(name), FROZEN)
        await well(backend.thaw(name), RUNNING)

    for story in (leave, park, bring_back, thaw):
        # Whatever is configured by then.
        lab.tell(story, *(("cuda", "torch") if story is bring_back else ()))
    assert engine.rank.do("digest") == digest


def test_a_rank_in_between_goes_on_or_back_as_it_is_asked(lab: Lab) -> None:
    engine, name = lab.engine()
    digest = engine.rank.do("digest")

    async def story(backend: CompositeBackend) -> None:
        for call, failing in (("lock", "snapshot"), ("checkpoint", "snapshot")):
            await frozen(backend, name)
            lab.place.host.fault(f"{call} {name.process.pid} * error:304")
            outcome = await getattr(backend, failing)(name)
            assert outcome.observed is FROZEN
            assert "304" in reason_of(outcome)[1]
            lab.place.host.fault()
            await well(backend.state(name), FROZEN)
            await well(backend.snapshot(name), PARKED)
            lab.place.host.fault(f"unlock {name.process.pid} * error:304")
            assert (await backend.restore(name)).observed is FROZEN
            lab.place.host.fault()
            await well(backend.state(name), FROZEN)
            await well(backend.snapshot(name), PARKED)
            engine.fault("occupy weights")
            assert (await backend.restore(name)).observed is FROZEN
            engine.fault()
            await well(backend.thaw(name), RUNNING)

    lab.tell(story)
    assert engine.rank.do("digest") == digest


def test_the_ranks_of_an_engine_all_run_before_it_comes_back(lab: Lab) -> None:
    engine, name = lab.engine()
    # Another one, which is a worker of the first as well.
    worker, other = lab.engine(others=f"vllm+{engine.url}")
    digests = [one.rank.do("digest") for one in (engine, worker)]

    def asked() -> list[str]:
        return [line for line in engine.rank.do("requests") if "wake_up" in line]

    async def story(backend: CompositeBackend) -> None:
        await frozen(backend, name, other)
        for outcome in await asyncio.gather(*map(backend.snapshot, (name, other))):
            assert (outcome.observed, outcome.failure) == (PARKED, None)
        await well(backend.restore(name), FROZEN)
        assert asked() == [], "the driver still has the other one"
        await well(backend.restore(other), FROZEN)
        assert asked() != []
        for one in (name, other):
            await well(backend.thaw(one), RUNNING)
        # The same on the way back of a snapshot that failed for one of them.
        await frozen(backend, name, other)
        lab.place.host.fault(f"checkpoint {other.process.pid} * error:304")
        outcomes = await asyncio.gather(*map(backend.snapshot, (name, other)))
        assert [outcome.observed for outcome in outcomes] == [PARKED, FROZEN]
        lab.place.host.fault()
        await well(backend.restore(name), FROZEN)
        before = len(asked())
        await well(backend.thaw(name), RUNNING)
        assert len(asked()) == before
        await well(backend.thaw(other), RUNNING)
        assert len(asked()) > before

    lab.tell(story)
    assert [one.rank.do("digest") for one in (engine, worker)] == digests


def test_where_a_rank_is_of_which_nothing_is_written_down_is_found_out(lab: Lab) -> None:
    engine, name = lab.engine()
    plain, other = lab.place.rank()
    digests = [rank.do("digest") for rank in (engine.rank, plain)]

    async def park(backend: CompositeBackend) -> None:
        await frozen(backend, name, other)
        for one in (name, other):
            await well(backend.snapshot(one), PARKED)

    async def bring_back(backend: CompositeBackend) -> None:
        for one in (name, other):
            await well(backend.restore(one), FROZEN)
            await well(backend.thaw(one), RUNNING)

    async def bring_back_at_once(backend: CompositeBackend) -> None:
        await well(backend.restore(name), RUNNING)
        await well(backend.restore(other), FROZEN)
        await well(backend.thaw(other), RUNNING)

    lab.tell(park)
    lab.forget()
    lab.tell(bring_back)
    # Another backend had this host before: the driver has the engine, which knows nothing of it.
    lab.tell(park, "cuda", "torch")
    lab.forget()
    lab.tell(bring_back_at_once)
    assert [rank.do("digest") for rank in (engine.rank, plain)] == digests


def test_files_of_processes_that_are_gone_or_of_nobody_are_taken_away(lab: Lab) -> None:
    directory, pid = lab.place.directory, os.getpid()
    for stem in ("course-1-2", f"course-{pid}-1", "course-x-1", "course-7"):
        (directory / f"{stem}.json").write_text('{"way": ["cuda"], "depth": "first"}')
    _, name = lab.place.rank()
    mine = directory / f"course-{name.process.pid}-{name.process.start_time}.json"
    mine.write_text('{"way": ["cuda"], "depth": "sideways"}')

    async def story(backend: CompositeBackend) -> None:
        assert list(directory.glob("course-*")) == []
        await frozen(backend, name)
        assert mine.exists()
        assert backend.hindrance(name.process) is None
        backend.forget(name.process)
        assert not mine.exists()

    lab.tell(story)


def test_a_job_goes_its_own_ways_else_those_of_its_group_else_those_of_the_host() -> None:
    cuda, cli, torch = (("cuda",),), (("cli",),), (("torch", "cuda"),)
    configured = Ways(
        default=cuda,
        groups={GroupName("g2"): cli},
        jobs=(("exp*", torch), ("*7", cli)),
    )
    g1, g2 = GroupName("g1"), GroupName("g2")
    assert configured.of(None, ()) == cuda
    assert configured.of(JobKey("", 0, "other"), (g1,)) == cuda
    assert configured.of(JobKey("", 0, "other"), (g1, g2)) == cli
    assert configured.of(JobKey("", 0, "exp7"), (g2,)) == torch
    assert configured.of(JobKey("", 0, "7"), ()) == cli
    assert configured.names() == ["cuda", "cli", "torch"]
    assert configured.only() is None
