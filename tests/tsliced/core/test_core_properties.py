"""Random lives of a world, judged by an oracle that knows nothing of the core."""

from __future__ import annotations

import os

import pytest
from chaos import Chaos

SEEDS = int(os.environ.get("TSLICED_SEEDS", "60"))


def live(seed: int, *, faults: bool) -> None:
    try:
        Chaos(seed=seed, faults=faults).live()
    except Exception as exc:
        raise AssertionError(f"seed {seed}, faults={faults}: {exc!r}") from exc


@pytest.mark.parametrize("faults", [False, True], ids=["orderly", "faulty"])
def test_g1_g2_g4_g5_no_life_breaks_a_guarantee_and_all_who_wait_get_an_answer(
    faults: bool,
) -> None:
    for seed in range(SEEDS):
        live(seed, faults=faults)
