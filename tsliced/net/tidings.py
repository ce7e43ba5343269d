"""What clients tell of themselves without being asked: phases, progress, backlog, signs of life."""

from __future__ import annotations

from libtimeslice.protocol import Heartbeat, PhaseMark, Progress, QueueDepth, WatchdogNotice
from tsliced.core.events import SignOfLife, WatchdogTold
from tsliced.driver import Driver
from tsliced.net.client import Client


class Tidings:
    """Adds what clients tell to log and history. All methods belong to the event loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def on_phase(self, client: Client, mark: PhaseMark) -> None:
        """A named phase began or ended."""
        job = str(client.job)
        self._driver.note("phase", "info", job=job, name=mark.name, begin=mark.begin)
        self._heard(client)

    def on_progress(self, client: Client, progress: Progress) -> None:
        """Figures of the job's own."""
        self._driver.note("progress", "info", **{**progress.fields, "job": str(client.job)})
        self._heard(client)

    def on_queue(self, client: Client, queue: QueueDepth) -> None:
        """The backlog between two stages of the job."""
        self._driver.note(
            "queue",
            "info",
            job=str(client.job),
            name=queue.name,
            depth=queue.depth,
            target=queue.target,
        )
        self._heard(client)

    def on_heartbeat(self, client: Client, _heartbeat: Heartbeat) -> None:
        """Nothing but a sign of life."""
        self._heard(client)

    def on_watchdog(self, client: Client, notice: WatchdogNotice) -> None:
        """The watchdogs of the client's process are others by now."""
        self._driver.post(WatchdogTold(session=client.session, limit_s=notice.limit_s))

    def _heard(self, client: Client) -> None:
        """Know that the client's own code goes on; what its library does by itself is no sign."""
        if client.heartbeats:
            self._driver.post(SignOfLife(session=client.session))
