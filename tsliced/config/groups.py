"""From the devices that a configuration names to UUIDs.

``n1:0-3`` is shorthand for people. Indices change with a reboot or a broken device, so they are
resolved once, against what each host really has, and never used after that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tsliced.config.reader import ConfigError, Problem
from tsliced.config.settings import Config, GroupSettings
from tsliced.core.model import DeviceId, GroupConfig, GroupName, HostName
from tsliced.host.devices import Device

Inventory = Mapping[HostName, Sequence[Device]]

_ENTRY: Final = re.compile(r"(?:(?P<host>[A-Za-z0-9._-]+):)?(?P<what>[^:]+)")
_RANGE: Final = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_UUID: Final = re.compile(r"GPU-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One entry of a group's ``devices``, understood but not resolved."""

    text: str
    #: None: this host for indices, any host for a UUID.
    host: HostName | None
    #: None: all devices of the host, unless `uuid` names one.
    indices: tuple[int, ...] | None = None
    uuid: DeviceId | None = None


def parse_devices(text: str) -> DeviceSpec:
    """Understand one entry, or raise ValueError saying how it is written."""
    match = _ENTRY.fullmatch(text.strip())
    if match is None:
        raise ValueError(_how(text))
    host = HostName(match["host"]) if match["host"] else None
    what = match["what"].strip()
    if what == "*":
        return DeviceSpec(text=text, host=host)
    if what.startswith("MIG-"):
        raise ValueError(f"{text!r} is a part of a partitioned device, which can't be snapshotted")
    if what.startswith("GPU-"):
        if not _UUID.fullmatch(what):
            raise ValueError(f"{text!r} is not a whole UUID; nvidia-smi -L lists them")
        return DeviceSpec(text=text, host=host, uuid=DeviceId("GPU-" + what[4:].lower()))
    return DeviceSpec(text=text, host=host, indices=tuple(_indices(text, what)))


def _indices(text: str, what: str) -> Iterator[int]:
    for part in what.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(_how(text))
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{text!r} counts backwards: write {last}-{first}")
        yield from range(first, last + 1)


def _how(text: str) -> str:
    return f"{text!r} names no devices: write HOST:0-3, HOST:0,2, HOST:*, 0-1 or a UUID (GPU-...)"


def visible_of(devices: Sequence[Device], text: str | None) -> tuple[Device, ...]:
    """Return the devices that a CUDA_VISIBLE_DEVICES shows; None shows all.

    As CUDA has it: indices, UUIDs or how they begin, and nothing behind the first one that is none.
    """
    if text is None:
        return tuple(devices)
    visible: list[Device] = []
    for entry in map(str.strip, text.split(",")):
        found = next((device for device in devices if _is_meant(device, entry)), None)
        if found is None or found in visible:
            break
        visible.append(found)
    return tuple(sorted(visible, key=lambda device: device.index))


def _is_meant(device: Device, entry: str) -> bool:
    if entry.startswith("GPU-") and len(entry) > len("GPU-"):
        return device.uuid.lower().startswith(entry.lower())
    return entry == str(device.index)


def hosts_of(config: Config) -> frozenset[HostName]:
    """Return the hosts that the groups name; this host, if there are no groups."""
    here = HostName(config.daemon.host)
    if not config.groups:
        return frozenset({here})
    specs = (parse_devices(text) for group in config.groups for text in group.devices)
    return frozenset(spec.host or here for spec in specs)


def resolve_groups(
    config: Config, inventory: Inventory, *, partial: bool = False
) -> tuple[GroupConfig, ...]:
    """Return the groups with the UUIDs of their devices, in the order in which they are reserved.

    `inventory` has the devices of each host. With `partial`, hosts that it doesn't have are left
    out (their daemon is not reached yet), and so are groups of which nothing is left. Without
    configured groups, each host is one group with all of its devices, named after it.

    Raises:
        ConfigError: unknown devices or hosts, a device twice, or a barrier too short; all of them.
    """
    if not config.groups:
        groups = _one_group_per_host(inventory)
        resolution = _Resolution(config, inventory, partial=partial)
    else:
        resolution = _Resolution(config, inventory, partial=partial)
        groups = tuple(resolution.resolve(group) for group in in_order(config.groups))
        resolution.check_overlaps()
    hosts = {device.uuid: host for host, devices in inventory.items() for device in devices}
    for group in groups:
        counts = Counter(hosts[uuid] for uuid in group.devices if uuid in hosts)
        resolution.problems.extend(check_barrier(config, group.name, counts))
    if resolution.problems:
        raise ConfigError(resolution.problems)
    return tuple(group for group in groups if group.devices)


def check_overlaps(config: Config) -> Iterator[Problem]:
    """Yield a problem for each device that is named twice, as far as names alone tell."""
    owners: dict[str, str] = {}
    for group in config.groups:
        for name in _device_names(config, group):
            if name in owners:
                yield Problem(
                    config.origin("groups", group.name, "devices"),
                    f"groups.{group.name}.devices",
                    _overlap_text(name, owners[name], group.name),
                )
            owners.setdefault(name, group.name)


def count_ranks(config: Config, group: GroupSettings) -> Counter[HostName]:
    """Count one rank for each device of a group by host, as far as names alone tell."""
    here = HostName(config.daemon.host)
    counts: Counter[HostName] = Counter()
    for spec in _specs(group):
        counts[spec.host or here] += 1 if spec.indices is None else len(spec.indices)
    return counts


