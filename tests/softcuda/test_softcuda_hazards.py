"""What callers, users and the kernel do to targets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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
    reach,
    wait_until,
)

# ---- the caller is killed ----


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_caller_killed_in_an_operation_wedges_the_target_for_ever(
    machine: Machine, caller: Agent, operation: str
) -> None:
    target = machine.target(2)
    reach(caller, target.pid, operation)
    target.agent.process.send_signal(signal.SIGSTOP)  # so that the kill comes in time
    doomed = machine.agent()
    assert doomed.start(operation, target.pid).is_blocked(for_s=0.05)
    doomed.kill()
    target.agent.process.send_signal(signal.SIGCONT)
    wait_until(lambda: target.agent.start("memory_info").is_blocked(for_s=0.3))
    asked = caller.start("state", target.pid)
    assert asked.is_blocked(for_s=0.3)
    target.agent.kill()
    assert asked.wait()[0] == 304


def test_a_caller_killed_while_its_lock_waits_wedges_the_target(
    machine: Machine, caller: Agent, tmp_path: Path
) -> None:
    target, peer, group = machine.target(), machine.target(), str(tmp_path / "group")
    assert target.agent.result("all_reduce", group, 2, 0, 1) == 0
    doomed = machine.agent()
    assert doomed.start("lock", target.pid).is_blocked(for_s=0.05)
    doomed.kill()
    assert peer.agent.result("all_reduce", group, 2, 1, 0) == 0
    stuck = target.agent.start("synchronize")
    unlock = caller.start("unlock", target.pid)
    assert all_blocked(stuck, unlock, for_s=0.3)


def test_a_caller_killed_while_bytes_move_wedges_the_target(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(SOFTCUDA_THROTTLE_MBPS="40")
    target, caller, doomed = machine.target(40), machine.agent(), machine.agent()
    caller.value("lock", target.pid)
    assert doomed.start("checkpoint", target.pid).is_blocked(for_s=0.05)
    doomed.kill()
    observer = machine.target().agent
    wait_until(lambda: observer.value("memory_info")[0] == 64 * MIB)
    assert caller.start("state", target.pid).is_blocked(), "though the copy came to its end"


def test_a_caller_killed_over_a_question_does_no_harm(machine: Machine, caller: Agent) -> None:
    target = machine.target()
    target.agent.process.send_signal(signal.SIGSTOP)
    doomed = machine.agent()
    assert doomed.start("state", target.pid).is_blocked(for_s=0.05)
    doomed.kill()
    target.agent.process.send_signal(signal.SIGCONT)
    assert caller.value("state", target.pid) == RUNNING
    assert target.agent.result("memory_info") == 0


def test_a_caller_killed_between_operations_does_no_harm(machine: Machine, caller: Agent) -> None:
    target = machine.target(2)
    first = machine.agent()
    first.value("lock", target.pid)
    first.value("checkpoint", target.pid)
    first.kill()
    assert caller.value("state", target.pid) == CHECKPOINTED
    caller.value("restore", target.pid)
    caller.value("unlock", target.pid)
    assert target.is_intact()


# ---- rights ----

NOBODY = 65534


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("this needs root")


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("code", [304, 800])
def test_another_users_process_is_refused(make_machine: MakeMachine, code: int) -> None:
    machine = make_machine(SOFTCUDA_FOREIGN_ERROR=str(code))
    caller, target = machine.agent(), machine.target(2)
    caller.value("version")
    caller.value("become", NOBODY)
    for operation in ("state", "restore_thread", *OPERATIONS):
        assert caller.result(operation, target.pid) == code
    assert machine.agent().value("state", target.pid) == RUNNING


@pytest.mark.usefixtures("root")
def test_users_share_the_devices_and_root_may_operate_on_anyone(
    machine: Machine, caller: Agent
) -> None:
    agent = machine.agent()
    agent.value("version")
    agent.value("become", NOBODY)
    agent.value("init")
    agent.value("context")
    address = agent.value("allocate", 40 * MIB)
    written = agent.value("write", address, 1, 40 * MIB)
    for operation in ("lock", "checkpoint"):
        caller.value(operation, agent.pid)
    tenant = machine.target(64)
    tenant.agent.kill()
    for operation in ("restore", "unlock"):
        caller.value(operation, agent.pid)
    assert agent.value("digest", address, 40 * MIB) == written
    other = machine.agent()
    other.value("version")
    other.value("become", NOBODY)
    assert other.value("state", agent.pid) == RUNNING, "one's own processes need no root"


def test_a_restore_without_persistence_needs_a_caller_that_did_init(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(SOFTCUDA_PERSISTENCE="0")
    caller, target = machine.agent(), machine.target(2)
    for operation in ("lock", "checkpoint"):
        caller.value(operation, target.pid)
    assert caller.result("restore", target.pid) == 800
    assert caller.value("state", target.pid) == CHECKPOINTED
    caller.value("init")
    assert caller.result("restore", target.pid) == 0


# ---- targets that do not run ----


def test_a_stopped_target_answers_nothing_until_it_goes_on(machine: Machine, caller: Agent) -> None:
    target = machine.target(2)
    target.agent.process.send_signal(signal.SIGSTOP)
    asked = caller.start("state", target.pid, thread="asked")
    lock = caller.start("lock", target.pid, 10, thread="lock")
    assert all_blocked(asked, lock), "not even the timeout of a lock ends it"
    target.agent.process.send_signal(signal.SIGCONT)
    assert lock.wait()[0] == 0
    assert asked.wait()[0] == 0
    target.agent.process.send_signal(signal.SIGSTOP)
    checkpoint = caller.start("checkpoint", target.pid)
    assert checkpoint.is_blocked()
    target.agent.process.send_signal(signal.SIGCONT)
    assert checkpoint.wait()[0] == 0


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A new cgroup that can freeze processes: its directory."""
    roots = [Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
    for root in roots:
        path = root / f"softcuda-freezer-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        if (path / "freezer.state").exists() or (path / "cgroup.freeze").exists():
            break
        path.rmdir()
    else:
        pytest.skip("no freezer cgroup can be made here (needs root)")
    yield path
    set_frozen(path, False)

    def is_removed() -> bool:
        try:
            path.rmdir()
        except OSError:
            return not path.exists()
        return True

    wait_until(is_removed)


def set_frozen(cgroup: Path, frozen: bool) -> None:
    old = cgroup / "freezer.state"
    if old.exists():
        old.write_text("FROZEN" if frozen else "THAWED")
        wait_until(lambda: old.read_text().strip() == ("FROZEN" if frozen else "THAWED"))
        return
    (cgroup / "cgroup.freeze").write_text(str(int(frozen)))
    events = cgroup / "cgroup.events"
    wait_until(lambda: f"frozen {int(frozen)}" in events.read_text())


def test_a_frozen_cgroup_hangs_every_operation_until_it_is_thawed(
    machine: Machine, caller: Agent, freezer: Path
) -> None:
    target = machine.target(2)
    (freezer / "cgroup.procs").write_text(str(target.pid))
    set_frozen(freezer, True)
    lock = caller.start("lock", target.pid)
    assert lock.is_blocked()
    set_frozen(freezer, False)
    assert lock.wait()[0] == 0
    assert caller.value("state", target.pid) == LOCKED
    target.agent.kill()


# ---- identity ----

REUSE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from softcuda_harness import MIB, Machine, RUNNING

def reuse(pid):
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))

