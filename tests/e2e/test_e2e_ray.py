"""Experiments on Ray: a driver without device state takes turns for actors that call nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import HERE, MIB, Host, Rank, path_with, until

LIMIT_S = 90.0
ACTORS = 2
#: Of each actor; those of two experiments do not fit on a device of 64 MiB.
STATE_MIB = 16


@pytest.fixture
def experiments(host: Host) -> Iterator[list[Rank]]:
    """Two drivers of one user, each with a cluster of its own: one has its job's id in the
    environment, one tells it to the daemon.
    """
    host.directory.joinpath("ray").mkdir()
    drivers = [
        host.rank(
            name,
            program="ray_driver.py",
            told=name == "e2",
            RAY_ROOT=str(host.directory / "ray"),
            RAY_USAGE_STATS_ENABLED="0",
            PYTHONPATH=path_with(HERE),
        )
        for name in ("e1", "e2")
    ]
    yield drivers
    # What Ray starts for a driver is to end with it, and would take its time.
    family = [child for d in drivers for child in psutil.Process(d.pid).children(recursive=True)]
    for driver in drivers:
        driver.kill()
    for process in family:
        process.kill()
    gone, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert len(gone) == len(family)


@pytest.mark.timeout(180)
def test_two_ray_experiments_of_one_user_are_two_jobs_that_alternate(
    host: Host, experiments: list[Rank]
) -> None:
    first, second = experiments
    starting = [driver.start("start", count=ACTORS) for driver in experiments]
    pids = {d.job: a.wait(LIMIT_S) for d, a in zip(experiments, starting, strict=True)}
    for pid in pids["e1"]:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"TSLICE_JOB_ID" not in environment, "its own environment tells nothing any more"

    expected = {}
    for seed, driver in enumerate(experiments):
        driver.do("acquire", groups="g1", timeout=30)
        expected[driver.job] = driver.do("load", limit_s=LIMIT_S, mib=STATE_MIB, seed=10 * seed)
        driver.do("release")
    assert len({digest for digests in expected.values() for digest in digests}) == 2 * ACTORS

    present, absent = second, first
    for _ in range(3):
        assert_alone(host, pids[present.job], pids[absent.job])
        present, absent = absent, present
        lease = present.do("acquire", groups="g1", timeout=30)
        assert lease["restored"] is True
        assert present.do("digests", limit_s=LIMIT_S) == expected[present.job]
        present.do("release")
    jobs = {rank["pid"]: rank["job"]["id"] for rank in host.ask("ps")["ranks"]}
    assert jobs == {pid: job for job, found in pids.items() for pid in found}
    assert os.getuid() == host.ask("ps")["ranks"][0]["uid"]


def assert_alone(host: Host, present: list[int], absent: list[int]) -> None:
    """Checks that all of one experiment is on the device, and nothing of the other."""
    expected = dict.fromkeys(present, "running") | dict.fromkeys(absent, "parked")
    until(lambda: host.states() == expected, "all actors are known and where they belong")
    assert ACTORS * STATE_MIB * MIB <= host.used_bytes() < (ACTORS + 1) * STATE_MIB * MIB
