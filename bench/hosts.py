"""Measures what a switch over many hosts costs, prints one table and writes it as JSON.

Run it as ``make bench-hosts`` or ``python -m bench.hosts --help``. A figure that misses its goal is
no failure of the run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bench.daemon import Place, make_devices
from bench.hosts_daemons import LinkedSwitches, measure_linked
from bench.hosts_polling import overhead_s
from bench.hosts_simulated import SwitchCost, simulate
from bench.machine import choose_cores, describe
from bench.report import Goal, Row, Section, percentile, publish, rounded
from bench.server import ROOT, STATE

#: Simulated participants, and real daemons.
SIMULATED = (1, 2, 8, 64, 512, 2048)
DAEMONS = (1, 2, 8)
#: Switches of which medians are taken.
SIMULATED_SWITCHES = 9
DAEMON_SWITCHES = 200

MAX_ROUND_TRIPS = 4
MAX_US_PER_PARTICIPANT = 60
MAX_OVERHEAD_MS = 200
MAX_LINKED_MS = 10

Measured = TypeVar("Measured")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench; raises if something is broken, and returns 0 whatever the figures are."""
    options = _parse(arguments)
    STATE.mkdir(parents=True, exist_ok=True)
    machine, cores = describe(STATE), choose_cores()
    # This process is all simulated hosts, and the clients of real daemons.
    os.sched_setaffinity(0, {cores.client})
    simulated = _measure("simulated hosts", options.simulated, simulate, options.switches)
    with tempfile.TemporaryDirectory(prefix="tsliced-bench-") as directory:
        place = Place(directory=Path(directory), state=STATE, cores=cores)
        make_devices(place)

        def linked(hosts: int, switches: int) -> LinkedSwitches:
            return measure_linked(place, hosts, switches)

        daemons = _measure("daemons", options.daemons, linked, options.daemon_switches)
    sections = [simulated_section(simulated), linked_section(daemons)]
    overheads = {n: rounded(_overhead_ms(costs)) for n, costs in simulated.items()}
    further = {"overhead_ms_p50": overheads}
    publish(sections, machine, options.json, apart=cores.apart, further=further)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    _add(parser, "--simulated", _counts, SIMULATED, "simulated hosts")
    _add(parser, "--switches", int, SIMULATED_SWITCHES, "switches of them")
    _add(parser, "--daemons", _counts, DAEMONS, "daemons")
    _add(parser, "--daemon-switches", int, DAEMON_SWITCHES, "switches of them")
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "build" / "bench-hosts.json",
        metavar="PATH",
        help="where to write the figures (build/bench-hosts.json)",
    )
    return parser.parse_args(arguments)


