"""Hosts that know each other, by their configuration alone or on a network of their own.

A `NetHost` is a host as far as one machine can have several: a network namespace, a boot id,
devices, a daemon, and ranks, all of which end when it loses its power.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from harness import LIMIT_S, Host, Pending, Rank, Settings, close_all, groups_in, until
from namespaces import Network, skip_without_namespaces

#: Short, but not so short that a busy machine is taken for a dead one.
TIMES = {
    "heartbeat_s": 0.2,
    "suspect_s": 1.5,
    "lost_s": 4.0,
    "greeting_timeout_s": 4.0,
    "reconnect_min_s": 0.05,
    "reconnect_max_s": 0.5,
}
#: Of hosts on a network of their own. One that is lost by mistake only makes a test take longer.
NET_TIMES = {**TIMES, "suspect_s": 0.8, "lost_s": 2.0}
LIMITS = {"retry_min_s": 0.05, "retry_max_s": 0.2, "freeze_timeout_s": 1.0, "alone_s": 1.5}

#: The driver's call of each step of a move, and what it is called here.
STEPS = {"lock": "freeze", "checkpoint": "snapshot", "restore": "restore", "unlock": "thaw"}

#: Runs the rest of the command line where the system's boot id is what stands in a file.
_WITH_BOOT_ID = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


class Cluster:
    """Where the hosts of a test are, and what they know each other by."""

    def __init__(
        self, directory: Path, auth: str, *names: str, addresses: Mapping[str, str] | None = None
    ) -> None:
        self.auth = auth
        self.directory = directory / "keys"
        self.names = names
        if addresses is None:
            self.ports = dict(zip(names, free_ports(len(names)), strict=True))
            addresses = {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}
        self.hosts = [f"{name}={addresses[name]}" for name in names]
        if auth in ("tls", "psk"):
            self.init(self.directory)

    def init(self, directory: Path) -> None:
        """Makes keys, as an operator does."""
        arguments = ["--hosts", ",".join(self.names), "--dir", str(directory), "--auth", self.auth]
        ctl("cluster", "init", *arguments)

    def settings(self, name: str, *, keys: Path | None = None, **peers: object) -> Settings:
        """Returns the configuration of a host."""
        place = (keys or self.directory) / name / "peers"
        files = {
            "ca_file": "ca.crt",
            "cert_file": "host.crt",
            "key_file": "host.key",
            "secret_file": "secret",
        }
        return {
            "daemon": {"host": name},
            "peers": {
                "auth": self.auth,
                "hosts": self.hosts,
                **{key: str(place / file) for key, file in files.items()},
                **TIMES,
                **peers,
            },
        }


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that nobody has now."""
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in found]
    for sock in found:
        sock.close()
    return ports


