"""What the build makes: names, exports, and a driver that is too old."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from softcuda_harness import Machine, MakeMachine

CHECKPOINT = {
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
}
DRIVER = {
    "cuCtxCreate_v2",
    "cuCtxDestroy_v2",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuMemAllocManaged",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD32_v2",
    "cuMemsetD8_v2",
    "softcudaAllReduce",
    "softcudaLaunch",
}


def exports(library: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", str(library)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    return {line.split()[2] for line in output.splitlines()}


def test_the_driver_exports_its_functions_and_nothing_else(softcuda_build: Path) -> None:
    assert exports(softcuda_build / "libcuda.so.1") == DRIVER | CHECKPOINT


def test_an_old_driver_lacks_the_checkpoint_functions(softcuda_build: Path) -> None:
    library = softcuda_build.with_name("softcuda-550") / "libcuda.so.1"
    assert exports(library) == DRIVER


@pytest.mark.parametrize("name", ["libcuda.so.1", "libnvidia-ml.so.1"])
def test_a_library_bears_the_name_that_programs_ask_for(softcuda_build: Path, name: str) -> None:
    command = ["readelf", "-d", str(softcuda_build / name)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    assert f"Library soname: [{name}]" in output


def test_the_development_name_is_a_link(softcuda_build: Path) -> None:
    assert (softcuda_build / "libcuda.so").readlink() == Path("libcuda.so.1")


def test_targets_of_an_old_driver_can_be_operated_by_a_program_that_brings_its_own_way(
    machine: Machine, softcuda_build: Path
) -> None:
    old = str(softcuda_build.with_name("softcuda-550") / "libcuda.so.1")
    agent = machine.agent(AGENT_LIBCUDA=old)
    assert agent.value("version") == 12040
    agent.value("init")
    utility = machine.agent()
    for operation in ("lock", "checkpoint", "restore", "unlock"):
        assert utility.result(operation, agent.pid) == 0


@pytest.mark.parametrize("version", [12080, 13000, 13040])
def test_the_generation_of_the_driver_is_configurable(
    make_machine: MakeMachine, version: int
) -> None:
    assert make_machine(SOFTCUDA_VERSION=str(version)).agent().value("version") == version


def test_a_setting_that_is_no_number_is_named_and_the_default_used(
    machine: Machine, softcuda_build: Path
) -> None:
    command = [str(softcuda_build / "softcuda-init"), str(machine.directory / "new")]
    done = subprocess.run(
        command,
        env=machine.variables(SOFTCUDA_DEVICES="many", SOFTCUDA_MEM_MIB="8"),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == f"{machine.directory}/new: 2 devices of 8 MiB\n"
    assert "SOFTCUDA_DEVICES=many is not a number from 1 to 16" in done.stderr
