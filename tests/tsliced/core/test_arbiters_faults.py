"""Leases over several arbiters while links are cut and daemons killed: all of it ends well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from arbiters_lab import A, B, C, again, assert_at_rest, assert_safe, give_back, hold, states, three
from hosts_lab import N1, N2, N3, Lab, held, session_of

from tsliced.core.model import HostName, ProcessId, RankState

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED

#: A lab in which something begins, the ranks of two jobs, and whether the second has its turn.
Story = tuple[Lab, list[ProcessId], list[ProcessId], Callable[[], bool]]


def switch() -> Story:
    """Let a job with ranks on all groups make room for one that had asked at another host."""
    lab = three()
    first, others = hold(lab, "b", N2, A, B, C)
    give_back(lab, first, N2)
    lease, ranks = hold(lab, "a", N1, A, B, C)
    waiter = again(lab, first, N2, A, B, C)
    assert states(lab, others) == [PARKED] * 3
    lab.by_hand()
    lab[N1].release(lease)
    return lab, ranks, others, lambda: held(lab, waiter, N2)


def handover() -> Story:
    """Let a job lease a part of what it had together, while another waits for the rest."""
    lab = three()
    first, others = hold(lab, "b", N3, C)
    give_back(lab, first, N3)
    lease, ranks = hold(lab, "a", N1, A, B, C)
    waiter = again(lab, first, N3, C)
    lab.by_hand()
    lab[N1].release(lease)
    part = lab[N1].acquire(session_of(lease), B)
    return lab, ranks[2:], others, lambda: held(lab, waiter, N3) and held(lab, part, N1)


STORIES = pytest.mark.parametrize("story", [switch, handover])


def steps_of(story: Callable[[], Story]) -> int:
    """Return how many things happen until a story is over."""
    lab, _, _, over = story()
    steps = lab.count_steps()
    assert over()
    return steps


def ends_well(lab: Lab, ranks: list[ProcessId], others: list[ProcessId], after: int) -> None:
    """Let a story go on to its end, and assert that it is the right one."""
    lab.by_itself()
    assert_safe(lab)
    lab.pass_time(12.0, step_s=2.0)
    assert_at_rest(lab)
    assert states(lab, ranks) == [PARKED] * len(ranks), after
    assert states(lab, others) == [RUNNING] * len(others), after


@STORIES
@pytest.mark.parametrize("link", [(N1, N2), (N1, N3), (N2, N3)])
def test_whatever_a_cut_link_loses_is_said_again(
    story: Callable[[], Story], link: tuple[HostName, HostName]
) -> None:
    for cut_after in range(steps_of(story) + 1):
        lab, ranks, others, over = story()
        for _ in range(cut_after):
            lab.step()
        # By turns for long and briefly.
        lab.disconnect(*link, lost=bool(cut_after % 2))
        lab.connect(*link)
        ends_well(lab, ranks, others, cut_after)
        assert over(), f"not after {cut_after} steps"


@STORIES
@pytest.mark.parametrize("host", [N1, N2, N3])
def test_a_daemon_that_is_killed_at_any_step_loses_nothing_g8(
    story: Callable[[], Story], host: HostName
) -> None:
    for killed_after in range(steps_of(story) + 1):
        lab, ranks, others, over = story()
        for _ in range(killed_after):
            lab.step()
            assert_safe(lab)
        lab.restart(host)
        ends_well(lab, ranks, others, killed_after)
        assert over(), f"not after {killed_after} steps"
