"""Processes that end, stop, or come back: holders, waiters, targets, workers, and the daemon."""

from __future__ import annotations

import os
import signal

import pytest
from harness import Host, MakeHost, RankError, own, until


def test_when_a_holder_is_killed_the_waiter_gets_the_group_g3(host: Host) -> None:
    holder, waiter = host.trainer("a"), host.rank("b")
    holder.do("acquire", groups="g1")
    asked = waiter.start("initialise", group="g1", mib=40, seed=2)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    holder.kill()
    assert asked.wait()["state"] == "held"
    ended = next(event for event in host.events("released") if event["cause"] != "released")
    assert ended["job"] == own("a")


def test_when_a_waiter_is_killed_the_queue_goes_on_without_it_g3(host: Host) -> None:
    holder, victim, last = (host.rank(name) for name in "abc")
    holder.do("acquire", groups="g1")
    victim.start("acquire", groups="g1")
    until(lambda: host.group()["waiters"] == 1, "the victim waits")
    asked = last.start("acquire", groups="g1", timeout=20)
    until(lambda: host.group()["waiters"] == 2, "the last one waits")
    victim.kill()
    until(lambda: host.group()["waiters"] == 1, "the victim is out of the queue")
    holder.do("release")
    assert asked.wait()["state"] == "held"


def test_a_waiter_that_dies_while_the_other_is_moved_off_leaves_the_group_free(
    make_host: MakeHost,
) -> None:
    host = make_host(SOFTCUDA_THROTTLE_MBPS="40")
    rank, victim = host.trainer("a", mib=20), host.rank("b")
    victim.start("acquire", groups="g1")
    until(lambda: "snapshot" in {r["doing"] for r in host.ask("ps")["ranks"]}, "it is copied")
    victim.kill()
    until(lambda: host.group()["state"] == "free", "the group is free")
    assert rank.do("acquire", groups="g1", timeout=20)["state"] == "held"
    assert len(rank.do("digest")) == 64


def test_a_stopped_process_is_not_touched_and_goes_on_after_its_continuation(host: Host) -> None:
    rank, waiter = host.trainer("a", mib=8), host.rank("b")
    digest = rank.do("digest")
    rank.stop()
    with pytest.raises(RankError, match=r"stopped by a signal.*SIGCONT"):
        waiter.do("acquire", groups="g1", timeout=1)
    assert [o["state"] for o in host.operations() if o["reason"] is None] == []
    os.kill(rank.pid, signal.SIGCONT)
    waiter.do("acquire", groups="g1", timeout=20)
    assert host.states() == {rank.pid: "parked"}
    waiter.do("release")
    rank.do("acquire", groups="g1", timeout=20)
    assert rank.do("digest") == digest


def test_a_rank_that_dies_parked_is_forgotten(host: Host) -> None:
    parked, running = host.trainer("a"), host.trainer("b")
    states = {parked.pid: "parked", running.pid: "running"}
    until(lambda: host.states() == states, "both are known")
    parked.kill()
    until(lambda: host.states() == {running.pid: "running"}, "it is forgotten")
    until(lambda: host.job("a") == {}, "its job is forgotten")


def test_a_worker_that_dies_is_replaced_and_what_it_did_is_asked_for(host: Host) -> None:
    rank, other = host.trainer("a", mib=8), host.rank("b")
    digest = rank.do("digest")
    other.do("acquire", groups="g1", timeout=20)
    other.do("release")
    for worker in until(host.workers, "it has a worker"):
        os.kill(worker, signal.SIGKILL)
    until(lambda: not host.workers(), "it is gone")
    rank.do("acquire", groups="g1", timeout=20)
    assert rank.do("digest") == digest


def test_after_a_crash_the_daemon_knows_who_holds_and_who_is_parked_g8(host: Host) -> None:
    parked, holder = host.trainer("a"), host.trainer("b", seed=2)
    digest = holder.do("digest")
    held = holder.do("acquire", groups="g1")
    host.kill_daemon()
    host.start_daemon()
    until(lambda: host.group()["state"] == "held", "the holder holds")
    until(lambda: host.states() == {parked.pid: "parked", holder.pid: "running"}, "all are known")
    until(lambda: holder.do("look")["state"] == "held", "the holder knows that it holds")
    assert holder.do("look")["tokens"] == held["tokens"]
    asked = parked.start("acquire", groups="g1", timeout=30)
    until(lambda: host.group()["waiters"] == 1, "the parked one waits")
    holder.do("release")
    lease = asked.wait()
    assert lease["restored"] is True
    assert lease["tokens"]["g1"] > held["tokens"]["g1"], "tokens rise over a crash (G2)"
    assert len(parked.do("digest")) == 64
    parked.do("release")
    holder.do("acquire", groups="g1", timeout=20)
    assert holder.do("digest") == digest


@pytest.mark.parametrize("verb", ["snapshot", "restore"])
@pytest.mark.parametrize("end", ["crash", "stop"])
def test_a_daemon_that_ends_in_the_middle_of_a_copy_loses_nothing_g12(
    make_host: MakeHost, verb: str, end: str
) -> None:
    host = make_host(SOFTCUDA_THROTTLE_MBPS="40")
    rank, other = host.trainer("a", mib=20, seed=1), host.rank("b")
    digest = rank.do("digest")
    if verb == "restore":
        other.do("acquire", groups="g1", timeout=20)
        other.do("release")
    asker = other if verb == "snapshot" else rank
    asked = asker.start("acquire", groups="g1", timeout=30)
    # The copy takes half a second, and the call on its way there hardly any of it.
    until(lambda: verb in host.doing(for_s=0.1), "it is copied")
    if end == "crash":
        host.kill_daemon()
    else:
        assert host.stop_daemon() == 0, "it does not wait for the copy"
    assert host.workers(), "the worker outlives the daemon, in the middle of its call"
    host.start_daemon()
    assert asked.wait()["state"] == "held"
    if verb == "snapshot":
        other.do("release")
        rank.do("acquire", groups="g1", timeout=20)
    assert rank.do("digest") == digest


def test_a_daemon_that_was_asked_to_stop_leaves_everything_as_it_is_g8(host: Host) -> None:
    parked, holder = host.trainer("a"), host.trainer("b")
    held = holder.do("acquire", groups="g1")
    assert host.stop_daemon() == 0
    until(lambda: holder.do("look")["state"] == "uncertain", "the holder notices")
    assert len(holder.do("digest")) == 64, "it runs on"
    host.start_daemon()
    until(lambda: holder.do("look")["state"] == "held", "the holder has its lease")
    assert holder.do("look")["tokens"] == held["tokens"]
    holder.do("release")
    assert parked.do("acquire", groups="g1", timeout=20)["restored"] is True
