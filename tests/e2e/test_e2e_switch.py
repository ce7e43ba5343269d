"""Jobs that share devices: their state really leaves, really comes back, and is what it was."""

from __future__ import annotations

import os

import pytest
from alternating import STATE_BYTES, STATE_MIB, assert_alternates
from harness import Host, MakeHost, RankError, own, until

#: Jobs come back once before they first make room, as they do unless it is turned off.
QUALIFIES = True


def test_two_jobs_that_do_not_fit_together_alternate_and_keep_their_state_g12(host: Host) -> None:
    assert_alternates(host)


@pytest.mark.parametrize("backend", ["NoopBackend", "BlindNoopBackend"])
def test_with_a_backend_that_moves_nothing_the_same_test_fails_g1(
    make_host: MakeHost, backend: str
) -> None:
    host = make_host(settings={"daemon": {"backend": f"noop_backend:{backend}"}})
    with pytest.raises(RankError, match="not granted within"):
        assert_alternates(host, limit_s=1.5)
    assert [event["job"] for event in host.events("granted")] == [own("a")], (
        "nobody else was let in"
    )


def test_two_jobs_that_start_together_and_need_the_whole_device_both_come_up(host: Host) -> None:
    # Each needs nearly all of the device, so that the other's context would be in its way.
    for attempt in range(3):
        pair = [host.rank(f"{name}{attempt}") for name in "ab"]
        starting = [rank.start("initialise", group="g1", mib=60, seed=attempt) for rank in pair]
        for rank, started in zip(pair, starting, strict=True):
            assert started.wait()["state"] == "held"
            rank.do("acquire", groups="g1", timeout=20)
            assert len(rank.do("digest")) == 64
            rank.do("release")
        for rank in pair:
            rank.kill()


def test_releasing_without_a_waiter_moves_nothing_and_asking_again_costs_nothing_g7(
    host: Host,
) -> None:
    rank = host.trainer("a", mib=STATE_MIB)
    used = host.used_bytes()
    assert used >= STATE_BYTES
    for _ in range(20):
        lease = rank.do("acquire", groups="g1")
        assert lease["restored"] is False
        assert lease["waited_s"] == lease["switch_s"] == 0.0
        assert rank.do("release") == {"waiters": 0, "deferred": True}
    assert host.used_bytes() == used
    assert host.events("operation", "evicted") == []
    assert host.group()["resident"] == [{"cluster": "", "uid": os.getuid(), "id": "a"}]


@pytest.mark.parametrize("seen", [True, False], ids=["seen by the daemon", "just made"])
def test_contexts_made_before_any_acquire_are_cleared_before_the_first_grant_g1(
    make_host: MakeHost, seen: bool
) -> None:
    host = make_host(settings={"scan": {"interval_s": 0.1 if seen else 2.0}})
    pair = [host.rank(name) for name in "ab"]
    for seed, rank in enumerate(pair):
        rank.do("context")
        rank.do("fill", mib=8, seed=seed)
    digests = [rank.do("digest") for rank in pair]
    running = {rank.pid: "running" for rank in pair}
    if seen:
        until(lambda: host.states() == running, "both are seen")
    lease = pair[0].do("acquire", groups="g1", timeout=20)
    assert host.states() == {pair[0].pid: "running", pair[1].pid: "parked"}
    # It stays where it is: only the other one has to leave.
    assert lease["restored"] is False
    granted, evicted = host.events("granted")[0], host.events("evicted")[-1]
    assert (evicted["job"], granted["job"]) == (own("b"), own("a"))
    assert evicted["seq"] < granted["seq"]
    pair[0].do("release")
    for rank, digest in zip(reversed(pair), reversed(digests), strict=True):
        rank.do("acquire", groups="g1", timeout=20)
        assert rank.do("digest") == digest
        rank.do("release")


def test_a_job_that_comes_back_to_an_empty_device_is_told_what_that_took(host: Host) -> None:
    parked, other = host.trainer("a"), host.trainer("b")
    other.kill()
    until(lambda: host.used_bytes() == 0, "the device is empty")
    lease = parked.do("acquire", groups="g1", timeout=20)
    assert lease["restored"] is True
    assert 0 < lease["switch_s"] <= lease["waited_s"]
