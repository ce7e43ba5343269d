"""Checks of the machine: memory, processors, clock, and what else runs on it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tsliced.config import MemorySettings
from tsliced.ctl.output import size
from tsliced.doctor.findings import Finding, fault, good, unknown, warning
from tsliced.host.memory import HOST, HostMemory, SnapshotMargin
from tsliced.host.processes import environment
from tsliced.host.procfs import PROC, read_file, read_permitted_file

SYS: Final = "/sys"

#: Of ntp_adjtime(3): the clock is not synchronized.
_TIME_ERROR: Final = 5
#: struct timex takes 208 bytes on 64-bit Linux.
_TIMEX_BYTES: Final = 256
#: What Ray kills beyond, unless its environment says otherwise.
_RAY_THRESHOLD: Final = 0.95


def check_memory(
    memory: HostMemory, settings: MemorySettings, device_bytes: int, ranks: int
) -> list[Finding]:
    """Look whether a job that fills all devices could be parked."""
    margin = SnapshotMargin(
        ratio=settings.snapshot_margin_ratio, bytes=settings.snapshot_margin_bytes
    )
    free = memory.host_available_bytes() - settings.host_margin_bytes
    need = device_bytes + int(device_bytes * margin.ratio) + ranks * margin.bytes
    text = f"{size(max(0, free))} of {size(memory.host_total_bytes())} can be used for parked jobs"
    if free < need:
        text += f"; a job that fills all devices takes {size(need)} while it is parked"
        remedy = "larger jobs are refused: add memory, or have jobs keep less on the devices"
        return [warning("memory", text, remedy)]
    return [good("memory", text)]


def check_cgroups(memory: HostMemory, ranks: Mapping[int, int]) -> list[Finding]:
    """Look whether limits of cgroups leave room for parking; `ranks`: device bytes by pid."""
    if not ranks:
        return [good("cgroups", "no process is on the devices")]
    found = []
    for pid, device_bytes in ranks.items():
        headroom = memory.headroom(pid)
        if headroom.limited_by != HOST and headroom.available_bytes < device_bytes:
            text = (
                f"process {pid} has {size(device_bytes)} on the devices, and its cgroup "
                f"{headroom.limited_by} has room for {size(headroom.available_bytes)}"
            )
            remedy = "it cannot be parked: give the job more memory (sbatch --mem)"
            found.append(warning("cgroups", text, remedy))
    return found or [good("cgroups", f"room to park each of {len(ranks)} processes")]


def check_huge_pages(sys: str = SYS) -> list[Finding]:
    """Look whether the driver gets huge pages for what it saves."""
    path = f"{sys}/kernel/mm/transparent_hugepage/enabled"
    data = read_permitted_file(path)
    if data is None:
        return [unknown("huge pages", f"there is no {path}", "see the kernel's configuration")]
    chosen = data.decode().partition("[")[2].partition("]")[0]
    if chosen == "always":
        return [good("huge pages", "transparent huge pages are always used")]
    text = f"transparent huge pages: {chosen}; snapshots spend their time on faults of small pages"
    return [warning("huge pages", text, f"echo always > {path}")]


def check_numa(places: Mapping[int, str], device_bytes: int, sys: str = SYS) -> list[Finding]:
    """Look whether the memory near each device has room; `places`: PCI addresses by index."""
    nodes = sorted(Path(sys, "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return [good("numa", "one memory node")]
    found = []
    reclaim = read_permitted_file(f"{PROC}/sys/vm/zone_reclaim_mode") or b"0"
    if reclaim.strip() != b"0":
        text = "vm.zone_reclaim_mode is on: the kernel writes caches out rather than use far memory"
        found.append(warning("numa", text, "sysctl vm.zone_reclaim_mode=0"))
    near: dict[str, list[int]] = {}
    for index, place in places.items():
        data = read_permitted_file(f"{sys}/bus/pci/devices/{place}/numa_node")
        near.setdefault((data or b"-1").decode().strip(), []).append(index)
    for node, indices in near.items():
        free = _free_bytes(f"{sys}/devices/system/node/node{node}/meminfo")
        if free is not None and free < device_bytes * len(indices):
            which = ", ".join(map(str, indices))
            text = f"node {node} has {size(free)} free, less than its devices ({which}) hold"
            remedy = "states go to farther memory, at half the speed: spread jobs over the nodes"
            found.append(warning("numa", text, remedy))
    return found or [good("numa", f"{len(nodes)} memory nodes, with room near their devices")]


def _free_bytes(path: str) -> int | None:
    for line in (read_permitted_file(path) or b"").splitlines():
        words = line.split()
        if b"MemFree:" in words:
            return int(words[words.index(b"MemFree:") + 1]) * 1024
    return None


def check_clock(state: int, *, has_peers: bool) -> list[Finding]:
    """Look whether the clock is kept; `state` is what `clock_state` returned."""
    if state != _TIME_ERROR:
        return [good("clock", "it is synchronized")]
    if not has_peers:
        return [good("clock", "it is not synchronized, which one host alone does not need")]
    text = "it is not synchronized: events of several hosts cannot be put in order"
    return [warning("clock", text, "run chronyd or systemd-timesyncd")]


def clock_state() -> int:
    """Return the kernel's word on its clock, as ntp_adjtime(3) does."""
    return int(ctypes.CDLL(None).ntp_adjtime(ctypes.create_string_buffer(_TIMEX_BYTES)))


