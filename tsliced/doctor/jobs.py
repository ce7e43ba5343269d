"""Checks of running jobs: what stands still, and what environments say of NCCL and PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from libtimeslice.environment import nccl_heartbeat_s
from libtimeslice.protocol import Message
from tsliced.ctl.output import duration
from tsliced.doctor.findings import Finding, fault, good, unknown, warning

#: What NCCL must not use: the driver cannot move it.
_NCCL_OFF: Final = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
#: What PyTorch takes where nothing is set, seconds.
_TORCH_HEARTBEAT_S: Final = 480.0
#: Libraries that move device memory themselves, behind the driver's back.
_OTHER_SAVERS: Final = ("torch_memory_saver", "vGPU-NVIDIA", "libnvshare")


def check_nccl(
    environments: Mapping[int, Mapping[str, str] | None], backends: Collection[str]
) -> list[Finding]:
    """Look whether NCCL was told to leave alone what cannot be moved; environments by pid."""
    found = []
    unseen = [pid for pid, values in environments.items() if values is None]
    several = {pid: v for pid, v in environments.items() if v is not None and _is_one_of_several(v)}
    for name in () if {"cuda", "cli"}.isdisjoint(backends) else _NCCL_OFF:
        wrong = [pid for pid, values in several.items() if values.get(name) != "0"]
        if wrong:
            text = f"{name} is not 0 in {_text(wrong)}, which may not be snapshotted"
            found.append(warning("nccl", text, f"export {name}=0 for all processes of the job"))
    if unseen and not found:
        text = f"the environment of {_text(unseen)} cannot be read"
        return [unknown("nccl", text, "run this as root")]
    return found or [good("nccl", _looked_at(several))]


def check_torch(environments: Mapping[int, Mapping[str, str] | None]) -> list[Finding]:
    """Look for watchdogs that end parked jobs, and for libraries that move memory themselves."""
    found = []
    known = {pid: values for pid, values in environments.items() if values is not None}
    soon: dict[float, list[int]] = {}
    for pid, values in known.items():
        if _is_one_of_several(values):
            limit_s = nccl_heartbeat_s(values, default=_TORCH_HEARTBEAT_S)
            if limit_s is not None and limit_s <= _TORCH_HEARTBEAT_S:
                soon.setdefault(limit_s, []).append(pid)
    for limit_s, pids in soon.items():
        text = f"PyTorch ends {_text(pids)} when parked for longer than {duration(limit_s)}"
        remedy = "set TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, and the process group's timeout, to hours"
        found.append(warning("torch", text, remedy))
    for saver in _OTHER_SAVERS:
        if having := [p for p, v in known.items() if saver in v.get("LD_PRELOAD", "")]:
            text = (
                f"{_text(having)} runs with {saver}, which moves memory that the driver moves too"
            )
            found.append(fault("torch", text, "take it out of LD_PRELOAD"))
    return found or [good("torch", _looked_at(known))]


def check_standstills(status: Message) -> list[Finding]:
    """Look for groups and jobs that stand still; the daemon says why and how to leave it."""
    found = [
        fault("groups", f"{group['name']} is {group['state']}", str(group["reason"]))
        for group in status["groups"]
        if group["state"] in ("blocked", "stuck", "lost", "uncertain")
    ]
    found += [
        fault("jobs", f"{job['job']['id']} is {job['state']}", str(job["reason"]))
        for job in status["jobs"]
        if job["state"] == "faulted"
    ]
    found += [
        warning("jobs", f"{job['job']['id']} is {job['state']}", str(job["reason"]))
        for job in status["jobs"]
        if job["state"] != "faulted" and job["reason"]
    ]
    return found or [good("jobs", f"{len(status['jobs'])} known, none stands still")]


def _is_one_of_several(values: Mapping[str, str]) -> bool:
    size = values.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1


def _text(pids: list[int]) -> str:
    first = ", ".join(map(str, pids[:3]))
    return f"process {first}" + (f" and {len(pids) - 3} more" if len(pids) > 3 else "")


def _looked_at(known: Mapping[int, object]) -> str:
    return f"{len(known)} processes looked at" if known else "no process that needs it"
