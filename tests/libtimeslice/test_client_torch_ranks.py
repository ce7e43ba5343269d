"""Jobs of several ranks: what spreads a model over them finds it as it was after a move."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch_ranks import WAYS

RANKS = 2
#: Of all together, below pytest's own: it knows nothing of the ranks.
LIMIT_S = 110
PROGRAM = Path(__file__).with_name("torch_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str]]]:
    """What each rank has at the end of each way: never parked, and parked in between."""
    directory = tmp_path_factory.mktemp("ranks")
    files = [directory / f"{rank}.err" for rank in range(RANKS)]
    started = []
    for rank, file in enumerate(files):
        # (torch says that there is no numpy, which nobody here needs.)
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(PROGRAM),
            str(rank),
            str(RANKS),
            str(directory),
        ]
        with file.open("wb") as errors:
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors))
    end = time.monotonic() + LIMIT_S
    try:
        outs = [rank.communicate(timeout=max(0, end - time.monotonic()))[0] for rank in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [rank.returncode for rank in started] == [0] * RANKS, [f.read_text() for f in files]
    lines = [[json.loads(line) for line in out.splitlines()] for out in outs]
    return [{how: (never, parked) for how, never, parked in of_rank} for of_rank in lines]


@pytest.mark.parametrize("how", WAYS)
def test_ranks_that_are_parked_between_two_steps_compute_what_they_would_have_g12(
    ranks: list[dict[str, tuple[str, str]]], how: str
) -> None:
    for digests in ranks:
        never, parked = digests[how]
        assert parked == never
        assert len(never) == 64
