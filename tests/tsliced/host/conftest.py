"""Fixtures of the tests of the host's parts; and what other tests use too is importable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

sys.path.insert(0, str(REPOSITORY / "tests" / "tsliced"))
sys.path.insert(0, str(REPOSITORY / "tests" / "e2e"))


@pytest.fixture(scope="session")
def softcuda_build() -> Path:
    """The directory of softcuda's libraries, brought up to date."""
    command = ["make", "--silent", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr
    return REPOSITORY / "build" / "softcuda"
