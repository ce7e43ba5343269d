"""Mirrors bench/deaths.py: a dead holder's group goes on at once (G3)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.daemon import SOFTCUDA, Place, make_devices
from bench.deaths import measure_deaths
from bench.machine import choose_cores
from bench.report import table

#: A machine that runs tests may do something else for so long.
MARGIN = 10


@pytest.fixture
def place() -> Iterator[Place]:
    # The kernel limits paths of sockets.
    directory = Path(tempfile.mkdtemp(prefix="tsliced-bench-"))
    place = Place(directory=directory, state=directory / "state", cores=choose_cores())
    place.state.mkdir()
    yield place
    shutil.rmtree(directory)


@pytest.mark.skipif(not SOFTCUDA.is_dir(), reason="softcuda is not built: make softcuda")
def test_a_dead_holder_is_fenced_within_milliseconds_g3(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make_devices(place)
    section = measure_deaths(place, deaths=100)
    with capsys.disabled():
        print(f"\n{table([section])}")  # noqa: T201 - the figures are what it is for
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    for row in section.rows:
        if row.goal is not None:
            assert row.value < row.goal.limit * MARGIN * busy, row.label
