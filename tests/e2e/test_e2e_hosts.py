"""Jobs over several hosts: real daemons, clients and ranks, in networks of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from harness import MIB, RankError, until
from net_hosts import Gang, Hosts, NetHost, at, linked_hosts

#: Two of these do not fit on a device of 64 MiB.
STATE_MIB = 40
SETTINGS = {
    "groups.all": {"devices": ["n1:0", "n2:0", "n3:0"], "order": 1},
    "groups.single": {"devices": ["n3:1"], "order": 2},
    "groups.pair": {"devices": ["n1:1", "n2:1"], "order": 3},
}


@pytest.fixture(scope="module")
def cluster(softcuda_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("cluster")
    names = ("n1", "n2", "n3")
    with linked_hosts(softcuda_build, directory, *names, auth="tls", settings=SETTINGS) as hosts:
        yield hosts


@pytest.fixture
def hosts(cluster: Hosts) -> Iterator[Hosts]:
    """Three hosts for all tests here: each leaves them with nobody on them."""
    yield cluster
    cluster.rest()


@pytest.mark.parametrize("driver", ["n1", "n2"])
def test_two_jobs_over_three_hosts_alternate_and_keep_their_state_g12(
    hosts: Hosts, driver: str
) -> None:
    """The driver is on the arbiter's host, or on another."""
    first = Gang(f"a-{driver}", hosts[driver], hosts.all, group="all").load(mib=STATE_MIB)
    second = Gang(f"b-{driver}", hosts[driver], hosts.all, group="all").load(mib=STATE_MIB)
    tokens = []
    comes, leaves = first, second
    for _ in range(3):
        lease = comes.acquire()
        tokens.append(lease["tokens"]["all"])
        assert lease["restored"] is True
        assert 0 < lease["switch_s"] <= lease["waited_s"]
        expected = dict.fromkeys(comes.pids, "running") | dict.fromkeys(leaves.pids, "parked")
        assert hosts.states() == expected
        for host in hosts.all:
            assert STATE_MIB * MIB <= host.used_bytes() < (STATE_MIB + 8) * MIB
        assert comes.look() == comes.digests
        comes.release()
        comes, leaves = leaves, comes
    assert tokens == sorted(set(tokens)), "each grant has a higher token"


def test_a_round_of_a_client_for_each_rank_is_one_turn_on_all_hosts_g12(hosts: Hosts) -> None:
    """As torchrun starts them: every rank asks, each at the daemon of its own host."""
    jobs = []
    for job in ("a", "b"):
        ranks = [host.rank(job, WORLD_SIZE="3") for host in hosts.all]
        asked = [rank.start("acquire", groups="all", timeout=20) for rank in ranks[:2]]
        until(partial(gathers, hosts["n1"], job), "the round gathers")
        assert not any(answer.is_over() for answer in asked), "one rank has not asked yet"
        asked.append(ranks[2].start("acquire", groups="all", timeout=20))
        assert len({answer.wait()["tokens"]["all"] for answer in asked}) == 1
        for number, rank in enumerate(ranks):
            rank.do("context")
            rank.do("fill", mib=STATE_MIB, seed=number)
        jobs.append((ranks, [rank.do("digest") for rank in ranks]))
        for rank in ranks:
            rank.do("release")
    for ranks, digests in jobs * 2:
        asked = [rank.start("acquire", groups="all", timeout=20) for rank in ranks]
        assert all(answer.wait()["restored"] for answer in asked)
        assert [rank.do("digest") for rank in ranks] == digests
        for rank in ranks:
            rank.do("release")


def gathers(host: NetHost, job: str) -> bool:
    return bool(host.job(job).get("gathering"))


def test_a_driver_on_a_host_outside_of_the_group_has_its_ranks_moved(hosts: Hosts) -> None:
    """As with Ray: the driver is where no device of the group is, its actors call nothing."""
    both = [hosts["n1"], hosts["n2"]]
    jobs = [
        Gang(job, hosts["n3"], both, group="pair", device=1).load(mib=STATE_MIB) for job in "ab"
    ]
    for job in jobs * 2:
        assert job.turn()["restored"] is True
    # A client of n3 is none of its ranks: nothing of it is known there but who holds what.
    assert hosts["n3"].states() == {}


def test_a_release_without_a_waiter_moves_nothing_and_stays_one_round_trip_g7(
    hosts: Hosts,
) -> None:
    job = Gang("a", hosts["n2"], hosts.all, group="all").load()
    before = {host.name: len(host.operations()) for host in hosts.all}
    for _ in range(10):
        lease = job.acquire()
        assert (lease["restored"], lease["switch_s"]) == (False, 0.0)
        job.release()
    assert {host.name: len(host.operations()) for host in hosts.all} == before


def test_an_acquire_that_ends_in_a_time_out_on_another_host_leaves_nothing_g5(
    hosts: Hosts,
) -> None:
    holder = hosts["n1"].rank("holder")
    holder.do("acquire", groups="all")
    waiter = hosts["n2"].rank("waiter")
    with pytest.raises(RankError) as caught:
        waiter.do("acquire", groups="all", timeout=1)
    assert caught.value.code == "timeout"
    assert hosts["n1"].group("all")["waiters"] == 0
    holder.do("release")
    assert hosts["n3"].rank("next").do("acquire", groups="all", timeout=5)["state"] == "held"


def test_inside_of_a_lease_nobody_waits_against_the_order_at_any_host(
    hosts: Hosts,
) -> None:
    """`all` is arbitrated by n1, `single` by n3, and `pair`, which comes after both, by n1."""
    nested, other = hosts["n2"].rank("nested"), hosts["n3"].rank("other")
    nested.do("acquire", groups="pair", timeout=20)
    inner = nested.do("acquire", groups=["all", "single"], timeout=20)
    assert inner["state"] == "held", "nothing has to be waited for"
    nested.do("release")
    other.do("acquire", groups="single", timeout=20)
    with pytest.raises(RankError) as caught:
        nested.do("acquire", groups=["all", "single"], timeout=20)
    assert caught.value.code == "would_deadlock"
    assert "comes before pair" in str(caught.value)
    waits = other.start("acquire", groups="pair", timeout=20)
    until(lambda: hosts["n1"].group("pair")["waiters"] == 1, "who is in the order waits")
    nested.do("release")
    assert waits.wait()["state"] == "held"


def test_one_host_shows_who_holds_and_who_waits_on_all(hosts: Hosts) -> None:
    holder, waiter = hosts["n2"].rank("holder"), hosts["n3"].rank("waiter")
    token = holder.do("acquire", groups="all")["tokens"]["all"]
    waiter.start("acquire", groups="all", timeout=60)
    until(lambda: hosts["n1"].group("all")["waiters"] == 1, "it is queued")
    shown = json.loads(at(hosts["n3"], "status", "--all", "--json"))
    arbiter = next(other for other in shown["hosts"] if other["host"] == "n1")["status"]
    group = next(group for group in arbiter["groups"] if group["name"] == "all")
    assert (group["holder"]["id"], group["token"]) == ("holder", token)
    assert [entry["job"]["id"] for entry in group["queue"]] == ["waiter"]
    assert group["hosts"] == ["n1", "n2", "n3"]
