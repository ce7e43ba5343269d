"""Who else is on a process's devices, or comes back to them: what backends may ask of that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tsliced.core.machine import Machine
from tsliced.core.model import DeviceId, GroupName, JobKey, ProcessId, RankState
from tsliced.core.participant import Participant
from tsliced.core.rank import Rank
from tsliced.host.devices import DeviceReading
from tsliced.host.scan import ScanFailed, Scanner


class Neighbourhood:
    """Looks at the core's ranks and at NVML's readings. It changes nothing."""

    def __init__(self, machine: Machine, scanner: Scanner, *, margin_bytes: int) -> None:
        self._machine = machine
        self._scanner = scanner
        #: As `memory.device_margin_bytes`, which a restore leaves free.
        self._margin_bytes = margin_bytes

    def groups_of(self, process: ProcessId) -> tuple[GroupName, ...]:
        """Return the groups that a process is on; none if it is not known as a rank."""
        if (participant := self._participant_of(process)) is not None:
            return tuple(self._scanner.groups_of(participant.ranks[process].devices))
        return self._scanner.registered_groups(process)

    async def objection(self, process: ProcessId, left: Mapping[DeviceId, int]) -> str | None:
        """Say why a process may not leave so many bytes on its devices while it is parked, if so.

        It is too much in itself, or some other job that is parked on the same device could not come
        back to it. Whoever has no state yet takes what it finds.
        """
        participant, count = self._participant_of(process), sum(left.values())
        allowed = self._machine.config.limits.max_residue_bytes
        if participant is not None:
            allowed = participant.allowed_residue([participant.ranks[process]])
        if count > allowed:
            return (
                f"{count:,} bytes are left on its devices, and no more than {allowed:,} may be "
                "(memory.max_residue_bytes, half of what it had)"
            )
        try:
            readings = await self._scanner.read(list(left))
        except ScanFailed as exc:
            return f"what else is on its devices cannot be told: {exc}"
        for device, reading in readings.items():
            room = self._room(process, reading)
            for job, need in self._returning_to(device, participant):
                if need > room:
                    return (
                        f"{left[device]:,} bytes are left on device {device}, where {job} needs "
                        f"{need:,} to come back and would find {room:,}"
                    )
        return None

    def _participant_of(self, process: ProcessId) -> Participant | None:
        tenancies = self._machine.tenancies
        key = tenancies.home.get(process)
        return tenancies.all[key].participant if key is not None else None

    def _room(self, process: ProcessId, reading: DeviceReading) -> int:
        """Return what is free on a device while `process`, and all that is parked, leave some."""
        stay = {process.pid}
        for tenancy in self._machine.tenancies.all.values():
            stay |= {parked.id.process.pid for parked in _parked(tenancy.participant)}
        leaving = (one.used_bytes or 0 for one in reading.processes if one.pid not in stay)
        return reading.free_bytes + sum(leaving) - self._margin_bytes

    def _returning_to(
        self, device: DeviceId, own: Participant | None
    ) -> Iterator[tuple[JobKey, int]]:
        """Yield what each other job that is parked on a device takes there when it comes back."""
        for key, tenancy in self._machine.tenancies.all.items():
            if tenancy.participant is not own:
                parked = _parked(tenancy.participant)
                needs = (size for rank in parked for on, size in rank.needs() if on == device)
                yield key.job, sum(needs)


def _parked(participant: Participant) -> Iterator[Rank]:
    return (rank for rank in participant.ranks.values() if rank.state is RankState.PARKED)
