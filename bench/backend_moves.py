"""One job with state that is taken off a device and brought back, by whichever backend.

Another job, which has nothing, asks for the group each time; what the moves took is what the daemon
says in its events.
"""

from __future__ import annotations

import getpass
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path

from bench.backend_rank import BackendRank, Rates
from bench.daemon import Tables, daemon_table, toml_text
from bench.load import acquire_of
from bench.machine import choose_cores
from bench.server import STATE, Server
from libtimeslice.connection import Connection
from libtimeslice.fields import MAX_EVENTS
from libtimeslice.protocol import Message

GROUP = "g0"
JOB = "bench-state"
#: A move of all that is measured, on a machine that is busy.
LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What the daemon says of a snapshot or a restore."""

    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes/s."""
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """A way out and back."""

    out: Operation
    back: Operation
    #: Of the operations around them.
    freeze_s: float
    thaw_s: float
    #: Of plain copies at that time; None: nothing of ours is copied.
    copy: Rates | None
    #: Pages that were made for the rank meanwhile.
    faults: int

    @property
    def out_ratio(self) -> float:
        """How fast the way out was, to the copy."""
        assert self.copy is not None
        return self.out.gb_per_s / self.copy.out

    @property
    def back_ratio(self) -> float:
        """How fast the way back was, to the copy."""
        assert self.copy is not None
        return self.back.gb_per_s / self.copy.back


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What a daemon has devices from."""

    #: In the terms of the configuration.
    names: Sequence[str]
    environment: Mapping[str, str]
    is_real: bool


def start_daemon(
    directory: Path, devices: Devices, backend: str, settings: Mapping[str, Mapping[str, object]]
) -> Server:
    """Starts a daemon with one group, an empty state and a backend."""
    state = STATE / "backends"
    shutil.rmtree(state, ignore_errors=True)
    socket = directory / "tsliced.sock"
    daemon = daemon_table("bench", socket, state, backend)
    if devices.is_real:
        del daemon["nvml_library"], daemon["cuda_library"]
    group = {"devices": list(devices.names), "users": [getpass.getuser()]}
    config = directory / "tsliced.toml"
    # Each move is measured as it is of a kind that is known.
    limits = {"qualify": False}
    tables: Tables = {"daemon": daemon, "limits": limits, f"groups.{GROUP}": group, **settings}
    config.write_text(toml_text(tables))
    return Server(
        [sys.executable, "-m", "tsliced", "--config", str(config)],
        path=socket,
        core=choose_cores().server,
        log=directory / "tsliced.log",
        environment=devices.environment,
    )


def measure_cycles(
    daemon: Server,
    start_rank: Callable[[Mapping[str, str]], AbstractContextManager[BackendRank]],
    cycles: int,
    *,
    copies: bool,
) -> list[Cycle]:
    """Takes a rank off and brings it back, so many times; the first time is the first of all."""
    environment = {**os.environ, "TSLICE_SOCKET": str(daemon.path), "TSLICE_JOB_ID": JOB}
    with (
        closing(Connection.open(str(daemon.path), role="client", job=JOB)) as owner,
        closing(Connection.open(str(daemon.path), role="client", job="bench-other")) as other,
    ):
        lease = _acquire(owner)
        with start_rank(environment) as rank:
            _release(owner, lease)
            return [_cycle(daemon, owner, other, rank, copies=copies) for _ in range(cycles)]


def _cycle(
    daemon: Server, owner: Connection, other: Connection, rank: BackendRank, *, copies: bool
) -> Cycle:
    since = _events(daemon)[1]
    before = rank.faults()
    _release(other, _acquire(other))
    lease = _acquire(owner)
    faults = rank.faults() - before
    copy = rank.copy() if copies else None
    _release(owner, lease)
    events, _ = _events(daemon, since)
    by_verb = {event["verb"]: event for event in events if event["kind"] == "operation"}
    out, back = (
        Operation(bytes=by_verb[verb]["bytes"], seconds=by_verb[verb]["seconds"])
        for verb in ("snapshot", "restore")
    )
    return Cycle(
        out=out,
        back=back,
        freeze_s=by_verb["freeze"]["seconds"],
        thaw_s=by_verb["thaw"]["seconds"],
        copy=copy,
        faults=faults,
    )


def _acquire(connection: Connection) -> str:
    lease = str(connection.request(acquire_of(GROUP), LIMIT_S)["lease"])
    # It is held for longer than the daemon waits for a sign that the grant has come.
    connection.send({"t": "ack", "lease": lease})
    return lease


def _release(connection: Connection, lease: str) -> None:
    connection.request({"t": "release", "lease": lease}, LIMIT_S)


def _events(daemon: Server, since: int = 0) -> tuple[list[Message], int]:
    with closing(Connection.open(str(daemon.path), role="tool")) as connection:
        asked = {"t": "events", "since": since, "follow": False, "limit": MAX_EVENTS}
        answer = connection.request(asked, LIMIT_S)
    return list(answer["events"]), int(answer["next"])
