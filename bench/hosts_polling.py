"""What a switch over many hosts takes that goes from node to node and looks once a second.

So works the nearest peer's published design: the orchestrator of llm-d-rl-time-slicing visits the
nodes of a group in turn, starts one operation, asks once a second whether it has ended, and only
then goes on; whoever waits for the lock looks once a second as well. It is computed here, not
measured.
"""

from __future__ import annotations

import math

POLL_S = 1.0


def overhead_s(hosts: int, *, snapshot_s: float = 0.0, restore_s: float = 0.0) -> float:
    """Returns the seconds beyond one snapshot and one restore, which all hosts could do at once."""
    on_a_node_s = _noticed_s(snapshot_s) + _noticed_s(restore_s)
    # The looks of whoever waits have nothing to do with when the last node is done.
    wait_s = POLL_S / 2
    return hosts * on_a_node_s + wait_s - snapshot_s - restore_s


def _noticed_s(operation_s: float) -> float:
    """Returns after how many seconds an operation is seen to have ended."""
    # The first look is after a whole interval.
    return max(1, math.ceil(operation_s / POLL_S)) * POLL_S
