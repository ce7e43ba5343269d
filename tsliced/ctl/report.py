"""`tslicectl report`: is it worth it, what happened, what limits: one file that opens anywhere."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tsliced.ctl.failures import DONE
from tsliced.ctl.options import Commands, text
from tsliced.ctl.output import print_json
from tsliced.ctl.recording import add_recording_options, read_file, recorded, write_result

_DESCRIPTION = """\
Writes what happened as one HTML file that opens without a network: a verdict in sentences, time
lines of devices and jobs, duty, waits and switches, and what jobs told of themselves. What a job
takes alone is worked out from its waits; a recording of it alone (--solo) says it better.
"""


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    report = commands.add(
        "report", "write a report of the history: one HTML file", description=_DESCRIPTION
    )
    add_recording_options(report, "report.html")
    report.add_argument(
        "--solo",
        metavar="FILE",
        type=text,
        action="append",
        default=[],
        help="the events of a job that ran alone, as `tslicectl events --json` wrote them; may be "
        "repeated",
    )
    report.set_defaults(call=write_report)


def write_report(options: argparse.Namespace) -> int:
    """Writes the file; with ``--json`` prints the figures instead."""
    # No other command needs it.
    from tsliced.observe import timeline
    from tsliced.observe.report.figures import figures
    from tsliced.observe.report.page import backlogs, report
    from tsliced.observe.report.verdict import verdict

    solo = [timeline.read(read_file(path)) for path in options.solo]
    events, host = recorded(options)
    line = timeline.read(events, until_unix=options.until)
    if options.json:
        found = figures(events, line, solo)
        sentences = [
            {"tone": sentence.tone.value, "text": sentence.text}
            for sentence in verdict(found, backlogs(line))
        ]
        print_json({"figures": asdict(found), "verdict": sentences})
        return DONE
    write_result(options.output, report(events, line, solo, host=host))
    return DONE
