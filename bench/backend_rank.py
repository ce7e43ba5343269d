"""A process with state for a backend to move, and with the copy that its moves are held against.

python -m bench.backend_rank KIND MIB TENSORS

KIND: `torch`, whose tensors are managed, on CUDA where there is one; `driver`, whose memory is on
the first device that the driver has; or `none`. Each line `copy` is answered by what plain copies
of as many bytes reach, out and in, in GB/s: between pinned memory and the device, or by memcpy
between warm memory of the host.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.rank import RankProcess
from demo.cuda import DeviceBuffer, Driver
from libtimeslice import TimeSlice, connect

MIB = 1 << 20
#: Larger than caches, and copied again and again.
BUFFER_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What copies reach, 10^9 bytes/s."""

    out: float
    back: float


class BackendRank(RankProcess):
    """The process, from outside."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], first: str = ""
    ) -> None:
        """Waits until it is ready. `first`: what it is told before."""
        # (torch says that there is no numpy, which nobody here needs.)
        super().__init__("-W", "ignore", *command, environment=environment, first=first)

    def copy(self) -> Rates:
        """Has it copied as many bytes as it has; it must not be parked."""
        self._tell("copy")
        out, back = map(float, self._line().split())
        return Rates(out=out, back=back)

    def faults(self) -> int:
        """Returns how many pages it has had made so far."""
        with open(f"/proc/{self.pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[7])


# --- inside of it ---------------------------------------------------------------------------------


def manage_tensors(ts: TimeSlice, size: int, many: int) -> Callable[[], tuple[float, float]]:
    """Makes tensors of so many bytes together and gives them to be moved; returns the copies."""
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    ts.pausable_step()
    made = [torch.ones(size // many, dtype=torch.uint8, device=kind) for _ in range(many)]
    ts.torch.manage(made, device=kind)
    return pinned_copies(size) if kind == "cuda" else memory_copies(size)


def pinned_copies(size: int) -> Callable[[], tuple[float, float]]:
    """Returns what copies between pinned memory and the device, so many bytes each way."""
    import torch

    host = torch.ones(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device="cuda")

    def rate(target: Any, source: Any) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(max(1, size // BUFFER_BYTES)):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        return max(1, size // BUFFER_BYTES) * BUFFER_BYTES / seconds / 1e9

    return lambda: (rate(host, device), rate(device, host))


def memory_copies(size: int) -> Callable[[], tuple[float, float]]:
    """Returns what copies so many bytes by memcpy; one way is like the other."""
    buffers = [mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE) for _ in range(2)]
    target, source = ((ctypes.c_char * BUFFER_BYTES).from_buffer(buffer) for buffer in buffers)
    for each in (target, source):
        ctypes.memset(each, 1, BUFFER_BYTES)

    def copy() -> tuple[float, float]:
        begun = time.perf_counter()
        left = size
        while left > 0:
            ctypes.memmove(target, source, min(left, BUFFER_BYTES))
            left -= BUFFER_BYTES
        rate = size / (time.perf_counter() - begun) / 1e9
        return rate, rate

    return copy


def fill_device(size: int) -> Callable[[], tuple[float, float]]:
    """Takes so many bytes of the driver's first device; returns the copies."""
    driver = Driver()
    buffer = DeviceBuffer(driver, 0, size)
    buffer.fill(0, 1, size)
    if driver.is_software:
        return memory_copies(size)
    return pinned_copies(size)


def main() -> None:
    """Takes commands until there are no more."""
    kind, mib, tensors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ts = connect()
    copy: Callable[[], tuple[float, float]] | None = None
    if kind == "torch":
        copy = manage_tensors(ts, mib * MIB, tensors)
    elif kind == "driver":
        copy = fill_device(mib * MIB)
    else:
        ts.register()
    print("ready", flush=True)
    for line in sys.stdin:
        if line != "copy\n" or copy is None:
            raise ValueError(f"not for a rank with {kind}: {line}")
        print(*copy(), flush=True)


if __name__ == "__main__":
    main()
