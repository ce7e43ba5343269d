"""Ranks that wait for one another, taken off the devices in the middle of their collectives."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import LIMIT_S, Host, MakeHost, own, until
from raw_client import RawClient

#: The last one is slow, so that the others are always ahead of it on their devices.
GAPS_S = (0.0, 0.0, 0.005)
TRIES = 10
LIMITS = {
    "freeze_timeout_s": 2.0,
    "peer_freeze_timeout_s": 0.1,
    "max_evict_tries": TRIES,
    "retry_min_s": 0.01,
    "retry_max_s": 0.05,
    "hold_warning_s": 0.1,
}


class Job:
    """A job of several ranks whose loops queue collectives, a few ahead of their devices."""

    def __init__(self, host: Host, *, pausable: bool) -> None:
        self.host = host
        self.ranks = [host.rank("a", program="collective_rank.py") for _ in GAPS_S]
        first, *others = self.ranks
        first.do("initialise", group="g1", mib=4, seed=0)
        first.do("acquire", groups="g1", timeout=20)
        for seed, rank in enumerate(others, start=1):
            rank.do("context")
            rank.do("fill", mib=4, seed=seed)
        self.digests = [rank.do("digest") for rank in self.ranks]
        for number, (rank, gap_s) in enumerate(zip(self.ranks, GAPS_S, strict=True)):
            group = str(host.directory / "collective")
            many = len(self.ranks)
            rank.do("loop", group=group, ranks=many, number=number, gap_s=gap_s, pausable=pausable)
        if pausable:
            until(lambda: self.agents() == len(self.ranks), "all can be asked to pause")
        self.get_on(by=20)

    def agents(self) -> int:
        shown = json.loads(ctl(self.host, "show", "job", "a", "--json"))["shown"]
        return sum(session["hooks"] for session in shown["sessions"])

    def queued(self) -> list[int]:
        return [rank.do("queued") for rank in self.ranks]

    def get_on(self, *, by: int) -> None:
        """Waits until each rank has queued so many more."""
        until_at = max(self.queued()) + by
        until(lambda: min(self.queued()) >= until_at, "all ranks get on")

    def finish(self) -> None:
        """Ends all loops behind the same collective; every rank must come there with its state."""
        at = max(self.queued()) + 50
        ends = [rank.start("finish", at=at) for rank in self.ranks]
        assert [end.wait() for end in ends] == [at] * len(self.ranks)
        assert [rank.do("digest") for rank in self.ranks] == self.digests

    def states(self) -> list[str]:
        states = self.host.states()
        return [states[rank.pid] for rank in self.ranks]


def ctl(host: Host, *arguments: str) -> str:
    """Types a command that must succeed, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tsliced.ctl", *arguments],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def involuntary(make_host: MakeHost, how: str) -> Host:
    """A host that takes a job's devices away while its loop goes on."""
    hold = {"max_hold_s": 0.2} if how == "it holds for too long" else {}
    return make_host(settings={"limits": {**LIMITS, **hold}})


HOW = pytest.mark.parametrize(
    "how", ["it released with work queued", "it holds for too long"], ids=["released", "max_hold"]
)


def stop_holding(job: Job, how: str) -> None:
    if how == "it released with work queued":
        job.ranks[0].do("release")


@HOW
def test_ranks_that_do_not_stop_together_run_on_and_all_who_ask_are_told_what_helps_g11(
    make_host: MakeHost, how: str
) -> None:
    host = involuntary(make_host, how)
    job = Job(host, pausable=False)
    stop_holding(job, how)
    with RawClient(host.socket) as waiter:
        waiter.hello(job="b")
        asked = waiter.start("acquire", groups=["g1"])
        told: list[str] = []
        while not told or "tslicectl retry" not in told[-1]:
            message = waiter.receive()
            if message["t"] == "stalled":
                assert message["cause"] == "freeze_timeout"
                told.append(message["reason"])
        assert all("on_pause" in text for text in told)
        assert f"given up after {TRIES} tries" in told[-1]
        (pinned,) = host.events("pinned")
        assert "on_pause" in pinned["way_out"]
        for what in (("job", "a"), ("group", "g1")):
            page = ctl(host, "show", *what)
            assert "PINNED on g1" in page
            assert "on_pause" in page
        failed = host.events("eviction_failed")
        assert len(failed) == TRIES
        try_s = LIMITS["freeze_timeout_s"] + LIMITS["peer_freeze_timeout_s"]
        bound_s = TRIES * (try_s + 1.5 * LIMITS["retry_max_s"])
        assert pinned["at"] - failed[0]["at"] < bound_s
        assert not host.operations("snapshot"), "none was moved while others ran"
        # It runs on, and what it computes is right.
        assert job.states() == ["running"] * len(job.ranks)
        job.get_on(by=100)
        job.finish()
        # Now nobody waits for anybody any more.
        ctl(host, "retry", own("a"))
        lease = waiter.answer_to(asked)["lease"]
        waiter.send({"t": "ack", "lease": lease})
        assert job.states() == ["parked"] * len(job.ranks)
        waiter.ask("release", lease=lease)
        waiter.send({"t": "bye"})


@HOW
def test_ranks_that_stop_together_are_taken_off_at_the_first_try(
    make_host: MakeHost, how: str
) -> None:
    host = involuntary(make_host, how)
    job = Job(host, pausable=True)
    stop_holding(job, how)
    waiter = host.rank("b")
    for _ in range(2):
        waiter.do("acquire", groups="g1", timeout=30)
        assert job.states() == ["parked"] * len(job.ranks)
        before = job.queued()
        assert len(set(before)) == 1, "all ranks stopped behind the same collective"
        waiter.do("release")
        if how == "it holds for too long":
            until(
                lambda: job.ranks[0].do("look")["state"] == "lost", "it knows that it is not held"
            )
        job.ranks[0].do("acquire", groups="g1", timeout=30)
        job.get_on(by=100)
        stop_holding(job, how)
    job.finish()
    assert host.events("eviction_failed", "pinned") == []
    assert len(host.events("evicted")) >= 2


def test_ranks_that_were_paused_go_on_though_the_daemon_died_meanwhile_g8(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"limits": LIMITS})
    job = Job(host, pausable=True)
    # The first to be frozen takes its time: all ranks stand still by then.
    host.fault(f"lock {job.ranks[0].pid} 1 delay:1000")
    job.ranks[0].do("release")
    waiter = host.rank("b")
    asked = waiter.start("acquire", groups="g1", timeout=60)
    until(lambda: "freeze" in host.doing(), "a rank is being frozen")
    host.kill_daemon()
    host.start_daemon()
    assert asked.wait()["state"] == "held"
    waiter.do("release")
    job.ranks[0].do("acquire", groups="g1", timeout=30)
    job.get_on(by=100)
    job.finish()
