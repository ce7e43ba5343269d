"""The CUDA driver library through ctypes: prototypes, argument blocks and the loader.

All names are NVIDIA's, so that this file can be read beside cuda.h. The four argument blocks are 64
bytes in every CUDA version that has them, and a block of zeros means the same to each; the layouts
are those of CUDA 13.0. ``gpuPairs`` exists since 13.0: older drivers demand zeros in its place.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64

from cuda_ckpt.errors import DriverMissingError, DriverTooOldError, error_for

LIBRARY_VARIABLE = "CUDA_CKPT_LIBRARY"
DEFAULT_LIBRARY = "libcuda.so.1"

CUDA_SUCCESS = 0

CU_PROCESS_STATE_RUNNING = 0
CU_PROCESS_STATE_LOCKED = 1
CU_PROCESS_STATE_CHECKPOINTED = 2
CU_PROCESS_STATE_FAILED = 3

CUresult = c_int
CUdevice = c_int
CUprocessState = c_uint


class CUuuid(ctypes.Structure):
    _fields_ = [("bytes", c_ubyte * 16)]


class CUcheckpointLockArgs(ctypes.Structure):
    _fields_ = [("timeoutMs", c_uint), ("reserved0", c_uint), ("reserved1", c_uint64 * 7)]


class CUcheckpointCheckpointArgs(ctypes.Structure):
    _fields_ = [("reserved", c_uint64 * 8)]


class CUcheckpointGpuPair(ctypes.Structure):
    _fields_ = [("oldUuid", CUuuid), ("newUuid", CUuuid)]


class CUcheckpointRestoreArgs(ctypes.Structure):
    _fields_ = [
        ("gpuPairs", POINTER(CUcheckpointGpuPair)),
        ("gpuPairsCount", c_uint),
        ("reserved", c_ubyte * 44),
        ("reserved1", c_uint64),
    ]


class CUcheckpointUnlockArgs(ctypes.Structure):
    _fields_ = [("reserved", c_uint64 * 8)]


_BASE_FUNCTIONS: dict[str, list[type]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuGetErrorName": [CUresult, POINTER(c_char_p)],
    "cuGetErrorString": [CUresult, POINTER(c_char_p)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(CUdevice), c_int],
}

_CHECKPOINT_FUNCTIONS: dict[str, list[type]] = {
    "cuCheckpointProcessGetRestoreThreadId": [c_int, POINTER(c_int)],
    "cuCheckpointProcessGetState": [c_int, POINTER(CUprocessState)],
    "cuCheckpointProcessLock": [c_int, POINTER(CUcheckpointLockArgs)],
    "cuCheckpointProcessCheckpoint": [c_int, POINTER(CUcheckpointCheckpointArgs)],
    "cuCheckpointProcessRestore": [c_int, POINTER(CUcheckpointRestoreArgs)],
    "cuCheckpointProcessUnlock": [c_int, POINTER(CUcheckpointUnlockArgs)],
}

# cuda.h renames some functions to their newer versions; older drivers export only the plain name.
_OPTIONAL_FUNCTIONS: dict[str, list[type]] = {
    "cuDeviceGetUuid_v2": [POINTER(CUuuid), CUdevice],
    "cuDeviceGetUuid": [POINTER(CUuuid), CUdevice],
    "cuDeviceTotalMem_v2": [POINTER(c_size_t), CUdevice],
}


def load(path: str | None = None) -> ctypes.CDLL:
    """Loads the driver library and declares the functions used here.

    The library is the given ``path``, else the one named by the environment variable
    ``CUDA_CKPT_LIBRARY``, else ``libcuda.so.1`` as the dynamic linker finds it. Loading does not
    initialise the driver. ``CDLL`` releases the interpreter lock while a call runs, so that a lock
    which waits for device work does not stop other threads.

    Raises DriverMissingError if it cannot be loaded, is not libcuda or is the toolkit's stub, and
    DriverTooOldError if it has no checkpoint functions (before driver 570).
    """
    name = path or os.environ.get(LIBRARY_VARIABLE) or DEFAULT_LIBRARY
    try:
        library = ctypes.CDLL(name)
    except OSError as exc:
        raise DriverMissingError(f"cannot load {name}: {exc}", operation="load") from exc
    missing = _declare(library, _BASE_FUNCTIONS)
    if missing:
        raise DriverMissingError(
            f"{name} is not the CUDA driver: it has no {missing[0]}", operation="load"
        )
    version = driver_version(library)
    if _declare(library, _CHECKPOINT_FUNCTIONS):
        raise DriverTooOldError(
            f"{name} has no checkpoint functions, which came with driver 570",
            operation="load",
            driver_version=version,
        )
    _declare(library, _OPTIONAL_FUNCTIONS)
    return library


def driver_version(library: ctypes.CDLL) -> int:
    """Returns the CUDA version of the driver, 12080 for 12.8; the driver need not be initialised.

    Raises DriverMissingError for the toolkit's stub library, which answers every call with 34.
    """
    version = c_int()
    code = library.cuDriverGetVersion(ctypes.byref(version))
    if code != CUDA_SUCCESS:
        raise error_for(code, operation="load")
    return version.value


def error_name(library: ctypes.CDLL, code: int) -> str | None:
    """Returns the driver's name of a ``CUresult``, or None if it knows none."""
    text = c_char_p()
    if library.cuGetErrorName(code, ctypes.byref(text)) != CUDA_SUCCESS or text.value is None:
        return None
    return text.value.decode("ascii", "replace")


def error_string(library: ctypes.CDLL, code: int) -> str | None:
    """Returns the driver's description of a ``CUresult``, or None if it knows none."""
    text = c_char_p()
    if library.cuGetErrorString(code, ctypes.byref(text)) != CUDA_SUCCESS or text.value is None:
        return None
    return text.value.decode("ascii", "replace")


def has_function(library: ctypes.CDLL, name: str) -> bool:
    """Tells whether the library exports ``name``."""
    return hasattr(library, name)


def _declare(library: ctypes.CDLL, functions: dict[str, list[type]]) -> list[str]:
    """Sets the prototypes of ``functions``; returns the names that the library does not export."""
    missing = []
    for name, argument_types in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            missing.append(name)
            continue
        function.argtypes = argument_types
        function.restype = CUresult
    return missing
