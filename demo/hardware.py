"""Chooses what the demo runs on: the NVIDIA devices of this machine, or softcuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOFTCUDA = ROOT / "build" / "softcuda"

#: The first driver whose checkpoint API the daemon uses.
LEAST_DRIVER = 570
#: The host's name in the daemon's configuration.
HOST = "demo"
DEVICES = 2
SOFT_DEVICE_MIB = 512
#: More than half of a device: two jobs do not fit side by side.
SOFT_STATE_MIB = 300
#: As fast as it takes a driver to move the state of a large model, in proportion to the phases.
SOFT_THROTTLE_MBPS = 1500
#: On a real device each rank has so much state, far from all that fits.
REAL_STATE_MIB = 2048


class NoHardwareError(Exception):
    """What was asked for is not there; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices of a run."""

    #: For the reader of the report, one line.
    description: str
    #: Devices as the daemon's configuration names them.
    devices: tuple[str, ...]
    state_mib: int
    #: More variables for the daemon and the jobs.
    environment: dict[str, str] = field(default_factory=dict)
    nvml_library: Path | None = None
    cuda_library: Path | None = None
    #: Removed when the run is over.
    directory: Path | None = None

    @property
    def is_real(self) -> bool:
        """Whether these are NVIDIA's devices."""
        return self.cuda_library is None


def choose(wanted: str, directory: Path) -> Hardware:
    """Returns the hardware for ``wanted``: ``nvidia``, ``softcuda``, or ``auto`` for what there is.

    ``directory`` is where softcuda keeps its device memory if it does not fit in memory; whoever
    calls this removes the directory of the result in the end. Raises NoHardwareError.
    """
    if wanted != "softcuda":
        try:
            return _nvidia()
        except NoHardwareError as error:
            if wanted == "nvidia":
                raise
            reason = str(error)
    else:
        reason = "as asked for"
    if not (SOFTCUDA / "libcuda.so.1").exists():
        raise NoHardwareError(f"softcuda is not built ({SOFTCUDA}): make softcuda")
    return _softcuda(_make_place(directory), reason)


def _nvidia() -> Hardware:
    """Returns up to two devices of this machine on which nothing runs."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoHardwareError("no NVIDIA driver here") from error
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        if int(driver.split(".")[0]) < LEAST_DRIVER:
            raise NoHardwareError(f"driver {driver} is older than {LEAST_DRIVER}")
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        idle = [h for h in handles if not pynvml.nvmlDeviceGetComputeRunningProcesses(h)][:DEVICES]
        if not idle:
            raise NoHardwareError("every NVIDIA device is in use")
        uuids = tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in idle)
        name = pynvml.nvmlDeviceGetName(idle[0])
    except pynvml.NVMLError as error:
        raise NoHardwareError(f"the NVIDIA driver answers with: {error}") from error
    finally:
        pynvml.nvmlShutdown()
    return Hardware(
        description=f"{len(uuids)} x {name}, driver {driver}",
        devices=uuids,
        state_mib=REAL_STATE_MIB,
        environment={"CUDA_VISIBLE_DEVICES": ",".join(uuids)},
    )


def _softcuda(place: Path, reason: str) -> Hardware:
    """Makes two devices in software, with their memory in files in ``place``."""
    environment = {
        "SOFTCUDA_DIR": str(place),
        "SOFTCUDA_DEVICES": str(DEVICES),
        "SOFTCUDA_MEM_MIB": str(SOFT_DEVICE_MIB),
        "SOFTCUDA_THROTTLE_MBPS": str(SOFT_THROTTLE_MBPS),
        "LD_LIBRARY_PATH": _library_path(),
    }
    subprocess.run(
        [SOFTCUDA / "softcuda-init"],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )
    return Hardware(
        description=(
            f"{DEVICES} softcuda devices of {SOFT_DEVICE_MIB} MiB, a stand-in for the driver in "
            f"software ({reason}); snapshot and restore throttled to {SOFT_THROTTLE_MBPS} MB/s"
        ),
        devices=(f"{HOST}:0-{DEVICES - 1}",),
        state_mib=SOFT_STATE_MIB,
        environment=environment,
        nvml_library=SOFTCUDA / "libnvidia-ml.so.1",
        cuda_library=SOFTCUDA / "libcuda.so.1",
        directory=place,
    )


def _make_place(directory: Path) -> Path:
    """Makes a directory for the devices' memory: in memory if they fit, else below ``directory``.

    Containers often have a /dev/shm of 64 MiB; then the page cache of a disk has to do.
    """
    needed = (DEVICES * SOFT_DEVICE_MIB + 64) << 20
    shared = Path("/dev/shm")
    fits = os.access(shared, os.W_OK | os.X_OK) and shutil.disk_usage(shared).free > needed
    parent = shared if fits else directory
    return Path(tempfile.mkdtemp(prefix=f"tsliced-demo-{os.getpid()}-", dir=parent))


def _library_path() -> str:
    before = os.environ.get("LD_LIBRARY_PATH")
    return f"{SOFTCUDA}:{before}" if before else str(SOFTCUDA)
