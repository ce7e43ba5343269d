"""The exceptions of this package: one class for each thing that a caller can do about a failure.

``error_for`` is the one place that turns a ``CUresult`` into an exception. The driver's documented
return codes are not complete: 2, 304 and 800 occur as well, and 304 stands for anything from "the
process died" to "you may not touch it". So the caller passes in what it saw of the process.
"""

from __future__ import annotations


class CudaCheckpointError(Exception):
    """Root of all errors raised by this package.

    Attributes:
        code: the driver's ``CUresult``, or None when the driver was not asked.
        name: its name in cuda.h, such as ``CUDA_ERROR_ILLEGAL_STATE``; empty without a code.
        operation: what was attempted: ``lock``, ``checkpoint``, ``restore``, ``unlock``, ``state``,
            ``restore_thread``, ``init``, ``load`` or a query of devices.
        pid: the process that it was attempted on, or None.
        driver_version: as ``cuDriverGetVersion`` reports it (13000 for CUDA 13.0), or None.
        advice: what to do about it, as sentences for a person.
    """

    default_advice = "Ask for the state of the process before any other call on it."

    def __init__(
        self,
        message: str,
        *,
        operation: str,
        code: int | None = None,
        name: str = "",
        pid: int | None = None,
        driver_version: int | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.code = code
        self.name = name
        self.pid = pid
        self.driver_version = driver_version
        self.advice = self.default_advice if advice is None else advice

    def __str__(self) -> str:
        what = self.operation if self.pid is None else f"{self.operation} of process {self.pid}"
        facts = []
        if self.code is not None:
            facts.append(f"{self.name} {self.code}")
        if self.driver_version is not None:
            facts.append(f"driver for CUDA {format_version(self.driver_version)}")
        where = f" ({', '.join(facts)})" if facts else ""
        return f"{what}: {self.message}{where}. {self.advice}"


class DriverMissingError(CudaCheckpointError):
    """There is no usable libcuda.so.1: install the driver, or say where it is."""

    default_advice = (
        "Install the NVIDIA driver (570 or later), or give the path of its libcuda.so.1 in "
        "CUDA_CKPT_LIBRARY."
    )


class DriverTooOldError(CudaCheckpointError):
    """The driver does not have what was asked for: upgrade it, or do without."""

    default_advice = "Upgrade the NVIDIA driver: 570 has this API, 580 moves between devices."


class DeviceUnavailableError(CudaCheckpointError):
    """The devices of this machine cannot be used at present: its administrator must act."""

    default_advice = "Look at nvidia-smi and the kernel log of this machine."


class InvalidRequestError(CudaCheckpointError):
    """An argument is wrong: correct it. Nothing has changed."""

    default_advice = "Correct the arguments; nothing has changed."


class NotCudaError(CudaCheckpointError):
    """The process has not initialised CUDA: nothing to do, now. It may do so later."""

    default_advice = (
        "There is nothing to checkpoint; look again if the process may still start CUDA."
    )


class LockTimeoutError(CudaCheckpointError):
    """The device work of the process did not end in time. It runs on as before: try again."""

    default_advice = (
        "It runs on as before, so trying again is safe. If it is one rank of a job, stop all ranks "
        "at the same step first: a collective never ends while a peer is locked."
    )


class IllegalStateError(CudaCheckpointError):
    """The process is not in the state that the operation starts from: ask for the state."""

    default_advice = (
        "Ask for the state: lock needs running, checkpoint and unlock need locked, restore needs "
        "checkpointed."
    )


class UnsupportedError(CudaCheckpointError):
    """The process uses something that this driver cannot checkpoint. Trying again won't help."""

    default_advice = (
        "Ask for the state and unlock if it is locked. Look for managed memory, CUDA IPC, exported "
        "memory handles, NVLS, RDMA registrations, MPS and MIG; PyTorch needs driver 575.57.08 or "
        "later."
    )


class PermissionDeniedError(CudaCheckpointError):
    """The caller lacks a privilege."""

    default_advice = (
        "Run as root or with CAP_SYS_PTRACE (in a container also CAP_SYS_ADMIN and the pid "
        "namespace of the host), and turn persistence mode on."
    )


class TargetGoneError(CudaCheckpointError):
    """The process is dead or about to be, or its pid now belongs to another one."""

    default_advice = (
        "There is nothing left to do for it. If it does run, its /proc entry is hidden from the "
        "caller: share the pid namespace of the host."
    )


class TargetUnreachableError(CudaCheckpointError):
    """The driver could not work with the process, which lives."""

    default_advice = (
        "Ask for the state. After a restore that ran out of device memory the process stays lost "
        "on some drivers, also when memory is free again: end it."
    )


class TargetFailedError(CudaCheckpointError):
    """CUDA in the process is beyond repair: end the process."""

    default_advice = "End the process; the driver offers no way back."


class OutOfDeviceMemoryError(CudaCheckpointError):
    """Memory ran out."""

    default_advice = (
        "Ask for the state. A restore needs as much free device memory as the process had, on "
        "every device; on some drivers a process whose restore failed so can never be restored. "
        "A checkpoint needs that much host memory, and is refused with this code under MIG."
    )


class UnexpectedDriverError(CudaCheckpointError):
    """The driver answered with a code that these calls are not known to return."""

    default_advice = (
        "Ask for the state of the process before any other call on it, and report the code with "
        "the version of the driver."
    )


# code: (name in cuda.h, class, what it means for these calls)
_TABLE: dict[int, tuple[str, type[CudaCheckpointError], str]] = {
    1: ("CUDA_ERROR_INVALID_VALUE", InvalidRequestError, "the driver refused the arguments"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", OutOfDeviceMemoryError, "memory ran out"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", NotCudaError, "the process does not use CUDA (yet)"),
    4: ("CUDA_ERROR_DEINITIALIZED", TargetGoneError, "CUDA in the process is shutting down"),
    34: ("CUDA_ERROR_STUB_LIBRARY", DriverMissingError, "this is the toolkit's stub of libcuda"),
    36: (
        "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
        DriverTooOldError,
        "the call needs a newer driver",
    ),
    46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", DeviceUnavailableError, "a device is busy or exclusive"),
    100: ("CUDA_ERROR_NO_DEVICE", DeviceUnavailableError, "there is no CUDA device"),
    101: ("CUDA_ERROR_INVALID_DEVICE", InvalidRequestError, "no such device"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", InvalidRequestError, "no valid context"),
    304: (
        "CUDA_ERROR_OPERATING_SYSTEM",
        TargetUnreachableError,
        "the driver could not work with the process",
    ),
    400: ("CUDA_ERROR_INVALID_HANDLE", InvalidRequestError, "an invalid handle was passed"),
    401: (
        "CUDA_ERROR_ILLEGAL_STATE",
        IllegalStateError,
        "the process is in the wrong state for this",
    ),
    500: ("CUDA_ERROR_NOT_FOUND", InvalidRequestError, "something named was not found"),
    600: ("CUDA_ERROR_NOT_READY", LockTimeoutError, "its device work did not end in time"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", TargetFailedError, "it touched an illegal device address"),
    800: ("CUDA_ERROR_NOT_PERMITTED", PermissionDeniedError, "the driver does not permit it"),
    801: (
        "CUDA_ERROR_NOT_SUPPORTED",
        UnsupportedError,
        "the driver cannot do this for the process",
    ),
    802: (
        "CUDA_ERROR_SYSTEM_NOT_READY",
        DeviceUnavailableError,
        "the fabric manager is not running",
    ),
    803: (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        DeviceUnavailableError,
        "libcuda and the kernel driver are of different versions",
    ),
    804: (
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        DeviceUnavailableError,
        "forward compatibility is not supported on this device",
    ),
    805: (
        "CUDA_ERROR_MPS_CONNECTION_FAILED",
        DeviceUnavailableError,
        "the MPS server cannot be reached",
    ),
    900: (
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        InvalidRequestError,
        "not while a stream is captured",
    ),
    909: ("CUDA_ERROR_TIMEOUT", UnexpectedDriverError, "an operation of the driver timed out"),
    999: ("CUDA_ERROR_UNKNOWN", UnexpectedDriverError, "the driver met an unknown error"),
}

# Advice for a code, or for a code in one operation, where that of the class would mislead.
_ADVICE: dict[int | tuple[int, str], str] = {
    4: "It is about to exit: wait for its end, which frees its device memory.",
    (1, "restore"): (
        "Correct the arguments. A device map must name every device that CUDA in the process can "
        "see, also the unused and the unmoved ones, and only devices of one type."
    ),
    (2, "checkpoint"): (
        "Ask for the state and unlock if it is locked. The copy lives in the memory of the process "
        "itself: look at its memory cgroup. Under MIG a checkpoint is refused with this code."
    ),
    (2, "restore"): (
        "Do not retry blindly: on some drivers the process is now lost, also when memory is free "
        "again. Free as much device memory as it had before a restore, on every device."
    ),
    34: "Point CUDA_CKPT_LIBRARY to the driver's own libcuda.so.1, not to the toolkit's stubs.",
}


def format_version(version: int) -> str:
    """Formats a version as ``cuDriverGetVersion`` reports it: 13000 becomes ``13.0``."""
    return f"{version // 1000}.{version % 1000 // 10}"


def code_name(code: int) -> str:
    """Returns the name of a ``CUresult`` in cuda.h, as far as these calls are known to use it."""
    if code == 0:
        return "CUDA_SUCCESS"
    row = _TABLE.get(code)
    return row[0] if row else "CUDA_ERROR_UNRECOGNISED"


def error_for(
    code: int,
    *,
    operation: str,
    pid: int | None = None,
    driver_version: int | None = None,
    driver_name: str | None = None,
    driver_text: str | None = None,
    target_alive: bool = True,
    may_attach: bool = True,
) -> CudaCheckpointError:
    """Makes the exception for a ``CUresult`` other than zero; the caller raises it.

    ``target_alive`` and ``may_attach`` are what the caller saw of the process after the failure:
    a process that died explains any code, and a refused attach explains the unspecific 304.
    ``driver_name`` and ``driver_text`` are the driver's own words for the code, used when this
    package has none.
    """
    name, kind, message = _TABLE.get(
        code,
        (
            driver_name or code_name(code),
            UnexpectedDriverError,
            driver_text or "the driver answered with a code that this package does not know",
        ),
    )
    if not target_alive:
        kind, message = TargetGoneError, f"the process died ({message})"
    elif code == 304 and not may_attach:
        kind, message = PermissionDeniedError, "the caller may not attach to the process"
    advice = _ADVICE.get((code, operation), _ADVICE.get(code)) if target_alive else None
    return kind(
        message,
        operation=operation,
        code=code,
        name=name,
        pid=pid,
        driver_version=driver_version,
        advice=advice,
    )
