"""Hosts as a Slurm site has them: no group is configured, so each host is one; and a login node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import RankError
from net_hosts import Hosts, at, linked_hosts

#: The login node has no driver, and no devices.
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
