"""The Slurm jobs of a host: what is kept of them, and where Slurm has put them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from host_trees import FakeHost

from tsliced.host.allocations import FILE_NAME, Allocation, Allocations, find_sentinel, is_tracked
from tsliced.host.cgroups import Cgroups

UID = 1000
PLAIN = Allocation(id="7", uid=UID, nodes=("n1", "n2"), node="n1", account="rl", tickets=1)


def test_what_is_known_outlives_the_daemon(tmp_path: Path) -> None:
    first = Allocations(tmp_path)
    first.put(PLAIN)
    first.put(Allocation(id="8", uid=UID))
    first.end("8")
    assert list(Allocations(tmp_path)) == [PLAIN]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"jobs": []}',
        '{"boot_id": "of another boot", "jobs": [{"id": "7", "uid": 1000, "nodes": []}]}',
    ],
)
def test_what_another_boot_left_or_makes_no_sense_is_forgotten(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    assert list(Allocations(tmp_path)) == []


def test_a_file_of_a_later_version_is_read_as_far_as_it_is_understood(tmp_path: Path) -> None:
    Allocations(tmp_path).put(PLAIN)
    content = json.loads((tmp_path / FILE_NAME).read_text())
    content["jobs"][0]["colour"] = "green"
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    assert list(Allocations(tmp_path)) == [PLAIN]


def test_a_component_is_of_the_job_that_leads_it() -> None:
    changes: list[None] = []
    known = Allocations()
    known.on_change = lambda: changes.append(None)
    known.put(PLAIN)
    known.put(Allocation(id="8", uid=UID, leader="7"))
    known.put(Allocation(id="8", uid=UID, leader="7"))
    assert len(changes) == 2, "what was known already changes nothing"
    assert [known.leader_of(id) for id in ("7", "8", "9")] == ["7", "7", "9"]
    assert [each.id for each in known.of_job("7", UID)] == ["7", "8"]
    assert [each.id for each in known.of_job("7.sweep", UID)] == ["7", "8"]
    assert known.of_job("7", UID + 1) == []
    assert (known.account_of("7"), known.account_of("9")) == ("rl", None)


#: Where several versions and builds of Slurm have the external step of job 7, and who is in it.
PLACES = [
    "freezer/slurm/uid_1000/job_7/step_extern",
    "freezer/slurm_n1/uid_1000/job_7/step_extern",
    "unified/system.slice/slurmstepd.scope/job_7/step_extern/user/task_special",
    "unified/system.slice/n1_slurmstepd.scope/job_7/step_extern/user/task_special",
]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.mount("freezer")
    host.mount("")
    return host


def put(host: FakeHost, place: str, pid: int, name: str = "sleep") -> None:
    """Put a process into a cgroup."""
    directory = host.cgroup(host.root / "cgroup" / place)
    (directory / "cgroup.procs").write_text(f"{pid}\n")
    host.process(pid, name=name)
    host.write(f"proc/{pid}/comm", f"{name}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="the sentinel is a process of root")
@pytest.mark.parametrize("place", PLACES)
def test_the_sleeping_process_of_the_external_step_is_found_wherever_it_is(
    host: FakeHost, place: str
) -> None:
    cgroups = Cgroups(host.proc)
    assert not is_tracked(PLAIN, cgroups)
    assert find_sentinel(PLAIN, cgroups) is None
    put(host, place, 70)
    assert is_tracked(PLAIN, cgroups)
    assert find_sentinel(PLAIN, cgroups) == 70


@pytest.mark.skipif(os.geteuid() != 0, reason="the sentinel is a process of root")
def test_neither_other_processes_nor_those_of_other_nodes_and_jobs_are_taken_for_it(
    host: FakeHost,
) -> None:
    put(host, "freezer/slurm_n1/uid_1000/job_7/step_extern", 70, name="sshd")
    put(host, "freezer/slurm_n2/uid_1000/job_7/step_extern", 71)
    put(host, "freezer/slurm_n1/uid_1000/job_70/step_extern", 72)
    put(host, "freezer/slurm_n1/uid_1001/job_7/step_extern", 73)
    put(host, "freezer/slurm_n1/uid_1000/job_7/step_0", 74)
    assert find_sentinel(PLAIN, Cgroups(host.proc)) is None


def test_a_process_of_a_user_is_no_sentinel(host: FakeHost) -> None:
    put(host, PLACES[0], 70)
    if os.geteuid() == 0:
        os.chown(f"{host.proc}/70", UID, UID)
    assert find_sentinel(PLAIN, Cgroups(host.proc)) is None
