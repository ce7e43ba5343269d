"""Collects the facts about this host and runs all checks on them."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from libtimeslice.environment import find_socket
from libtimeslice.errors import TimeSliceError
from libtimeslice.protocol import Message
from tsliced.config import DEFAULT_PATH, Config, ConfigError, load, user_config, user_defaults
from tsliced.config.settings import DaemonSettings
from tsliced.core.model import DeviceId
from tsliced.ctl.calls import ask, open_daemon
from tsliced.doctor import daemon, devices, host, jobs
from tsliced.doctor.findings import Finding, fault, unknown
from tsliced.host.devices import Device, DeviceHealth, Devices, DevicesError, DevicesUnavailable
from tsliced.host.memory import HostMemory
from tsliced.host.processes import environment


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield all findings. `options`: ``socket``, ``config`` and ``user`` of the command line."""
    try:
        config = _read_config(options)
    except ConfigError as exc:
        yield fault("config", " ".join(str(exc).split()), "tsliced --check-config lists all of it")
        # All the rest can be looked at by the defaults.
        config = Config(daemon=DaemonSettings())
    else:
        yield from daemon.check_config(config)
    answers = _ask_daemon(options, config)
    yield from daemon.check_socket(answers.socket, answers.error, answers.round_trip_s)
    yield from _of_daemon(config, answers)
    seen = asyncio.run(_see(config))
    yield from _of_devices(config, seen)
    yield from _of_host(config, seen, answers)
    yield from _of_jobs(config, seen, answers)


def _read_config(options: argparse.Namespace) -> Config:
    usual = user_config(os.environ) if options.user else DEFAULT_PATH
    defaults = user_defaults(os.environ) if options.user else None
    return load(options.config or usual, optional=options.config is None, defaults=defaults)


# --- the daemon -----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Answers:
    """What the daemon said, if there is one."""

    socket: str
    status: Message | None = None
    ranks: list[Message] = field(default_factory=list)
    round_trip_s: float | None = None
    error: Exception | None = None


def _ask_daemon(options: argparse.Namespace, config: Config) -> _Answers:
    path = options.socket or os.environ.get("TSLICE_SOCKET") or config.daemon.socket
    answers = _Answers(socket=find_socket(path))
    options.socket = answers.socket
    try:
        with open_daemon(options) as connection:
            began_at = time.monotonic()
            answers.status = ask(connection, "status")["status"]
            answers.round_trip_s = time.monotonic() - began_at
            answers.ranks = ask(connection, "ps")["ranks"]
    except TimeSliceError as exc:
        answers.error = exc
    return answers


def _of_daemon(config: Config, answers: _Answers) -> Iterator[Finding]:
    status = answers.status
    if status is not None:
        yield from daemon.check_daemon(status)
        yield from daemon.check_rights(status["pid"])
        yield from daemon.check_sandbox(status["pid"])
        yield from daemon.check_peers(status.get("peers") or ())
        yield from jobs.check_standstills(status)
    yield from daemon.check_journal(Path(config.daemon.state_dir), runs=status is not None)


# --- the devices ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What NVML shows, if it can be asked."""

    inventory: tuple[Device, ...] = ()
    problems: tuple[str, ...] = ()
    health: dict[DeviceId, DeviceHealth] = field(default_factory=dict)
    #: Device bytes of the processes on the devices, by pid.
    processes: dict[int, int] = field(default_factory=dict)
    error: Exception | None = None


async def _see(config: Config) -> _Seen:
    nvml = Devices(config.daemon.nvml_library, timeout_s=config.scan.nvml_timeout_s)
    seen = _Seen()
    try:
        await nvml.start()
    except DevicesUnavailable as exc:
        seen.error = exc
        return seen
    try:
        seen.inventory, seen.problems = nvml.inventory(), nvml.problems()
        seen.health = await nvml.health()
        for reading in (await nvml.observe([device.uuid for device in seen.inventory])).values():
            for process in reading.processes:
                before = seen.processes.get(process.pid, 0)
                seen.processes[process.pid] = before + (process.used_bytes or 0)
    except (DevicesError, TimeoutError) as exc:
        seen.problems = (*seen.problems, str(exc) or "NVML does not answer in time")
    finally:
        await nvml.close()
    return seen


def _of_devices(config: Config, seen: _Seen) -> Iterator[Finding]:
    if seen.error is not None:
        yield fault("driver", str(seen.error), "see whether nvidia-smi works")
    else:
        yield from devices.check_driver(seen.inventory, seen.problems)
        yield from devices.check_modes(seen.inventory)
        yield from devices.check_clocks(seen.inventory, seen.health)
    yield from devices.check_api(config.ways().names(), config.daemon.cuda_library)


# --- the host and its jobs ------------------------------------------------------------------------


def _of_host(config: Config, seen: _Seen, answers: _Answers) -> Iterator[Finding]:
    memory = HostMemory()
    total = sum(device.total_bytes for device in seen.inventory)
    yield from host.check_memory(memory, config.memory, total, len(seen.inventory))
    yield from host.check_cgroups(memory, host.pids_of(answers.ranks) or seen.processes)
    yield from host.check_huge_pages()
    places = {
        device.index: place
        for device in seen.inventory
        if device.uuid in seen.health and (place := seen.health[device.uuid].pci_address)
    }
    largest = max((device.total_bytes for device in seen.inventory), default=0)
    yield from host.check_numa(places, largest)
    has_peers = bool(config.peers.hosts)
    yield from host.check_clock(host.clock_state(), has_peers=has_peers)
    yield from host.check_mps()
    yield from host.check_ray(config.memory)
    yield from host.check_tracing(is_root=not _is_own(config))


def _is_own(config: Config) -> bool:
    """Return whether the daemon is for its own user alone, with no rights beyond."""
    return config.authority.clients == "own" and os.geteuid() != 0


def _of_jobs(config: Config, seen: _Seen, answers: _Answers) -> Iterator[Finding]:
    pids = host.pids_of(answers.ranks) or seen.processes
    try:
        environments = {pid: environment(pid) for pid in pids}
    except OSError as exc:
        yield unknown("nccl", f"processes cannot be looked at: {exc}", "run this as root")
        return
    yield from jobs.check_nccl(environments, config.ways().names())
    yield from jobs.check_torch(environments)
