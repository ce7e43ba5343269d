"""What a check says: how things stand, and what helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How bad it is; the value is what people and programs read."""

    GOOD = "good"
    #: It could not be looked at, which is nobody's fault.
    UNKNOWN = "unknown"
    #: It works, but slowly, or not for everybody, or not for ever.
    WARNING = "warning"
    #: Nothing can be shared like this.
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked at, how it stands, and what helps if it is not good."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


def good(check: str, text: str) -> Finding:
    """Return that all is well."""
    return Finding(check=check, verdict=Verdict.GOOD, text=text)


def unknown(check: str, text: str, remedy: str) -> Finding:
    """Return that it could not be looked at, and how it could be."""
    return Finding(check=check, verdict=Verdict.UNKNOWN, text=text, remedy=remedy)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return that something should be mended."""
    return Finding(check=check, verdict=Verdict.WARNING, text=text, remedy=remedy)


def fault(check: str, text: str, remedy: str) -> Finding:
    """Return that something must be mended."""
    return Finding(check=check, verdict=Verdict.FAULT, text=text, remedy=remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if all is well, 1 if there are warnings, 2 if there are faults."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAULT in verdicts:
        return 2
    return 1 if Verdict.WARNING in verdicts else 0
