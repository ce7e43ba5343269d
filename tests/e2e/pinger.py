"""A bystander that asks the daemon for a sign of life all the time, and notes how long it takes."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from types import TracebackType

from raw_client import RawClient


class Pinger:
    """Pings in a thread of its own while its ``with`` block runs."""

    def __init__(self, socket: Path) -> None:
        self._client = RawClient(socket)
        self._client.hello(role="tool")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ping, name="pinger")
        self._error: Exception | None = None
        self.seconds: list[float] = []

    def __enter__(self) -> Pinger:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self._client.socket.close()
        if self._error is not None and error is None:
            raise self._error

    @property
    def worst_s(self) -> float:
        """The longest wait for an answer so far."""
        return max(self.seconds)

    def __str__(self) -> str:
        median_ms, worst_ms = statistics.median(self.seconds) * 1e3, self.worst_s * 1e3
        return f"{len(self.seconds)} pings, median {median_ms:.2f} ms, worst {worst_ms:.1f} ms"

    def _ping(self) -> None:
        try:
            while not self._end.wait(0.005):
                began = time.monotonic()
                self._client.ask("ping")
                self.seconds.append(time.monotonic() - began)
        except (OSError, EOFError) as exc:
            self._error = exc
