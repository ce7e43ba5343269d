"""What a full switch costs, measured on softcuda at a known pace."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from harness import LIMIT_S, MIB, Host, MakeHost, own, until

CTL = [sys.executable, "-m", "tsliced.ctl"]


def bench(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    library = str(host.variables()["LD_LIBRARY_PATH"]) + "/libcuda.so.1"
    return subprocess.run(
        [*CTL, "bench-switch", "--times", "2", "--library", library, *arguments],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )


def measured(host: Host, *arguments: str) -> dict[str, Any]:
    done = bench(host, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_process_of_a_given_size_is_switched_and_comes_back_whole(make_host: MakeHost) -> None:
    # 24 MiB take 0.84 s at this pace.
    host = make_host(SOFTCUDA_THROTTLE_MBPS="30")
    found = measured(host, "--size", "24MiB", "--group", "g1")
    assert found["switches"] == 2
    assert 24 * MIB <= found["bytes"] < 30 * MIB
    for step in ("snapshot", "restore"):
        # A busy machine may be slower than the pace that is asked for, and never faster.
        assert 8e6 < found["steps"][step]["bytes_per_s"] < 35e6
    for step in ("freeze", "thaw"):
        assert found["steps"][step]["bytes"] == 0
    assert found["switch_s"] == found["off_s"] + found["on_s"]
    assert found["off_s"] >= found["steps"]["snapshot"]["seconds"]
    share = found["switch_s"] / (found["switch_s"] + found["shortest_phase_s"])
    assert share == pytest.approx(0.1)
    assert found["copy_limit"]["to_host"] > 30e6
    (told,) = host.events("progress")
    assert told["switch_s"] == pytest.approx(found["switch_s"])
    assert host.group()["resident"] == [], "it leaves nothing on the devices"


def test_what_was_measured_is_what_observe_goes_by(make_host: MakeHost) -> None:
    host = make_host(SOFTCUDA_THROTTLE_MBPS="30")
    rank = host.trainer("b", mib=8)
    before = observed(host, rank.pid)
    assert before["switch"]["source"] == "estimated"
    assert before["measured_at"] is None
    began_unix = time.time()
    found = measured(host, "--size", "24MiB", "--group", "g2", "--device", "1")
    after = observed(host, rank.pid)
    steps, switch = found["steps"], after["switch"]
    assert switch["source"] == "measured"
    assert switch["out_bytes_per_s"] == pytest.approx(steps["snapshot"]["bytes_per_s"])
    assert switch["in_bytes_per_s"] == pytest.approx(steps["restore"]["bytes_per_s"])
    copies_s = steps["snapshot"]["seconds"] + steps["restore"]["seconds"]
    assert switch["fixed_s"] == pytest.approx(found["switch_s"] - copies_s)
    assert switch["bytes_per_device"] >= 8 * MIB
    assert began_unix <= after["measured_at"] <= time.time()
    page = subprocess.run(
        [*CTL, "observe", "--pid", str(rank.pid), "--duration", "0.5"],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "by what bench-switch measured here" in page.stdout


def observed(host: Host, pid: int) -> dict[str, Any]:
    done = subprocess.run(
        [*CTL, "observe", "--json", "--pid", str(pid), "--duration", "0.5"],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_running_job_is_switched_and_goes_on(host: Host) -> None:
    rank = host.trainer("a", mib=24, seed=3)
    digest = rank.do("digest")
    # A scan finds it, within two seconds.
    until(lambda: host.job("a").get("ranks"), "it is known")
    done = bench(host, "--job", "a")
    assert done.returncode == 0, done.stderr
    assert "snapshot" in done.stdout
    assert "A full switch of 2" in done.stdout
    assert "so that no more than a tenth goes into switches" in done.stdout
    assert rank.do("digest") == digest
    assert len(host.operations("restore")) == 2
    assert {event["job"] for event in host.operations()} == {own("a")}


def test_it_says_what_is_missing(host: Host) -> None:
    for arguments, code, words in (
        (["--job", "nobody"], 3, "no job 'nobody' has processes"),
        (["--size", "8MiB"], 2, "say which group with --group: g1, g2"),
        (["--size", "8MB", "--group", "g1"], 2, "is no size"),
        (["--size", "900GiB", "--group", "g1"], 1, "no device memory"),
        ([], 2, "required"),
    ):
        done = bench(host, *arguments)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
