"""`tslicectl trace`: the history as a file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import json

from tsliced.ctl.failures import DONE
from tsliced.ctl.options import Commands
from tsliced.ctl.recording import add_recording_options, recorded, write_result

_DESCRIPTION = """\
Writes what happened as a Chrome trace, which https://ui.perfetto.dev opens: a track for each device
and job, with holds, waits, moves and their steps, arrows for hand-offs, and counters. Nothing is
uploaded by it.
"""


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    trace = commands.add(
        "trace", "write the history as a trace for ui.perfetto.dev", description=_DESCRIPTION
    )
    add_recording_options(trace, "trace.json")
    trace.set_defaults(call=write_trace)


def write_trace(options: argparse.Namespace) -> int:
    """Writes the file."""
    # No other command needs it.
    from tsliced.observe import timeline, trace

    events, host = recorded(options)
    line = timeline.read(events, until_unix=options.until)
    write_result(options.output, json.dumps(trace.trace(line, host), separators=(",", ":")))
    return DONE
