"""The daemon: puts the parts together, starts them in order, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from libtimeslice import __version__ as VERSION  # noqa: N812 - a constant
from tsliced.config import (
    Config,
    ConfigSource,
    PeerAddress,
    hosts_of,
    known_groups,
    listen_address,
    peer_addresses,
    resolve_groups,
    shared_groups,
    visible_of,
)
from tsliced.core.events import Started
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.model import GroupConfig, HostName, ProcessId
from tsliced.core.recovery import recover
from tsliced.driver import Driver, Surroundings
from tsliced.exporting import exporting, open_for_scrapes
from tsliced.host.allocations import Allocations
from tsliced.host.backends.base import Backend, BackendContext, cannot_measure
from tsliced.host.backends.composite import make_backend
from tsliced.host.descriptors import raise_limit
from tsliced.host.device_access import DeviceAccess
from tsliced.host.devices import Device, Devices, DevicesUnavailable
from tsliced.host.inventory import recall, remember
from tsliced.host.journal import Journal, JournalLimits
from tsliced.host.kinds import Kinds
from tsliced.host.measuring import Measuring
from tsliced.host.membership import Membership
from tsliced.host.memory import DeviceLedger, DramLedger, HostMemory, SnapshotMargin
from tsliced.host.preflight import HostFacts
from tsliced.host.ray import RayMargin
from tsliced.host.scan import Scanner
from tsliced.log import Log
from tsliced.neighbours import Neighbourhood
from tsliced.net.allotment import Allotment
from tsliced.net.authority import Authority
from tsliced.net.commenting import Commenting
from tsliced.net.connection import Connection
from tsliced.net.enrolment import Enrolment
from tsliced.net.histories import Histories
from tsliced.net.listening import Inheritance, inherit, listen
from tsliced.net.operations import Operations
from tsliced.net.peer_auth import load_credentials
from tsliced.net.peer_link import Identity, new_incarnation
from tsliced.net.peer_messages import FEATURES, Hello
from tsliced.net.peers import Peers, listen_for_peers
from tsliced.net.server import Server
from tsliced.net.shares import Shares
from tsliced.observe.details import Details
from tsliced.observe.sampling import Sampler
from tsliced.observe.status import StatusPage, summary
from tsliced.observe.told import Told, ToldLimits
from tsliced.qualifying import Qualifying
from tsliced.reloading import Reloader, ReloadRefused
from tsliced.reserving import Ledgers
from tsliced.sdnotify import Notifier

#: Allocations and generations between two looks of the garbage collector.
GC_THRESHOLDS = (20_000, 20, 20)
#: How often the line of ``systemctl status`` is looked at anew.
STATUS_INTERVAL_S = 1.0
#: How often a start that goes on asks for more time.
START_INTERVAL_S = 10.0


class BrokenStateError(Exception):
    """The state in memory can no longer be trusted; the journal's can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What a daemon stands on."""

    devices: Devices | None
    groups: tuple[GroupConfig, ...]
    journal: Journal
    backend: Backend
    sock: socket.socket
    inheritance: Inheritance
    door: _Door | None
    #: For metrics.
    scrapes: socket.socket | None

    def inventory(self) -> tuple[Device, ...]:
        """Return all devices of this host."""
        return self.devices.inventory() if self.devices is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Door:
    """What links to other hosts are made with."""

    identity: Identity
    addresses: dict[HostName, PeerAddress]
    listener: socket.socket


