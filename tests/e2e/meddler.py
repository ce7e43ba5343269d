"""Somebody on the way between two daemons, who reads their frames and meddles with chosen ones."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Literal

LIMIT_S = 30.0

How = Literal["changed", "repeated", "left out", "held back"]


class Meddler:
    """Listens on loopback and carries each connection on to a port there. Use it in a `with`."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        #: The next frame with these bytes in it meets this.
        self._next: tuple[bytes, How] | None = None
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="meddler", daemon=True)

    def __enter__(self) -> Meddler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for sock in (self._listener, *self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join(LIMIT_S)

    def meddle(self, word: bytes, how: How) -> None:
        """Meddles with the next frame that has a word in it, whoever sends it."""
        with self._lock:
            self._next = (word, how)

    @property
    def is_done(self) -> bool:
        """Whether the frame has come."""
        return self._next is None

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                dialer, _ = self._listener.accept()
                try:
                    acceptor = socket.create_connection(("127.0.0.1", self._upstream), LIMIT_S)
                except OSError:
                    dialer.close()
                    continue
                acceptor.settimeout(None)
                self._open += [dialer, acceptor]
                self.connections += 1
                for ends in ((dialer, acceptor), (acceptor, dialer)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        held_back = b""
        with suppress(OSError), source.makefile("rb") as frames:
            while header := frames.read(4):
                frame = header + frames.read(int.from_bytes(header, "big"))
                how = self._fate_of(frame)
                if how == "held back":
                    held_back = frame
                    continue
                target.sendall(_meddled(frame, how) + held_back)
                held_back = b""
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _fate_of(self, frame: bytes) -> How | None:
        with self._lock:
            if self._next is None or self._next[0] not in frame:
                return None
            _, how = self._next
            self._next = None
            return how


def _meddled(frame: bytes, how: How | None) -> bytes:
    match how:
        case "changed":
            middle = len(frame) // 2
            return frame[:middle] + bytes([frame[middle] ^ 1]) + frame[middle + 1 :]
        case "repeated":
            return frame * 2
        case "left out":
            return b""
        case _:
            return frame
