"""Measures how fast each backend moves state, against the plain copy of the same machine.

Both are measured in the same run and in turns, through a daemon. On a machine with an NVIDIA GPU
that nobody uses the copy is between pinned memory and the device, and the driver is NVIDIA's;
elsewhere the CPU has the tensors, softcuda is the driver, and the copy is memcpy between warm
memory. A figure that misses its goal is no failure of the run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.backend_moves import Cycle
from bench.backend_scenes import DRIVER_MIB, ENGINE_MIB, Scenes, devices_of, torch_mib
from bench.machine import choose_cores, describe
from bench.report import Goal, Row, Section, publish
from bench.server import ROOT, STATE

MIN_RATIO = 0.8
MAX_MANY_RATIO = 1.3
#: Of what later moves make: nothing but what the interpreter does for itself.
MAX_MADE_MIB = 1.0
CYCLES = 7
FEW, MANY = 10, 10_000
MOST_MIB = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench; raises if something is broken, and returns 0 whatever the figures are."""
    options = _parse(arguments)
    STATE.mkdir(parents=True, exist_ok=True)
    machine, cores = describe(STATE), choose_cores()
    # What this process starts runs here, but for the daemon.
    os.sched_setaffinity(0, {cores.client})
    tensors_mib = torch_mib(options.torch_mib)
    with (
        devices_of(options.hardware, max(tensors_mib, options.driver_mib, ENGINE_MIB)) as devices,
        tempfile.TemporaryDirectory(prefix="tsliced-bench-") as directory,
    ):
        scenes = Scenes(
            directory=Path(directory),
            devices=devices,
            cycles=options.cycles,
            driver_mib=options.driver_mib,
        )
        sections = list(measure(scenes, tensors_mib, options.many))
    publish(sections, machine, options.json, apart=cores.apart)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.backends", description=__doc__)
    parser.add_argument(
        "--hardware",
        choices=("auto", "softcuda"),
        default="auto",
        help="auto: a GPU that nobody uses, else softcuda (default auto)",
    )
    parser.add_argument(
        "--cycles",
        type=int,
        default=CYCLES,
        help=f"ways out and back of each backend (default {CYCLES})",
    )
    parser.add_argument(
        "--torch-mib",
        type=int,
        default=MOST_MIB,
        metavar="N",
        help=f"of tensors, less where memory is short (default {MOST_MIB})",
    )
    parser.add_argument(
        "--driver-mib",
        type=int,
        default=DRIVER_MIB,
        metavar="N",
        help=f"of device memory (default {DRIVER_MIB})",
    )
    parser.add_argument(
        "--many",
        type=int,
        default=MANY,
        metavar="N",
        help=f"tensors where it is many small ones (default {MANY})",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "build" / "bench-backends.json",
        metavar="PATH",
        help="where to write the figures (build/bench-backends.json)",
    )
    return parser.parse_args(arguments)


def measure(scenes: Scenes, mib: int, many: int) -> list[Section]:
    """Returns the figures of all backends that the devices can have."""
    real = scenes.devices.is_real
    copy = "pinned copy" if real else "memcpy"
    sections = [torch_section(scenes.torch(mib, FEW), scenes.torch(mib, many), mib, many, copy)]
    name = "cuda" if real else "softcuda"
    title = f"{'driver' if real else 'softcuda'}, {scenes.driver_mib} MiB"
    sections.append(Section(title=title, yardstick=copy, rows=rate_rows(name, scenes.driver())))
    if not real:
        title = f"cuda-ckpt, softcuda, {scenes.driver_mib} MiB"
        sections.append(Section(title=title, yardstick=copy, rows=rate_rows("cli", scenes.cli())))
        sections.append(fixed_section(scenes))
    return sections


def torch_section(
    few: Sequence[Cycle], many: Sequence[Cycle], mib: int, number: int, copy: str
) -> Section:
    """Returns the figures of tensors that their own process moves."""
    took = [_median(cycles[1:], _whole_s) for cycles in (few, many)]
    made = max(_median(cycles[1:], _made_mib) for cycles in (few, many))
    size = f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib} MiB"
    return Section(
        title=f"torch, {size} in {FEW} tensors",
        yardstick=copy,
        rows=[
            *rate_rows("torch", few, goal=Goal(limit=MIN_RATIO, at_least=True)),
            *rate_rows("torch_many", many, label=f", {number:,} tensors"),
            Row(
                key="torch_many_time",
                label=f"time of {number:,} to that of {FEW}",
                ratio=took[1] / took[0],
                counts="ratio",
                headline="torch_many_ratio",
                goal=Goal(limit=MAX_MANY_RATIO),
            ),
            Row(
                key="torch_made_mib",
                label="memory made by out and in, later",
                unit="MiB",
                ours=made,
                headline="torch_made_mib",
                goal=Goal(limit=MAX_MADE_MIB),
            ),
        ],
    )


def rate_rows(
    name: str, cycles: Sequence[Cycle], *, goal: Goal | None = None, label: str = ""
) -> list[Row]:
    """Returns how fast it went out and in, beside the copy, and how fast out at first."""
    first, *later = cycles
    copies = [cycle.copy for cycle in later if cycle.copy is not None]
    return [
        Row(
            key=f"{name}_out_gb_per_s",
            label=f"out{label}",
            unit="GB/s",
            ours=_median(later, lambda cycle: cycle.out.gb_per_s),
            theirs=statistics.median(copy.out for copy in copies),
            ratio=_median(later, lambda cycle: cycle.out_ratio),
            counts="ratio",
            headline=f"{name}_out_ratio",
            goal=goal,
        ),
        Row(
            key=f"{name}_in_gb_per_s",
            label=f"in{label}",
            unit="GB/s",
            ours=_median(later, lambda cycle: cycle.back.gb_per_s),
            theirs=statistics.median(copy.back for copy in copies),
            ratio=_median(later, lambda cycle: cycle.back_ratio),
            counts="ratio",
            headline=f"{name}_in_ratio",
            goal=goal,
        ),
        Row(
            key=f"{name}_first_out_gb_per_s",
            label=f"out{label}, first time",
            unit="GB/s",
            ours=first.out.gb_per_s,
        ),
    ]


def fixed_section(scenes: Scenes) -> Section:
    """Returns what backends take that copy nothing of ours, for one process."""
    rows = [
        Row(
            key=f"{name}_{way}_ms",
            label=f"{what}, {way}",
            unit="ms",
            ours=_median(cycles[1:], seconds) * 1e3,
            headline=f"{name}_{way}_ms",
        )
        for name, what, cycles in (
            ("endpoint", f"endpoint, {ENGINE_MIB} MiB", scenes.endpoint()),
            ("command", "command, shell scripts", scenes.command()),
        )
        for way, seconds in (
            ("out", lambda cycle: cycle.freeze_s + cycle.out.seconds),
            ("in", lambda cycle: cycle.back.seconds + cycle.thaw_s),
        )
    ]
    return Section(
        title="requests and programs",
        rows=rows,
        remark="Out is freeze and snapshot, in is restore and thaw.",
    )


def _whole_s(cycle: Cycle) -> float:
    return cycle.out.seconds + cycle.back.seconds


def _made_mib(cycle: Cycle) -> float:
    return cycle.faults * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _median(cycles: Sequence[Cycle], figure: Callable[[Cycle], float]) -> float:
    return statistics.median(map(figure, cycles))


if __name__ == "__main__":
    sys.exit(main())