machine = Machine(Path(sys.argv[2]), Path(sys.argv[3]), {"SOFTCUDA_CONTEXT_MIB": "0"})
caller = machine.agent()
reuse(5000)
first = machine.target(60)
assert first.pid == 5000
first.agent.kill()
reuse(5000)
stranger = machine.agent()
assert stranger.pid == 5000
assert caller.result("state", 5000) == 3, "the new process has no CUDA"
second = machine.target(60)
assert second.is_intact(), "the memory of the dead is free, whoever has its pid"
second.agent.kill()
stranger.kill()
reuse(5000)
third = machine.target(60)
assert third.pid == 5000
assert caller.value("state", 5000) == RUNNING
assert caller.result("lock", 5000) == 0
machine.close()
print("done")
"""


@pytest.mark.usefixtures("root")
def test_a_reused_pid_is_another_process(machine: Machine) -> None:
    here = str(Path(__file__).parent)
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable]
    done = subprocess.run(
        [*command, "-c", REUSE, here, str(machine.directory), str(machine.library_directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


# ---- the end ----


@pytest.mark.parametrize("blocks", [False, True])
def test_exit_of_a_parked_process_blocks_if_it_unloads_modules(
    machine: Machine, caller: Agent, blocks: bool
) -> None:
    target = machine.target(2, SOFTCUDA_EXIT_BLOCKS=str(int(blocks)))
    for operation in ("lock", "checkpoint"):
        caller.value(operation, target.pid)
    if not blocks:
        assert target.agent.finish() == 0
        return
    with pytest.raises(subprocess.TimeoutExpired):
        target.agent.finish(0.3)
    for operation in ("restore", "unlock"):
        caller.value(operation, target.pid)
    assert target.agent.process.wait(10) == 0
