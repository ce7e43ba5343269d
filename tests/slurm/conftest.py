"""Fixtures of the tests on a real Slurm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "systemd"))

from slurm_jobs import leave_nothing, opened_site
from slurm_site import Site


@pytest.fixture(scope="session")
def all_day() -> Iterator[Site]:
    """Two nodes that share their devices; the tests take turns with it."""
    with opened_site("n1", "n2") as site:
        yield site


@pytest.fixture
def site(all_day: Site) -> Iterator[Site]:
    """The site with nobody on it, on which each test leaves nothing."""
    yield all_day
    leave_nothing(all_day)
