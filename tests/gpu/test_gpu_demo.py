"""The whole product on a real driver: daemon, clients, workers and two jobs that cannot both fit.

`make demo` is the scenario, because it already compares every rank's device state with the same job
run alone and fails on any difference. It runs in a process group of its own with a time limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 420.0


def nvidia_is_missing() -> str | None:
    """Returns why the real hardware cannot be used, or None."""
    probe = subprocess.run(
        [sys.executable, "-c", "import cuda_ckpt; print(cuda_ckpt.Driver().device_count())"],
        env={k: v for k, v in os.environ.items() if not k.startswith("SOFTCUDA_")},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=90,
    )
    if probe.returncode:
        return probe.stderr.strip().splitlines()[-1]
    return None if probe.stdout.strip() != "0" else "the driver has no devices"


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT_S + 60)
def test_two_jobs_share_a_real_device_and_their_state_stays_the_same_to_the_bit() -> None:
    if (reason := nvidia_is_missing()) is not None:
        pytest.skip(f"needs a CUDA device: {reason}")
    command = [sys.executable, "-m", "demo", "--hardware", "nvidia", "--iterations", "2"]
    demo = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = demo.communicate(timeout=LIMIT_S)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.communicate()
    assert demo.returncode == 0, output
    assert "bit-identical to the run alone: yes" in output, output
