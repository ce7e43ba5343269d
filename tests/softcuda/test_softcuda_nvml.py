"""The management library, through the real pynvml."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from softcuda_harness import MIB, Agent, Machine, MakeMachine, wait_until

SYMBOLS = [
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlErrorString",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeMode",
]


@pytest.fixture
def reader(machine: Machine) -> Agent:
    return open_reader(machine)


def open_reader(machine: Machine, **environment: str) -> Agent:
    agent = machine.agent(**environment)
    agent.value("nvml", "nvmlInit")
    return agent


def processes(reader: Agent, index: int = 0) -> dict[int, int | None]:
    """Device memory by pid."""
    listed = reader.value("nvml", "nvmlDeviceGetComputeRunningProcesses", index)
    return {item["pid"]: item["usedGpuMemory"] for item in listed}


def test_it_exports_what_pynvml_looks_up_and_no_more(softcuda_build: Path) -> None:
    library = softcuda_build / "libnvidia-ml.so.1"
    command = ["nm", "-D", "--defined-only", str(library)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    assert sorted(line.split()[2] for line in output.splitlines()) == sorted(SYMBOLS)


def test_a_configured_path_serves_without_the_library_path(
    machine: Machine, softcuda_build: Path
) -> None:
    reader = machine.agent(
        LD_LIBRARY_PATH="", AGENT_LIBNVML=str(softcuda_build / "libnvidia-ml.so.1")
    )
    assert reader.value("nvml", "nvmlInit") is None
    assert reader.value("nvml", "nvmlDeviceGetCount") == 2


def test_nothing_works_before_init_nor_after_shutdown(machine: Machine) -> None:
    reader = machine.agent(AGENT_LIBNVML=str(machine.library_directory / "libnvidia-ml.so.1"))
    reader.value("nvml", "nvmlInit")
    reader.value("nvml", "nvmlInit")
    reader.value("nvml", "nvmlShutdown")
    assert reader.value("nvml", "nvmlDeviceGetCount") == 2, "init counts its users"
    reader.value("nvml", "nvmlShutdown")
    assert reader.result("nvml", "nvmlDeviceGetCount") == 1
    assert reader.result("nvml", "nvmlShutdown") == 1


def test_devices_are_found_by_index_uuid_and_bus_id(reader: Agent) -> None:
    for index in range(2):
        uuid = reader.value("nvml", "nvmlDeviceGetUUID", index)
        assert len(uuid) == len("GPU-00000000-0000-0000-0000-000000000000")
        pci = reader.value("nvml", "nvmlDeviceGetPciInfo", index)
        assert pci["busId"] == f"00000000:1{index}:00.0"
        assert pci["busIdLegacy"] == f"0000:1{index}:00.0"
        assert (pci["domain"], pci["bus"], pci["device"]) == (0, 16 + index, 0)
        assert reader.value("nvml", "nvmlDeviceGetHandleByUUID", uuid) == index
        for name in (pci["busId"], pci["busIdLegacy"]):
            assert reader.value("nvml", "nvmlDeviceGetHandleByPciBusId", name) == index
        assert reader.value("nvml", "nvmlDeviceGetMinorNumber", index) == index
        assert reader.value("nvml", "nvmlDeviceGetName", index) == "softcuda device"
    assert reader.result("nvml", "nvmlDeviceGetHandleByIndex", 2) == 2
    assert reader.result("nvml", "nvmlDeviceGetHandleByUUID", "GPU-none") == 6


def test_uuids_are_those_of_the_driver_and_stay_when_devices_are_made_anew(
    make_machine: MakeMachine,
) -> None:
    machine, other = make_machine(fresh=True), make_machine(fresh=True)
    target = machine.target()
    reader = open_reader(machine)
    before = [reader.value("nvml", "nvmlDeviceGetUUID", index) for index in range(2)]
    driver = [target.agent.value("device_uuid", index) for index in range(2)]
    assert [uuid.removeprefix("GPU-").replace("-", "") for uuid in before] == driver
    for path in machine.directory.iterdir():
        path.unlink()
    reader = open_reader(machine)
    assert [reader.value("nvml", "nvmlDeviceGetUUID", index) for index in range(2)] == before
    elsewhere = open_reader(other)
    assert elsewhere.value("nvml", "nvmlDeviceGetUUID", 0) not in before


def test_versions_come_from_the_environment(make_machine: MakeMachine) -> None:
    machine = make_machine(SOFTCUDA_VERSION="12080", SOFTCUDA_DRIVER="570.86.10")
    reader = open_reader(machine)
    assert reader.value("nvml", "nvmlSystemGetDriverVersion") == "570.86.10"
    assert reader.value("nvml", "nvmlSystemGetNVMLVersion") == "12.570.86.10"
    assert reader.value("nvml", "nvmlSystemGetCudaDriverVersion") == 12080
    assert reader.value("nvml", "nvmlSystemGetCudaDriverVersion_v2") == 12080


def test_memory_is_what_the_driver_gave(machine: Machine, reader: Agent) -> None:
    target = machine.target(10, ordinal=1)
    plain = reader.value("nvml", "nvmlDeviceGetMemoryInfo", 1)
    assert plain == {"total": 64 * MIB, "free": 54 * MIB, "used": 10 * MIB}
    second = reader.value("nvml", "nvmlDeviceGetMemoryInfo", 1, 0x02000028)
    assert second == {**plain, "reserved": 0}
    assert reader.value("nvml", "nvmlDeviceGetMemoryInfo", 0)["used"] == 0
    target.agent.kill()
    assert reader.value("nvml", "nvmlDeviceGetMemoryInfo", 1)["used"] == 0


def test_a_memory_block_of_another_version_is_refused(machine: Machine) -> None:
    program = """
