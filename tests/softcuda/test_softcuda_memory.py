"""Device memory: real bytes and real capacity, over devices, contexts and processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from softcuda_harness import (
    MIB,
    Machine,
    MakeMachine,
    park,
    wait_until,
    wake,
)


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
