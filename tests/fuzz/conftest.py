"""What is fuzzed stands on what other tests share."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

for part in ("e2e", "tsliced/host", "tsliced"):
    sys.path.insert(0, str(TESTS / part))
