"""What may keep a process from being moved, as far as its files in /proc show it.

Nobody is asked and nothing is touched. What cannot be seen is UNKNOWN, which is not FINE: an
environment that was written over does not show that a variable was not set, and no file shows
whether a process has managed memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.processes import environment
from tsliced.host.procfs import PROC, read_permitted_file, read_status_field

#: Where MPS listens unless it is told otherwise.
MPS_DIRECTORY: Final = "/tmp/nvidia-mps"
#: Variables by which profilers get into a process.
_INJECTIONS: Final = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
_MPS: Final = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
#: Of these the newer name has the last word.
_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: What NCCL does that keeps the driver from snapshotting one of several ranks: a name, what is
#: wrong, and the settings of which one has to be made.
_NCCL: Final = (
    (
        "nccl_cumem",
        "NCCL shares device memory by handles that no driver snapshots",
        ("NCCL_CUMEM_ENABLE=0",),
    ),
    (
        "nccl_nvls",
        "NCCL uses multicast over NVLink, at which snapshots hang",
        ("NCCL_NVLS_ENABLE=0",),
    ),
    (
        "nccl_p2p",
        "NCCL maps the device memory of other ranks (P2P)",
        ("NCCL_P2P_DISABLE=1", "NCCL_P2P_LEVEL=LOC"),
    ),
    (
        "nccl_shm",
        "NCCL shares host memory that the driver has made (cuMem), at which snapshots hang",
        ("NCCL_CUMEM_HOST_ENABLE=0", "NCCL_SHM_DISABLE=1"),
    ),
)
#: What of a process's environment decides whether it can be moved.
SETTINGS: Final = (
    *sorted({each.partition("=")[0] for _, _, settings in _NCCL for each in settings}),
    "NCCL_GRAPH_REGISTER",
    "NCCL_IB_DISABLE",
    *_ALLOCATOR,
    *_MPS,
    *_INJECTIONS,
)
#: The first driver with an API for it, and the first that moves PyTorch, which uses NVML.
_FIRST_API: Final = (570,)
_FIRST_TORCH: Final = (575, 57, 8)
#: Programs that park themselves when they are asked over HTTP.
_ENGINES: Final = {b"vllm": "vllm", b"sglang": "sglang"}


class Verdict(Enum):
    """What a look at a process showed."""

    FINE = "fine"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked for."""

    #: A stable name.
    what: str
    verdict: Verdict
    text: str
    #: What helps, of a problem.
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """All that was looked for in one process."""

    findings: tuple[Finding, ...]
    #: The backend that would move it without the driver, and what it takes; None: none is known.
    proposal: str | None
    #: What it runs, without its arguments; empty: that cannot be read.
    program: str

    def problems(self) -> list[Finding]:
        """Return what the driver is known not to move."""
        return [each for each in self.findings if each.verdict is Verdict.PROBLEM]

    def advice(self, *, proposes: bool = False) -> str | None:
        """Return the problems with their remedies, and what else would do; None: no problem.

        `proposes`: also without a problem, since the driver cannot move it all the same.
        """
        found = [f"{each.text}: {each.remedy}" for each in self.problems()]
        if self.proposal is not None and (found or proposes):
            found.append(f"or {self.proposal}" if found else self.proposal)
        return "; ".join(found) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What of a host decides whether processes can be moved."""

    #: The driver's version; None: there is none, or it does not say.
    driver: str | None = None
    #: Which devices are partitioned (MIG); None: it does not say.
    partitioned: Mapping[DeviceId, bool | None] = field(default_factory=dict)


_NOTHING_KNOWN: Final = HostFacts()


def examine(
    process: ProcessId,
    *,
    host: HostFacts = _NOTHING_KNOWN,
    devices: Collection[DeviceId] = (),
    proc: str = PROC,
    mps_directory: str = MPS_DIRECTORY,
) -> Preflight:
    """Look at a process that is on `devices`, none of them: whichever.

    It reads files, some of them long: call it in a thread.
    """
    pid = process.pid
    base = f"{proc}/{pid}"
    variables = _variables(pid, proc)
    maps = read_permitted_file(f"{base}/maps")
    words = _command(pid, proc)
    partitioned = [host.partitioned.get(each) for each in devices or host.partitioned]
    findings = (
        _driver(host.driver, maps),
        _mig(partitioned),
        *_nccl(variables, maps),
        _allocator(variables, maps, words),
        _rdma(_open_files(base)),
        _ipc(maps),
        _managed(_open_files(base)),
        _mps(variables, mps_directory),
        _tracer(pid, proc),
        _profiler(variables),
    )
    return Preflight(findings=findings, proposal=_proposal(words, maps), program=_program(words))


def program_of(pid: int, *, proc: str = PROC) -> str:
    """Return what a process runs, without its arguments; empty: that cannot be read."""
    return _program(_command(pid, proc))


def _command(pid: int, proc: str) -> list[bytes]:
    return (read_permitted_file(f"{proc}/{pid}/cmdline") or b"").split(b"\0")


def _variables(pid: int, proc: str) -> Mapping[str, str] | None:
    """Return the environment; None if it cannot be read, or was written over (setproctitle)."""
    found = environment(pid, proc=proc)
    return found if found and "PATH" in found else None


def _open_files(base: str) -> list[str] | None:
    """Return what a process has open; None if that may not be seen."""
    try:
        numbers = os.listdir(f"{base}/fd")
    except OSError:
        return None
    found = []
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"{base}/fd/{number}"))
    return found


def _driver(version: str | None, maps: bytes | None) -> Finding:
    numbers = tuple(int(each) for each in (version or "").split(".") if each.isdigit())
    if not numbers:
        return _unseen("driver", "which driver there is")
    text = f"the driver is {version}"
    if numbers < _FIRST_API:
        text += ", which cannot be asked to snapshot a process"
        remedy = 'take 570 or later, or the backend "cli" for jobs of one process'
    elif numbers < _FIRST_TORCH and (maps is None or b"/libtorch" in maps):
        text += ", which refuses processes that use NVML, as PyTorch does"
        remedy = "take 575.57.08 or later"
        if maps is None:
            return Finding(what="driver", verdict=Verdict.UNKNOWN, text=text, remedy=remedy)
    else:
        return Finding(what="driver", verdict=Verdict.FINE, text=text)
    return Finding(what="driver", verdict=Verdict.PROBLEM, text=text, remedy=remedy)


def _mig(partitioned: list[bool | None]) -> Finding:
    if any(partitioned):
        text = "a device of it is partitioned (MIG), and what runs there is not snapshotted"
        remedy = "turn that off (nvidia-smi -mig 0)"
        return Finding(what="mig", verdict=Verdict.PROBLEM, text=text, remedy=remedy)
    if None in partitioned or not partitioned:
        return _unseen("mig", "whether its devices are partitioned (MIG)")
    return Finding(what="mig", verdict=Verdict.FINE, text="no device of it is partitioned")


def _nccl(variables: Mapping[str, str] | None, maps: bytes | None) -> Iterator[Finding]:
    if maps is not None and b"libnccl" not in maps:
        yield Finding(what="nccl", verdict=Verdict.FINE, text="it does not use NCCL")
        return
    if variables is not None and variables.get("WORLD_SIZE") == "1":
        text = "NCCL has nobody to talk to (WORLD_SIZE=1)"
        yield Finding(what="nccl", verdict=Verdict.FINE, text=text)
        return
    for what, text, settings in _NCCL:
        wanted = " or ".join(settings)
        if maps is None or variables is None:
            unseen = f"whether it uses NCCL, and with {wanted}, cannot be seen"
            yield Finding(what=what, verdict=Verdict.UNKNOWN, text=unseen)
        elif made := [each for each in settings if _is_set(variables, each)]:
            yield Finding(what=what, verdict=Verdict.FINE, text=f"{made[0]} is set")
        else:
            remedy = f"set {wanted} for all processes of the job"
            yield Finding(what=what, verdict=Verdict.PROBLEM, text=text, remedy=remedy)


def _is_set(variables: Mapping[str, str], setting: str) -> bool:
    name, _, value = setting.partition("=")
    return variables.get(name) == value


def _allocator(
    variables: Mapping[str, str] | None, maps: bytes | None, words: list[bytes]
) -> Finding:
    if maps is not None and b"/libtorch" not in maps:
        return Finding(what="torch", verdict=Verdict.FINE, text="it does not use PyTorch")
    if maps is None or variables is None:
        return _unseen("torch", "whether it uses PyTorch, and with which allocator,")
    configured = next((variables[name] for name in _ALLOCATOR if name in variables), "")
    if "expandable_segments:true" not in configured.replace(" ", "").lower():
        text = "PyTorch's allocator has no expandable segments"
        return Finding(what="torch", verdict=Verdict.FINE, text=text)
    text = "PyTorch's allocator has expandable segments"
    if _engine(words) is None:
        return Finding(what="torch", verdict=Verdict.FINE, text=f"{text}, which are moved")
    return Finding(
        what="torch",
        verdict=Verdict.PROBLEM,
        text=f"{text}, with which an engine that sleeps does not come back whole",
        remedy="start the engine without expandable_segments",
    )


def _rdma(files: list[str] | None) -> Finding:
    if files is None:
        return _unseen("rdma", "whether it has device memory registered for RDMA")
    if any(file.startswith("/dev/infiniband/uverbs") for file in files):
        return Finding(
            what="rdma",
            verdict=Verdict.PROBLEM,
            text="it has InfiniBand or RoCE open, and what is registered there is not snapshotted",
            remedy="set NCCL_IB_DISABLE=1, or close communicators in an on_pause function",
        )
    return Finding(what="rdma", verdict=Verdict.FINE, text="no InfiniBand device is open")


def _ipc(maps: bytes | None) -> Finding:
    if maps is not None and b"/cuda.shm." in maps:
        return Finding(
            what="cuda_ipc",
            verdict=Verdict.PROBLEM,
            text="it shares device memory with other processes (CUDA IPC)",
            remedy="let them share over host memory, or take driver 610 with cuda-checkpoint "
            "--launch-job",
        )
    return _unseen("cuda_ipc", "whether it shares device memory with others (CUDA IPC)")


def _managed(files: list[str] | None) -> Finding:
    if files is not None and "/dev/nvidia-uvm" not in files:
        return Finding(what="uvm", verdict=Verdict.FINE, text="it has no managed memory")
    return _unseen("uvm", "whether it has managed memory (cudaMallocManaged)")


def _mps(variables: Mapping[str, str] | None, directory: str) -> Finding:
    remedy = "end MPS on this host (echo quit | nvidia-cuda-mps-control), and start the job anew"
    if variables is not None and (name := next(filter(variables.get, _MPS), None)):
        text = f"it was started for MPS ({name}), whose clients are not snapshotted"
        return Finding(what="mps", verdict=Verdict.PROBLEM, text=text, remedy=remedy)
    if Path(directory, "control").exists():
        text = f"MPS runs on this host ({directory}), and its clients are not snapshotted"
        return Finding(what="mps", verdict=Verdict.PROBLEM, text=text, remedy=remedy)
    if variables is None:
        return _unseen("mps", "whether it was started for MPS")
    return Finding(what="mps", verdict=Verdict.FINE, text="no MPS")


def _tracer(pid: int, proc: str) -> Finding:
    words = read_status_field(pid, "TracerPid", proc=proc)
    if words is None:
        return _unseen("debugger", "whether a debugger is attached")
    if words != ["0"]:
        text = f"process {words[0]} traces it (a debugger?), and its driver cannot answer"
        return Finding(what="debugger", verdict=Verdict.PROBLEM, text=text, remedy="detach it")
    return Finding(what="debugger", verdict=Verdict.FINE, text="no debugger is attached")


def _profiler(variables: Mapping[str, str] | None) -> Finding:
    if variables is None:
        return _unseen("profiler", "whether it was started under a profiler")
    if name := next(filter(variables.get, _INJECTIONS), None):
        text = f"it was started under a profiler ({name})"
        remedy = "start it without one"
        return Finding(what="profiler", verdict=Verdict.PROBLEM, text=text, remedy=remedy)
    return Finding(what="profiler", verdict=Verdict.FINE, text="no profiler")


def _unseen(what: str, text: str) -> Finding:
    return Finding(what=what, verdict=Verdict.UNKNOWN, text=f"{text} cannot be seen")


def _proposal(words: list[bytes], maps: bytes | None) -> str | None:
    if (kind := _engine(words)) is not None:
        return f'let it park itself: the backend "endpoint", with TSLICE_ENDPOINT={kind}+http://...'
    if maps is not None and b"/libtorch" in maps:
        return 'let it move its own tensors: the backend "torch", with ts.torch.manage(...)'
    return None


def _engine(words: list[bytes]) -> str | None:
    line = b" ".join(words).lower()
    return next((kind for mark, kind in _ENGINES.items() if mark in line), None)


def _program(words: list[bytes]) -> str:
    """Return what a command line runs: the interpreter and its script or module, or the program."""
    names = [os.fsdecode(word) for word in words if word]
    if not names:
        return ""
    first, *rest = names
    if not os.path.basename(first).startswith("python"):
        return first
    if "-m" in rest[:-1]:
        return f"python -m {rest[rest.index('-m') + 1]}"
    return f"python {next((word for word in rest if not word.startswith('-')), '')}".rstrip()
