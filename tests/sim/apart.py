"""Programs of the simulation in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PATH = os.pathsep.join(str(part) for part in (HERE.parents[1], HERE.parent / "tsliced" / "core"))


def run_apart(program: str, *arguments: str) -> str:
    """Run one of the programs here as `make` does, and return what it said."""
    # Hashes that differ from process to process must not show.
    environment = {**os.environ, "PYTHONPATH": PATH, "PYTHONHASHSEED": "random"}
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
