"""`tsliced --user`: where the daemon of a single user has its files, and whom it serves."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from libtimeslice.environment import user_socket


def user_config(environ: Mapping[str, str]) -> Path:
    """Return where a user's own configuration is, if there is any."""
    return _base(environ, "XDG_CONFIG_HOME", ".config") / "tsliced" / "tsliced.toml"


def user_defaults(environ: Mapping[str, str]) -> dict[str, object]:
    """Return what is different for a daemon with one user's rights, by dotted key.

    Files and the command line win over it.
    """
    defaults: dict[str, object] = {
        "daemon.socket": user_socket(environ),
        # A home directory may be that of many hosts.
        "daemon.state_dir": str(
            _base(environ, "XDG_STATE_HOME", ".local/state") / "tsliced" / socket.gethostname()
        ),
        "authority.clients": "own",
        # It has no right to look, and all its jobs are in its own allocation.
        "authority.device_cgroup": "off",
    }
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        defaults["daemon.visible_devices"] = visible
    return defaults


def _base(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    """Return a base directory as the XDG specification has it, which ignores relative paths."""
    given = environ.get(variable, "")
    return Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), below_home)
