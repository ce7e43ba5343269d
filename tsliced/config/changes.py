"""What a reload can change, and what has to wait for a restart."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from tsliced.config.settings import Config, MetricsSettings, PeerSettings

#: Keys that are used when the daemon starts and never again.
_AT_START: Final = {
    "daemon": (
        "socket",
        "state_dir",
        "host",
        "cluster",
        "nvml_library",
        "cuda_library",
        "visible_devices",
        "backend",
        "loop",
        "linger_us",
    ),
    "authority": ("device_cgroup", "clients"),
    "scan": ("nvml_timeout_s", "strangers"),
    "history": (
        "max_events",
        "max_bytes",
        "max_age_s",
        "record",
        "max_job_events_per_s",
        "max_job_names",
        "max_jobs",
    ),
    "metrics": tuple(item.name for item in fields(MetricsSettings)),
    # Both sides of a link go by them from its first message on.
    "peers": tuple(item.name for item in fields(PeerSettings)),
    "limits.core": ("block", "story"),
    "limits.server": ("backlog", "max_processes"),
}


def without_restart(old: Config, new: Config) -> tuple[Config, tuple[str, ...]]:
    """Return `new` as far as it can be had without a restart, and the keys that need one."""
    waiting: list[str] = []

    def keep(path: str, before: Any, after: Any) -> Any:
        kept = {name: getattr(before, name) for name in _AT_START.get(path, ())}
        section = path.partition(".")[0]
        waiting.extend(f"{section}.{k}" for k, v in kept.items() if getattr(after, k) != v)
        return replace(after, **kept)

    limits = replace(
        new.limits,
        core=keep("limits.core", old.limits.core, new.limits.core),
        server=keep("limits.server", old.limits.server, new.limits.server),
    )
    sections = {
        name: keep(name, getattr(old, name), getattr(new, name))
        for name in ("daemon", "authority", "scan", "history", "metrics", "peers")
    }
    if new.backends != old.backends:
        waiting.append("backends")
    if new.jobs != old.jobs:
        waiting.append("jobs")
    before = {group.name: group.backend for group in old.groups}
    groups = tuple(
        replace(group, backend=before.get(group.name, group.backend)) for group in new.groups
    )
    waiting += [
        f"groups.{kept.name}.backend"
        for kept, group in zip(groups, new.groups, strict=True)
        if kept != group
    ]
    config = replace(
        new, limits=limits, backends=old.backends, jobs=old.jobs, groups=groups, **sections
    )
    return config, tuple(waiting)


def changed_keys(old: Config, new: Config) -> tuple[str, ...]:
    """Return the keys whose values differ; of groups, the groups."""
    found = ["backends"] if old.backends != new.backends else []
    parts = (("limits", "limits.core"), ("limits", "limits.server"))
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in _SECTIONS]
    pairs += [(name, _at(old, path), _at(new, path)) for name, path in parts]
    for section, before, after in pairs:
        for item in fields(before):
            if item.name in ("core", "server"):
                continue
            if getattr(before, item.name) != getattr(after, item.name):
                found.append(f"{section}.{item.name}")
    groups = {group.name: group for group in old.groups}
    others = {group.name: group for group in new.groups}
    names = [name for name in {**groups, **others} if groups.get(name) != others.get(name)]
    return (*found, *(f"groups.{name}" for name in names))


_SECTIONS: Final = (
    "daemon",
    "authority",
    "limits",
    "memory",
    "scan",
    "history",
    "metrics",
    "peers",
    "slurm",
)


def _at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
