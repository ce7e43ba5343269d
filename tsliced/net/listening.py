"""The listening socket, made so that no second daemon and no stale file is in the way."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

#: Who may do what is decided by SO_PEERCRED, so everybody may connect.
SOCKET_MODE = 0o666


class ListenError(Exception):
    """The socket cannot be made; the text says why and what to do."""


def listen(path: str, *, backlog: int) -> socket.socket:
    """Return a listening Unix socket at `path`, in place of one that nobody serves any more.

    Raises `ListenError`.
    """
    if _is_served(path):
        raise ListenError(f"another daemon serves {path}; stop it first, or set daemon.socket")
    # Bound under another name and renamed: whoever finds the path finds a socket that listens.
    temporary = f"{path}.{os.getpid()}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        sock.bind(temporary)
        os.chmod(temporary, SOCKET_MODE)
        sock.listen(backlog)
        os.rename(temporary, path)
    except OSError as exc:
        sock.close()
        raise ListenError(f"cannot listen at {path}: {exc.strerror or exc}") from exc
    sock.setblocking(False)
    return sock


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
