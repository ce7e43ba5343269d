"""Host memory that device memory is copied to: made once, and used again for each move.

Fresh pages cost several times what the copy itself costs, and pinned ones more (the kernel has to
zero and pin each), so nothing that was made is given back before the process ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from libtimeslice.errors import Refused

#: Powers of two: torch rounds pinned memory up to them.
_LARGEST = 256 << 20
_SMALLEST = 1 << 20


class HostBuffers:
    """A range of host memory that grows, in pieces. Not for several threads at a time."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        #: Where each piece begins in the range, bytes.
        self._starts: list[int] = []
        #: One-dimensional tensors of bytes, with how many these are.
        self._pieces: list[tuple[Any, int]] = []
        self.bytes = 0

    def grow_to(self, size: int) -> None:
        """Makes the range at least so many bytes long. Raises Refused (`no_host_memory`)."""
        import torch  # the job has it, and this library does not need it

        while self.bytes < size:
            left = size - self.bytes
            length = max(_SMALLEST, min(_LARGEST, 1 << (left.bit_length() - 1)))
            try:
                piece = torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:  # torch has no other for memory of the host
                raise Refused(
                    f"{size:,} bytes of host memory are needed, and {self.bytes:,} could be had: "
                    f"{error}",
                    code="no_host_memory",
                ) from error
            self._starts.append(self.bytes)
            self._pieces.append((piece, length))
            self.bytes += length

    def parts(self, offset: int, length: int) -> Iterator[tuple[Any, int, int]]:
        """Yields what makes up a part of the range: a tensor of bytes, from where, and how many."""
        number = bisect_right(self._starts, offset) - 1
        while length:
            start = offset - self._starts[number]
            piece, size = self._pieces[number]
            many = min(length, size - start)
            yield piece, start, many
            offset, length, number = offset + many, length - many, number + 1
