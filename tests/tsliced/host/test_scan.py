"""Who is on the devices: NVML's lists and what is known of processes, put together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Host
from in_process import (
    D1,
    D2,
    G1,
    G2,
    GROUPS,
    LIMIT_S,
    MIB,
    FakeBackend,
    FakeDevices,
    job,
    process_of,
)

import tsliced.host.scan
from tsliced.core.actions import ScanGroups
from tsliced.core.model import (
    GroupConfig,
    GroupName,
    HostName,
    OpId,
    ProcessId,
    RankState,
    TenancyKey,
)
from tsliced.host.backends.base import BackendError
from tsliced.host.devices import DeviceError, Devices
from tsliced.host.membership import Membership
from tsliced.host.scan import ScanFailed, Scanner

BOTH = (G1, G2)


class Place:
    """A scanner over stand-ins."""

    def __init__(self, directory: Path) -> None:
        self.devices = FakeDevices()
        self.membership = Membership("")
        self.backend = FakeBackend(self.devices, directory)
        # The stand-in has the one method that a scanner needs.
        self.scanner = Scanner(GROUPS, self.devices, self.membership, self.backend)  # type: ignore[arg-type]


def scan_of(key: TenancyKey, *gone: ProcessId, residue_bytes: int = 0) -> ScanGroups:
    return ScanGroups(
        op=OpId(1), tenancy=key, expect_gone=frozenset(gone), residue_bytes=residue_bytes
    )


def tell(tmp_path: Path, story: Callable[[Place], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            await story(Place(tmp_path))

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tsliced.host.scan, "GONE_LIMIT_S", 0.2)
    monkeypatch.setattr(tsliced.host.scan, "GONE_POLL_S", 0.005)


def test_a_process_is_found_once_with_all_its_devices_and_bytes(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as rank:
            place.devices.put(rank, 3 * MIB, D1)
            place.devices.put(rank, 4 * MIB, D2)
            (found,) = await place.scanner.look(BOTH)
            assert (found.process, found.job) == (rank, job("a"))
            assert found.devices == {D1, D2}
            assert found.device_bytes == 7 * MIB
            assert (found.uid, found.name) == (os.getuid(), "cat")
            (part,) = await place.scanner.look([G2])
            assert (part.devices, part.device_bytes) == (frozenset({D2}), 4 * MIB)

    tell(tmp_path, story)


def test_a_process_of_no_job_is_a_stranger_and_a_dead_one_is_not_there(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as gone:
            place.devices.put(gone, MIB)
        place.devices.used[D2][os.getpid()] = MIB
        (found,) = await place.scanner.look(BOTH)
        assert found.process.pid == os.getpid()
        assert found.job is None

    tell(tmp_path, story)


def test_bytes_that_the_driver_does_not_tell_count_as_none(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as rank:
            place.devices.used[D1][rank.pid] = None
            (found,) = await place.scanner.look(BOTH)
            assert (found.devices, found.device_bytes) == (frozenset({D1}), 0)

    tell(tmp_path, story)


def test_who_is_to_be_gone_is_waited_for(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as rank:
            place.devices.put(rank, MIB)
            key = TenancyKey(job("a"), (G1,))
            scanning = asyncio.create_task(place.scanner.scan(scan_of(key, rank)))
            await asyncio.sleep(0.03)
            assert not scanning.done()
            place.devices.take(rank)
            assert await scanning == ()

    tell(tmp_path, story)


def test_what_was_read_moments_ago_will_do_unless_something_was_done_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tsliced.host.scan, "RECENT_S", 3600.0)
    key = TenancyKey(job("a"), (G1,))
    recent = replace(scan_of(key), recent=True)

    async def story(place: Place) -> None:
        scanner = place.scanner
        assert await scanner.scan(recent) == (), "nothing was read before"
        with process_of("a") as rank:
            place.devices.put(rank, MIB)
            assert await scanner.scan(recent) == ()
            assert (await scanner.read([D1], recent=True))[D1].used_bytes == 0
            assert len(await scanner.scan(scan_of(key))) == 1, "not everybody takes it"
            place.devices.take(rank)
            scanner.on_change()
            assert await scanner.scan(recent) == ()
            # What is read while something is done is as good as old.
            scanner.on_change()
            reading = asyncio.create_task(scanner.look([G1]))
            await asyncio.sleep(0)
            scanner.on_change()
            await reading
            place.devices.put(rank, MIB)
            assert len(await scanner.scan(recent)) == 1
            place.devices.take(rank)
            monkeypatch.setattr(tsliced.host.scan, "RECENT_S", 0.0)
            assert await scanner.scan(recent) == ()

    tell(tmp_path, story)


def test_who_does_not_go_is_found_in_the_end(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as rank:
            place.devices.put(rank, MIB)
            key = TenancyKey(job("a"), (G1,))
            (found,) = await place.scanner.scan(scan_of(key, rank))
            assert found.device_bytes == MIB

    tell(tmp_path, story)


@pytest.mark.parametrize("stale", [False, True])
def test_devices_that_cannot_be_read_fail_the_scan_with_a_reason(
    tmp_path: Path, stale: bool
) -> None:
    async def story(place: Place) -> None:
        if stale:
            place.devices.stale_s = 1.5
        else:
            place.devices.error = DeviceError(D1, "fell off the bus")
        with pytest.raises(ScanFailed, match=r"1\.5 s old" if stale else "fell off the bus"):
            await place.scanner.look(BOTH)
        assert place.scanner.readings == {}, "nothing of it is shown to anybody"

    tell(tmp_path, story)


def test_processes_that_cannot_be_looked_at_fail_the_scan_and_are_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(place: Place) -> None:
        def fail(_pids: object) -> list[object]:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(place.membership, "classify", fail)
        with pytest.raises(ScanFailed, match="Too many open files"):
            await place.scanner.look(BOTH)

    tell(tmp_path, story)


def test_without_devices_nobody_is_there(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        scanner = Scanner(GROUPS, None, place.membership, place.backend)
        assert await scanner.look(BOTH) == ()

    tell(tmp_path, story)


def test_of_groups_that_other_hosts_have_only_the_devices_here_are_looked_at(
    tmp_path: Path,
) -> None:
    async def story(place: Place) -> None:
        far, unknown = GroupName("far"), GroupName("unknown")
        elsewhere = GroupConfig(name=far, devices=(), order=2, hosts=(HostName("n2"),))
        place.scanner.reconfigure((*GROUPS, elsewhere))
        with process_of("a") as rank:
            place.devices.put(rank, MIB, D1)
            place.membership.register(rank, job("a"))
            place.scanner.register(rank, job("a"), (G1, far))
            over_hosts = TenancyKey(job("a"), (G1, far, unknown))
            assert [f.process for f in await place.scanner.scan(scan_of(over_hosts))] == [rank]
            assert place.scanner.unlisted_on(scan_of(over_hosts)) == ((D1, 0),)
            nothing_here = TenancyKey(job("a"), (far,))
            place.backend.states[rank] = RankState.PARKED
            for seen_by_nvml in (True, False):
                place.backend.seen_by_nvml = seen_by_nvml
                # That the devices fail is no matter of a tenancy that has none of them.
                place.devices.error = DeviceError(D1, "it is gone")
                assert await place.scanner.scan(scan_of(nothing_here)) == ()
                host = HostName("n1")
                assert await place.scanner.forgotten(nothing_here, (), host=host) == ()

    tell(tmp_path, story)


def test_one_process_can_be_looked_at(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as rank, process_of("b") as other:
            place.devices.put(rank, MIB, D2)
            place.devices.put(other, MIB, D2)
            found = await place.scanner.look_at(rank)
            assert found is not None
            assert found.devices == {D2}
            assert await place.scanner.look_at(ProcessId(rank.pid, rank.start_time + 1)) is None
            assert place.scanner.groups_of(found.devices) == [G2]
            assert place.scanner.groups_of(()) == []

    tell(tmp_path, story)


def test_a_backend_that_nvml_does_not_show_goes_by_who_registered(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        place.backend.seen_by_nvml = False
        with process_of("a") as rank, process_of("b") as other:
            place.scanner.register(rank, job("a"), (G1, G2))
            place.scanner.register(other, job("b"), (G1,))
            (found,) = await place.scanner.scan(scan_of(TenancyKey(job("a"), (G2,))))
            assert (found.process, found.devices) == (rank, frozenset({D2}))
            assert await place.scanner.scan(scan_of(TenancyKey(job("b"), (G2,)))) == ()
            place.scanner.forget(rank)
            assert await place.scanner.scan(scan_of(TenancyKey(job("a"), (G2,)))) == ()

    tell(tmp_path, story)


def test_of_each_rank_it_is_said_whether_it_drains_and_none_is_found_twice(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        key = TenancyKey(job("a"), (G1,))
        with process_of("a") as rank, process_of("a") as other:
            for process in (rank, other):
                place.membership.register(process, job("a"))
                place.devices.put(process, MIB, D1)
                place.scanner.register(process, job("a"), (G1,))
            assert place.scanner.registered_groups(rank) == (G1,)
            place.backend.in_process = True
            for seen_by_nvml in (True, False):
                place.backend.seen_by_nvml = seen_by_nvml
                found = await place.scanner.scan(scan_of(key))
                assert [(each.process, each.drains) for each in found] == [
                    (rank, True),
                    (other, True),
                ]
            place.scanner.forget(rank)
            assert place.scanner.registered_groups(rank) == ()

    tell(tmp_path, story)


def test_parked_processes_of_a_job_that_nobody_knows_are_found_by_asking_the_driver(
    tmp_path: Path,
) -> None:
    async def story(place: Place) -> None:
        key = TenancyKey(job("a"), (G1,))
        with process_of("a") as parked, process_of("a") as running, process_of("b") as other:
            for process, name in ((parked, "a"), (running, "a"), (other, "b")):
                place.membership.register(process, job(name))
                place.devices.put(process, MIB, D2)
            place.backend.states = dict.fromkeys((parked, other), RankState.PARKED)
            (found,) = await place.scanner.forgotten(key, (), host=HostName("n1"))
            assert (found.process, found.job, found.state) == (parked, key.job, RankState.PARKED)
            assert found.devices == frozenset({D1}), "it is where its job leases"
            assert await place.scanner.forgotten(key, {parked}, host=HostName("n1")) == ()

    tell(tmp_path, story)


def test_a_process_that_cannot_be_asked_is_not_taken_for_one_without_state(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as rank:
            place.membership.register(rank, job("a"))
            host, key = HostName("n1"), TenancyKey(job("a"), (G1,))
            place.backend.instead["probe"] = BackendError("it is stopped")
            with pytest.raises(ScanFailed, match="it is stopped"):
                await place.scanner.forgotten(key, (), host=host)
            # As where it is known which way it went, and so that there is something to ask for.
            del place.backend.instead["probe"]
            place.devices.put(rank, MIB, D2)
            place.backend.states[rank] = RankState.UNKNOWN
            with pytest.raises(ScanFailed, match="cannot be told"):
                await place.scanner.forgotten(key, (), host=host)
        assert await place.scanner.forgotten(key, (), host=host) == (), "it has ended"

    tell(tmp_path, story)


def test_how_busy_devices_are_is_noted_when_it_is_asked_for(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        place.devices.utilization_pct = 40
        await place.scanner.look(BOTH)
        assert place.scanner.utilization == {}
        await place.scanner.look_around()
        assert place.scanner.utilization == {D1: 40, D2: 40}

    tell(tmp_path, story)


def test_a_lost_device_keeps_nobody_from_looking_at_the_others(tmp_path: Path) -> None:
    async def story(place: Place) -> None:
        with process_of("a") as rank:
            place.devices.put(rank, MIB, D1)
            readings = await place.devices.observe([D1])
            lost = {D2: "GPU is lost"}
            place.devices.error = DeviceError(D2, lost[D2], readings=readings, lost=lost)
            found, gone = await place.scanner.look_around()
            assert [f.process for f in found] == [rank]
            assert gone == lost
            place.devices.error = DeviceError(D2, "Unknown Error", readings=readings)
            with pytest.raises(ScanFailed, match="Unknown Error"):
                await place.scanner.look_around()

    tell(tmp_path, story)


# --- the real NVML


@pytest.fixture
def host(softcuda_build: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Devices and ranks without a daemon; this process is on the same host."""
    host = Host(softcuda_build)
    for name, value in host.variables().items():
        if name.startswith("SOFTCUDA_"):
            monkeypatch.setenv(name, value)
    yield host
    host.close()


