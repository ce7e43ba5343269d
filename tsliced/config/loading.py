"""Reading the configuration, checking what a single value can't show, and showing the result."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from tsliced.config.backends import (
    OWN_TABLES,
    BackendSettings,
    check_backends,
    registered_backends,
)
from tsliced.config.groups import check_barrier, check_overlaps, count_ranks, parse_devices
from tsliced.config.peers import check_hosts, check_peers, with_usual_auth
from tsliced.config.reader import ConfigError, Origin, Problem, Reader, Source, nest, read_source
from tsliced.config.settings import (
    CORE_ELSEWHERE,
    CORE_RULES,
    AuthoritySettings,
    Config,
    DaemonSettings,
    GroupSettings,
    HistorySettings,
    JobSettings,
    Limits,
    MemorySettings,
    MetricsSettings,
    PeerSettings,
    ScanSettings,
    ServerLimits,
    SlurmSettings,
)
from tsliced.core.model import CoreLimits

DEFAULT_PATH: Final = "/etc/tsliced/tsliced.toml"

#: Sections that are one dataclass each.
_SECTIONS: Final[Mapping[str, type[Any]]] = {
    "daemon": DaemonSettings,
    "authority": AuthoritySettings,
    "memory": MemorySettings,
    "scan": ScanSettings,
    "history": HistorySettings,
    "metrics": MetricsSettings,
    "peers": PeerSettings,
    "slurm": SlurmSettings,
}
#: A group's name stands in role aliases ("a=n1,n2;b=n3"), labels and paths.
_GROUP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """Where the configuration comes from."""

    path: Path
    #: It may be missing.
    optional: bool = False
    #: What holds where neither file nor command line say otherwise.
    defaults: Mapping[str, object] | None = None

    def read(self) -> Config:
        """Read it. Raises `ConfigError`."""
        return load(self.path, optional=self.optional, defaults=self.defaults)


def load(
    path: str | Path = DEFAULT_PATH,
    *,
    optional: bool = False,
    defaults: Mapping[str, object] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Read ``tsliced.toml`` and then, in lexical order, ``tsliced.toml.d/*.toml`` beside it.

    With `optional`, the first file may be missing. `defaults` and `overrides` are values by dotted
    key; over the former all files win, the latter win over all files.

    Raises:
        ConfigError: with every mistake in it.
    """
    reader = Reader()
    if defaults:
        reader.add(Source("--user", nest(defaults)))
    files = list(_files(Path(path), optional=optional))
    for file in files:
        source = read_source(file)
        if isinstance(source, Problem):
            reader.problems.append(source)
        else:
            reader.add(source)
    if overrides:
        reader.add(Source("command line", nest(overrides)))
    config = replace(_read(reader), files=tuple(str(file) for file in files))
    reader.problems.extend(_cross_checks(config))
    if config.daemon.strict:
        reader.problems.extend(reader.unknown)
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def _files(path: Path, *, optional: bool) -> Iterator[Path]:
    if path.exists() or not optional:
        yield path
    yield from sorted(path.with_name(path.name + ".d").glob("*.toml"))


def _read(reader: Reader) -> Config:
    reader.expect((), [*_SECTIONS, "groups", "jobs", "limits", "backends"])
    sections: dict[str, Any] = {}
    for name, kind in _SECTIONS.items():
        sections[name] = reader.section((name,), kind)
        reader.expect((name,), _names(kind))
    sections["peers"] = with_usual_auth(sections["peers"])
    daemon = sections["daemon"]
    if not daemon.host:
        sections["daemon"] = replace(daemon, host=socket.gethostname())
    groups = tuple(_read_group(reader, name) for name in reader.table(("groups",)))
    jobs = tuple(_read_job(reader, name) for name in reader.table(("jobs",)))
    limits = _read_limits(reader, sections["memory"])
    named = [sections["daemon"], *groups, *jobs]
    backends = _read_backends(
        reader, {n for one in named for way in one.backend for n in way.split("+")}
    )
    origins = {".".join(key): origin for key, origin in reader.origins.items()}
    warnings = tuple(map(str, reader.unknown))
    return Config(
        **sections,
        groups=groups,
        jobs=jobs,
        limits=limits,
        backends=backends,
        warnings=warnings,
        origins=origins,
    )


def _read_backends(reader: Reader, chosen: Collection[str]) -> BackendSettings:
    path = ("backends",)
    reader.expect(path, dict.fromkeys([*OWN_TABLES, *registered_backends(), *sorted(chosen)]))
    own = {}
    for name, kind in OWN_TABLES.items():
        reader.expect((*path, name), _names(kind))
        own[name] = reader.section((*path, name), kind)
    tables = {name: reader.table((*path, name)) for name in reader.table(path)}
    foreign = {name: table for name, table in tables.items() if name not in OWN_TABLES}
    return BackendSettings(**own, others=foreign)


def _read_limits(reader: Reader, memory: MemorySettings) -> Limits:
    path = ("limits",)
    # One table holds them all: who sets a limit need not know which part of the daemon keeps it.
    core_names = [name for name in _names(CoreLimits) if name not in CORE_ELSEWHERE]
    reader.expect(path, [*core_names, *_names(ServerLimits)])
    core = reader.section(path, CoreLimits, rules=CORE_RULES)
    core = replace(core, **{name: getattr(memory, name) for name in CORE_ELSEWHERE})
    server = reader.section(path, ServerLimits)
    return reader.section(path, Limits, fixed={"core": core, "server": server})


