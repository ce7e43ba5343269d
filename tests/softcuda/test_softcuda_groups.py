"""Ranks that depend on one another: shared device memory and collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
from softcuda_harness import (
    LOCKED,
    RUNNING,
    Agent,
    Machine,
    Target,
    all_blocked,
)

# ---- processes that map one another's memory ----


@pytest.mark.parametrize("operation", ["state", "restore_thread", "lock"])
def test_while_one_rank_is_off_any_call_on_a_linked_one_hangs(
    machine: Machine, caller: Agent, operation: str
) -> None:
    first, second = (machine.target(SOFTCUDA_IPC_GROUP="job") for _ in range(2))
    stranger = machine.target(SOFTCUDA_IPC_GROUP="other job")
    assert caller.value("state", second.pid) == RUNNING
    caller.value("lock", first.pid)
    hung = caller.start(operation, second.pid, thread="second")
    assert hung.is_blocked()
    assert caller.value("state", first.pid) == LOCKED
    assert caller.value("state", stranger.pid) == RUNNING
    caller.value("checkpoint", first.pid)
    assert hung.is_blocked()
    caller.value("restore", first.pid)
    caller.value("unlock", first.pid)
    assert hung.wait()[0] == 0, "a late success"


def test_a_rank_whose_linked_peer_dies_is_free(machine: Machine, caller: Agent) -> None:
    first, second = (machine.target(SOFTCUDA_IPC_GROUP="job") for _ in range(2))
    caller.value("lock", first.pid)
    hung = caller.start("lock", second.pid, thread="second")
    assert hung.is_blocked()
    first.agent.kill()
    assert hung.wait()[0] == 0


def test_a_question_about_a_linked_rank_may_be_given_up(machine: Machine, caller: Agent) -> None:
    first, second = (machine.target(SOFTCUDA_IPC_GROUP="job") for _ in range(2))
    caller.value("lock", first.pid)
    asker = machine.agent()
    assert asker.start("state", second.pid).is_blocked()
    asker.kill()
    caller.value("unlock", first.pid)
    assert caller.value("state", second.pid) == RUNNING


def linked_pair(machine: Machine, mode: str) -> list[Target]:
    return [machine.target(2, SOFTCUDA_IPC_GROUP="job", SOFTCUDA_IPC_MODE=mode) for _ in range(2)]


def test_ranks_of_one_launch_may_be_taken_off_one_after_the_other(
    machine: Machine, caller: Agent
) -> None:
    targets = linked_pair(machine, "parallel-hang")
    for operation in ("lock", "checkpoint", "restore", "unlock"):
        for target in targets:
            assert caller.result(operation, target.pid) == 0
    assert all(target.is_intact() for target in targets)


def test_parallel_operations_on_linked_ranks_may_be_refused(
    machine: Machine, caller: Agent
) -> None:
    first, second = linked_pair(machine, "parallel-refuse")
    for target in (first, second):
        caller.value("lock", target.pid)
    machine.fault(f"checkpoint {first.pid} * hang")
    assert caller.start("checkpoint", first.pid, thread="first").is_blocked()
    assert caller.result("checkpoint", second.pid) == 801
    assert caller.value("state", second.pid) == LOCKED
    first.agent.kill()
    assert caller.result("checkpoint", second.pid) == 0


def test_parallel_operations_on_linked_ranks_may_hang_for_ever(
    machine: Machine, caller: Agent
) -> None:
    first, second = linked_pair(machine, "parallel-hang")
    for target in (first, second):
        caller.value("lock", target.pid)
    machine.fault(f"checkpoint {first.pid} * hang")
    assert caller.start("checkpoint", first.pid, thread="first").is_blocked()
    hung = caller.start("checkpoint", second.pid, thread="second")
    assert hung.is_blocked()
    first.agent.kill()
    assert hung.is_blocked(), "it does not come back when the other is gone"
    second.agent.kill()
    assert hung.wait()[0] == 304


# ---- collectives ----


@pytest.fixture
def group(tmp_path: Path) -> str:
    return str(tmp_path / "group")


def test_a_collective_ends_when_every_rank_has_joined(machine: Machine, group: str) -> None:
    ranks = [machine.target().agent for _ in range(3)]
    early = [ranks[rank].start("all_reduce", group, 3, rank, 0) for rank in range(2)]
    assert all_blocked(*early)
    assert ranks[2].result("all_reduce", group, 3, 2, 0) == 0
    assert [call.wait()[0] for call in early] == [0, 0]
    many = [ranks[rank].start("all_reduce", group, 3, rank, 0, 50) for rank in range(3)]
    assert [call.wait()[0] for call in many] == [0, 0, 0]


def test_the_host_runs_ahead_of_the_device_by_as_many_collectives_as_asked(
    machine: Machine, caller: Agent, group: str
) -> None:
    first = machine.target().agent
    for _ in range(2):
        assert first.result("all_reduce", group, 2, 0, 2) == 0
    assert caller.result("lock", first.pid, 50) == 600, "the device still spins"
    third = first.start("all_reduce", group, 2, 0, 2)
    assert third.is_blocked()
    assert machine.target().agent.result("all_reduce", group, 2, 1, 2) == 0
    assert third.wait()[0] == 0


def test_a_rank_locked_before_it_joins_makes_the_lock_of_its_peer_impossible(
    machine: Machine, caller: Agent, group: str
) -> None:
    first, second = machine.target().agent, machine.target().agent
    caller.value("lock", second.pid)
    spinning = first.start("all_reduce", group, 2, 0, 0)
    assert spinning.is_blocked()
    late = second.start("all_reduce", group, 2, 1, 0)
    assert caller.result("lock", first.pid, 200) == 600
    caller.value("unlock", second.pid)  # the way out: all go on, then one tries again
    assert (spinning.wait()[0], late.wait()[0]) == (0, 0)
    for agent in (first, second):
        assert caller.result("lock", agent.pid, 200) == 0


def test_copies_and_synchronization_wait_for_the_collective(machine: Machine, group: str) -> None:
    first, second = machine.target(2), machine.target()
    assert first.agent.result("all_reduce", group, 2, 0, 1) == 0
    copying = first.agent.start("digest", first.address, first.size)
    assert copying.is_blocked()
    assert second.agent.result("all_reduce", group, 2, 1, 0) == 0
    assert copying.wait() == (0, first.written)


def test_a_collective_is_refused_if_its_shape_is_wrong(machine: Machine, group: str) -> None:
    agent = machine.target().agent
    for ranks, rank, run_ahead in ((0, 0, 0), (1, 1, 0), (1, -1, 0), (1, 0, -1), (257, 0, 0)):
        assert agent.result("all_reduce", group, ranks, rank, run_ahead) == 1
    assert agent.result("all_reduce", "/nonexistent/group", 1, 0, 0) == 1
    assert agent.result("all_reduce", group, 1, 0, 0) == 0
    assert agent.result("all_reduce", group, 2, 0, 0) == 1, "a group keeps its shape"


def test_ranks_of_a_synchronous_loop_are_locked_in_the_gap_between_two_steps(
    machine: Machine, caller: Agent, group: str
) -> None:
    agents = [machine.target().agent for _ in range(2)]
    loops = [
        agent.start("all_reduce", group, 2, rank, 0, 100, 0.01) for rank, agent in enumerate(agents)
    ]
    for _ in range(50):
        results = []
        for agent in agents:
            results.append(caller.result("lock", agent.pid, 50))
            if results[-1] != 0:
                break
        for agent, result in zip(agents, results, strict=False):
            if result == 0:
                caller.value("unlock", agent.pid)
        if results == [0, 0]:
            break
    assert results == [0, 0], "never at a common collective"
    assert [loop.wait()[0] for loop in loops] == [0, 0]
