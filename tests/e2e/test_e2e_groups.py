"""Leases of several groups, and jobs of several ranks on several devices."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Host, MakeHost, Rank, RankError, until

BOTH = {"groups.both": {"devices": ["0-1"]}}


def start_pair(host: Host, *, mib: int) -> list[Rank]:
    """Starts a job of two ranks, each with its state on a device of its own."""
    # RANK is what faults name a rank by.
    ranks = [host.rank("a", RANK=str(number)) for number in range(2)]
    asked = [rank.start("acquire", groups="both", ranks=2, timeout=20) for rank in ranks]
    for answer in asked:
        answer.wait()
    for number, rank in enumerate(ranks):
        rank.do("context", device=number)
        rank.do("fill", mib=mib, seed=number)
    for rank in ranks:
        rank.do("release")
    return ranks


def overlap(operations: list[dict[str, Any]]) -> bool:
    """Whether all of them ran at one time.

    An event comes at the earliest when its operation has ended, so the beginnings that are worked
    out here are late, if anything: what did not overlap does not seem to.
    """
    began = max(float(operation["at"] - operation["seconds"]) for operation in operations)
    return began < min(float(operation["at"]) for operation in operations)


def test_all_ranks_are_frozen_before_one_is_snapshotted_and_devices_are_copied_in_parallel(
    make_host: MakeHost,
) -> None:
    # A copy of 20 MiB takes 0.7 s.
    host = make_host(settings=BOTH, SOFTCUDA_THROTTLE_MBPS="30")
    pair = start_pair(host, mib=20)
    digests = [rank.do("digest") for rank in pair]
    # The second freeze takes its time, so that a snapshot which doesn't wait for it shows.
    host.fault("lock rank:1 * delay:300")
    other = host.rank("b")
    other.do("acquire", groups="both", timeout=20)
    freezes, snapshots = host.operations("freeze"), host.operations("snapshot")
    assert len(freezes) == len(snapshots) == 2
    began = min(snapshot["at"] - snapshot["seconds"] for snapshot in snapshots)
    assert began > max(freeze["at"] for freeze in freezes) - 0.1
    assert overlap(snapshots)
    other.do("release")
    restored = [rank.start("acquire", groups="both", ranks=2, timeout=20) for rank in pair]
    tokens = {answer.wait()["tokens"]["both"] for answer in restored}
    assert len(tokens) == 1, "all ranks of a round have the same token"
    assert overlap(host.operations("restore"))
    thaws = host.operations("thaw")
    assert min(thaw["seq"] for thaw in thaws) > max(
        restore["seq"] for restore in host.operations("restore")
    ), "nobody runs before all are restored"
    assert [rank.do("digest") for rank in pair] == digests


def test_a_round_is_granted_only_when_all_of_its_ranks_asked(make_host: MakeHost) -> None:
    host = make_host(settings=BOTH)
    first, second = host.rank("a"), host.rank("a")
    asked = first.start("acquire", groups="both", ranks=2, timeout=20)
    gathering = until(lambda: host.job("a").get("gathering"), "the round gathers")
    assert gathering == [{"groups": ["both"], "ranks": 2, "arrived": [first.pid]}]
    assert not asked.is_over()
    joined = second.start("acquire", groups="both", ranks=2, timeout=20)
    assert asked.wait()["tokens"] == joined.wait()["tokens"]


def test_a_lease_of_several_groups_is_all_or_nothing(host: Host) -> None:
    holder, greedy, modest = (host.rank(name) for name in "abc")
    holder.do("acquire", groups="g2")
    asked = greedy.start("acquire", groups=["g1", "g2"], timeout=1)
    until(lambda: host.group("g2")["waiters"] == 1, "it waits for the second group")
    assert host.group("g1")["holder"] is None, "the first one is kept for it, and not granted"
    with pytest.raises(RankError, match="not granted within"):
        asked.wait()
    # Nothing of what it had together by then is left behind (G5).
    modest.do("acquire", groups="g1", timeout=5)
    holder.do("release")
    modest.do("release")
    lease = greedy.do("acquire", groups=["g2", "g1"], timeout=5)
    assert sorted(lease["tokens"]) == ["g1", "g2"]


def test_jobs_that_name_their_groups_in_crossed_orders_do_not_block_each_other(host: Host) -> None:
    orders = {"a": ["g1", "g2"], "b": ["g2", "g1"], "c": ["g1"], "d": ["g2"]}
    ranks = {name: host.rank(name) for name in orders}
    turns = 25
    running = [rank.start("train", groups=orders[n], turns=turns) for n, rank in ranks.items()]
    assert [answer.wait() for answer in running] == [turns] * 4
    assert host.grants() == turns * 4


def test_one_process_on_two_groups_is_moved_with_both_and_refused_for_one(host: Host) -> None:
    rank = host.rank("a")
    for device in range(2):
        rank.do("context", device=device)
        rank.do("fill", mib=8, seed=device)
    digest = rank.do("digest")
    other = host.rank("b")
    other.do("acquire", groups=["g1", "g2"], timeout=20)
    assert host.states() == {rank.pid: "parked"}
    assert host.used_bytes(0) == host.used_bytes(1) == 0
    other.do("release")
    with pytest.raises(RankError, match="lease them together"):
        rank.do("acquire", groups="g1", timeout=5)
    rank.do("acquire", groups=["g1", "g2"], timeout=20)
    assert rank.do("digest") == digest


def test_leases_nested_against_the_order_are_refused_where_they_would_wait_for_ever(
    host: Host,
) -> None:
    one, other = host.rank("a"), host.rank("b")
    one.do("acquire", groups="g1", timeout=20)
    other.do("acquire", groups="g2", timeout=20)
    waiting = one.start("acquire", groups="g2", timeout=20)
    until(lambda: host.group("g2")["waiters"], "it waits")
    with pytest.raises(RankError, match="g1 must be waited for, comes before g2"):
        other.do("acquire", groups="g1", timeout=20)
    other.do("release")
    waiting.wait()
