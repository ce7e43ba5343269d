"""Hosts as a Slurm site has them: no group is configured, so each host is one; and a login node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import RankError, until
from net_hosts import Gang, Hosts, at, kill_in_each_step, linked_hosts, wait_for

#: Two of these do not fit on a device of 64 MiB.
STATE_MIB = 40
#: The login node has no driver, and no devices.
BOTH = ("n1", "n2")
LOGIN = {"daemon": {"nvml_library": "/nowhere"}}


@pytest.fixture(scope="module")
def cluster(softcuda_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    names, directory = ("n1", "n2", "login"), tmp_path_factory.mktemp("cluster")
    with linked_hosts(softcuda_build, directory, *names, special={"login": LOGIN}) as hosts:
        yield hosts


@pytest.fixture
def hosts(cluster: Hosts) -> Iterator[Hosts]:
    """Two hosts and a login node for all tests here: each leaves them with nobody on them."""
    yield cluster
    cluster.rest()


def test_from_a_login_node_all_hosts_are_seen_and_leased(hosts: Hosts) -> None:
    login = hosts["login"]
    trainer = hosts["n2"].rank("trainer")
    trainer.do("initialise", group="n2", mib=8, seed=1)
    driver = login.rank("driver")
    assert driver.do("acquire", groups="n2", timeout=20)["state"] == "held"
    assert hosts["n2"].states() == {trainer.pid: "parked"}
    shown = json.loads(at(login, "status", "--all", "--json"))
    assert [other["host"] for other in shown["hosts"]] == ["n1", "n2"]
    for other in shown["hosts"]:
        (group,) = (g for g in other["status"]["groups"] if g["name"] == other["host"])
        assert len(group["devices"]) == 2
        holder = group["holder"] and group["holder"]["id"]
        assert holder == ("driver" if other["host"] == "n2" else None)
    alone = json.loads(at(login, "status", "--host", "n2", "--json"))["status"]
    assert alone["host"] == "n2"
    assert [job["job"]["id"] for job in alone["jobs"]] == ["driver", "trainer"]
    assert "on n2, pid" in at(login, "status", "--host", "n2")
    at(login, "status", "--host", "n4", status=3)


def test_a_host_without_devices_is_no_group_to_be_leased(hosts: Hosts) -> None:
    for name in ("n1", "login"):
        with pytest.raises(RankError) as caught:
            hosts[name].rank("job").do("acquire", groups="login", timeout=5)
        assert caught.value.code == "unknown_group"


def gang(hosts: Hosts, job: str, driver: str) -> Gang:
    """Returns a job on both hosts, which have arbiters of their own."""
    return Gang(job, hosts[driver], [hosts[name] for name in BOTH], group=BOTH)


@pytest.mark.parametrize("driver", ["n1", "n2", "login"])
def test_jobs_that_lease_hosts_with_different_arbiters_alternate_and_keep_their_state_g12(
    hosts: Hosts, driver: str
) -> None:
    jobs = [gang(hosts, f"{job}-{driver}", driver).load(mib=STATE_MIB) for job in "ab"]
    tokens = []
    for comes, leaves in (jobs, jobs[::-1], jobs):
        lease = comes.acquire()
        tokens.append(lease["tokens"])
        assert lease["restored"] is True
        expected = dict.fromkeys(comes.pids, "running") | dict.fromkeys(leaves.pids, "parked")
        assert hosts.states() == expected
        assert comes.look() == comes.digests
        comes.release()
    for name in BOTH:
        assert tokens[0][name] < tokens[1][name] < tokens[2][name]


def test_a_job_on_both_hosts_and_jobs_on_one_take_turns(hosts: Hosts) -> None:
    both = gang(hosts, "both", "login").load()
    single = [Gang(f"on-{name}", hosts[name], [hosts[name]], group=name).load() for name in BOTH]
    both.turn()
    for job in single:
        job.turn()
    assert hosts.states() == {
        **dict.fromkeys(both.pids, "parked"),
        **dict.fromkeys(single[0].pids | single[1].pids, "running"),
    }
    both.turn()
    # One that holds one of them keeps the whole of the lease from others, and no other host.
    single[0].acquire()
    asked = both.ask()
    until(lambda: hosts["n1"].group("n1")["waiters"] == 1, "it waits for the first")
    single[1].turn()
    assert not asked.is_over()
    single[0].release()
    assert asked.wait()["state"] == "held"
    assert both.look() == both.digests


def test_leases_in_crossed_orders_over_arbiters_do_not_block_each_other(hosts: Hosts) -> None:
    orders = {"a": ["n1", "n2"], "b": ["n2", "n1"], "c": ["n1"], "d": ["n2"]}
    places = dict(zip(orders, ("n1", "n2", "login", "login"), strict=True))
    ranks = {name: hosts[places[name]].rank(name) for name in orders}
    running = [rank.start("train", groups=orders[n], turns=10) for n, rank in ranks.items()]
    assert [answer.wait() for answer in running] == [10] * 4


@pytest.mark.parametrize("killed", BOTH)
def test_an_arbiter_whose_daemon_is_killed_while_others_reserve_of_it_forgets_nothing_g8(
    hosts: Hosts, killed: str
) -> None:
    jobs = [gang(hosts, f"{job}-{killed}", "login").load() for job in "ab"]
    jobs[0].acquire()
    asked = jobs[1].ask()
    until(lambda: hosts["n1"].group("n1")["waiters"] == 1, "it is queued")
    hosts[killed].kill_daemon()
    hosts[killed].start_daemon()
    hosts.await_links()
    assert not asked.is_over()
    assert jobs[0].look() == jobs[0].digests
    jobs[0].release()
    assert asked.wait()["state"] == "held"
    assert jobs[1].look() == jobs[1].digests
    jobs[1].release()
    jobs[0].turn()


def test_a_host_that_leased_elsewhere_and_is_silent_keeps_it_until_it_is_there_again(
    hosts: Hosts,
) -> None:
    both = gang(hosts, "both", "n1").load()
    lease = both.acquire()
    waiter = hosts["n2"].rank("waiter")
    asked = waiter.start("acquire", groups="n2", timeout=60)
    until(lambda: hosts["n2"].group("n2")["waiters"] == 1, "it waits")
    hosts.network.isolate("n1")
    wait_for(hosts["n2"], "n1", "lost")
    both.release()
    assert both.look() == both.digests, "all run on"
    assert not asked.is_over()
    hosts.network.heal()
    assert asked.wait()["tokens"]["n2"] > lease["tokens"]["n2"]
    waiter.do("release")
    both.turn()


@pytest.mark.parametrize("killed", BOTH, ids=["the lead's", "the lender's"])
def test_a_daemon_that_is_killed_in_any_step_of_a_move_over_arbiters_takes_nothing_g8(
    hosts: Hosts, killed: str
) -> None:
    comes, leaves = (gang(hosts, f"{job}-{killed}", "login").load() for job in ("x", "y"))
    kill_in_each_step(hosts, comes, leaves, killed=hosts[killed], slow=hosts["n2"])


def test_a_host_that_leased_elsewhere_and_boots_anew_has_nothing_there_any_more(
    hosts: Hosts,
) -> None:
    both = gang(hosts, "both", "n1").load()
    lease = both.acquire()
    waiter = hosts["n2"].rank("waiter")
    asked = waiter.start("acquire", groups="n2", timeout=60)
    until(lambda: hosts["n2"].group("n2")["waiters"] == 1, "it waits")
    hosts["n1"].lose_power()
    wait_for(hosts["n2"], "n1", "lost")
    assert not asked.is_over(), "silence proves nothing"
    hosts["n1"].boot()
    assert asked.wait()["tokens"]["n2"] > lease["tokens"]["n2"]
    assert hosts["n2"].states() == {both.ranks["n2"].pid: "parked"}


def test_a_job_of_which_a_lender_boots_anew_is_told_and_can_go_on_with_what_is_left(
    hosts: Hosts,
) -> None:
    both = gang(hosts, "both", "login").load()
    both.acquire()
    hosts["n2"].lose_power()
    wait_for(hosts["n1"], "n2", "lost")
    assert both.driver.do("look")["state"] == "held", "silence proves nothing"
    hosts["n2"].boot()
    until(lambda: hosts["n1"].events("host_died"), "it is known")
    assert hosts["n1"].states() == {both.ranks["n1"].pid: "running"}
    both.release()
    again = both.driver.do("acquire", groups="n1", timeout=20)
    assert again["state"] == "held"
    assert both.ranks["n1"].do("digest") == both.digests["n1"]
