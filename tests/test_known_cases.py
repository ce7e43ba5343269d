"""The page of known cases: every case is on it, and every test that it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "known-cases.md"
CASES = [
    *(f"B{number}" for number in range(1, 29)),
    *"abcefghijklmn",
    *(f"E{number}" for number in range(1, 12)),
]
ROW = re.compile(r"^\| (\w+) \| (.+) \| (.+) \|$")
NAMED = re.compile(r"`([\w/]+\.py(?:::\w+)+)`")
#: Other files in which a case is lived through are found by their name.
OWN_FILES = ["e2e/test_e2e_known_cases.py"]


def rows() -> dict[str, str]:
    """Returns what stands behind each case."""
    found = (ROW.match(line) for line in PAGE.read_text(encoding="utf-8").splitlines())
    return {match[1]: match[3] for match in found if match and match[1] != "case"}


def named() -> list[str]:
    return sorted({name for proof in rows().values() for name in NAMED.findall(proof)})


def test_every_case_has_its_row_and_each_row_says_what_shows_it() -> None:
    assert list(rows()) == CASES
    assert [case for case, proof in rows().items() if not NAMED.search(proof)] == []


def test_every_test_that_is_named_is_collected() -> None:
    # (Machines without a GPU, systemd or root collect them all the same, and skip them.)
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *named()],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert collected.returncode == 0, collected.stdout[-3000:] + collected.stderr[-1000:]
    lines = collected.stdout.splitlines()
    missing = [name for name in named() if not any(name in line for line in lines)]
    assert missing == []


@pytest.mark.parametrize("file", OWN_FILES)
def test_what_was_written_for_a_case_is_named_by_it(file: str) -> None:
    written = re.findall(r"^def (test_\w+)", (TESTS / file).read_text(), re.MULTILINE)
    assert written
    assert [name for name in written if f"{file}::{name}" not in named()] == []
