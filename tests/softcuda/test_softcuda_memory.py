"""Device memory: real bytes, real capacity, and an honest price in host memory."""

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
    wait_until,
)


def park(caller: Agent, pid: int) -> None:
    assert caller.result("lock", pid) == 0
    assert caller.result("checkpoint", pid) == 0


def wake(caller: Agent, pid: int) -> None:
    assert caller.result("restore", pid) == 0
    assert caller.result("unlock", pid) == 0


# ---- allocation ----


def test_capacity_is_shared_by_all_processes_and_counted_in_pages(machine: Machine) -> None:
    first, second = machine.target(40), machine.target(22)
    assert second.agent.value("memory_info") == [2 * MIB, 64 * MIB]
    assert second.agent.result("allocate", 3 * MIB) == 2
    small = second.agent.value("allocate", 1)
    assert second.agent.result("allocate", 1) == 2
    assert second.agent.result("free", small) == 0
    assert first.agent.value("memory_info") == [2 * MIB, 64 * MIB]


def test_scattered_pages_serve_one_allocation(machine: Machine) -> None:
    agent = machine.target().agent
    addresses = [agent.value("allocate", 2 * MIB) for _ in range(32)]
    for address in addresses[::2]:
        assert agent.result("free", address) == 0
    large = agent.value("allocate", 32 * MIB)
    written = agent.value("write", large, 1, 32 * MIB)
    assert agent.value("digest", large, 32 * MIB) == written


def test_memory_of_a_killed_process_is_free_again(machine: Machine) -> None:
    first = machine.target(60)
    first.agent.kill()
    assert machine.target(60).is_intact()


