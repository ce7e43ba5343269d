"""Devices through NVML: the real pynvml over softcuda, and a stand-in that misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import uvloop

from tsliced.core.model import DeviceId
from tsliced.host.devices import (
    Device,
    DeviceError,
    DeviceHealth,
    DeviceProcess,
    Devices,
    DevicesUnavailable,
)

ROOT = Path(__file__).parents[3]
LIMIT_S = 20.0
MIB = 1 << 20
GPU0, GPU1 = DeviceId("GPU-0"), DeviceId("GPU-1")


class FakeNvml:
    """Two devices that do as they are told, with pynvml's names for what `Devices` uses."""

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2  # noqa: N815 - NVIDIA's name

    def __init__(self) -> None:
        self.inits = 0
        self.processes: dict[str, list[tuple[int, int | None]]] = {"GPU-0": [], "GPU-1": []}
        self.used = {"GPU-0": 10, "GPU-1": 20}
        #: Code that a call answers with, by its name or by the device's.
        self.errors: dict[str, int] = {}
        self.as_bytes = False
        self.gate = threading.Event()
        self.gate.set()
        self.blocked = threading.Event()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_ERROR_"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def fail(self, *names: str) -> None:
        for name in names:
            if name in self.errors:
                raise pynvml.NVMLError(self.errors[name])

    def text(self, value: str) -> str | bytes:
        return value.encode() if self.as_bytes else value

    def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's name
        self.fail("nvmlInit")
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.inits -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:  # noqa: N802
        return self.text("580.1")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self.fail(f"index {index}")
        return list(self.used)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.used:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:  # noqa: N802
        return self.text(handle)

    def nvmlDeviceGetName(self, handle: str) -> str | bytes:  # noqa: N802
        return self.text(f"Model {handle}")

    def nvmlDeviceGetMinorNumber(self, handle: str) -> int:  # noqa: N802
        return int(handle[-1])

    def nvmlDeviceGetPersistenceMode(self, handle: str) -> int:  # noqa: N802
        self.fail("persistence")
        return 0

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        self.fail("mig")
        return [1, 0]

    def nvmlDeviceGetComputeMode(self, handle: str) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetMemoryInfo(  # noqa: N802
        self, handle: str, version: int | None = None
    ) -> SimpleNamespace:
        self.calls += 1
        self.fail("memory v2" if version else "memory v1", handle)
        used = self.used[handle]
        return SimpleNamespace(total=100, used=used, free=100 - used - (5 if version else 0))

    def nvmlDeviceGetComputeRunningProcesses_v3(  # noqa: N802
        self, handle: str
    ) -> list[SimpleNamespace]:
        self.blocked.set()
        assert self.gate.wait(LIMIT_S)
        once = self.errors.pop(f"{handle} once", None)
        if once is not None:
            raise pynvml.NVMLError(once)
        self.fail(handle)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes[handle]
        ]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        self.fail("utilization")
        return SimpleNamespace(gpu=37, memory=5)


@contextlib.asynccontextmanager
async def opened(nvml: FakeNvml, **options: Any) -> AsyncIterator[Devices]:
    devices = Devices(nvml=nvml, **options)
    await devices.start()
    try:
        yield devices
    finally:
        nvml.gate.set()
        await devices.close()


def test_the_inventory_says_what_each_device_is() -> None:
    async def check() -> None:
        async with opened(FakeNvml()) as devices:
            first, second = devices.inventory()
            assert (first.uuid, first.index, first.name) == (GPU0, 0, "Model GPU-0")
            assert (first.total_bytes, first.driver_version) == (100, "580.1")
            assert (first.persistence, first.mig) == (False, True)
            assert first.compute_mode == "exclusive_process"
            assert second.index == 1
            assert devices.problems() == ()

    asyncio.run(check())


