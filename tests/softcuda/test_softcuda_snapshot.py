"""Snapshots: real bytes, real room, and an honest price in host memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from softcuda_harness import (
    CHECKPOINTED,
    LOCKED,
    MIB,
    Agent,
    Machine,
    MakeMachine,
    memory_kib,
    park,
    wait_until,
    wake,
)


def test_two_jobs_that_do_not_fit_together_can_alternate(machine: Machine, caller: Agent) -> None:
    first = machine.target(50)
    park(caller, first.pid)
    second = machine.target(50)
    for _ in range(2):
        park(caller, second.pid)
        wake(caller, first.pid)
        assert first.is_intact()
        park(caller, first.pid)
        wake(caller, second.pid)
        assert second.is_intact()


def test_restored_bytes_come_from_the_host_copy_at_the_same_address(
    machine: Machine, caller: Agent
) -> None:
    target = machine.target(30)
    park(caller, target.pid)
    tenant = machine.target(64)  # overwrites every page of the device
    tenant.agent.kill()
    wake(caller, target.pid)
    assert target.is_intact()


def test_a_restore_without_room_is_stuck_for_ever(machine: Machine, caller: Agent) -> None:
    target = machine.target(40)
    park(caller, target.pid)
    tenant = machine.target(40)
    assert caller.result("restore", target.pid) == 2
    assert caller.value("state", target.pid) == CHECKPOINTED
    tenant.agent.kill()
    assert caller.result("restore", target.pid) == 304
    assert caller.result("unlock", target.pid) == 401
    assert caller.value("state", target.pid) == CHECKPOINTED


def test_a_mended_driver_restores_when_there_is_room(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(SOFTCUDA_STICKY_OOM="0")
    target, caller = machine.target(40), machine.agent()
    park(caller, target.pid)
    tenant = machine.target(40)
    assert caller.result("restore", target.pid) == 2
    tenant.agent.kill()
    wake(caller, target.pid)
    assert target.is_intact()


def test_a_restore_that_lacks_room_on_one_device_takes_none_on_the_other(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(SOFTCUDA_STICKY_OOM="0")
    target, caller = machine.target(40, ordinal=0), machine.agent()
    target.agent.value("context", 1, thread="second")
    target.agent.value("allocate", 40 * MIB, thread="second")
    park(caller, target.pid)
    tenant = machine.target(40, ordinal=1)
    assert caller.result("restore", target.pid) == 2
    assert machine.target(64, ordinal=0).is_intact()
    assert tenant.is_intact()


def test_a_device_map_that_leads_to_a_full_device_is_forgotten(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(SOFTCUDA_STICKY_OOM="0")
    target, caller = machine.target(40, ordinal=0), machine.agent()
    uuids = [target.agent.value("device_uuid", ordinal) for ordinal in range(2)]
    park(caller, target.pid)
    tenant = machine.target(40, ordinal=1)
    assert caller.result("restore_to", target.pid, [uuids, uuids[::-1]]) == 2
    wake(caller, target.pid)
    assert target.is_intact()
    assert tenant.is_intact()
    assert target.agent.value("device_uuid", 0) == uuids[0]


def test_device_memory_is_not_resident_and_a_snapshot_is(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(fresh=True, SOFTCUDA_MEM_MIB="256")
    agent, caller = machine.target().agent, machine.agent()
    before = memory_kib(agent.pid, "VmRSS")
    address = agent.value("allocate", 200 * MIB)
    agent.value("memset8", address, 1, 200 * MIB)
    assert memory_kib(agent.pid, "VmRSS") - before < 4 << 10
    anonymous = memory_kib(agent.pid, "RssAnon")
    park(caller, agent.pid)
    grown = memory_kib(agent.pid, "RssAnon") - anonymous
    assert 200 << 10 <= grown < 204 << 10
    wake(caller, agent.pid)
    assert memory_kib(agent.pid, "RssAnon") - anonymous < 4 << 10


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A new memory cgroup, of either version, that takes processes."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    for root in roots:
        path = root / f"softcuda-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        limits = (path / "memory.max", path / "memory.limit_in_bytes")
        if any(limit.exists() for limit in limits):
            break
        path.rmdir()
    else:
        pytest.skip("no memory cgroup can be made here (needs root and the memory controller)")
    yield path

    def is_removed() -> bool:
        try:
            path.rmdir()
        except OSError:
            return not path.exists()
        return True

    wait_until(is_removed)


def usage_mib(cgroup: Path) -> float:
    names = ("memory.current", "memory.usage_in_bytes")
    return next(int(path.read_text()) / MIB for n in names if (path := cgroup / n).exists())


def test_a_snapshot_is_charged_to_the_memory_cgroup_of_the_job(
    make_machine: MakeMachine, memory_cgroup: Path
) -> None:
    machine = make_machine(fresh=True, SOFTCUDA_MEM_MIB="128")
    agent, caller = machine.agent(), machine.agent()
    (memory_cgroup / "cgroup.procs").write_text(str(agent.pid))
    agent.value("init")
    agent.value("context")
    address = agent.value("allocate", 100 * MIB)
    agent.value("memset8", address, 1, 100 * MIB)
    before = usage_mib(memory_cgroup)
    assert before < 50, "device memory must not be charged to the job"
    park(caller, agent.pid)
    assert usage_mib(memory_cgroup) - before > 98
    wake(caller, agent.pid)
    assert usage_mib(memory_cgroup) - before < 10
    agent.kill()


def test_a_snapshot_beyond_the_limit_of_the_cgroup_kills_the_job(
    make_machine: MakeMachine, memory_cgroup: Path
) -> None:
    machine = make_machine(fresh=True, SOFTCUDA_MEM_MIB="128")
    agent, caller = machine.agent(), machine.agent()
    names = ("memory.max", "memory.limit_in_bytes")
    limit = next(path for name in names if (path := memory_cgroup / name).exists())
    limit.write_text(str(64 * MIB))
    (memory_cgroup / "cgroup.procs").write_text(str(agent.pid))
    agent.value("init")
    agent.value("context")
    agent.value("allocate", 100 * MIB)
    assert caller.result("lock", agent.pid) == 0
    assert caller.result("checkpoint", agent.pid) == 304
    assert agent.process.wait(10) == -signal.SIGKILL
    assert machine.target(128).is_intact()


def test_a_throttle_sets_the_pace_of_both_copies(make_machine: MakeMachine) -> None:
    machine = make_machine(SOFTCUDA_THROTTLE_MBPS="200")
    target, caller = machine.target(60), machine.agent()
    assert caller.result("lock", target.pid) == 0
    expected = 60 * MIB / 200e6
    for operation in ("checkpoint", "restore"):
        before = time.monotonic()
        assert caller.result(operation, target.pid) == 0
        assert expected * 0.98 <= time.monotonic() - before < expected + 0.5
    assert caller.value("state", target.pid) == LOCKED


# ---- the pool ----


def test_the_first_user_fixes_the_geometry(make_machine: MakeMachine) -> None:
    machine = make_machine()
    agent = machine.agent(SOFTCUDA_DEVICES="1", SOFTCUDA_MEM_MIB="8")
    agent.value("init")
    agent.value("context", 1)
    assert agent.value("device_count") == 2
    assert agent.value("memory_info") == [64 * MIB, 64 * MIB]


def test_init_fills_every_pool_and_may_be_repeated(
    make_machine: MakeMachine, softcuda_build: Path
) -> None:
    machine = make_machine()
    command = [str(softcuda_build / "softcuda-init"), str(machine.directory)]
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout == f"{machine.directory}: 2 devices of 64 MiB\n"
    for index in range(2):
        pool = (machine.directory / f"gpu{index}.memory").stat()
        assert pool.st_size == 64 * MIB
        assert pool.st_blocks * 512 >= 64 * MIB
    misused = subprocess.run([*command, "more"], capture_output=True, timeout=60, check=False)
    assert misused.returncode == 2


def test_processes_that_start_together_make_the_devices_once(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine()
    machine.directory = machine.directory.with_name("made-together")
    agents = [machine.agent() for _ in range(4)]
    inits = [agent.start("init") for agent in agents]
    assert [call.wait()[0] for call in inits] == [0] * 4
    contexts = [agent.start("context", 1) for agent in agents]
    assert [call.wait()[0] for call in contexts] == [0] * 4
    for agent in agents:
        agent.value("allocate", 16 * MIB)
    assert agents[0].value("memory_info")[0] == 0
    assert (machine.directory / "gpu1.memory").stat().st_size == 64 * MIB
    assert not (machine.directory / "gpu0.memory").exists(), "a pool is made when it is needed"


def test_a_directory_that_can_not_be_used_is_named(make_machine: MakeMachine) -> None:
    machine = make_machine()
    variables = machine.variables(SOFTCUDA_DIR="/nonexistent/devices")
    program = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == "802\n"
    assert "/nonexistent/devices" in done.stderr
    assert "SOFTCUDA_DIR" in done.stderr


def test_a_ledger_of_another_version_is_refused(make_machine: MakeMachine) -> None:
    machine = make_machine(fresh=True)
    (machine.directory / "ledger").write_bytes(b"x" * (1 << 20))
    assert machine.agent().result("init") == 802


def test_devices_whose_maker_was_killed_are_made_again(make_machine: MakeMachine) -> None:
    machine = make_machine(fresh=True)
    ledger = machine.directory / "ledger"
    ledger.write_bytes(bytes(1000))
    assert machine.target(64).is_intact()
    assert ledger.stat().st_size > 1000
