"""What goes wrong with real drivers, on request."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from softcuda_harness import (
    FAILED,
    LOCKED,
    MIB,
    OPERATIONS,
    Agent,
    Machine,
    MakeMachine,
    all_blocked,
    reach,
)

# ---- the faults file ----


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_injected_error_changes_nothing(machine: Machine, caller: Agent, operation: str) -> None:
    target = machine.target(2)
    before = reach(caller, target.pid, operation)
    machine.fault(f"{operation} * * error:999")
    assert caller.result(operation, target.pid) == 999
    assert caller.value("state", target.pid) == before
    machine.fault()
    assert caller.result(operation, target.pid) == 0


def test_a_success_may_be_a_lie(machine: Machine, caller: Agent) -> None:
    target = machine.target(10)
    caller.value("lock", target.pid)
    machine.fault("checkpoint * * error:0")
    assert caller.result("checkpoint", target.pid) == 0
    assert caller.value("state", target.pid) == LOCKED
    assert machine.target().agent.value("memory_info")[0] == 54 * MIB


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_injected_failure_is_final(machine: Machine, caller: Agent, operation: str) -> None:
    target = machine.target(2)
    reach(caller, target.pid, operation)
    machine.fault(f"{operation} * * fail:801")
    assert caller.result(operation, target.pid) == 801
    machine.fault()
    assert caller.value("state", target.pid) == FAILED
    assert [caller.result(name, target.pid) for name in OPERATIONS] == [401] * 4
    assert target.agent.start("memory_info").is_blocked()


def test_faults_are_chosen_by_operation_process_and_count(machine: Machine, caller: Agent) -> None:
    first, second = machine.target(RANK="3"), machine.target(RANK="4")
    machine.fault(
        "# one of two ranks, at its second lock",
        "",
        f"lock {first.pid} 2 error:46   # by pid",
        "unlock rank:4 * error:47",
        "thread * * error:48",
    )
    assert caller.result("restore_thread", first.pid) == 48
    assert caller.result("lock", first.pid) == 0
    assert caller.result("unlock", first.pid) == 0
    assert caller.result("lock", second.pid) == 0
    assert caller.result("unlock", second.pid) == 47
    assert caller.result("lock", first.pid) == 46
    assert caller.result("lock", first.pid) == 0


def test_a_line_that_makes_no_sense_is_named_and_the_others_hold(
    make_machine: MakeMachine, tmp_path: Path
) -> None:
    faults = tmp_path / "faults"
    lines = ["lock * * explode", "lok * * hang", "lock * *", "lock * * error:x", "init * * error:5"]
    faults.write_text("\n".join(lines))
    machine = make_machine(SOFTCUDA_FAULTS=str(faults))
    program = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=machine.variables(),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == "5\n"
    assert [line for line in lines if f"can't use the line: {line}\n" in done.stderr] == lines[:4]


def test_a_delay_adds_to_the_operation(machine: Machine, caller: Agent) -> None:
    target = machine.target(2)
    machine.fault("lock * * delay:100", "lock * * delay:150")
    before = time.monotonic()
    assert caller.result("lock", target.pid) == 0
    assert time.monotonic() - before >= 0.25


@pytest.mark.parametrize("operation", ["state", *OPERATIONS])
def test_a_hang_lasts_until_the_target_is_killed(
    machine: Machine, caller: Agent, operation: str
) -> None:
    target = machine.target(2)
    if operation != "state":
        reach(caller, target.pid, operation)
    machine.fault(f"{operation} * * hang")
    hung = caller.start(operation, target.pid, thread="hung")
    assert hung.is_blocked()
    later = caller.start("restore_thread", target.pid, thread="later")
    assert all_blocked(hung, later)
    target.agent.kill()
    assert (hung.wait()[0], later.wait()[0]) == (304, 304)
    assert caller.result("state", target.pid) == 1


@pytest.mark.parametrize("operation", ["state", *OPERATIONS])
def test_a_stall_lasts_as_long_as_the_faults_file_says_so(
    machine: Machine, caller: Agent, operation: str
) -> None:
    target = machine.target(2)
    if operation != "state":
        reach(caller, target.pid, operation)
    machine.fault(f"{operation} * * stall")
    stalled = caller.start(operation, target.pid)
    assert stalled.is_blocked()
    machine.fault(f"{operation} 1 * stall", "# nobody is meant any more")
    assert stalled.wait()[0] == 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("moment", ["die-before", "die-after", "segv"])
def test_a_target_that_dies_in_an_operation_gives_304_and_its_memory_back(
    machine: Machine, caller: Agent, operation: str, moment: str
) -> None:
    target = machine.target(20)
    reach(caller, target.pid, operation)
    machine.fault(f"{operation} * * {moment}")
    assert caller.result(operation, target.pid) == 304
    expected = signal.SIGSEGV if moment == "segv" else signal.SIGKILL
    assert target.agent.process.wait(10) == -expected
    assert caller.result("state", target.pid) == 1
    assert machine.target().agent.value("memory_info")[0] == 64 * MIB


def test_some_drivers_never_tell_that_the_target_died(make_machine: MakeMachine) -> None:
    machine = make_machine()
    caller, target = machine.agent(SOFTCUDA_DEATH_HANGS="1"), machine.target(2)
    machine.fault("lock * * die-before")
    hung = caller.start("lock", target.pid)
    assert target.agent.process.wait(10) == -signal.SIGKILL
    assert hung.is_blocked()


def test_init_and_allocation_fail_on_request(machine: Machine) -> None:
    agent = machine.agent()
    machine.fault("init * 1 error:802", "alloc * 2 error:2")
    assert agent.result("init") == 802
    assert agent.result("init") == 0
    agent.value("context")
    assert [agent.result("allocate", MIB) for _ in range(3)] == [0, 2, 0]


def test_init_may_be_as_slow_as_on_a_large_machine(make_machine: MakeMachine) -> None:
    agent = make_machine().agent(SOFTCUDA_INIT_MS="300")
    before = time.monotonic()
    assert agent.result("init") == 0
    assert time.monotonic() - before >= 0.3


# ---- resources that can't be saved ----


@pytest.mark.parametrize(("resource", "code"), [("uvm", 801), ("mps", 801), ("mig", 2)])
def test_an_unsupported_resource_fails_the_checkpoint_for_good(
    machine: Machine, caller: Agent, resource: str, code: int
) -> None:
    target = machine.target(2, SOFTCUDA_UNSUPPORTED=resource)
    caller.value("lock", target.pid)
    assert caller.result("checkpoint", target.pid) == code
    assert caller.value("state", target.pid) == FAILED
    assert caller.result("unlock", target.pid) == 401


def test_managed_memory_fails_the_checkpoint_unless_it_was_freed(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target(2)
    managed = target.agent.value("allocate_managed", MIB)
    target.agent.value("free", managed)
    for operation in OPERATIONS:
        caller.value(operation, target.pid)
    target.agent.value("allocate_managed", MIB)
    caller.value("lock", target.pid)
    assert caller.result("checkpoint", target.pid) == 801
    assert caller.value("state", target.pid) == FAILED