def test_what_jobs_will_suffer_from_is_said_with_what_helps() -> None:
    device = Device(
        uuid=GPU0,
        index=0,
        name="Model",
        total_bytes=100,
        driver_version="580.95.05",
        persistence=True,
        mig=False,
        compute_mode="default",
    )
    assert device.warnings() == ()
    assert replace(device, persistence=None, mig=None, compute_mode=None).warnings() == ()
    troubles = {
        "nvidia-smi -pm 1": replace(device, persistence=False),
        "nvidia-smi -mig 0": replace(device, mig=True),
        "nvidia-smi -c 0": replace(device, compute_mode="exclusive_process"),
        "570 is needed": replace(device, driver_version="565.57.01"),
        "PyTorch needs 575.57.08": replace(device, driver_version="570.86.15"),
    }
    for words, troubled in troubles.items():
        (warning,) = troubled.warnings()
        assert words in warning


def test_what_a_device_cannot_have_is_unknown() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        nvml.errors = {
            "mig": pynvml.NVML_ERROR_NOT_SUPPORTED,
            "persistence": pynvml.NVML_ERROR_NO_PERMISSION,
            "utilization": pynvml.NVML_ERROR_NOT_SUPPORTED,
        }
        async with opened(nvml) as devices:
            assert (devices.inventory()[0].mig, devices.inventory()[0].persistence) == (None, None)
            assert await devices.utilization([GPU0]) == {GPU0: None}

    asyncio.run(check())


def test_a_broken_device_does_not_hide_the_others() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        nvml.errors = {"index 0": pynvml.NVML_ERROR_GPU_IS_LOST}
        async with opened(nvml) as devices:
            assert [device.uuid for device in devices.inventory()] == [GPU1]
            assert devices.problems() == ("device 0 cannot be used: GPU is lost",)

    asyncio.run(check())


def test_strings_may_come_as_bytes() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        nvml.as_bytes = True
        async with opened(nvml) as devices:
            first = devices.inventory()[0]
            assert (first.uuid, first.name, first.driver_version) == (GPU0, "Model GPU-0", "580.1")
            assert (await devices.observe([GPU0]))[GPU0].used_bytes == 10

    asyncio.run(check())


def test_an_observation_has_memory_and_processes_of_each_device() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        nvml.processes["GPU-0"] = [(7, 3), (8, None), (7, 4)]
        async with opened(nvml) as devices:
            readings = await devices.observe([GPU0, GPU1])
            assert list(readings) == [GPU0, GPU1]
            first = readings[GPU0]
            assert (first.total_bytes, first.used_bytes, first.free_bytes) == (100, 10, 85)
            assert first.processes == (
                DeviceProcess(pid=7, used_bytes=7),
                DeviceProcess(pid=8, used_bytes=None),
            )
            assert (first.utilization_pct, first.stale_s) == (None, 0.0)
            assert (await devices.observe([GPU1], utilization=True))[GPU1].utilization_pct == 37
            assert await devices.observe([]) == {}

    asyncio.run(check())


def test_a_driver_without_the_second_memory_call_is_asked_the_first() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        nvml.errors = {"memory v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        async with opened(nvml) as devices:
            assert (await devices.observe([GPU0]))[GPU0].free_bytes == 90

    asyncio.run(check())


def test_one_device_that_fails_is_named_and_the_others_are_still_told() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml) as devices:
            nvml.errors = {"GPU-0": pynvml.NVML_ERROR_UNKNOWN}
            with pytest.raises(DeviceError, match="device GPU-0: Unknown Error") as caught:
                await devices.observe([GPU0, GPU1])
            assert caught.value.uuid == GPU0
            assert list(caught.value.readings) == [GPU1]
            assert caught.value.lost == {}
            nvml.errors["GPU-1"] = pynvml.NVML_ERROR_RESET_REQUIRED
            with pytest.raises(DeviceError, match="device GPU-0: Unknown Error") as both:
                await devices.observe([GPU1, GPU0])
            assert list(both.value.lost) == [GPU1]
            with pytest.raises(DeviceError, match="device GPU-9: Not Found"):
                await devices.observe([DeviceId("GPU-9")])

    asyncio.run(check())


