"""What holds for all tests."""

from __future__ import annotations

import sys


def pytest_unconfigure() -> None:
    """Lets this process end without asking for a last turn.

    Tests load the stand-in driver into it and leave clients behind whose daemons are gone; it is no
    job whose device state somebody could have parked.
    """
    if (leaving := sys.modules.get("libtimeslice.leaving")) is not None:
        leaving._last_asks.clear()
