"""Lives of simulated clusters, as many as a short time allows; `make sim` lives thousands."""

from __future__ import annotations

import os

import pytest
from apart import run_apart
from life import Life
from simulate import live, table, tell
from transcript import Transcript

#: In parts, so that a failure is seen early.
PARTS = 10
SEEDS = int(os.environ.get("TSLICED_SIM_SEEDS", "200"))
#: Any one will do.
TELLING = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_g1_g2_g5_g6_no_life_of_a_cluster_breaks_a_guarantee_and_all_come_to_rest(
    part: int,
) -> None:
    for seed in range(part, SEEDS, PARTS):
        outcome = live(seed)
        assert outcome.failure is None, f"{tell(seed)}\nmake sim SEED={seed} repeats it"
        assert outcome.switches >= 3


def test_a_seed_lives_the_same_life_again() -> None:
    def lines() -> list[str]:
        life = Life(TELLING)
        transcript = Transcript(life)
        life.live()
        return list(transcript.lines)

    first = lines()
    assert len(first) > 100
    assert lines() == first


def test_a_seed_lives_the_same_life_in_another_process() -> None:
    first = run_apart("simulate.py", "--seed", str(TELLING))
    assert "nothing was wrong" in first
    assert run_apart("simulate.py", "--seed", str(TELLING)) == first


def test_the_table_has_a_count_for_each_phase_and_fault() -> None:
    hits = live(TELLING).hits
    assert hits
    lines = table(hits).splitlines()
    counts = [int(word) for line in lines[1:] for word in line.split() if word.isdigit()]
    assert sum(counts) == sum(hits.values())
