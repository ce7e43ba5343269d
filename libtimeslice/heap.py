"""A process's own heap in the part of a device: what is freed there is kept until it is made anew.

A device has its memory whether or not it is in use. The C library gives what is freed back to the
kernel, which zeroes each page before it hands it out again; that costs several times what the copy
into it does. So where tensors of the CPU are moved, the C library is told to keep what it has, and
the pages of what is too large for that are put aside here before the memory is freed, and under the
new memory when it is made.

All of this is for speed alone: what cannot be kept is made of fresh pages.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from libtimeslice.storages import Storage

#: What is as large as this, glibc maps apart and unmaps when it is freed: the limit of
#: M_MMAP_THRESHOLD, see mallopt(3).
_LARGE = 32 << 20

#: From malloc.h, with what they are set to. All but the main thread's heaps are of 64 MiB each, and
#: one is given back when it is empty, unless the padding does not fit into the one before it.
_MALLOPT = {-3: _LARGE, -1: -1, -2: 128 << 20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD

#: From linux/mman.h, for mremap(2); the last one is there from Linux 5.7 on.
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_FAILED = ctypes.c_void_p(-1).value


class Heap:
    """Frees the memory under storages of the CPU, and makes it anew. Not for several threads."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._munmap = libc.munmap
        self._munmap.argtypes = [address, size]
        self._mremap = libc.mremap
        self._mremap.argtypes = [address, size, size, ctypes.c_int, address]
        self._mremap.restype = address
        if (mallopt := getattr(libc, "mallopt", None)) is not None:  # not every C library has it
            for name, value in _MALLOPT.items():
                mallopt(name, value)
        #: By storage: where its pages were put aside, and how many bytes of them.
        self._aside: dict[int, tuple[int, int]] = {}

    def free(self, storages: Iterable[Storage]) -> None:
        """Frees the memory of those that have any."""
        for storage in storages:
            if storage.memory.nbytes() >= _LARGE:
                self._put_aside(storage)
            storage.memory.resize_(0)

    def make(self, storages: Iterable[Storage]) -> None:
        """Makes the memory anew, with whatever contents. Raises RuntimeError if it is short."""
        for storage in storages:
            pages = self._aside.pop(storage.memory._cdata, None)
            try:
                storage.memory.resize_(storage.bytes)
            except RuntimeError:
                if pages is None:
                    raise
                # What was put aside takes addresses, too.
                self._munmap(*pages)
                storage.memory.resize_(storage.bytes)
            else:
                if pages is not None:
                    self._put_under(storage, *pages)

    def _put_aside(self, storage: Storage) -> None:
        """Takes the pages away, and leaves the addresses to the C library, without any."""
        address, length = _whole_pages(storage)
        aside = self._mremap(address, length, length, _MAYMOVE | _DONTUNMAP, None)
        if aside != _FAILED:
            self._aside[storage.memory._cdata] = (aside, length)

    def _put_under(self, storage: Storage, aside: int, length: int) -> None:
        """Moves pages to the storage's addresses."""
        address, room = _whole_pages(storage)
        # Where the C library aligned it in another way than before, there is one more or one less.
        fitting = min(length, room)
        if self._mremap(aside, fitting, fitting, _MAYMOVE | _FIXED, address) == _FAILED:
            fitting = 0
        if fitting < length:
            self._munmap(aside + fitting, length - fitting)


def _whole_pages(storage: Storage) -> tuple[int, int]:
    """Returns the address and the length of all pages that are the storage's alone."""
    start = storage.memory.data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, (start + storage.bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
