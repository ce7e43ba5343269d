"""What `bench-switch` measured on a host: left in its daemon's history, and found there later."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from libtimeslice.errors import TimeSliceError
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.history import Choice, read_events

#: The job that tells of it.
JOB: Final = "bench-switch"
_COPIES: Final = ("snapshot", "restore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What switches cost here: beside copies, and how fast one process is copied."""

    at_unix: float
    fixed_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float


def leave(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Leaves what `bench_switch.summary` found in the history, for whoever looks later."""
    names = ("off_s", "on_s", "switch_s", "shortest_phase_s", "bytes")
    fields = {name: float(found[name]) for name in names}
    steps = found["steps"]
    for step in _COPIES:
        if (pace := steps[step]["bytes_per_s"]) is not None:
            fields[f"{step}_bytes_per_s"] = float(pace)
    copies_s = sum(steps[step]["seconds"] for step in _COPIES)
    fields["fixed_s"] = max(0.0, found["switch_s"] - copies_s)
    fields |= {f"copy_{key}": float(value) for key, value in (found["copy_limit"] or {}).items()}
    with open_daemon(options, job=JOB) as daemon:
        daemon.send({"t": "progress", "fields": fields})
        # Answered behind it, so that it has arrived.
        ask(daemon, "ping")


def latest(options: argparse.Namespace) -> Measured | None:
    """Returns what was measured last here, by the same user or by root; None if there is nothing.

    Nobody else is believed: every user of the host can tell the daemon what they like.
    """
    names = dict.fromkeys((f"{os.getuid()}/{JOB}", f"0/{JOB}"))
    try:
        with open_daemon(options) as daemon:
            choice = Choice(jobs=tuple(names), kinds=("progress",))
            return _latest(list(read_events(daemon, choice)))
    except TimeSliceError:
        # No daemon, or one that knows no history: there is an estimate without it.
        return None


def _latest(events: Sequence[Message]) -> Measured | None:
    for event in reversed(events):
        values = [event.get(name) for name in ("fixed_s", *(f"{c}_bytes_per_s" for c in _COPIES))]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values) and min(numbers[1:]) > 0:
            fixed_s, out, back = numbers
            return Measured(
                at_unix=float(event["at"]),
                fixed_s=fixed_s,
                out_bytes_per_s=out,
                in_bytes_per_s=back,
            )
    return None
