"""The simulation misses each rule that is broken on purpose: a short form of `mutations.py`."""

from __future__ import annotations

import pytest
from apart import run_apart
from mutations import MUTATIONS

#: What needs two rare faults at once is left to `make sim-mutations`.
RARE = {"solo thaw of a restored tenancy"}


@pytest.mark.parametrize("name", sorted(MUTATIONS.keys() - RARE))
def test_a_rule_that_is_broken_on_purpose_is_missed(name: str) -> None:
    assert " lives: " in run_apart("mutations.py", "--only", name, "--seeds", "500")