def _add(
    parser: argparse.ArgumentParser,
    name: str,
    kind: Callable[[str], object],
    default: object,
    what: str,
) -> None:
    metavar = "N" if kind is int else "N,..."
    parser.add_argument(
        name, type=kind, default=default, metavar=metavar, help=f"{what} (default: {default})"
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


def _measure(
    what: str, counts: Iterable[int], measure: Callable[[int, int], Measured], switches: int
) -> dict[int, Measured]:
    measured = {}
    for count in counts:
        print(f"measuring {count} {what} ...", file=sys.stderr, flush=True)
        measured[count] = measure(count, switches)
    return measured


# --- simulated hosts ------------------------------------------------------------------------------


def simulated_section(measured: Mapping[int, Sequence[SwitchCost]]) -> Section:
    """Returns the figures of simulated hosts; goals are for the largest number of them."""
    most = max(measured)
    costs = measured[most]
    overheads = [
        Row(
            key=f"overhead_{hosts}_hosts_ms_p50",
            label=f"{_counted(hosts, 'host')}, beyond operations p50",
            unit="ms",
            ours=_overhead_ms(measured[hosts]),
            theirs=overhead_s(hosts) * 1e3,
            headline=f"overhead_{hosts}_hosts_ms_p50" if hosts == most else None,
            goal=Goal(limit=MAX_OVERHEAD_MS) if hosts == most else None,
        )
        for hosts in measured
    ]
    return Section(
        title="switch of simulated hosts, no network",
        yardstick="node by node, 1 s polls",
        rows=[
            *overheads,
            Row(
                key="round_trips",
                label="round trips to all hosts, whatever their number",
                ours=max(cost.round_trips for of_count in measured.values() for cost in of_count),
                headline="round_trips",
                goal=Goal(limit=MAX_ROUND_TRIPS),
            ),
            Row(
                key="messages_besides",
                label="messages that are neither orders nor reports",
                ours=max(_besides(cost) for of_count in measured.values() for cost in of_count),
            ),
            Row(
                key="us_per_participant",
                label=f"coordinator's CPU for each of {most:,} p50",
                unit="us",
                ours=statistics.median(cost.coordinator_s for cost in costs) * 1e6 / most,
                headline="us_per_participant",
                goal=Goal(limit=MAX_US_PER_PARTICIPANT),
            ),
            Row(
                key="wall_us_per_participant",
                label="the same by the clock on the wall",
                unit="us",
                ours=statistics.median(cost.coordinator_wall_s for cost in costs) * 1e6 / most,
            ),
        ],
        remark="Processor time; the other design is computed.",
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number > 1 else ''}"


def _overhead_ms(costs: Sequence[SwitchCost]) -> float:
    return statistics.median(cost.overhead_s for cost in costs) * 1e3


def _besides(cost: SwitchCost) -> int:
    return cost.said.total() - cost.said["order"] - cost.said["report"]


# --- daemons --------------------------------------------------------------------------------------


def linked_section(measured: Mapping[int, LinkedSwitches]) -> Section:
    """Returns the figures of linked daemons; the goal is for the largest number of them."""
    most = max(measured)
    linked = measured[most]
    sync_ms = percentile(linked.sync_ns, 50) / 1e6
    syncs = linked.syncs / len(linked.switch_ns)
    # No grant and no move waits for the disk. Should that change, it is in here.
    goal = Goal(limit=MAX_LINKED_MS + syncs * sync_ms)
    rows = [
        Row(
            key=f"real_{hosts}_hosts_overhead_ms_p50",
            label=f"{_counted(hosts, 'daemon')}, release to grant p50",
            unit="ms",
            ours=percentile(measured[hosts].switch_ns, 50) / 1e6,
            theirs=overhead_s(hosts) * 1e3,
            headline=f"real_{hosts}_hosts_overhead_ms_p50" if hosts == most else None,
            goal=goal if hosts == most else None,
        )
        for hosts in measured
    ]
    return Section(
        title="switch of daemons, loopback TCP, instant backend",
        yardstick="node by node, 1 s polls",
        rows=[
            *rows,
            Row(
                key="real_cpu_ms",
                label=f"CPU of all {most} for a switch",
                unit="ms",
                ours=sum(linked.cpu_s) * 1e3,
            ),
            Row(
                key="real_coordinator_cpu_ms",
                label="CPU of the coordinator's daemon",
                unit="ms",
                ours=linked.cpu_s[0] * 1e3,
            ),
            Row(
                key="real_participant_cpu_ms",
                label="CPU of the busiest other one",
                unit="ms",
                ours=max(linked.cpu_s[1:], default=0.0) * 1e3,
            ),
            Row(key="real_fsyncs_per_switch", label="fsyncs per switch, of all", ours=syncs),
            Row(
                key="fsync_ms_p50",
                label=f"fsync p50, over all {len(linked.sync_ns)} of them",
                unit="ms",
                ours=sync_ms,
                headline="fsync_ms_p50",
            ),
        ],
        remark="All daemons share this machine's cores.",
    )


if __name__ == "__main__":
    sys.exit(main())
