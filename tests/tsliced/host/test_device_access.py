"""What the cgroups of a process keep from it (G10), in real cgroups of this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from host_trees import FakeHost

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.cgroups import Cgroups
from tsliced.host.device_access import AccessUnknownError, DeviceAccess
from tsliced.host.processes import identify

D0, D1 = DeviceId("GPU-0"), DeviceId("GPU-1")
DEVICES = Path("/sys/fs/cgroup/devices")
LIMIT_S = 20.0
#: NVIDIA's.
MAJOR = 195

needs_cgroups = pytest.mark.skipif(
    os.geteuid() != 0 or not (DEVICES / "devices.list").exists(),
    reason="needs root and version 1 of the devices cgroup",
)


@pytest.fixture
def nodes(tmp_path: Path) -> Mapping[DeviceId, str]:
    """Device files as NVIDIA's driver has them."""
    nodes = {D0: str(tmp_path / "nvidia0"), D1: str(tmp_path / "nvidia1")}
    for minor, node in enumerate(nodes.values()):
        os.mknod(node, 0o20666, os.makedev(MAJOR, minor))
    return nodes


@pytest.fixture
def confined(tmp_path: Path) -> Iterator[Path]:
    """A cgroup as Slurm makes one: it may open everything but the device that another job has."""
    directory = DEVICES / f"tsliced-test-{os.getpid()}"
    directory.mkdir()
    (directory / "devices.deny").write_text(f"c {MAJOR}:1 rwm")
    yield directory
    directory.rmdir()


@contextmanager
def process_in(*cgroups: Path) -> Iterator[ProcessId]:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        for directory in cgroups:
            (directory / "cgroup.procs").write_text(str(sleeper.pid))
        process = identify(sleeper.pid)
        assert process is not None
        yield process
    finally:
        sleeper.kill()
        sleeper.wait(LIMIT_S)


async def denied(access: DeviceAccess, process: ProcessId) -> frozenset[DeviceId]:
    async with asyncio.timeout(LIMIT_S):
        await access.learn(process)
    found = access.denied(process)
    assert found is not None
    return found


def look(nodes: Mapping[DeviceId, str], process: ProcessId) -> frozenset[DeviceId]:
    async def run() -> frozenset[DeviceId]:
        return await denied(DeviceAccess(nodes), process)

    return asyncio.run(run())


@needs_cgroups
def test_a_device_that_was_taken_from_a_cgroup_is_kept_from_its_processes_g10(
    nodes: Mapping[DeviceId, str], confined: Path
) -> None:
    listed = (confined / "devices.list").read_text().strip()
    assert listed == "a *:* rwm", "which is why the list is not what is asked"
    with process_in(confined) as process:
        assert look(nodes, process) == {D1}
    with process_in() as free:
        assert look(nodes, free) == frozenset()


@needs_cgroups
def test_a_cgroup_that_may_open_nothing_but_what_was_given_g10(
    nodes: Mapping[DeviceId, str], confined: Path
) -> None:
    (confined / "devices.deny").write_text("a")
    (confined / "devices.allow").write_text(f"c {MAJOR}:1 rw")
    with process_in(confined) as process:
        assert look(nodes, process) == {D0}


@needs_cgroups
def test_what_a_cgroup_lacks_its_children_lack_too_g10(
    nodes: Mapping[DeviceId, str], confined: Path
) -> None:
    child = confined / "step_0"
    child.mkdir()
    try:
        with process_in(child) as process:
            assert look(nodes, process) == {D1}
    finally:
        child.rmdir()


@needs_cgroups
def test_a_cgroup_is_looked_at_once_for_all_who_ask_and_again_when_that_is_old(
    nodes: Mapping[DeviceId, str], confined: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    real = asyncio.create_subprocess_exec

    async def count(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(command)
        return await real(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", count)

    async def run() -> None:
        access = DeviceAccess(nodes, max_age_s=600)
        with process_in(confined) as one, process_in(confined) as other:
            assert access.denied(one) is None, "it is not known yet"
            await asyncio.gather(*(denied(access, p) for p in (one, other, one, other)))
            assert await denied(access, other) == {D1}
        assert len(started) == 1
        access = DeviceAccess(nodes, max_age_s=0)
        with process_in(confined) as one:
            await access.learn(one)
            await access.learn(one)
        assert len(started) == 3

    asyncio.run(run())


@needs_cgroups
def test_a_frozen_cgroup_is_not_waited_for_and_the_next_is_looked_at(
    nodes: Mapping[DeviceId, str], confined: Path
) -> None:
    unified = Path("/sys/fs/cgroup/unified")
    if not (unified / "cgroup.procs").exists():
        pytest.skip("needs version 2 beside it")
    frozen = unified / f"tsliced-test-{os.getpid()}"
    frozen.mkdir()
    try:
        (frozen / "cgroup.freeze").write_text("1")

        async def run() -> None:
            access = DeviceAccess(nodes, limit_s=0.5)
            with process_in(frozen) as process:
                with pytest.raises(AccessUnknownError, match=r"within 0\.5 s"):
                    await denied(access, process)
                (frozen / "cgroup.freeze").write_text("0")
                assert await denied(DeviceAccess(nodes), process) == frozenset()

        asyncio.run(run())
    finally:
        _remove(frozen)


def _remove(cgroup: Path) -> None:
    """Remove a cgroup as soon as the last process in it is reaped."""
    end = time.monotonic() + LIMIT_S
    while cgroup.exists():
        with suppress(OSError):
            cgroup.rmdir()
        assert time.monotonic() < end, f"{cgroup} does not become empty"
        time.sleep(0.01)


def cgroups_of(tmp_path: Path, *, visible: bool) -> Cgroups:
    """A host on which a process is in a cgroup where it cannot be looked into."""
    host = FakeHost(tmp_path / "host")
    if visible:
        directory = host.mount("devices") / "job"
        directory.mkdir(parents=True)
        # Not even root may write here, as into cgroups that the daemon's sandbox protects.
        (directory / "cgroup.procs").symlink_to("/proc/sys/kernel/ostype")
    host.process(7, cgroups="5:devices:/job\n")
    return Cgroups(host.proc)


@needs_cgroups
@pytest.mark.parametrize("visible", [True, False])
def test_where_it_cannot_be_found_out_nothing_is_kept_or_everything_as_configured_g10(
    nodes: Mapping[DeviceId, str], tmp_path: Path, visible: bool
) -> None:
    async def run() -> None:
        cgroups, process = cgroups_of(tmp_path, visible=visible), ProcessId(7, 700)
        access = DeviceAccess(nodes, cgroups=cgroups)
        assert await denied(access, process) == frozenset()
        assert access.problem is not None
        strict = DeviceAccess(nodes, cgroups=cgroups, required=True)
        with pytest.raises(AccessUnknownError, match="cannot be found out"):
            await denied(strict, process)

    asyncio.run(run())


@needs_cgroups
def test_of_a_process_that_is_gone_nothing_is_known(nodes: Mapping[DeviceId, str]) -> None:
    with process_in() as process:
        pass
    with pytest.raises(AccessUnknownError, match="gone"):
        look(nodes, process)


def test_where_there_are_no_device_files_nothing_can_be_kept() -> None:
    process = identify(os.getpid())
    assert process is not None
    assert look({D0: "/nowhere/nvidia0"}, process) == frozenset()
