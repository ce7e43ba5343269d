"""Fixtures for the tests of softcuda: its build, and machines with small devices."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from softcuda_harness import Agent, Machine, MakeMachine

REPOSITORY = Path(__file__).resolve().parents[2]
# Contexts cost nothing unless a test is about that.
DEFAULTS = {"SOFTCUDA_MEM_MIB": "64", "SOFTCUDA_CONTEXT_MIB": "0"}


@pytest.fixture(scope="session")
def softcuda_build() -> Path:
    """The directory of the built libraries."""
    command = ["make", "--silent", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    return REPOSITORY / "build" / "softcuda"


@pytest.fixture(scope="session")
def softcuda_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="softcuda-test-", dir="/dev/shm") as root:
        Path(root).chmod(0o755)  # other users reach into it
        yield Path(root)


@pytest.fixture
def make_machine(softcuda_build: Path, softcuda_root: Path) -> Iterator[MakeMachine]:
    """Makes machines with two devices of 64 MiB.

    Filling device memory is what takes time, so tests take turns on the same devices unless they
    ask for `fresh` ones: what a test leaves behind is reclaimed, or softcuda is broken.
    """
    machines: list[Machine] = []

    def make(*, fresh: bool = False, **environment: str) -> Machine:
        directory = softcuda_root / "shared"
        if fresh:
            directory = Path(tempfile.mkdtemp(dir=softcuda_root))
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
        machine = Machine(directory, softcuda_build, {**DEFAULTS, **environment})
        machines.append(machine)
        machine.fault()
        subprocess.run(
            [str(softcuda_build / "softcuda-init")],
            env=machine.variables(),
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
        return machine

    yield make
    for machine in machines:
        machine.close()


@pytest.fixture
def machine(make_machine: MakeMachine) -> Machine:
    return make_machine()


@pytest.fixture
def caller(machine: Machine) -> Agent:
    """A process that makes the checkpoint calls, without cuInit."""
    return machine.agent()
