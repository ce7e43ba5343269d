"""Where the simulation finds the simulated world of the core's tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tsliced" / "core")]
