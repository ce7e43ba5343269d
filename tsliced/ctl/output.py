"""What tslicectl prints: JSON, tables, durations and sizes.

Data goes to standard output and messages to standard error, so that a pipe reads data alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TextIO

#: Version of the printed JSON. Within it fields may be added, none is changed or removed.
JSON_SCHEMA = 1

NOTHING = "-"

_STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}


def print_json(document: Mapping[str, object]) -> None:
    """Prints one JSON document on one line, led by its schema version."""
    print(json.dumps({"schema": JSON_SCHEMA, **document}, ensure_ascii=False), flush=True)


def say(message: str) -> None:
    """Prints a message for the user on standard error."""
    print(f"tslicectl: {message}", file=sys.stderr, flush=True)


def use_colour(stream: TextIO) -> bool:
    """Tells whether ``stream`` is a terminal whose user has not refused colour (``NO_COLOR``)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def styled(text: str, style: str, *, colour: bool) -> str:
    """Returns ``text`` in one of the styles bold, dim, red, green and yellow."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour else text


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[str] = (),
    colour: bool = False,
    width: int | None = None,
) -> list[str]:
    """Returns the lines of a plain table whose columns are two spaces apart.

    If it would be wider than ``width`` they are one space apart. Columns named in ``right`` are
    aligned to the right. With ``colour`` the header is bold; cells are never coloured, so that
    their width is their length.
    """
    body = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *body]) for i in range(len(header))]
    wide = sum(widths) + 2 * (len(widths) - 1)
    gap = "  " if width is None or wide <= width else " "
    flush_right = [name in set(right) for name in header]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, flush_right, strict=True)
        ]
        return gap.join(padded).rstrip()

    return [styled(line(header), "bold", colour=colour), *(line(row) for row in body)]


def screen_width() -> int | None:
    """Returns how many characters a line of standard output has room for; None: for any number.

    ``COLUMNS`` counts for a pipe too.
    """
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return max(40, shutil.get_terminal_size().columns)
    return None


def folded(text: str, width: int | None, indent: str = "") -> list[str]:
    """Returns a sentence as lines of at most ``width``, those behind the first one indented."""
    if width is None or len(indent) + len(text) <= width:
        return [indent + text]
    # What is to be typed or looked up must not be taken apart.
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(count: int, what: str) -> str:
    """Returns a number of things: ``1 session``, ``2 sessions``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def duration(seconds: float | None) -> str:
    """Returns a duration to two units: ``0.42s``, ``12.3s``, ``3m12s``, ``5h02m``, ``3d04h``."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s"


def size(count: int | None) -> str:
    """Returns a number of bytes in the binary unit that keeps it below 1024."""
    if count is None:
        return NOTHING
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def rate(bytes_per_s: float | None) -> str:
    """Returns a number of bytes per second in decimal units, as links and copies are measured."""
    if bytes_per_s is None:
        return NOTHING
    if bytes_per_s < 1e9:
        return f"{bytes_per_s / 1e6:.0f} MB/s"
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def clock(at: float) -> str:
    """Returns the local time of day of Unix time ``at``, with milliseconds."""
    return datetime.fromtimestamp(at, tz=timezone.utc).astimezone().strftime("%H:%M:%S.%f")[:-3]


def printable(text: str) -> str:
    """Returns ``text`` without control characters.

    Job ids and process names are chosen by other users; a terminal must not obey them.
    """
    return "".join(char if char.isprintable() else "?" for char in text)
