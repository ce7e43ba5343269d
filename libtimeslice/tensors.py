"""Moves the memory of named tensors to the host and back, inside of the process that has them.

The tensors stay what they are, objects and storages; only the memory under a storage is taken away
(its size becomes 0) and made anew. Whoever uses one meanwhile gets an error at best: that nobody
does is up to the caller (see `parking.py`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, get_args

from libtimeslice import accelerator
from libtimeslice.errors import Refused
from libtimeslice.heap import Heap
from libtimeslice.host_buffers import HostBuffers
from libtimeslice.storages import Storage, Walk

#: What happens to a region's memory: copied to the host and back; freed, and made anew with
#: whatever contents, for the job to fill; or left on the device.
Policy = Literal["save", "discard", "keep"]

#: The region of what was given without a name; it is saved.
UNNAMED = ""

#: Between storages in host memory, so that copies of each begin at a cache line and a burst.
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a job's tensors that is moved in one way."""

    name: str
    policy: Policy
    #: What was named, with how it is called.
    roots: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRegion:
    """What a move did to a region."""

    name: str
    policy: Policy
    storages: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a move did."""

    #: Copied, of the regions that are saved.
    bytes: int
    seconds: float
    regions: tuple[MovedRegion, ...]

    @property
    def gb_per_s(self) -> float:
        """What was copied per time that all of it took, 10^9 bytes/s."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Away:
    """Storages whose memory was freed."""

    saved: list[Storage] = field(default_factory=list)
    discarded: list[Storage] = field(default_factory=list)
    regions: tuple[MovedRegion, ...] = ()

    def __iter__(self) -> Iterator[Storage]:
        return chain(self.saved, self.discarded)


class Tensors:
    """Tensors that are moved together. Only one thread at a time may use it.

    kind: of the device whose memory is freed, `cuda` or `cpu` (for machines without a GPU).
    """

    def __init__(self, kind: str) -> None:
        if kind not in ("cuda", "cpu"):
            raise ValueError(f"device must be 'cuda' or 'cpu', not {kind!r}")
        self.kind = kind
        self.regions: list[Region] = []
        self._host = HostBuffers(pinned=kind == "cuda")
        self._heap = Heap() if kind == "cpu" else None
        self._away: _Away | None = None

    @property
    def parked(self) -> bool:
        """Whether their memory is freed."""
        return self._away is not None

    @property
    def host_bytes(self) -> int:
        """Host memory that is kept for copies."""
        return self._host.bytes

    def add(
        self,
        objects: Iterable[object],
        regions: Mapping[str, object] | None,
        policy: Mapping[str, Policy] | None,
    ) -> None:
        """Adds what is to be moved. A storage belongs to the first region that leads to it.

        Raises ValueError for names and policies that make no sense, and Unmovable.
        """
        named, policies = dict(regions or {}), dict(policy or {})
        if unknown := policies.keys() - named.keys():
            raise ValueError(f"a policy for {sorted(unknown)}, which is no region")
        if wrong := set(policies.values()) - set(get_args(Policy)):
            raise ValueError(f"a policy is one of {get_args(Policy)}, not {sorted(wrong)}")
        if twice := named.keys() & {region.name for region in self.regions}:
            raise ValueError(f"there is a region {sorted(twice)} already")
        added = [
            Region(name=name, policy=policies.get(name, "save"), roots=((name, value),))
            for name, value in named.items()
        ]
        if rest := tuple((type(each).__name__, each) for each in objects):
            added.append(Region(name=UNNAMED, policy="save", roots=rest))
        together = [*self.regions, *added]
        _storages(together, self.kind)  # so that what cannot be moved is known now
        self.regions = together

    def check(self) -> int:
        """Returns how many bytes could be freed as things stand. Raises Unmovable."""
        found = _storages(self.regions, self.kind)
        return sum(each.bytes for region, some in found if region.policy != "keep" for each in some)

    def park(self) -> Moved:
        """Copies what is saved to the host, and frees all but what is kept.

        Raises Refused if host memory is short, and Unmovable; then all is as it was.
        """
        assert self._away is None, "parked already"
        begun = time.perf_counter()
        away = self._select()
        self._host.grow_to(_end_of(away.saved))
        self._copy(away.saved, out=True)
        self._away = away
        self._free(away)
        return self._moved(begun)

    def unpark(self) -> Moved:
        """Makes the memory anew, and copies back what was saved.

        Raises Refused if device memory is short; then all is parked as before.
        """
        away = self._away
        assert away is not None, "not parked"
        begun = time.perf_counter()
        try:
            self._make(away)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and the CPU has no other
            self._free(away)
            raise Refused(
                f"the memory could not be had again: {error}", code="no_device_memory"
            ) from error
        self._copy(away.saved, out=False)
        moved = self._moved(begun)
        self._away = None
        return moved

    def _free(self, away: _Away) -> None:
        if self._heap is not None:
            self._heap.free(away)
            return
        for storage in away:
            storage.memory.resize_(0)
        accelerator.empty_cache()

    def _make(self, away: _Away) -> None:
        if self._heap is not None:
            self._heap.make(away)
            return
        for storage in away:
            storage.memory.resize_(storage.bytes)

    def _select(self) -> _Away:
        away, regions = _Away(), []
        for region, storages in _storages(self.regions, self.kind):
            if region.policy == "save":
                away.saved += storages
            elif region.policy == "discard":
                away.discarded += storages
            regions.append(
                MovedRegion(
                    name=region.name,
                    policy=region.policy,
                    storages=len(storages),
                    bytes=sum(storage.bytes for storage in storages),
                )
            )
        away.regions = tuple(regions)
        return away

    def _copy(self, storages: Iterable[Storage], *, out: bool) -> None:
        with _CudaCopies() if self.kind == "cuda" else _CpuCopies() as copies:
            for offset, storage in _placed(storages):
                at = 0
                copies.turn_to(storage)
                for piece, start, many in self._host.parts(offset, storage.bytes):
                    copies.copy(piece, start, at, many, out=out)
                    at += many

    def _moved(self, begun: float) -> Moved:
        assert self._away is not None
        return Moved(
            bytes=sum(storage.bytes for storage in self._away.saved),
            seconds=time.perf_counter() - begun,
            regions=self._away.regions,
        )


