"""Who is on the devices: NVML's process lists, put together with what is known of processes.

A snapshotted process is not listed by NVML; the core knows it. A backend whose devices NVML does
not see (`Backend.seen_by_nvml`) relies on ranks that registered themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from tsliced.core.actions import ScanGroups
from tsliced.core.model import (
    Cause,
    DeviceId,
    Earlier,
    FoundRank,
    GroupConfig,
    GroupName,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    TenancyKey,
    Verb,
)
from tsliced.core.value import maker
from tsliced.host.backends.base import Backend, BackendError
from tsliced.host.devices import DeviceError, DeviceReading, Devices, DevicesError
from tsliced.host.membership import Membership
from tsliced.host.processes import is_alive

_make_found = maker(FoundRank)

#: NVML may go on listing a process for some 100 ms after its memory is gone.
GONE_LIMIT_S: Final = 5.0
GONE_POLL_S: Final = 0.05
#: For how long what was read of a device is as good as new, where nothing was done meanwhile: less
#: than NVML itself may lag behind.
RECENT_S: Final = 0.02


class ScanFailed(Exception):  # noqa: N818 - carries a reason
    """The devices could not be looked at."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Scanner:
    """Looks at devices and says which processes of which jobs are on them."""

    def __init__(
        self,
        groups: Iterable[GroupConfig],
        devices: Devices | None,
        membership: Membership,
        backend: Backend,
    ) -> None:
        self._devices_of: Mapping[GroupName, tuple[DeviceId, ...]] = {}
        self.reconfigure(groups)
        self._devices = devices
        self._membership = membership
        self._backend = backend
        #: Says what was seen of a rank, or of others of its kind.
        self.recall: Callable[[FoundRank], Awaitable[Earlier | None]] | None = None
        self._registered: dict[ProcessId, tuple[JobKey, frozenset[GroupName]]] = {}
        #: The latest readings, for those who show them.
        self.readings: dict[DeviceId, DeviceReading] = {}
        #: When those were read since which nothing was done.
        self._fresh: dict[DeviceId, float] = {}
        #: How often something was done.
        self._changes = 0
        #: By device: per cent of time in which a kernel ran, as last asked for.
        self.utilization: dict[DeviceId, int | None] = {}

    def reconfigure(self, groups: Iterable[GroupConfig]) -> None:
        """Look at the devices of these groups from now on."""
        self._devices_of = {group.name: group.devices for group in groups}

    def register(self, process: ProcessId, job: JobKey, groups: Collection[GroupName]) -> None:
        """Know a process as a rank, whether or not NVML lists it."""
        self._registered[process] = (job, frozenset(groups))

    def registered_groups(self, process: ProcessId) -> tuple[GroupName, ...]:
        """Return the groups that a process was registered for; none if it was not."""
        _, groups = self._registered.get(process, (None, frozenset[GroupName]()))
        return tuple(sorted(groups))

    def forget(self, process: ProcessId) -> None:
        """A process is gone."""
        self._registered.pop(process, None)

    def on_change(self) -> None:
        """Know that an operation begins or has ended: what was read before counts no more."""
        self._changes += 1
        self._fresh.clear()

    async def scan(self, scan: ScanGroups) -> tuple[FoundRank, ...]:
        """Return who is on a tenancy's groups, and on those beyond that a rank of it reaches.

        First it waits, within a limit, for what should be gone to be gone, and for what may stay
        to sink no further. Raises `ScanFailed`.
        """
        groups = (*scan.tenancy.groups, *scan.beyond)
        found = await self.look(groups, recent=scan.recent)
        if scan.expect_gone or scan.unlisted:
            found = await self._until_gone(scan, groups, found)
        found += await self._hidden_on(scan.tenancy, {each.process for each in found})
        return tuple([await self._weighed(each) for each in found])

    async def _until_gone(
        self, scan: ScanGroups, groups: tuple[GroupName, ...], found: tuple[FoundRank, ...]
    ) -> tuple[FoundRank, ...]:
        """Look again and again until what should be gone is; return what was seen last."""
        loop = asyncio.get_running_loop()
        end = loop.time() + GONE_LIMIT_S
        before = -1
        while True:
            left, is_little = self._left(scan, found)
            if (is_little and left in (0, before)) or loop.time() >= end:
                return found
            before = left
            await asyncio.sleep(GONE_POLL_S)
            found = await self.look(groups, recent=scan.recent)

    async def _weighed(self, found: FoundRank) -> FoundRank:
        """Return a rank with what its backend says of its freeze."""
        if found.job is None:
            return found
        self._backend.belongs(found.process, found.job)
        drains = await self._backend.drains(found.process)
        found = await self._recalled(found)
        return replace(found, drains=drains) if drains else found

    async def _recalled(self, found: FoundRank) -> FoundRank:
        """Return a rank with what is known of its kind."""
        if found.job is None or self.recall is None:
            return found
        earlier = await self.recall(found)
        return found if earlier is None else replace(found, earlier=earlier)

    async def forgotten(
        self, tenancy: TenancyKey, known: Collection[ProcessId], *, host: HostName
    ) -> tuple[FoundRank, ...]:
        """Return the job's own processes that are parked and not among the known ones.

        NVML does not list them, and a daemon that lost its journal knows nothing of them: only the
        driver does. On which devices they were it cannot say; it is taken to be those that their
        job leases now. Raises `ScanFailed` if one of them cannot be asked.
        """
        devices = frozenset(self._devices_on(tenancy.groups))
        if not devices:
            return ()
        processes = self._membership.registered(tenancy.job)
        return tuple(
            [
                FoundRank(
                    process=process,
                    job=tenancy.job,
                    devices=devices,
                    device_bytes=0,
                    uid=tenancy.job.uid,
                    state=RankState.PARKED,
                )
                for process in processes
                if process not in known
                and await self._is_parked(RankId(host, process), tenancy.job)
            ]
        )

    async def _is_parked(self, rank: RankId, job: JobKey) -> bool:
        try:
            if not await self._backend.probe(rank.process):
                return False
        except BackendError as exc:
            raise _untold(rank, str(exc)) from exc
        outcome = await self._backend.run(Verb.QUERY, rank, None, job)
        # One that ended meanwhile is not parked.
        if outcome.observed is RankState.UNKNOWN and is_alive(rank.process):
            raise _untold(rank, outcome.failure.text if outcome.failure else "no answer")
        return outcome.observed is RankState.PARKED

    def _left(self, scan: ScanGroups, found: Iterable[FoundRank]) -> tuple[int, bool]:
        """Return how much there is of what should be gone, and whether that is little enough."""
        unlisted = dict(self.unlisted(device for device, _ in scan.unlisted))
        left = [f.device_bytes for f in found if f.process in scan.expect_gone]
        left += [max(0, unlisted.get(device, 0) - before) for device, before in scan.unlisted]
        return sum(left), all(count <= scan.residue_bytes for count in left)

    def unlisted(self, devices: Iterable[DeviceId]) -> tuple[tuple[DeviceId, int], ...]:
        """Return what was last seen in use that no process is listed for, by device.

        A device on which NVML does not say what each process uses is left out.
        """
        return tuple(
            (uuid, max(0, reading.used_bytes - _listed(reading)))
            for uuid in devices
            if (reading := self.readings.get(uuid)) is not None
            and all(process.used_bytes is not None for process in reading.processes)
        )

    def unlisted_on(self, scan: ScanGroups) -> tuple[tuple[DeviceId, int], ...]:
        """Return the same for all devices that a scan looks at."""
        return self.unlisted(self._devices_on((*scan.tenancy.groups, *scan.beyond)))

    async def look(
        self, groups: Iterable[GroupName], *, recent: bool = False
    ) -> tuple[FoundRank, ...]:
        """Return every process that NVML lists on the groups' devices. Raises `ScanFailed`.

        `recent`: see `read`.
        """
        return self._look_at(await self.read(self._devices_on(groups), recent=recent))

    async def look_around(self) -> tuple[tuple[FoundRank, ...], dict[DeviceId, str]]:
        """Return every process on any group's devices, and which devices are lost, and why.

        It is noted how busy the devices are. Raises `ScanFailed`, also for one device that cannot
        be read and is not known to be lost.
        """
        uuids = self._devices_on(self._devices_of)
        lost: dict[DeviceId, str] = {}
        try:
            readings = await self.read(uuids, utilization=True)
        except ScanFailed as exc:
            cause = exc.__cause__
            if not isinstance(cause, DeviceError) or cause.uuid not in cause.lost:
                raise
            # The others are looked at all the same.
            lost = cause.lost
            readings = self._keep(cause.readings, utilization=True)
        return tuple([await self._recalled(each) for each in self._look_at(readings)]), lost

    def _look_at(self, readings: Mapping[DeviceId, DeviceReading]) -> tuple[FoundRank, ...]:
        try:
            return self._found(readings)
        except OSError as exc:
            # Out of descriptors, for instance: that nobody can be looked at is not nobody there.
            text = f"the processes on the devices cannot be looked at: {exc}"
            raise ScanFailed(Reason(cause=Cause.DRIVER, text=text)) from exc

    def _found(self, readings: Mapping[DeviceId, DeviceReading]) -> tuple[FoundRank, ...]:
        on: defaultdict[int, list[tuple[DeviceId, int]]] = defaultdict(list)
        for uuid, reading in readings.items():
            # Where NVML does not say what a process uses, it may be all that is not another's.
            rest = max(0, reading.used_bytes - _listed(reading))
            for process in reading.processes:
                used = rest if process.used_bytes is None else process.used_bytes
                on[process.pid].append((uuid, used))
        return tuple(
            FoundRank(
                process=known.process,
                job=known.job,
                devices=frozenset(uuid for uuid, _ in on[known.process.pid]),
                device_bytes=sum(used for _, used in on[known.process.pid]),
                bytes_on=tuple(sorted(on[known.process.pid])),
                uid=known.uid,
                name=known.name,
                watchdog_s=known.watchdog_s,
            )
            for known in self._membership.classify(on)
        )

    async def read(
        self, uuids: Collection[DeviceId], *, utilization: bool = False, recent: bool = False
    ) -> dict[DeviceId, DeviceReading]:
        """Read devices, and keep the readings. Raises `ScanFailed`.

        `recent`: what was read moments ago, with nothing done since, will do.
        """
        if recent and (known := self.recent(uuids)) is not None:
            return known
        if self._devices is None or not uuids:
            return {}
        now, changes = time.monotonic(), self._changes
        try:
            readings = await self._devices.observe(uuids, utilization=utilization)
        except DevicesError as exc:
            raise ScanFailed(Reason(cause=Cause.DRIVER, text=str(exc))) from exc
        stale_s = max((reading.stale_s for reading in readings.values()), default=0.0)
        if stale_s > 0:
            text = f"NVML does not answer; its latest word is {stale_s:.1f} s old"
            raise ScanFailed(Reason(cause=Cause.DRIVER, text=text))
        if changes == self._changes:
            self._fresh.update(dict.fromkeys(readings, now))
        return self._keep(readings, utilization=utilization)

    def recent(self, uuids: Collection[DeviceId]) -> dict[DeviceId, DeviceReading] | None:
        """Return what was read moments ago, with nothing done since; None: not all of it was."""
        now = time.monotonic()
        if all(now - self._fresh.get(uuid, -RECENT_S) < RECENT_S for uuid in uuids):
            return {uuid: self.readings[uuid] for uuid in uuids}
        return None

    def _keep(
        self, readings: dict[DeviceId, DeviceReading], *, utilization: bool
    ) -> dict[DeviceId, DeviceReading]:
        self.readings.update(readings)
        if utilization:
            self.utilization.update((uuid, r.utilization_pct) for uuid, r in readings.items())
        return readings

    async def look_at(self, process: ProcessId) -> FoundRank | None:
        """Return one process as NVML sees it on any group, or None. Raises `ScanFailed`."""
        found = await self.look(self._devices_of)
        return next((f for f in found if f.process == process), None)

    def groups_of(self, devices: Collection[DeviceId]) -> list[GroupName]:
        """Return the groups that devices belong to."""
        return [g for g, of in self._devices_of.items() if not set(of).isdisjoint(devices)]

    def _devices_on(self, groups: Iterable[GroupName]) -> list[DeviceId]:
        """Return this host's devices of groups, some of which may have none here."""
        return [device for group in groups for device in self._devices_of.get(group, ())]

    async def _hidden_on(
        self, tenancy: TenancyKey, listed: Collection[ProcessId]
    ) -> tuple[FoundRank, ...]:
        """Return the ranks that registered and that NVML would not list."""
        devices = frozenset(self._devices_on(tenancy.groups))
        if not devices:
            return ()
        unlisted = [
            process
            for process, (job, groups) in self._registered.items()
            if job == tenancy.job
            and process not in listed
            and not groups.isdisjoint(tenancy.groups)
        ]
        return tuple(
            [
                _make_found(
                    process=process,
                    job=tenancy.job,
                    devices=devices,
                    device_bytes=0,
                    uid=tenancy.job.uid,
                )
                for process in unlisted
                if await self._backend.is_hidden(process)
            ]
        )


def _untold(rank: RankId, why: str) -> ScanFailed:
    text = f"whether it is parked cannot be told: {why}"
    return ScanFailed(Reason(cause=Cause.DRIVER, text=text, rank=rank))


def _listed(reading: DeviceReading) -> int:
    return sum(process.used_bytes or 0 for process in reading.processes)
