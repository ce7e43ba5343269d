"""The daemon that is measured, on softcuda's devices, and the place where all of a run lies."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from bench.load import LIMIT_S, measure_pairs
from bench.machine import Cores
from bench.rank import Rank
from bench.server import ROOT, Server
from libtimeslice.connection import Connection

SOFTCUDA = ROOT / "build" / "softcuda"
#: As many as softcuda has; one group for each.
DEVICES = 16
#: Enough for a context: nothing is computed here.
_DEVICE_MIB = 4


#: What a bench of one client leases, and the job that it does it for.
GROUP = "g0"
JOB = "bench"


#: Tables of a configuration, by name.
Tables: TypeAlias = Mapping[str, Mapping[str, object]]


class NotBuiltError(Exception):
    """Something that make builds is missing."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Directories and cores of a run."""

    #: Sockets, logs and softcuda's devices. Short, for the kernel limits paths of sockets.
    directory: Path
    #: The daemons' state: on a real file system, because that is where it is in production.
    state: Path
    cores: Cores

    @property
    def softcuda(self) -> Mapping[str, str]:
        """The environment of every process that uses the devices."""
        return {
            "SOFTCUDA_DIR": str(self.directory / "softcuda"),
            "SOFTCUDA_DEVICES": str(DEVICES),
            "SOFTCUDA_MEM_MIB": str(_DEVICE_MIB),
        }


def group_names() -> list[str]:
    """Returns the names of the groups; each has the device of its number."""
    return [f"g{number}" for number in range(DEVICES)]


def make_devices(place: Place) -> None:
    """Makes the devices. Raises NotBuiltError."""
    program = SOFTCUDA / "softcuda-init"
    if not program.exists():
        raise NotBuiltError(f"{program} is missing: make softcuda")
    subprocess.run(
        [program],
        env={**os.environ, **place.softcuda},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )


def start_daemon(
    place: Place,
    *,
    name: str = "tsliced",
    backend: str | None = None,
    environment: Mapping[str, str] | None = None,
    settings: Tables | None = None,
) -> Server:
    """Starts a daemon with an empty state and, where a bench allows it, its default values."""
    state = place.state / name
    shutil.rmtree(state, ignore_errors=True)
    config = place.directory / f"{name}.toml"
    path = place.directory / f"{name}.sock"
    config.write_text(config_text(path, state, backend) + toml_text(settings or {}))
    return Server(
        [sys.executable, "-m", "tsliced", "--config", str(config)],
        path=path,
        core=place.cores.server,
        log=place.directory / f"{name}.log",
        environment={**place.softcuda, **(environment or {})},
    )


def config_text(socket: Path, state: Path, backend: str | None) -> str:
    """Returns the configuration: where things are, and a group for each device."""
    users = [getpass.getuser()]
    groups = {
        f"groups.{name}": {"devices": [str(number)], "users": users}
        for number, name in enumerate(group_names())
    }
    return toml_text({"daemon": daemon_table("bench", socket, state, backend), **groups})


def daemon_table(host: str, socket: Path, state: Path, backend: str | None) -> dict[str, object]:
    """Returns what the configuration says of the daemon itself."""
    table: dict[str, object] = {
        "socket": str(socket),
        "state_dir": str(state),
        "host": host,
        "nvml_library": str(SOFTCUDA / "libnvidia-ml.so.1"),
        "cuda_library": str(SOFTCUDA / "libcuda.so.1"),
    }
    if backend is not None:
        table["backend"] = backend
    return table


def toml_text(tables: Tables) -> str:
    """Returns tables of plain values and of lists of them as TOML."""
    lines: list[str] = []
    for name, table in tables.items():
        # A basic string of TOML is written as JSON writes one, and so are booleans and numbers.
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])


def start_rank(place: Place, ordinal: int) -> Rank:
    """Starts a process with a context on a device."""
    return Rank(
        str(SOFTCUDA / "libcuda.so.1"),
        str(ordinal),
        environment={**os.environ, **place.softcuda},
    )


@contextmanager
def resident(place: Place, daemon: Server, *, ordinal: int = 0) -> Iterator[Connection]:
    """Yields a connection of a job whose only rank is on the device of the group of a number."""
    with (
        start_rank(place, ordinal=ordinal) as rank,
        Connection.open(str(daemon.path), role="client", job=JOB) as connection,
    ):
        connection.request({"t": "register", "pid": rank.pid}, LIMIT_S)
        measure_pairs(connection, group_names()[ordinal], 1)
        yield connection
