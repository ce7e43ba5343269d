"""Devices that are lost: fallen off the bus, or waiting for a reset.

Rules:

* A group with a lost device is given to nobody: who wants it waits, is told why, and goes on when
  the device is back.
* A job with a rank on a lost device has a fault. If its state is in host memory the fault goes when
  the device is back; a context that was on the device is gone, and the fault goes with its process.
* Groups without the device go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tsliced.core.actions import Note
from tsliced.core.granting import Granting
from tsliced.core.model import Cause, DeviceId, RankState, Reason
from tsliced.core.remedies import out_of_loss
from tsliced.core.tenancies import Tenancies
from tsliced.core.tenancy import Tenancy


@dataclass(slots=True, kw_only=True)
class Losses:
    """What follows from what the regular look at the devices says of lost ones."""

    tenancies: Tenancies
    granting: Granting

    def on_observed(self, lost: Mapping[DeviceId, str], now: float) -> None:
        """Take in which devices are lost now, and why."""
        known = self.granting.lost
        if not lost and not known:
            self._clear_faults()
            return
        for device in known.keys() - lost.keys():
            del known[device]
            self._note("device_back", "warning", device, "it is there again")
        for device, text in lost.items():
            if device not in known:
                known[device] = Reason(
                    cause=Cause.DEVICE_LOST, text=f"device {device} is lost ({text})"
                )
                self._note("device_lost", "error", device, known[device].text)
        for tenancy in self.tenancies.all.values():
            self._set_fault(tenancy, now)
        self._clear_faults()
        if known:
            self.granting.set_all_aside(self.granting.arbiters)
        self.granting.advance_all()

    def _set_fault(self, tenancy: Tenancy, now: float) -> None:
        if tenancy.key.job in self.granting.faults:
            return
        # What a restart has not asked the driver about yet is judged when it has.
        ranks = [r for r in tenancy.participant.ranks.values() if r.state is not RankState.UNKNOWN]
        on_lost = [rank for rank in ranks if not rank.devices.isdisjoint(self.granting.lost)]
        if not on_lost:
            return
        device = min(on_lost[0].devices & self.granting.lost.keys())
        text, rank = (
            self.granting.lost[device].text,
            next((r for r in on_lost if r.state is not RankState.PARKED), None),
        )
        if rank is None:
            text += "; the job's state is in host memory and goes back when the device does"
        else:
            text += "; what the job had on it is gone"
        broken = rank.id if rank is not None else None
        reason = Reason(cause=Cause.DEVICE_LOST, text=text, rank=broken)
        self.granting.set_fault(tenancy.key, reason, now)

    def _clear_faults(self) -> None:
        """Let jobs try again whose state was not on the device that is back."""
        for job, reason in list(self.granting.faults.items()):
            if reason.cause is not Cause.DEVICE_LOST or reason.rank is not None:
                continue
            ranks = self.tenancies.ranks_of_job(job)
            if all(rank.devices.isdisjoint(self.granting.lost) for rank in ranks):
                self.granting.clear_fault(job)

    def _note(self, kind: str, level: str, device: DeviceId, text: str) -> None:
        group = self.tenancies.group_of.get(device)
        keys = self.tenancies.by_group[group] if group is not None else ()
        on_it = [
            str(key.job)
            for key in keys
            if any(device in rank.devices for rank in self.tenancies.ranks_of(key))
        ]
        facts = {
            "device": device,
            "groups": group,
            "jobs": ",".join(on_it),
            "reason": text,
            "way_out": out_of_loss() if level == "error" else "",
        }
        self.granting.out.append(Note(kind=kind, level=level, facts=facts))
