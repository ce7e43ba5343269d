"""What is seen in a process's files: what the driver cannot move, and what cannot be known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.preflight import HostFacts, Preflight, Verdict, examine
from tsliced.host.processes import identify

PROCESS = ProcessId(7, 1)
G1, G2 = DeviceId("GPU-1"), DeviceId("GPU-2")
HEALTHY = HostFacts(driver="580.95.05", partitioned={G1: False, G2: False})
FINE, PROBLEM, UNKNOWN = Verdict.FINE, Verdict.PROBLEM, Verdict.UNKNOWN


def look(
    tmp_path: Path,
    *,
    variables: str | None = "PATH=/bin",
    maps: str | None = "00-ff r--p 00 00:00 0 /usr/lib/libnccl.so.2",
    files: tuple[str, ...] | None = ("/dev/nvidia-uvm",),
    command: str = "/opt/bin/python3 -u train.py --lr 1",
    tracer: str = "0",
    host: HostFacts = HEALTHY,
    devices: tuple[str, ...] = (),
) -> Preflight:
    """Examine a process whose files say this; None: they cannot be read."""
    base = tmp_path / "7"
    base.mkdir()
    (base / "status").write_text(f"Name:\tpython\nTracerPid:\t{tracer}\n")
    (base / "cmdline").write_text(command.replace(" ", "\0") + "\0")
    if variables is not None:
        (base / "environ").write_text(variables.replace(" ", "\0"))
    if maps is not None:
        (base / "maps").write_text(maps)
    if files is not None:
        (base / "fd").mkdir()
        for number, target in enumerate(files):
            os.symlink(target, base / "fd" / str(number))
    return examine(
        PROCESS,
        host=host,
        devices=[DeviceId(each) for each in devices],
        proc=str(tmp_path),
        mps_directory=str(tmp_path / "mps"),
    )


def verdicts(found: Preflight) -> dict[str, Verdict]:
    return {each.what: each.verdict for each in found.findings}


def test_what_cannot_be_read_is_unknown_and_not_fine(tmp_path: Path) -> None:
    found = look(tmp_path, variables=None, maps=None, files=None, command="", host=HostFacts())
    assert verdicts(found) == {
        "driver": UNKNOWN,
        "mig": UNKNOWN,
        "nccl_cumem": UNKNOWN,
        "nccl_nvls": UNKNOWN,
        "nccl_p2p": UNKNOWN,
        "nccl_shm": UNKNOWN,
        "torch": UNKNOWN,
        "rdma": UNKNOWN,
        "cuda_ipc": UNKNOWN,
        "uvm": UNKNOWN,
        "mps": UNKNOWN,
        "debugger": FINE,
        "profiler": UNKNOWN,
    }
    assert (found.advice(), found.program, found.proposal) == (None, "", None)


def test_an_environment_that_was_written_over_does_not_show_that_nothing_was_set(
    tmp_path: Path,
) -> None:
    found = verdicts(look(tmp_path, variables="ray::worker"))
    assert found["nccl_cumem"] is UNKNOWN
    assert found["mps"] is UNKNOWN


@pytest.mark.parametrize(
    ("how", "what", "remedy"),
    [
        ({}, "nccl_cumem", "NCCL_CUMEM_ENABLE=0"),
        ({"variables": "PATH=/bin NCCL_CUMEM_ENABLE=0"}, "nccl_nvls", "NCCL_NVLS_ENABLE=0"),
        ({}, "nccl_p2p", "NCCL_P2P_DISABLE=1"),
        ({}, "nccl_shm", "NCCL_CUMEM_HOST_ENABLE=0 or NCCL_SHM_DISABLE=1"),
        ({"host": HostFacts(driver="550.54")}, "driver", "570 or later"),
        (
            {"host": HostFacts(driver="570.86.10"), "maps": "/torch/lib/libtorch_cuda.so"},
            "driver",
            "575.57.08",
        ),
        ({"host": HostFacts(partitioned={G1: None, G2: True})}, "mig", "nvidia-smi -mig 0"),
        (
            {
                "variables": "PATH=/bin PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                "maps": "/torch/lib/libtorch.so",
                "command": "vllm serve",
            },
            "torch",
            "without expandable_segments",
        ),
        ({"files": ("/dev/infiniband/uverbs0",)}, "rdma", "NCCL_IB_DISABLE=1"),
        ({"maps": "00-ff rw-s 00 00:00 0 /dev/shm/cuda.shm.0.7.1"}, "cuda_ipc", "610"),
        ({"variables": "PATH=/bin CUDA_MPS_PIPE_DIRECTORY=/p"}, "mps", "end MPS"),
        ({"variables": "PATH=/bin CUDA_INJECTION64_PATH=/p"}, "profiler", "without one"),
        ({"tracer": "9"}, "debugger", "detach"),
    ],
)
def test_a_problem_is_told_with_what_helps(
    tmp_path: Path, how: dict[str, str], what: str, remedy: str
) -> None:
    found = look(tmp_path, **how)  # type: ignore[arg-type]  # each is what its parameter takes
    (problem,) = [each for each in found.problems() if each.what == what]
    assert remedy in problem.remedy
    assert problem.text in (found.advice() or "")


def test_what_can_be_seen_to_be_fine_is(tmp_path: Path) -> None:
    found = look(tmp_path, maps="", files=())
    assert verdicts(found) == {
        "driver": FINE,
        "mig": FINE,
        "nccl": FINE,
        "torch": FINE,
        "rdma": FINE,
        "cuda_ipc": UNKNOWN,
        "uvm": FINE,
        "mps": FINE,
        "debugger": FINE,
        "profiler": FINE,
    }
    assert found.advice() is None


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ("WORLD_SIZE=1", "nccl"),
        ("NCCL_P2P_LEVEL=LOC", "nccl_p2p"),
        ("NCCL_SHM_DISABLE=1", "nccl_shm"),
        ("NCCL_NVLS_ENABLE=0", "nccl_nvls"),
    ],
)
def test_settings_that_keep_nccl_from_it_are_fine(
    tmp_path: Path, variables: str, what: str
) -> None:
    assert verdicts(look(tmp_path, variables=f"PATH=/bin {variables}"))[what] is FINE


@pytest.mark.parametrize(
    ("variables", "verdict"),
    [
        ("PATH=/bin", FINE),
        ("PATH=/bin PYTORCH_ALLOC_CONF=backend:native,expandable_segments:True", FINE),
        ("ray::worker", UNKNOWN),
    ],
)
def test_the_driver_moves_what_allocator_torch_has(
    tmp_path: Path, variables: str, verdict: Verdict
) -> None:
    maps = "/torch/lib/libtorch_cuda.so"
    assert verdicts(look(tmp_path, maps=maps, variables=variables))["torch"] is verdict


@pytest.mark.parametrize(
    ("driver", "maps", "verdict"),
    [
        ("570.86.10", "/usr/lib/libcuda.so", FINE),
        ("570.86.10", None, UNKNOWN),
        ("575.57.08", "/torch/lib/libtorch.so", FINE),
        ("unknown", "", UNKNOWN),
    ],
)
def test_a_driver_is_judged_by_what_the_process_uses(
    tmp_path: Path, driver: str, maps: str | None, verdict: Verdict
) -> None:
    assert verdicts(look(tmp_path, maps=maps, host=HostFacts(driver=driver)))["driver"] is verdict


def test_a_device_that_is_partitioned_is_nothing_to_who_is_on_another_one(tmp_path: Path) -> None:
    host = HostFacts(partitioned={G1: False, G2: True})
    assert verdicts(look(tmp_path, host=host, devices=(G1,)))["mig"] is FINE


def test_an_mps_that_runs_on_the_host_is_everybodys(tmp_path: Path) -> None:
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert verdicts(look(tmp_path))["mps"] is PROBLEM


@pytest.mark.parametrize(
    ("how", "proposal", "program"),
    [
        ({"command": "/usr/bin/python -m vllm.entrypoints.api --x"}, "endpoint", "-m vllm."),
        ({"command": "python3 -m sglang.launch_server"}, "sglang+http", "python -m sglang"),
        ({"maps": "/site-packages/torch/lib/libtorch_cuda.so"}, "manage", "python train.py"),
        ({"command": "/opt/train --lr 1"}, None, "/opt/train"),
        ({"command": "python3 -u"}, None, "python"),
    ],
)
def test_what_could_be_moved_without_the_driver_is_proposed(
    tmp_path: Path, how: dict[str, str], proposal: str | None, program: str
) -> None:
    found = look(tmp_path, **how)  # type: ignore[arg-type]  # as above
    assert found.proposal is None if proposal is None else proposal in (found.proposal or "")
    assert program in found.program


def test_advice_ends_with_what_else_would_do(tmp_path: Path) -> None:
    maps = "libnccl.so.2 /torch/lib/libtorch.so"
    assert "or let it move its own tensors" in (look(tmp_path, maps=maps).advice() or "")


def test_what_else_would_do_is_said_without_a_problem_only_if_the_driver_cannot(
    tmp_path: Path,
) -> None:
    found = look(tmp_path, maps="/torch/lib/libtorch.so")
    assert found.problems() == []
    assert found.advice() is None
    assert (found.advice(proposes=True) or "").startswith("let it move its own tensors")


def test_a_process_that_lives_and_one_that_is_gone_are_looked_at() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identify(process.pid)
        assert identity is not None
        found = examine(identity)
        assert verdicts(found)["rdma"] is FINE
        assert found.program.startswith("python")
        process.kill()
    assert set(verdicts(examine(identity)).values()) <= {UNKNOWN, FINE}