@dataclass(slots=True, kw_only=True)
class Daemon:
    """One run of the daemon; `run` returns when it was asked to stop."""

    config: Config
    log: Log
    notifier: Notifier
    #: Where the configuration is read again from.
    source: ConfigSource
    #: Called as soon as clients are served.
    on_serving: Callable[[], None] | None = None
    #: What an operator has to know before anything else.
    _problem: str = ""

    async def run(self) -> None:
        """Start everything, serve until SIGTERM or SIGINT, and stop everything."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        hangup = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, hangup.set)
        async with contextlib.AsyncExitStack() as stack:
            # Before the group of tasks: what fails here is no group of errors, and what is opened
            # here is closed after the tasks that use it have ended.
            async with self._taking_time():
                base = await self._open(stack)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            driver, server, reloader = await self._start(stack, tasks, base, stop.set)
            if base.scrapes is not None:
                serving = exporting(self.config.metrics, base.scrapes, driver, server)
                await stack.enter_async_context(serving)
            if base.door is not None and server.peers is not None:
                tasks.create_task(server.peers.run(base.door.listener), name="peers")
            for name, work in (
                ("observe", driver.observe_for_ever(lambda: self.config.scan.interval_s)),
                (
                    "history",
                    driver.flush_history_for_ever(lambda: self.config.history.flush_interval_s),
                ),
                ("ray", driver.around.ledgers.ray.look_for_ever()),
                ("waiters", server.waiting.tell_for_ever()),
                ("advice", server.advising.advise_for_ever()),
                ("watchdog", self._feed_watchdog()),
                ("reload", self._reload_for_ever(reloader, hangup)),
                ("status line", self._show_for_ever(driver)),
            ):
                tasks.create_task(work, name=name)
            # What was made so far stays, and hardly anything that comes has cycles: a collector
            # that looks often only slows answers down.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            await stop.wait()
            self.notifier.send("STOPPING=1")
            server.close()
            if server.peers is not None:
                server.peers.close()
            driver.close()
            driver.note("stopped", "info")
            # What is in flight is not cut off by this: a worker finishes its call by itself.
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        if driver.broken is not None:
            raise BrokenStateError(f"a bug: {driver.broken!r}") from driver.broken

    @contextlib.asynccontextmanager
    async def _taking_time(self) -> AsyncIterator[None]:
        """Ask for more time as long as the start goes on: a driver may take its own to come up."""

        async def ask() -> None:
            while True:
                self.notifier.send(f"EXTEND_TIMEOUT_USEC={round(3e6 * START_INTERVAL_S)}")
                await asyncio.sleep(START_INTERVAL_S)

        asking = asyncio.create_task(ask(), name="start")
        try:
            yield
        finally:
            asking.cancel()

    async def _open(self, stack: contextlib.AsyncExitStack) -> _Base:
        """Open what may not be there, or be somebody else's."""
        daemon = self.config.daemon
        devices, groups = await self._open_devices(stack)
        journal = self._open_journal(stack)
        if devices is not None and not devices.problems():
            remember(Path(daemon.state_dir), devices.inventory())
        workers = Path(daemon.state_dir) / "workers"
        workers.mkdir(mode=0o700, exist_ok=True)
        context = BackendContext(
            directory=workers,
            cuda_library=daemon.cuda_library,
            settings=self.config.backends,
            measure=Measuring(devices).bytes_of if devices is not None else cannot_measure,
        )
        backend = make_backend(self.config.ways(), context)
        await backend.start()
        stack.push_async_callback(backend.close)
        inheritance, sock = self._open_socket(stack)
        return _Base(
            devices=devices,
            groups=groups,
            journal=journal,
            backend=backend,
            sock=sock,
            inheritance=inheritance,
            door=self._open_door(stack),
            scrapes=self._open_for_scrapes(stack),
        )

    def _open_for_scrapes(self, stack: contextlib.AsyncExitStack) -> socket.socket | None:
        scrapes = open_for_scrapes(self.config.metrics)
        if scrapes is not None:
            stack.callback(scrapes.close)
            if scrapes.family == socket.AF_UNIX:
                stack.callback(_unlink, scrapes.getsockname())
        return scrapes

    def _open_door(self, stack: contextlib.AsyncExitStack) -> _Door | None:
        config, addresses = self.config, peer_addresses(self.config)
        if config.peers.auth is None or not addresses:
            return None
        host, incarnation = HostName(config.daemon.host), new_incarnation()
        credentials = load_credentials(config.peers, host)
        stack.callback(credentials.close)
        identity = Identity(
            host=host,
            settings=config.peers,
            credentials=credentials,
            hello=lambda other: self._hello(other, incarnation),
            allowed=frozenset(addresses),
        )
        listener = listen_for_peers(listen_address(config))
        stack.callback(listener.close)
        return _Door(identity=identity, addresses=addresses, listener=listener)

    def _hello(self, other: HostName, incarnation: str) -> Hello:
        """Return what this daemon says of itself to another host, by what holds now."""
        config = self.config
        return Hello(
            host=config.daemon.host,
            incarnation=incarnation,
            release=VERSION,
            features=FEATURES,
            cluster=config.daemon.cluster,
            heartbeat_s=config.peers.heartbeat_s,
            groups=shared_groups(config, other),
            known=known_groups(config, other),
        )

    def _open_socket(self, stack: contextlib.AsyncExitStack) -> tuple[Inheritance, socket.socket]:
        path = self.config.daemon.socket
        inheritance = inherit()
        sock = inheritance.listener
        if sock is None:
            sock = listen(
                path,
                backlog=self.config.limits.server.backlog,
                private=self.config.authority.clients == "own",
            )
            stack.callback(_unlink, path)
        elif (where := sock.getsockname()) != path:
            text = f"the service manager listens at {where}, and not at daemon.socket, {path}"
            self.log.write("warning", "socket", {"reason": text})
        stack.callback(sock.close)
        return inheritance, sock

    async def _start(
        self,
        stack: contextlib.AsyncExitStack,
        tasks: asyncio.TaskGroup,
        base: _Base,
        on_broken: Callable[[], None],
    ) -> tuple[Driver, Server, Reloader]:
        config, groups, journal = self.config, base.groups, base.journal
        allocations, membership = self._make_membership()
        machine = self._make_machine(groups, journal)
        around = self._make_surroundings(machine, membership, base, tasks)
        stack.callback(around.history.flush)
        driver = self._make_driver(machine, around, on_broken)
        stack.callback(driver.close)
        inventory = visible_of(base.inventory(), config.daemon.visible_devices)
        make_authority = partial(
            _authority,
            access=self._make_access(inventory),
            account_of=partial(_account_of, membership, allocations),
        )
        authority = make_authority(config, groups)
        server = self._make_server(driver, authority, inventory, base, allocations)
        driver.clients = server
        self._introduce(base.backend, driver, server)
        server.recall_sessions()
        adopted = server.adopt(base.inheritance.kept)
        _note_start(driver, groups, adopted)
        driver.post(Started())
        _warn_of(driver, base.devices)
        await self._serve(stack, server, base.sock)
        driver.write_notes()
        if self.on_serving is not None:
            self.on_serving()
        self.notifier.ready(self._status_line(driver))
        reloader = Reloader(
            source=self.source,
            driver=driver,
            server=server,
            inventory=inventory,
            authority=authority,
            make_authority=make_authority,
        )
        return driver, server, reloader

    def _introduce(self, backend: Backend, driver: Driver, server: Server) -> None:
        """Tell the backend whom it may ask."""
        margin_bytes = self.config.memory.device_margin_bytes
        backend.meet(server)
        scanner = driver.around.scanner
        backend.join(Neighbourhood(driver.machine, scanner, margin_bytes=margin_bytes))

    async def _open_devices(
        self, stack: contextlib.AsyncExitStack
    ) -> tuple[Devices | None, tuple[GroupConfig, ...]]:
        config = self.config
        devices = Devices(config.daemon.nvml_library, timeout_s=config.scan.nvml_timeout_s)
        host = HostName(config.daemon.host)
        try:
            await devices.start()
        except DevicesUnavailable as exc:
            if any(host in hosts_of(config, group) for group in config.groups):
                # The driver may be loaded later in the boot: the service manager tries again.
                raise
            # A host that is being set up, or that has no devices: the daemon says so, and serves
            # what does not need NVML.
            self.log.write("error", "devices", {"reason": str(exc)})
            return None, resolve_groups(config, ())
        stack.push_async_callback(devices.close)
        if devices.problems():
            devices.add_lost(recall(Path(config.daemon.state_dir)))
        visible = visible_of(devices.inventory(), config.daemon.visible_devices)
        return devices, resolve_groups(config, visible)

    def _open_journal(self, stack: contextlib.AsyncExitStack) -> Journal:
        state_dir = Path(self.config.daemon.state_dir)
        history = self.config.history
        limits = JournalLimits(
            history_max_bytes=history.max_bytes, history_max_age_s=history.max_age_s
        )
        journal = Journal.open(state_dir, now_unix=time.time(), limits=limits)
        stack.callback(journal.close)
        for warning in journal.warnings:
            self.log.write("warning", "journal", {"reason": warning})
        return journal

    def _make_machine(self, groups: tuple[GroupConfig, ...], journal: Journal) -> Machine:
        config = MachineConfig(
            host=HostName(self.config.daemon.host),
            groups=groups,
            limits=self.config.limits.core,
            generation=journal.generation,
            ceiling=journal.ceiling,
            cluster=self.config.daemon.cluster,
            freeze_strangers=self.config.scan.strangers == "freeze",
            recording=self.config.history.record,
        )
        machine = Machine(config, random=Random())
        recover(machine, journal.load(), now=time.monotonic())
        return machine

    def _make_surroundings(
        self, machine: Machine, membership: Membership, base: _Base, tasks: asyncio.TaskGroup
    ) -> Surroundings:
        history = self.config.history
        qualifying = self._make_qualifying(machine, base.devices)
        scanner = Scanner(base.groups, base.devices, membership, base.backend)
        scanner.recall = qualifying.recall
        around = Surroundings(
            journal=base.journal,
            history=base.journal.open_history(history.max_events, recording=history.record),
            backend=base.backend,
            scanner=scanner,
            membership=membership,
            ledgers=self._make_ledgers(),
            log=self.log,
            tasks=tasks,
            qualifying=qualifying,
        )
        around.moves.recall(around.history.since(None, history.max_events).events)
        return around

    def _make_driver(
        self, machine: Machine, around: Surroundings, on_broken: Callable[[], None]
    ) -> Driver:
        linger_s = self.config.daemon.linger_us / 1e6
        return Driver(machine, around, on_broken=on_broken, linger_s=linger_s)

    def _make_membership(self) -> tuple[Allocations, Membership]:
        daemon, limit = self.config.daemon, self.config.limits.server.max_processes
        allocations = Allocations(Path(daemon.state_dir))
        leader_of = allocations.leader_of
        return allocations, Membership(daemon.cluster, limit=limit, leader_of=leader_of)

    def _make_qualifying(self, machine: Machine, devices: Devices | None) -> Qualifying:
        inventory = devices.inventory() if devices is not None else ()
        return Qualifying(
            machine=machine,
            kinds=Kinds(Path(self.config.daemon.state_dir) / "kinds.json"),
            ways=self.config.ways(),
            facts=HostFacts(
                driver=inventory[0].driver_version if inventory else None,
                partitioned={device.uuid: device.mig for device in inventory},
            ),
        )

    def _make_ledgers(self) -> Ledgers:
        memory = self.config.memory
        host = HostMemory()
        ray = RayMargin(host, when=memory.ray_margin, ratio=memory.ray_margin_ratio)
        return Ledgers(
            host=DramLedger(host, margin_bytes=memory.host_margin_bytes, ray_bytes=ray.in_bytes),
            ray=ray,
            device=DeviceLedger(
                margin_bytes=memory.device_margin_bytes, max_age_s=memory.max_reading_age_s
            ),
            margin=SnapshotMargin(
                ratio=memory.snapshot_margin_ratio, bytes=memory.snapshot_margin_bytes
            ),
        )

    def _make_server(
        self,
        driver: Driver,
        authority: Authority,
        inventory: tuple[Device, ...],
        base: _Base,
        allocations: Allocations,
    ) -> Server:
        config, around = self.config, driver.around
        shares = Shares(
            config.limits.server, descriptors=raise_limit(), watched=lambda: driver.watched
        )
        status = StatusPage(
            machine=driver.machine,
            scanner=around.scanner,
            inventory=inventory,
            backend=str(config.ways()),
            memory=HostMemory(),
            reserved_bytes=around.ledgers.host.promised,
            moves=around.moves,
        )
        details = Details(
            machine=driver.machine,
            status=status,
            allocations=allocations,
            qualifying=around.qualifying,
        )
        history = config.history
        limits = ToldLimits(
            max_events_per_s=history.max_job_events_per_s,
            max_names=history.max_job_names,
            max_jobs=history.max_jobs,
        )
        told = Told(limits, driver.write)
        driver.sampler = Sampler(driver.write, interval_s=lambda: self.config.history.sample_s)
        peers = _make_peers(driver, base.door, status) if base.door is not None else None
        return Server(
            driver,
            config.limits.server,
            authority=authority,
            membership=around.membership,
            enrolment=Enrolment(driver, authority, around.membership, around.scanner),
            operations=Operations(driver, authority, details),
            allotment=self._make_allotment(driver, authority, allocations, details),
            status=status,
            shares=shares,
            vault=self.notifier,
            told=told,
            peers=peers,
        )

    def _make_allotment(
        self, driver: Driver, authority: Authority, allocations: Allocations, details: Details
    ) -> Allotment:
        commenting = Commenting(
            driver,
            allocations,
            socket=self.config.daemon.socket,
            interval_s=lambda: self.config.slurm.comment_s,
        )
        return Allotment(driver, authority, allocations, details, commenting=commenting)

    def _make_access(self, inventory: tuple[Device, ...]) -> DeviceAccess | None:
        mode = self.config.authority.device_cgroup
        if mode == "off":
            return None
        nodes = {d.uuid: f"/dev/nvidia{d.minor}" for d in inventory if d.minor is not None}
        return DeviceAccess(nodes, required=mode == "require")

    async def _serve(
        self, stack: contextlib.AsyncExitStack, server: Server, sock: socket.socket
    ) -> None:
        # Whoever made the socket takes its file away. From Python 3.13 on the loop would.
        ours: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        listening = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(server), sock=sock, backlog=server.limits.backlog, **ours
        )
        stack.callback(listening.close)

    async def _reload_for_ever(self, reloader: Reloader, hangup: asyncio.Event) -> None:
        """Read the configuration again whenever that is asked for."""
        while True:
            await hangup.wait()
            hangup.clear()
            self.notifier.reloading()
            try:
                self.config = await reloader.reload(self.config)
                self._problem = ""
                if reloader.server.peers is not None:
                    reloader.server.peers.renew(peer_addresses(self.config))
            except ReloadRefused as exc:
                reloader.driver.note("reload_refused", "error", reason=str(exc))
                first = " ".join(str(exc).split())
                self._problem = f"; configuration not reloaded: {first}"
            self.log.flush()
            self.notifier.ready(self._status_line(reloader.driver))

    async def _show_for_ever(self, driver: Driver) -> None:
        """Keep the line of ``systemctl status`` up to date."""
        while self.notifier.enabled:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self.notifier.status(self._status_line(driver))

    def _status_line(self, driver: Driver) -> str:
        return summary(driver.machine) + self._problem

    async def _feed_watchdog(self) -> None:
        """Tell systemd that this loop still turns; never from a thread, which would hide a hang."""
        limit_s = self.notifier.watchdog_s
        while limit_s is not None:
            self.notifier.send("WATCHDOG=1")
            await asyncio.sleep(limit_s / 3)


