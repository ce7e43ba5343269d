"""Pauses and turns that nobody asked for, of ranks on another host than who moves them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from harness import Rank, until
from net_hosts import Hosts, at, linked_hosts

SETTINGS = {
    "groups.all": {"devices": ["n1:0", "n2:0"], "max_hold_s": 0.5},
    "limits": {"hold_warning_s": 0.2, "stranger_turn_s": 0.5},
    "scan": {"strangers": "freeze", "interval_s": 0.2},
}
HELD_S = 1.2


@pytest.fixture(scope="module")
def cluster(softcuda_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("cluster")
    with linked_hosts(softcuda_build, directory, "n1", "n2", settings=SETTINGS) as hosts:
        yield hosts


@pytest.fixture
def hosts(cluster: Hosts) -> Iterator[Hosts]:
    """Two hosts for all tests here: each leaves them with nobody on them."""
    yield cluster
    cluster.rest()


def far_rank(hosts: Hosts, job: str, watchdog_s: str) -> Rank:
    """Returns a rank with device state on the host that is not the arbiter's."""
    rank = hosts["n2"].rank(job, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=watchdog_s)
    rank.do("initialise", group="all", mib=8, seed=3)
    return rank


def others_hold(hosts: Hosts) -> None:
    """Lets another job hold the group for a while, so that its arbiter knows of such holds."""
    other = hosts["n1"].rank("other")
    other.do("acquire", groups="all", timeout=20)
    until(lambda: (hosts["n1"].group("all")["lease_since_s"] or 0) > HELD_S, "it was held for long")
    other.do("release")
    other.kill()


def test_a_lease_is_not_taken_back_if_a_watchdog_of_a_rank_elsewhere_would_not_outlast_it(
    hosts: Hosts,
) -> None:
    others_hold(hosts)
    rank = far_rank(hosts, "short", "1")
    holder = hosts["n1"].rank("short")
    holder.do("acquire", groups="all", timeout=20)
    asked = hosts["n2"].rank("waiter").start("acquire", groups="all", timeout=60)
    refused = until(lambda: hosts["n1"].events("pause_refused"), "it is left alone")[0]
    assert (refused["rank"], refused["limit_s"]) == (f"n2:{rank.pid}", 1.0)
    assert holder.do("look")["state"] == "held"
    assert not asked.is_over()
    # What it does itself is its own affair; and who is away for too long is named.
    holder.do("release")
    assert asked.wait()["state"] == "held"
    assert hosts["n2"].states() == {rank.pid: "parked"}
    named = until(lambda: hosts["n1"].events("watchdog"), "it is named")[0]
    assert (named["rank"], named["limit_s"]) == (f"n2:{rank.pid}", 1.0)
    text = f"its process {rank.pid} on n2 waits for 1 s"
    until(lambda: text in hosts["n1"].log.read_text(), "it is in its client's log")


def test_a_stranger_on_a_host_that_is_not_the_arbiters_leaves_and_gets_turns(hosts: Hosts) -> None:
    stranger = hosts["n2"].rank()
    stranger.do("context")
    stranger.do("fill", mib=8, seed=5)
    digest = stranger.do("digest")
    name = f"stranger-{stranger.pid}-n2"
    until(lambda: hosts["n1"].job(name), "the arbiter knows of it")
    holder = hosts["n1"].rank("holder")
    holder.do("acquire", groups="all", timeout=20)
    assert hosts["n2"].states() == {stranger.pid: "parked"}
    until(partial(waits, hosts, name), "it waits for a turn")
    assert name in at(hosts["n1"], "status")
    holder.do("release")
    until(lambda: hosts["n1"].group("all")["unasked"], "it is its turn")
    assert stranger.do("digest") == digest
    assert holder.do("acquire", groups="all", timeout=20)["state"] == "held"
    stranger.kill()
    until(lambda: hosts["n1"].job(name) == {}, "it is forgotten with its process")


def waits(hosts: Hosts, job: str) -> bool:
    return job in [entry["job"]["id"] for entry in hosts["n1"].group("all")["queue"]]
