"""tslicectl against the daemon itself, on softcuda."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.daemon import Daemon
from demo.hardware import ROOT, Hardware, choose
from libtimeslice.protocol import Message

LIMIT_S = 20.0
CTL = [sys.executable, "-m", "tsliced.ctl"]

#: Makes a context with some device memory, says so, and waits for the end of its input.
CUDA_PROGRAM = """
from demo.cuda import DeviceBuffer, Driver
buffer = DeviceBuffer(Driver(), 0, 8 << 20)
print("ready", flush=True)
input()
"""


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hardware]:
    make = ["make", "-s", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"]
    subprocess.run(make, cwd=ROOT, check=True, timeout=60)
    found = choose("softcuda", tmp_path_factory.mktemp("softcuda"))
    yield found
    assert found.directory is not None
    shutil.rmtree(found.directory)


@pytest.fixture(scope="module")
def daemon(hardware: Hardware, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(hardware, tmp_path_factory.mktemp("daemon")) as running:
        yield running


@pytest.fixture(autouse=True)
def surroundings(
    daemon: Daemon, hardware: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSLICE_SOCKET", str(daemon.socket))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, value in hardware.environment.items():
        monkeypatch.setenv(name, value)


def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CTL, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )


def group() -> Message:
    """Returns the state of the only group, as `tslicectl status` tells it."""
    found: Message = json.loads(ctl("status", "--json").stdout)["status"]["groups"][0]
    return found


@contextmanager
def cuda_process(**environment: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a process with device memory and ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CUDA_PROGRAM],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_holder_of_a_run_is_seen_by_others_and_gone_afterwards() -> None:
    shown = ctl("run", "--job", "seen", "--phase", "look", "--", *CTL, "status", "--json")
    assert shown.returncode == 0, shown.stderr
    held = json.loads(shown.stdout)["status"]["groups"][0]
    assert (held["state"], held["holder"]["id"], held["phase"]) == ("held", "seen", "look")
    assert group()["holder"] is None


def test_who_waits_too_long_gets_75_and_leaves_the_queue() -> None:
    lease = ctl("acquire", "--job", "first").stdout.strip()
    try:
        waited = ctl("run", "--job", "second", "--timeout", "0.3", "--", "true")
        assert waited.returncode == 75, waited.stderr
        assert group()["waiters"] == 0
        assert group()["holder"]["id"] == "first"
    finally:
        released = ctl("release", lease)
    assert released.returncode == 0, released.stderr
    assert group()["holder"] is None


def test_a_killed_holder_loses_its_lease_to_the_next() -> None:
    grant = json.loads(ctl("acquire", "--job", "first", "--json").stdout)
    os.kill(grant["holder_pid"], signal.SIGKILL)
    assert ctl("run", "--job", "second", "--timeout", "10", "--", "true").returncode == 0
    assert ctl("release", grant["lease"]).returncode == 3


def test_a_command_that_a_signal_ends_in_a_run_gives_its_lease_back() -> None:
    done = ctl("run", "--job", "killed", "--", "sh", "-c", "kill -TERM $$")
    assert done.returncode == 128 + signal.SIGTERM
    assert group()["holder"] is None


def test_events_tell_the_story_of_a_lease() -> None:
    since = json.loads(ctl("events", "--json").stdout)["next"]
    ctl("run", "--job", "storied", "--phase", "telling", "--", "true")
    printed = ctl("events", "--since", str(since), "--kind", "granted", "--kind", "released")
    lines = printed.stdout.splitlines()
    assert [line.split()[2] for line in lines] == ["granted", "released"]
    assert all("storied" in line for line in lines)
    assert "phase=telling" in lines[0]


def test_an_unknown_group_is_not_found() -> None:
    done = ctl("run", "--group", "no-such-group", "--", "true")
    assert done.returncode == 3
    assert "no-such-group" in done.stderr


def test_attach_makes_a_process_a_rank_that_ps_shows() -> None:
    with cuda_process() as process:
        attached = ctl("attach", str(process.pid), "--job", "adopted", "--json")
        assert attached.returncode == 0, attached.stdout
        assert json.loads(attached.stdout)["rank"]["pid"] == process.pid
        ranks = json.loads(ctl("ps", "--json").stdout)["ranks"]
        mine = [rank for rank in ranks if rank["pid"] == process.pid]
        assert [rank["job"]["id"] for rank in mine] == ["adopted"]
        assert str(process.pid) in ctl("ps").stdout


def test_attach_refuses_a_process_without_a_device() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            refused = ctl("attach", str(process.pid), "--job", "adopted")
        finally:
            process.kill()
    assert refused.returncode == 1
    assert str(process.pid) in refused.stderr


def test_attach_with_hold_leases_until_the_process_ends() -> None:
    with cuda_process(TSLICE_JOB_ID="kept") as process:
        holding = subprocess.Popen(
            [*CTL, "attach", str(process.pid), "--hold"], stdout=subprocess.PIPE, text=True
        )
        with holding:
            assert holding.stdout is not None
            assert holding.stdout.readline().strip()
            assert group()["holder"]["id"] == "kept"
            process.kill()
            assert holding.wait(LIMIT_S) == 0
    assert group()["holder"] is None
