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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.cgroups import UNIFIED, Cgroups
from tsliced.host.devices import DeviceReading
from tsliced.host.procfs import read_file

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

    def host_available_bytes(self) -> int:
        """Return MemAvailable: what can be had without swapping (man 5 proc)."""
        data = read_file(f"{self._cgroups.proc}/meminfo") or b""
        available = _find_number(data, b"MemAvailable:")
        if available is None:
            raise RuntimeError(f"{self._cgroups.proc}/meminfo has no MemAvailable line")
        return available * 1024

    def cgroups_available(self, pid: int) -> Iterator[tuple[str, int]]:
        """Yield each limited memory cgroup above a process with the bytes left in it."""
        paths = self._cgroups.paths(pid)
        if "memory" in paths:
            for directory in self._cgroups.lineage("memory", paths["memory"]):
                left = _left_in_version_1(directory)
                if left is not None:
                    yield directory, left
        if UNIFIED in paths:
            for directory in self._cgroups.lineage(UNIFIED, paths[UNIFIED]):
                left = _left_in_version_2(directory)
                if left is not None:
                    yield directory, left


def _left_in_version_1(directory: str) -> int | None:
    """Return limit minus usage plus what reclaim gets back for nothing; None without a limit."""
    limit = _read_number(f"{directory}/memory.limit_in_bytes")
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    usage = _read_number(f"{directory}/memory.usage_in_bytes")
    return _left(directory, limit, usage, b"total_inactive_file")


def _left_in_version_2(directory: str) -> int | None:
    """Return the same for version 2, where memory.high slows what memory.max would kill."""
    limits = [
        limit
        for name in ("memory.max", "memory.high")
        if (limit := _read_number(f"{directory}/{name}")) is not None
    ]
    if not limits:
        return None
    usage = _read_number(f"{directory}/memory.current")
    return _left(directory, min(limits), usage, b"inactive_file")


def _left(directory: str, limit: int, usage: int | None, reclaimable: bytes) -> int | None:
    """Return how much of a limit is left, in bytes, never below zero; None if the cgroup is gone.

    Usage counts the page cache too. Its inactive part is given up at once when the copy needs
    memory; without crediting it, a job that read its dataset would never be admitted.
    """
    if usage is None:
        return None
    cache = _find_number(read_file(f"{directory}/memory.stat") or b"", reclaimable) or 0
    return max(0, limit - usage + min(cache, usage))


def _read_number(path: str) -> int | None:
    """Return the number that a file holds; None if there is no such file, or it says "max"."""
    text = (read_file(path) or b"").strip()
    return int(text) if text.isdigit() else None


def _find_number(data: bytes, name: bytes) -> int | None:
    for line in data.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return None


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

    `margin_bytes` stays free on the host whatever is asked. `limit` bounds the reservations.
    """

    def __init__(self, memory: HostMemory, *, margin_bytes: int = 0, limit: int = 4096) -> None:
        super().__init__(limit=limit)
        self._memory = memory
        self.margin_bytes = margin_bytes

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
        promised = self._promised_to_others(key)
        for place, need in needed.items():
            margin = self.margin_bytes if place == HOST else 0
            have = max(0, available[place] - promised[place] - margin)
            if need > have:
                return Shortage(need_bytes=need, have_bytes=have, where=place)
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
