"""Programs that users start, on a real driver: two jobs of the demo, two training runs of torch.

Both compare what they find with the same job run alone, and fail on any difference. Each runs in a
process group of its own with a time limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from findings import REPORTS
from harness import REPOSITORY

LIMIT_S = 420.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.usefixtures("hardware"),
    pytest.mark.parametrize("hardware", ["nvidia"], indirect=True),
]


def run(*command: str) -> str:
    """Runs a program to its end, and returns what it printed."""
    program = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *command],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = program.communicate(timeout=LIMIT_S)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
    assert program.returncode == 0, output
    REPORTS.append((" ".join(command), output))
    return output


def test_two_jobs_share_a_real_device_and_their_state_stays_the_same_to_the_bit() -> None:
    output = run("demo", "--hardware", "nvidia", "--iterations", "2")
    assert "bit-identical to the run alone: yes" in output, output


@pytest.mark.parametrize("lora", ["0", "4"])
def test_two_training_runs_share_a_real_device_and_come_to_the_same_to_the_bit(lora: str) -> None:
    run("examples.grpo", "--hardware", "nvidia", "--lora", lora)
