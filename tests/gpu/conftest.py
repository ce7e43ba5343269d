"""Fixtures of tests that are for a real device, and run on softcuda to be known to work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "endpoints"))
sys.path.insert(0, str(Path(__file__).parent))

from findings import REPORTS
from gpu_hosts import Lab, NoDeviceError, nvidia

MakeLab = Callable[..., Lab]


@pytest.fixture(params=["softcuda", pytest.param("nvidia", marks=pytest.mark.gpu)])
def hardware(request: pytest.FixtureRequest) -> str:
    """Either kind; the real one is marked, and skipped where there is none."""
    if request.param == "nvidia":
        try:
            nvidia()
        except NoDeviceError as error:
            pytest.skip(f"needs a CUDA device: {error}")
    return str(request.param)


@pytest.fixture
def make_lab(hardware: str, request: pytest.FixtureRequest) -> Iterator[MakeLab]:
    """Makes a host on the hardware, with a backend and a daemon that serves."""
    made: list[Lab] = []

    def make(backend: str | list[str], **memory: object) -> Lab:
        lab = Lab(hardware, backend, **memory)
        made.append(lab)
        lab.host.start_daemon()
        return lab

    yield make
    for lab in made:
        if lab.is_real:
            REPORTS.append((request.node.name, str(lab.findings)))
        lab.host.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Shows what was found on a real device, also where nothing failed."""
    for title, report in REPORTS:
        terminalreporter.section(title)
        terminalreporter.write_line(report)
