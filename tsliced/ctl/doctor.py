"""`tslicectl doctor`: looks this host over, and says what to mend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tsliced.ctl.options import Commands, text
from tsliced.ctl.output import folded, print_json, printable, say, screen_width, styled, use_colour

if TYPE_CHECKING:
    from tsliced.doctor.findings import Finding

_DESCRIPTION = """\
Looks over this host and says what stands in the way of sharing, one line each with what helps. A
daemon need not run. Exits with 0 if all is well, 1 if there are warnings, 2 if there are faults.
Run it as root to have everything looked at.
"""
_STYLES = {"good": "green", "unknown": "dim", "warning": "yellow", "fault": "red"}


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    doctor = commands.add(
        "doctor",
        "look over this host: driver, devices, memory, daemon, jobs; say what to mend",
        description=_DESCRIPTION,
    )
    doctor.add_argument(
        "--config", metavar="FILE", type=text, help="the daemon's configuration, if not the usual"
    )
    doctor.add_argument(
        "--user", action="store_true", help="for tsliced --user, not the host's daemon"
    )
    doctor.set_defaults(call=examine_host)


def examine_host(options: argparse.Namespace) -> int:
    """Prints a line for each finding, or one JSON document."""
    # No other command needs what a daemon is made of.
    from tsliced.doctor.examination import examine
    from tsliced.doctor.findings import exit_code

    findings = list(examine(options))
    code = exit_code(findings)
    if options.json:
        listed = [{**asdict(finding), "verdict": finding.verdict.value} for finding in findings]
        print_json({"findings": listed, "exit_code": code})
        return code
    lines = finding_lines(findings, colour=use_colour(sys.stdout), width=screen_width())
    print("\n".join(lines), flush=True)
    verdicts = [finding.verdict.value for finding in findings]
    say(", ".join(f"{verdicts.count(name)} {name}" for name in _STYLES if name in verdicts))
    return code


def finding_lines(
    findings: Sequence[Finding], *, colour: bool = False, width: int | None = None
) -> list[str]:
    """Returns the table of findings, without line ends: a line of any length for each.

    With a `width` long ones go on below, under their own beginning.
    """
    checks, verdicts = max(len(finding.check) for finding in findings), max(map(len, _STYLES))
    left = verdicts + 2 + checks + 2
    lines = []
    for finding in findings:
        name = finding.verdict.value
        verdict = styled(f"{name:<{verdicts}}", _STYLES[name], colour=colour)
        text = printable("; ".join(filter(None, (finding.text, finding.remedy))))
        first, *others = folded(text, None if width is None else max(20, width - left))
        lines.append(f"{verdict}  {finding.check:<{checks}}  {first}")
        lines += [f"{'':<{left}}{other.lstrip()}" for other in others]
    return lines