def test_a_lost_device_stays_in_the_inventory_and_is_read_again_when_it_is_back() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml, reopen_s=0.0) as devices:
            before = devices.inventory()
            nvml.errors = {"GPU-0": pynvml.NVML_ERROR_GPU_IS_LOST}
            with pytest.raises(DeviceError, match="GPU is lost") as caught:
                await devices.observe([GPU0, GPU1])
            assert caught.value.lost == {GPU0: "GPU is lost"}
            assert list(caught.value.readings) == [GPU1]
            assert devices.inventory() == before
            assert devices.problems() == ("device 0 cannot be used: GPU is lost",)
            nvml.errors = {}
            assert (await devices.observe([GPU0]))[GPU0].used_bytes == 10
            assert nvml.inits == 1

    asyncio.run(check())


def test_nvml_that_forgot_its_users_is_initialized_anew() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml, reopen_s=0.0) as devices:
            nvml.errors = {"GPU-0": pynvml.NVML_ERROR_UNINITIALIZED}
            nvml.errors["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
            with pytest.raises(DeviceError, match="Driver Not Loaded"):
                await devices.observe([GPU0])
            assert nvml.inits == 0
            nvml.errors = {"GPU-0 once": pynvml.NVML_ERROR_UNINITIALIZED}
            nvml.used["GPU-2"] = 5
            assert (await devices.observe([GPU0]))[GPU0].used_bytes == 10
            assert nvml.inits == 1
            assert len(devices.inventory()) == 3
        assert nvml.inits == 0

    asyncio.run(check())


def test_nvml_is_not_initialized_anew_each_time_a_device_is_asked_for() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml, reopen_s=1000.0) as devices:
            listed = nvml.calls
            nvml.errors = {"GPU-0": pynvml.NVML_ERROR_GPU_IS_LOST}
            with pytest.raises(DeviceError, match="GPU is lost"):
                await devices.observe([GPU0])
            assert nvml.calls == listed

    asyncio.run(check())


def test_a_call_that_blocks_is_answered_with_the_last_reading_and_its_age() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml, timeout_s=0.3) as devices:
            await devices.observe([GPU0])
            nvml.gate.clear()
            nvml.used["GPU-0"] = 50
            stale = (await devices.observe([GPU0]))[GPU0]
            assert stale.used_bytes == 10
            assert stale.stale_s >= 0.3
            started = time.monotonic()
            staler = (await devices.observe([GPU0]))[GPU0]
            assert time.monotonic() - started < 0.2, "nothing waits behind a call that is late"
            assert staler.stale_s > stale.stale_s
            with pytest.raises(DeviceError, match="was never read before") as caught:
                await devices.observe([GPU0, GPU1])
            assert list(caught.value.readings) == [GPU0]
            nvml.gate.set()
            assert await until_fresh(devices, GPU0) == 50

    asyncio.run(check())


