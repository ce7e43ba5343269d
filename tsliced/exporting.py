"""Metrics of this daemon: joins what its parts know, and serves it as `[metrics]` says."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from libtimeslice.fields import MAX_EVENTS
from tsliced.config import MetricsSettings
from tsliced.driver import Driver
from tsliced.host.history import Fact
from tsliced.host.memory import HostMemory
from tsliced.net.listening import ListenError
from tsliced.net.metrics_endpoint import MetricsEndpoint, listen_for_scrapes
from tsliced.net.server import Server
from tsliced.observe.accounts import Accounts

if TYPE_CHECKING:
    from tsliced.observe.metrics import MetricsPage

#: How often it is looked at how late the event loop is.
LAG_INTERVAL_S: Final = 1.0


def open_for_scrapes(settings: MetricsSettings) -> socket.socket | None:
    """Return what to serve metrics on, if that is configured. Raises `ListenError`."""
    if settings.listen is None:
        return None
    if find_spec("prometheus_client") is None:
        text = "metrics need the Python package prometheus-client: install it"
        raise ListenError(f"{text}, or leave metrics.listen out")
    return listen_for_scrapes(settings.listen)


@asynccontextmanager
async def exporting(
    settings: MetricsSettings, sock: socket.socket, driver: Driver, server: Server
) -> AsyncIterator[None]:
    """Serve metrics on a listening socket meanwhile."""
    page = _make_page(driver, server)
    history = driver.around.history

    def on_event(at_unix: float, kind: str, level: str, facts: Mapping[str, Fact]) -> None:
        page.running.accounts.count(at_unix, kind, level, facts)
        if kind == "operation":
            page.note_parked()

    def on_error(reason: str) -> None:
        driver.note("bug", "error", reason=f"answering a scrape: {reason}")

    lag = asyncio.create_task(_look_at_lag(page), name="loop lag")
    history.listener = on_event
    try:
        async with MetricsEndpoint(settings, page.chunks, on_error).serving(sock):
            yield
    finally:
        history.listener = None
        lag.cancel()


def _make_page(driver: Driver, server: Server) -> MetricsPage:
    # Only where metrics are wanted: it takes some MiB of memory.
    from tsliced.observe.metrics import MetricsPage, Running

    around, now_unix = driver.around, time.time()
    # Who holds what, from before this run.
    before = around.history.since(None, MAX_EVENTS).events
    accounts = Accounts(since_unix=now_unix).add_all(before)
    return MetricsPage(
        machine=driver.machine,
        status=server.status,
        told=server.told,
        sampler=driver.sampler,
        journal=around.journal,
        running=Running(accounts=accounts, started_unix=now_unix),
        catch_up=driver.catch_up,
        memory=HostMemory(),
    )


async def _look_at_lag(page: MetricsPage) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        page.running.add_lag(max(0.0, loop.time() - due))
