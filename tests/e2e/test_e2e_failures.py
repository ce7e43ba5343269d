"""Moves that fail: who was to be moved runs on, who waits keeps its place, and all learn why."""

from __future__ import annotations

import pytest
from harness import Host, MakeHost, RankError, own, until

#: Jobs come back once before they first make room, as they do unless it is turned off.
QUALIFIES = True


def test_a_freeze_that_takes_too_long_is_turned_back_and_tried_again(make_host: MakeHost) -> None:
    host = make_host(settings={"limits": {"freeze_timeout_s": 0.2}})
    busy = host.trainer("a", mib=8)
    digest = busy.do("digest")
    # It takes a process a while to begin, on a busy machine as long as the work lasts.
    waiter = host.rank("b")
    busy.do("launch", ms=1500)
    asked = waiter.start("acquire", groups="g1", timeout=20)
    failed = until(lambda: host.events("eviction_failed"), "a freeze times out")[0]
    assert f"pid {busy.pid}" in failed["reason"]
    assert failed["job"] == own("a")
    assert host.operations("freeze")[0]["state"] == "running", "it runs as before"
    lease = asked.wait()
    assert lease["waited_s"] > 0.5, "it kept its place until the work was over"
    assert host.states() == {busy.pid: "parked"}
    waiter.do("release")
    busy.do("acquire", groups="g1", timeout=20)
    assert busy.do("digest") == digest


def test_a_waiter_that_gives_up_is_told_what_kept_it(make_host: MakeHost) -> None:
    host = make_host(settings={"limits": {"freeze_timeout_s": 0.2}})
    stubborn = host.trainer("a", mib=8)
    host.fault(f"lock {stubborn.pid} * error:600")
    waiter = host.rank("b")
    with pytest.raises(RankError, match=f"not granted within .*pid {stubborn.pid}") as caught:
        waiter.do("acquire", groups="g1", timeout=1)
    assert caught.value.code == "timeout"
    assert host.group()["waiters"] == 0
    until(lambda: host.states() == {stubborn.pid: "running"}, "it runs as before")
    host.fault()
    assert waiter.do("acquire", groups="g1", timeout=20)["state"] == "held"


def test_a_job_that_cannot_be_snapshotted_is_pinned_and_says_why_g11(host: Host) -> None:
    rank = host.trainer("a", mib=8)
    digest = rank.do("digest")
    host.fault(f"checkpoint {rank.pid} * error:801")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    reason = until(lambda: str(host.job("a").get("reason") or ""), "it is pinned")
    assert f"pid {rank.pid}" in reason
    assert rank.do("digest") == digest, "it runs as before"
    with pytest.raises(RankError, match=f"pid {rank.pid}") as caught:
        rank.do("acquire", groups="g1", timeout=5)
    assert caught.value.code == "pinned"
    assert not asked.is_over()
    # The way out: its process ends.
    rank.kill()
    assert asked.wait()["state"] == "held"
    assert host.job("a") == {}


def test_memory_that_the_driver_cannot_save_blocks_the_group_until_the_process_ends_g11(
    host: Host,
) -> None:
    rank = host.trainer("a", mib=8)
    rank.do("managed", mib=4)
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    # What the driver began and could not do leaves the process broken for good.
    group = until(lambda: (g := host.group())["state"] == "blocked" and g, "it is blocked")
    assert f"pid {rank.pid}" in group["reason"]
    elsewhere = host.rank("c")
    assert elsewhere.do("acquire", groups="g2", timeout=5)["state"] == "held"
    rank.kill()
    assert asked.wait()["state"] == "held"


def test_a_restore_that_fails_is_the_fault_of_its_job_alone_g11(host: Host) -> None:
    rank, other = host.trainer("a", mib=8), host.trainer("b", mib=8)
    until(lambda: host.states() == {rank.pid: "parked", other.pid: "running"}, "a is parked")
    digest = other.do("digest")
    host.fault(f"restore {rank.pid} * error:304")
    with pytest.raises(RankError, match=f"pid {rank.pid}"):
        rank.do("acquire", groups="g1", timeout=20)
    job = host.job("a")
    assert job["state"] == "faulted"
    assert f"pid {rank.pid}" in job["reason"]
    with pytest.raises(RankError, match="clear the fault") as caught:
        rank.do("acquire", groups="g1", timeout=20)
    assert caught.value.code == "job_faulted"
    assert other.do("acquire", groups="g1", timeout=20)["state"] == "held"
    assert other.do("digest") == digest
    rank.kill()
    until(lambda: host.job("a") == {}, "the fault goes with the process")
    assert host.rank("a").start("acquire", groups="g2").wait()["state"] == "held"


def test_without_host_memory_nothing_is_touched_and_both_numbers_are_named(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"memory": {"snapshot_margin_bytes": "100 TiB"}})
    rank = host.trainer("a", mib=8)
    numbers = r"host memory: [\d,]+ bytes .* needed, [\d,]+ bytes .* available in the host"
    with pytest.raises(RankError, match=numbers):
        host.rank("b").do("acquire", groups="g1", timeout=1)
    assert host.operations() == []
    assert host.used_bytes() >= 8 << 20
    # It could never make room for anybody, so it is not let in again either.
    with pytest.raises(RankError, match=r"could not be parked.*[\d,]+ bytes .* needed") as refused:
        rank.do("acquire", groups="g1", timeout=5)
    assert refused.value.code == "no_host_memory"
