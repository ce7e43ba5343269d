"""A server in a process of its own: started, pinned to a core, waited for, stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bench.machine import cpu_s, rss_bytes

ROOT = Path(__file__).resolve().parents[1]
#: Where daemons have their state: on a real file system, because that is where it is in production.
STATE = ROOT / "build" / "bench-state"

START_LIMIT_S = 30.0
STOP_LIMIT_S = 10.0
_LOOK_AGAIN_S = 0.02
_LOG_LINES = 20


class ServerError(Exception):
    """A server did not start; a note of the exception has the end of its log."""


class Server:
    """A process that listens at a Unix socket. Leaving the ``with`` stops it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        path: Path,
        core: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._log = log
        self._command = " ".join(command)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        # The interpreter has no second thread yet, so all its threads will be on that core.
        os.sched_setaffinity(self.pid, {core})

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Returns the processor time that the server has used, in seconds."""
        return cpu_s(self.pid)

    def rss_bytes(self) -> int:
        """Returns the server's resident memory, its children apart, in bytes."""
        return rss_bytes(self.pid)

    def wait_ready(self) -> None:
        """Waits until the socket accepts connections. Raises ServerError after the limit."""
        until = time.monotonic() + START_LIMIT_S
        while not _accepts(self.path):
            if self._process.poll() is not None:
                raise ServerError(f"it ended with status {self._process.returncode}")
            if time.monotonic() > until:
                raise ServerError(f"nothing listens at {self.path} after {START_LIMIT_S:g} s")
            time.sleep(_LOOK_AGAIN_S)

    def stop(self) -> None:
        """Ends the server, by force if it takes too long."""
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Server:
        try:
            self.wait_ready()
        except BaseException as error:
            self.stop()
            error.add_note(self._last_words())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error is not None:
            error.add_note(self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([f"The log of {self._command} ended with:", *lines])


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
