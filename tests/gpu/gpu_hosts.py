"""Hosts for scenarios that run on softcuda and on an NVIDIA device alike."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from typing import NamedTuple

from findings import Findings
from harness import Host, Settings, build_softcuda

#: State of a rank. Two do not fit on softcuda's device together. On a real one they do, and one is
#: moved nevertheless: a group has one holder.
SOFT_STATE_MIB, REAL_STATE_MIB = 40, 2048

#: What stays of a process of torch: its context, libraries' handles, NCCL's buffers.
RESIDUE = "2 GiB"

_PROBE = """
import pynvml
pynvml.nvmlInit()
version = pynvml.nvmlSystemGetDriverVersion()
assert int(version.split(".")[0]) >= 570, f"driver 570 or later, and not {version}"
for number in range(pynvml.nvmlDeviceGetCount()):
    device = pynvml.nvmlDeviceGetHandleByIndex(number)
    if not pynvml.nvmlDeviceGetComputeRunningProcesses(device):
        name = pynvml.nvmlDeviceGetName(device)
        print(pynvml.nvmlDeviceGetUUID(device), number, f"{name}, driver {version}", sep="|")
        break
else:
    raise AssertionError("a device that nobody uses")
"""


class NoDeviceError(Exception):
    """There is no NVIDIA device for these tests; the text says what is needed."""


class Device(NamedTuple):
    """A device that nobody uses."""

    name: str
    #: NVML's.
    number: int
    description: str


@cache
def nvidia() -> Device:
    """Returns a real one. Raises NoDeviceError."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("SOFTCUDA_")}
    found = subprocess.run(
        [sys.executable, "-c", _PROBE], env=plain, capture_output=True, text=True, timeout=90
    )
    if found.returncode:
        raise NoDeviceError(found.stderr.strip().splitlines()[-1])
    uuid, number, description = found.stdout.strip().split("|")
    return Device(uuid, int(number), description)


class NvidiaHost(Host):
    """A host whose daemon has one real device."""

    def _prepare(self) -> None:
        self.libraries = {}
        self._environment = {
            "TSLICE_SOCKET": self._environment["TSLICE_SOCKET"],
            "CUDA_VISIBLE_DEVICES": nvidia().name,
        }

    def _make_devices(self) -> None:
        """There they are."""


class Lab:
    """A host on softcuda or on a real device, and what is found on it."""

    def __init__(self, hardware: str, backend: str | list[str], **memory: object) -> None:
        self.is_real = hardware == "nvidia"
        device = nvidia() if self.is_real else Device("0", 0, "softcuda")
        self.findings = Findings(device.description)
        self._number = device.number
        self.state_mib = REAL_STATE_MIB if self.is_real else SOFT_STATE_MIB
        margins = {"snapshot_margin_bytes": "512 MiB", "host_margin_bytes": "1 GiB"}
        settings: Settings = {
            "daemon": {"backend": backend},
            "memory": {**(margins if self.is_real else {}), **memory},
            "groups.g1": {"devices": [device.name]},
        }
        kind = NvidiaHost if self.is_real else Host
        self.host = kind(build_softcuda(), settings=settings)

    def used_bytes(self) -> int:
        """Returns what NVML says is in use on the device."""
        return self.host.used_bytes(self._number)

    def settled_bytes(self, most: int) -> int:
        """Returns what is in use when it is no more than that, or what is after 5 s: NVML lags."""
        end = time.monotonic() + 5
        while (used := self.used_bytes()) > most and time.monotonic() < end:
            time.sleep(0.1)
        return used
