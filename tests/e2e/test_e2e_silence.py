"""Holders that live and do not get on: hung, stopped, or holding for too long."""

from __future__ import annotations

import os
import signal

import pytest
from harness import Host, MakeHost, Settings, own, until

#: Long for a busy machine, short for a test.
HEARTBEAT_S = "1.5"
#: Holds of g1 end after 2 s while others wait, with a warning half a second before.
LIMITED: Settings = {
    "limits": {"hold_warning_s": 0.5, "retry_min_s": 0.05, "retry_max_s": 0.2},
    "groups.g1": {"devices": ["0"], "max_hold_s": 2.0},
    "groups.g2": {"devices": ["1"]},
}


def test_a_holder_that_hangs_in_a_loop_is_taken_off_like_any_other_g3(host: Host) -> None:
    holder, waiter = host.rank("a", TSLICE_HEARTBEAT_S=HEARTBEAT_S), host.rank("b")
    holder.do("initialise", group="g1", mib=8, seed=1)
    digest = holder.do("digest")
    holder.do("watch")
    token = holder.do("acquire", groups="g1", timeout=20)["tokens"]["g1"]
    hung = holder.start("hang", seconds=5)
    lease = waiter.do("acquire", groups="g1", timeout=30)
    assert not hung.is_over()
    assert lease["waited_s"] > 0.5
    assert lease["tokens"]["g1"] > token
    assert host.states() == {holder.pid: "parked"}
    (revoked,) = host.events("revoked")
    assert (revoked["job"], revoked["cause"]) == (own("a"), "silent")
    # When it goes on after all, it knows that it holds nothing, and its state is what it was.
    hung.wait()
    until(lambda: holder.do("look")["state"] == "lost", "it knows that its lease is lost")
    until(lambda: any("no sign of life" in call for call in holder.do("called")), "it is told")
    assert holder.do("release") == {}
    waiter.do("release")
    holder.do("acquire", groups="g1", timeout=20)
    assert holder.do("digest") == digest


def test_a_holder_that_is_stopped_is_fenced_and_leaves_once_it_is_continued_g3(host: Host) -> None:
    holder, waiter = host.rank("a", TSLICE_HEARTBEAT_S=HEARTBEAT_S), host.rank("b")
    holder.do("initialise", group="g1", mib=8, seed=0)
    holder.do("acquire", groups="g1", timeout=20)
    asked = waiter.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    holder.stop()
    (revoked,) = until(lambda: host.events("revoked"), "it is fenced")
    assert revoked["cause"] == "silent"
    until(
        lambda: "stopped by a signal" in str(host.group()["reason"]), "it is said who is waited for"
    )
    assert not asked.is_over()
    os.kill(holder.pid, signal.SIGCONT)
    assert asked.wait(60)["state"] == "held"
    until(lambda: holder.do("look")["state"] == "lost", "it knows that its lease is lost")


def test_a_holder_that_gives_signs_of_life_keeps_its_lease(host: Host) -> None:
    holder, waiter = host.rank("a", TSLICE_HEARTBEAT_S=HEARTBEAT_S), host.rank("b")
    holder.do("acquire", groups="g1", timeout=20)
    asked = waiter.start("acquire", groups="g1", timeout=60)
    holder.do("work", seconds=4)
    assert holder.do("look")["state"] == "held"
    assert not asked.is_over()
    holder.do("release")
    assert asked.wait()["state"] == "held"


def test_a_restart_of_the_daemon_keeps_the_promise_of_signs_g8(host: Host) -> None:
    holder = host.rank("a", TSLICE_HEARTBEAT_S=HEARTBEAT_S)
    holder.do("acquire", groups="g1", timeout=20)
    host.kill_daemon()
    host.start_daemon()
    # Its library connects again by itself, and that is no sign of its own code.
    until(lambda: host.events("revoked"), "it is fenced")
    until(lambda: holder.do("look")["state"] == "lost", "it knows that its lease is lost")


def test_who_holds_for_too_long_is_warned_and_makes_room(make_host: MakeHost) -> None:
    host = make_host(settings=LIMITED)
    holder, waiter = host.trainer("a", mib=8), host.rank("b")
    holder.do("watch")
    holder.do("acquire", groups="g1", timeout=20)
    lease = waiter.do("acquire", groups="g1", timeout=30)
    assert lease["waited_s"] > 1.0
    assert host.states() == {holder.pid: "parked"}
    (warning,), (revoked,) = host.events("hold_warning"), host.events("revoked")
    assert warning["at"] < revoked["at"]
    assert (warning["job"], revoked["cause"]) == (own("a"), "max_hold")
    until(lambda: holder.do("look")["state"] == "lost", "it knows that its lease is lost")
    until(lambda: len(holder.do("called")) == 2, "it is told")
    warned, lost = holder.do("called")
    assert warned == "warning 0.5"
    assert "max_hold_s is 2" in lost


def test_who_holds_for_too_long_goes_on_while_nobody_waits(make_host: MakeHost) -> None:
    host = make_host(settings=LIMITED)
    holder, waiter = host.trainer("a", mib=8), host.rank("b")
    holder.do("acquire", groups="g1", timeout=20)
    until(lambda: host.events("hold_warning"), "it is warned")
    held_s = until(lambda: (s := host.group()["lease_since_s"]) > 2.5 and s, "its time is over")
    assert held_s > 2.5
    assert not host.events("revoked")
    lease = waiter.do("acquire", groups="g1", timeout=30)
    assert lease["waited_s"] < 1.5, "at once, but for the move"
    until(lambda: holder.do("look")["state"] == "lost", "it knows that its lease is lost")


def test_a_holder_that_is_kept_parked_need_give_no_sign_of_life_g9(host: Host) -> None:
    holder, other = host.rank("a", TSLICE_HEARTBEAT_S=HEARTBEAT_S), host.rank("b")
    holder.do("acquire", groups="g2", timeout=20)
    holder.do("context", device=1)
    holder.do("fill", mib=8)
    holder.do("release")
    other.do("acquire", groups="g2", timeout=20)
    assert host.states() == {holder.pid: "parked"}
    # It holds a group while its process is parked for another one.
    holder.do("acquire", groups="g1", timeout=20)
    until(lambda: host.group()["lease_since_s"] > 2 * float(HEARTBEAT_S), "time goes by")
    assert host.events("revoked") == []
    assert host.group()["holder"]["id"] == "a"


@pytest.mark.parametrize("how", ["exit", "segfault"])
def test_a_holder_that_ends_without_a_word_makes_room_g3(host: Host, how: str) -> None:
    holder, waiter = host.trainer("a", mib=8), host.rank("b")
    holder.do("acquire", groups="g1", timeout=20)
    asked = waiter.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    holder.start("crash", how=how)
    assert asked.wait()["state"] == "held"
    assert holder.process.wait(20) == (3 if how == "exit" else -signal.SIGSEGV)


def test_a_child_that_outlives_a_holder_holds_nothing_g3(host: Host) -> None:
    holder, waiter = host.rank("a"), host.rank("b")
    holder.do("acquire", groups="g1", timeout=20)
    child = holder.do("fork_and_stay")
    try:
        asked = waiter.start("acquire", groups="g1", timeout=60)
        until(lambda: host.group()["waiters"] == 1, "it waits")
        holder.kill()
        assert asked.wait()["state"] == "held"
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
