"""Configuration: TOML files to frozen dataclasses.

`load` reads and checks, `resolve_groups` turns device shorthand into UUIDs once the devices are
known, `describe` shows the effective values with where each was set.
"""

from __future__ import annotations

from tsliced.config.backends import BackendSettings
from tsliced.config.groups import hosts_of, visible_of
from tsliced.config.loading import DEFAULT_PATH, ConfigSource, describe, load
from tsliced.config.peers import (
    LOCAL,
    PeerAddress,
    known_groups,
    listen_address,
    peer_addresses,
    shared_groups,
)
from tsliced.config.reader import ConfigError, Origin, Problem
from tsliced.config.resolving import resolve_groups
from tsliced.config.settings import (
    AuthoritySettings,
    Config,
    DaemonSettings,
    GroupSettings,
    HistorySettings,
    Limits,
    MemorySettings,
    MetricsSettings,
    PeerSettings,
    ScanSettings,
    ServerLimits,
    SlurmSettings,
)
from tsliced.config.user import user_config, user_defaults

__all__ = [
    "DEFAULT_PATH",
    "LOCAL",
    "AuthoritySettings",
    "BackendSettings",
    "Config",
    "ConfigError",
    "ConfigSource",
    "DaemonSettings",
    "GroupSettings",
    "HistorySettings",
    "Limits",
    "MemorySettings",
    "MetricsSettings",
    "Origin",
    "PeerAddress",
    "PeerSettings",
    "Problem",
    "ScanSettings",
    "ServerLimits",
    "SlurmSettings",
    "describe",
    "hosts_of",
    "known_groups",
    "listen_address",
    "load",
    "peer_addresses",
    "resolve_groups",
    "shared_groups",
    "user_config",
    "user_defaults",
    "visible_of",
]
