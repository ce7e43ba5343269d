"""What a client is told by its caller and by the environment: one immutable `Settings`.

This is the only module that reads environment variables:

* `TSLICE_SOCKET`: path of the daemon's socket; else `/run/tsliced/tsliced.sock` if that exists,
  else the socket of a `tsliced --user`, by `XDG_RUNTIME_DIR` or `TMPDIR`.
* `TSLICE_JOB_ID`: the job's id; else the daemon finds it out from the process.
* `TSLICE_MODE`: `require` (default), `auto` or `off`.
* `TSLICE_GROUPS`: names of roles and their groups, `trainer=n1,n2;sampler=n3`.
* `TSLICE_HEARTBEAT_S`: how often the job promises a sign of life while it holds a lease.
* `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` and `TORCH_NCCL_ENABLE_MONITORING`, as PyTorch reads them.
* `WORLD_SIZE`: how many ranks take part in a round, as torchrun and others set it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from libtimeslice.fields import (
    MAX_GROUPS,
    MAX_NAME,
    MAX_RANKS,
    MAX_TIMEOUT_S,
    MIN_HEARTBEAT_S,
)

DEFAULT_SOCKET = "/run/tsliced/tsliced.sock"


class Mode(str, Enum):
    """What a client does where there is no daemon."""

    #: Never talks to a daemon: every lease is granted at once.
    OFF = "off"
    #: Runs unshared, with one warning, if no socket exists and none ever answered.
    AUTO = "auto"
    #: Raises.
    REQUIRE = "require"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A client's configuration. A client pickles as this, and starts afresh where it is loaded."""

    #: None: the environment of the process that uses the client decides.
    socket: str | None = None
    job: str | None = None
    mode: Mode = Mode.REQUIRE
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Ranks of a round unless a call says otherwise; None: `WORLD_SIZE` where the client is used.
    ranks: int | None = None
    #: Longest time for a first connection, seconds.
    connect_timeout_s: float = 10.0
    #: Longest time for an answer to anything but an acquire, seconds.
    reply_limit_s: float = 30.0
    #: Longest time that exit waits for a last turn on the devices, seconds; 0: does not ask.
    last_turn_s: float = 600.0
    #: A sign of life is promised at least so often while a lease is held, seconds; None: none is.
    heartbeat_s: float | None = None
    #: Finish device work, and free cached device memory if somebody waits, before a release.
    synchronize: bool = True

    def path(self, environ: Mapping[str, str] = os.environ) -> str:
        """The path of the daemon's socket, as this process sees it."""
        return find_socket(self.socket, environ)

    def round_of(self, ranks: int | None, environ: Mapping[str, str] = os.environ) -> int | None:
        """How many ranks must ask for one grant; None if the caller asks for itself alone."""
        chosen = ranks if ranks is not None else self.ranks
        if chosen is None:
            chosen = _world_size(environ)
        if not 1 <= chosen <= MAX_RANKS:
            raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, not {chosen}")
        return chosen if chosen > 1 else None

    def groups_of(self, names: str | Iterable[str] | None) -> tuple[str, ...] | None:
        """The groups behind names of roles and groups, each once; None (all) stays None."""
        if names is None:
            return None
        given = (names,) if isinstance(names, str) else tuple(names)
        groups = [group for name in given for group in self.aliases.get(name, (name,))]
        unique = tuple(dict.fromkeys(groups))
        if not 1 <= len(unique) <= MAX_GROUPS:
            raise ValueError(
                f"name 1 to {MAX_GROUPS} groups, or none at all for every group of the job; "
                f"these are {len(unique)}"
            )
        for group in unique:
            check_name("a group", group)
        return unique


