"""Lives of simulated clusters, as many as a short time allows; `make sim` lives thousands."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import run
from sys import executable

import pytest
from life import Life
from simulate import live, table, tell
from transcript import Transcript

#: In parts, so that a failure is seen early.
PARTS = 10
SEEDS = int(os.environ.get("TSLICED_SIM_SEEDS", "200"))
#: A seed in which a daemon is killed while a tenancy is being moved.
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
    program = Path(__file__).with_name("simulate.py")
    root = program.parents[2]
    path = os.pathsep.join([str(root), str(root / "tests" / "tsliced" / "core")])

    def told() -> str:
        # Hashes that differ from process to process must not show.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "random"}
        command = [executable, str(program), "--seed", str(TELLING)]
        done = run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    first = told()
    assert "nothing was wrong" in first
    assert told() == first


def test_the_table_has_a_count_for_each_phase_and_fault() -> None:
    hits = live(TELLING).hits
    assert hits
    lines = table(hits).splitlines()
    counts = [int(word) for line in lines[1:] for word in line.split() if word.isdigit()]
    assert sum(counts) == sum(hits.values())
