"""Tests of the checks use the pretended /proc of the tests of this machine's parts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))
