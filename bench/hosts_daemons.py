"""Switches over several daemons, each a host of its own, that are linked over loopback.

They run on the cores of this machine together, so they get in each other's way, as those of real
hosts do not.
"""

from __future__ import annotations

import getpass
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.daemon import Place, daemon_table, toml_text
from bench.load import Client
from bench.rank import Rank
from bench.server import Server
from bench.switching import BACKEND, Turns
from bench.syncs import SyncCounter

GROUP = "g"
JOBS = ("bench-first", "bench-second")
WARM_UP = 10


@dataclass(frozen=True, kw_only=True)
class LinkedSwitches:
    """What was seen of switches over several daemons."""

    #: From the release to the other job's grant.
    switch_ns: list[int]
    #: How long each wait for the disk was, of all daemons from their start.
    sync_ns: list[int]
    #: Waits for the disk while it was switched, of all daemons together.
    syncs: int
    #: Processor time of each daemon for one switch, that of the coordinator first.
    cpu_s: list[float]


def measure_linked(place: Place, hosts: int, switches: int) -> LinkedSwitches:
    """Lets two jobs with a rank on each host take turns on a group over all of them."""
    directory = place.directory / f"linked-{hosts}"
    directory.mkdir()
    counter = SyncCounter(directory)
    with _linked(place, directory, hosts, counter) as daemons, ExitStack() as stack:
        first, second = (_come_up(stack, job, daemons) for job in JOBS)
        # Links come up meanwhile: the first grant waits for them.
        turns = Turns(first, second, GROUP)
        turns.warm_up(WARM_UP)
        syncs_before = len(counter.durations_ns())
        before_s = [daemon.cpu_s() for daemon in daemons]
        switch_ns = turns.take(switches)
        after_s = [daemon.cpu_s() for daemon in daemons]
        sync_ns = counter.durations_ns()
    return LinkedSwitches(
        switch_ns=switch_ns,
        sync_ns=sync_ns,
        syncs=len(sync_ns) - syncs_before,
        cpu_s=[(b - a) / switches for a, b in zip(before_s, after_s, strict=True)],
    )


def _come_up(stack: ExitStack, job: str, daemons: list[Server]) -> Client:
    """Lets a job have a rank on each host; returns its client on the first one."""
    clients = []
    for daemon in daemons:
        rank = stack.enter_context(Rank())
        client = stack.enter_context(closing(Client(daemon.path, job)))
        client.request({"t": "register", "pid": rank.pid})
        clients.append(client)
    return clients[0]


@contextmanager
def _linked(
    place: Place, directory: Path, hosts: int, counter: SyncCounter
) -> Iterator[list[Server]]:
    ports = dict(zip((f"n{number}" for number in range(hosts)), _free_ports(hosts), strict=True))
    with ExitStack() as stack:
        daemons = []
        for number, name in enumerate(ports):
            state = place.state / f"linked-{name}"
            shutil.rmtree(state, ignore_errors=True)
            socket_path, config = directory / f"{name}.sock", directory / f"{name}.toml"
            config.write_text(_config_text(name, ports, socket_path, state))
            server = Server(
                [sys.executable, "-m", "tsliced", "--config", str(config)],
                path=socket_path,
                # Unpinned, they are moved to and fro; the client has one of these cores too.
                core=place.cores.server if number % 2 == 0 else place.cores.client,
                log=directory / f"{name}.log",
                environment={**place.softcuda, **counter.environment},
            )
            daemons.append(stack.enter_context(server))
        yield daemons


def _config_text(name: str, ports: dict[str, int], path: Path, state: Path) -> str:
    """Returns the configuration of a host: one device of the group, and links with all others."""
    return toml_text(
        {
            "daemon": daemon_table(name, path, state, BACKEND),
            "peers": {
                "auth": "none",
                "hosts": [f"{host}=127.0.0.1:{port}" for host, port in ports.items()],
            },
            f"groups.{GROUP}": {
                "devices": [f"{host}:{number}" for number, host in enumerate(ports)],
                "users": [getpass.getuser()],
            },
        }
    )


def _free_ports(count: int) -> list[int]:
    """Returns ports of loopback that nobody has now."""
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in found]
    for sock in found:
        sock.close()
    return ports
