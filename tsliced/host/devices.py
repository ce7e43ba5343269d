"""Devices of this host as NVML sees them: who they are, their memory, the processes on them.

An NVML call may block for seconds when the driver is in trouble, so all calls are made by one
thread of their own, never by the loop. A call that is not back by its deadline is left where it is;
until it comes back, questions are answered with what was last seen and how old that is.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from tsliced.core.model import DeviceId
from tsliced.host.call_thread import CallThread


class DevicesError(Exception):
    """Root of what goes wrong with devices."""


class DevicesUnavailable(DevicesError):  # noqa: N818 - a state of the host, not one call's error
    """NVML can't be used on this host; the text says why and what to do."""


class DeviceError(DevicesError):
    """One device could not be read."""

    def __init__(
        self,
        uuid: DeviceId,
        text: str,
        *,
        readings: Mapping[DeviceId, DeviceReading] | None = None,
        lost: Mapping[DeviceId, str] | None = None,
    ) -> None:
        super().__init__(f"device {uuid}: {text}")
        self.uuid = uuid
        self.text = text
        #: Devices that are there no more, and the driver's word for it.
        self.lost = dict(lost or {})
        #: What the same call could read of the other devices.
        self.readings = dict(readings or {})


class Trouble(NamedTuple):
    """Something about a device that jobs will suffer from, and what helps."""

    #: What it is about: ``persistence``, ``mig``, ``compute mode`` or ``driver``.
    name: str
    text: str
    remedy: str
    #: Nothing can be shared on it before that is mended.
    is_fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What does not change about a device while the driver is loaded."""

    uuid: DeviceId
    index: int
    #: Of its node, /dev/nvidiaMINOR, which is not always its index. None: NVML doesn't say.
    minor: int | None = None
    name: str
    total_bytes: int
    driver_version: str
    #: Without persistence mode, a restore needs a caller that did cuInit. None: NVML doesn't say.
    persistence: bool | None = None
    #: Partitioned devices can't be snapshotted. None: this kind of device has no partitions.
    mig: bool | None = None
    #: ``default``, ``exclusive_thread``, ``prohibited``, ``exclusive_process``; None: unknown.
    compute_mode: str | None = None

    def troubles(self) -> tuple[Trouble, ...]:
        """Return each thing about it that jobs will suffer from."""
        found = []
        if self.persistence is False:
            text = "persistence mode is off: each restore waits for the device to be initialized"
            remedy = "turn it on (nvidia-smi -pm 1, or nvidia-persistenced)"
            found.append(Trouble("persistence", text, remedy))
        if self.mig:
            text = "it is partitioned (MIG), and the driver cannot snapshot what runs on it"
            found.append(Trouble("mig", text, "turn that off (nvidia-smi -mig 0)", is_fatal=True))
        if self.compute_mode not in (None, "default"):
            text = (
                f"its compute mode is {self.compute_mode}: jobs with several processes, and the "
                "helpers of the daemon, may be refused"
            )
            found.append(Trouble("compute mode", text, "use the default (nvidia-smi -c 0)"))
        if (version := _version(self.driver_version)) < _GOOD_DRIVER:
            is_fatal = version < (570,)
            needed = "570 is needed" if is_fatal else "PyTorch needs 575.57.08"
            text = f"driver {self.driver_version} is too old: {needed}"
            found.append(Trouble("driver", text, "upgrade it", is_fatal=is_fatal))
        return tuple(found)

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each of its troubles."""
        return tuple(f"{trouble.text}; {trouble.remedy}" for trouble in self.troubles())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process with a context on a device."""

    pid: int
    #: None: the driver doesn't say (virtual devices); go by the whole device then.
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What was seen of one device at one moment."""

    uuid: DeviceId
    total_bytes: int
    used_bytes: int
    free_bytes: int
    #: Snapshotted processes are not listed.
    processes: tuple[DeviceProcess, ...] = ()
    #: Share of the last sample period in which a kernel ran; None: not asked for, or not known.
    utilization_pct: int | None = None
    #: Age of the reading; 0 unless NVML did not answer in time.
    stale_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """What is looked at when somebody wonders why a device is slow."""

    #: What keeps its clocks down beyond the usual; None: NVML doesn't say.
    slowed_by: tuple[str, ...] | None
    #: Its place as /sys/bus/pci/devices names it; None: NVML doesn't say.
    pci_address: str | None


