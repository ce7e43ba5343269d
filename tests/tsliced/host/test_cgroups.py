"""Where processes are in cgroup hierarchies."""

from __future__ import annotations

import os
from pathlib import Path

from host_trees import FakeHost

from tsliced.host.cgroups import UNIFIED, Cgroups


def test_this_process_is_found_in_the_hierarchies_of_this_host() -> None:
    cgroups = Cgroups()
    paths = cgroups.paths(os.getpid())
    for controller in ("memory", UNIFIED):
        if controller in paths and cgroups.directory(controller, "/"):
            directory = cgroups.directory(controller, paths[controller])
            assert directory is not None
            members = Path(directory, "cgroup.procs").read_text().split()
            assert str(os.getpid()) in members


def test_paths_of_both_versions_are_read_from_one_file(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    lines = "6:freezer:/slurm/a\n5:cpu,cpuacct:/b:c\n1:name=systemd:/d\n0::/e (deleted)\n"
    host.process(7, cgroups=lines)
    assert Cgroups(host.proc).paths(7) == {
        "freezer": "/slurm/a",
        "cpu": "/b:c",
        "cpuacct": "/b:c",
        "name=systemd": "/d",
        UNIFIED: "/e",
    }


def test_a_process_that_is_gone_has_no_paths(tmp_path: Path) -> None:
    assert Cgroups(FakeHost(tmp_path).proc).paths(7) == {}


def test_the_lineage_of_a_cgroup_ends_at_the_mounts_root(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "with blank")
    point = host.mount("memory")
    assert Cgroups(host.proc).lineage("memory", "/a/b") == [
        f"{point}/a/b",
        f"{point}/a",
        f"{point}",
    ]
    assert Cgroups(host.proc).lineage("memory", "/") == [f"{point}"]


def test_a_bind_mount_shows_only_what_is_below_its_root(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    point = host.mount("memory", root="/docker/1")
    cgroups = Cgroups(host.proc)
    assert cgroups.lineage("memory", "/docker/1/job") == [f"{point}/job", f"{point}"]
    assert cgroups.lineage("memory", "/docker/12") == []
    assert cgroups.directory("memory", "/docker/1") == f"{point}"


def test_what_is_outside_of_our_namespace_is_not_mistaken_for_its_root(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.mount("")
    assert Cgroups(host.proc).lineage(UNIFIED, "/../../other") == []


def test_a_hierarchy_that_is_mounted_later_is_found(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    cgroups = Cgroups(host.proc)
    assert cgroups.directory("freezer", "/slurm") is None
    point = host.mount("freezer")
    assert cgroups.directory("freezer", "/slurm") == f"{point}/slurm"


def test_the_whole_hierarchy_is_preferred_to_a_part_of_it(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.mount("cpu,memory", root="/part")
    point = host.mount("memory")
    assert Cgroups(host.proc).directory("memory", "/x") == f"{point}/x"
