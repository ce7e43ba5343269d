"""Other snapshot backends than the driver's own, each under a real daemon with two jobs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alternating import STATE_MIB, assert_alternates
from cuda_utility import write_utility
from harness import HERE, Host, MakeHost, RankError, Settings, until

EXAMPLE = HERE.parent / "example_backend"

#: What a configured program looks like: the driver's utility, with other words for the states.
PARK = """#!/bin/sh
utility={utility}
case $1 in
freeze) exec $utility --action lock --pid $2 --timeout $(printf %.0f ${{3}}e3) ;;
out) exec $utility --action checkpoint --pid $2 ;;
in) exec $utility --action restore --pid $2 ;;
thaw) exec $utility --action unlock --pid $2 ;;
state) state=$($utility --get-state --pid $2) || exit 69
    case $state in locked) echo frozen ;; checkpointed) echo parked ;; *) echo $state ;; esac ;;
esac
"""


def cli(host: Host, softcuda: Path, calls: str) -> Settings:
    program = write_utility(host, softcuda, calls=calls)
    # The daemon has no use for the driver: this one has no checkpoint functions.
    library = softcuda.with_name("softcuda-550") / "libcuda.so.1"
    return {
        "daemon": {"backend": "cli", "cuda_library": str(library)},
        "backends.cli": {"program": str(program), "calls": calls},
    }


def command(host: Host, softcuda: Path) -> Settings:
    path = host.directory / "park"
    path.write_text(PARK.format(utility=write_utility(host, softcuda, calls="actions")))
    path.chmod(0o755)
    return {
        "daemon": {"backend": "command"},
        "backends.command": {
            "freeze": [str(path), "freeze", "{pid}", "{timeout_s}"],
            "snapshot": [str(path), "out", "{pid}"],
            "restore": [str(path), "in", "{pid}"],
            "thaw": [str(path), "thaw", "{pid}"],
            "state": [str(path), "state", "{pid}"],
            "seen_by_nvml": True,
        },
    }


@pytest.fixture(params=["toggle", "command"])
def other_host(request: pytest.FixtureRequest, make_host: MakeHost, softcuda_build: Path) -> Host:
    """A host whose daemon has been started anew with another backend."""
    host = make_host()
    assert host.stop_daemon() == 0
    if request.param == "command":
        host.settings = command(host, softcuda_build)
    else:
        host.settings = cli(host, softcuda_build, request.param)
    host.start_daemon()
    return host


@pytest.mark.parametrize("other_host", ["toggle", "actions", "command"], indirect=True)
def test_two_jobs_alternate_and_keep_their_state_g12(other_host: Host) -> None:
    assert_alternates(other_host, turns=1)


def test_a_daemon_that_is_killed_goes_on_with_who_is_parked_g8(other_host: Host) -> None:
    first, second = other_host.trainer("a", mib=STATE_MIB, seed=1), other_host.rank("b")
    digest = first.do("digest")
    second.do("initialise", group="g1", mib=STATE_MIB, seed=2)
    other_host.kill_daemon()
    other_host.start_daemon()
    first.do("acquire", groups="g1", timeout=30)
    assert first.do("digest") == digest
    assert other_host.states()[second.pid] == "parked"


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_job_that_cannot_be_taken_off_goes_on_with_its_state_g12(
    other_host: Host, step: str
) -> None:
    first, second = other_host.trainer("a", mib=STATE_MIB, seed=1), other_host.rank("b")
    digest = first.do("digest")
    other_host.fault(f"{step} {first.pid} * error:304")
    waiting = second.start("acquire", groups="g1", timeout=60)
    until(lambda: other_host.events("eviction_failed"), "it is turned back")
    until(lambda: other_host.states() == {first.pid: "running"}, "it runs as before")
    assert first.do("digest") == digest
    other_host.fault()
    waiting.wait()
    assert other_host.states() == {first.pid: "parked"}
    second.do("release")
    first.do("acquire", groups="g1", timeout=30)
    assert first.do("digest") == digest


def test_a_job_that_cannot_be_brought_back_stays_parked_with_its_state_g12(
    other_host: Host,
) -> None:
    first, second = other_host.trainer("a", mib=STATE_MIB, seed=1), other_host.rank("b")
    digest = first.do("digest")
    second.do("initialise", group="g1", mib=STATE_MIB, seed=2)
    other_host.fault(f"restore {first.pid} * error:304")
    with pytest.raises(RankError, match="304"):
        first.do("acquire", groups="g1", timeout=30)
    assert other_host.states()[first.pid] == "parked"
    other_host.fault()
    with other_host.connection() as connection:
        connection.request({"t": "clear", "job": "a"})
    first.do("acquire", groups="g1", timeout=30)
    assert first.do("digest") == digest


def test_a_backend_of_another_package_is_found_and_switches_jobs_g12(
    make_host: MakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, drawer, package = (tmp_path / name for name in ("device", "drawer", "package"))
    device.mkdir()
    drawer.mkdir()
    # As an editable installation leaves it, without a network or a change to this environment.
    shutil.copytree(EXAMPLE, package)
    command = [sys.executable, "-W", "ignore", "-c", "import setuptools; setuptools.setup()"]
    subprocess.run([*command, "-q", "egg_info"], cwd=package, check=True, timeout=100)
    monkeypatch.setenv("PYTHONPATH", str(package / "src"))
    host = make_host(
        settings={
            "daemon": {"backend": "paper"},
            "backends.paper": {"device": str(device), "drawer": str(drawer)},
        }
    )
    pair = [host.rank(name) for name in "ab"]
    for rank in pair:
        (device / str(rank.pid)).write_text(f"state of {rank.job}")
        rank.do("register")
        rank.do("acquire", groups="g1", timeout=30)
        rank.do("release")
    comes, stays = pair
    for _ in range(4):
        comes.do("acquire", groups="g1", timeout=30)
        assert host.states() == {comes.pid: "running", stays.pid: "parked"}
        assert (device / str(comes.pid)).read_text() == f"state of {comes.job}"
        assert [path.name for path in device.iterdir()] == [str(comes.pid)]
        assert (drawer / str(stays.pid)).read_text() == f"state of {stays.job}"
        comes.do("release")
        comes, stays = stays, comes
