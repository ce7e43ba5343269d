"""Watchdogs in ranks' processes: the daemon hears of them, heeds them, and warns."""

from __future__ import annotations

import pytest
from harness import Host, MakeHost, Rank, own, until
from raw_client import RawClient

#: Jobs come back once before they first make room, as they do unless it is turned off.
QUALIFIES = True
LIMITED = {
    "limits": {
        "retry_min_s": 0.05,
        "retry_max_s": 0.2,
        "max_hold_s": 0.5,
        "hold_warning_s": 0.2,
    }
}
HELD_S = 1.2


def others_hold(host: Host) -> None:
    """Lets another job hold the group for a while, so that the daemon knows of such holds."""
    other = host.rank("other")
    other.do("acquire", groups="g1", timeout=20)
    until(lambda: host.group()["lease_since_s"] > HELD_S, "it was held for long")
    other.do("release")
    other.kill()


def holder(host: Host, watchdog_s: str) -> Rank:
    rank = host.rank("a", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=watchdog_s)
    rank.do("initialise", group="g1", mib=8, seed=0)
    rank.do("acquire", groups="g1", timeout=20)
    return rank


def test_a_lease_is_not_taken_back_from_who_would_not_outlive_it_and_the_waiter_is_told_why(
    make_host: MakeHost,
) -> None:
    host = make_host(settings=LIMITED)
    others_hold(host)
    rank = holder(host, "1")
    with RawClient(host.socket) as waiter:
        waiter.hello(job="b")
        asked = waiter.start("acquire", groups=["g1"])
        while (message := waiter.receive())["t"] != "stalled":
            pass
        assert message["cause"] == "watchdog"
        assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" in message["reason"]
        (refused, *_) = host.events("pause_refused")
        assert (refused["job"], refused["groups"], refused["limit_s"]) == (own("a"), "g1", 1.0)
        assert refused["hold_s"] > HELD_S
        assert refused["rank"] == f"n1:{rank.pid}"
        assert host.events("revoked") == []
        assert rank.do("look")["state"] == "held"
        # What it does itself is its own affair.
        rank.do("release")
        lease = waiter.answer_to(asked)["lease"]
        waiter.send({"t": "ack", "lease": lease})
        assert host.states()[rank.pid] == "parked"
        waiter.ask("release", lease=lease)
        waiter.send({"t": "bye"})


def test_a_lease_is_taken_back_from_who_can_wait_for_longer(make_host: MakeHost) -> None:
    host = make_host(settings=LIMITED)
    others_hold(host)
    rank = holder(host, "600")
    host.rank("b").do("acquire", groups="g1", timeout=20)
    assert [event["cause"] for event in host.events("revoked")] == ["max_hold"]
    assert host.states()[rank.pid] == "parked"


@pytest.mark.parametrize("job", ["a", ""], ids=["of a job", "stranger"])
def test_who_never_asked_is_known_by_its_environment_and_left_alone(
    make_host: MakeHost, job: str
) -> None:
    strangers = {"scan": {"strangers": "freeze", "interval_s": 0.2}}
    host = make_host(settings={**LIMITED, **strangers})
    others_hold(host)
    silent = host.rank(job, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="1")
    silent.do("context")
    silent.do("fill", mib=8)
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    (refused, *_) = until(lambda: host.events("pause_refused"), "it is left alone")
    assert (refused["rank"], refused["limit_s"]) == (f"n1:{silent.pid}", 1.0)
    assert host.operations("freeze") == []
    silent.kill()
    assert asked.wait()["state"] == "held"


def test_who_is_parked_for_nearly_as_long_as_its_watchdog_waits_is_warned_once(host: Host) -> None:
    rank = holder(host, "1")
    rank.do("release")
    other = host.rank("b")
    other.do("acquire", groups="g1", timeout=20)
    mine = rank.start("acquire", groups="g1", timeout=60)
    (warned,) = until(lambda: host.events("watchdog"), "it is named")
    assert (warned["job"], warned["limit_s"]) == (own("a"), 1.0)
    assert warned["parked_s"] >= 0.8
    until(lambda: "the daemon warns" in host.log.read_text(), "it is in the job's log")
    other.do("release")
    assert mine.wait()["restored"] is True
    assert len(host.events("watchdog")) == 1
