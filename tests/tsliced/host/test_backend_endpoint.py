"""The backend for serving engines: real HTTP, real device memory, and what engines do wrong."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backend_lab import Place, rank_id, reason_of
from engines import EngineRank
from harness import until

from tsliced.config.backends import BackendSettings, EndpointSettings
from tsliced.core.model import Cause, JobKey, RankId, RankState
from tsliced.host.backends.base import BackendError, Outcome
from tsliced.host.backends.endpoint import EndpointBackend

BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])
#: Patience for what must not happen is short here.
SETTINGS = EndpointSettings(settle_s=2.0)
JOB = JobKey("", os.getuid(), "sampler")

Story = Callable[[EndpointBackend], Awaitable[None]]


class Engines:
    """A place in which engines run."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.digests: dict[RankId, str] = {}

    def start(self, kind: str = "vllm", **how: Any) -> tuple[EngineRank, RankId]:
        """Start an engine that serves."""
        engine = EngineRank(self.place.host, kind, **how)
        name = rank_id(engine.rank)
        self.digests[name] = engine.serve()
        return engine, name

    def tell(self, story: Story, settings: EndpointSettings = SETTINGS) -> None:
        """Run a story on a backend, or on the next daemon's."""
        chosen = BackendSettings(endpoint=settings)
        self.place.tell_of(EndpointBackend, story, settings=chosen)


@pytest.fixture
def engines(place: Place) -> Engines:
    return Engines(place)


async def park(backend: EndpointBackend, name: RankId, *, timeout_s: float = 10) -> Outcome:
    """Freeze and snapshot; the former must work."""
    frozen = await backend.freeze(name, timeout_s=timeout_s)
    assert (frozen.observed, frozen.failure) == (RankState.FROZEN, None)
    return await backend.snapshot(name)


async def bring_back(backend: EndpointBackend, name: RankId) -> None:
    restored = await backend.restore(name)
    assert (restored.observed, restored.failure) == (RankState.FROZEN, None)
    assert (await backend.thaw(name)).observed is RankState.RUNNING


@BOTH
def test_an_engine_is_parked_and_brought_back_whole_g12(engines: Engines, kind: str) -> None:
    engine, name = engines.start(kind)

    async def story(backend: EndpointBackend) -> None:
        assert await backend.probe(name.process)
        assert (await backend.state(name)).observed is RankState.RUNNING
        before = engines.place.host.used_bytes()
        parked = await park(backend, name)
        assert (parked.observed, parked.failure) == (RankState.PARKED, None)
        assert parked.moved_bytes >= 32 << 20
        assert before - engines.place.host.used_bytes() >= 32 << 20
        assert await backend.probe(name.process)
        assert (await backend.state(name)).observed is RankState.PARKED
        await bring_back(backend, name)
        assert (await backend.state(name)).observed is RankState.RUNNING

    engines.tell(story)
    assert engine.rank.do("digest") == engines.digests[name]
    paths = [line.split()[0].partition("?")[0] for line in engine.rank.do("requests")]
    control = [path for path in paths if path != "/is_sleeping"]
    assert (
        control
        == {
            "vllm": ["/pause", "/sleep", "/wake_up", "/wake_up", "/resume"],
            "sglang": [
                "/pause_generation",
                "/flush_cache",
                "/release_memory_occupation",
                "/resume_memory_occupation",
                "/continue_generation",
            ],
        }[kind]
    )


@BOTH
def test_requests_in_flight_are_waited_for_before_memory_goes_vllm_28714_relax_282(
    engines: Engines, kind: str
) -> None:
    engine, name = engines.start(kind)

    async def story(backend: EndpointBackend) -> None:
        engine.rank.do("generate", seconds=0.7)
        assert (await park(backend, name)).observed is RankState.PARKED
        assert engine.rank.do("busy") == 0
        await bring_back(backend, name)

    engines.tell(story)
    assert engine.rank.do("digest") == engines.digests[name]


@BOTH
def test_an_engine_that_is_busy_for_too_long_goes_on(engines: Engines, kind: str) -> None:
    engine, name = engines.start(kind)

    async def story(backend: EndpointBackend) -> None:
        engine.rank.do("generate", seconds=1.5)
        outcome = await backend.freeze(name, timeout_s=0.3)
        assert outcome.observed is RankState.RUNNING
        assert reason_of(outcome)[0] is Cause.FREEZE_TIMEOUT
        # It takes requests again.
        engine.rank.do("generate", seconds=0.1)
        assert (await park(backend, name)).observed is RankState.PARKED

    engines.tell(story)