def _storages(regions: Iterable[Region], kind: str) -> list[tuple[Region, list[Storage]]]:
    walk = Walk(kind)
    return [
        (region, [storage for root in region.roots for storage in walk.visit(*root)])
        for region in regions
    ]


def _placed(storages: Iterable[Storage]) -> Iterator[tuple[int, Storage]]:
    """Yields where in host memory each storage has its place."""
    offset = 0
    for storage in storages:
        yield offset, storage
        offset += -(-storage.bytes // _ALIGNMENT) * _ALIGNMENT


def _end_of(storages: Iterable[Storage]) -> int:
    return max((offset + storage.bytes for offset, storage in _placed(storages)), default=0)


class _CpuCopies:
    """Copies between host memory and host memory.

    What memcpy writes goes past the caches; torch's own copy reads first what it writes over, and
    took 1.4 times as long.
    """

    def __enter__(self) -> _CpuCopies:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        pass

    def turn_to(self, storage: Storage) -> None:
        """Copies from or to this storage from here on."""
        self._address = storage.memory.data_ptr()

    def copy(self, piece: Any, start: int, at: int, many: int, *, out: bool) -> None:
        """Copies bytes of the storage, from `at`, to the host's piece, from `start`; or back."""
        host, device = piece.data_ptr() + start, self._address + at
        if out:
            ctypes.memmove(host, device, many)
        else:
            ctypes.memmove(device, host, many)


class _CudaCopies:
    """Copies between devices and pinned host memory, side by side, each device's on its own stream.

    They are done when the `with` block is left.
    """

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def __enter__(self) -> _CudaCopies:
        # What was queued before may use the memory still, also memory that was made just now: the
        # allocator hands out blocks whose last use is queued, on the stream that they belong to.
        accelerator.synchronize()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def turn_to(self, storage: Storage) -> None:
        """Copies from or to this storage from here on."""
        import torch

        device = storage.device
        with torch.no_grad():
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            self._bytes = empty.set_(storage.memory)
        self._stream = self._streams.get(device)
        if self._stream is None:
            self._stream = self._streams[device] = torch.cuda.Stream(device)

    def copy(self, piece: Any, start: int, at: int, many: int, *, out: bool) -> None:
        """Begins to copy bytes of the storage to the host's piece, from `start`; or back."""
        import torch

        host, device = piece.narrow(0, start, many), self._bytes.narrow(0, at, many)
        with torch.cuda.stream(self._stream):
            if out:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)
