"""Admission to host DRAM and to device memory.

A snapshot moves a rank's device state into the rank's own memory, so it must fit into the host and
into every memory cgroup above that process; a restore moves it back, and a restore that finds the
device full is lost for ever. Both are therefore asked for beforehand, and refused, not tried.

Two groups that ask at once must not be promised the same bytes. Each ledger keeps what was promised
and is not yet visible in the kernel's or the driver's own numbers: a reservation is made, then
*settled* when its bytes are really in use (from then on they count there), then released.

Nothing here waits, and the ledgers may be called from several threads.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.cgroups import UNIFIED, Cgroups
from tsliced.host.devices import DeviceReading
from tsliced.host.procfs import HeldFiles

#: Names the host itself where a cgroup's directory is named otherwise.
HOST: Final = "the host"

#: Version 1 writes "no limit" as the largest page-aligned number that it can count.
_UNLIMITED_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMargin:
    """What a snapshot takes beyond the device memory that NVML counts: the driver's work space."""

    ratio: float = 0.05
    #: Per rank.
    bytes: int = 512 << 20

    def need_bytes(self, device_bytes: int) -> int:
        """Return the host memory to reserve for one rank that uses so much device memory."""
        return device_bytes + int(device_bytes * self.ratio) + self.bytes


class Demand(NamedTuple):
    """Host memory that one rank is about to take."""

    process: ProcessId
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """How much more memory a process can take before something is reclaimed, swapped or killed."""

    available_bytes: int
    #: `HOST`, or the directory of the cgroup that limits it.
    limited_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The bytes are reserved until they are released."""

    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Nothing was reserved: not enough is free in one place."""

    need_bytes: int
    #: What is free there, less what others were promised and the margin.
    have_bytes: int
    #: `HOST`, a cgroup's directory, or a device.
    where: str
    #: Why `have_bytes` can't be trusted, if it is not simply too little.
    remark: str = ""

    def __str__(self) -> str:
        remark = f" ({self.remark})" if self.remark else ""
        return (
            f"{_amount(self.need_bytes)} needed, {_amount(self.have_bytes)} available "
            f"in {self.where}{remark}"
        )


def _amount(count: int) -> str:
    return f"{count:,} bytes ({count / (1 << 20):,.0f} MiB)"


class HostMemory:
    """Reads how much memory is left for a process; swap does not count."""

    def __init__(self, cgroups: Cgroups | None = None) -> None:
        self._cgroups = cgroups or Cgroups()
        self._files = HeldFiles()

    def headroom(self, pid: int) -> Headroom:
        """Return what is left for a process.

        A process that is gone is limited by the host alone: it will take nothing.
        """
        least = min(self.available(pid).items(), key=lambda place: place[1])
        return Headroom(available_bytes=least[1], limited_by=least[0])

    def available(self, pid: int) -> dict[str, int]:
        """Return the bytes left in each place that limits a process: the host, then its cgroups."""
        places = {HOST: self.host_available_bytes()}
        places.update(self.cgroups_available(pid))
        return places

    def totals(self, pid: int) -> dict[str, int]:
        """Return the size of each of these places."""
        limits = {directory: limit for directory, limit, _ in self._limited(pid)}
        return {HOST: self.host_total_bytes(), **limits}

    def host_available_bytes(self) -> int:
        """Return MemAvailable: what can be had without swapping (man 5 proc)."""
        return self._meminfo(b"MemAvailable:")

    def host_total_bytes(self) -> int:
        """Return MemTotal."""
        return self._meminfo(b"MemTotal:")

    def _meminfo(self, name: bytes) -> int:
        path = f"{self._cgroups.proc}/meminfo"
        count = _find_number(self._files.read(path) or b"", name)
        if count is None:
            raise RuntimeError(f"{path} has no {name.decode().rstrip(':')} line")
        return count * 1024

    def cgroups_available(self, pid: int) -> Iterator[tuple[str, int]]:
        """Yield each limited memory cgroup above a process with the bytes left in it."""
        for directory, limit, version in self._limited(pid):
            left = self._left(directory, limit, version)
            if left is not None:
                yield directory, left

    def _limited(self, pid: int) -> Iterator[tuple[str, int, _Version]]:
        """Yield each memory cgroup above a process that has a limit, and the limit."""
        held = self._files.read(f"{self._cgroups.proc}/{pid}/cgroup")
        paths = self._cgroups.paths_in(held or b"")
        for version in _VERSIONS:
            if version.controller not in paths:
                continue
            for directory in self._cgroups.lineage(version.controller, paths[version.controller]):
                limit = self._limit(directory, version)
                if limit < _UNLIMITED_BYTES:
                    yield directory, limit, version

    def _limit(self, directory: str, version: _Version) -> int:
        """Return the limit of a cgroup, in bytes, or a number that means none."""
        limit = _UNLIMITED_BYTES
        for name in version.limits:
            text = self._files.read(f"{directory}/{name}")
            if text is None:
                # A controller's files are all there, or none is: it is not used here.
                break
            limit = min(limit, _number(text, _UNLIMITED_BYTES))
        return limit

    def _left(self, directory: str, limit: int, version: _Version) -> int | None:
        """Return how much of a limit is left, in bytes, never below zero; None: the cgroup is gone.

        Usage counts the page cache too. Its inactive part is given up at once when the copy needs
        memory; without crediting it, a job that read its dataset would never be admitted.
        """
        usage = self._files.read(f"{directory}/{version.usage}")
        if usage is None:
            return None
        used = int(usage)
        stat = self._files.read(f"{directory}/memory.stat") or b""
        cache = _find_number(stat, version.reclaimable) or 0
        return max(0, limit - used + min(cache, used))


