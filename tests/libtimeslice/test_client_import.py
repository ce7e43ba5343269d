"""What `import libtimeslice` gives, and what it does not load for it."""

from __future__ import annotations

import subprocess
import sys

import libtimeslice

LOOK = """
import sys
import libtimeslice.protocol
assert "libtimeslice.client" not in sys.modules, "who reads frames alone needs no client"
from libtimeslice import connect
assert connect.__module__ == "libtimeslice.client"
"""


def test_every_public_name_is_there_and_known_before_it_is_loaded() -> None:
    for name in libtimeslice.__all__:
        assert getattr(libtimeslice, name).__module__.startswith("libtimeslice.")
        assert name in dir(libtimeslice)
    assert not hasattr(libtimeslice, "no_such_name")


def test_the_client_is_loaded_when_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
