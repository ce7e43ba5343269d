"""sd_notify(3) without a library: what the daemon tells systemd, where systemd listens.

systemd-python does the same and needs a compiler and headers that many hosts lack.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence


class Notifier:
    """Sends state to the service manager; without one (no NOTIFY_SOCKET) it does nothing."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environ)
        self._status = ""

    @property
    def enabled(self) -> bool:
        """Whether somebody listens."""
        return bool(self._address)

    def send(self, *lines: str) -> bool:
        """Send lines such as ``READY=1``; return whether they were taken."""
        return self._send(lines)

    def status(self, text: str) -> None:
        """Show a line in ``systemctl status``; what is shown already is not sent again."""
        if text != self._status and self.send(f"STATUS={text}"):
            self._status = text

    def ready(self, text: str) -> None:
        """Say that it serves, after a start or a reload."""
        self.send("READY=1", f"STATUS={text}")
        self._status = text

    def reloading(self) -> None:
        """Say that a reload begins; `ready` ends it."""
        # systemd 253 and later tells this reload from an earlier one by the instant.
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    # --- descriptors that outlive the daemon --------------------------------------------------

    def store(self, name: str, descriptor: int) -> bool:
        """Have the manager keep a descriptor for the next daemon; return whether it was taken.

        That it is kept is not known: beyond FileDescriptorStoreMax= it is dropped in silence.
        """
        return self._send(("FDSTORE=1", f"FDNAME={name}"), [descriptor])

    def drop(self, name: str) -> None:
        """Have the manager close a descriptor that it keeps."""
        self._send(("FDSTOREREMOVE=1", f"FDNAME={name}"))

    def _send(self, lines: Sequence[str], descriptors: Sequence[int] = ()) -> bool:
        if not self._address:
            return False
        # An abstract socket is written with an @ for its leading NUL byte.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        data = "\n".join(lines).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                if descriptors:
                    sock.connect(address)
                    socket.send_fds(sock, [data], descriptors)
                else:
                    sock.sendto(data, address)
        except OSError:
            # A manager that does not listen must not keep anybody from work.
            return False
        return True


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """Return the watchdog's limit in seconds, if it is for this process."""
    usec = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
