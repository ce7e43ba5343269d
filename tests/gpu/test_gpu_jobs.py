"""Two jobs that take turns on one device under a real daemon, by each of the ways to move them.

Each scenario prints what it measured, beside what softcuda has a driver do, and fails where the two
differ. Without a GPU they run on softcuda, and the tensors of torch are on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import EngineRank
from findings import REPORTS, Findings
from gpu_hosts import RESIDUE, Lab
from harness import MIB, REPOSITORY, Rank, resident_bytes

pytestmark = pytest.mark.timeout(600)

TURNS = 4
TURN_LIMIT_S = 120.0
CPU_TORCH = "examples.grpo.cpu_backend:CpuTorchBackend"


def rates(findings: Findings, operations: list[dict[str, Any]]) -> None:
    """Notes how fast each kind of operation was, from the first to the last."""
    for verb in ("freeze", "snapshot", "restore", "thaw"):
        of_verb = [each for each in operations if each["verb"] == verb]
        text = ", ".join(f"{each['seconds'] * 1e3:.0f}" for each in of_verb)
        findings.measured(f"{verb}, ms", text)
        if verb in ("snapshot", "restore"):
            moved = [each["bytes"] / max(each["seconds"], 1e-9) / 1e9 for each in of_verb]
            findings.measured(f"{verb}, GB/s", ", ".join(f"{rate:.2f}" for rate in moved))


def alternate(lab: Lab, ranks: list[Rank], digest: Callable[[Rank], str]) -> None:
    """Lets two ranks with state take turns, and looks at where they are and what they have."""
    moved, same = 0, 0
    expected: dict[int, str] = {}
    for number in range(TURNS):
        comes, leaves = ranks[number % 2], ranks[1 - number % 2]
        comes.do("acquire", limit_s=TURN_LIMIT_S, groups="g1", timeout=TURN_LIMIT_S)
        moved += lab.host.states() == {comes.pid: "running", leaves.pid: "parked"}
        found = digest(comes)
        same += expected.setdefault(comes.pid, found) == found
        comes.do("release")
    lab.findings.expect("turns with one job on the device and one parked", TURNS, moved)
    lab.findings.expect("turns that find the same state, to the bit", TURNS, same)
    failed = lab.host.events("eviction_failed", "pinned", "admission_failed", "blocked")
    lab.findings.expect("moves that failed", [], failed)
    rates(lab.findings, lab.host.operations())


def test_two_jobs_alternate_by_the_driver_and_keep_their_state_g12(
    make_lab: Callable[..., Lab],
) -> None:
    lab = make_lab("cuda")
    size = lab.state_mib * MIB
    empty = lab.used_bytes()
    first, second = ranks = [lab.host.rank(job) for job in "ab"]

    def load(rank: Rank, seed: int) -> None:
        rank.do("initialise", TURN_LIMIT_S, group="g1", mib=lab.state_mib, seed=seed, timeout=60)

    load(first, 1)
    alone, on_host = lab.settled_bytes(empty + 2 * size) - empty, resident_bytes(first.pid)
    lab.findings.measured("context, MiB", (alone - size) // MIB)
    load(second, 2)
    left = lab.settled_bytes(empty + alone) - empty - alone
    lab.findings.expect(
        "left on the device by who is parked", "nothing", f"{left // MIB} MiB", holds=left < 8 * MIB
    )
    grown = resident_bytes(first.pid) - on_host
    lab.findings.expect(
        "host memory of who is parked grows by", "its state", f"{grown // MIB} MiB",
        holds=grown > 0.9 * size,
    )  # fmt: skip
    alternate(lab, ranks, lambda rank: str(rank.do("digest", TURN_LIMIT_S)))
    moves = lab.host.operations("snapshot", "restore")
    whole = sum(each["bytes"] >= size for each in moves)
    lab.findings.expect("moves of all of the state or more", len(moves), whole)
    lab.findings.conclude()


def torch_ranks(lab: Lab, *, managed: bool, width: int) -> tuple[list[Rank], int]:
    """Starts two jobs of torch that each loaded a model in a turn; returns how large one is."""
    ranks = []
    size = 0
    device = "cuda" if lab.is_real else "cpu"
    for seed, job in enumerate("ab"):
        rank = lab.host.rank(job, program="torch_rank.py", RANK_DEVICE=device)
        rank.do("acquire", limit_s=TURN_LIMIT_S, groups="g1", timeout=TURN_LIMIT_S)
        size = rank.do("load", TURN_LIMIT_S, width=width, seed=seed, managed=managed)
        rank.do("release")
        ranks.append(rank)
    return ranks, size


def torch_digest(rank: Rank) -> str:
    """Returns what the rank has."""
    return str(rank.do("train", TURN_LIMIT_S, steps=0))


def assert_trains_as_alone(lab: Lab, ranks: list[Rank], width: int) -> None:
    """Lets each take steps in a turn, and holds what it has then against a twin that never left."""
    same = []
    for seed, rank in enumerate(ranks):
        rank.do("acquire", limit_s=TURN_LIMIT_S, groups="g1", timeout=TURN_LIMIT_S)
        steps = rank.do("steps")
        trained = rank.do("train", TURN_LIMIT_S, steps=3)
        twin = rank.do("twin", TURN_LIMIT_S, width=width, seed=seed, steps=steps + 3)
        same.append(trained == twin)
        rank.do("release")
    lab.findings.expect("jobs that train as if they had never been moved", 2, same.count(True))


@pytest.mark.parametrize("ways", ["torch", "torch+cuda"])
def test_two_jobs_of_torch_alternate_by_moving_their_own_tensors_g12(
    make_lab: Callable[..., Lab], hardware: str, ways: str
) -> None:
    if ways == "torch+cuda" and hardware == "softcuda":
        pytest.skip("torch on the CPU leaves nothing to the driver; see test_e2e_composite.py")
    # With next to no residue allowed, the driver has to take what torch leaves.
    residue = RESIDUE if ways == "torch" else "8 MiB"
    backend = [ways] if hardware == "nvidia" else CPU_TORCH
    lab = make_lab(backend, max_residue_bytes=residue)
    width = 8192 if lab.is_real else 512
    empty = lab.used_bytes()
    ranks, size = torch_ranks(lab, managed=True, width=width)
    lab.findings.measured("state of each, MiB", size // MIB)
    if lab.is_real:
        left = lab.used_bytes() - empty
        lab.findings.measured("with one on the device and one parked, MiB", left // MIB)
    alternate(lab, ranks, torch_digest)
    moves = lab.host.operations("snapshot", "restore")
    whole = sum(each["bytes"] >= size for each in moves)
    lab.findings.expect("moves of all of the state or more", len(moves), whole)
    assert_trains_as_alone(lab, ranks, width)
    lab.findings.conclude()


@pytest.mark.parametrize("residue", [RESIDUE, "1 MiB"], ids=["stays", "the driver takes"])
def test_two_engines_alternate_by_their_own_sleep_and_what_they_leave_g12(
    make_lab: Callable[..., Lab], residue: str
) -> None:
    lab = make_lab(["endpoint+cuda"], max_residue_bytes=residue)
    size = (2 * lab.state_mib // 3, lab.state_mib // 3)
    engines = [EngineRank(lab.host, "vllm", "a"), EngineRank(lab.host, "sglang", "b")]
    before = lab.used_bytes()
    for engine in engines:
        engine.rank.do("acquire", limit_s=TURN_LIMIT_S, groups="g1", timeout=TURN_LIMIT_S)
        engine.serve(*size)
        engine.rank.do("release")
    left = lab.used_bytes() - before - sum(size) * MIB
    lab.findings.measured("beside one engine's weights and cache, MiB", left // MIB)
    alternate(lab, [each.rank for each in engines], lambda rank: str(rank.do("digest", 120)))
    lab.findings.conclude()


@pytest.mark.gpu
@pytest.mark.parametrize("hardware", ["nvidia"], indirect=True)
def test_two_jobs_of_torch_that_know_nothing_alternate_by_the_driver_g12(
    make_lab: Callable[..., Lab],
) -> None:
    lab = make_lab("cuda")
    width = 8192
    ranks, size = torch_ranks(lab, managed=False, width=width)
    lab.findings.measured("state of each, MiB", size // MIB)
    alternate(lab, ranks, torch_digest)
    assert_trains_as_alone(lab, ranks, width)
    lab.findings.conclude()


@pytest.mark.gpu
@pytest.mark.parametrize("hardware", ["nvidia"], indirect=True)
def test_each_backend_reaches_its_share_of_a_pinned_copy(hardware: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.backends", f"--json={file}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    REPORTS.append(("bench-backends", done.stdout))
    missed = [
        name for name, goal in json.loads(file.read_text())["goals"].items() if not goal["met"]
    ]
    assert not missed, f"{missed}\n{done.stdout}"
