"""The devices that a configuration names, as far as names alone tell: see `resolving`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tsliced.config.reader import Problem
from tsliced.config.settings import Config, GroupSettings
from tsliced.core.model import DeviceId, HostName
from tsliced.host.devices import Device

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


def specs_of(group: GroupSettings) -> list[DeviceSpec]:
    """Return the entries of a group that can be understood."""
    specs: list[DeviceSpec] = []
    for text in group.devices:
        with suppress(ValueError):
            specs.append(parse_devices(text))
    return specs


def hosts_of(config: Config, group: GroupSettings) -> tuple[HostName, ...]:
    """Return the hosts that a group names, in the order of its entries: the first is its arbiter.

    An entry without a host is of this one.
    """
    here = HostName(config.daemon.host)
    return tuple(dict.fromkeys(spec.host or here for spec in specs_of(group)))


def check_overlaps(config: Config) -> Iterator[Problem]:
    """Yield a problem for each device that is named twice, as far as names alone tell."""
    owners: dict[str, str] = {}
    for group in config.groups:
        for name in _device_names(config, group):
            if name in owners:
                yield Problem(
                    config.origin("groups", group.name, "devices"),
                    f"groups.{group.name}.devices",
                    overlap_text(name, owners[name], group.name),
                )
            owners.setdefault(name, group.name)


def count_ranks(config: Config, group: GroupSettings) -> Counter[HostName]:
    """Count one rank for each device of a group by host, as far as names alone tell."""
    here = HostName(config.daemon.host)
    counts: Counter[HostName] = Counter()
    for spec in specs_of(group):
        counts[spec.host or here] += 1 if spec.indices is None else len(spec.indices)
    return counts


def _device_names(config: Config, group: GroupSettings) -> Iterator[str]:
    for spec in specs_of(group):
        host = spec.host or config.daemon.host
        if spec.uuid is not None:
            yield spec.uuid
        for index in spec.indices or ():
            yield f"{host}:{index}"


def overlap_text(device: str, first: str, second: str) -> str:
    """Say that a device is in two groups, or in one twice."""
    where = f"group {first} too" if first != second else "this group already"
    return f"device {device} is in {where}: groups are disjoint"


def in_order(groups: Sequence[GroupSettings]) -> list[GroupSettings]:
    """Return groups as they are reserved: by `order`, then by name, the same on every host."""
    return sorted(groups, key=lambda one: (math.inf if one.order is None else one.order, one.name))


def check_barrier(config: Config, group: str, ranks: Mapping[HostName, int]) -> Iterator[Problem]:
    """Yield a problem if a configured barrier can end before one try to freeze the group can.

    `ranks` counts, by host, one rank for each device. Ranks of a host are frozen one by one.
    """
    core = config.limits.core
    barrier_s = core.barrier_timeout_s
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
