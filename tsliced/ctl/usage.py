"""`tslicectl usage`: who had how much of the devices, as a table, CSV or JSON."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from tsliced.ctl.calls import open_daemon
from tsliced.ctl.failures import DONE
from tsliced.ctl.history import add_choice_options, add_host_options, choice_of, read_recorded
from tsliced.ctl.names import user_name
from tsliced.ctl.options import Commands
from tsliced.ctl.output import NOTHING, duration, print_json, printable, table, use_colour

if TYPE_CHECKING:
    from tsliced.observe.usage import Usage

_DESCRIPTION = """\
Adds up the event history of this host's daemon, or of all hosts: for how long each job, user, Slurm
account or group held devices, how much of that was useful (not spent on switching), how long it
waited for its turns, and how long it was parked. What lasts on counts as far as it has lasted.
"""
_HEADS = ("LEASES", "HELD", "USEFUL", "WAITED", "PARKED")


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    parser = commands.add(
        "usage",
        "who held devices, waited and was parked, and for how long",
        description=_DESCRIPTION,
    )
    add_choice_options(parser)
    add_host_options(parser)
    parser.add_argument(
        "--by",
        choices=("job", "user", "account", "group"),
        default="job",
        help="what to add up for (default: job); accounts are those of Slurm",
    )
    parser.add_argument(
        "--csv", action="store_true", help="print comma-separated values, in seconds"
    )
    parser.set_defaults(call=show_usage)


def show_usage(options: argparse.Namespace) -> int:
    """Prints what each had."""
    # No other command needs it.
    from tsliced.observe.usage import usage

    choice = choice_of(options)
    now = time.time()
    until = min(now, options.until) if options.until is not None else now
    with open_daemon(options) as daemon:
        # Without a limit: what began before counts as far as it lasted on.
        whole = replace(choice, since=0, after_unix=None)
        recorded = read_recorded(daemon, options, whole)
    rows = usage(
        recorded.events,
        options.by,
        since_unix=choice.after_unix if choice.after_unix is not None else float("-inf"),
        until_unix=until,
    )
    if options.json:
        found = {"by": options.by, "until_unix": until, "usage": [asdict(row) for row in rows]}
        print_json({**found, "missing": dict(recorded.missing)})
    elif options.csv:
        _print_csv(rows)
    else:
        _print_table(rows, options.by)
    return DONE


def _print_csv(rows: Sequence[Usage]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    names = ("name", "uid", "account", "jobs", "leases", "switches")
    times = ("held_s", "useful_s", "waited_s", "parked_s")
    writer.writerow((*names, *times))
    for row in rows:
        values = [getattr(row, name) for name in names]
        writer.writerow([*values, *(f"{getattr(row, name):.3f}" for name in times)])


def _print_table(rows: Sequence[Usage], by: str) -> None:
    head = {"job": ["JOB", "ACCOUNT"], "user": ["USER", "JOBS"], "account": ["ACCOUNT", "JOBS"]}
    lines = [[*_names(row, by), *_values(row)] for row in rows]
    for line in table([*head.get(by, ["GROUP"]), *_HEADS], lines, colour=use_colour(sys.stdout)):
        print(line)


def _names(row: Usage, by: str) -> list[str]:
    match by:
        case "job":
            return [printable(row.name), printable(row.account or NOTHING)]
        case "user":
            return [user_name(row.uid) if row.uid is not None else NOTHING, str(row.jobs)]
        case "account":
            return [printable(row.name or NOTHING), str(row.jobs)]
        case _:
            return [printable(row.name)]


def _values(row: Usage) -> list[str]:
    times = (row.held_s, row.useful_s, row.waited_s, row.parked_s)
    return [str(row.leases), *map(duration, times)]
