"""Device work of this very process, seen through torch where the process uses it.

torch is never imported here: it is looked at only if somebody else imported it and made a CUDA
context. Everything is a no-op in a process that has none.
"""

from __future__ import annotations

import sys
from typing import Any


def _cuda() -> Any:  # Any: torch's types are not a dependency
    """torch.cuda if this process has a context made by it, else None.

    `is_initialized` is false in a forked child of such a process, where CUDA cannot be used.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _devices(cuda: Any) -> list[int]:
    """Indices of the devices on which this process has a context.

    The question must not make one: `torch.cuda.synchronize(i)` would, on a device of a neighbour.
    """
    has_context = getattr(sys.modules["torch"]._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [cuda.current_device()]
    return [index for index in range(cuda.device_count()) if has_context(index)]


def synchronize() -> bool:
    """Waits until all device work of this process is done; raises what that work failed with.

    Returns whether there is a context that could have work.
    """
    cuda = _cuda()
    if cuda is None:
        return False
    for index in _devices(cuda):
        cuda.synchronize(index)
    return True


def empty_cache() -> int:
    """Frees device memory that torch keeps without using it; returns the bytes it freed.

    Bytes that are not held are bytes that a snapshot need not copy.
    """
    cuda = _cuda()
    if cuda is None:
        return 0
    devices = _devices(cuda)
    before = sum(cuda.memory_reserved(index) for index in devices)
    cuda.empty_cache()
    return int(before - sum(cuda.memory_reserved(index) for index in devices))


def in_torch() -> bool:
    """Whether torch has a context on a device in this process."""
    return _cuda() is not None


def in_use() -> bool:
    """Whether this process seems to have a context on a device.

    With torch loaded, torch knows. Without it, a mapped driver library is taken as one.
    """
    if "torch" in sys.modules:
        return _cuda() is not None
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return any("/libcuda.so" in line for line in maps)
    except OSError:
        return False
