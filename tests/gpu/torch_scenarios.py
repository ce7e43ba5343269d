"""Tensors that their own process moves: ``torch_scenarios.py KIND NAME ...``.

KIND is `cpu` or `cuda`. It prints what was measured beside what is expected, and ends with 0 if all
of that holds. No daemon is there: what moves is `libtimeslice.tensors`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from findings import Findings

from bench.backend_rank import memory_copies, pinned_copies
from libtimeslice.storages import Walk
from libtimeslice.tensors import Tensors

MIB = 1 << 20
CYCLES = 5
Scenario = Callable[[str, Findings], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def managed(kind: str, *objects: object) -> Tensors:
    tensors = Tensors(kind)
    tensors.add(objects, None, None)
    return tensors


def contents(kind: str, *objects: object) -> list[Any]:
    """Returns copies on the host of all storages under some values."""
    found = Walk(kind).visit("it", objects)
    return [torch.tensor([], dtype=torch.uint8).set_(each.memory.cpu()).clone() for each in found]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


@scenario
def bytes_come_back_and_the_device_is_free_meanwhile(kind: str, findings: Findings) -> None:
    size = (1024 if kind == "cuda" else 64) * MIB
    state = [torch.randint(0, 255, (size // 4,), dtype=torch.uint8, device=kind) for _ in range(4)]
    views = [state[0][17:99].view(2, 41), state[1][::2]]
    objects = [id(each) for each in [*state, *views]]
    before, free = contents(kind, state), free_bytes() if kind == "cuda" else 0
    tensors = managed(kind, state, views)
    out = tensors.park()
    findings.expect("bytes moved", size, out.bytes)
    findings.expect("memory left", 0, sum(each.untyped_storage().nbytes() for each in state))
    if kind == "cuda":
        freed = free_bytes() - free
        findings.expect(
            "freed on the device", f"{size // MIB} MiB", f"{freed // MIB} MiB",
            holds=freed > 0.95 * size,
        )  # fmt: skip
        reserved = torch.cuda.memory_reserved()
        findings.expect(
            "kept by torch's allocator", "nearly nothing", f"{reserved // MIB} MiB",
            holds=reserved < 64 * MIB,
        )  # fmt: skip
        pinned = [piece.is_pinned() for piece, _ in tensors._host._pieces]
        findings.expect("host memory is pinned", [True] * len(pinned), pinned)
    tensors.unpark()
    findings.expect("the same to the bit", True, same(before, contents(kind, state)))
    findings.expect("the same objects", True, objects == [id(each) for each in [*state, *views]])
    state[0][17] = 7
    findings.expect("views are views still", 7, int(views[0][0, 0]))


@scenario
def later_moves_make_nothing_and_are_as_fast_as_copies(kind: str, findings: Findings) -> None:
    size = (4096 if kind == "cuda" else 256) * MIB
    copies = (pinned_copies if kind == "cuda" else memory_copies)(size)
    for many in (10, 1000):
        state = [torch.ones(size // many, dtype=torch.uint8, device=kind) for _ in range(many)]
        tensors = managed(kind, state)
        first = tensors.park()
        tensors.unpark()
        had, ratios = tensors.host_bytes, []
        for _ in range(CYCLES):
            out_copy, back_copy = copies()
            out, back = tensors.park().gb_per_s, tensors.unpark().gb_per_s
            ratios.append((out / out_copy, back / back_copy))
            findings.measured(
                f"{many} tensors, GB/s",
                f"out {out:.1f} of {out_copy:.1f}, in {back:.1f} of {back_copy:.1f}",
            )
        findings.measured(f"{many} tensors, first out, GB/s", f"{first.gb_per_s:.2f}")
        findings.expect(f"{many} tensors, host memory", had, tensors.host_bytes)
        worst = min(sorted(side)[CYCLES // 2] for side in zip(*ratios, strict=True))
        # A machine without a GPU is one that does other things, too.
        least = 0.8 if kind == "cuda" else 0.3
        findings.expect(
            f"{many} tensors, share of the copy",
            f">= {least}",
            f"{worst:.2f}",
            holds=worst >= least,
        )
        del state, tensors


@scenario
def work_that_was_queued_is_in_what_is_moved(kind: str, findings: Findings) -> None:
    """On a side stream, and without a wait by whoever queued it."""
    width = 4096 if kind == "cuda" else 256
    matrix = torch.eye(width, device=kind)
    step = torch.full((width, width), 1.0 / width, device=kind)
    tensors = managed(kind, matrix)
    expected = torch.eye(width, device=kind)
    for each in (expected, matrix):
        stream = torch.cuda.Stream() if kind == "cuda" else None
        with torch.cuda.stream(stream):  # of None: the current one, or nothing
            for _ in range(20):
                each.copy_(torch.tanh(each @ step + each))
        if each is expected and kind == "cuda":
            torch.cuda.synchronize()
    begun = time.perf_counter()
    tensors.park()
    findings.measured(
        "out, with the queued work before it, ms", f"{(time.perf_counter() - begun) * 1e3:.1f}"
    )
    tensors.unpark()
    findings.expect("what was queued is done", True, torch.equal(matrix, expected))


@scenario
def training_goes_on_as_if_nothing_had_been_moved(kind: str, findings: Findings) -> None:
    torch.manual_seed(1)
    width = 2048 if kind == "cuda" else 64
    models = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    given = torch.randn(8, width, device=kind)
    optimizers = [torch.optim.AdamW(each.to(kind).parameters(), lr=0.01) for each in models]
    tensors = managed(kind, models[0], optimizers[0])
    equal = []
    for _ in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
        tensors.park()
        tensors.unpark()
        pairs = zip(models, optimizers, strict=True)
        moved, twin = (contents(kind, model, optimizer) for model, optimizer in pairs)
        equal.append(same(moved, twin))
    findings.expect("steps after which it is as one that stays", 6, equal.count(True))


def main() -> None:
    kind, *names = sys.argv[1:]
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(kind == "cuda", warn_only=True)
    findings = Findings(torch.cuda.get_device_name() if kind == "cuda" else "the CPU")
    for name in names:
        SCENARIOS[name](kind, findings)
    findings.conclude()


if __name__ == "__main__":
    main()
