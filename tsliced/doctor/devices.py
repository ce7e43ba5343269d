"""Checks of the devices and of their driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from tsliced.core.model import DeviceId
from tsliced.doctor.findings import Finding, fault, good, unknown, warning
from tsliced.host.devices import Device, DeviceHealth

#: To load a library and to ask for its version, seconds; the driver itself is not initialized.
_LIBRARY_LIMIT_S = 30.0

#: The library is loaded in a process of its own: a broken one may end whoever loads it.
_LIBRARY_PROGRAM = """\
import sys
from cuda_ckpt import CudaCheckpointError, Driver
try:
    print(Driver(sys.argv[1] or None).version)
except CudaCheckpointError as error:
    sys.exit(str(error))
"""

#: What is said of a trouble that no device has.
_UNTROUBLED = {
    "persistence": "persistence mode is on",
    "mig": "no device is partitioned (MIG)",
    "compute mode": "all devices are in the default mode",
}


def check_driver(inventory: Sequence[Device], problems: Sequence[str]) -> list[Finding]:
    """Look at what NVML lists: the driver's version, and devices that it could not describe."""
    found = [fault("driver", text, "see the kernel's log for Xid errors") for text in problems]
    if not inventory:
        return [*found, fault("driver", "there is no device", "see whether nvidia-smi lists any")]
    version = inventory[0].driver_version
    old = [trouble for trouble in inventory[0].troubles() if trouble.name == "driver"]
    found += [
        (fault if trouble.is_fatal else warning)("driver", trouble.text, trouble.remedy)
        for trouble in old
    ]
    if not found:
        found.append(good("driver", f"{version}, {len(inventory)} devices"))
    return found


def check_modes(inventory: Sequence[Device]) -> list[Finding]:
    """Look at persistence mode, partitions and compute mode."""
    if not inventory:
        return []
    found = []
    for name, untroubled in _UNTROUBLED.items():
        # What several devices have is said once.
        having: dict[tuple[str, str, bool], list[int]] = {}
        for device in inventory:
            for trouble in device.troubles():
                if trouble.name == name:
                    key = (trouble.text, trouble.remedy, trouble.is_fatal)
                    having.setdefault(key, []).append(device.index)
        for (text, remedy, is_fatal), indices in having.items():
            found.append(
                (fault if is_fatal else warning)(name, f"device {_text(indices)}: {text}", remedy)
            )
        if not having:
            found.append(good(name, untroubled))
    return found


def check_clocks(
    inventory: Iterable[Device], health: Mapping[DeviceId, DeviceHealth]
) -> list[Finding]:
    """Look for devices that are slowed down."""
    slowed: dict[tuple[str, ...], list[int]] = {}
    silent = 0
    for device in inventory:
        slowed_by = health[device.uuid].slowed_by if device.uuid in health else None
        silent += slowed_by is None
        if slowed_by:
            slowed.setdefault(slowed_by, []).append(device.index)
    if silent and not slowed:
        return [unknown("clocks", f"{silent} devices do not say", "nvidia-smi -q -d PERFORMANCE")]
    remedy = "see to cooling and power (nvidia-smi -q -d PERFORMANCE)"
    found = [
        warning("clocks", f"device {_text(indices)} is slowed down: {', '.join(causes)}", remedy)
        for causes, indices in slowed.items()
    ]
    return found or [good("clocks", "no device is slowed down")]


def check_api(backends: Collection[str], library: str | None) -> list[Finding]:
    """Look whether the driver's library has the calls that the backends make."""
    if "cuda" not in backends:
        needs = f"no checkpoint calls of the driver are needed for {', '.join(backends)}"
        return [good("api", needs)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIBRARY_PROGRAM, library or ""],
            capture_output=True,
            text=True,
            timeout=_LIBRARY_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        text = f"the driver's library did not load within {_LIBRARY_LIMIT_S:g} s"
        return [fault("api", text, "see the kernel's log; the driver may hang")]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        remedy = 'or set daemon.cuda_library; for drivers 550 to 569: daemon.backend = "cli"'
        return [fault("api", lines[-1].removesuffix("."), remedy)]
    version = int(done.stdout)
    return [good("api", f"checkpoint calls of CUDA {version // 1000}.{version % 1000 // 10}")]


def _text(indices: Iterable[int]) -> str:
    return ", ".join(map(str, indices))