class _Version(NamedTuple):
    """What a version of the memory controller calls its files."""

    controller: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: bytes


_VERSIONS: Final = (
    _Version("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", b"total_inactive_file"),
    # memory.high slows what memory.max would kill.
    _Version(UNIFIED, ("memory.max", "memory.high"), "memory.current", b"inactive_file"),
)


def _number(text: bytes, otherwise: int) -> int:
    """Return the number that a file holds, or something else if it says "max"."""
    text = text.strip()
    return int(text) if text.isdigit() else otherwise


def _find_number(data: bytes, name: bytes) -> int | None:
    """Return the number after the name that a line begins with."""
    start = (b"\n" + data).find(b"\n" + name + b" ")
    if start < 0:
        return None
    words = data[start + len(name) :].split(maxsplit=1)
    return int(words[0]) if words else None


Part = TypeVar("Part", bound=Hashable)


@dataclass(slots=True)
class _Entry:
    """One process's, or one device's, part of a reservation."""

    bytes: int
    places: tuple[str, ...]
    is_settled: bool = False


class _Ledger(Generic[Part]):
    """Reservations by key; each has parts, and each part is promised in one or several places."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._entries: dict[Hashable, dict[Part, _Entry]] = {}
        self._lock = threading.Lock()

    def release(self, key: Hashable) -> None:
        """Forget a reservation, settled or not; unknown keys are ignored."""
        with self._lock:
            self._entries.pop(key, None)

    def settle(self, key: Hashable, part: Part | None = None) -> None:
        """Mark the bytes, of one part or of all, as visibly in use: no longer counted twice."""
        self._mark(key, part, is_settled=True)

    def unsettle(self, key: Hashable, part: Part | None = None) -> None:
        """Mark bytes as given back and promised again, so that nobody else is promised them."""
        self._mark(key, part, is_settled=False)

    def reserved(self, key: Hashable) -> dict[Part, int]:
        """Return what a key has reserved, settled or not, in bytes by part."""
        with self._lock:
            return {part: entry.bytes for part, entry in self._entries.get(key, {}).items()}

    def promised(self) -> dict[str, int]:
        """Return the bytes that are promised and not yet in use, by place."""
        with self._lock:
            return dict(self._promised_to_others(None))

    def _mark(self, key: Hashable, part: Part | None, *, is_settled: bool) -> None:
        with self._lock:
            for name, entry in self._entries.get(key, {}).items():
                if part is None or name == part:
                    entry.is_settled = is_settled

    def _promised_to_others(self, key: Hashable | None) -> defaultdict[str, int]:
        promised: defaultdict[str, int] = defaultdict(int)
        for other, entries in self._entries.items():
            if other != key:
                _add_up(promised, (entry for entry in entries.values() if not entry.is_settled))
        return promised

    def _commit(self, key: Hashable, entries: dict[Part, _Entry]) -> Granted:
        self._entries[key] = entries
        return Granted(bytes=sum(entry.bytes for entry in entries.values()))

    def _refuse_if_full(self, key: Hashable) -> Shortage | None:
        if key in self._entries or len(self._entries) < self._limit:
            return None
        remark = f"{self._limit} reservations exist, which is the limit"
        return Shortage(need_bytes=0, have_bytes=0, where="the ledger", remark=remark)


def _add_up(totals: defaultdict[str, int], entries: Iterable[_Entry]) -> None:
    for entry in entries:
        for place in entry.places:
            totals[place] += entry.bytes


def _by_process(demands: Iterable[Demand]) -> dict[ProcessId, int]:
    needs: defaultdict[ProcessId, int] = defaultdict(int)
    for demand in demands:
        needs[demand.process] += demand.bytes
    return needs


class DramLedger(_Ledger[ProcessId]):
    """Promises host memory to snapshots.

    `margin_bytes` stays free on the host whatever is asked, and what `ray_bytes` returns in each
    place. `limit` bounds the reservations.
    """

    def __init__(
        self,
        memory: HostMemory,
        *,
        margin_bytes: int = 0,
        ray_bytes: Callable[[], Mapping[str, int]] = dict,
        limit: int = 4096,
    ) -> None:
        super().__init__(limit=limit)
        self._memory = memory
        self.margin_bytes = margin_bytes
        self._ray_bytes = ray_bytes

    def reserve(self, key: Hashable, demands: Sequence[Demand]) -> Granted | Shortage:
        """Reserve all demands or none; asking again under the same key replaces what it had.

        Bytes that the key already settled are in use and must not be asked for again.
        """
        # Reading under the lock keeps this order: what another thread settles before we decide was
        # in use before we looked.
        with self._lock:
            full = self._refuse_if_full(key)
            if full is not None:
                return full
            available: dict[str, int] = {}
            entries: dict[ProcessId, _Entry] = {}
            for process, need in _by_process(demands).items():
                places = self._memory.available(process.pid)
                # The first reading of a place counts: later ones add nothing but noise.
                available = {**places, **available}
                entries[process] = _Entry(need, tuple(places))
            return self._decide(key, entries, available)

    def _decide(
        self, key: Hashable, entries: dict[ProcessId, _Entry], available: Mapping[str, int]
    ) -> Granted | Shortage:
        needed: defaultdict[str, int] = defaultdict(int)
        _add_up(needed, entries.values())
        promised, for_ray = self._promised_to_others(key), self._ray_bytes()
        for place, need in needed.items():
            margin, ray = self.margin_bytes if place == HOST else 0, for_ray.get(place, 0)
            have = max(0, available[place] - promised[place] - max(margin, ray))
            if need > have:
                remark = f"{ray:,} more stay free: with less, Ray kills workers" if ray else ""
                return Shortage(need_bytes=need, have_bytes=have, where=place, remark=remark)
        return self._commit(key, entries)


class DeviceLedger(_Ledger[DeviceId]):
    """Promises device memory to restores.

    `margin_bytes` stays free on each device; with more than 0, a job that filled a device whole
    can never come back to it. Readings older than `max_age_s` are not believed.
    """

    def __init__(self, *, margin_bytes: int = 0, max_age_s: float = 5.0, limit: int = 4096) -> None:
        super().__init__(limit=limit)
        self.margin_bytes = margin_bytes
        self.max_age_s = max_age_s

    def reserve(
        self,
        key: Hashable,
        needs: Mapping[DeviceId, int],
        readings: Mapping[DeviceId, DeviceReading],
    ) -> Granted | Shortage:
        """Reserve `needs`, in bytes by device, all or none; the same key replaces what it had."""
        with self._lock:
            full = self._refuse_if_full(key)
            if full is not None:
                return full
            promised = self._promised_to_others(key)
            for uuid, need in needs.items():
                have, remark = self._have(readings.get(uuid))
                have = max(0, have - promised[uuid])
                if need > have:
                    return Shortage(
                        need_bytes=need, have_bytes=have, where=f"device {uuid}", remark=remark
                    )
            return self._commit(key, {uuid: _Entry(need, (uuid,)) for uuid, need in needs.items()})

    def _have(self, reading: DeviceReading | None) -> tuple[int, str]:
        if reading is None:
            return 0, "it was not read"
        if reading.stale_s > self.max_age_s:
            return 0, f"it was last read {reading.stale_s:.1f} s ago"
        return reading.free_bytes - self.margin_bytes, ""
