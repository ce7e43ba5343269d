"""What clients tell of themselves without being asked: phases, progress, backlog, signs of life."""

from __future__ import annotations

import asyncio
import time

from libtimeslice.protocol import Heartbeat, PhaseMark, Progress, QueueDepth, WatchdogNotice
from tsliced.core.events import SignOfLife, WatchdogTold
from tsliced.driver import Driver
from tsliced.net.client import Client
from tsliced.observe.told import Told


class Tidings:
    """Hands on what clients tell. All methods belong to the event loop."""

    def __init__(self, driver: Driver, told: Told) -> None:
        self._driver = driver
        self._told = told
        self._timer: asyncio.TimerHandle | None = None

    def on_phase(self, client: Client, mark: PhaseMark) -> None:
        """A named phase began or ended."""
        on_mark = self._told.on_phase_begun if mark.begin else self._told.on_phase_ended
        on_mark(str(client.job), client.peer.process.pid, mark.name, time.monotonic())
        self._heard(client)

    def on_progress(self, client: Client, progress: Progress) -> None:
        """Figures of the job's own."""
        self._told.on_progress(str(client.job), progress.fields, time.monotonic())
        self._heard(client)

    def on_queue(self, client: Client, queue: QueueDepth) -> None:
        """The backlog between two stages of the job."""
        now = time.monotonic()
        self._told.on_queue(str(client.job), queue.name, queue.depth, queue.target, now)
        self._heard(client)

    def on_heartbeat(self, client: Client, _heartbeat: Heartbeat) -> None:
        """Nothing but a sign of life."""
        if client.heartbeats:
            self._driver.post(SignOfLife(session=client.session))

    def on_watchdog(self, client: Client, notice: WatchdogNotice) -> None:
        """The watchdogs of the client's process are others by now."""
        self._driver.post(WatchdogTold(session=client.session, limit_s=notice.limit_s))

    def on_gone(self, client: Client, *, was_last: bool) -> None:
        """A client's session is over, and it was the last one of its job or not."""
        job = str(client.job)
        self._told.on_process_gone(job, client.peer.process.pid, time.monotonic())
        if was_last:
            self._told.on_job_over(job)

    def close(self) -> None:
        """Write what is not written yet."""
        if self._timer is not None:
            self._timer.cancel()
        self._told.close()

    def _heard(self, client: Client) -> None:
        """Know that the client's own code goes on; what its library does by itself is no sign."""
        if client.heartbeats:
            self._driver.post(SignOfLife(session=client.session))
        if self._timer is None and self._told.behind:
            self._write_due()

    def _write_due(self) -> None:
        self._timer = None
        now = time.monotonic()
        if (due := self._told.write_due(now)) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.01, due - now), self._write_due)
