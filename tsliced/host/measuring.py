"""What one process has on the devices, for backends that do not take an engine's word for it."""

from __future__ import annotations

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.devices import Devices, DevicesError
from tsliced.host.processes import is_alive


class Measuring:
    """Asks NVML about one process at a time."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    async def bytes_of(self, process: ProcessId) -> dict[DeviceId, int] | None:
        """Return what a process has on each device, empty where it is not listed.

        None: it cannot be told, because a device cannot be read, the reading is old, or the driver
        does not say what each process uses.
        """
        uuids = [device.uuid for device in self._devices.inventory()]
        try:
            readings = await self._devices.observe(uuids)
        except DevicesError:
            return None
        if not readings or not is_alive(process) or any(r.stale_s for r in readings.values()):
            return None
        found: dict[DeviceId, int] = {}
        for uuid, reading in readings.items():
            for listed in reading.processes:
                if listed.pid == process.pid:
                    if listed.used_bytes is None:
                        return None
                    found[uuid] = listed.used_bytes
        return found
