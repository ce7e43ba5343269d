"""What one sees while the demo runs: a table that is drawn anew on a terminal, else lines."""

from __future__ import annotations

import time
from typing import TextIO

from libtimeslice.protocol import Message
from tsliced.ctl.output import duration, size, table, use_colour


class Screen:
    """Writes the demo's output to one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._redraws = use_colour(stream)
        self._began_at = time.monotonic()
        #: Lines of the live table that stand on the terminal now.
        self._drawn = 0
        self._last = ""

    def line(self, text: str = "") -> None:
        """Writes a line that stays, above the live table."""
        self._erase()
        self._write(f"{text}\n")

    def show(self, status: Message) -> None:
        """Shows the daemon's state: all of it on a terminal, elsewhere what has changed."""
        if self._redraws:
            lines = live_lines(status)
            self._erase()
            self._write("".join(f"{line}\n" for line in lines))
            self._drawn = len(lines)
            return
        summary = summary_of(status)
        if summary != self._last:
            self._last = summary
            self._write(f"  {time.monotonic() - self._began_at:5.1f} s  {summary}\n")

    def begin(self) -> None:
        """Lets the time that is shown begin now."""
        self._began_at = time.monotonic()

    def _erase(self) -> None:
        if self._drawn:
            # Up to its first line, then clear to the end of the screen.
            self._write(f"\x1b[{self._drawn}F\x1b[0J")
            self._drawn = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def live_lines(status: Message) -> list[str]:
    """Returns the live table: the group, its devices and the jobs."""
    lines: list[str] = []
    for group in status["groups"]:
        lines.append(f"  group {group['name']}: {_group_text(group)}")
        for device in group["devices"]:
            busy = device["utilization_pct"]
            lines.append(
                f"    device {device['index']}: {size(device['used_bytes'])} of "
                f"{size(device['total_bytes'])}, {'?' if busy is None else busy} % busy"
            )
    rows = [
        [
            job["job"]["id"],
            job["state"],
            size(job["device_bytes"]),
            size(job["parked_bytes"]),
            duration(job["held_s"] or None),
            duration(job["waited_s"] or None),
            str(job["switches"]),
        ]
        for job in status["jobs"]
    ]
    header = ["JOB", "STATE", "ON DEVICE", "PARKED", "HELD", "WAITED", "SWITCHES"]
    return lines + [f"    {line}" for line in table(header, rows, right=header[2:])]


def summary_of(status: Message) -> str:
    """Returns one line that changes only when something happens."""
    parts = [_group_text(group) for group in status["groups"]]
    states = ", ".join(f"{job['job']['id']} {job['state']}" for job in status["jobs"])
    return f"{'; '.join(parts)} ({states})" if states else "; ".join(parts)


def _group_text(group: Message) -> str:
    job = group["holder"] or group.get("next")
    if job is None:
        return str(group["state"])
    link = " by" if group["holder"] else " to"
    text = f"{group['state']}{link} job {job['id']}"
    return f"{text} for {group['phase']}" if group["phase"] else text