def test_requests_are_aborted_where_that_is_configured(engines: Engines) -> None:
    engine, name = engines.start("sglang")

    async def story(backend: EndpointBackend) -> None:
        engine.rank.do("generate", seconds=0.5)
        assert (await park(backend, name)).observed is RankState.PARKED

    engines.tell(story, replace(SETTINGS, drain="abort"))
    assert "/abort_request" in str(engine.rank.do("requests"))


def test_weights_that_level_2_dropped_are_read_anew_vllm_29341(engines: Engines) -> None:
    engine, name = engines.start()

    async def story(backend: EndpointBackend) -> None:
        assert (await park(backend, name)).observed is RankState.PARKED
        await bring_back(backend, name)

    engines.tell(story, replace(SETTINGS, sleep_level=2))
    assert engine.rank.do("digest") == engines.digests[name]
    asked = engine.rank.do("requests")
    assert asked.index("/wake_up?tags=weights") + 1 == asked.index(
        '/collective_rpc {"method": "reload_weights"}'
    )


def test_an_engine_with_adapters_is_refused_unless_that_is_configured_vllm_53888(
    engines: Engines,
) -> None:
    _, name = engines.start(arguments=("--enable-lora",))

    async def refused(backend: EndpointBackend) -> None:
        outcome = await backend.freeze(name, timeout_s=5)
        assert outcome.observed is RankState.RUNNING
        assert reason_of(outcome)[0] is Cause.UNSUPPORTED
        assert "allow_lora" in reason_of(outcome)[1]

    async def allowed(backend: EndpointBackend) -> None:
        assert (await backend.freeze(name, timeout_s=5)).observed is RankState.FROZEN

    engines.tell(refused)
    engines.tell(allowed, replace(SETTINGS, allow_lora=True))


