"""Runs a command in a terminal of its own: a real pty, whose screen pyte works out."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyte

LIMIT_S = 30.0
#: What a terminal is told to show another screen, and to show the first one again.
ALTERNATE, USUAL = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A context manager: the command runs inside, and is killed if it still does at the end."""

    def __init__(
        self, command: Sequence[str], *, columns: int = 80, lines: int = 24, **environment: str
    ) -> None:
        self._command = command
        self._environment = {**os.environ, "TERM": "xterm-256color", **environment}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            self._environment.pop(name, None)
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        #: All that was written.
        self.written = b""

    def __enter__(self) -> Terminal:
        self._ours, self._theirs = os.openpty()
        self._resize()
        self.mode: list[Any] = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(
            self._command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=self._environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._ours)
        os.close(self._theirs)

    def _resize(self) -> None:
        size = struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def resize(self, columns: int, lines: int) -> None:
        """Gives the terminal another size, as somebody who drags a window does."""
        self.screen.resize(lines, columns)
        self._resize()

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._ours, text.encode())

    def text(self) -> str:
        """Returns what the screen shows, without blanks at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def read(self, limit_s: float = 0.05) -> None:
        """Takes in what the command writes."""
        if select.select([self._ours], [], [], limit_s)[0]:
            data = os.read(self._ours, 1 << 16)
            self.written += data
            self._stream.feed(data)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Reads until something is true."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"{what}, but it shows:\n{self.text()}"
            self.read()

    def until_shown(self, *words: str) -> None:
        """Reads until all words stand on the screen."""
        self.until(lambda: all(word in self.text() for word in words), f"it shows {words}")

    def is_as_before(self) -> bool:
        """Whether the terminal's mode is what it was, and its usual screen is shown."""
        usual = self.written.rfind(USUAL) > self.written.rfind(ALTERNATE)
        return usual and termios.tcgetattr(self._theirs) == self.mode

    def wait(self) -> int:
        """Reads to the end and returns the exit code of the command."""
        self.until(lambda: self.process.poll() is not None, "the command ends")
        self.read()
        return self.process.wait(LIMIT_S)

    def state(self) -> str:
        """Returns the letter that the kernel has for the process's state."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    def signal(self, number: signal.Signals) -> None:
        """Signals the command."""
        self.process.send_signal(number)
