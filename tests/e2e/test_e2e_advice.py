"""What jobs are told of themselves: in the events, and once in their own logs."""

from __future__ import annotations

import pytest
from harness import Host, MakeHost, Rank, own, until

from tsliced.observe.usage import usage

LIMITED = {"limits": {"yield_warning_s": 0.5}}


def read_log(host: Host, rank: Rank) -> int:
    """Returns how often a job's log has a warning, when it has read all that there is for it."""
    # A client without callbacks reads when it is used.
    rank.do("acquire", groups="g2", timeout=20)
    rank.do("release")
    return host.log.read_text().count("the daemon warns: ")


def test_leases_that_are_shorter_than_their_switch_are_told_once(make_host: MakeHost) -> None:
    # A move of 8 MiB takes a quarter of a second.
    host = make_host(SOFTCUDA_THROTTLE_MBPS="40")
    rank, other = host.trainer("a", mib=8), host.rank("b")
    for _ in range(4):
        for each in (other, rank):
            each.do("acquire", groups="g1", timeout=20)
            each.do("release")
    until(lambda: len(host.events("short_holds")) == 2, "both are told")
    events = host.events("short_holds")
    assert {event["job"] for event in events} == {own("a"), own("b")}
    assert {event["level"] for event in events} == {"warning"}
    assert "3 of its leases were shorter than the switch" in str(events[0]["reason"])
    until(lambda: read_log(host, rank) + read_log(host, other) >= 3, "it is in both logs")
    assert host.log.read_text().count("the daemon warns: 3 of its leases") == 2


def test_a_job_that_ends_while_it_is_parked_is_parked_no_longer(host: Host) -> None:
    first, second = host.trainer("a", mib=40), host.trainer("b", mib=40)
    until(lambda: host.states() == {first.pid: "parked", second.pid: "running"}, "a is parked")
    first.kill()
    (gone,) = until(lambda: host.events("gone"), "it is told")
    assert gone["job"] == own("a")
    (parked,) = [e for e in host.events("evicted") if e["job"] == own("a")]
    rows = usage(host.events(), "job", since_unix=0.0, until_unix=gone["at"] + 1000.0)
    of_job = {row.name: row.parked_s for row in rows}
    assert of_job[own("a")] == pytest.approx(gone["at"] - parked["at"])
    assert host.job("b")["state"] == "resident"


def test_who_never_yields_is_told_while_others_wait(make_host: MakeHost) -> None:
    host = make_host(settings=LIMITED)
    rank = host.trainer("a", mib=8)
    rank.do("acquire", groups="g1", timeout=20)
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    (event,) = until(lambda: host.events("never_yields"), "it is told")
    assert f"while {own('b')} waits" in str(event["reason"])
    assert "max_hold_s" in str(event["reason"])
    rank.do("look")
    assert f"the daemon warns: {event['reason']}" in host.log.read_text()
    rank.do("release")
    asked.wait()
    assert len(host.events("never_yields")) == 1
