"""Fixtures of the tests of ``cuda_ckpt``, a pytest plugin: softcuda built, and a lab on it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_lab import REPOSITORY, Lab, close_softcuda_lab, softcuda_lab


@pytest.fixture(scope="session")
def softcuda_build() -> Path:
    """The directory of softcuda's libraries, brought up to date."""
    command = ["make", "--silent", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr
    return REPOSITORY / "build" / "softcuda"


@pytest.fixture
def lab(softcuda_build: Path) -> Iterator[Lab]:
    """Softcuda devices for one test, and the means to start processes on them."""
    made = softcuda_lab(softcuda_build)
    yield made
    close_softcuda_lab(made)
