"""What a rank of each backend is, and how the daemon is told of the backend."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from bench.backend_moves import Cycle, Devices, measure_cycles, start_daemon
from bench.backend_rank import BackendRank
from bench.daemon import SOFTCUDA, NotBuiltError
from bench.server import ROOT
from demo.hardware import NoHardwareError, choose

DRIVER_MIB = 512
ENGINE_MIB = 64
#: Of a device in software, beside the state.
_ROOM_MIB = 64
#: What is free is so many times what is moved: there is the copy on the host, and room for others.
_SHARE_OF_MEMORY = 3

CPU_TORCH = "examples.grpo.cpu_backend:CpuTorchBackend"
#: For devices in software, which are small.
_SMALL = {"snapshot_margin_bytes": "1 MiB", "host_margin_bytes": "64 MiB"}
#: For what has a context on a device and leaves it there.
_LEAVING = {"max_residue_bytes": "2 GiB"}

_ENGINE = ROOT / "tests" / "endpoints" / "engine_rank.py"
#: A program for the `command` backend: it moves nothing, and remembers what it was told last.
_PARK = """#!/bin/sh
case $1 in
state) cat "{place}" 2>/dev/null || echo running ;;
*) echo "$1" >"{place}" ;;
esac
"""
_UTILITY = """#!/bin/sh
export LD_LIBRARY_PATH={softcuda} PYTHONPATH={root}
exec {python} -m cuda_ckpt "$@"
"""

StartRank = Callable[[Mapping[str, str]], AbstractContextManager[BackendRank]]


@contextmanager
def devices_of(wanted: str, state_mib: int) -> Iterator[Devices]:
    """Yields an idle NVIDIA device if there is one and it is `auto`, else softcuda's.

    state_mib: how much of a rank's state has to fit, also of one that has it elsewhere.

    Raises NotBuiltError.
    """
    with tempfile.TemporaryDirectory(prefix="tsliced-bench-") as spare:
        if wanted == "auto":
            try:
                real = choose("nvidia", Path(spare))
            except NoHardwareError:
                pass
            else:
                yield Devices(
                    names=real.devices[:1],
                    environment={"CUDA_VISIBLE_DEVICES": real.devices[0]},
                    is_real=True,
                )
                return
        if not (SOFTCUDA / "softcuda-init").exists():
            raise NotBuiltError(f"{SOFTCUDA} is missing: make softcuda")
        # Device memory is a file, and should be none of a disk.
        room = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(spare)
        with tempfile.TemporaryDirectory(prefix="tsliced-bench-", dir=room) as directory:
            environment = {
                "SOFTCUDA_DIR": directory,
                "SOFTCUDA_DEVICES": "1",
                "SOFTCUDA_MEM_MIB": str(state_mib + _ROOM_MIB),
                "LD_LIBRARY_PATH": str(SOFTCUDA),
            }
            subprocess.run(
                [SOFTCUDA / "softcuda-init"],
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=60,
            )
            yield Devices(names=["0"], environment=environment, is_real=False)


def torch_mib(most: int) -> int:
    """Returns how much a rank of torch may have on this machine as it is now, MiB."""
    return min(most, psutil.virtual_memory().available // _SHARE_OF_MEMORY >> 20)


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """All backends on some devices."""

    directory: Path
    devices: Devices
    cycles: int
    driver_mib: int

    def torch(self, mib: int, tensors: int) -> list[Cycle]:
        """Moves so many tensors, of so many MiB together, by their own process."""
        backend = "torch" if self.devices.is_real else CPU_TORCH
        return self._moves(
            backend, partial(self._rank, "torch", mib, tensors), {"memory": self._memory(_LEAVING)}
        )

    def driver(self) -> list[Cycle]:
        """Moves device memory by the driver."""
        return self._moves("cuda", self._driver_rank, {"memory": self._memory()})

    def cli(self) -> list[Cycle]:
        """Moves device memory by the utility, with ours in its place."""
        utility = _UTILITY.format(softcuda=SOFTCUDA, root=ROOT, python=sys.executable)
        program = self._program("cuda-checkpoint", utility)
        settings = {"program": str(program), "calls": "actions"}
        return self._moves(
            "cli", self._driver_rank, {"memory": self._memory(), "backends.cli": settings}
        )

    def command(self) -> list[Cycle]:
        """Has programs run that move nothing."""
        park = str(self._program("park", _PARK.format(place=self.directory / "place")))
        words = {
            "freeze": "frozen",
            "snapshot": "parked",
            "restore": "frozen",
            "thaw": "running",
            "state": "state",
        }
        settings = {verb: [park, word] for verb, word in words.items()}
        return self._moves(
            "command",
            partial(self._rank, "none", 0, 0),
            {"memory": self._memory(), "backends.command": settings},
            copies=False,
        )

    def endpoint(self) -> list[Cycle]:
        """Has an engine park itself, with little to copy."""
        return self._moves(
            "endpoint", self._engine, {"memory": self._memory(_LEAVING)}, copies=False
        )

    def _moves(
        self,
        backend: str,
        start: StartRank,
        settings: Mapping[str, Mapping[str, object]],
        *,
        copies: bool = True,
    ) -> list[Cycle]:
        print(f"measuring {backend} ...", file=sys.stderr, flush=True)
        with start_daemon(self.directory, self.devices, backend, settings) as daemon:
            return measure_cycles(daemon, start, self.cycles, copies=copies)

    def _memory(self, more: Mapping[str, object] | None = None) -> dict[str, object]:
        return {**({} if self.devices.is_real else _SMALL), **(more or {})}

    def _program(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def _rank(
        self, kind: str, mib: int, tensors: int, environment: Mapping[str, str]
    ) -> BackendRank:
        command = ["-m", "bench.backend_rank", kind, str(mib), str(tensors)]
        return BackendRank(command, environment={**environment, **self.devices.environment})

    def _driver_rank(self, environment: Mapping[str, str]) -> BackendRank:
        return self._rank("driver", self.driver_mib, 1, environment)

    def _engine(self, environment: Mapping[str, str]) -> BackendRank:
        """Starts the engine that the tests have, on a port that is free now."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            name = f"vllm+http://127.0.0.1:{sock.getsockname()[1]}"
        variables = {
            "ENGINE": name,
            "ENGINE_FAULTS": str(self.directory / "faults"),
            "TSLICE_ENDPOINT": name,
            "PYTHONPATH": str(ROOT),
        }
        sizes = {"weights": ENGINE_MIB // 2, "cache": ENGINE_MIB // 2}
        return BackendRank(
            [str(_ENGINE)],
            environment={**environment, **self.devices.environment, **variables},
            first=json.dumps({"name": "serve", "arguments": sizes}),
        )
