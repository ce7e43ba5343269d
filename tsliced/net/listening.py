"""The listening socket, made so that no second daemon and no stale file is in the way.

A service manager may have made it already (sd_listen_fds(3)); then it passes it on, with the
connections that it kept of the daemon before this one (`survivors`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

#: Who may do what is decided by SO_PEERCRED, so everybody may connect.
SOCKET_MODE = 0o666
PRIVATE_SOCKET_MODE = 0o600
#: Of sun_path, without its NUL byte (man 7 unix).
MAX_PATH_BYTES = 107


#: The first descriptor that a service manager passes.
FIRST_PASSED: Final = 3
#: FileDescriptorName= of the socket unit.
LISTENER_NAME: Final = "control"
#: How the names of kept connections begin.
KEPT_PREFIX: Final = "c-"


class Inheritance(NamedTuple):
    """What the service manager passed to this process."""

    listener: socket.socket | None = None
    #: Connections that it kept, by the names that they were given.
    kept: tuple[tuple[str, socket.socket], ...] = ()


class ListenError(Exception):
    """The socket cannot be made; the text says why and what to do."""


def listen(
    path: str, *, backlog: int, private: bool = False, key: str = "daemon.socket"
) -> socket.socket:
    """Return a listening Unix socket at `path`, in place of one that nobody serves any more.

    A `private` one is for this user and root alone, and so is its directory.

    Raises `ListenError`.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        text = f"the kernel takes paths of sockets of at most {MAX_PATH_BYTES} bytes: {path}"
        raise ListenError(text)
    if _is_served(path):
        raise ListenError(f"another daemon serves {path}; stop it first, or set {key}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _bind(sock, Path(path), backlog, private=private)
    except ListenError:
        sock.close()
        raise
    except OSError as exc:
        sock.close()
        raise ListenError(f"cannot listen at {path}: {exc.strerror or exc}") from exc
    sock.setblocking(False)
    return sock


def inherit(environ: MutableMapping[str, str] | None = None) -> Inheritance:
    """Take over what the service manager passed, and hide it from the processes of this one.

    To be called once. What is not known by its name is closed.
    """
    environ = os.environ if environ is None else environ
    # Removed even if they are not for this process: then they are for nobody below it either.
    pid, count, names = (environ.pop(f"LISTEN_{key}", "") for key in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return Inheritance()
    listener: socket.socket | None = None
    kept: list[tuple[str, socket.socket]] = []
    labels = names.split(":")
    for place in range(int(count)):
        label = labels[place] if place < len(labels) else ""
        try:
            sock = socket.socket(fileno=FIRST_PASSED + place)
        except OSError:
            # Not a socket: nothing that this daemon, or an earlier one, had kept.
            continue
        sock.set_inheritable(False)
        sock.setblocking(False)
        listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        if label.startswith(KEPT_PREFIX) and not listens:
            kept.append((label, sock))
        elif listens and listener is None:
            listener = sock
        else:
            sock.close()
    return Inheritance(listener, tuple(kept))


def _bind(sock: socket.socket, path: Path, backlog: int, *, private: bool) -> None:
    """Bind under another name and rename: whoever finds the path finds a socket that listens."""
    path.parent.mkdir(mode=0o700 if private else 0o755, parents=True, exist_ok=True)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if private:
            _check_private(directory, path.parent)
        name = f".{path.name}.{os.getpid()}"
        # The other name is longer, and the path may be as long as it can be.
        temporary = f"/proc/self/fd/{directory}/{name}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        sock.bind(temporary)
        try:
            os.chmod(temporary, PRIVATE_SOCKET_MODE if private else SOCKET_MODE)
            sock.listen(backlog)
            os.rename(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            os.unlink(temporary)
            raise
    finally:
        os.close(directory)


def _check_private(directory: int, path: Path) -> None:
    """Refuse a directory that somebody else may have laid out, as one can in /tmp."""
    found = os.fstat(directory)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ListenError(
            f"{path} belongs to another user, or others may write there; "
            "take it away, or set daemon.socket"
        )


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return False
        except OSError:
            # Somebody is there and does not take us in at once.
            return True
        return True
