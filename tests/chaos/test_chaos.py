"""A short storm, and one that a daemon that breaks a promise does not come through."""

from __future__ import annotations

import random

import chaos_run


def test_a_storm_leaves_nothing_behind() -> None:
    assert chaos_run.run(random.SystemRandom().randrange(1 << 31), 6.0) == []


def test_a_daemon_that_breaks_its_promises_does_not_come_through_a_storm() -> None:
    problems = chaos_run.run(1, 1.0, backend="broken_grants:SameToken")
    assert any("the token does not rise" in problem for problem in problems)