import ctypes
library = ctypes.CDLL("libnvidia-ml.so.1")
assert library.nvmlInitWithFlags(0) == 0
handle = ctypes.c_void_p()
assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
block = (ctypes.c_uint64 * 5)(0x01000028)
print(library.nvmlDeviceGetMemoryInfo_v2(handle, block))
print(library.nvmlDeviceGetMemoryInfo_v2(ctypes.c_void_p(8), block))
print(library.nvmlDeviceGetIndex(ctypes.c_void_p(8), block))
"""
    assert run_python(machine, program) == "25\n25\n2\n"


def run_python(machine: Machine, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=machine.variables(),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout


def test_processes_are_listed_from_context_to_death_but_not_while_checkpointed(
    machine: Machine, reader: Agent, caller: Agent
) -> None:
    target = machine.target(10)
    caller.value("init")  # a helper without a context is no user of the device
    assert processes(reader) == {target.pid: 10 * MIB}
    assert processes(reader, 1) == {}
    caller.value("lock", target.pid)
    assert processes(reader) == {target.pid: 10 * MIB}
    caller.value("checkpoint", target.pid)
    assert processes(reader) == {}
    assert reader.value("nvml", "nvmlDeviceGetMemoryInfo", 0)["used"] == 0
    caller.value("restore", target.pid)
    assert processes(reader) == {target.pid: 10 * MIB}
    target.agent.kill()
    assert processes(reader) == {}


def test_a_migrated_process_is_listed_on_its_new_device(
    machine: Machine, reader: Agent, caller: Agent
) -> None:
    target = machine.target(10)
    uuids = [target.agent.value("device_uuid", index) for index in range(2)]
    caller.value("lock", target.pid)
    caller.value("checkpoint", target.pid)
    caller.value("restore_to", target.pid, [uuids, uuids[::-1]])
    assert processes(reader, 0) == {}
    assert processes(reader, 1) == {target.pid: 10 * MIB}


def test_a_list_longer_than_expected_is_sized_first(machine: Machine, reader: Agent) -> None:
    targets = [machine.target(2) for _ in range(8)]
    assert processes(reader) == {target.pid: 2 * MIB for target in targets}


def test_memory_per_process_may_be_withheld(machine: Machine) -> None:
    target = machine.target(10)
    reader = open_reader(machine, SOFTCUDA_NVML_USED_NONE="1")
    assert processes(reader) == {target.pid: None}
    assert reader.value("nvml", "nvmlDeviceGetMemoryInfo", 0)["used"] == 10 * MIB


def test_modes(machine: Machine, reader: Agent) -> None:
    assert reader.value("nvml", "nvmlDeviceGetPersistenceMode", 0) == 1
    assert reader.value("nvml", "nvmlDeviceGetComputeMode", 0) == 0
    assert reader.result("nvml", "nvmlDeviceGetMigMode", 0) == 3
    other = open_reader(machine, SOFTCUDA_PERSISTENCE="0", SOFTCUDA_UNSUPPORTED="mig")
    assert other.value("nvml", "nvmlDeviceGetPersistenceMode", 0) == 0
    assert other.value("nvml", "nvmlDeviceGetMigMode", 0) == [1, 1]
    assert reader.value("nvml", "nvmlDeviceGetCurrentClocksThrottleReasons", 0) == 0
    hot = open_reader(machine, SOFTCUDA_CLOCK_REASONS="64")
    assert hot.value("nvml", "nvmlDeviceGetCurrentClocksThrottleReasons", 0) == 64


def utilization(reader: Agent, index: int = 0) -> tuple[int, int]:
    rates = reader.value("nvml", "nvmlDeviceGetUtilizationRates", index)
    return rates["gpu"], rates["memory"]


def test_utilization_follows_the_kernels_in_flight(make_machine: MakeMachine) -> None:
    machine = make_machine(fresh=True, SOFTCUDA_MEM_MIB="8")
    target, reader = machine.target(), open_reader(machine)
    assert utilization(reader) == (0, 0)
    target.agent.value("launch", 1000)
    seen: list[int] = []

    def is_busy() -> bool:
        seen.append(utilization(reader)[0])
        return seen[-1] >= 50

    wait_until(is_busy)
    assert sorted(seen) == seen, "it grows while the kernel runs"
    assert utilization(reader, 1) == (0, 0)
    target.agent.value("synchronize")
    wait_until(lambda: utilization(reader)[0] == 0)
    target.agent.value("launch", 20)
    target.agent.value("synchronize")
    assert utilization(reader)[0] < 20, "the pause before it does not count"


def test_time_in_which_two_processes_are_busy_counts_once(make_machine: MakeMachine) -> None:
    machine = make_machine(fresh=True, SOFTCUDA_MEM_MIB="8")
    targets, reader = [machine.target() for _ in range(2)], open_reader(machine)
    for call in [target.agent.start("launch", 400) for target in targets]:
        assert call.wait()[0] == 0
    for target in targets:
        target.agent.value("synchronize")
    assert 20 < utilization(reader)[0] < 60


def test_copies_count_as_memory_activity(make_machine: MakeMachine) -> None:
    machine = make_machine(fresh=True, SOFTCUDA_MEM_MIB="32")
    target, reader = machine.target(), open_reader(machine)
    address = target.agent.value("allocate", 32 * MIB)
    for _ in range(20):
        target.agent.value("memset8", address, 1, 32 * MIB)
    gpu, memory = utilization(reader)
    assert gpu >= memory > 0


def test_a_spinning_collective_keeps_the_device_busy(make_machine: MakeMachine) -> None:
    machine = make_machine(fresh=True, SOFTCUDA_MEM_MIB="8")
    target, reader = machine.target(), open_reader(machine)
    group = str(machine.directory / "group")
    spinning = target.agent.start("all_reduce", group, 2, 0, 0)
    wait_until(lambda: utilization(reader)[0] >= 20)
    other = machine.target()
    assert other.agent.result("all_reduce", group, 2, 1, 0) == 0
    assert spinning.wait()[0] == 0
    wait_until(lambda: utilization(reader)[0] < 20)


def test_pcie_throughput_shows_the_direction_of_the_copy(make_machine: MakeMachine) -> None:
    machine = make_machine(SOFTCUDA_THROTTLE_MBPS="50")
    target, caller, reader = machine.target(40), machine.agent(), open_reader(machine)

    def throughput(counter: int) -> float:
        """MB/s of the median of three samples."""
        arguments = "nvmlDeviceGetPcieThroughput", 0, counter
        return float(sorted(reader.value("nvml", *arguments) for _ in range(3))[1]) / 1000

    sent, received = 0, 1
    assert throughput(sent) == throughput(received) == 0
    caller.value("lock", target.pid)
    for operation, active, idle in (("checkpoint", sent, received), ("restore", received, sent)):
        call = caller.start(operation, target.pid)
        call.wait_started()
        wait_until(lambda active=active: throughput(active) > 0)  # type: ignore[misc] # default binds
        assert 20 < throughput(active) < 120
        assert throughput(idle) == 0
        assert call.answer is None, "the samples were taken while it ran"
        assert call.wait()[0] == 0


def test_a_forked_child_may_read_on(machine: Machine) -> None:
    program = """
