"""``cuda_ckpt.errors``: which exception a code becomes, and what it says."""

from __future__ import annotations

import pytest

import cuda_ckpt
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
    code_name,
    error_for,
    format_version,
)

# Written out once more, so that a slip in the package's table shows.
MAPPINGS: list[tuple[int, str, type[CudaCheckpointError]]] = [
    (1, "CUDA_ERROR_INVALID_VALUE", InvalidRequestError),
    (2, "CUDA_ERROR_OUT_OF_MEMORY", OutOfDeviceMemoryError),
    (3, "CUDA_ERROR_NOT_INITIALIZED", NotCudaError),
    (4, "CUDA_ERROR_DEINITIALIZED", TargetGoneError),
    (34, "CUDA_ERROR_STUB_LIBRARY", DriverMissingError),
    (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", DriverTooOldError),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", DeviceUnavailableError),
    (100, "CUDA_ERROR_NO_DEVICE", DeviceUnavailableError),
    (101, "CUDA_ERROR_INVALID_DEVICE", InvalidRequestError),
    (201, "CUDA_ERROR_INVALID_CONTEXT", InvalidRequestError),
    (304, "CUDA_ERROR_OPERATING_SYSTEM", TargetUnreachableError),
    (400, "CUDA_ERROR_INVALID_HANDLE", InvalidRequestError),
    (401, "CUDA_ERROR_ILLEGAL_STATE", IllegalStateError),
    (500, "CUDA_ERROR_NOT_FOUND", InvalidRequestError),
    (600, "CUDA_ERROR_NOT_READY", LockTimeoutError),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", TargetFailedError),
    (800, "CUDA_ERROR_NOT_PERMITTED", PermissionDeniedError),
    (801, "CUDA_ERROR_NOT_SUPPORTED", UnsupportedError),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY", DeviceUnavailableError),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", DeviceUnavailableError),
    (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", DeviceUnavailableError),
    (805, "CUDA_ERROR_MPS_CONNECTION_FAILED", DeviceUnavailableError),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", InvalidRequestError),
    (909, "CUDA_ERROR_TIMEOUT", UnexpectedDriverError),
    (999, "CUDA_ERROR_UNKNOWN", UnexpectedDriverError),
]


@pytest.mark.parametrize(("code", "name", "kind"), MAPPINGS)
def test_a_code_becomes_its_class_and_keeps_all_facts(
    code: int, name: str, kind: type[CudaCheckpointError]
) -> None:
    error = error_for(code, operation="checkpoint", pid=4242, driver_version=13000)
    assert type(error) is kind
    assert (error.code, error.name, error.operation) == (code, name, "checkpoint")
    assert (error.pid, error.driver_version) == (4242, 13000)
    assert error.advice.endswith(".")
    for fact in ("checkpoint of process 4242", f"{name} {code}", "CUDA 13.0", error.advice):
        assert fact in str(error)
    assert code_name(code) == name


@pytest.mark.parametrize("code", [code for code, _, _ in MAPPINGS if code != 4] + [12345])
def test_a_process_that_died_explains_every_code(code: int) -> None:
    error = error_for(code, operation="lock", pid=4242, target_alive=False)
    assert type(error) is TargetGoneError
    assert error.code == code
    assert "died" in str(error)


def test_the_unspecific_code_is_a_refusal_where_the_kernel_forbids_to_attach() -> None:
    error = error_for(304, operation="lock", pid=4242, may_attach=False)
    assert type(error) is PermissionDeniedError
    assert "CAP_SYS_PTRACE" in error.advice


def test_a_dead_process_is_looked_at_before_permissions() -> None:
    error = error_for(304, operation="lock", pid=1, target_alive=False, may_attach=False)
    assert type(error) is TargetGoneError


def test_an_unknown_code_prints_its_number_and_the_driver() -> None:
    error = error_for(12345, operation="restore", pid=4242, driver_version=13040)
    assert type(error) is UnexpectedDriverError
    assert "CUDA_ERROR_UNRECOGNISED 12345" in str(error)
    assert "CUDA 13.4" in str(error)


def test_an_unknown_code_is_told_in_the_words_of_the_driver_if_it_has_some() -> None:
    error = error_for(
        12345, operation="lock", driver_name="CUDA_ERROR_NOVEL", driver_text="something novel"
    )
    assert "something novel (CUDA_ERROR_NOVEL 12345)" in str(error)


def test_memory_that_ran_out_is_told_differently_for_checkpoint_and_restore() -> None:
    restore = error_for(2, operation="restore", pid=4242)
    checkpoint = error_for(2, operation="checkpoint", pid=4242)
    assert "lost" in restore.advice
    assert "MIG" in checkpoint.advice
    assert restore.advice != checkpoint.advice


def test_an_error_without_a_code_leaves_it_out() -> None:
    error = DriverMissingError("no library", operation="load")
    assert str(error) == f"load: no library. {DriverMissingError.default_advice}"


def test_every_exported_error_has_the_root_of_the_package() -> None:
    errors = [
        value
        for value in (getattr(cuda_ckpt, name) for name in cuda_ckpt.__all__)
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert {kind for _, _, kind in MAPPINGS} < set(errors)
    assert all(issubclass(kind, CudaCheckpointError) for kind in errors)


@pytest.mark.parametrize(("version", "text"), [(12080, "12.8"), (13000, "13.0"), (13040, "13.4")])
def test_a_version_is_printed_as_people_write_it(version: int, text: str) -> None:
    assert format_version(version) == text
