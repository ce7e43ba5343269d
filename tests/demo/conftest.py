"""What the demo leaves is checked as reports and traces are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tsliced" / "observe"))