async def until_fresh(devices: Devices, uuid: DeviceId) -> int:
    """Return the used bytes of the first reading that is not an old one."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            reading = (await devices.observe([uuid]))[uuid]
            if reading.stale_s == 0:
                return reading.used_bytes
            await asyncio.sleep(0.005)


def test_the_loop_goes_on_while_nvml_blocks() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml, timeout_s=LIMIT_S) as devices:
            nvml.gate.clear()
            nvml.blocked.clear()
            observation = asyncio.create_task(devices.observe([GPU0]))
            while not nvml.blocked.is_set():  # noqa: ASYNC110 - set by a thread
                await asyncio.sleep(0.001)
            assert not observation.done()
            nvml.gate.set()
            async with asyncio.timeout(LIMIT_S):
                assert (await observation)[GPU0].used_bytes == 10

    asyncio.run(check())


def test_an_observation_that_is_cancelled_leaves_the_next_one_unharmed() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml, timeout_s=LIMIT_S) as devices:
            nvml.gate.clear()
            observation = asyncio.create_task(devices.observe([GPU0]))
            await asyncio.sleep(0)
            observation.cancel()
            with pytest.raises(asyncio.CancelledError):
                await observation
            nvml.gate.set()
            async with asyncio.timeout(LIMIT_S):
                assert (await devices.observe([GPU1]))[GPU1].used_bytes == 20

    asyncio.run(check())


def test_what_nobody_waits_for_any_more_is_not_asked() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        async with opened(nvml, timeout_s=LIMIT_S) as devices:
            before = nvml.calls
            nvml.gate.clear()
            first = asyncio.create_task(devices.observe([GPU0]))
            second = asyncio.create_task(devices.observe([GPU0, GPU1]))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.sleep(0)
            nvml.gate.set()
            await first
            await devices.observe([GPU1])
            assert nvml.calls - before == 2

    asyncio.run(check())


def test_a_start_that_nvml_does_not_answer_ends_with_advice() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        never = threading.Event()
        nvml.nvmlInit = lambda: never.wait(LIMIT_S)  # type: ignore[method-assign,assignment] # a hang
        devices = Devices(nvml=nvml, timeout_s=0.01)
        try:
            with pytest.raises(DevicesUnavailable, match=r"did not answer within 0\.1 s"):
                await devices.start()
        finally:
            never.set()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "install the NVIDIA driver, or set"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "load the kernel module"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reload the module or reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "DevicePolicy="),
        (pynvml.NVML_ERROR_UNKNOWN, "see whether nvidia-smi works"),
    ],
)
def test_nvml_that_cannot_be_used_is_explained(code: int, advice: str) -> None:
    async def check() -> None:
        nvml = FakeNvml()
        nvml.errors = {"nvmlInit": code}
        with pytest.raises(DevicesUnavailable, match=advice):
            await Devices(nvml=nvml).start()

    asyncio.run(check())


def test_closing_is_harmless_twice_and_before_the_start_and_ends_the_thread() -> None:
    async def check() -> None:
        nvml = FakeNvml()
        devices = Devices(nvml=nvml)
        await devices.close()
        with pytest.raises(DevicesUnavailable, match=r"call start\(\) first"):
            await devices.observe([GPU0])
        await devices.start()
        (thread,) = (each for each in threading.enumerate() if each.name == "nvml")
        await devices.close()
        await devices.close()
        assert nvml.inits == 0
        thread.join(LIMIT_S)
        assert not thread.is_alive()

    asyncio.run(check())


# ---- the real pynvml over softcuda ----


@pytest.fixture(scope="module")
def softcuda() -> Path:
    made = subprocess.run(
        ["make", "-s", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert made.returncode == 0, made.stderr
    return ROOT / "build/softcuda"


@pytest.fixture
def host(softcuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two devices of 64 MiB; returns the file of faults."""
    monkeypatch.setenv("SOFTCUDA_DIR", str(tmp_path))
    monkeypatch.setenv("SOFTCUDA_DEVICES", "2")
    monkeypatch.setenv("SOFTCUDA_MEM_MIB", "64")
    monkeypatch.setenv("SOFTCUDA_FAULTS", str(tmp_path / "faults"))
    return tmp_path / "faults"


