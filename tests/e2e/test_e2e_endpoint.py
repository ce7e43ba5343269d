"""Serving engines that share a device under a real daemon: vLLM's words and SGLang's."""

from __future__ import annotations

import pytest
from engines import EngineRank
from harness import MIB, Host, MakeHost, RankError, Settings, until

ENDPOINT: Settings = {
    "daemon": {"backend": "endpoint"},
    "backends.endpoint": {"settle_s": 2.0},
}
#: Two engines of this size do not fit on a device of 64 MiB.
WEIGHTS_MIB, CACHE_MIB = 24, 12


class Pair:
    """Two engines of two jobs, each loaded in a turn of its own; the first is parked."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.engines = [EngineRank(host, "vllm", "a"), EngineRank(host, "sglang", "b")]
        self.digests = [self.load(engine) for engine in self.engines]

    def load(self, engine: EngineRank) -> str:
        """Lets an engine load in a turn of its own."""
        engine.rank.do("acquire", groups="g1", timeout=30)
        digest = engine.serve(WEIGHTS_MIB, CACHE_MIB)
        engine.rank.do("release")
        return digest

    def assert_whole(self, number: int) -> None:
        """Gives an engine a turn, in which it works on a request and has its weights."""
        rank = self.engines[number].rank
        rank.do("acquire", groups="g1", timeout=30)
        rank.do("generate", seconds=0.05)
        assert rank.do("digest") == self.digests[number]
        rank.do("release")

    def states(self) -> list[str | None]:
        """Returns the states of the engines' processes."""
        states = self.host.states()
        return [states.get(engine.rank.pid) for engine in self.engines]


@pytest.fixture
def pair(make_host: MakeHost) -> Pair:
    return Pair(make_host(settings=ENDPOINT))


def test_two_engines_alternate_on_one_device_and_keep_their_weights_g12(pair: Pair) -> None:
    for _ in range(2):
        pair.assert_whole(0)
        assert pair.states() == ["running", "parked"]
        # One engine, and what the other leaves: its context.
        assert pair.host.used_bytes() < (WEIGHTS_MIB + CACHE_MIB + 12) * MIB
        pair.assert_whole(1)
        assert pair.states() == ["parked", "running"]


def test_what_is_in_flight_is_finished_before_the_other_comes(pair: Pair) -> None:
    first, second = (engine.rank for engine in pair.engines)
    second.do("acquire", groups="g1", timeout=30)
    second.do("generate", seconds=1.0)
    second.do("release")
    first.do("acquire", groups="g1", timeout=30)
    assert second.do("busy") == 0
    first.do("release")
    pair.assert_whole(1)


@pytest.mark.parametrize(
    "fault", ["hang /pause_generation", "hang /flush_cache", "release error", "release nothing"]
)
def test_an_engine_that_cannot_be_parked_goes_on_and_is_tried_again_g12(
    make_host: MakeHost, fault: str
) -> None:
    limits = {"freeze_timeout_s": 1.0, "retry_min_s": 0.05, "retry_max_s": 0.2}
    pair = Pair(make_host(settings={**ENDPOINT, "limits": limits}))
    first, second = (engine.rank for engine in pair.engines)
    pair.engines[1].fault(fault)
    waiting = first.start("acquire", groups="g1", timeout=60)
    until(lambda: pair.host.events("eviction_failed"), "it is turned back")
    assert not waiting.is_over()
    second.do("generate", seconds=0.05)
    assert second.do("digest") == pair.digests[1]
    pair.engines[1].fault()
    waiting.wait()
    assert pair.states() == ["running", "parked"]
    first.do("release")
    pair.assert_whole(1)


def test_an_engine_that_cannot_come_back_says_why_and_comes_back_later_g11(pair: Pair) -> None:
    first = pair.engines[0]
    first.fault("occupy weights")
    with pytest.raises(RankError, match="out of memory for weights"):
        first.rank.do("acquire", groups="g1", timeout=30)
    assert pair.states()[0] == "parked"
    first.fault()
    order(pair.host, "clear", "a")
    pair.assert_whole(0)
    pair.assert_whole(1)


def test_an_engine_that_stays_half_awake_blocks_its_group_until_it_is_tried_again_g11(
    pair: Pair,
) -> None:
    first = pair.engines[0]
    first.fault("occupy kv_cache")
    waiting = first.rank.start("acquire", groups="g1", timeout=60)
    (blocked,) = until(lambda: pair.host.events("blocked"), "it cannot go on or back")
    assert "out of memory for kv_cache" in blocked["reason"]
    first.fault()
    order(pair.host, "retry", "a")
    with pytest.raises(RankError, match="out of memory"):
        waiting.wait()
    until(lambda: pair.states()[0] == "running", "it is back as a whole")
    pair.assert_whole(0)
    pair.assert_whole(1)


def order(host: Host, what: str, job: str) -> None:
    """Has an operator retry or clear a job."""
    with host.connection() as connection:
        connection.request({"t": what, "job": job})


def test_engines_outlive_a_daemon_that_is_killed_g8(pair: Pair) -> None:
    pair.host.kill_daemon()
    pair.host.start_daemon()
    pair.assert_whole(0)
    assert pair.states() == ["running", "parked"]
    pair.assert_whole(1)


@pytest.mark.parametrize("allowed", [True, False])
def test_what_an_engine_leaves_on_its_device_must_be_little_enough_vllm_45623(
    make_host: MakeHost, allowed: bool
) -> None:
    memory = {"max_residue_bytes": "16 MiB" if allowed else "4 MiB"}
    host = make_host(settings={**ENDPOINT, "memory": memory})
    engine, other = EngineRank(host, "vllm", "a"), host.rank("b")
    engine.rank.do("acquire", groups="g1", timeout=30)
    engine.serve(WEIGHTS_MIB, CACHE_MIB)
    engine.rank.do("fill", mib=8)
    digest = engine.rank.do("digest")
    engine.rank.do("release")
    if allowed:
        other.do("acquire", groups="g1", timeout=30)
        other.do("release")
    else:
        other.start("acquire", groups="g1", timeout=60)
        failed = until(lambda: host.events("eviction_failed"), "it is turned back")
        assert "max_residue_bytes" in failed[0]["reason"]
        other.kill()
    engine.rank.do("acquire", groups="g1", timeout=30)
    assert engine.rank.do("digest") == digest
