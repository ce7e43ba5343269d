"""Fixtures of the tests of this machine's parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "endpoints"))

from backend_lab import Place
from harness import Host


@pytest.fixture
def place(softcuda_build: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Devices and ranks, and no daemon."""
    host = Host(softcuda_build, SOFTCUDA_THROTTLE_MBPS="0")
    # Workers and NVML have the environment of this process.
    for name, value in host.variables().items():
        if name.startswith("SOFTCUDA_"):
            monkeypatch.setenv(name, value)
    yield Place(host, softcuda_build / "libcuda.so.1")
    host.close()
