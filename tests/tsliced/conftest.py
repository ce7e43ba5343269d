"""What tests of the daemon's parts share, with one another and with the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from harness import build_softcuda


@pytest.fixture(scope="session")
def softcuda_build() -> Path:
    """The directory of softcuda's libraries."""
    return build_softcuda()
