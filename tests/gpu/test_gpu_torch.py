"""Tensors that their own process moves, on CUDA, and the same scenarios on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from findings import REPORTS
from gpu_hosts import nvidia
from harness import REPOSITORY

SCENARIOS = Path(__file__).with_name("torch_scenarios.py")
LIMIT_S = 110.0
#: Named here, so that torch is not imported to collect them.
NAMES = (
    "bytes_come_back_and_the_device_is_free_meanwhile",
    "later_moves_make_nothing_and_are_as_fast_as_copies",
    "work_that_was_queued_is_in_what_is_moved",
    "training_goes_on_as_if_nothing_had_been_moved",
)


def run(kind: str, *names: str, **environment: str) -> str:
    """Runs scenarios in a process of their own, and returns what they found."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCENARIOS), kind, *names],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hardware", ["nvidia"], indirect=True)
def test_tensors_of_a_device(name: str, hardware: str) -> None:
    # So that matrices are multiplied in the same way each time: see the notes of cuBLAS.
    variables = {"CUDA_VISIBLE_DEVICES": nvidia().name, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    REPORTS.append((name, run("cuda", name, **variables)))


def test_the_same_scenarios_with_tensors_of_the_cpu() -> None:
    run("cpu", *NAMES)