def _device_names(config: Config, group: GroupSettings) -> Iterator[str]:
    for spec in _specs(group):
        host = spec.host or config.daemon.host
        if spec.uuid is not None:
            yield spec.uuid
        for index in spec.indices or ():
            yield f"{host}:{index}"


def _specs(group: GroupSettings) -> Iterator[DeviceSpec]:
    for text in group.devices:
        with suppress(ValueError):
            yield parse_devices(text)


def _overlap_text(device: str, first: str, second: str) -> str:
    where = f"group {first} too" if first != second else "this group already"
    return f"device {device} is in {where}: groups are disjoint"


def in_order(groups: Sequence[GroupSettings]) -> list[GroupSettings]:
    """Return groups as they are reserved: by `order`, then by name, the same on every host."""
    return sorted(groups, key=lambda one: (math.inf if one.order is None else one.order, one.name))


def check_barrier(config: Config, group: str, ranks: Mapping[HostName, int]) -> Iterator[Problem]:
    """Yield a problem if a configured barrier can end before one try to freeze the group can.

    `ranks` counts, by host, one rank for each device. Ranks of a host are frozen one by one.
    """
    barrier_s, core = config.limits.barrier_timeout_s, config.limits.core
    if barrier_s is None or not ranks:
        return
    host, count = max(ranks.items(), key=lambda item: item[1])
    need_s = core.quiesce_timeout_s + count * core.freeze_timeout_s + core.barrier_margin_s
    if barrier_s < need_s:
        yield Problem(
            config.origin("limits", "barrier_timeout_s"),
            "limits.barrier_timeout_s",
            f"{barrier_s:g} s are too short for group {group}: one try may take "
            f"quiesce_timeout_s {core.quiesce_timeout_s:g} + {count} ranks on {host} x "
            f"freeze_timeout_s {core.freeze_timeout_s:g} + barrier_margin_s "
            f"{core.barrier_margin_s:g} = {need_s:g} s; allow that, or leave the key out",
        )


def _one_group_per_host(inventory: Inventory) -> tuple[GroupConfig, ...]:
    return tuple(
        GroupConfig(
            name=GroupName(host), devices=tuple(device.uuid for device in devices), order=order
        )
        for order, (host, devices) in enumerate(sorted(inventory.items()))
    )


class _Resolution:
    """One pass over all groups, collecting mistakes."""

    def __init__(self, config: Config, inventory: Inventory, *, partial: bool) -> None:
        self._config = config
        self._inventory = inventory
        self._partial = partial
        self._order = 0
        #: Groups that name a device, in the order of the passes; twice if one names it twice.
        self._owners: dict[DeviceId, list[str]] = {}
        self.problems: list[Problem] = []

    def resolve(self, group: GroupSettings) -> GroupConfig:
        devices: list[DeviceId] = []
        for text in group.devices:
            devices += self._find(group, parse_devices(text))
        for uuid in devices:
            self._owners.setdefault(uuid, []).append(group.name)
        self._order += 1
        return GroupConfig(
            name=GroupName(group.name),
            devices=tuple(dict.fromkeys(devices)),
            order=self._order - 1,
            max_hold_s=group.max_hold_s,
        )

    def check_overlaps(self) -> None:
        for uuid, owners in self._owners.items():
            if len(owners) > 1:
                self._fail(owners[1], _overlap_text(self._name(uuid), owners[0], owners[1]))

    def _find(self, group: GroupSettings, spec: DeviceSpec) -> list[DeviceId]:
        if spec.uuid is not None:
            return self._find_uuid(group, spec, spec.uuid)
        host = spec.host or HostName(self._config.daemon.host)
        devices = self._devices(group, spec, host)
        if devices is None:
            return []
        if spec.indices is None:
            return [device.uuid for device in devices]
        by_index = {device.index: device.uuid for device in devices}
        missing = [str(index) for index in spec.indices if index not in by_index]
        if missing:
            has = f"devices {', '.join(map(str, sorted(by_index)))}" if by_index else "no devices"
            self._fail(
                group.name,
                f"{spec.text!r}: {host} has no device {', '.join(missing)}; it has {has}",
            )
        return [by_index[index] for index in spec.indices if index in by_index]

    def _find_uuid(self, group: GroupSettings, spec: DeviceSpec, uuid: DeviceId) -> list[DeviceId]:
        if spec.host is not None:
            devices = self._devices(group, spec, spec.host)
            if devices is None:
                return []
        else:
            devices = [device for each in self._inventory.values() for device in each]
        for device in devices:
            if device.uuid.lower() == uuid.lower():
                return [device.uuid]
        # A UUID without a host may be on one that is not reached yet.
        if spec.host is not None or not self._partial:
            where = spec.host or f"any of {', '.join(sorted(self._inventory)) or 'no hosts'}"
            self._fail(group.name, f"{spec.text!r}: there is no such device on {where}")
        return []

    def _devices(
        self, group: GroupSettings, spec: DeviceSpec, host: HostName
    ) -> Sequence[Device] | None:
        devices = self._inventory.get(host)
        if devices is None and not self._partial:
            known = ", ".join(sorted(self._inventory)) or "none"
            self._fail(group.name, f"{spec.text!r}: host {host} is not known; known are: {known}")
        return devices

    def _name(self, uuid: DeviceId) -> str:
        for host, devices in self._inventory.items():
            for device in devices:
                if device.uuid == uuid:
                    return f"{host}:{device.index} ({uuid})"
        return uuid

    def _fail(self, group: str, text: str) -> None:
        origin = self._config.origin("groups", group, "devices")
        self.problems.append(Problem(origin, f"groups.{group}.devices", text))