@contextlib.contextmanager
def tenant(softcuda: Path, device: int, count: int) -> Iterator[int]:
    """Run a process that holds `count` bytes of a device; yields its pid."""
    code = f"""
import ctypes
cuda = ctypes.CDLL({str(softcuda / "libcuda.so.1")!r})
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), {device}) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t({count})) == 0
print("ready", flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def break_nvml(faults: Path, action: str | None) -> None:
    """Make every NVML call do what `action` says from now on, or mend them."""
    faults.write_text(f"nvml * * {action}\n" if action else "")


@contextlib.asynccontextmanager
async def soft(softcuda: Path, **options: Any) -> AsyncIterator[Devices]:
    devices = Devices(str(softcuda / "libnvidia-ml.so.1"), **options)
    await devices.start()
    try:
        yield devices
    finally:
        await devices.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_real_process_on_a_device_is_seen_and_gone_when_it_dies(
    softcuda: Path, host: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def check() -> None:
        async with soft(softcuda) as devices:
            first, second = devices.inventory()
            assert first.total_bytes == 64 * MIB
            assert first.uuid != second.uuid
            assert first.uuid.startswith("GPU-")
            empty = await devices.observe([first.uuid, second.uuid])
            assert empty[first.uuid].processes == ()
            with tenant(softcuda, 1, 8 * MIB) as pid:
                seen = await devices.observe([first.uuid, second.uuid])
                assert seen[first.uuid] == empty[first.uuid]
                (process,) = seen[second.uuid].processes
                assert process.pid == pid
                assert process.used_bytes is not None
                assert process.used_bytes >= 8 * MIB
                taken = empty[second.uuid].free_bytes - seen[second.uuid].free_bytes
                assert taken == process.used_bytes
            after = await devices.observe([second.uuid])
            assert after[second.uuid] == empty[second.uuid]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(check())


def test_real_nvml_errors_and_delays_are_met(softcuda: Path, host: Path) -> None:
    async def check() -> None:
        async with soft(softcuda, timeout_s=0.4, reopen_s=1000.0) as devices:
            uuid = devices.inventory()[0].uuid
            await devices.observe([uuid])
            break_nvml(host, f"error:{pynvml.NVML_ERROR_GPU_IS_LOST}")
            with pytest.raises(DeviceError, match="GPU is lost"):
                await devices.observe([uuid])
            break_nvml(host, "delay:250")
            assert (await devices.observe([uuid]))[uuid].stale_s > 0.3
            break_nvml(host, None)
            await until_fresh(devices, uuid)

    asyncio.run(check())


def test_a_driver_that_hides_what_processes_use_is_understood(
    softcuda: Path, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTCUDA_NVML_USED_NONE", "1")

    async def check() -> None:
        async with soft(softcuda) as devices:
            uuid = devices.inventory()[0].uuid
            with tenant(softcuda, 0, 4 * MIB) as pid:
                reading = (await devices.observe([uuid]))[uuid]
                assert reading.processes == (DeviceProcess(pid=pid, used_bytes=None),)
                assert reading.used_bytes >= 4 * MIB

    asyncio.run(check())


def test_observing_two_devices_costs_well_under_a_millisecond(softcuda: Path, host: Path) -> None:
    async def check() -> float:
        async with soft(softcuda) as devices:
            uuids = [device.uuid for device in devices.inventory()]
            best_s = 1.0
            for _ in range(50):
                started = time.perf_counter()
                await devices.observe(uuids)
                best_s = min(best_s, time.perf_counter() - started)
            return best_s

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(check()) < 1e-3


def in_fresh_python(code: str, **env: str) -> str:
    """Run a program on its own, since a library stays loaded in a process; return its last line."""
    program = (
        "import asyncio\nfrom tsliced.host.devices import Devices, DevicesUnavailable\n"
        f"async def main():\n    try:\n        {code}\n"
        "    except DevicesUnavailable as exc:\n        print(exc)\nasyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_host_without_nvml_is_told_what_to_install() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a driver")
    said = in_fresh_python("await Devices().start()")
    assert said == (
        "NVML cannot be used (NVML Shared Library Not Found): install the NVIDIA driver, "
        "or set daemon.nvml_library to the path of libnvidia-ml.so.1"
    )


def test_a_configured_library_that_is_not_there_is_named() -> None:
    said = in_fresh_python("await Devices('/nowhere/libnvidia-ml.so.1').start()")
    assert said.startswith("cannot load /nowhere/libnvidia-ml.so.1: ")
    assert said.endswith("see daemon.nvml_library")


def test_a_library_that_is_not_the_one_that_answers_is_refused(softcuda: Path, host: Path) -> None:
    library = str(softcuda / "libnvidia-ml.so.1")
    said = in_fresh_python(
        f"await Devices({library!r}).start(); await Devices('libc.so.6').start()"
    )
    assert said.startswith("libc.so.6 was loaded but is not what answers")


def test_a_host_without_the_package_is_told_to_install_it() -> None:
    said = in_fresh_python("import sys; sys.modules['pynvml'] = None; await Devices().start()")
    assert said.endswith("pip install nvidia-ml-py")


def test_what_slows_a_device_and_where_it_is_plugged_in_can_be_asked(
    softcuda: Path, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def health() -> list[DeviceHealth]:
        async with soft(softcuda) as devices:
            return list((await devices.health()).values())

    first, second = asyncio.run(health())
    assert (first.slowed_by, second.slowed_by) == ((), ())
    assert first.pci_address != second.pci_address
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", first.pci_address or "")
    monkeypatch.setenv("SOFTCUDA_CLOCK_REASONS", str(0x01 | 0x08 | 0x40))
    assert [one.slowed_by for one in asyncio.run(health())] == [
        ("hardware slowdown", "heat (by hardware)")
    ] * 2
