"""Samples NVML for a job that knows nothing of it: no library, no lease, no daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from tsliced.core.model import DeviceId
from tsliced.host.devices import Device, DeviceReading, Devices, DevicesError
from tsliced.host.membership import Membership
from tsliced.host.processes import command_name
from tsliced.observe.idleness import Sample

#: Fewer say nothing.
LEAST_SAMPLES: Final = 2
#: Processes whose job is remembered.
_MOST_PROCESSES: Final = 65_536


class NothingToWatch(Exception):  # noqa: N818 - an answer
    """No process that was asked for is on a device; the text says what there is."""


class CannotWatch(Exception):  # noqa: N818 - a state of the host
    """NVML does not answer; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be watched. What is empty lets all through."""

    pids: frozenset[int] = frozenset()
    #: Ids, ``UID/ID`` or ``CLUSTER/UID/ID``.
    jobs: frozenset[str] = frozenset()
    #: Indexes or UUIDs.
    devices: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class Watched:
    """What was seen."""

    devices: tuple[Device, ...]
    #: Names of the processes by pid, and the jobs that they are of, as far as that is known.
    processes: dict[int, str] = field(default_factory=dict)
    jobs: set[str] = field(default_factory=set)
    #: Processes that were on the same devices and not asked for.
    others: set[int] = field(default_factory=set)
    samples: list[Sample] = field(default_factory=list)
    #: All of its processes ended before the time was over.
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class Watch:
    """Looks at devices again and again. `library`: of NVML, if not the system's."""

    wanted: Wanted
    duration_s: float
    interval_s: float
    library: str | None = None
    #: Called when it is known whom it looks at: from then on it may be interrupted.
    on_begin: Callable[[Watched], object] = lambda _watched: None
    #: Filled while it goes on, so that what there is can be had after an interrupt.
    watched: Watched | None = None
    _membership: Membership = field(init=False)

    def __post_init__(self) -> None:
        self._membership = Membership("", limit=_MOST_PROCESSES)

    async def run(self) -> None:
        """Watch for as long as it was asked for, or until all processes have ended.

        Raises `NothingToWatch` and `CannotWatch`.
        """
        devices = Devices(self.library)
        try:
            await devices.start()
            await self._run(devices)
        except DevicesError as exc:
            raise CannotWatch(str(exc)) from exc
        finally:
            await devices.close()

    async def _run(self, devices: Devices) -> None:
        inventory = devices.inventory()
        wanted = self.wanted.devices
        chosen = [d for d in inventory if not wanted or wanted & {d.uuid, str(d.index)}]
        if len(wanted) > len(chosen):
            known = ", ".join(f"{d.index} ({d.uuid})" for d in inventory) or "none"
            raise NothingToWatch(f"there is no such device; there are: {known}")
        first = await devices.observe([d.uuid for d in chosen])
        on = [d for d in chosen if self._of(first[d.uuid])]
        if not on:
            raise NothingToWatch(self._what_there_is(first))
        self.watched = watched = Watched(devices=tuple(on))
        uuids = [device.uuid for device in on]
        # The loop may count whole milliseconds.
        end = time.monotonic() + self.duration_s
        while True:
            began_at = time.monotonic()
            readings = await devices.observe(uuids, utilization=True)
            if not self._take(watched, readings):
                watched.ended = True
                return
            if len(watched.samples) == LEAST_SAMPLES:
                self.on_begin(watched)
            if time.monotonic() >= end and len(watched.samples) >= LEAST_SAMPLES:
                return
            await asyncio.sleep(max(0.0, began_at + self.interval_s - time.monotonic()))

    def _take(self, watched: Watched, readings: Mapping[DeviceId, DeviceReading]) -> bool:
        """Add a look; return whether anybody is left to look at."""
        used: dict[str, int] = {}
        for uuid, reading in readings.items():
            mine = self._of(reading)
            for pid in mine:
                if pid not in watched.processes:
                    watched.processes[pid] = command_name(pid) or "?"
            watched.others |= {process.pid for process in reading.processes} - set(mine)
            used[uuid] = sum(mine.values())
        if not any(map(self._of, readings.values())):
            return False
        watched.jobs |= {str(p.job) for p in self._membership.classify(watched.processes) if p.job}
        busy: dict[str, float] = {
            uuid: float(reading.utilization_pct or 0) for uuid, reading in readings.items()
        }
        watched.samples.append(Sample(at=time.monotonic(), busy_pct=busy, used_bytes=used))
        return True

    def _of(self, reading: DeviceReading) -> dict[int, int]:
        """Return the processes on a device that are wanted, and what they use of it."""
        listed = {process.pid: process.used_bytes for process in reading.processes}
        mine: Collection[int] = listed
        if self.wanted.pids or self.wanted.jobs:
            found = self._membership.classify(listed)
            of_jobs = {
                process.process.pid
                for process in found
                if process.job is not None
                and any(process.job.is_called(name) for name in self.wanted.jobs)
            }
            mine = of_jobs | (listed.keys() & self.wanted.pids)
        # Where the driver does not say what a process uses, it may be all that is in use.
        return {pid: reading.used_bytes if (used := listed[pid]) is None else used for pid in mine}

    def _what_there_is(self, readings: Mapping[DeviceId, DeviceReading]) -> str:
        pids = sorted({process.pid for r in readings.values() for process in r.processes})
        if not pids:
            return "no process is on the devices: start the job first"
        jobs = {p.process.pid: p.job for p in self._membership.classify(pids)}
        known = [f"{pid} ({jobs.get(pid) or command_name(pid) or '?'})" for pid in pids]
        return f"none of these processes is on the devices; there are: {', '.join(known)}"
