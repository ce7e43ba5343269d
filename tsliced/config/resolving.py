"""From the devices that a configuration names to UUIDs.

``n1:0-3`` is shorthand for people. Indices change with a reboot or a broken device, so they are
resolved once, against what this host really has, and never used after that. The devices of other
hosts are resolved by their own daemons; of them only the hosts are known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tsliced.config.groups import (
    DeviceSpec,
    check_barrier,
    count_ranks,
    hosts_of,
    in_order,
    overlap_text,
    parse_devices,
)
from tsliced.config.peers import parse_host
from tsliced.config.reader import ConfigError, Problem
from tsliced.config.settings import Config, GroupSettings
from tsliced.core.model import DeviceId, GroupConfig, GroupName, HostName
from tsliced.host.devices import Device


def resolve_groups(config: Config, devices: Sequence[Device]) -> tuple[GroupConfig, ...]:
    """Return all groups, in the order in which they are reserved, with UUIDs of this host.

    `devices` are this host's. A group that is elsewhere has none of them. One that is here alone
    and has none is left out: its devices cannot be seen. Without configured groups, this host and
    each that ``peers.hosts`` lists is one group with all of its devices, named after it.

    Raises:
        ConfigError: unknown devices, a device twice, or a barrier too short; all of them.
    """
    if config.groups:
        resolution = _Resolution(config, devices)
        settings = in_order(config.groups)
        groups = [resolution.resolve(group, order) for order, group in enumerate(settings)]
        problems = [*resolution.problems, *resolution.overlaps()]
    else:
        groups, problems = _one_group_per_host(config, devices), []
    problems += _barriers(config, groups)
    if problems:
        raise ConfigError(problems)
    return tuple(group for group in groups if group.devices or group.hosts)


def _barriers(config: Config, groups: Sequence[GroupConfig]) -> Iterator[Problem]:
    here = HostName(config.daemon.host)
    settings = {group.name: group for group in config.groups}
    for group in groups:
        counts = count_ranks(config, settings[group.name]) if settings else {}
        if group.devices:
            counts = {**counts, here: len(group.devices)}
        yield from check_barrier(config, group.name, counts)


def _one_group_per_host(config: Config, devices: Sequence[Device]) -> list[GroupConfig]:
    here = HostName(config.daemon.host)
    listed = {parse_host(text, config.peers.port)[0] for text in config.peers.hosts}
    return [
        GroupConfig(
            name=GroupName(host),
            devices=tuple(device.uuid for device in devices) if host == here else (),
            order=order,
            hosts=() if host == here else (host,),
        )
        for order, host in enumerate(sorted(listed | {here}))
    ]


class _Resolution:
    """One pass over all groups, collecting mistakes."""

    def __init__(self, config: Config, devices: Sequence[Device]) -> None:
        self._config = config
        self._here = HostName(config.daemon.host)
        self._devices = devices
        #: Groups that name a device, in the order of the passes; twice if one names it twice.
        self._owners: dict[DeviceId, list[str]] = {}
        self.problems: list[Problem] = []

    def resolve(self, group: GroupSettings, order: int) -> GroupConfig:
        found: list[DeviceId] = []
        for text in group.devices:
            found += self._find(group, parse_devices(text))
        for uuid in found:
            self._owners.setdefault(uuid, []).append(group.name)
        hosts = hosts_of(self._config, group)
        return GroupConfig(
            name=GroupName(group.name),
            devices=tuple(dict.fromkeys(found)),
            order=order,
            hosts=() if hosts == (self._here,) else hosts,
            max_hold_s=group.max_hold_s,
        )

    def overlaps(self) -> Iterator[Problem]:
        for uuid, owners in self._owners.items():
            if len(owners) > 1:
                text = overlap_text(self._name(uuid), owners[0], owners[1])
                yield self._problem(owners[1], text)

    def _find(self, group: GroupSettings, spec: DeviceSpec) -> list[DeviceId]:
        if spec.host not in (None, self._here):
            return []
        if spec.uuid is not None:
            return self._find_uuid(group, spec, spec.uuid)
        if spec.indices is None:
            return [device.uuid for device in self._devices]
        by_index = {device.index: device.uuid for device in self._devices}
        missing = [str(index) for index in spec.indices if index not in by_index]
        if missing:
            has = f"devices {', '.join(map(str, sorted(by_index)))}" if by_index else "no devices"
            text = f"{spec.text!r}: {self._here} has no device {', '.join(missing)}; it has {has}"
            self.problems.append(self._problem(group.name, text))
        return [by_index[index] for index in spec.indices if index in by_index]

    def _find_uuid(self, group: GroupSettings, spec: DeviceSpec, uuid: DeviceId) -> list[DeviceId]:
        for device in self._devices:
            if device.uuid.lower() == uuid.lower():
                return [device.uuid]
        text = f"{spec.text!r}: there is no such device on {self._here}"
        if spec.host is None:
            text += "; one of another host is written HOST:UUID"
        self.problems.append(self._problem(group.name, text))
        return []

    def _name(self, uuid: DeviceId) -> str:
        index = next(device.index for device in self._devices if device.uuid == uuid)
        return f"{self._here}:{index} ({uuid})"

    def _problem(self, group: str, text: str) -> Problem:
        origin = self._config.origin("groups", group, "devices")
        return Problem(origin, f"groups.{group}.devices", text)
