"""The driver and a process as objects: what a program that checkpoints processes works with.

The driver's state machine, which these calls drive and never bypass::

    running --lock--> locked --checkpoint--> checkpointed
    running <-unlock- locked <---restore---- checkpointed        any of them may end in failed

Three rules of the driver shape this module. A caller that is interrupted in the middle of a call
leaves the process hanging for ever, so signals are held back from the calling thread until the call
has ended. A lock without a limit waits for ever behind a kernel that never ends, so the limit is
required. CUDA does not survive fork, so a driver that was initialised before a fork refuses to work
after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
from collections.abc import Mapping

from cuda_ckpt import _driver, _system
from cuda_ckpt.errors import (
    CudaCheckpointError,
    DriverTooOldError,
    InvalidRequestError,
    PermissionDeniedError,
    TargetGoneError,
    error_for,
)

MAX_TIMEOUT_MS = 2**32 - 1
DEVICE_MAP_VERSION = 13000

# How long a process whose channel broke is given to show as dead: a process with much memory takes
# tens of milliseconds to die after a fatal signal.
_DEATH_LIMIT_S = 0.5
_CODE_CHANNEL_BROKEN = 304


class ProcessState(enum.Enum):
    """What the driver says about a process; the values are the words of NVIDIA's utility."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"
    # Drivers since CUDA 13.4 report work in progress by numbers above these: ask again later.
    TRANSITIONAL = "transitional"

    @classmethod
    def from_code(cls, code: int) -> ProcessState:
        """Returns the state for a ``CUprocessState``; numbers from 4 on are TRANSITIONAL."""
        return _STATES.get(code, cls.TRANSITIONAL)


_STATES = {
    _driver.CU_PROCESS_STATE_RUNNING: ProcessState.RUNNING,
    _driver.CU_PROCESS_STATE_LOCKED: ProcessState.LOCKED,
    _driver.CU_PROCESS_STATE_CHECKPOINTED: ProcessState.CHECKPOINTED,
    _driver.CU_PROCESS_STATE_FAILED: ProcessState.FAILED,
}


