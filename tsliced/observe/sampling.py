"""How busy the devices are: looks of the scanner, added up to events and totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tsliced.core.model import DeviceId, GroupConfig
from tsliced.host.devices import DeviceReading
from tsliced.host.history import Fact, Write

#: A look stands for the time since the one before it, but for no more than this, in seconds.
LONGEST_LOOK_S = 5.0


@dataclass(slots=True)
class DeviceTotals:
    """What was seen of one device since the daemon started."""

    #: In which kernels ran, and in which it was looked at, in seconds.
    busy_s: float = 0.0
    seen_s: float = 0.0
    used_bytes: int = 0
    #: The same as of the latest event.
    told_busy_s: float = field(default=0.0, repr=False)
    told_seen_s: float = field(default=0.0, repr=False)
    told_used_bytes: int = field(default=-1, repr=False)


class Sampler:
    """Adds up what looks at the devices show, and writes an event for each device now and then."""

    def __init__(self, write: Write, *, interval_s: Callable[[], float]) -> None:
        self.totals: dict[DeviceId, DeviceTotals] = {}
        self._write = write
        self._interval_s = interval_s
        self._looked_at: float | None = None
        self._told_at = float("-inf")

    def add(
        self,
        readings: Mapping[DeviceId, DeviceReading],
        utilization_pct: Mapping[DeviceId, int | None],
        groups: Iterable[GroupConfig],
        now: float,
    ) -> None:
        """Count a look at the devices of all groups; `now` is monotonic seconds."""
        before, self._looked_at = self._looked_at, now
        span_s = min(now - before, LONGEST_LOOK_S) if before is not None else 0.0
        for uuid, reading in readings.items():
            totals = self.totals.setdefault(uuid, DeviceTotals())
            totals.used_bytes = reading.used_bytes
            if (busy_pct := utilization_pct.get(uuid)) is not None:
                totals.seen_s += span_s
                totals.busy_s += span_s * busy_pct / 100
        if now - self._told_at >= self._interval_s():
            self._told_at = now
            self.write(groups)

    def write(self, groups: Iterable[GroupConfig]) -> None:
        """Write an event for each device of which there is anything new to tell."""
        for group in groups:
            for uuid in group.devices:
                totals = self.totals.get(uuid)
                if totals is None:
                    continue
                busy_s = totals.busy_s - totals.told_busy_s
                if busy_s or totals.used_bytes != totals.told_used_bytes:
                    facts: dict[str, Fact] = {
                        "device": uuid,
                        "group": group.name,
                        "busy_s": busy_s,
                        "span_s": totals.seen_s - totals.told_seen_s,
                        "used_bytes": totals.used_bytes,
                    }
                    self._write("busy", "debug", facts)
                totals.told_busy_s, totals.told_seen_s = totals.busy_s, totals.seen_s
                totals.told_used_bytes = totals.used_bytes