def test_memory_of_a_zombie_is_free(machine: Machine) -> None:
    first = machine.target(60)
    first.agent.process.send_signal(signal.SIGKILL)
    stat = Path(f"/proc/{first.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    assert machine.target(60).is_intact()


def test_misuse_is_refused_with_the_drivers_codes(machine: Machine) -> None:
    agent = machine.agent()
    assert agent.result("allocate", MIB) == 3
    assert agent.result("init", 1) == 1
    agent.value("init")
    assert agent.result("allocate", MIB) == 201
    agent.value("context")
    assert agent.result("allocate", 0) == 1
    address = agent.value("allocate", 2 * MIB)
    assert agent.result("digest", address, 2 * MIB + 1) == 1
    assert agent.result("digest", address - 1, 1) == 1
    assert agent.result("write_from", address, 8, MIB) == 1, "the host address is bad"
    assert agent.result("memset32", address + 1, 1, 1) == 1
    assert agent.result("free", address + 1) == 1
    assert agent.result("free", address) == 0
    assert agent.result("free", address) == 1
    assert agent.result("device_uuid", 2) == 101
    assert agent.result("context", 2) == 101
    assert agent.value("error_name", 401) == "CUDA_ERROR_ILLEGAL_STATE"
    assert agent.result("error_name", 12345) == 1


def test_sets_and_copies_move_the_bytes_that_they_should(machine: Machine) -> None:
    agent = machine.target().agent
    first, second = agent.value("allocate", 6 * MIB), agent.value("allocate", 6 * MIB)
    agent.value("memset8", first, 0, 6 * MIB)
    edge = first + 2 * MIB - 3
    agent.value("memset8", edge, 0xAB, 6)
    assert agent.value("read", edge - 1, 8) == "00" + "ab" * 6 + "00"
    agent.value("copy", second + 1, edge - 1, 8)
    assert agent.value("read", second + 1, 8) == "00" + "ab" * 6 + "00"
    agent.value("memset32", second + 4, 0x01020304, 2)
    assert agent.value("read", second + 4, 8) == "0403020104030201"


def test_device_memory_can_not_be_touched_by_the_host(machine: Machine) -> None:
    target = machine.target(2)
    target.agent.start("touch", target.address).wait_started()
    assert target.agent.process.wait(10) == -signal.SIGSEGV


def test_contexts_own_their_memory_and_are_current_per_thread(machine: Machine) -> None:
    agent = machine.agent()
    agent.value("init")
    handle = agent.value("create_context", 1)
    assert agent.value("current_context") == handle
    assert agent.value("current_device") == 1
    assert agent.value("current_context", thread="other") is None
    agent.value("allocate", 10 * MIB)
    assert agent.value("memory_info")[0] == 54 * MIB
    assert agent.result("destroy_context", handle) == 0
    assert agent.result("destroy_context", handle) == 201
    assert agent.result("set_context", handle) == 201
    assert agent.result("memory_info") == 201
    agent.value("context", 1)
    assert agent.value("memory_info")[0] == 64 * MIB


def test_a_primary_context_lives_until_its_last_release(machine: Machine) -> None:
    agent = machine.agent()
    agent.value("init")
    handle = agent.value("context", 0)
    assert agent.value("context", 0) == handle
    agent.value("allocate", 10 * MIB)
    assert agent.result("release_context", 0) == 0
    assert agent.value("memory_info")[0] == 54 * MIB
    assert agent.result("release_context", 0) == 0
    assert agent.result("release_context", 0) == 201
    assert machine.target().agent.value("memory_info")[0] == 64 * MIB


def test_a_context_costs_what_the_environment_says(make_machine: MakeMachine) -> None:
    machine = make_machine(SOFTCUDA_CONTEXT_MIB="6")
    target, caller = machine.target(), machine.agent()
    assert target.agent.value("memory_info")[0] == 58 * MIB
    park(caller, target.pid)
    tenant = machine.target(58)
    assert caller.result("restore", target.pid) == 2, "a context comes back, too"
    assert tenant.is_intact()


def test_one_process_uses_several_devices(machine: Machine) -> None:
    target, caller = machine.target(40, ordinal=0), machine.agent()
    agent = target.agent
    agent.value("context", 1, thread="second")
    other = agent.value("allocate", 50 * MIB, thread="second")
    written = agent.value("write", other, 7, 50 * MIB, thread="second")
    assert agent.value("memory_info")[0] == 24 * MIB
    assert agent.value("memory_info", thread="second")[0] == 14 * MIB
    park(caller, target.pid)
    tenants = [machine.target(64, ordinal) for ordinal in range(2)]
    assert all(tenant.is_intact() for tenant in tenants)
    for tenant in tenants:
        tenant.agent.kill()
    wake(caller, target.pid)
    assert target.is_intact()
    assert agent.value("digest", other, 50 * MIB) == written


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("1", [1]), ("1,0", [1, 0]), ("0,7,1", [0]), ("U1", [1]), ("U1,0", [1, 0]), ("u1", [1])],
)
def test_visible_devices_are_chosen_and_ordered(
    machine: Machine, visible: str, expected: list[int]
) -> None:
    reader = machine.agent()
    reader.value("nvml", "nvmlInit")
    uuids = [reader.value("nvml", "nvmlDeviceGetUUID", index) for index in range(2)]
    visible = visible.replace("U1", uuids[1]).replace("u1", uuids[1][:12])
    agent = machine.agent(CUDA_VISIBLE_DEVICES=visible)
    agent.value("init")
    assert agent.value("device_count") == len(expected)
    seen = [agent.value("device_uuid", ordinal) for ordinal in range(len(expected))]
    wanted = [uuids[index].removeprefix("GPU-").replace("-", "") for index in expected]
    assert seen == wanted


@pytest.mark.parametrize("visible", ["", "7", "0,0", "GPU-", "NoDevFiles"])
def test_no_visible_device_is_an_error_of_init(machine: Machine, visible: str) -> None:
    assert machine.agent(CUDA_VISIBLE_DEVICES=visible).result("init") == 100


def test_devices_describe_themselves(machine: Machine) -> None:
    agent = machine.target().agent
    assert agent.value("device_name", 1) == "softcuda device"
    assert agent.value("device_total", 1) == 64 * MIB
    assert [agent.value("device_attribute", number, 1) for number in (75, 76, 33)] == [9, 0, 17]
    assert agent.result("device_attribute", 9999, 1) == 1


# ---- snapshot and restore ----


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
