"""A process with so much device memory, to try things out on: ``python -m cuda_ckpt.ballast``.

It takes and fills the memory, writes ``{"ready": true}``, and then answers lines on its standard
input with one line of JSON each:

* ``check``: whether the memory holds what it was filled with: ``{"intact": bool}``;
* ``rate``: how fast this host copies: ``{"to_host", "to_device", "fresh_pages", "used_pages":
  bytes per second, "pinned": bool}``.

It ends with its input.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import sys
import time
from collections.abc import Callable
from ctypes import POINTER, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from cuda_ckpt import _driver
from cuda_ckpt.errors import CudaCheckpointError, error_for

_BLOCK = 1 << 20
#: So much is copied at once to see how fast that is, and so often; the best counts.
_RATE_BYTES = 128 << 20
_RATE_TIMES = 3

_FUNCTIONS: dict[str, list[type]] = {
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemsetD8_v2": [c_uint64, c_ubyte, c_size_t],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
}
#: Page-locked host memory, which links copy to at their full speed.
_PINNED = "cuMemHostAlloc"


class Ballast:
    """Device memory of this process, filled block by block with numbers that can be checked."""

    def __init__(self, library: ctypes.CDLL, device: int, size: int) -> None:
        self._library = library
        for name, argument_types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = argument_types, c_int
        self._size = max(_BLOCK, size // _BLOCK * _BLOCK)
        context, ordinal = c_void_p(), c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(ordinal), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self._call("cuCtxSetCurrent", context)
        self._address = self._allocate(self._size)
        for offset in range(0, self._size, _BLOCK):
            self._call("cuMemsetD8_v2", self._address + offset, self._value(offset), _BLOCK)
        self._call("cuCtxSynchronize")

    def check(self) -> dict[str, object]:
        """Returns whether every block begins and ends with what it was filled with."""
        found = ctypes.create_string_buffer(2)
        for offset in range(0, self._size, _BLOCK):
            for place in (offset, offset + _BLOCK - 2):
                self._call("cuMemcpyDtoH_v2", found, self._address + place, 2)
                if found.raw != bytes([self._value(offset)] * 2):
                    return {"intact": False}
        return {"intact": True}

    def rate(self) -> dict[str, object]:
        """Returns how fast this host copies, to and from the device and within its memory."""
        size = min(_RATE_BYTES, self._size)
        host, pinned = self._host_memory(size)
        used = bytearray(size)
        fresh = [mmap.mmap(-1, size) for _ in range(_RATE_TIMES)]
        device, copy = self._address, self._copy
        return {
            "to_host": _best(size, lambda _: copy("cuMemcpyDtoH_v2", host, device, size)),
            "to_device": _best(size, lambda _: copy("cuMemcpyHtoD_v2", device, host, size)),
            "fresh_pages": _best(size, lambda n: fresh[n].write(used)),
            "used_pages": _best(size, lambda _: _assign(used)),
            "pinned": pinned,
        }

    def _copy(self, name: str, target: object, source: object, size: int) -> None:
        self._call(name, target, source, size)
        self._call("cuCtxSynchronize")

    def _host_memory(self, size: int) -> tuple[object, bool]:
        """Returns memory of the host that was written to, page-locked where the driver can."""
        if _driver.has_function(self._library, _PINNED):
            function = getattr(self._library, _PINNED)
            function.argtypes, function.restype = [POINTER(c_void_p), c_size_t, c_uint], c_int
            address = c_void_p()
            self._call(_PINNED, ctypes.byref(address), size, 0)
            return address, True
        memory = ctypes.create_string_buffer(size)
        ctypes.memset(memory, 1, size)
        return memory, False

    def _allocate(self, size: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def _value(self, offset: int) -> int:
        return (offset // _BLOCK * 37 + 11) % 256

    def _call(self, name: str, *arguments: object) -> None:
        code: int = getattr(self._library, name)(*arguments)
        if code != _driver.CUDA_SUCCESS:
            raise error_for(code, operation=name)


def _best(size: int, copy: Callable[[int], object]) -> float:
    seconds = []
    for number in range(_RATE_TIMES):
        began_at = time.perf_counter()
        copy(number)
        seconds.append(time.perf_counter() - began_at)
    return size / max(1e-9, min(seconds))


def _assign(used: bytearray) -> None:
    used[: len(used) // 2] = memoryview(used)[len(used) // 2 :]
    used[len(used) // 2 :] = memoryview(used)[: len(used) - len(used) // 2]


def main() -> int:
    """Takes the memory and answers until its input ends."""
    parser = argparse.ArgumentParser(prog="cuda_ckpt.ballast")
    parser.add_argument("--bytes", type=int, required=True, help="device memory to take")
    parser.add_argument("--device", type=int, default=0, help="its index (default 0)")
    parser.add_argument("--library", help="path of libcuda.so.1")
    options = parser.parse_args()
    try:
        ballast = Ballast(_driver.load(options.library), options.device, options.bytes)
    except CudaCheckpointError as error:
        print(json.dumps({"ready": False, "message": str(error)}), flush=True)
        return 1
    print(json.dumps({"ready": True}), flush=True)
    commands = {"check": ballast.check, "rate": ballast.rate}
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