class Devices:
    """The devices of this host.

    `library` is the path of a libnvidia-ml.so.1, or None for the system's. Call `start` before
    anything else and `close` at the end. `timeout_s` bounds each call. When a device is lost, NVML
    is initialized anew, at most every `reopen_s`. `nvml` stands in for the module pynvml in tests.
    """

    def __init__(
        self,
        library: str | None = None,
        *,
        timeout_s: float = 2.0,
        reopen_s: float = 10.0,
        nvml: Any = None,
    ) -> None:
        self._reader = _Reader(library, nvml, reopen_s)
        self._thread = CallThread("nvml")
        self._timeout_s = timeout_s
        self._seen: dict[DeviceId, tuple[float, DeviceReading]] = {}

    async def start(self) -> None:
        """Load NVML and list the devices.

        Raises:
            DevicesUnavailable: there is no usable NVML, or it did not answer in time.
        """
        # A driver that must be loaded first takes its time, and nothing else waits for it yet.
        limit_s = 10 * self._timeout_s
        self._thread.start()
        try:
            await self._thread.call(self._reader.open, limit_s)
        except TimeoutError as exc:
            await self.close()
            raise DevicesUnavailable(
                f"NVML did not answer within {limit_s:g} s; see whether nvidia-smi hangs too, "
                "and the kernel's log for Xid errors"
            ) from exc
        except BaseException:
            await self.close()
            raise

    def inventory(self) -> tuple[Device, ...]:
        """Return the devices by index, also those that got lost since the start."""
        return self._reader.inventory

    def add_lost(self, devices: Iterable[Device]) -> None:
        """Know of devices that were here before and whose place in the list nobody has now."""
        self._reader.add_lost(devices)

    def problems(self) -> tuple[str, ...]:
        """Return a sentence for each device that NVML counts but could not describe."""
        return self._reader.problems

    async def observe(
        self, uuids: Collection[DeviceId], *, utilization: bool = False
    ) -> dict[DeviceId, DeviceReading]:
        """Read memory and processes of some devices at once.

        If NVML does not answer in time, the last readings come back with their age in `stale_s`:
        look at it before deciding anything on them.

        Raises:
            DeviceError: a device could not be read; `readings` has the others.
        """
        wanted = tuple(uuids)
        if not self._thread.is_running:
            raise DevicesUnavailable("the devices are not open: call start() first")
        try:
            found, errors, lost = await self._thread.call(
                lambda: self._reader.observe(wanted, utilization=utilization), self._timeout_s
            )
        except TimeoutError:
            return self._remembered(wanted)
        now = time.monotonic()
        for uuid, reading in found.items():
            self._seen[uuid] = (now, reading)
        if errors:
            # What is lost tells less than what nobody can explain.
            uuid, text = min(errors.items(), key=lambda error: error[0] in lost)
            gone = {device: errors[device] for device in lost}
            raise DeviceError(uuid, text, readings=found, lost=gone)
        return found

    async def utilization(self, uuids: Collection[DeviceId]) -> dict[DeviceId, int | None]:
        """Return for each device the percentage of time in which a kernel ran; None: unknown.

        Raises:
            DeviceError: as for `observe`.
        """
        readings = await self.observe(uuids, utilization=True)
        return {uuid: reading.utilization_pct for uuid, reading in readings.items()}

    async def health(self) -> dict[DeviceId, DeviceHealth]:
        """Return what may slow each device that is there. Raises `TimeoutError`."""
        return await self._thread.call(self._reader.health, self._timeout_s)

    async def close(self) -> None:
        """Shut NVML down; repeating it is harmless.

        A thread that is stuck in the driver is left behind: it does not keep the process alive.
        """
        if self._thread.is_running:
            try:
                with suppress(TimeoutError):
                    await self._thread.call(self._reader.close, self._timeout_s)
            finally:
                self._thread.stop()

    def _remembered(self, uuids: Iterable[DeviceId]) -> dict[DeviceId, DeviceReading]:
        now = time.monotonic()
        readings: dict[DeviceId, DeviceReading] = {}
        unknown: list[DeviceId] = []
        for uuid in uuids:
            if uuid in self._seen:
                seen_at, reading = self._seen[uuid]
                readings[uuid] = replace(reading, stale_s=now - seen_at)
            else:
                unknown.append(uuid)
        if unknown:
            text = (
                f"NVML does not answer within {self._timeout_s:g} s, and it was never read before"
            )
            raise DeviceError(unknown[0], text, readings=readings)
        return readings


