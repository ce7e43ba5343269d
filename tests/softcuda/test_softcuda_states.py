"""The state machine of the checkpoint calls, on real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from softcuda_harness import (
    CHECKPOINTED,
    LOCKED,
    MIB,
    OPERATIONS,
    RUNNING,
    Agent,
    Machine,
    MakeMachine,
    all_blocked,
)


def test_a_full_cycle_passes_through_the_documented_states(machine: Machine, caller: Agent) -> None:
    target = machine.target(8)
    assert caller.value("state", target.pid) == RUNNING
    for operation, state in (
        ("lock", LOCKED),
        ("checkpoint", CHECKPOINTED),
        ("restore", LOCKED),
        ("unlock", RUNNING),
    ):
        assert caller.result(operation, target.pid) == 0
        assert caller.value("state", target.pid) == state
    assert target.is_intact()


@pytest.mark.parametrize(
    ("reach", "legal"),
    [
        ((), {"lock"}),
        (("lock",), {"checkpoint", "unlock"}),
        (("lock", "checkpoint"), {"restore"}),
    ],
    ids=["running", "locked", "checkpointed"],
)
def test_every_other_pair_of_state_and_operation_is_illegal_and_changes_nothing(
    machine: Machine, caller: Agent, reach: tuple[str, ...], legal: set[str]
) -> None:
    target = machine.target(2)
    for operation in reach:
        assert caller.result(operation, target.pid) == 0
    before = caller.value("state", target.pid)
    for operation in OPERATIONS:
        if operation not in legal:
            assert caller.result(operation, target.pid) == 401, operation
            assert caller.value("state", target.pid) == before


def test_a_lock_that_times_out_says_600_and_leaves_the_target_running(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target()
    target.agent.value("launch", 2000)
    before = time.monotonic()
    assert caller.result("lock", target.pid, 100) == 600
    assert 0.1 <= time.monotonic() - before < 1.5
    assert caller.value("state", target.pid) == RUNNING
    assert target.agent.result("memory_info") == 0


def test_a_lock_waits_for_the_work_in_flight(machine: Machine, caller: Agent) -> None:
    target = machine.target()
    before = time.monotonic()
    target.agent.value("launch", 400)
    assert caller.result("lock", target.pid, 10_000) == 0
    assert time.monotonic() - before >= 0.4


def test_a_lock_waits_for_a_call_in_flight(machine: Machine, caller: Agent, tmp_path: Path) -> None:
    target, second, group = machine.target(), machine.target(), str(tmp_path / "group")
    assert target.agent.result("all_reduce", group, 2, 0, 1) == 0
    waiting = target.agent.start("synchronize")
    assert waiting.is_blocked()
    lock = caller.start("lock", target.pid, 10_000)
    assert lock.is_blocked()
    assert second.agent.result("all_reduce", group, 2, 1, 0) == 0
    assert (waiting.wait()[0], lock.wait()[0]) == (0, 0)


def test_a_lock_waits_for_a_call_that_queues_no_work(machine: Machine, caller: Agent) -> None:
    target = machine.target()
    machine.fault("alloc * * delay:700")
    allocating = target.agent.start("allocate", MIB)
    assert allocating.is_blocked(for_s=0.05)
    assert caller.result("lock", target.pid, 50) == 600
    assert caller.result("lock", target.pid) == 0
    assert allocating.wait()[0] == 0


def test_calls_of_a_locked_target_block_until_it_is_unlocked(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target(8)
    target.agent.value("context", thread="copy")
    assert caller.result("lock", target.pid) == 0
    blocked = [
        target.agent.start("digest", target.address, target.size, thread="copy"),
        target.agent.start("context", 1, thread="context"),
        target.agent.start("device_count", thread="count"),
    ]
    assert all_blocked(*blocked)
    assert caller.result("checkpoint", target.pid) == 0
    assert all_blocked(*blocked)
    assert caller.result("restore", target.pid) == 0
    assert all_blocked(*blocked)
    unlocked_at = time.monotonic()
    assert caller.result("unlock", target.pid) == 0
    assert blocked[0].wait() == (0, target.written)
    assert all(call.wait()[0] == 0 and call.ended_at >= unlocked_at for call in blocked)


def test_the_host_side_of_a_parked_target_runs_on(machine: Machine, caller: Agent) -> None:
    target = machine.target(2)
    assert caller.result("lock", target.pid) == 0
    assert caller.result("checkpoint", target.pid) == 0
    assert target.agent.value("version") == 13000
    assert target.agent.result("set_environment", "ANY", "thing") == 0


def test_calls_that_come_while_a_lock_waits_are_blocked_and_let_go_when_it_gives_up(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target()
    target.agent.value("launch", 5000)
    lock = caller.start("lock", target.pid, 1000)
    assert lock.is_blocked()
    late = target.agent.start("memory_info")
    assert late.is_blocked()
    assert lock.wait()[0] == 600
    assert late.wait()[0] == 0
    assert late.ended_at >= lock.ended_at - 0.1


def test_reserved_words_must_be_zero(machine: Machine, caller: Agent) -> None:
    target = machine.target()
    for index in range(7):
        words = [0] * 7
        words[index] = 1
        assert caller.result("lock", target.pid, 0, words) == 1
    assert caller.result("lock", target.pid, 1 << 32) == 1
    for operation in ("checkpoint", "unlock"):
        for index in range(8):
            words = [0] * 8
            words[index] = 1
            assert caller.result(operation, target.pid, words) == 1
    for index in range(3, 8):
        words = [0] * 8
        words[index] = 1
        assert caller.result("restore", target.pid, words) == 1
    assert caller.value("state", target.pid) == RUNNING


def test_an_argument_block_of_zeros_is_as_good_as_none(machine: Machine, caller: Agent) -> None:
    target = machine.target(2)
    assert caller.result("lock", target.pid) == 0
    assert caller.result("checkpoint", target.pid, [0] * 8) == 0
    assert caller.result("restore", target.pid, [0] * 8) == 0
    assert caller.result("unlock", target.pid, [0] * 8) == 0


def test_a_process_without_cuda_is_not_initialized_and_a_missing_one_is_invalid(
    machine: Machine, caller: Agent
) -> None:
    stranger = machine.agent()
    for operation in ("state", "restore_thread", *OPERATIONS):
        assert caller.result(operation, stranger.pid) == 3
        assert caller.result(operation, 1) == 3
    stranger.kill()
    for pid in (stranger.pid, 0, -1, 1 << 30):
        assert caller.result("state", pid) == 1


def test_a_context_is_not_needed_to_be_a_target(machine: Machine, caller: Agent) -> None:
    agent = machine.agent()
    assert agent.result("init") == 0
    assert caller.value("state", agent.pid) == RUNNING
    for operation in OPERATIONS:
        assert caller.result(operation, agent.pid) == 0


def test_the_restore_thread_is_named_cuda_and_any_thread_id_means_its_process(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target(2)
    thread = caller.value("restore_thread", target.pid)
    name = Path(f"/proc/{target.pid}/task/{thread}/comm").read_text().strip()
    assert name.startswith("cuda")
    assert int(name.removeprefix("cuda"), 16) == thread
    other = target.agent.start("version", thread="other").wait_started()
    assert {thread, other}.isdisjoint({target.pid})
    assert caller.value("state", thread) == RUNNING
    assert caller.result("lock", other) == 0
    assert caller.value("state", target.pid) == LOCKED


def test_signals_to_the_process_never_run_in_the_restore_thread(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target()
    thread = caller.value("restore_thread", target.pid)
    status = Path(f"/proc/{target.pid}/task/{thread}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    unblockable = 1 << 8 | 1 << 18  # SIGKILL, SIGSTOP
    ordinary = (1 << 31) - 1 & ~unblockable
    assert blocked & ordinary == ordinary


def test_a_process_may_checkpoint_itself(machine: Machine) -> None:
    target = machine.target(4)
    for operation in OPERATIONS:
        assert target.agent.result(operation, target.pid, thread="self") == 0
    assert target.is_intact()


def test_a_forked_child_has_no_cuda_and_the_parent_keeps_its_own(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target(4)
    child, init_result, info_result = target.agent.value("fork")
    assert (init_result, info_result) == (3, 3)
    assert caller.result("state", child) == 3
    for operation in OPERATIONS:
        assert caller.result(operation, target.pid) == 0
    target.agent.value("reap", child)
    assert target.is_intact()


def test_a_forked_child_does_not_keep_a_dead_parent_alive(machine: Machine, caller: Agent) -> None:
    target = machine.target(60)
    child, *_ = target.agent.value("fork")
    target.agent.kill()
    try:
        assert caller.result("state", child) == 3
        assert caller.result("state", target.pid) == 1
        assert machine.target(60).is_intact()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_keep_a_caller_of_its_dead_parent_waiting(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target()
    child, *_ = target.agent.value("fork")
    try:
        target.agent.process.send_signal(signal.SIGSTOP)
        asked = caller.start("state", target.pid)
        assert asked.is_blocked()
        target.agent.kill()
        assert asked.wait()[0] == 304
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_device_map_needs_a_driver_of_the_13_0_generation(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(SOFTCUDA_VERSION="12080")
    caller = machine.agent()
    target = machine.target(2)
    assert caller.value("version") == 12080
    pairs = [[target.agent.value("device_uuid", ordinal)] * 2 for ordinal in range(2)]
    assert caller.result("lock", target.pid) == 0
    assert caller.result("checkpoint", target.pid) == 0
    assert caller.result("restore_to", target.pid, pairs) == 1
    assert caller.value("state", target.pid) == CHECKPOINTED
    assert caller.result("restore", target.pid) == 0


def test_custom_storage_is_reserved_before_13_4_and_unsupported_after(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine()
    target = machine.target(2)
    old, new = machine.agent(), machine.agent(SOFTCUDA_VERSION="13040")
    assert old.result("lock", target.pid) == 0
    words = [4096, 0, 0, 0, 0, 0, 0, 0]
    assert old.result("checkpoint", target.pid, words) == 1
    assert new.result("checkpoint", target.pid, words) == 801
    assert new.result("checkpoint", target.pid) == 0
    words = [0, 0, 4096, 0, 0, 0, 0, 0]
    assert old.result("restore", target.pid, words) == 1
    assert new.result("restore", target.pid, words) == 801
    assert new.result("restore", target.pid) == 0


def test_a_device_map_moves_the_target_to_other_devices(machine: Machine, caller: Agent) -> None:
    target = machine.target(40)
    uuids = [target.agent.value("device_uuid", ordinal) for ordinal in range(2)]
    assert caller.result("lock", target.pid) == 0
    assert caller.result("checkpoint", target.pid) == 0
    swapped = [[uuids[0], uuids[1]], [uuids[1], uuids[0]]]
    assert caller.result("restore_to", target.pid, swapped[:1]) == 1
    assert caller.result("restore_to", target.pid, [swapped[0], swapped[0]]) == 1
    assert caller.result("restore_to", target.pid, [[uuids[0], "00" * 16], swapped[1]]) == 101
    assert caller.value("state", target.pid) == CHECKPOINTED
    assert caller.result("restore_to", target.pid, swapped) == 0
    assert caller.result("unlock", target.pid) == 0
    assert target.is_intact()
    assert target.agent.value("device_uuid", 0) == uuids[1]
    tenant = machine.target(40)  # there is room again where the first one was
    assert tenant.is_intact()
    assert machine.agent().result("state", tenant.pid) == 0
    late = machine.agent()
    late.value("init")
    late.value("context", 1)
    assert late.result("allocate", 40 * MIB) == 2
