"""What lives on the simulated devices: processes, and what a driver may do to them."""

from __future__ import annotations

from dataclasses import dataclass

from tsliced.core.model import (
    Cause,
    DeviceId,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    Verb,
)

HOST = HostName("n1")

#: What the simulated driver allows, and where it leads.
MOVES = {
    Verb.FREEZE: (RankState.RUNNING, RankState.FROZEN),
    Verb.SNAPSHOT: (RankState.FROZEN, RankState.PARKED),
    Verb.RESTORE: (RankState.PARKED, RankState.FROZEN),
    Verb.THAW: (RankState.FROZEN, RankState.RUNNING),
}


#: The cause of a failure after which nobody knows the state.
CUT_OFF, UNKNOWN = Cause.STOPPED, RankState.UNKNOWN


def job(name: str, uid: int = 1000) -> JobKey:
    """Return a job's key."""
    return JobKey("", uid, name)


def failure(cause: Cause, process: ProcessId | None = None, host: HostName = HOST) -> Reason:
    """Return a reason with a recognizable text."""
    rank = RankId(host, process) if process is not None else None
    return Reason(cause=cause, text=f"simulated {cause.value}", rank=rank)


@dataclass(slots=True, kw_only=True)
class Process:
    """A simulated process with device state."""

    id: ProcessId
    #: None: nobody can tell whose it is.
    job: JobKey | None
    devices: frozenset[DeviceId]
    state: RankState = RankState.RUNNING
    device_bytes: int = 100
    #: Its job held the groups when it came onto the devices.
    lawful: bool = True
    #: Nobody could tell whose it is when it came.
    came_strange: bool = False
    #: It has been seen on the devices, so that the core can know it.
    seen: bool = False
    #: A snapshot was claimed, but the memory is still there.
    leftover: bool = False
    #: What each snapshot leaves on the devices.
    residue_bytes: int = 0

    @property
    def on(self) -> frozenset[DeviceId]:
        """Devices that hold its memory."""
        return self.devices if self.holds or self.residue_bytes else frozenset()

    @property
    def holds(self) -> bool:
        """Whether its state is on its devices."""
        return self.state.holds_device or self.leftover
