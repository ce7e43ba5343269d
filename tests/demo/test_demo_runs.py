"""The demo as a user starts it, on softcuda, with short phases."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pynvml
import pytest
from browser import browser
from trace_schema import check

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0

COMMAND = [sys.executable, "-m", "demo", "--hardware=softcuda", "--iterations=1", "--pace=0.2"]


@pytest.fixture(scope="module", autouse=True)
def softcuda() -> None:
    """Builds softcuda if that was not done yet."""
    command = ["make", "-s", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LIMIT_S)


def start(tmp_path: Path, output: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, f"--output={output}"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_in_memory(process: subprocess.Popen[str]) -> list[Path]:
    return list(Path("/dev/shm").glob(f"tsliced-demo-{process.pid}*"))


def processes_of(directory: Path) -> list[psutil.Process]:
    """Returns the processes that were started with a path in the directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in argument for argument in process.info["cmdline"] or ())
    ]


def test_the_demo_ends_bit_identical_says_what_it_ran_on_and_leaves_a_report_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    left = tmp_path_factory.mktemp("left")
    with start(tmp_path, left) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert output.startswith("Devices: 2 softcuda devices of 512 MiB")
    assert "Device state bit-identical to the run alone: yes" in output
    restored = re.search(r"which were restored (\d+) times", output)
    assert restored is not None
    assert int(restored[1]) >= 4
    for verb in ("freeze", "snapshot", "restore", "thaw"):
        assert re.search(rf"^{verb} +\d+ +\d+ ms +\d+ ms", output, re.MULTILINE), verb
    assert re.search(r"^Shared: [\d.]+ s\. One after the other: [\d.]+ s\.", output, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
    assert left_in_memory(process) == []
    check_results(left)


def check_results(left: Path) -> None:
    """Asserts that report and trace of a run are what they should be, and say the same."""
    assert {path.name for path in left.iterdir()} == {"report.html", "trace.json", "history.json"}
    check(json.loads((left / "trace.json").read_text()))
    page = (left / "report.html").read_text()
    assert len(page.encode()) < 2_000_000
    for words in ("together took", "A full switch costs", "a alone", "reward"):
        assert words in page
    command = [sys.executable, "-m", "tsliced.ctl", "report", "--json"]
    done = subprocess.run(
        [*command, "--history", str(left / "history.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    jobs = json.loads(done.stdout)["figures"]["jobs"]
    assert len(jobs) == 2
    for job in jobs:
        # The same, added up by hand.
        assert job["useful_s"] == pytest.approx(held_s(left, job["job"]), rel=0.01)
    with browser() as window:
        window.open(left / "report.html")
        assert window.complaints() == []
        assert window.run("return document.querySelectorAll('.uplot').length") >= 3


def held_s(left: Path, job: str) -> float:
    """Returns for how long any rank of a job had a lease; its ranks have theirs together."""
    events = json.loads((left / "history.json").read_text())["events"]
    begins: dict[int, float] = {}
    token_of: dict[str, int] = {}
    ends: dict[int, float] = {}
    for event in (event for event in events if event.get("job") == job):
        if event["kind"] == "granted":
            token_of[event["lease"]] = event["token"]
            begins.setdefault(event["token"], event["at"] - (event.get("held_s") or 0.0))
        elif event["kind"] == "released":
            ends[token_of[event["lease"]]] = event["at"]
    told = sum(float(ends[token] - begins[token]) for token in ends)
    short = [e for e in events if e["kind"] == "held" and e["job"] == job]
    return told + sum(float(event["held_s"]) / int(event["ranks"]) for event in short)


def has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver here")
def test_a_demo_without_the_hardware_that_was_asked_for_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo", "--hardware=nvidia"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (1, "The demo failed: no NVIDIA driver here\n")


def test_an_interrupted_demo_ends_its_processes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with start(tmp_path, tmp_path / "never") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "held" in line:
                break
        started = processes_of(tmp_path)
        assert len(started) >= 5, "a daemon and four ranks"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT
    assert "Interrupted; everything is cleaned up." in rest
    _, alive = psutil.wait_procs(started, timeout=LIMIT_S)
    assert alive == []
    assert list(tmp_path.iterdir()) == []
    assert left_in_memory(process) == []
