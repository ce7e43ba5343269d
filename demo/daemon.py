"""A daemon of the demo's own: its configuration, its process and its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from demo.hardware import HOST, Hardware
from libtimeslice.connection import Connection
from libtimeslice.errors import Unavailable
from libtimeslice.fields import MAX_EVENTS
from libtimeslice.protocol import Message

GROUP = "demo"
START_LIMIT_S = 15.0
STOP_LIMIT_S = 10.0
REPLY_LIMIT_S = 10.0
#: So much of the log is shown when something went wrong.
LOG_LINES = 40


class DemoError(Exception):
    """The demo cannot go on; the text says why and what to do."""


class Daemon:
    """The running daemon: a context manager that ends it."""

    def __init__(self, hardware: Hardware, directory: Path, *, backend: str = "cuda") -> None:
        self.socket = directory / "tsliced.sock"
        self._log = directory / "tsliced.log"
        self._config = directory / "tsliced.toml"
        self._config.write_text(configuration(hardware, directory, self.socket, backend))
        self._environment = {**os.environ, **hardware.environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Daemon:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tsliced", "--config", self._config],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the conductor, which ends the jobs before the daemon.
                start_new_session=True,
            )
        try:
            self._connect()
        except DemoError as error:
            self.stop()
            raise DemoError(f"{error}; its log ends with:\n{self.log_tail()}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the daemon: asks it, and after a while no longer asks."""
        if self._connection is not None:
            self._connection.close()
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_LIMIT_S)

    def status(self) -> Message:
        """Returns what the daemon says of its groups and jobs."""
        return dict(self._ask("status")["status"])

    def events(self, since: int) -> tuple[list[Message], int]:
        """Returns the events from number ``since`` on, and the number of the next one."""
        answer = self._ask("events", since=since, follow=False, limit=MAX_EVENTS)
        return answer["events"], answer["next"]

    def log_tail(self) -> str:
        """Returns the last lines of the log."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(lines[-LOG_LINES:])

    def _ask(self, request: str, **fields: object) -> Message:
        assert self._connection is not None, "the daemon is started"
        try:
            return self._connection.request({"t": request, **fields}, REPLY_LIMIT_S)
        except (Unavailable, TimeoutError) as error:
            raise DemoError(f"the daemon no longer answers: {error}") from error

    def _connect(self) -> None:
        assert self._process is not None
        give_up_at = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self._connection = Connection.open(str(self.socket), limit_s=REPLY_LIMIT_S)
                return
            except Unavailable as error:
                code = self._process.poll()
                if code is not None:
                    raise DemoError(f"the daemon ended at once, with exit code {code}") from error
                if time.monotonic() > give_up_at:
                    raise DemoError(f"no daemon within {START_LIMIT_S:.0f} s: {error}") from error
            time.sleep(0.05)


def configuration(hardware: Hardware, directory: Path, socket: Path, backend: str) -> str:
    """Returns the daemon's configuration: one group with all devices, for whoever runs the demo."""
    lines = [
        "[daemon]",
        f'socket = "{socket}"',
        f'state_dir = "{directory / "state"}"',
        f'host = "{HOST}"',
        f'backend = "{backend}"',
    ]
    if hardware.nvml_library and hardware.cuda_library:
        lines += [
            f'nvml_library = "{hardware.nvml_library}"',
            f'cuda_library = "{hardware.cuda_library}"',
        ]
    lines += [
        f"[groups.{GROUP}]",
        # A list of plain strings is written in TOML as in JSON.
        f"devices = {json.dumps(hardware.devices)}",
        f'users = ["{os.getuid()}"]',
        # A run of seconds: how busy the devices are is told as often as they are looked at.
        "[history]",
        "sample_s = 1.0",
    ]
    if backend == "torch":
        # The context of each rank stays, with what torch's libraries have in it.
        lines += ["[memory]", 'max_residue_bytes = "2 GiB"']
    if not hardware.is_real:
        # The states are small, and so may the machine be.
        lines += ["[memory]", 'snapshot_margin_bytes = "16 MiB"', 'host_margin_bytes = "128 MiB"']
    return "\n".join(lines) + "\n"
