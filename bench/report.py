"""The figures of a run: rows of a table for people, and JSON for what compares runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.machine import Machine

SCHEMA = 1


def percentile(values: Sequence[int], percent: float) -> int:
    """Returns the smallest of the values that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a figure should be: at most, or at least, a limit."""

    limit: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        """Returns whether a value is within the limit."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was measured, here and on the yardstick beside it."""

    #: In JSON, of the raw figure; its unit is part of it.
    key: str
    label: str
    unit: str = ""
    ours: float | None = None
    theirs: float | None = None
    #: The median over rounds of ours to theirs, which need not be the ratio of the two above.
    ratio: float | None = None
    #: In JSON, of the figure that counts; None: the row is there to explain another.
    headline: str | None = None
    #: Which of the values counts.
    counts: Literal["ours", "ratio"] = "ours"
    goal: Goal | None = None

    @property
    def value(self) -> float:
        """The value that counts."""
        value = self.ratio if self.counts == "ratio" else self.ours
        assert value is not None, f"{self.key} has no value that counts"
        return value

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty without a goal."""
        if self.goal is None:
            return ""
        return "ok" if self.goal.is_met(self.value) else "MISS"


@dataclass(frozen=True, kw_only=True)
class Section:
    """What was measured together."""

    title: str
    #: What ``theirs`` is.
    yardstick: str = ""
    rows: Sequence[Row]
    #: A sentence for the reader, such as what could not be measured.
    remark: str = ""


_HEADINGS = ("", "tsliced", "", "ratio", "goal", "")
_ALIGNMENTS = ("<", ">", ">", ">", ">", "<")


def table(sections: Sequence[Section]) -> str:
    """Returns all sections as one table of text."""
    lines = [cells for section in sections for cells in _cells_of(section)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    texts = []
    for line in lines:
        cells = [
            f"{cell:{alignment}{width}}"
            for cell, alignment, width in zip(line, _ALIGNMENTS, widths, strict=True)
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def _cells_of(section: Section) -> Iterator[tuple[str, ...]]:
    _, ours, _, ratio, goal, _ = _HEADINGS
    yield (section.title, ours, section.yardstick, ratio, goal, "")
    for row in section.rows:
        yield (
            f"  {row.label}",
            _quantity(row.ours, row.unit),
            _quantity(row.theirs, row.unit),
            _number(row.ratio),
            str(row.goal or ""),
            row.verdict,
        )
    if section.remark:
        yield (f"  {section.remark}", "", "", "", "", "")


def _quantity(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_number(value)} {unit}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def heading(machine: Machine, *, apart: bool) -> str:
    """Returns what to know of the machine; `apart`: servers and clients have a core each."""
    lines = [
        f"{machine.cpu_model}, {machine.cores} cores, Linux {machine.kernel}, {machine.python}, "
        f"state on {machine.file_system}, load average {machine.load_average:g}",
    ]
    if machine.file_system in ("tmpfs", "ramfs"):
        lines.append("The state is not on a disk, so fsync figures mean nothing.")
    if not apart:
        lines.append(
            "Server and client share the only core: ratios are higher than they should be."
        )
    return "\n".join(lines)


def publish(
    sections: Sequence[Section],
    machine: Machine,
    path: Path,
    *,
    apart: bool,
    further: Mapping[str, object] | None = None,
) -> None:
    """Prints a run for people and writes it to a file as JSON, to which `further` is added.

    `apart`: servers and clients have a core each. Directories of the file are made.
    """
    print(heading(machine, apart=apart))
    print(table(sections))
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {**document(sections, machine), **(further or {})}
    path.write_text(json.dumps(made, indent=2) + "\n")
    print(f"written to {path}", file=sys.stderr)


def document(sections: Sequence[Section], machine: Machine) -> dict[str, object]:
    """Returns the same as plain values: what counts at the top, the rest under ``raw``."""
    rows = [row for section in sections for row in section.rows]
    counting = {row.headline: row for row in rows if row.headline is not None}
    return {
        "schema": SCHEMA,
        **{headline: rounded(row.value) for headline, row in counting.items()},
        "goals": {
            headline: {
                "at_least" if row.goal.at_least else "at_most": row.goal.limit,
                "met": row.goal.is_met(row.value),
            }
            for headline, row in counting.items()
            if row.goal is not None
        },
        "raw": {key: rounded(value) for row in rows for key, value in _raw_of(row)},
        "machine": machine.as_dict(),
    }


def _raw_of(row: Row) -> Iterator[tuple[str, float]]:
    for suffix, value in (("", row.ours), ("_yardstick", row.theirs), ("_ratio", row.ratio)):
        if value is not None:
            yield row.key + suffix, value


def rounded(value: float) -> float:
    """Returns a figure as it stands in JSON: with six digits."""
    return float(f"{value:.6g}")
