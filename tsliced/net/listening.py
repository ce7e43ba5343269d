"""The listening socket, made so that no second daemon and no stale file is in the way."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

#: Who may do what is decided by SO_PEERCRED, so everybody may connect.
SOCKET_MODE = 0o666
PRIVATE_SOCKET_MODE = 0o600
#: Of sun_path, without its NUL byte (man 7 unix).
MAX_PATH_BYTES = 107


class ListenError(Exception):
    """The socket cannot be made; the text says why and what to do."""


def listen(path: str, *, backlog: int, private: bool = False) -> socket.socket:
    """Return a listening Unix socket at `path`, in place of one that nobody serves any more.

    A `private` one is for this user and root alone, and so is its directory.

    Raises `ListenError`.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        text = f"the kernel takes paths of sockets of at most {MAX_PATH_BYTES} bytes: {path}"
        raise ListenError(text)
    if _is_served(path):
        raise ListenError(f"another daemon serves {path}; stop it first, or set daemon.socket")
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
