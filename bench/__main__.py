"""Measures what the daemon costs, prints one table and writes it as JSON.

Every time has a yardstick that was measured in the same run, in turns with it, because absolute
times say more about the machine. A figure that misses its goal is no failure of the run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.daemon import Place, make_devices
from bench.deaths import measure_deaths
from bench.footprint import measure_footprint
from bench.machine import choose_cores, describe
from bench.report import Section, publish
from bench.requests import (
    measure_acquire,
    measure_crowd,
    measure_recording,
    measure_yardsticks,
)
from bench.server import ROOT, STATE
from bench.switching import measure_switch

MEASUREMENTS: dict[str, Callable[[Place], Section]] = {
    "acquire": measure_acquire,
    "recording": measure_recording,
    "requests": measure_crowd,
    "switch": measure_switch,
    "deaths": measure_deaths,
    "yardsticks": measure_yardsticks,
    "footprint": measure_footprint,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench; raises if something is broken, and returns 0 whatever the figures are."""
    options = parse(arguments)
    STATE.mkdir(parents=True, exist_ok=True)
    machine = describe(STATE)
    cores = choose_cores()
    # This process is the client, and what it starts runs here unless it is moved.
    os.sched_setaffinity(0, {cores.client})
    with tempfile.TemporaryDirectory(prefix="tsliced-bench-") as directory:
        place = Place(directory=Path(directory), state=STATE, cores=cores)
        make_devices(place)
        sections = [_measure(name, place) for name in dict.fromkeys(options.only or MEASUREMENTS)]
    publish(sections, machine, options.json, apart=cores.apart)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options: `only`, the names of measurements or None for all, and `json`."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only",
        type=_names,
        action="extend",
        metavar="NAME,...",
        help=f"measure only some of: {', '.join(MEASUREMENTS)}; may be repeated",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "build" / "bench.json",
        metavar="PATH",
        help="where to write the figures (build/bench.json)",
    )
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}"
        )
    return names


def _measure(name: str, place: Place) -> Section:
    print(f"measuring {name} ...", file=sys.stderr, flush=True)
    return MEASUREMENTS[name](place)


if __name__ == "__main__":
    sys.exit(main())