def _account_of(membership: Membership, allocations: Allocations, process: ProcessId) -> str | None:
    slurm = membership.slurm_job_of(process.pid)
    return allocations.account_of(slurm.id) if slurm is not None else None


def _authority(
    config: Config,
    groups: tuple[GroupConfig, ...],
    *,
    access: DeviceAccess | None,
    account_of: Callable[[ProcessId], str | None],
) -> Authority:
    return Authority(
        groups,
        config.groups,
        config.daemon.admin_group,
        access=access,
        own_only=config.authority.clients == "own",
        account_of=account_of,
    )


def _note_start(driver: Driver, groups: tuple[GroupConfig, ...], adopted: int) -> None:
    """Tell, before anything else of this run, what it goes on with."""
    driver.note(
        "started",
        "info",
        groups=",".join(group.name for group in groups),
        devices=sum(len(group.devices) for group in groups),
        leases=len(driver.machine.leasing.leases),
        adopted=adopted or None,
    )


def _warn_of(driver: Driver, devices: Devices | None) -> None:
    """Tell, in the log and the history, what jobs will suffer from on this host's devices."""
    if devices is None:
        return
    for problem in devices.problems():
        driver.note("device", "warning", reason=problem)
    for device in devices.inventory():
        for text in device.warnings():
            reason = f"device {device.index}: {text}"
            driver.note("device", "warning", device=device.uuid, reason=reason)


def _make_peers(driver: Driver, door: _Door, status: StatusPage) -> Peers:
    peers = driver.hosts = Peers(
        door.identity,
        door.addresses,
        post=driver.post,
        note=driver.note,
        status=status.status,
        events=Histories(driver).answer,
    )
    status.peers = peers.shown
    _warn_of_door(driver, door)
    return peers


def _warn_of_door(driver: Driver, door: _Door) -> None:
    """Tell if other machines cannot reach this daemon: a host's own name is often on loopback."""
    where = door.listener.getsockname()[0]
    far = [host for host, address in door.addresses.items() if not address.is_loopback]
    if far and ipaddress.ip_address(where).is_loopback:
        reason = f"{where} is reached by no other machine, {far[0]} for example: set peers.listen"
        driver.note("peers", "warning", reason=reason)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()
