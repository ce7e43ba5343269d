"""SIGHUP: another configuration for a daemon that runs, as a whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tsliced.config import Config, ConfigError, ConfigSource, resolve_groups
from tsliced.config.changes import changed_keys, without_restart
from tsliced.core.events import Reconfigured
from tsliced.core.model import GroupConfig, GroupName
from tsliced.core.sessions import Session
from tsliced.driver import Driver
from tsliced.host.device_access import AccessUnknownError
from tsliced.host.devices import Device
from tsliced.host.memory import SnapshotMargin
from tsliced.net.authority import Authority
from tsliced.net.server import Server

#: Rounds of asking about clients that came while others were asked about.
LEARN_TRIES = 3


class ReloadRefused(Exception):  # noqa: N818 - as DevicesUnavailable
    """The configuration stays as it is; the text says why."""


@dataclass(slots=True, kw_only=True)
class Reloader:
    """Knows what must hear of another configuration."""

    source: ConfigSource
    driver: Driver
    server: Server
    inventory: tuple[Device, ...]
    authority: Authority
    make_authority: Callable[[Config, tuple[GroupConfig, ...]], Authority]

    async def reload(self, config: Config) -> Config:
        """Read the configuration again and use it; return what holds from now on.

        Raises `ReloadRefused`, and then nothing has changed.
        """
        try:
            # Files may lie on a disk that hangs.
            read = await asyncio.to_thread(self.source.read)
            new, waiting = without_restart(config, read)
            groups = resolve_groups(new, self.inventory)
        except ConfigError as exc:
            raise ReloadRefused(str(exc)) from exc
        authority = self.make_authority(new, groups)
        try:
            await self._learn(authority)
            self._take(new, groups, authority)
        except ReloadRefused:
            authority.users.close()
            raise
        note = self.driver.note
        for warning in new.warnings:
            note("config", "warning", reason=warning)
        if waiting:
            note("config", "warning", reason=f"waits for a restart: {', '.join(waiting)}")
        changed = ", ".join(changed_keys(config, new)) or "nothing"
        note("reloaded", "info", changed=changed)
        return new

    async def _learn(self, authority: Authority) -> None:
        """Let new lists be answered from for all who are here. Who comes meanwhile is few."""
        for _ in range(LEARN_TRIES):
            sessions = self.driver.machine.leasing.sessions.values()
            unknown = [s for s in sessions if not _knows(authority, s)]
            if not unknown:
                return
            for session in unknown:
                with suppress(AccessUnknownError):
                    await authority.learn(session.process, session.job.uid)

    def _take(self, config: Config, groups: tuple[GroupConfig, ...], authority: Authority) -> None:
        """Change everything in one turn of the loop, so that nobody sees a part of it."""
        sessions = self.driver.machine.leasing.sessions.values()
        event = Reconfigured(
            groups=groups,
            limits=config.limits.core,
            permitted=tuple((s.id, _groups_of(authority, s)) for s in sessions),
        )
        if objections := self.driver.reconfigure(event):
            raise ReloadRefused("; ".join(objections))
        around, daemon, memory = self.driver.around, config.daemon, config.memory
        around.log.set_level(daemon.log_level)
        around.scanner.reconfigure(groups)
        around.ledgers.host.margin_bytes = memory.host_margin_bytes
        around.ledgers.ray.when = memory.ray_margin
        around.ledgers.ray.ratio = memory.ray_margin_ratio
        around.ledgers.device.margin_bytes = memory.device_margin_bytes
        around.ledgers.device.max_age_s = memory.max_reading_age_s
        around.ledgers.margin = SnapshotMargin(
            ratio=memory.snapshot_margin_ratio, bytes=memory.snapshot_margin_bytes
        )
        self.server.reconfigure(config.limits.server)
        self.authority.become(authority)


def _knows(authority: Authority, session: Session) -> bool:
    try:
        return authority.knows(session.process, session.job.uid)
    except AccessUnknownError:
        # Asking again tells no more; its process is gone, or about to go.
        return True


def _groups_of(authority: Authority, session: Session) -> tuple[GroupName, ...]:
    try:
        return authority.groups_of(session.process, session.job.uid)
    except AccessUnknownError:
        # No more than it had; what of that is still there and open to it.
        return tuple(g for g in authority.groups_for(session.job.uid) if g in session.groups)
