"""`tslicectl qualify`: has a job leave its devices and come back, and says what was seen of it."""

from __future__ import annotations

import argparse
import time

from libtimeslice.connection import Connection
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.failures import BUSY, DONE, FAILED
from tsliced.ctl.names import job_name
from tsliced.ctl.options import Commands, seconds, text
from tsliced.ctl.output import NOTHING, duration, print_json, printable, say, size, table

#: How often it is looked whether it is over, in seconds.
_LOOK_S = 0.1
_STATES = {
    "qualified": "it left its devices and came back",
    "known": "others of its kind left their devices and came back",
    "refused": "another one of its kind could not come back",
    "failed": "it cannot share devices",
    "running": "it is being tried",
    "unknown": "it was not tried yet",
}
_DESCRIPTION = """\
Has every rank of an idle job leave its devices and come back while nobody else depends on it, looks
whether its memory went and is back, and measures both. Unless limits.qualify is false the daemon
does so by itself before a job makes room for another one for the first time.
"""


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    qualify = commands.add(
        "qualify",
        "try whether a job can leave its devices and come back",
        description=_DESCRIPTION,
    )
    qualify.add_argument(
        "job", metavar="JOB", type=text, help="the job: its id, UID/ID, or CLUSTER/UID/ID"
    )
    qualify.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, help="how long to wait; then exit with 75"
    )
    qualify.set_defaults(call=qualify_job)


def qualify_job(options: argparse.Namespace) -> int:
    """Has it tried, waits until it is over, and prints what was seen."""
    with open_daemon(options) as daemon:
        before = _look(daemon, options.job)["qualification"]["at_unix"]
        job = ask(daemon, "qualify", job=options.job)["job"]
        found = _await(daemon, options.job, before, options.timeout)
    if options.json:
        print_json({"job": job, "qualification": found})
    else:
        print("\n".join(qualification_lines(found)))
    if found["at_unix"] == before:
        say(f"{job_name(job)} is being moved still")
        return BUSY
    return DONE if found["state"] == "qualified" else FAILED


def _await(daemon: Connection, job: str, before: float | None, limit_s: float | None) -> Message:
    end = None if limit_s is None else time.monotonic() + limit_s
    while True:
        found: Message = _look(daemon, job)["qualification"]
        over = found["state"] != "running" and found["at_unix"] != before
        if over or (end is not None and time.monotonic() > end):
            return found
        time.sleep(_LOOK_S)


def _look(daemon: Connection, job: str) -> Message:
    shown: Message = ask(daemon, "show", kind="job", name=job)["shown"]
    return shown


def qualification_lines(found: Message) -> list[str]:
    """Returns what is known of how a job leaves and comes back, for people."""
    reason = f": {printable(found['reason'])}" if found["reason"] else ""
    lines = [f"qualification: {_STATES.get(found['state'], found['state'])}{reason}"]
    measured = [rank for rank in found["ranks"] if rank["out_s"] is not None]
    if (switch_s := found.get("switch_s")) is not None:
        lines.append(f"to leave and to come back takes about {duration(switch_s)}")
    rows = [
        [
            str(rank["pid"]),
            rank["way"] or NOTHING,
            size(rank["before_bytes"]),
            size(rank["out_bytes"]),
            duration(rank["out_s"]),
            duration(rank["in_s"]),
            size(rank["back_bytes"]),
        ]
        for rank in measured
    ]
    if rows:
        header = ["PID", "BACKEND", "ON DEVICES", "MOVED", "OUT", "BACK IN", "BACK"]
        lines += table(header, rows, right=["PID", *header[2:]])
    for rank in found["ranks"]:
        for finding in rank["findings"]:
            if finding["verdict"] == "problem":
                remedy = f"; {printable(finding['remedy'])}" if finding["remedy"] else ""
                lines.append(f"  pid {rank['pid']}: {printable(finding['text'])}{remedy}")
        unseen = [f["what"] for f in rank["findings"] if f["verdict"] == "unknown"]
        if unseen:
            lines.append(f"  pid {rank['pid']}: not known: {', '.join(unseen)}")
        if found["state"] == "failed" and rank["proposal"]:
            lines.append(f"  pid {rank['pid']}: {printable(rank['proposal'])}")
    return lines
