"""Turns that nobody asks for, strangers, and what is left of jobs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import Host, MakeHost, Rank, RankError, Settings, own, until

#: Jobs come back once before they first make room, as they do unless it is turned off.
QUALIFIES = True
QUICK = {"retry_min_s": 0.05, "retry_max_s": 0.2}
COURTEOUS: Settings = {"limits": {**QUICK, "idle_park_s": 0.5, "courtesy_turn_s": 1.0}}
FREEZING: Settings = {
    "limits": {**QUICK, "stranger_turn_s": 1.0},
    "scan": {"strangers": "freeze"},
}


def test_a_job_that_is_parked_and_silent_is_named(make_host: MakeHost) -> None:
    host = make_host(settings={"limits": {**QUICK, "idle_park_s": 0.5}})
    parked, holder = host.trainer("a", mib=8), host.rank("b")
    holder.do("acquire", groups="g1", timeout=20)
    (named,) = until(lambda: host.events("idle_parked"), "it is named")
    assert (named["job"], named["groups"], named["pids"]) == (own("a"), "g1", str(parked.pid))
    job = host.job("a")
    assert job["idle_s"] > 0.4
    assert "parked and has asked for nothing" in job["reason"]
    holder.do("release")
    parked.do("acquire", groups="g1", timeout=20)
    assert host.job("a")["idle_s"] is None


def test_a_job_that_is_blocked_without_a_lease_gets_on_in_a_courtesy_turn(
    make_host: MakeHost, tmp_path: Path
) -> None:
    host = make_host(settings=COURTEOUS)
    parked, holder, last = host.trainer("a", mib=8, seed=3), host.rank("b"), host.rank("c")
    digest = parked.do("digest")
    holder.do("acquire", groups="g1", timeout=20)
    saved = tmp_path / "checkpoint"
    parked.do("work_unasked", file=str(saved))
    until(lambda: host.events("turn_queued"), "its turn is queued")
    after = last.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 2, "somebody came after it")
    assert not saved.exists()
    holder.do("release")
    until(lambda: host.group()["unasked"], "it is its turn")
    assert host.group()["holder"]["id"] == "a"
    until(saved.exists, "it gets on")
    assert after.wait()["waited_s"] > 0.5, "the turn is not cut short"
    assert host.states() == {parked.pid: "parked"}
    assert saved.read_text() == digest
    kinds = [event["kind"] for event in host.events("turn", "turn_over")]
    assert kinds == ["turn", "turn_over"]


def test_a_parked_job_that_is_sent_sigterm_comes_to_its_end_in_a_courtesy_turn(
    make_host: MakeHost,
) -> None:
    host = make_host(settings=COURTEOUS)
    parked, holder = host.trainer("a", mib=8), host.rank("b")
    parked.do("save_at_sigterm")
    holder.do("acquire", groups="g1", timeout=20)
    parked.process.send_signal(signal.SIGTERM)
    until(lambda: host.events("turn_queued"), "its turn is queued")
    assert parked.process.poll() is None, "it is blocked in the driver"
    holder.do("release")
    assert parked.process.wait(30) == 7, "it saved, and ended as its handler wants"
    until(lambda: host.group()["state"] == "free", "its turn is over with it")


@pytest.mark.parametrize("restart", [False, True])
def test_a_stranger_is_frozen_gets_turns_and_is_forgotten(
    make_host: MakeHost, restart: bool
) -> None:
    host = make_host(settings=FREEZING)
    # Nothing says whose it is.
    stranger = host.rank()
    stranger.do("context")
    stranger.do("fill", mib=8, seed=5)
    digest = stranger.do("digest")
    (seen,) = until(lambda: host.events("stranger"), "it is seen", limit_s=5)
    assert (seen["pid"], seen["uid"]) == (stranger.pid, os.getuid())
    assert seen["bytes"] >= 8 << 20
    holder, second = host.rank("a"), host.rank("b")
    holder.do("acquire", groups="g1", timeout=20)
    assert host.states() == {stranger.pid: "parked"}
    if restart:
        host.kill_daemon()
        host.start_daemon()
        until(lambda: holder.do("look")["state"] == "held", "the holder holds")
    name = f"stranger-{stranger.pid}"
    until(lambda: [q["job"]["id"] for q in host.group()["queue"]] == [name], "it waits")
    after = second.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 2, "another comes after it")
    holder.do("release")
    until(lambda: host.group()["unasked"], "it is its turn")
    assert stranger.do("digest") == digest
    assert after.wait()["state"] == "held"
    assert host.states() == {stranger.pid: "parked"}
    stranger.kill()
    until(lambda: host.states() == {}, "its rank is forgotten")
    until(lambda: host.job(name) == {}, "and its job")
    assert host.group()["waiters"] == 0


def test_a_stranger_that_connects_is_its_own_jobs_rank(make_host: MakeHost) -> None:
    host = make_host(settings=FREEZING)
    late = host.rank(told=True, job="late")
    late.do("context")
    late.do("fill", mib=8, seed=5)
    digest = late.do("digest")
    until(lambda: host.events("stranger"), "it is seen", limit_s=5)
    other = host.rank("a")
    other.do("acquire", groups="g1", timeout=20)
    assert host.states() == {late.pid: "parked"}
    asked = late.start("acquire", groups="g1", timeout=60)
    until(lambda: [q["job"]["id"] for q in host.group()["queue"]] == ["late"], "it asks itself")
    other.do("release")
    assert asked.wait()["restored"] is True
    assert late.do("digest") == digest
    assert [job["job"]["id"] for job in host.status()["jobs"]] == ["late"]


def test_by_default_a_stranger_is_only_reported(host: Host) -> None:
    stranger = host.rank()
    stranger.do("context")
    until(lambda: host.events("stranger"), "it is seen", limit_s=5)
    rank = host.rank("a")
    with pytest.raises(RankError, match=f"pid {stranger.pid} .* is on the devices"):
        rank.do("acquire", groups="g1", timeout=20)
    assert host.states() == {}
    assert host.operations() == []
    rank.do("acquire", groups="g2", timeout=20)


def test_what_has_no_client_any_more_is_shown_and_ended(make_host: MakeHost) -> None:
    host = make_host(settings={"limits": {**QUICK, "orphan_s": 4.0, "end_grace_s": 1.0}})
    orphan = host.trainer("a", mib=8)
    until(lambda: host.states() == {orphan.pid: "running"}, "it is known")
    orphan.do("bye")
    until(lambda: host.job("a").get("state") == "orphaned", "it is shown")
    assert f"tslicectl kill {own('a')}" in host.job("a")["reason"]
    assert [rank["orphaned"] for rank in host.ask("ps")["ranks"]] == [True]
    (named,) = host.events("orphaned")
    assert (named["job"], named["pids"]) == (own("a"), str(orphan.pid))
    assert orphan.process.wait(30) == -signal.SIGTERM
    until(lambda: host.job("a") == {}, "it is forgotten")


def test_a_parked_orphan_is_ended_though_it_can_handle_no_signal(make_host: MakeHost) -> None:
    host = make_host(settings={"limits": {**QUICK, "orphan_s": 3.0}})
    orphan, holder = host.trainer("a", mib=8), host.rank("b")
    holder.do("acquire", groups="g1", timeout=20)
    orphan.do("bye")
    assert orphan.process.wait(30) == -signal.SIGKILL
    until(lambda: host.states() == {}, "it is forgotten")
    assert host.job("b")["state"] == "held"


def test_survivors_of_a_lost_rank_are_ended_if_they_do_not_get_on(make_host: MakeHost) -> None:
    settings: Settings = {
        "limits": {**QUICK, "on_rank_lost": "kill", "rank_lost_s": 2.0, "end_grace_s": 1.0}
    }
    host = make_host(settings=settings)
    first, second = host.trainer("a", mib=8), host.trainer("a", mib=8, seed=1)
    first.do("acquire", groups="g1", timeout=20)
    pids = {first.pid, second.pid}
    until(lambda: set(host.states()) == pids, "both are known")
    second.kill()
    until(lambda: host.job("a").get("rank_lost"), "it is shown")
    waiter = host.rank("b")
    lease = waiter.do("acquire", groups="g1", timeout=60)
    assert lease["state"] == "held"
    assert first.process.wait(30) == -signal.SIGTERM
    (lost,), (ending,) = host.events("rank_lost"), host.events("ending")
    assert (lost["pid"], lost["left"]) == (second.pid, 1)
    assert "a rank was lost" in ending["reason"]


# --- last turns -------------------------------------------------------------------------------


def leaving(host: Host, job: str = "a") -> Rank:
    """Starts a rank that takes a last turn if it needs one."""
    rank = host.rank(job, RANK_LAST_TURN_S="60")
    rank.do("initialise", group="g1", mib=8, seed=4)
    return rank


@pytest.mark.parametrize("restart", [False, True])
def test_a_parked_process_that_exits_waits_for_a_last_turn_and_leaves_with_it(
    host: Host, tmp_path: Path, restart: bool
) -> None:
    rank, holder = leaving(host), host.rank("b")
    saved = tmp_path / "checkpoint"
    digest = rank.do("digest")
    rank.do("save_at_exit", file=str(saved))
    holder.do("acquire", groups="g1", timeout=20)
    rank.end()
    until(lambda: [q["phase"] for q in host.group()["queue"]] == ["last turn"], "it waits")
    if restart:
        host.kill_daemon()
        host.start_daemon()
        until(lambda: [q["phase"] for q in host.group()["queue"]] == ["last turn"], "it waits")
        until(lambda: holder.do("look")["state"] == "held", "the holder holds")
    assert rank.process.poll() is None
    holder.do("release")
    assert rank.process.wait(30) == 0
    assert saved.read_text() == digest
    until(lambda: host.group()["state"] == "free", "its turn is over with it")


def test_a_process_that_runs_exits_at_once_and_with_its_devices(host: Host, tmp_path: Path) -> None:
    rank = leaving(host)
    saved = tmp_path / "checkpoint"
    rank.do("save_at_exit", file=str(saved))
    rank.end()
    assert rank.process.wait(20) == 0
    assert len(saved.read_text()) == 64
    until(lambda: host.group()["state"] == "free", "its turn is over with it")


def test_a_parked_process_that_says_goodbye_comes_back_and_stays(host: Host) -> None:
    rank, holder, last = leaving(host), host.rank("b"), host.rank("c")
    digest = rank.do("digest")
    holder.do("acquire", groups="g1", timeout=20)
    closing = rank.start("bye")
    until(lambda: host.group()["waiters"] == 1, "it waits")
    after = last.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 2, "somebody comes after it")
    assert not closing.is_over()
    holder.do("release")
    closing.wait()
    assert rank.do("digest") == digest
    assert not after.is_over()
    rank.kill()
    assert after.wait()["state"] == "held"


def test_a_last_turn_has_a_limit(host: Host) -> None:
    rank, holder = host.rank("a", RANK_LAST_TURN_S="1"), host.rank("b")
    rank.do("initialise", group="g1", mib=8, seed=4)
    holder.do("acquire", groups="g1", timeout=20)
    rank.end()
    assert rank.process.wait(20) == 0
    assert host.group()["waiters"] == 0