def _names(kind: type[Any]) -> list[str]:
    return [item.name for item in fields(kind)]


def _read_group(reader: Reader, name: str) -> GroupSettings:
    path = ("groups", name)
    reader.expect(path, [known for known in _names(GroupSettings) if known != "name"])
    if not _GROUP_NAME.fullmatch(name):
        reader.fail(path, "a group's name has 1 to 64 letters, digits and . _ -")
    group = reader.section(path, GroupSettings, fixed={"name": name})
    if reader.has_table(path) and not reader.table(path).get("devices"):
        reader.fail((*path, "devices"), 'a group needs devices, such as ["n1:0-3"]')
    for text in group.devices:
        mistake = _mistake_in(text)
        if mistake is not None:
            reader.fail((*path, "devices"), mistake)
    return group


def _read_job(reader: Reader, name: str) -> JobSettings:
    path = ("jobs", name)
    reader.expect(path, [known for known in _names(JobSettings) if known != "name"])
    return reader.section(path, JobSettings, fixed={"name": name})


def _mistake_in(devices: str) -> str | None:
    try:
        parse_devices(devices)
    except ValueError as exc:
        return str(exc)
    return None


def _cross_checks(config: Config) -> Iterator[Problem]:
    core, server = config.limits.core, config.limits.server
    if core.retry_min_s > core.retry_max_s:
        yield _problem(
            config,
            "limits.retry_min_s",
            f"{core.retry_min_s:g} s is more than retry_max_s, {core.retry_max_s:g} s",
        )
    holds: list[tuple[tuple[str, ...], float | None]]
    holds = [(("limits", "max_hold_s"), core.max_hold_s)]
    holds += [(("groups", group.name, "max_hold_s"), group.max_hold_s) for group in config.groups]
    for path, limit_s in holds:
        if limit_s is not None and limit_s <= core.hold_warning_s:
            warning_s = f"limits.hold_warning_s, {core.hold_warning_s:g} s"
            text = f"{limit_s:g} s leave no time for a warning: it must be more than {warning_s}"
            yield Problem(config.origin(*path), ".".join(path), text)
    for part, whole in (
        ("max_clients_per_uid", "max_clients"),
        ("max_sessions_per_uid", "max_sessions"),
        ("max_pending_requests", "max_pending_requests_per_uid"),
        ("max_send_buffer_bytes", "max_buffered_bytes"),
    ):
        # A default may be more than a whole that was made small: then the whole is what counts.
        is_set = f"limits.{part}" in config.origins
        if is_set and getattr(server, part) > getattr(server, whole):
            text = f"{getattr(server, part)} is more than {whole}, {getattr(server, whole)}"
            yield _problem(config, f"limits.{part}", text)
    if not config.daemon.backend:
        yield _problem(config, "daemon.backend", "at least one backend has to be named")
        return
    for mistake in check_backends(config.backends, config.ways().names()):
        yield _problem(config, f"backends.{mistake.key}", mistake.text)
    yield from check_peers(config)
    yield from check_hosts(config)
    yield from check_overlaps(config)
    for group in config.groups:
        yield from check_barrier(config, group.name, count_ranks(config, group))


def _problem(config: Config, key: str, text: str) -> Problem:
    return Problem(config.origin(*key.split(".")), key, text)


def describe(config: Config) -> str:
    """Return the effective configuration as TOML, each value with where it was set."""
    lines = [f"# read: {', '.join(config.files) or 'no file'}"]
    for name in _SECTIONS:
        lines += ["", f"[{name}]", *_describe_fields(config, (name,), getattr(config, name))]
    lines += ["", "[limits]"]
    for part in (config.limits, config.limits.core, config.limits.server):
        lines += _describe_fields(config, ("limits",), part)
    for name in OWN_TABLES:
        path = ("backends", name)
        lines += ["", f"[backends.{name}]"]
        lines += _describe_fields(config, path, getattr(config.backends, name))
    for name, table in config.backends.others.items():
        lines += ["", f"[backends.{json.dumps(name)}]"]
        lines += [
            f"{key} = {_toml(value)}  # {config.origin('backends', name, key)}"
            for key, value in table.items()
        ]
    for group in config.groups:
        # A name may hold dots, which would make tables of it.
        lines += ["", f"[groups.{json.dumps(group.name)}]"]
        lines += _describe_fields(config, ("groups", group.name), group)
    for job in config.jobs:
        lines += ["", f"[jobs.{json.dumps(job.name)}]"]
        lines += _describe_fields(config, ("jobs", job.name), job)
    return "\n".join(lines) + "\n"


def _describe_fields(config: Config, path: tuple[str, ...], settings: Any) -> Iterator[str]:
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name == "name" or isinstance(value, CoreLimits | ServerLimits):
            continue
        if isinstance(settings, CoreLimits) and item.name in CORE_ELSEWHERE:
            continue
        origin: Origin = config.origin(*path, item.name)
        if value is None:
            yield f"# {item.name} is not set"
        else:
            yield f"{item.name} = {_toml(value)}  # {origin}"


def _toml(value: object) -> str:
    """Return a value as TOML, which is JSON for all types used here but tables."""
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
