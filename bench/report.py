"""The figures of a run: rows of a table for people, and JSON for what compares runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


def to_json(sections: Sequence[Section], machine: Machine) -> str:
    """Returns the same as JSON: what counts at the top, the rest under ``raw``."""
    rows = [row for section in sections for row in section.rows]
    counting = {row.headline: row for row in rows if row.headline is not None}
    document: dict[str, object] = {
        "schema": SCHEMA,
        **{headline: _rounded(row.value) for headline, row in counting.items()},
        "goals": {
            headline: {
                "at_least" if row.goal.at_least else "at_most": row.goal.limit,
                "met": row.goal.is_met(row.value),
            }
            for headline, row in counting.items()
            if row.goal is not None
        },
        "raw": {key: _rounded(value) for row in rows for key, value in _raw_of(row)},
        "machine": machine.as_dict(),
    }
    return json.dumps(document, indent=2) + "\n"


def _raw_of(row: Row) -> Iterator[tuple[str, float]]:
    for suffix, value in (("", row.ours), ("_yardstick", row.theirs), ("_ratio", row.ratio)):
        if value is not None:
            yield row.key + suffix, value


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