def test_with_the_real_nvml_ranks_are_found_and_a_snapshotted_one_is_not(
    host: Host, softcuda_build: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        devices = Devices(str(softcuda_build / "libnvidia-ml.so.1"))
        await devices.start()
        name = GroupName("g")
        group = GroupConfig(
            name=name, devices=tuple(device.uuid for device in devices.inventory()), order=0
        )
        place = Place(tmp_path)
        scanner = Scanner((group,), devices, place.membership, place.backend)
        try:
            (found,) = await scanner.look([name])
            assert found.process.pid == rank.pid
            assert found.job == job("a")
            assert found.devices == {group.devices[1]}
            assert 8 * MIB <= found.device_bytes < 12 * MIB
            assert scanner.readings[group.devices[1]].used_bytes == found.device_bytes
            for operation in ("lock", "checkpoint"):
                caller.do("operate", operation=operation, pid=rank.pid)
            key = TenancyKey(job("a"), (name,))
            assert await scanner.scan(scan_of(key, found.process)) == ()
            assert scanner.readings[group.devices[1]].used_bytes == 0
        finally:
            await devices.close()

    rank, caller = host.rank("a"), host.rank()
    rank.do("context", device=1)
    rank.do("fill", mib=8)
    asyncio.run(asyncio.wait_for(story(), LIMIT_S))
