"""The few calls of the CUDA driver API that the demo's workload makes, through ctypes.

They exist in NVIDIA's libcuda.so.1 and in softcuda alike, so that the same workload runs on both.
Nothing here knows about checkpoints: a job that shares its devices needs no such code.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

LIBRARY = "libcuda.so.1"
#: Work is queued in pieces so short that a freeze, which waits for what is queued, is short too.
_PIECE_S = 0.02

_PROTOTYPES: dict[str, list[type]] = {
    "cuInit": [c_uint],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemsetD8_v2": [c_uint64, c_ubyte, c_size_t],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyDtoD_v2": [c_uint64, c_uint64, c_size_t],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


class CudaError(Exception):
    """A driver call failed; the text names the call and NVIDIA's name of the error."""


class Driver:
    """The loaded driver library, initialised."""

    def __init__(self, path: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(path)
        for name, argument_types in _PROTOTYPES.items():
            function = getattr(self._library, name)
            function.argtypes = argument_types
            function.restype = c_int
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Makes one driver call; raises CudaError unless it succeeds."""
        code: int = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    @property
    def is_software(self) -> bool:
        """Whether this is softcuda."""
        return hasattr(self._library, "softcudaLaunch")

    def keep_busy(self, seconds: float) -> bool:
        """Lets softcuda's device compute for a time; returns False on a real driver.

        A real device does real work instead; in software that would only heat the processors.
        """
        if not self.is_software:
            return False
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self.call("softcudaLaunch", max(1, int(min(left_s, _PIECE_S) * 1000)))
            self.call("cuCtxSynchronize")
        return True

    def device_count(self) -> int:
        """Returns how many devices this process sees."""
        count = c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value


class DeviceBuffer:
    """Device memory of one process: ``size`` bytes in the primary context of device ``ordinal``.

    Offsets and lengths are in bytes. All calls return when the device has done what they ask for.
    """

    def __init__(self, driver: Driver, ordinal: int, size: int) -> None:
        self.size = size
        self._driver = driver
        device, context, address = c_int(), c_void_p(), c_uint64()
        driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        driver.call("cuCtxSetCurrent", context)
        driver.call("cuMemAlloc_v2", ctypes.byref(address), size)
        self._address = address.value

    def fill(self, offset: int, value: int, length: int) -> None:
        """Sets ``length`` bytes to ``value``."""
        self._check(offset, length)
        self._driver.call("cuMemsetD8_v2", self._address + offset, value, length)
        self._driver.call("cuCtxSynchronize")

    def copy(self, target: int, source: int, length: int) -> None:
        """Copies ``length`` bytes within the device; the two ranges must not overlap."""
        self._check(target, length)
        self._check(source, length)
        self._driver.call("cuMemcpyDtoD_v2", self._address + target, self._address + source, length)
        self._driver.call("cuCtxSynchronize")

    def write(self, offset: int, data: bytes) -> None:
        """Copies ``data`` from the host to the device."""
        self._check(offset, len(data))
        self._driver.call("cuMemcpyHtoD_v2", self._address + offset, data, len(data))

    def read(self, offset: int, length: int) -> bytes:
        """Copies ``length`` bytes from the device to the host."""
        self._check(offset, length)
        host = ctypes.create_string_buffer(length)
        self._driver.call("cuMemcpyDtoH_v2", host, self._address + offset, length)
        return host.raw

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"{length} bytes at {offset} are not within {self.size} bytes")
