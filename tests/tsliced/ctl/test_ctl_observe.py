"""tslicectl observe: processes that know nothing of it, on softcuda, with known duty."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from demo.hardware import ROOT, Hardware, choose

LIMIT_S = 30.0
MIB = 1 << 20
CTL = [sys.executable, "-m", "tsliced.ctl", "observe"]

#: Busy for some seconds, idle for others, and so on for as long as it lives; says when it begins.
JOB = """
import sys, time
from demo.cuda import DeviceBuffer, Driver
busy_s, idle_s, mib = map(float, sys.argv[1:])
driver = Driver()
buffer = DeviceBuffer(driver, 0, int(mib) << 20)
print("ready", flush=True)
began = time.monotonic()
for number in range(1000):
    driver.keep_busy(busy_s) if busy_s else None
    # By the clock, so that the duty is what it should be on a busy machine too.
    time.sleep(max(0.0, began + (number + 1) * (busy_s + idle_s) - time.monotonic()))
"""


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hardware]:
    make = ["make", "-s", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"]
    subprocess.run(make, cwd=ROOT, check=True, timeout=60)
    found = choose("softcuda", tmp_path_factory.mktemp("softcuda"))
    yield found
    assert found.directory is not None
    shutil.rmtree(found.directory)


@contextmanager
def job(
    hardware: Hardware, *, busy_s: float, idle_s: float, mib: int = 16, name: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """A process that uses the first device so."""
    environment = {**os.environ, **hardware.environment}
    if name:
        environment["TSLICE_JOB_ID"] = name
    arguments = [str(busy_s), str(idle_s), str(mib)]
    with subprocess.Popen(
        [sys.executable, "-c", JOB, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def observe(hardware: Hardware, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **hardware.environment, "TSLICE_SOCKET": "/nonexistent"}
    return subprocess.run(
        [*CTL, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def document(hardware: Hardware, *arguments: str) -> dict[str, Any]:
    run = observe(hardware, "--json", *arguments)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_job_that_is_idle_most_of_the_time_is_worth_sharing(hardware: Hardware) -> None:
    """Busy for 1 s of 4: NVML looks back for a second, so that 2 s of 3 are seen as idle."""
    with job(hardware, busy_s=1.0, idle_s=3.0, mib=16, name="exp7") as process:
        found = document(hardware, "--job", "exp7", "--duration", "10", "--switch-s", "0.2")
        assert [entry["pid"] for entry in found["processes"]] == [process.pid]
    assert found["jobs"] == [f"{os.getuid()}/exp7"]
    assert found["seconds"] == pytest.approx(10, abs=1.5)
    assert 0.15 < found["kernel_share"] < 0.4
    assert 0.3 < found["busy_share"] < 0.75
    (device,) = found["devices"]
    assert device["index"] == 0
    assert device["peak_bytes"] >= 16 * MIB
    idle = [window["seconds"] for window in found["windows"] if window["idle"]]
    assert 2 <= len(idle) <= 4
    assert max(idle) < 3.5
    assert sum(each["count"] for each in found["idle_histogram"]) == len(idle)
    assert found["switch"]["source"] == "given"
    assert found["gain"]["verdict"] == "worth_it"
    assert found["gain"]["speedup"] > 1.3
    assert 0.2 < found["gain"]["usable_share"] < 0.7


def test_a_job_that_is_always_busy_is_not(hardware: Hardware) -> None:
    with job(hardware, busy_s=1.0, idle_s=0.0) as process:
        # Until the last second was busy.
        observe(hardware, "--pid", str(process.pid), "--duration", "1.5")
        run = observe(hardware, "--pid", str(process.pid), "--duration", "3")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "verdict: not worth sharing, as it runs now"
    assert f"pid {process.pid} (python" in lines[0]
    assert any(line.startswith("a switch takes about 1.0") for line in lines), "estimated"
    assert len(lines) < 25, "one page"
    assert max(map(len, lines)) < 160


def test_what_others_do_on_the_same_device_is_told_apart(hardware: Hardware) -> None:
    with (
        job(hardware, busy_s=0.0, idle_s=1.0) as mine,
        job(hardware, busy_s=0.0, idle_s=1.0) as other,
    ):
        found = document(hardware, "--pid", str(mine.pid), "--duration", "0.5")
        assert found["others"] == [other.pid]
        assert [entry["pid"] for entry in found["processes"]] == [mine.pid]
        both = document(hardware, "--device", "0", "--duration", "0.5", "--interval", "0.1")
        assert {entry["pid"] for entry in both["processes"]} == {mine.pid, other.pid}
        assert both["others"] == []


def test_it_ends_with_the_job_and_at_ctrl_c_and_says_what_it_saw(hardware: Hardware) -> None:
    environment = {**os.environ, **hardware.environment}
    command = [*CTL, "--json", "--duration", "600", "--interval", "0.1"]
    for how in ("the job ends", "ctrl-c"):
        with job(hardware, busy_s=0.0, idle_s=1.0) as process:
            watcher = subprocess.Popen(
                [*command, "--pid", str(process.pid)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            with watcher:
                assert watcher.stderr is not None
                assert (
                    f"looking at pid {process.pid} on device 0 for 10m" in watcher.stderr.readline()
                )
                if how == "ctrl-c":
                    watcher.send_signal(signal.SIGINT)
                else:
                    process.kill()
                    process.wait(LIMIT_S)
                out, err = watcher.communicate(timeout=LIMIT_S)
        assert watcher.returncode == 0, err
        found = json.loads(out)
        assert found["ended"] is (how == "the job ends")
        assert found["samples"] >= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pid", "1"], "no process is on the devices"),
        (["--job", "nothing"], "no process is on the devices"),
        (["--device", "7"], "there is no such device; there are: 0 (GPU-"),
        (["--nvml-library", "/nonexistent.so"], "cannot load /nonexistent.so"),
    ],
)
def test_what_cannot_be_watched_is_said_with_what_there_is(
    hardware: Hardware, arguments: list[str], said: str
) -> None:
    run = observe(hardware, *arguments)
    assert run.returncode == (1 if "nvml" in arguments[0] else 3)
    assert said in run.stderr
    with job(hardware, busy_s=0.0, idle_s=1.0, name="known") as process:
        run = observe(hardware, *arguments)
        assert run.returncode in (1, 3)
        if arguments[0] in ("--pid", "--job"):
            assert f"there are: {process.pid} ({os.getuid()}/known)" in run.stderr


@pytest.mark.parametrize(
    "arguments", [["--duration", "0"], ["--switch-s", "1", "--copy-rate", "2"], ["--pid", "x"]]
)
def test_wrong_usage_is_told(hardware: Hardware, arguments: list[str]) -> None:
    assert observe(hardware, *arguments).returncode == 2
