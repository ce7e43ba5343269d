"""Fixtures of the tests on a real Slurm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "systemd"))

from harness import build_softcuda
from namespaces import skip_without_namespaces
from slurm_jobs import assert_nothing_is_left
from slurm_site import Site, why_not


@pytest.fixture(scope="session")
def all_day() -> Iterator[Site]:
    """Two nodes that share their devices; the tests take turns with it."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    skip_without_namespaces()
    site = Site(build_softcuda(), "n1", "n2")
    try:
        yield site
    except BaseException:
        site.discard()
        raise
    site.close()


@pytest.fixture
def site(all_day: Site) -> Iterator[Site]:
    """The site with nobody on it, on which each test leaves nothing."""
    yield all_day
    try:
        all_day.end_jobs()
        assert_nothing_is_left(all_day)
    except BaseException:
        # pytest shows this for a test that failed.
        sys.stdout.write(all_day.story())
        raise
