"""Connections that outlive a daemon, because the service manager keeps them (its fd store).

What was in flight on such a connection when its daemon died is not known: a request may have been
read and not answered, a frame may be half read or half written. So its bytes are never used again.
The next daemon ends its own direction, whereupon the client, having lost nothing but a connection,
opens another one and repeats what was not answered; that it may do so when it gets to it is what
the kept connection is for. As long as the kernel says that the client has its end open, the client
is there, and no clock runs against its session: be it stopped, or without a thread to spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Protocol

from tsliced.core.model import SessionId
from tsliced.net.listening import KEPT_PREFIX

READ_BYTES = 1 << 16


class Vault(Protocol):
    """Who keeps descriptors over a restart."""

    def store(self, name: str, descriptor: int) -> bool:
        """Keep a descriptor for the next daemon; return whether it was taken."""
        ...

    def drop(self, name: str) -> None:
        """Close a descriptor that is kept."""
        ...


def name_of(session: SessionId) -> str:
    """Return a name under which to keep a connection of a session; each time another one.

    An old connection that is dropped late must not take the new one with it.
    """
    return f"{KEPT_PREFIX}{session}-{secrets.token_hex(4)}"


def session_of(name: str) -> SessionId:
    """Return the session whose connection is kept under a name."""
    return SessionId(name.removeprefix(KEPT_PREFIX).rpartition("-")[0])


class Kept:
    """The service manager's hold on a connection of this daemon."""

    def __init__(self, name: str, vault: Vault) -> None:
        self._name = name
        self._vault = vault
        self._twin: socket.socket | None = None

    def on_closing(self, descriptor: int) -> None:
        """Provide for `end`, while the connection's own descriptor is open still.

        The client does not see that closed as long as the manager has another.
        """
        if self._twin is None:
            with contextlib.suppress(OSError):  # out of descriptors: then it ends a little later
                self._twin = socket.socket(fileno=os.dup(descriptor))

    def end(self) -> None:
        """Let go of it, now that all is sent."""
        if self._twin is not None:
            end(self._twin)
            self._twin.close()
        self._vault.drop(self._name)


class Survivor:
    """A connection of an earlier daemon, kept open until its client leaves it."""

    def __init__(
        self, name: str, sock: socket.socket, vault: Vault, on_gone: Callable[[Survivor], None]
    ) -> None:
        self._name = name
        self._sock = sock
        self._vault = vault
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it is gone already, as reading will tell
            sock.shutdown(socket.SHUT_WR)
        self._loop.add_reader(sock, self._read)

    def _read(self) -> None:
        try:
            if self._sock.recv(READ_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.close()
        self._on_gone(self)

    def close(self) -> None:
        """Let go of it."""
        self._loop.remove_reader(self._sock)
        self._vault.drop(self._name)
        end(self._sock)
        self._sock.close()

    def leave(self) -> None:
        """Leave it to the next daemon."""
        self._loop.remove_reader(self._sock)
        self._sock.close()


def end(sock: socket.socket) -> None:
    """End a connection for its client, although the service manager has it open still."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
