"""A small program that uses CUDA, to be checkpointed by tests: ``device_target.py MIB``.

It makes a context on the first device, fills device memory with random bytes, remembers their
hash and prints ``ready``. Then it obeys lines on stdin: ``verify`` copies the memory back and
answers ``same`` or ``different``; ``spin MS`` queues device work of that length and answers
``queued``. It speaks to whatever libcuda.so.1 the dynamic linker finds, a real one or softcuda.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

# Softcuda's own way to queue device work of a known length.
SOFT_LAUNCH = "softcudaLaunch"

# The same for a real device: a kernel that waits on the device's clock.
SPIN_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .pred %again;
    .reg .u64 %limit, %start, %now, %passed;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
LOOP:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %start;
    setp.lt.u64 %again, %passed, %limit;
    @%again bra LOOP;
    ret;
}
"""


class Device:
    """The first device, with a context and a block of memory whose hash is known."""

    def __init__(self, size: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._size = size
        self._address = c_uint64()
        device, context = c_int(), c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", byref(self._address), c_size_t(size))
        content = os.urandom(size)
        self._call("cuMemcpyHtoD_v2", self._address, content, c_size_t(size))
        self._digest = hashlib.sha256(content).digest()

    def verify(self) -> str:
        content = ctypes.create_string_buffer(self._size)
        self._call("cuMemcpyDtoH_v2", content, self._address, c_size_t(self._size))
        return "same" if hashlib.sha256(content).digest() == self._digest else "different"

    def spin(self, milliseconds: int) -> str:
        if hasattr(self._cuda, SOFT_LAUNCH):
            self._call(SOFT_LAUNCH, milliseconds)
        else:
            self._launch_spin(milliseconds)
        return "queued"

    def _launch_spin(self, milliseconds: int) -> None:
        module, kernel = c_void_p(), c_void_p()
        nanoseconds = c_uint64(milliseconds * 1_000_000)
        parameters = (c_void_p * 1)(ctypes.addressof(nanoseconds))
        self._call("cuModuleLoadData", byref(module), SPIN_PTX)
        self._call("cuModuleGetFunction", byref(kernel), module, b"spin")
        one_thread = (1, 1, 1, 1, 1, 1)
        self._call("cuLaunchKernel", kernel, *one_thread, 0, None, parameters, None)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code != 0:
            raise SystemExit(f"{function} returned {code}")


def main() -> None:
    device = Device(int(sys.argv[1]) << 20)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command, *arguments = line.split()
        answer = device.verify() if command == "verify" else device.spin(int(arguments[0]))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