def ctl(*arguments: str, status: int = 0, **environment: str) -> str:
    """Runs tslicectl, which must end with a status, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tsliced.ctl", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def at(host: Host, *arguments: str, status: int = 0) -> str:
    """Runs tslicectl as `ctl` does, on a host."""
    return ctl(*arguments, status=status, TSLICE_SOCKET=str(host.socket))


def peer(host: Host, name: str) -> dict[str, Any]:
    """Returns where another host stands for this one."""
    found: dict[str, Any] = next(p for p in host.status()["peers"] if p["host"] == name)
    return found


def wait_for(host: Host, name: str, state: str) -> dict[str, Any]:
    """Waits until another host is in a state, and returns where it stands."""
    until(lambda: peer(host, name)["state"] == state, f"{name} is {state}")
    return peer(host, name)


class NetHost(Host):
    """A host with a network of its own; without groups in its settings each host is one."""

    has_default_groups = False

    def __init__(
        self,
        softcuda: Path,
        network: Network,
        settings: Settings,
        *,
        disk: str | None = None,
    ) -> None:
        """`disk`: size of a file system of its own for the daemon's state, as mount(8) has it."""
        self.network = network
        self._disk = disk
        super().__init__(softcuda, settings=settings)

    def _prepare(self) -> None:
        boot_id = self.directory / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        inside = self.network.inside(self.name)
        self.launcher = (*inside, "sh", "-c", _WITH_BOOT_ID, str(boot_id))
        if self._disk is not None and not self.state.is_mount():
            self.state.mkdir(mode=0o700)
            options = f"size={self._disk},mode=700"
            command = ["mount", "-t", "tmpfs", "-o", options, "none", str(self.state)]
            subprocess.run(command, check=True, timeout=LIMIT_S)

    @property
    def state(self) -> Path:
        """The directory of the daemon's state."""
        return self.directory / "state"

    def rank(
        self,
        job: str = "",
        *,
        program: str = "rank.py",
        arguments: Sequence[str] = (),
        told: bool = False,
        within: Sequence[str] = (),
        **environment: str,
    ) -> Rank:
        """Starts a rank as `Host.rank` does, in the host's network."""
        return super().rank(
            job,
            program=program,
            arguments=arguments,
            told=told,
            within=(*self.network.inside(self.name), *within),
            **environment,
        )

    def group_names(self) -> list[str]:
        return groups_in(self.settings) or sorted(self.network.addresses)

    def lose_power(self) -> None:
        """Ends everything, and nobody elsewhere hears of it."""
        self.network.isolate(self.name)
        self.kill_daemon()
        self.close_ranks()
        until(lambda: not self._kill_all(), "all processes end")
        self.socket.unlink()

    def _kill_all(self) -> list[int]:
        pids = self.network.pids(self.name)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def boot(self) -> None:
        """Starts anew after a loss of power, with another boot id and empty devices."""
        self._prepare()
        shutil.rmtree(self.directory / "devices")
        self._make_devices()
        self.network.rejoin(self.name)
        self.start_daemon()

    def discard(self) -> None:
        super().discard()
        if self.state.is_mount():
            subprocess.run(["umount", "--lazy", str(self.state)], check=True, timeout=LIMIT_S)
            shutil.rmtree(self.directory)


