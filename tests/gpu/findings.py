"""What a scenario found on the hardware that it ran on, beside what is expected of it.

What is expected is what happens without a GPU: on softcuda, which is a model of the driver, and to
tensors of the CPU. Where a device does something else the scenario fails and says what, after it
has looked at everything, so that a first run tells all differences at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

#: What is told at the end of a run on a real device: titles, and tables.
REPORTS: list[tuple[str, str]] = []


@dataclass
class Findings:
    """Of one scenario."""

    hardware: str
    _lines: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def measured(self, what: str, value: object) -> None:
        """Notes a figure of which nothing is expected."""
        self._lines.append((what, "", str(value), True))

    def expect(
        self, what: str, expected: object, seen: object, *, holds: bool | None = None
    ) -> None:
        """Notes what was seen beside what is expected; unless `holds` says, they must be equal."""
        same = seen == expected if holds is None else holds
        self._lines.append((what, str(expected), str(seen), same))

    def __str__(self) -> str:
        header = ("", "expected", self.hardware, "")
        rows = [header] + [
            (what, model, seen, "" if same else "DIFFERS")
            for what, model, seen, same in self._lines
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def conclude(self) -> None:
        """Prints everything. Raises AssertionError if anything differs."""
        sys.stdout.write(f"{self}\n")
        different = [what for what, _, _, same in self._lines if not same]
        assert not different, (
            f"differs from what happens without a GPU: {', '.join(different)}\n{self}"
        )
