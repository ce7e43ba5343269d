"""`tslicectl rescue`: brings back, without a daemon, what one left frozen or parked."""

from __future__ import annotations

import argparse

from tsliced.ctl.options import Commands, pid, positive_seconds, text

_DESCRIPTION = """\
Brings back what a daemon that is gone for good left frozen or parked: asks the driver where each
rank is, restores those whose state fits on their devices, and lets them run, from then on without
turns. Refuses while a daemon runs. Where a daemon can be started, start it instead.
"""
#: For a worker of the daemon that is still in a call, and for the driver's answer.
_QUERY_LIMIT_S = 120.0


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    parser = commands.add(
        "rescue", "bring back, without a daemon, what one left parked", description=_DESCRIPTION
    )
    parser.add_argument("--dry-run", action="store_true", help="say what there is, move nothing")
    parser.add_argument("--job", metavar="JOB", type=text, help="this job only: ID, or UID/ID")
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=pid,
        action="append",
        help="this process, also if the journal is lost or does not know it; may be repeated",
    )
    parser.add_argument(
        "--force", action="store_true", help="restore without a look at the devices' free memory"
    )
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=positive_seconds,
        default=_QUERY_LIMIT_S,
        help=f"for an answer of the driver (default {_QUERY_LIMIT_S:g})",
    )
    parser.add_argument(
        "--config", metavar="FILE", type=text, help="the daemon's configuration, if not the usual"
    )
    parser.add_argument(
        "--user", action="store_true", help="what tsliced --user left, not the host's daemon"
    )
    parser.set_defaults(call=rescue)


def rescue(options: argparse.Namespace) -> int:
    """Finds, and brings back, what can be."""
    # No other command needs what a daemon is made of.
    from tsliced.rescue import run

    return run(options)
