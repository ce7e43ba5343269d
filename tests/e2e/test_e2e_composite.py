"""A job whose ranks are moved by torch, by their engine and by the driver, and by two in one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import EngineRank
from harness import MIB, Host, MakeHost, Rank, RankError, Settings, until

#: Jobs come back once before they first make room, as they do unless it is turned off.
QUALIFIES = True
WAYS: Settings = {
    "daemon": {"backend": ["endpoint+cuda", "torch+cuda", "cuda"]},
    "memory": {"max_residue_bytes": "6 MiB"},
    "limits": {"freeze_timeout_s": 2.0, "retry_min_s": 0.05, "retry_max_s": 0.2},
    "backends.endpoint": {"settle_s": 1.0, "request_timeout_s": 1.0},
}
WIDTH = 128
#: On a device of 64 MiB with the other job, neither fits.
WEIGHTS_MIB, CACHE_MIB, PLAIN_MIB, BESIDE_MIB, OTHER_MIB = 12, 8, 8, 8, 40

#: What each part of each rank does to leave its devices, ...
LEAVING = (
    "engine freeze",
    "torch freeze",
    "plain freeze",
    "engine snapshot",
    "torch snapshot",
    "torch second freeze",
    "torch second snapshot",
    "plain snapshot",
)
#: ... to come back to them, ...
COMING = (
    "torch second restore",
    "torch second thaw",
    "torch restore",
    "engine restore",
    "plain restore",
)
#: ... and to go on there.
GOING_ON = ("engine thaw", "torch thaw", "plain thaw")

#: What makes an engine fail at it, and which call of the driver it is.
OF_ENGINE = {
    "freeze": "hang /pause",
    "snapshot": "release error",
    "restore": "occupy weights",
    "thaw": "hang /resume",
}
OF_DRIVER = {"freeze": "lock", "snapshot": "checkpoint", "restore": "restore", "thaw": "unlock"}


class Mixed:
    """A job of an engine, a rank of torch with state beside its tensors, and a plain rank."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.plain = host.rank("a")
        self.plain.do("acquire", groups="g1", timeout=30)
        self.plain.do("context")
        self.plain.do("fill", mib=PLAIN_MIB, seed=1)
        self.engine = EngineRank(host, "vllm", "a")
        self.engine.serve(WEIGHTS_MIB, CACHE_MIB)
        self.torch = host.rank("a", program="torch_device_rank.py")
        self.torch.do("load", width=WIDTH, seed=2)
        self.torch.do("context")
        self.torch.do("fill", mib=BESIDE_MIB, seed=3)
        until(lambda: len(host.states()) == 3, "all three are known")
        self.plain.do("release")
        self.digests = self.look()
        self.other = host.rank("b")
        self.other.do("initialise", group="g1", mib=OTHER_MIB, seed=4)
        self.digest_of_other = self.other.do("digest")

    @property
    def ranks(self) -> list[Rank]:
        return [self.plain, self.engine.rank, self.torch]

    def look(self) -> list[str]:
        """Uses all ranks and returns digests of all that they have."""
        self.engine.rank.do("generate", seconds=0.02)
        return [*(rank.do("digest") for rank in self.ranks), self.torch.do("train", steps=0)]

    def assert_whole(self) -> None:
        """All of it runs, and is what it was."""
        states = self.host.states()
        assert [states[rank.pid] for rank in self.ranks] == ["running"] * 3
        assert self.look() == self.digests

    def assert_parked(self) -> None:
        """All of it is parked, and hardly anything of it is left on the device."""
        states = self.host.states()
        assert [states[rank.pid] for rank in self.ranks] == ["parked"] * 3
        # Of the engine its context may stay; of the rank of torch nothing may.
        assert self.host.used_bytes() < (OTHER_MIB + 2 + 4) * MIB
        assert self.torch.do("resident") == 0

    def turn(self) -> None:
        """Gives it a turn, in which it is found to be whole."""
        self.plain.do("acquire", groups="g1", timeout=30)
        self.assert_whole()
        self.plain.do("release")

    def turn_of_other(self) -> None:
        """Gives the other job a turn, in which it is found to be whole, and this one parked."""
        self.other.do("acquire", groups="g1", timeout=30)
        self.assert_parked()
        assert self.other.do("digest") == self.digest_of_other
        self.other.do("release")

    def order(self, what: str) -> None:
        """Has an operator retry or clear it."""
        with self.host.connection() as connection:
            connection.request({"t": what, "job": "a"})

    def now(self) -> int:
        """Returns the number of the latest event."""
        return int(self.host.events()[-1]["seq"])

    def failures(self, since: int) -> list[dict[str, Any]]:
        """Returns the operations that failed."""
        return [each for each in self.host.operations(since=since) if each["reason"]]

    def fail(self, *steps: str) -> None:
        """Lets steps fail until it is told otherwise."""
        calls = []
        for step in steps:
            who, _, what = step.rpartition(" ")
            if who == "engine":
                self.engine.fault(OF_ENGINE[what])
            elif who == "torch":
                self.torch.do("order_takes", seconds={what: None})
            else:
                calls.append(f"{OF_DRIVER[what]} {self.of(who).pid} * error:304")
        self.host.fault(*calls)

    def slow(self, step: str) -> None:
        """Lets a step of the rank of torch take its time until it is told otherwise."""
        who, _, what = step.rpartition(" ")
        if who == "torch":
            self.torch.do("order_takes", seconds={what: 1.0})
        else:
            self.host.fault(f"{OF_DRIVER[what]} {self.of(who).pid} * delay:1000")

    def of(self, who: str) -> Rank:
        """Returns the rank that the driver moves."""
        return self.torch if who == "torch second" else self.plain

    def mend(self) -> None:
        """Lets nothing fail, and nothing take long, any more."""
        self.engine.fault()
        self.torch.do("order_takes", seconds={})
        self.host.fault()


