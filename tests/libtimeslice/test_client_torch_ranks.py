"""Jobs of several ranks: what spreads a model over them finds it as it was after a move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 2
LIMIT_S = 100
COMMAND = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("torch_ranks.py"))]


def digests(how: str, file: Path, park_after: int) -> list[str]:
    """Trains with all ranks, and returns what each has at the end."""
    ranks = [
        subprocess.Popen(
            # (torch says that there is no numpy, which nobody here needs.)
            [*COMMAND, how, str(rank), str(RANKS), str(file), str(park_after)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        ends = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, ends
    return [out for out, _ in ends]


@pytest.mark.parametrize("how", ["ddp", "ddp_views", "fsdp_flat", "fsdp_views", "fsdp2"])
def test_ranks_that_are_parked_between_two_steps_compute_what_they_would_have_g12(
    tmp_path: Path, how: str
) -> None:
    never = digests(how, tmp_path / "never", park_after=0)
    parked = digests(how, tmp_path / "parked", park_after=2)
    assert parked == never
    assert all(len(line) == 64 for line in parked)
