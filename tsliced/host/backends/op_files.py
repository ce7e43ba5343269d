"""Small JSON files that tell the next daemon what this one was about to do."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, facts: dict[str, Any]) -> None:
    """Replace a file by one with these facts, of which nobody ever sees a half.

    It need not survive the machine: what it is about does not either.
    """
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    os.replace(temporary, path)


def read_facts(path: Path) -> dict[str, Any]:
    """Return what such a file says; nothing if it is not there or is none."""
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(facts, dict):
            return facts
    return {}