@pytest.fixture(scope="module")
def mixed(softcuda_build: Path) -> Iterator[Mixed]:
    """One job for all tests here, since torch takes long to load.

    Each test finds and leaves it on its devices, and the other job parked.
    """
    host = Host(softcuda_build, settings=WAYS)
    host.start_daemon()
    job = Mixed(host)
    job.turn()
    yield job
    host.close()


def test_a_job_of_three_kinds_of_ranks_is_switched_with_another_and_keeps_its_state_g12(
    mixed: Mixed,
) -> None:
    for _ in range(2):
        mixed.turn_of_other()
        mixed.turn()
    assert mixed.host.events("eviction_failed", "admission_failed") == []


@pytest.mark.parametrize("step", LEAVING)
def test_a_job_that_cannot_leave_at_any_step_goes_on_with_its_state_and_leaves_later_g12(
    mixed: Mixed, step: str
) -> None:
    mixed.fail(step)
    since = mixed.now()
    waiting = mixed.other.start("acquire", groups="g1", timeout=60)
    until(lambda: mixed.host.events("eviction_failed", since=since), f"{step} fails")
    assert not waiting.is_over(), "it keeps its place"
    assert mixed.look() == mixed.digests
    mixed.mend()
    waiting.wait()
    mixed.assert_parked()
    mixed.other.do("release")
    mixed.turn()


@pytest.mark.parametrize("step", COMING)
def test_a_job_that_cannot_come_back_at_any_step_stays_parked_as_a_whole_and_comes_later_g12(
    mixed: Mixed, step: str
) -> None:
    mixed.turn_of_other()
    mixed.fail(step)
    with pytest.raises(RankError, match=r"304|does not work|out of memory"):
        mixed.plain.do("acquire", groups="g1", timeout=30)
    mixed.mend()
    mixed.turn_of_other()
    with mixed.host.connection() as connection:
        connection.request({"t": "clear", "job": "a"})
    mixed.turn()


@pytest.mark.parametrize("step", GOING_ON)
def test_a_job_that_cannot_go_on_at_any_step_is_tried_again_g12(mixed: Mixed, step: str) -> None:
    mixed.turn_of_other()
    mixed.fail(step)
    since = mixed.now()
    waiting = mixed.plain.start("acquire", groups="g1", timeout=60)
    until(lambda: mixed.failures(since), f"{step} fails")
    mixed.mend()
    waiting.wait()
    mixed.assert_whole()
    mixed.plain.do("release")


@pytest.mark.parametrize(
    "step", ["plain restore", "engine restore", "torch second thaw", "torch restore"]
)
def test_a_job_that_fails_at_any_step_of_its_way_back_too_goes_on_as_a_whole_g12(
    mixed: Mixed, step: str
) -> None:
    # By then the other two are parked, and its tensors are away.
    mixed.fail("torch second snapshot", step)
    since = mixed.now()
    waiting = mixed.other.start("acquire", groups="g1", timeout=60)
    until(lambda: len(mixed.failures(since)) > 1, f"{step} fails")
    mixed.mend()
    waiting.wait()
    mixed.assert_parked()
    mixed.other.do("release")
    mixed.turn()


@pytest.mark.parametrize("step", [*LEAVING[4:7], *COMING[:3]])
def test_a_daemon_that_is_killed_at_any_step_of_a_rank_of_two_parts_goes_on_with_it_g8(
    mixed: Mixed, step: str
) -> None:
    host, leaves = mixed.host, step in LEAVING
    if not leaves:
        mixed.turn_of_other()
    mixed.slow(step)
    waiting = (mixed.other if leaves else mixed.plain).start("acquire", groups="g1", timeout=60)
    doing = "snapshot" if leaves else "restore"
    until(lambda: host.doing(for_s=0.2) == {doing}, f"{step} is under way")
    host.kill_daemon()
    mixed.mend()
    host.start_daemon()
    waiting.wait()
    if leaves:
        mixed.assert_parked()
        mixed.other.do("release")
        mixed.turn()
    else:
        mixed.assert_whole()
        mixed.plain.do("release")


@pytest.mark.parametrize(("other_mib", "stays"), [(40, True), (54, False)])
def test_what_an_engine_leaves_stays_only_if_the_other_job_has_room_beside_it(
    make_host: MakeHost, other_mib: int, stays: bool
) -> None:
    host = make_host(settings={**WAYS, "memory": {"max_residue_bytes": "16 MiB"}})
    other = host.trainer("b", mib=other_mib, seed=4)
    expected = other.do("digest")
    engine = EngineRank(host, "vllm", "a")
    engine.rank.do("acquire", groups="g1", timeout=30)
    engine.serve(WEIGHTS_MIB, CACHE_MIB)
    engine.rank.do("fill", mib=BESIDE_MIB)
    digest = engine.rank.do("digest")
    engine.rank.do("release")
    for _ in range(2):
        other.do("acquire", groups="g1", timeout=30)
        left_mib = host.used_bytes() // MIB - other_mib - 2
        assert left_mib == (BESIDE_MIB + 2 if stays else 0)
        assert other.do("digest") == expected
        other.do("release")
        engine.rank.do("acquire", groups="g1", timeout=30)
        assert engine.rank.do("digest") == digest
        engine.rank.do("release")
