"""A network of hosts on one machine: a namespace for each, and a switch that this process is.

The switch is a thread that carries frames between TAP devices, so it can lose, delay or keep back
what it likes, in one direction too; many kernels lack ``tc netem``. Needs root.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

LIMIT_S = 30.0
_TUN = Path("/dev/net/tun")
# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MOST_BYTES = 1 << 16


def ip(*arguments: str) -> str:
    """Runs ip(8), which must succeed, and returns what it prints."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def skip_without_namespaces() -> None:
    """Skips the test where hosts cannot have networks of their own."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not _TUN.exists():
        pytest.skip("needs root, ip(8) and /dev/net/tun, for network namespaces")


class Network:
    """Network namespaces, by the names of their hosts, that reach each other by a switch.

    All methods may be called at any time; what they change holds for the next frame.
    """

    #: Networks of this process, which may live side by side and have hosts of the same names.
    _numbers = itertools.count()

    def __init__(self, *names: str) -> None:
        self._number = next(self._numbers)
        # For tests alone (RFC 2544).
        self.addresses = {name: f"198.18.7.{number}" for number, name in enumerate(names, start=1)}
        #: How long a frame takes, and which share of them never arrives.
        self.delay_s = 0.0
        self.loss = 0.0
        self._cut: frozenset[tuple[str, str]] = frozenset()
        self._ports: dict[int, str] = {}
        self._where: dict[bytes, int] = {}
        self._random = random.Random(7)
        #: When it is due, a number that keeps the order, to which port, and what.
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._carried = 0
        self._stop_reading, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="switch", daemon=True)
        try:
            for name, address in self.addresses.items():
                self._add(name, address)
        except BaseException:
            self._discard()
            raise
        self._thread.start()

    def namespace(self, name: str) -> str:
        """Returns what the system calls the namespace of a host."""
        return f"ts{os.getpid()}-{self._number}-{name}"

    def inside(self, name: str) -> tuple[str, ...]:
        """Returns a command that runs what it is given in the namespace of a host."""
        return ("ip", "netns", "exec", self.namespace(name))

    def pids(self, name: str) -> list[int]:
        """Returns all processes in the namespace of a host."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace(name)).split()]

    # --- what goes wrong ----------------------------------------------------------------------

    def cut(self, *ways: tuple[str, str]) -> None:
        """Carries nothing more from one host to another, for each such way."""
        self._cut |= set(ways)

    def isolate(self, name: str) -> None:
        """Carries nothing more to and from a host."""
        others = [other for other in self.addresses if other != name]
        self.cut(*((name, other) for other in others), *((other, name) for other in others))

    def rejoin(self, name: str) -> None:
        """Carries everything to and from a host again."""
        self._cut = frozenset(way for way in self._cut if name not in way)

    def heal(self) -> None:
        """Carries everything again, at once."""
        self._cut, self.delay_s, self.loss = frozenset(), 0.0, 0.0

    # --- the switch ---------------------------------------------------------------------------

    def _add(self, name: str, address: str) -> None:
        namespace, device = self.namespace(name), f"t{os.getpid()}{name}"[:15]
        port = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ports[port] = name
        request = struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(port, _TUNSETIFF, request)
        ip("netns", "add", namespace)
        ip("link", "set", device, "netns", namespace, "name", "eth0")
        ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", namespace, "link", "set", link, "up")

    def _carry(self) -> None:
        poll = select.poll()
        for descriptor in (self._stop_reading, *self._ports):
            poll.register(descriptor, select.POLLIN)
        while True:
            wait_ms = None
            if self._under_way:
                wait_ms = max(0.0, self._under_way[0][0] - time.monotonic()) * 1000
            for descriptor, _ in poll.poll(wait_ms):
                if descriptor == self._stop_reading:
                    return
                # None is left when another reader was faster, and an interface may be down.
                with suppress(OSError):
                    self._take(descriptor, os.read(descriptor, _MOST_BYTES))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(self._under_way)
                self._hand_over(port, frame)

    def _take(self, came_from: int, frame: bytes) -> None:
        """Sends a frame on its way, as a switch does that learns who is where."""
        target, source = frame[:6], frame[6:12]
        self._where[source] = came_from
        known = self._where.get(target)
        for port in self._ports if known is None else (known,):
            way = (self._ports[came_from], self._ports[port])
            if port == came_from or way in self._cut or self._random.random() < self.loss:
                continue
            if self.delay_s:
                self._carried += 1
                due_at = time.monotonic() + self.delay_s
                heapq.heappush(self._under_way, (due_at, self._carried, port, frame))
            else:
                self._hand_over(port, frame)

    def _hand_over(self, port: int, frame: bytes) -> None:
        # What does not fit is lost, as everywhere.
        with suppress(OSError):
            os.write(port, frame)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes all of it away. What runs in the namespaces must have ended."""
        os.write(self._stop, b"x")
        self._thread.join(LIMIT_S)
        self._discard()

    def _discard(self) -> None:
        for descriptor in (*self._ports, self._stop_reading, self._stop):
            os.close(descriptor)
        for name in self.addresses:
            command = ["ip", "netns", "delete", self.namespace(name)]
            subprocess.run(command, capture_output=True, timeout=LIMIT_S)