def settings_from(
    *,
    socket: str | os.PathLike[str] | None = None,
    job: str | None = None,
    mode: str | Mode | None = None,
    groups: Mapping[str, str | Iterable[str]] | None = None,
    ranks: int | None = None,
    connect_timeout_s: float = 10.0,
    reply_limit_s: float = 30.0,
    last_turn_s: float = 600.0,
    heartbeat_s: float | None = None,
    synchronize: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Combines what a caller gave with the environment; what was given wins.

    Raises ValueError for a mode, alias or number that makes no sense.
    """
    aliases = _aliases(environ.get("TSLICE_GROUPS", ""))
    for role, named in (groups or {}).items():
        aliases[role] = (named,) if isinstance(named, str) else tuple(named)
    for name, seconds in (
        ("connect_timeout_s", connect_timeout_s),
        ("reply_limit_s", reply_limit_s),
    ):
        if not seconds > 0:
            raise ValueError(f"{name} must be positive, not {seconds}")
    return Settings(
        socket=os.fspath(socket) if socket is not None else None,
        # The job goes with the pickle: a worker that a driver hands its client to is of its job.
        job=job or environ.get("TSLICE_JOB_ID") or None,
        mode=_mode(mode or environ.get("TSLICE_MODE") or Mode.REQUIRE),
        aliases=aliases,
        ranks=ranks,
        connect_timeout_s=connect_timeout_s,
        reply_limit_s=reply_limit_s,
        last_turn_s=last_turn_s,
        heartbeat_s=_heartbeat_s(heartbeat_s, environ),
        synchronize=synchronize,
    )


def nccl_heartbeat_s(environ: Mapping[str, str], *, default: float | None) -> float | None:
    """How long PyTorch's monitor of NCCL waits before it ends the process, seconds.

    `default` where that is not set. None: there is no monitor, or it is not known.
    """
    monitored = environ.get("TORCH_NCCL_ENABLE_MONITORING", "1").strip().lower()
    if monitored in ("0", "f", "false", "n", "no"):
        return None
    try:
        seconds = float(environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"])
    except (KeyError, ValueError):
        return default
    return seconds if 0 < seconds <= MAX_TIMEOUT_S else default


def find_socket(given: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The path of the daemon's socket: as given, else by the environment, else by what exists."""
    if chosen := given or environ.get("TSLICE_SOCKET"):
        return socket_path(chosen)
    if not os.path.exists(DEFAULT_SOCKET):
        own = user_socket(environ)
        if _is_own_socket(own):
            return own
    return DEFAULT_SOCKET


def user_socket(environ: Mapping[str, str] = os.environ) -> str:
    """The path at which a `tsliced --user` of this user listens."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # In a batch job it may be that of a login elsewhere.
    if runtime.startswith("/") and os.path.isdir(runtime):
        return os.path.join(runtime, "tsliced", "tsliced.sock")
    directory = environ.get("TMPDIR") or "/tmp"
    return os.path.join(directory, f"tsliced-{os.getuid()}", "tsliced.sock")


def _is_own_socket(path: str) -> bool:
    """Whether a socket is there, in a directory into which nobody else could put it."""
    try:
        directory = os.lstat(os.path.dirname(path))
        return directory.st_uid == os.getuid() and stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def socket_path(target: str) -> str:
    """Takes `unix:/path`, `unix:///path` or a plain path, and returns the plain path."""
    if target.startswith("unix://"):
        return target[len("unix://") :]
    return target[len("unix:") :] if target.startswith("unix:") else target


def check_name(what: str, name: object) -> str:
    """Returns a name that the wire can carry, or raises ValueError."""
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable():
        return name
    raise ValueError(f"{what} needs a name of 1 to {MAX_NAME} printable characters, not {name!r}")


def _mode(given: str | Mode) -> Mode:
    try:
        return Mode(given)
    except ValueError:
        raise ValueError(f"mode must be 'off', 'auto' or 'require', not {given!r}") from None


def _heartbeat_s(given: float | None, environ: Mapping[str, str]) -> float | None:
    text = environ.get("TSLICE_HEARTBEAT_S")
    if given is None and not text:
        return None
    try:
        seconds = float(text or 0) if given is None else float(given)
    except ValueError:
        raise ValueError(f"TSLICE_HEARTBEAT_S must be a number of seconds, not {text!r}") from None
    if not MIN_HEARTBEAT_S <= seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"heartbeat_s must be at least {MIN_HEARTBEAT_S:g} s, not {seconds:g}")
    return seconds


def _aliases(text: str) -> dict[str, tuple[str, ...]]:
    aliases: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        role, equals, listed = entry.partition("=")
        groups = tuple(filter(None, (name.strip() for name in listed.split(","))))
        if not (equals and role.strip() and groups):
            raise ValueError(
                f"TSLICE_GROUPS must look like 'trainer=n1,n2;sampler=n3', and {entry!r} does not"
            )
        aliases[role.strip()] = groups
    return aliases


def _world_size(environ: Mapping[str, str]) -> int:
    text = environ.get("WORLD_SIZE") or "1"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"WORLD_SIZE must be a number, not {text!r}; or give ranks=") from None