import os, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
child = os.fork()
os.write(1, b"%d\\n" % pynvml.nvmlDeviceGetMemoryInfo(handle).total)
if child:
    os.waitpid(child, 0)
"""
    assert run_python(machine, program) == f"{64 * MIB}\n" * 2


def test_calls_fail_stall_or_hang_on_request(machine: Machine, reader: Agent) -> None:
    machine.fault("nvml * * error:15")
    assert reader.result("nvml", "nvmlDeviceGetCount") == 15
    machine.fault("nvml * * delay:200")
    before = time.monotonic()
    assert reader.value("nvml", "nvmlDeviceGetCount") == 2
    assert time.monotonic() - before >= 0.2
    machine.fault("nvml * * hang")
    assert reader.start("nvml", "nvmlDeviceGetCount").is_blocked()


def test_one_device_may_be_lost_and_come_back(machine: Machine, reader: Agent) -> None:
    machine.fault("nvml:1 * * error:15")
    assert reader.result("nvml", "nvmlDeviceGetMemoryInfo", 1) == 15
    assert reader.result("nvml", "nvmlDeviceGetMemoryInfo", 0) == 0
    assert reader.value("nvml", "nvmlDeviceGetCount") == 2
    machine.fault("nvml:x * * error:15")
    assert reader.result("nvml", "nvmlDeviceGetMemoryInfo", 1) == 0


@pytest.mark.parametrize("listed", [True, False])
def test_a_checkpoint_may_leave_memory_behind(make_machine: MakeMachine, listed: bool) -> None:
    machine = make_machine()
    caller, target = machine.agent(), machine.target(10, SOFTCUDA_RESIDUE_MIB="6")
    reader = open_reader(machine, SOFTCUDA_RESIDUE_LISTED=str(int(listed)))

    def used() -> int:
        return int(reader.value("nvml", "nvmlDeviceGetMemoryInfo", 0)["used"])

    for operation in ("lock", "checkpoint"):
        caller.value(operation, target.pid)
    assert processes(reader) == ({target.pid: 6 * MIB} if listed else {})
    assert used() == 6 * MIB
    for operation in ("restore", "unlock"):
        caller.value(operation, target.pid)
    assert processes(reader) == {target.pid: 10 * MIB}
    assert used() == 10 * MIB


def isolated_agent(machine: Machine) -> tuple[Agent, int]:
    """An agent in its own pid namespace, with its pid outside of it."""
    if os.geteuid() != 0:
        pytest.skip("a pid namespace needs root")
    agent = machine.agent("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return agent, int(children[0])


def test_a_process_in_a_pid_namespace_is_known_by_its_host_pid(
    machine: Machine, reader: Agent, caller: Agent
) -> None:
    agent, host_pid = isolated_agent(machine)
    agent.value("init")
    agent.value("context")
    agent.value("allocate", 10 * MIB)
    assert agent.calls[0].thread_id == 1, "it is the first process of its namespace"
    assert processes(reader) == {host_pid: 10 * MIB}
    assert agent.value("state", 1) == 0, "inside, its own pid is the one that counts"
    for operation in ("lock", "checkpoint"):
        assert caller.result(operation, host_pid) == 0
    assert processes(reader) == {}
    thread = caller.value("restore_thread", host_pid)
    assert Path(f"/proc/{host_pid}/task/{thread}/comm").read_text().startswith("cuda")


def test_a_reader_in_a_pid_namespace_sees_the_memory_of_hidden_processes(
    machine: Machine, reader: Agent
) -> None:
    target = machine.target(10)
    inside, _ = isolated_agent(machine)
    inside.value("nvml", "nvmlInit")
    assert inside.value("nvml", "nvmlDeviceGetMemoryInfo", 0)["used"] == 10 * MIB
    assert processes(inside) == {target.pid: 10 * MIB}, "host pids, meaningless there"
    assert target.is_intact()
    assert processes(reader) == {target.pid: 10 * MIB}


def test_structures_have_the_sizes_that_pynvml_expects() -> None:
    import pynvml  # the system under test is the library, this is the reference

    sizes: dict[Any, int] = {
        pynvml.c_nvmlMemory_t: 24,
        pynvml.c_nvmlMemory_v2_t: 40,
        pynvml.c_nvmlProcessInfo_v3_t: 24,
        pynvml.c_nvmlUtilization_t: 8,
        pynvml.nvmlPciInfo_t: 68,
    }
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