class Hosts:
    """Hosts on one network that are linked, and what holds over all of them."""

    def __init__(
        self,
        softcuda: Path,
        directory: Path,
        *names: str,
        auth: str = "psk",
        settings: Settings | None = None,
        special: Mapping[str, Settings] | None = None,
        disks: Mapping[str, str] | None = None,
    ) -> None:
        """`special`: settings of single hosts; `disks`: see `NetHost`. By the names of hosts."""
        self.network = Network(*names)
        self.all: list[NetHost] = []
        try:
            cluster = Cluster(directory, auth, *names, addresses=self.network.addresses)
            for name in names:
                known = cluster.settings(name)
                sections = {key: dict(values) for key, values in known.items()}
                own = {"peers": NET_TIMES, "limits": LIMITS}
                given = [settings or {}, (special or {}).get(name, {})]
                for section, values in chain(own.items(), *(some.items() for some in given)):
                    sections[section] = {**sections.get(section, {}), **values}
                disk = (disks or {}).get(name)
                self.all.append(NetHost(softcuda, self.network, sections, disk=disk))
            for host in self.all:
                host.launch_daemon()
            for host in self.all:
                until(host.serves, f"the daemon of {host.name} serves")
            self.await_links()
        except BaseException:
            self.discard()
            raise

    def __getitem__(self, name: str) -> NetHost:
        return next(host for host in self.all if host.name == name)

    def others(self, name: str) -> list[NetHost]:
        """Returns all but one."""
        return [host for host in self.all if host.name != name]

    def await_links(self) -> None:
        """Waits until all see each other."""
        for host in self.all:
            for other in self.others(host.name):
                wait_for(host, other.name, "connected")

    def states(self) -> dict[int, str]:
        """Returns the states of all ranks that their own daemons know, by pid."""
        return {pid: state for host in self.all for pid, state in host.states().items()}

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the histories of all, one after the other."""
        return [event for host in self.all for event in host.events(*kinds)]

    def rest(self) -> None:
        """Ends all ranks, mends everything, and waits until no host knows of anybody."""
        for host in self.all:
            host.close_ranks()
            host.fault()
        self.network.heal()
        for host in self.all:
            if host.daemon is None:
                host.start_daemon()
        self.await_links()
        for host in self.all:
            until(partial(_is_empty, host), f"{host.name} is empty")

    def close(self) -> None:
        """Ends everything, and judges what the clients of all hosts saw."""
        try:
            close_all(self.all)
        finally:
            self.network.close()

    def discard(self) -> None:
        """Leaves nothing, whatever went wrong."""
        for host in self.all:
            host.discard()
        self.network.close()


@contextmanager
def linked_hosts(
    softcuda: Path,
    directory: Path,
    *names: str,
    **settings: Any,
) -> Iterator[Hosts]:
    """Yields hosts that are linked, made as `Hosts` are; at the end nothing may be left.

    Skips the test where there can be none.
    """
    skip_without_namespaces()
    hosts = Hosts(softcuda, directory, *names, **settings)
    try:
        yield hosts
    except BaseException:
        hosts.discard()
        raise
    hosts.close()


def kill_in_each_step(
    hosts: Hosts, comes: Gang, leaves: Gang, *, killed: NetHost, slow: NetHost
) -> None:
    """Lets two jobs take turns, and ends a daemon while one host is in each step of such a move."""
    for call, verb in STEPS.items():
        slowed = leaves if call in ("lock", "checkpoint") else comes
        slow.fault(f"{call} {slowed.ranks[slow.name].pid} * delay:300")
        asked = comes.ask()
        until(partial(_is_in, slow, verb), f"{slow.name} is in {verb}")
        killed.kill_daemon()
        killed.start_daemon()
        assert asked.wait()["state"] == "held", f"killed in {verb}"
        slow.fault()
        assert comes.look() == comes.digests, f"killed in {verb}"
        expected = dict.fromkeys(comes.pids, "running") | dict.fromkeys(leaves.pids, "parked")
        assert hosts.states() == expected, f"killed in {verb}"
        comes.release()
        comes, leaves = leaves, comes
    comes.turn()


def _is_in(host: NetHost, verb: str) -> bool:
    """Whether a rank of a host is well within an operation."""
    return verb in host.doing(for_s=0.05)


def _is_empty(host: Host) -> bool:
    status = host.status()
    busy = [
        g for g in status["groups"] if g["holder"] or g["next"] or g["waiters"] or g["resident"]
    ]
    return not busy and not status["jobs"] and not host.states()


def _knows(host: Host, rank: Rank) -> bool:
    return rank.pid in host.states()


class Gang:
    """A job with a rank on each of some hosts, and a driver that has no device."""

    def __init__(
        self,
        job: str,
        driver: Host,
        hosts: Iterable[Host],
        *,
        group: str | Sequence[str],
        device: int = 0,
    ) -> None:
        self.job = job
        self.group = group
        self.driver = driver.rank(job)
        self._places = [(host, host.rank(job)) for host in hosts]
        self.ranks = {host.name: rank for host, rank in self._places}
        self._device = device
        self.digests: dict[str, str] = {}

    @property
    def pids(self) -> set[int]:
        return {rank.pid for rank in self.ranks.values()}

    def load(self, *, mib: int = 8) -> Gang:
        """Makes device state on all hosts, in a turn."""
        self.acquire()
        seed = sum(self.job.encode())
        making = [rank.start("context", device=self._device) for rank in self.ranks.values()]
        making += [
            rank.start("fill", mib=mib, seed=seed + number)
            for number, rank in enumerate(self.ranks.values())
        ]
        for pending in making:
            pending.wait()
        self.digests = self.look()
        self.release()
        for host, rank in self._places:
            until(partial(_knows, host, rank), f"{host.name} knows its rank")
        return self

    def ask(self) -> Pending:
        """Has the driver begin to wait for a lease."""
        return self.driver.start("acquire", groups=self.group, timeout=60)

    def acquire(self) -> dict[str, Any]:
        """Has the driver wait for a lease."""
        lease: dict[str, Any] = self.ask().wait()
        return lease

    def release(self) -> None:
        """Has the driver give its lease back."""
        self.driver.do("release")

    def look(self) -> dict[str, str]:
        """Returns what is on the devices, by host."""
        looking = {name: rank.start("digest") for name, rank in self.ranks.items()}
        return {name: pending.wait() for name, pending in looking.items()}

    def turn(self) -> dict[str, Any]:
        """Takes a turn, in which everything must be as it was made."""
        lease = self.acquire()
        assert self.look() == self.digests
        self.release()
        return lease
