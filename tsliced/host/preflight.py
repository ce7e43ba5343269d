"""What may keep a process from being moved, as far as its files in /proc show it.

Nobody is asked and nothing is touched. What cannot be seen is UNKNOWN, which is not FINE: an
environment that was written over does not show that a variable was not set, and no file shows
whether a process has managed memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from tsliced.core.model import ProcessId
from tsliced.host.processes import environment
from tsliced.host.procfs import PROC, read_permitted_file, read_status_field

#: Where MPS listens unless it is told otherwise.
MPS_DIRECTORY: Final = "/tmp/nvidia-mps"
#: Variables by which profilers get into a process.
_INJECTIONS: Final = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
_MPS: Final = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
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

    def advice(self) -> str | None:
        """Return the problems with their remedies, and what else would do; None: no problem."""
        found = [f"{each.text}: {each.remedy}" for each in self.problems()]
        if found and self.proposal is not None:
            found.append(f"or {self.proposal}")
        return "; ".join(found) or None


def examine(
    process: ProcessId, *, proc: str = PROC, mps_directory: str = MPS_DIRECTORY
) -> Preflight:
    """Look at a process. It reads files, some of them long: call it in a thread."""
    pid = process.pid
    base = f"{proc}/{pid}"
    variables = _variables(pid, proc)
    maps = read_permitted_file(f"{base}/maps")
    words = (read_permitted_file(f"{base}/cmdline") or b"").split(b"\0")
    findings = (
        *_nccl(variables, maps),
        _rdma(_open_files(base)),
        _ipc(maps),
        _managed(_open_files(base)),
        _mps(variables, mps_directory),
        _tracer(pid, proc),
        _profiler(variables),
    )
    return Preflight(findings=findings, proposal=_proposal(words, maps), program=_program(words))


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


def _nccl(variables: Mapping[str, str] | None, maps: bytes | None) -> Iterator[Finding]:
    if maps is not None and b"libnccl" not in maps:
        yield Finding(what="nccl", verdict=Verdict.FINE, text="it does not use NCCL")
        return
    for name, text in (
        ("NCCL_CUMEM_ENABLE", "NCCL shares device memory by handles that no driver snapshots"),
        ("NCCL_NVLS_ENABLE", "NCCL uses multicast over NVLink, at which snapshots hang"),
    ):
        what = name.lower()
        if maps is None or variables is None:
            unseen = f"whether it uses NCCL, and with {name}=0, cannot be seen"
            yield Finding(what=what, verdict=Verdict.UNKNOWN, text=unseen)
        elif variables.get(name) == "0":
            yield Finding(what=what, verdict=Verdict.FINE, text=f"{name}=0 is set")
        else:
            remedy = f"set {name}=0 for all processes of the job"
            yield Finding(what=what, verdict=Verdict.PROBLEM, text=text, remedy=remedy)


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
    line = b" ".join(words).lower()
    for mark, kind in _ENGINES.items():
        if mark in line:
            return f'let it park itself: the backend "endpoint", with TSLICE_ENDPOINT={kind}+http://...'
    if maps is not None and b"/libtorch" in maps:
        return 'let it move its own tensors: the backend "torch", with ts.torch.manage(...)'
    return None


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
