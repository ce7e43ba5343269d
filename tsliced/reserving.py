"""Memory by the two ledgers: what the core reserves, and what is promised to whoever runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tsliced.core.actions import (
    FreeMemory,
    ReserveDeviceMemory,
    ReserveHostMemory,
    SettleHostMemory,
)
from tsliced.core.events import Event, HostMemoryPromised, MemoryReserved
from tsliced.core.machine import Machine
from tsliced.core.model import Cause, DeviceId, RankState, Reason, TenancyKey
from tsliced.host.devices import DeviceReading
from tsliced.host.memory import (
    Demand,
    DeviceLedger,
    DramLedger,
    Granted,
    Shortage,
    SnapshotMargin,
)
from tsliced.host.ray import RayMargin
from tsliced.host.scan import ScanFailed, Scanner


@dataclass(slots=True, kw_only=True)
class Ledgers:
    """The host's two ledgers, and the margins by which they go."""

    host: DramLedger
    #: Part of what the host's ledger leaves free.
    ray: RayMargin
    device: DeviceLedger
    margin: SnapshotMargin


class Reserving:
    """Reserves and gives back for the core. All methods belong to the event loop."""

    def __init__(self, machine: Machine, ledgers: Ledgers, scanner: Scanner) -> None:
        self._machine = machine
        self._ledgers = ledgers
        self._scanner = scanner

    def free(self, action: FreeMemory) -> None:
        """Give back what was reserved for a tenancy."""
        if action.host:
            self._ledgers.host.release(action.tenancy)
        if action.device:
            self._ledgers.device.release(action.tenancy)

    def settle(self, action: SettleHostMemory) -> None:
        """Know that what was promised is in use now, by what is parked, or is a promise again."""
        ledger = self._ledgers.host
        if action.parked:
            ledger.settle(action.tenancy)
        else:
            ledger.unsettle(action.tenancy)

    def reserve_host(self, action: ReserveHostMemory) -> Event:
        """Reserve host memory for a snapshot."""
        ledgers = self._ledgers
        demands = [
            Demand(rank.process, ledgers.margin.need_bytes(size)) for rank, size in action.demands
        ]
        failure = _reserve(ledgers.host, action.tenancy, demands)
        return MemoryReserved(op=action.op, failure=failure)

    def reserve_device_at_once(self, action: ReserveDeviceMemory) -> Event | None:
        """Reserve device memory for a restore, if what the scan before it has just read suffices.

        Else it takes a new look: a process may have ended since.
        """
        needs = _needs_of(action)
        if (readings := self._scanner.recent(needs)) is None:
            return None
        answer = self._reserve_device(action, needs, readings)
        return answer if answer.failure is None else None

    async def reserve_device(self, action: ReserveDeviceMemory) -> Event:
        """Reserve device memory for a restore."""
        needs = _needs_of(action)
        try:
            readings = await self._scanner.read(needs)
        except ScanFailed as exc:
            return MemoryReserved(op=action.op, failure=exc.reason)
        return self._reserve_device(action, needs, readings)

    def _reserve_device(
        self,
        action: ReserveDeviceMemory,
        needs: Mapping[DeviceId, int],
        readings: Mapping[DeviceId, DeviceReading],
    ) -> MemoryReserved:
        answer = self._ledgers.device.reserve(action.tenancy, needs, readings)
        failure = None
        if isinstance(answer, Shortage):
            kept = self._who_keeps(answer.where)
            text = f"device memory: {answer}{kept}; ask again when there is room"
            failure = Reason(cause=Cause.NO_DEVICE_MEMORY, text=text)
        return MemoryReserved(op=action.op, failure=failure)

    def _who_keeps(self, where: str) -> str:
        """Say who left memory behind on a device, where that is what is missing."""
        left = [
            f"{size:,} bytes by pid {rank.id.process.pid} of {key.job}"
            for key, tenancy in self._machine.tenancies.all.items()
            for rank in tenancy.participant.ranks.values()
            for uuid, size in rank.residue
            if where == f"device {uuid}"
        ]
        return f"; left behind by snapshots there: {', '.join(left)}" if left else ""

    def promises(self) -> Iterator[Event]:
        """Promise host memory to every tenancy that has grown, so that it can always be parked.

        Whoever cannot be promised any is refused at its next acquire, before anything is touched,
        until it has shrunk or there is memory; who was given up on for it is then tried again.
        """
        ledgers = self._ledgers
        for key, tenancy in self._machine.tenancies.all.items():
            if tenancy.participant.busy or not tenancy.coordinator.stable:
                continue
            ranks = [r for r in tenancy.participant.ranks.values() if r.state is RankState.RUNNING]
            needs = [
                Demand(rank.id.process, ledgers.margin.need_bytes(rank.device_bytes))
                for rank in ranks
            ]
            held = ledgers.host.reserved(key)
            pinned = tenancy.coordinator.pinned
            given_up = pinned is not None and pinned.cause is Cause.NO_HOST_MEMORY
            failure = None
            if given_up or any(held.get(process, 0) < need for process, need in needs):
                failure = _reserve(ledgers.host, key, needs)
            if failure != tenancy.participant.shortage or (given_up and failure is None):
                yield HostMemoryPromised(tenancy=key, failure=failure)


def _needs_of(action: ReserveDeviceMemory) -> dict[DeviceId, int]:
    """Return what is to be reserved, in bytes by device."""
    needs: dict[DeviceId, int] = {}
    for _, by_device in action.demands:
        for device, size in by_device:
            needs[device] = needs.get(device, 0) + size
    return needs


def _reserve(ledger: DramLedger, key: TenancyKey, demands: list[Demand]) -> Reason | None:
    """Reserve host memory; return why it cannot be had, if so."""
    try:
        answer = ledger.reserve(key, demands)
    except OSError as exc:
        text = f"host memory: how much there is cannot be read: {exc}"
        return Reason(cause=Cause.NO_HOST_MEMORY, text=text)
    if isinstance(answer, Granted):
        return None
    text = f"host memory: {answer}; free some there, or raise its limit"
    return Reason(cause=Cause.NO_HOST_MEMORY, text=text)