class _Reader:
    """The NVML calls themselves. The thread owns it, all but the two tuples that it publishes."""

    def __init__(self, library: str | None, nvml: Any, reopen_s: float) -> None:
        self._library = library
        self._reopen_s = reopen_s
        # pynvml has no types: it is Any here and nowhere else.
        self._nvml: Any = nvml
        self._handles: dict[DeviceId, Any] = {}
        self._is_open = False
        self._opened_at = 0.0
        self._has_memory_v2 = True
        self.inventory: tuple[Device, ...] = ()
        self.problems: tuple[str, ...] = ()

    def add_lost(self, devices: Iterable[Device]) -> None:
        known = {known for device in self.inventory for known in (device.uuid, device.index)}
        lost = [d for d in devices if d.uuid not in known and d.index not in known]
        self.inventory = tuple(sorted([*self.inventory, *lost], key=lambda device: device.index))

    def open(self) -> None:
        loaded = self._load()
        try:
            self._initialize()
        except self._nvml.NVMLError as exc:
            raise DevicesUnavailable(self._why_unavailable(exc)) from exc
        used = getattr(self._nvml, "nvmlLib", None)
        if loaded is not None and used is not None and used._handle != loaded._handle:
            raise DevicesUnavailable(
                f"{self._library} was loaded but is not what answers: its SONAME must be "
                "libnvidia-ml.so.1, and no other NVML may be loaded in this process"
            )

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._handles.clear()
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def observe(
        self, uuids: Iterable[DeviceId], *, utilization: bool
    ) -> tuple[dict[DeviceId, DeviceReading], dict[DeviceId, str], list[DeviceId]]:
        """Return the readings, why others could not be read, and which of those are lost."""
        readings: dict[DeviceId, DeviceReading] = {}
        errors: dict[DeviceId, str] = {}
        lost: list[DeviceId] = []
        for uuid in uuids:
            try:
                readings[uuid] = self._read_or_reopen(uuid, utilization)
            except self._nvml.NVMLError as exc:  # noqa: PERF203 - one broken device is not all
                errors[uuid] = _text(str(exc))
                if exc.value in self._losses():
                    lost.append(uuid)
        return readings, errors, lost

    def health(self) -> dict[DeviceId, DeviceHealth]:
        return {uuid: self._health(handle) for uuid, handle in self._handles.items()}

    def _health(self, handle: Any) -> DeviceHealth:
        nvml = self._nvml
        reasons = self._optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        place = self._optional(nvml.nvmlDeviceGetPciInfo, handle)
        slowed_by = tuple(name for bit, name in _SLOWDOWNS.items() if (reasons or 0) & bit)
        return DeviceHealth(
            slowed_by=None if reasons is None else slowed_by,
            # NVML writes eight digits of the domain, the kernel four.
            pci_address=None if place is None else _text(place.busId).lower()[-12:],
        )

    def _losses(self) -> tuple[int, ...]:
        """Return the codes for a device that fell off the bus or waits for a reset."""
        nvml = self._nvml
        return (
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
            # By its UUID: it was there when NVML was initialized before.
            nvml.NVML_ERROR_NOT_FOUND,
        )

    def _load(self) -> ctypes.CDLL | None:
        """Load the configured library ahead of pynvml, which then gets it by its SONAME."""
        loaded = None
        if self._library is not None:
            try:
                loaded = ctypes.CDLL(self._library)
            except OSError as exc:
                raise DevicesUnavailable(
                    f"cannot load {self._library}: {exc}; see daemon.nvml_library"
                ) from exc
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError as exc:
                raise DevicesUnavailable(
                    "the Python package nvidia-ml-py is not installed: pip install nvidia-ml-py"
                ) from exc
        return loaded

    def _why_unavailable(self, error: Any) -> str:
        nvml = self._nvml
        advice = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver, or set "
            "daemon.nvml_library to the path of libnvidia-ml.so.1",
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the kernel module (nvidia-smi does)",
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated under the running "
            "kernel module: reload the module or reboot",
            nvml.NVML_ERROR_NO_PERMISSION: "the daemon may not open /dev/nvidiactl: see "
            "DevicePolicy= and DeviceAllow= of its unit",
        }.get(error.value, "see whether nvidia-smi works")
        return f"NVML cannot be used ({_text(str(error))}): {advice}"

    def _initialize(self) -> None:
        self._opened_at = time.monotonic()
        self._nvml.nvmlInit()
        self._is_open = True
        self._list()

    def _list(self) -> None:
        devices: list[Device] = []
        problems: list[str] = []
        handles: dict[DeviceId, Any] = {}
        driver_version = _text(self._nvml.nvmlSystemGetDriverVersion())
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                device = self._describe(handle, index, driver_version)
            except self._nvml.NVMLError as exc:  # noqa: PERF203 - one broken device is not all
                problems.append(f"device {index} cannot be used: {_text(str(exc))}")
            else:
                devices.append(device)
                handles[device.uuid] = handle
        self._handles = handles
        # A device that got lost is still one of this host's: it is there again after a repair.
        lost = [device for device in self.inventory if device.uuid not in handles]
        self.inventory = tuple(sorted([*devices, *lost], key=lambda device: device.index))
        self.problems = tuple(problems)

    def _describe(self, handle: Any, index: int, driver_version: str) -> Device:
        nvml = self._nvml
        persistence = self._optional(nvml.nvmlDeviceGetPersistenceMode, handle)
        mig = self._optional(nvml.nvmlDeviceGetMigMode, handle)
        return Device(
            uuid=DeviceId(_text(nvml.nvmlDeviceGetUUID(handle))),
            index=index,
            minor=self._optional(nvml.nvmlDeviceGetMinorNumber, handle),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total_bytes=self._memory(handle).total,
            driver_version=driver_version,
            persistence=None if persistence is None else bool(persistence),
            mig=None if mig is None else bool(mig[0]),
            compute_mode=_COMPUTE_MODES.get(self._optional(nvml.nvmlDeviceGetComputeMode, handle)),
        )

    def _optional(self, function: Callable[[Any], Any], handle: Any) -> Any:
        """Return what a call returns, or None where the device, driver or user can't have it."""
        nvml = self._nvml
        try:
            return function(handle)
        except nvml.NVMLError as exc:
            if exc.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
            ):
                return None
            raise

    def _read_or_reopen(self, uuid: DeviceId, utilization: bool) -> DeviceReading:
        nvml = self._nvml
        try:
            return self._read(uuid, utilization)
        except nvml.NVMLError as exc:
            is_lost = exc.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED)
            if not is_lost or time.monotonic() - self._opened_at < self._reopen_s:
                raise
        self.close()
        self._initialize()
        return self._read(uuid, utilization)

    def _read(self, uuid: DeviceId, utilization: bool) -> DeviceReading:
        nvml = self._nvml
        handle = self._handles.get(uuid)
        if handle is None:
            handle = self._handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(str(uuid))
        processes: dict[int, int | None] = {}
        for process in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle):
            # With partitions, a process is listed once for each of them.
            before, used = processes.get(process.pid, 0), process.usedGpuMemory
            processes[process.pid] = None if before is None or used is None else before + used
        memory = self._memory(handle)
        rates = self._optional(nvml.nvmlDeviceGetUtilizationRates, handle) if utilization else None
        return DeviceReading(
            uuid=uuid,
            total_bytes=memory.total,
            used_bytes=memory.used,
            free_bytes=memory.free,
            processes=tuple(DeviceProcess(pid=pid, used_bytes=n) for pid, n in processes.items()),
            utilization_pct=None if rates is None else rates.gpu,
        )

    def _memory(self, handle: Any) -> Any:
        """Return total, used and free; version 2 keeps the driver's own reserve out of "used"."""
        nvml = self._nvml
        if self._has_memory_v2:
            try:
                return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            except nvml.NVMLError as exc:
                if exc.value not in (
                    nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                    nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
                ):
                    raise
                self._has_memory_v2 = False
        return nvml.nvmlDeviceGetMemoryInfo(handle)


#: The first one that could snapshot processes which use PyTorch.
_GOOD_DRIVER: Final = (575, 57, 8)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


#: nvmlClocksEventReason*. Idle, a power cap and clocks that somebody chose are as they should be.
_SLOWDOWNS: Final[Mapping[int, str]] = {
    0x08: "hardware slowdown",
    0x20: "heat (by software)",
    0x40: "heat (by hardware)",
    0x80: "power brake",
}
#: nvmlComputeMode_t.
_COMPUTE_MODES: Final[Mapping[Any, str]] = {
    0: "default",
    1: "exclusive_thread",
    2: "prohibited",
    3: "exclusive_process",
}


def _text(value: str | bytes) -> str:
    """Return text: which of the two NVML's strings come as depends on the version of pynvml."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