class Driver:
    """The CUDA driver of this machine.

    ``path`` names the library; see ``cuda_ckpt._driver.load`` for what is tried without it. Making
    one loads the library and does not initialise it. ``version`` is the CUDA version of the driver,
    13000 for 13.0. Raises DriverMissingError and DriverTooOldError.
    """

    def __init__(self, path: str | None = None) -> None:
        self._library = _driver.load(path)
        self.version = _driver.driver_version(self._library)
        self._initialised_in: int | None = None

    def init(self) -> None:
        """Initialises the driver (``cuInit``): seconds at first, nothing when repeated.

        It makes no context and takes no device memory. CUDA reads ``CUDA_VISIBLE_DEVICES`` now: a
        program that maps devices unsets it first, or sees only some of them.
        """
        if self._initialised_in is None:
            self.call("init", "cuInit", 0)
            self._initialised_in = os.getpid()

    def device_count(self) -> int:
        """Returns how many devices the calling process can see; initialises the driver."""
        self.init()
        count = ctypes.c_int()
        self.call("device_count", "cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device_uuids(self) -> list[str]:
        """Returns the UUIDs of the devices as ``GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx``."""
        newer = _driver.has_function(self._library, "cuDeviceGetUuid_v2")
        function = "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid"
        uuids = []
        for index in range(self.device_count()):
            uuid = _driver.CUuuid()
            self.call("device_uuids", function, ctypes.byref(uuid), self._device(index))
            uuids.append(format_uuid(bytes(uuid.bytes)))
        return uuids

    def total_memory_bytes(self, index: int) -> int:
        """Returns the size of a device's memory. Free memory needs a context or NVML."""
        self.init()
        total = ctypes.c_size_t()
        device = self._device(index)
        self.call("total_memory", "cuDeviceTotalMem_v2", ctypes.byref(total), device)
        return total.value

    def call(self, operation: str, function: str, *arguments: object) -> None:
        """Calls a function of the driver that concerns no process; raises on a code but zero."""
        self._check_fork(operation, None)
        code = self._invoke(function, arguments)
        if code != _driver.CUDA_SUCCESS:
            raise self.error(code, operation)

    def call_on(self, process: Process, operation: str, function: str, *arguments: object) -> None:
        """Calls a function of the driver on a process, uninterrupted; raises on a code but zero."""
        self._check_fork(operation, process.pid)
        process.check_alive(operation)
        with _system.signals_blocked():
            code = self._invoke(function, (process.pid, *arguments))
        if code == _driver.CUDA_SUCCESS:
            return
        limit_s = _DEATH_LIMIT_S if code == _CODE_CHANNEL_BROKEN else 0.0
        raise self.error(
            code,
            operation,
            process.pid,
            target_alive=not _system.dies_within(process.pid, process.start_time, limit_s),
            may_attach=_system.may_attach(process.pid),
        )

    def error(
        self,
        code: int,
        operation: str,
        pid: int | None = None,
        *,
        target_alive: bool = True,
        may_attach: bool = True,
    ) -> CudaCheckpointError:
        """Makes the exception for a ``CUresult``, with this driver's version and words."""
        return error_for(
            code,
            operation=operation,
            pid=pid,
            driver_version=self.version,
            driver_name=_driver.error_name(self._library, code),
            driver_text=_driver.error_string(self._library, code),
            target_alive=target_alive,
            may_attach=may_attach,
        )

    def _invoke(self, function: str, arguments: tuple[object, ...]) -> int:
        return int(getattr(self._library, function)(*arguments))

    def _device(self, index: int) -> int:
        device = _driver.CUdevice()
        self.call("device", "cuDeviceGet", ctypes.byref(device), index)
        return device.value

    def _check_fork(self, operation: str, pid: int | None) -> None:
        if self._initialised_in in (None, os.getpid()):
            return
        raise InvalidRequestError(
            f"the driver was initialised in process {self._initialised_in}, which then forked",
            operation=operation,
            pid=pid,
            driver_version=self.version,
            advice="CUDA does not survive fork: start the process by exec and make a new Driver.",
        )


class Process:
    """A process that uses CUDA, as the driver's checkpoint functions see it.

    ``pid`` is as seen from the caller's ``/proc``; a thread id names the process of the thread. The
    identity is taken now: if the process dies and another gets its pid, every call raises
    TargetGoneError. ``start_time`` (clock ticks since boot, field 22 of ``/proc/PID/stat``) demands
    that it is the process which the caller knows. ``driver`` may be shared by many processes.

    The calls block until the driver has answered, which for ``checkpoint`` and ``restore`` takes as
    long as copying the device memory. They can be made from any thread. Never kill the caller
    during a call: the process would hang for ever.
    """

    def __init__(
        self, pid: int, driver: Driver | None = None, *, start_time: int | None = None
    ) -> None:
        if pid <= 0:
            raise InvalidRequestError(f"a pid is above zero, not {pid}", operation="open")
        self.pid = pid
        self.driver = Driver() if driver is None else driver
        started = self._read_start_time("open")
        if started is None or start_time not in (None, started):
            raise self._gone("open")
        self.start_time = started

    def __repr__(self) -> str:
        return f"Process(pid={self.pid}, start_time={self.start_time})"

    @property
    def state(self) -> ProcessState:
        """Asks the driver for the state. Can hang while a peer that shares memory is locked."""
        state = _driver.CUprocessState()
        self.driver.call_on(self, "state", "cuCheckpointProcessGetState", ctypes.byref(state))
        return ProcessState.from_code(state.value)

    @property
    def restore_thread_id(self) -> int:
        """Asks for the id of the driver's thread in the process, which does the work there.

        It must be able to run: in a stopped or frozen process every call hangs. That the driver
        names such a thread is the best test for a process that uses CUDA.
        """
        thread_id = ctypes.c_int()
        self.driver.call_on(
            self,
            "restore_thread",
            "cuCheckpointProcessGetRestoreThreadId",
            ctypes.byref(thread_id),
        )
        return thread_id.value

    def lock(self, timeout_ms: int) -> None:
        """Stops new CUDA calls of the process and waits for its device work to end.

        Raises LockTimeoutError after ``timeout_ms`` (at least 1); the process then runs on as
        before. Zero, with which the driver would wait for ever, is refused.
        """
        if not 0 < timeout_ms <= MAX_TIMEOUT_MS:
            raise self._invalid("lock", f"timeout_ms must be 1..{MAX_TIMEOUT_MS}, not {timeout_ms}")
        arguments = _driver.CUcheckpointLockArgs(timeoutMs=timeout_ms)
        self.driver.call_on(self, "lock", "cuCheckpointProcessLock", ctypes.byref(arguments))

    def checkpoint(self) -> None:
        """Moves the device memory of a locked process into its host memory and frees the devices.

        After a failure the process is locked or failed: ask for the state.
        """
        arguments = _driver.CUcheckpointCheckpointArgs()
        self.driver.call_on(
            self, "checkpoint", "cuCheckpointProcessCheckpoint", ctypes.byref(arguments)
        )

    def restore(self, device_map: Mapping[str, str] | None = None) -> None:
        """Moves the device memory of a checkpointed process back; the process is then locked.

        Make sure first that as much device memory is free as the process had: on some drivers a
        restore that runs out of memory loses the process. ``device_map`` maps the UUID of each
        device that CUDA in the process can see to that of the device to use, also of those that
        stay the same; it needs driver 580 (CUDA 13.0) and raises DriverTooOldError below it.

        Initialises the driver: without that, and without persistence mode, a restore fails and
        takes the process with it.
        """
        arguments = _driver.CUcheckpointRestoreArgs()
        if device_map is not None:
            pairs = self._gpu_pairs(device_map)
            # The block keeps the array alive: ctypes remembers what a pointer field was made of.
            arguments.gpuPairs = pairs
            arguments.gpuPairsCount = len(pairs)
        self.driver.init()
        self.driver.call_on(self, "restore", "cuCheckpointProcessRestore", ctypes.byref(arguments))

    def unlock(self) -> None:
        """Lets the CUDA calls of a locked process go on."""
        arguments = _driver.CUcheckpointUnlockArgs()
        self.driver.call_on(self, "unlock", "cuCheckpointProcessUnlock", ctypes.byref(arguments))

    def check_alive(self, operation: str) -> None:
        """Raises TargetGoneError unless the pid still belongs to the process that was opened."""
        if self._read_start_time(operation) != self.start_time:
            raise self._gone(operation)

    def _gpu_pairs(
        self, device_map: Mapping[str, str]
    ) -> ctypes.Array[_driver.CUcheckpointGpuPair]:
        if self.driver.version < DEVICE_MAP_VERSION:
            raise DriverTooOldError(
                "moving to other devices needs driver 580",
                operation="restore",
                pid=self.pid,
                driver_version=self.driver.version,
                advice="Restore without a device map, or upgrade the NVIDIA driver.",
            )
        if not device_map:
            raise self._invalid("restore", "the device map is empty")
        try:
            old = [parse_uuid(uuid) for uuid in device_map]
            new = [parse_uuid(uuid) for uuid in device_map.values()]
        except ValueError as exc:
            raise self._invalid("restore", str(exc)) from exc
        if len(set(old)) != len(old) or len(set(new)) != len(new):
            raise self._invalid("restore", "the device map names a device twice on one side")
        pairs = (_driver.CUcheckpointGpuPair * len(old))()
        for pair, old_bytes, new_bytes in zip(pairs, old, new, strict=True):
            pair.oldUuid.bytes[:] = old_bytes
            pair.newUuid.bytes[:] = new_bytes
        return pairs

    def _read_start_time(self, operation: str) -> int | None:
        try:
            return _system.start_time(self.pid)
        except OSError as exc:
            raise PermissionDeniedError(
                f"cannot read /proc/{self.pid}/stat: {exc.strerror}",
                operation=operation,
                pid=self.pid,
                driver_version=self.driver.version,
            ) from exc

    def _gone(self, operation: str) -> TargetGoneError:
        return TargetGoneError(
            "there is no such process, or its pid now belongs to another one",
            operation=operation,
            pid=self.pid,
            driver_version=self.driver.version,
        )

    def _invalid(self, operation: str, message: str) -> InvalidRequestError:
        return InvalidRequestError(
            message, operation=operation, pid=self.pid, driver_version=self.driver.version
        )


def format_uuid(raw: bytes) -> str:
    """Formats the 16 bytes of a device's UUID as nvidia-smi and NVML print it."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def parse_uuid(text: str) -> bytes:
    """Returns the 16 bytes of a device's UUID, written with or without ``GPU-``.

    Raises ValueError for anything else, such as the UUID of a MIG instance, which cannot be
    checkpointed.
    """
    groups = text.removeprefix("GPU-").split("-")
    if [len(group) for group in groups] == [8, 4, 4, 4, 12]:
        with contextlib.suppress(ValueError):
            raw = bytes.fromhex("".join(groups))
            if len(raw) == 16:  # fromhex skips white space
                return raw
    raise ValueError(f"not the UUID of a device: {text!r} (GPU-xxxxxxxx-xxxx-xxxx-xxxx-...)")