def test_expandable_segments_are_refused_torch_memory_saver_88(engines: Engines) -> None:
    _, name = engines.start("sglang", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")

    async def story(backend: EndpointBackend) -> None:
        cause, text = reason_of(await backend.freeze(name, timeout_s=5))
        assert cause is Cause.UNSUPPORTED
        assert "expandable_segments" in text

    engines.tell(story)


@pytest.mark.parametrize(
    ("kind", "hint"), [("vllm", "--enable-sleep-mode"), ("sglang", "--enable-memory-saver")]
)
def test_an_engine_that_answers_200_and_does_nothing_is_found_out_g1_sgl_4566(
    engines: Engines, kind: str, hint: str
) -> None:
    engine, name = engines.start(kind)
    engine.fault("release nothing", "is_sleeping true")

    async def story(backend: EndpointBackend) -> None:
        outcome = await park(backend, name)
        assert outcome.observed is RankState.FROZEN
        cause, text = reason_of(outcome)
        assert cause is Cause.NOT_FREED
        assert hint in text
        assert (await backend.thaw(name)).observed is RankState.RUNNING

    engines.tell(story, replace(SETTINGS, settle_s=0.5))
    assert engine.rank.do("digest") == engines.digests[name]


def test_an_engine_that_says_itself_that_it_does_not_sleep_is_believed(engines: Engines) -> None:
    engine, name = engines.start()
    engine.fault("release nothing", "is_sleeping false")

    async def story(backend: EndpointBackend) -> None:
        outcome = await park(backend, name)
        assert outcome.observed is RankState.FROZEN
        assert "says that it is not sleeping" in reason_of(outcome)[1]

    engines.tell(story)


def test_memory_that_goes_after_the_answer_is_waited_for_slime_579(engines: Engines) -> None:
    engine, name = engines.start("sglang")
    engine.fault("free-late 0.6")

    async def story(backend: EndpointBackend) -> None:
        assert (await park(backend, name)).observed is RankState.PARKED
        assert engines.place.host.used_bytes() < 8 << 20
        await bring_back(backend, name)

    engines.tell(story)
    assert engine.rank.do("digest") == engines.digests[name]


def test_a_request_has_the_time_that_its_bytes_need_llmd_30_s(engines: Engines) -> None:
    engine, name = engines.start()
    engine.fault("release-takes 0.8")

    async def too_short(backend: EndpointBackend) -> None:
        outcome = await park(backend, name)
        cause, text = reason_of(outcome)
        assert cause is Cause.DRIVER
        assert "was not answered within" in text
        # It went on all the same, so it is brought back.
        assert outcome.observed is RankState.FROZEN
        assert (await backend.thaw(name)).observed is RankState.RUNNING

    async def by_bytes(backend: EndpointBackend) -> None:
        assert (await park(backend, name)).observed is RankState.PARKED
        await bring_back(backend, name)

    short = replace(SETTINGS, request_timeout_s=0.3)
    engines.tell(too_short, replace(short, request_bytes_per_s=1e12))
    engines.tell(by_bytes, replace(short, request_bytes_per_s=8 << 20))
    assert engine.rank.do("digest") == engines.digests[name]


@BOTH
def test_an_engine_that_cannot_take_its_memory_back_stays_parked_vllm_15254_sgl_14092(
    engines: Engines, kind: str
) -> None:
    engine, name = engines.start(kind)

    async def story(backend: EndpointBackend) -> None:
        assert (await park(backend, name)).observed is RankState.PARKED
        engine.fault("occupy weights")
        outcome = await backend.restore(name)
        assert outcome.observed is RankState.PARKED
        assert "out of memory" in reason_of(outcome)[1]
        assert (await backend.state(name)).observed is RankState.PARKED
        engine.fault()
        await bring_back(backend, name)

    engines.tell(story)
    assert engine.rank.do("digest") == engines.digests[name]


@BOTH
def test_an_engine_that_is_half_awake_counts_as_on_its_devices_until_it_is_whole(
    engines: Engines, kind: str
) -> None:
    engine, name = engines.start(kind)

    async def story(backend: EndpointBackend) -> None:
        assert (await park(backend, name)).observed is RankState.PARKED
        engine.fault("occupy kv_cache", "release nothing")
        outcome = await backend.restore(name)
        assert outcome.observed is RankState.FROZEN
        assert "out of memory for kv_cache" in reason_of(outcome)[1]
        assert (await backend.thaw(name)).observed is RankState.FROZEN
        assert (await backend.snapshot(name)).observed is RankState.FROZEN
        engine.fault()
        if kind == "vllm":
            # It takes itself for asleep and does nothing, so it is woken before.
            assert (await backend.snapshot(name)).observed is RankState.PARKED
            await bring_back(backend, name)
        else:
            assert (await backend.thaw(name)).observed is RankState.RUNNING

    engines.tell(story, replace(SETTINGS, settle_s=0.5))
    assert engine.rank.do("digest") == engines.digests[name]


def test_two_engines_on_one_device_move_one_after_the_other_vllm_36753(engines: Engines) -> None:
    pair = [engines.start() for _ in range(1)]
    second = EngineRank(engines.place.host, "vllm")
    engines.digests[rank_id(second.rank)] = second.serve(weights=8, cache=4)
    pair.append((second, rank_id(second.rank)))

    async def story(backend: EndpointBackend) -> None:
        for engine, _ in pair:
            engine.fault("release-takes 0.3")
        outcomes = await asyncio.gather(*(park(backend, name) for _, name in pair))
        assert [outcome.observed for outcome in outcomes] == [RankState.PARKED] * 2
        await asyncio.gather(*(bring_back(backend, name) for _, name in pair))

    engines.tell(story)
    for engine, name in pair:
        assert engine.rank.do("digest") == engines.digests[name]


def test_if_one_engine_of_a_rank_fails_the_others_are_brought_back_g12(engines: Engines) -> None:
    # The first one's process belongs to both.
    other = EngineRank(engines.place.host, "vllm")
    other.serve(weights=8, cache=4)
    engine = EngineRank(engines.place.host, "vllm", others=f"vllm+{other.url}")
    digest = engine.serve()
    name = rank_id(engine.rank)
    other.fault("release error")

    async def story(backend: EndpointBackend) -> None:
        outcome = await park(backend, name)
        assert outcome.observed is RankState.FROZEN
        assert "could not be released" in reason_of(outcome)[1]
        assert (await backend.thaw(name)).observed is RankState.RUNNING

    engines.tell(story)
    assert engine.rank.do("digest") == digest
    asked = [line.partition("?")[0] for line in engine.rank.do("requests")]
    assert asked.count("/sleep") == 1
    assert asked.index("/sleep") < asked.index("/wake_up") < asked.index("/resume")


@BOTH
def test_the_next_daemon_finds_out_what_an_unanswered_request_did_g8(
    engines: Engines, kind: str
) -> None:
    engine, name = engines.start(kind)

    async def cut_off(backend: EndpointBackend) -> None:
        engine.fault("release-takes 0.5")
        assert (await backend.freeze(name, timeout_s=5)).observed is RankState.FROZEN
        moving = asyncio.create_task(backend.snapshot(name))
        await asyncio.to_thread(until, lambda: is_asked(engine), "it is asked")
        moving.cancel()
        await asyncio.wait({moving})

    async def story(backend: EndpointBackend) -> None:
        await asyncio.to_thread(until, lambda: engines.place.host.used_bytes() < 8 << 20, "freed")
        assert (await backend.state(name)).observed is RankState.PARKED
        engine.fault()
        await bring_back(backend, name)

    engines.tell(cut_off)
    engines.tell(story)
    assert engine.rank.do("digest") == engines.digests[name]


def is_asked(engine: EngineRank) -> bool:
    """Whether an engine was asked to free its memory."""
    asked = str(engine.rank.do("requests"))
    return "/sleep?" in asked or "/release" in asked


@BOTH
def test_the_next_daemon_knows_who_is_frozen_and_who_is_parked_g8(
    engines: Engines, kind: str
) -> None:
    engine, name = engines.start(kind)

    async def freeze(backend: EndpointBackend) -> None:
        assert (await backend.freeze(name, timeout_s=5)).observed is RankState.FROZEN

    async def snapshot(backend: EndpointBackend) -> None:
        assert (await backend.state(name)).observed is RankState.FROZEN
        assert (await backend.snapshot(name)).observed is RankState.PARKED

    async def back(backend: EndpointBackend) -> None:
        assert (await backend.state(name)).observed is RankState.PARKED
        await bring_back(backend, name)

    for story in (freeze, snapshot, back):
        engines.tell(story)
    assert engine.rank.do("digest") == engines.digests[name]


def test_an_engine_of_vllm_that_its_own_job_woke_is_seen_to_run(engines: Engines) -> None:
    engine, name = engines.start()

    async def story(backend: EndpointBackend) -> None:
        assert (await park(backend, name)).observed is RankState.PARKED
        engine.fault("is_sleeping false")
        assert (await backend.state(name)).observed is RankState.RUNNING

    engines.tell(story)


def test_an_engine_without_the_paths_is_refused_with_what_helps(engines: Engines) -> None:
    engine, name = engines.start()
    engine.fault("pause unknown")

    async def story(backend: EndpointBackend) -> None:
        outcome = await backend.freeze(name, timeout_s=5)
        assert outcome.observed is RankState.RUNNING
        cause, text = reason_of(outcome)
        assert cause is Cause.UNSUPPORTED
        assert "VLLM_SERVER_DEV_MODE=1" in text

    engines.tell(story)


def test_an_engine_that_hangs_is_given_up_in_time_and_named(engines: Engines) -> None:
    engine, name = engines.start()
    engine.fault("hang /sleep")

    async def story(backend: EndpointBackend) -> None:
        outcome = await park(backend, name)
        assert outcome.observed is RankState.FROZEN
        assert engine.url in reason_of(outcome)[1]
        assert (await backend.thaw(name)).observed is RankState.RUNNING

    fast = replace(SETTINGS, request_timeout_s=0.5, request_bytes_per_s=1e12)
    engines.tell(story, fast)
    assert engine.rank.do("digest") == engines.digests[name]


class TestDiscovery:
    """Which engine is whose."""

    def test_a_process_that_nobody_names_an_engine_for_has_none(self, place: Place) -> None:
        _, name = place.rank()

        async def story(backend: EndpointBackend) -> None:
            assert not await backend.probe(name.process)
            outcome = await backend.freeze(name, timeout_s=1)
            assert reason_of(outcome)[0] is Cause.UNSUPPORTED
            assert "TSLICE_ENDPOINT=" in reason_of(outcome)[1]

        Engines(place).tell(story)

    def test_the_configuration_names_it_for_a_job_with_its_token(
        self, engines: Engines, tmp_path: Path
    ) -> None:
        engine, name = engines.start(endpoint="")
        engine.fault("token Bearer hunter2")
        credentials = tmp_path / "engines"
        credentials.touch(mode=0o600)
        credentials.write_text(f"# ours\n\nvllm+{engine.url} hunter2\n")
        settings = replace(
            SETTINGS,
            engines=("x=vllm+http://h", f"samp*=vllm+{engine.url}"),
            credentials_file=str(credentials),
        )

        async def story(backend: EndpointBackend) -> None:
            backend.belongs(name.process, JOB)
            assert (await park(backend, name)).observed is RankState.PARKED
            await bring_back(backend, name)

        engines.tell(story, settings)

    @BOTH
    def test_a_token_is_never_shown(self, engines: Engines, kind: str) -> None:
        engine, name = engines.start(kind, TSLICE_ENDPOINT_TOKEN="hunter2")
        # An engine that shows what it was sent.
        engine.fault("release error", "secret Bearer hunter2")

        async def story(backend: EndpointBackend) -> None:
            text = reason_of(await park(backend, name))[1]
            assert "Bearer ***" in text
            assert "hunter2" not in text
            assert "hunter2" not in repr(vars(backend))

        engines.tell(story)
        for path in engines.place.directory.iterdir():
            assert "hunter2" not in path.read_text()

    @pytest.mark.parametrize(
        ("endpoint", "says"),
        [
            ("vllm+http://10.1.2.3:80", "is not on this host"),
            ("vllm+http://engine.example:80", "is not on this host"),
            ("vllm+http://127.0.0.1:9", "nobody listens at http://127.0.0.1:9"),
            ("http://127.0.0.1:9", "an engine is named as vllm+http://"),
            ("vllm+http://a:hunter2@127.0.0.1:9", "has credentials in it"),
        ],
    )
    def test_an_engine_that_may_not_be_used_is_refused_g10(
        self, engines: Engines, endpoint: str, says: str
    ) -> None:
        _, name = engines.start(endpoint=endpoint)

        async def story(backend: EndpointBackend) -> None:
            with pytest.raises(BackendError, match=re.escape(says)) as caught:
                await backend.probe(name.process)
            assert "hunter2" not in str(caught.value)
            outcome = await backend.freeze(name, timeout_s=1)
            assert says in reason_of(outcome)[1]

        engines.tell(story)

    @pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
    def test_the_engine_of_another_user_is_refused_g10(self, engines: Engines) -> None:
        other, _ = engines.start()
        host = engines.place.host
        victim = f"vllm+{other.url}"
        host.directory.chmod(0o777)
        thief = host.rank(TSLICE_ENDPOINT=victim)
        thief.do("become", uid=65534)
        name = rank_id(thief)

        async def story(backend: EndpointBackend) -> None:
            text = reason_of(await backend.freeze(name, timeout_s=1))[1]
            assert f"another user listens at {other.url}" in text

        engines.tell(story)
        assert other.rank.do("requests") == []

    @pytest.mark.parametrize(
        ("text", "mode", "says"),
        [
            ("vllm+http://h hunter2\n", 0o644, "is open to others"),
            ("vllm+http://h\n", 0o600, ":1: a line is"),
            ("h hunter2\n", 0o600, ":1: a line is"),
            (None, 0o600, "cannot be read"),
        ],
    )
    def test_a_file_of_credentials_that_cannot_be_used_is_named_and_not_shown(
        self, place: Place, tmp_path: Path, text: str | None, mode: int, says: str
    ) -> None:
        path = tmp_path / "engines"
        if text is not None:
            path.write_text(text)
            path.chmod(mode)

        async def story(backend: EndpointBackend) -> None:
            raise AssertionError("it must not start")

        with pytest.raises(BackendError, match=says) as caught:
            Engines(place).tell(story, replace(SETTINGS, credentials_file=str(path)))
        assert "hunter2" not in str(caught.value)


def test_an_engine_is_forgotten_with_the_last_of_its_processes(engines: Engines) -> None:
    engine, name = engines.start()

    async def story(backend: EndpointBackend) -> None:
        assert (await park(backend, name)).observed is RankState.PARKED
        assert len(list(engines.place.directory.glob("engine-*"))) == 1
        engine.rank.kill()
        backend.forget(name.process)
        assert list(engines.place.directory.glob("engine-*")) == []
        assert reason_of(await backend.state(name)) == (Cause.STOPPED, "its process has ended")

    engines.tell(story)
    stale = engines.place.directory / "engine-0.json"
    stale.write_text('{"place": "released", "ranks": [[4194304, 1, {}]]}')

    async def swept(_backend: EndpointBackend) -> None:
        assert not stale.exists()

    engines.tell(swept)
