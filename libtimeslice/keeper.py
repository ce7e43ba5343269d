"""A thread that notices a lost connection at once, also while nobody calls the library.

A training step may take an hour, and the daemon keeps the lease of a lost connection for seconds to
minutes only. So each client has a thread that sleeps until the other side hangs up, and then opens
the connection again. It reads nothing: on the request path it does not exist.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import weakref
from typing import Protocol

from libtimeslice.errors import TimeSliceError
from libtimeslice.link import wait_for_hangup

logger = logging.getLogger("libtimeslice")

#: The thread looks this often whether its client still exists, seconds.
_LOOK_S = 60.0


class Kept(Protocol):
    """What a keeper needs of its client."""

    def keep_connected(self, hung_up: socket.socket | None) -> socket.socket | None:
        """Returns the socket of a good connection, opening one if need be; None ends the keeper.

        `hung_up` is the socket whose other side closed, if the keeper saw that. Raises
        TimeSliceError if the session had to be given up.
        """


class Keeper:
    """Keeps one client connected, from `start` until the client is closed or gone."""

    def __init__(self, kept: Kept) -> None:
        # Weak, so that a client that nobody uses any more is collected and its connection closed.
        self._kept = weakref.ref(kept)
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Makes sure that the thread watches. Does nothing where no thread can start any more."""
        self._wanted.set()
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(
            target=_keep, args=(self._kept, self._wanted), name="timeslice-keeper", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Wakes the thread, so that it sees that its client is closed."""
        self._wanted.set()


def _keep(kept: weakref.ref[Kept], wanted: threading.Event) -> None:
    sock: socket.socket | None = None
    while True:
        wanted.clear()
        try:
            sock = _connected(kept, sock)
        except TimeSliceError as error:
            logger.warning("the session was given up: %s", error)
            # Somebody will connect again, and call `start` when it is done.
            while not wanted.wait(_LOOK_S):
                if kept() is None:
                    return
            sock = None
            continue
        if sock is None:
            return
        while not wait_for_hangup(sock, limit_s=_LOOK_S):
            if kept() is None:
                return


def _connected(kept: weakref.ref[Kept], hung_up: socket.socket | None) -> socket.socket | None:
    client = kept()
    return None if client is None else client.keep_connected(hung_up)
