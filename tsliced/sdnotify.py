"""sd_notify(3) without a library: what the daemon tells systemd, where systemd listens.

systemd-python does the same and needs a compiler and headers that many hosts lack.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends state to the service manager; without one (no NOTIFY_SOCKET) it does nothing."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environ)

    @property
    def enabled(self) -> bool:
        """Whether somebody listens."""
        return bool(self._address)

    def send(self, *lines: str) -> bool:
        """Send lines such as ``READY=1``; return whether they were taken."""
        if not self._address:
            return False
        # An abstract socket is written with an @ for its leading NUL byte.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), address)
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