def check_mps(proc: str = PROC) -> list[Finding]:
    """Look for NVIDIA's Multi-Process Service."""
    # The kernel keeps 15 bytes of a name: that of the control daemon and the server's alike.
    pids = sorted(pid for pid, name in _processes(proc) if name.startswith("nvidia-cuda-mps"))
    if not pids:
        return [good("mps", "MPS does not run")]
    text = f"MPS runs (process {pids[0]}), and the driver cannot snapshot its clients"
    return [fault("mps", text, "end it: echo quit | nvidia-cuda-mps-control")]


def check_ray(settings: MemorySettings, proc: str = PROC) -> list[Finding]:
    """Look whether Ray's memory monitor would kill workers while jobs are parked."""
    raylets = [pid for pid, name in _processes(proc) if name == "raylet"]
    if not raylets:
        return [good("ray", "no raylet runs")]
    for pid in raylets:
        values = environment(pid, proc=proc) or {}
        if values.get("RAY_memory_monitor_refresh_ms") == "0":
            continue
        keeps_free = 1 - _number(values.get("RAY_memory_usage_threshold"), _RAY_THRESHOLD)
        if settings.ray_margin == "never" or keeps_free > settings.ray_margin_ratio + 1e-9:
            text = f"raylet {pid} kills workers when less than {keeps_free:.0%} of memory is free"
            remedy = f'set memory.ray_margin = "auto" and ray_margin_ratio = {keeps_free:.2f}'
            return [warning("ray", text, remedy)]
    return [good("ray", "as much memory stays free as its monitor wants")]


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default


def _processes(proc: str) -> Iterator[tuple[int, str]]:
    """Yield the pid and the short name of each process."""
    for name in os.listdir(proc):
        if name.isdigit():
            comm = read_file(f"{proc}/{name}/comm")
            if comm:
                yield int(name), comm.decode(errors="replace").strip()


def check_tracing(*, is_root: bool, proc: str = PROC) -> list[Finding]:
    """Look whether the kernel lets one process act on another, as the driver does for us."""
    scope = (read_permitted_file(f"{proc}/sys/kernel/yama/ptrace_scope") or b"0").decode().strip()
    if scope == "3":
        text = "kernel.yama.ptrace_scope is 3: nobody may act on another process, not even root"
        return [fault("tracing", text, "set it to 1, which takes a reboot")]
    if scope != "0" and not is_root:
        text = f"kernel.yama.ptrace_scope is {scope}, and the daemon is not root's"
        return [warning("tracing", text, "run it as root, or sysctl kernel.yama.ptrace_scope=0")]
    return [good("tracing", "processes can be acted upon")]


def pids_of(ranks: Iterable[Mapping[str, object]]) -> dict[int, int]:
    """Return the device bytes of ranks by pid, as the daemon lists them."""
    return {int(str(rank["pid"])): int(str(rank["device_bytes"])) for rank in ranks}
