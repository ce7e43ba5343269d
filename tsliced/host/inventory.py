"""Which devices this host had, on disk: one that is lost when the daemon starts is still its own.

NVML counts such a device and cannot say who it is, so that groups which name it by index could not
be made, and a host whose one device is lost would serve nobody.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

from tsliced.host.devices import Device

FILE_NAME = "devices.json"


def remember(directory: Path, devices: Iterable[Device]) -> None:
    """Write down the devices of a host all of which answer. That it fails harms nobody now."""
    path = directory / FILE_NAME
    temporary = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps([asdict(device) for device in devices]))
        temporary.replace(path)


def recall(directory: Path) -> tuple[Device, ...]:
    """Return the devices that were written down; none if what is there makes no sense."""
    names = {item.name for item in fields(Device)}
    try:
        content = json.loads((directory / FILE_NAME).read_text())
        return tuple(Device(**{k: v for k, v in d.items() if k in names}) for d in content)
    except (OSError, ValueError, TypeError, AttributeError):
        return ()
