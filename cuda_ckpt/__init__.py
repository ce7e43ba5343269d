"""The CUDA driver's checkpoint API: moves a process's device memory to host memory and back.

It works on running, unmodified CUDA processes, from another process, with the driver alone (570 or
later), and needs nothing but the standard library::

    from cuda_ckpt import Driver, LockTimeoutError, Process

    driver = Driver()
    driver.init()
    process = Process(4242, driver)
    process.lock(timeout_ms=10_000)     # its CUDA calls block from here on
    process.checkpoint()                # its devices are free
    ...
    process.restore()
    process.unlock()                    # its CUDA calls go on
    print(process.state)                # ProcessState.RUNNING

Every failure is a CudaCheckpointError; the class says what can be done about it. ``python -m
cuda_ckpt`` is a drop-in for NVIDIA's cuda-checkpoint utility, and ``cuda_ckpt.worker`` a process
that makes the calls for a daemon and finishes them even if the daemon dies.
"""

from __future__ import annotations

from cuda_ckpt.errors import (
    CudaCheckpointError,
    DeviceUnavailableError,
    DriverMissingError,
    DriverTooOldError,
    IllegalStateError,
    InvalidRequestError,
    LockTimeoutError,
    NotCudaError,
    OutOfDeviceMemoryError,
    PermissionDeniedError,
    TargetFailedError,
    TargetGoneError,
    TargetUnreachableError,
    UnexpectedDriverError,
    UnsupportedError,
)
from cuda_ckpt.process import Driver, Process, ProcessState, format_uuid, parse_uuid

__all__ = [
    "CudaCheckpointError",
    "DeviceUnavailableError",
    "Driver",
    "DriverMissingError",
    "DriverTooOldError",
    "IllegalStateError",
    "InvalidRequestError",
    "LockTimeoutError",
    "NotCudaError",
    "OutOfDeviceMemoryError",
    "PermissionDeniedError",
    "Process",
    "ProcessState",
    "TargetFailedError",
    "TargetGoneError",
    "TargetUnreachableError",
    "UnexpectedDriverError",
    "UnsupportedError",
    "format_uuid",
    "parse_uuid",
]
