"""How clients end: at the end of the process, when nobody uses them any more, and in a fork.

A process that used CUDA tears its contexts down after Python's exit handlers, with calls into the
driver. If the daemon has parked the process by then, those calls block until somebody restores it.
So a process that leaves asks for a last turn first, and leaves with the lease in its hands: the
kernel closes the connection with the process, and the daemon sees the process end.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Protocol

from libtimeslice import accelerator
from libtimeslice.base import logger
from libtimeslice.environment import Mode, Settings
from libtimeslice.errors import DaemonUnreachable, TimeSliceError
from libtimeslice.link import OutOfTime
from libtimeslice.session import Ask

if TYPE_CHECKING:
    from libtimeslice.aio_line import AsyncLine
    from libtimeslice.line import Line


class Leaver(Protocol):
    """What is needed of a client to let it go."""

    @property
    def holding(self) -> bool:
        """Whether it has a live lease."""

    def close_now(self) -> None:
        """Ends its session, in a moment at most."""

    def _start_afresh_in_child(self) -> None:
        """Drops what belongs to the parent process."""


_clients: weakref.WeakSet[Leaver] = weakref.WeakSet()
#: What clients that are closed or collected leased last, by socket and job.
_last_asks: dict[tuple[str, str | None], tuple[Settings, Ask | None]] = {}
#: The clients of last turns: their connections must stay open until the process is gone.
_last_turns: list[object] = []


def watch(client: Leaver) -> None:
    """Has a client closed at exit, and reset in forked children."""
    _clients.add(client)
    # Exit handlers run latest first. This one moves to the front again with each client, so that
    # what other libraries do with devices at exit comes after the last turn.
    atexit.unregister(leave)
    atexit.register(leave)


def settle(line: Line | AsyncLine) -> None:
    """Closes the line of a client that is closed or collected, and notes what it leased last."""
    if line.session.answered and _wants_turns(line.settings):
        settings = _settings_of(line)
        known = _last_asks.get((settings.path(), settings.job))
        ask = line.session.last_ask or (known[1] if known is not None else None)
        _last_asks[settings.path(), settings.job] = (settings, ask)
    line.close()


def come_back(line: Line | AsyncLine) -> None:
    """After a close: has the process's state brought back if it is parked, until the process ends.

    What the program does from here on, without a client, cannot ask for it any more.
    """
    if line.session.answered and _wants_turns(line.settings) and accelerator.in_use():
        _may_take_last_turn(_settings_of(line), None, leaving=False)


def _wants_turns(settings: Settings) -> bool:
    return settings.last_turn_s > 0 and settings.mode is not Mode.OFF


def _settings_of(line: Line | AsyncLine) -> Settings:
    return dataclasses.replace(line.settings, job=line.settings.job or line.session.job)


def leave() -> None:
    """At exit: closes all clients, and takes a last turn for each job if devices are in use."""
    on_devices = accelerator.in_use()
    holders = [client for client in list(_clients) if on_devices and client.holding]
    for client in list(_clients):
        if client not in holders:
            client.close_now()
    if on_devices and not holders:
        _take_last_turns()
    _last_turns.extend(holders)


def _take_last_turns() -> None:
    for settings, ask in list(_last_asks.values()):
        if not _may_take_last_turn(settings, ask, leaving=True):
            # That took its time; a process that leaves does not wait for daemon after daemon.
            return


def _may_take_last_turn(settings: Settings, ask: Ask | None, *, leaving: bool) -> bool:
    """Tries, and returns whether its daemon could be reached."""
    try:
        _take_last_turn(settings, ask, leaving=leaving)
    except (TimeSliceError, OutOfTime) as error:
        logger.warning("no last turn, so that leaving may block in the driver: %r", error)
        return not isinstance(error, (DaemonUnreachable, OutOfTime))
    except KeyboardInterrupt:
        if not leaving:
            raise
        logger.warning("no last turn, so that leaving may block in the driver: it was interrupted")
    return True


def _take_last_turn(settings: Settings, ask: Ask | None, *, leaving: bool) -> None:
    from libtimeslice.client import TimeSlice  # it imports this module

    client = TimeSlice(dataclasses.replace(settings, heartbeat_s=None))
    taken = False
    try:
        limit_s = settings.last_turn_s
        logger.info("waiting up to %g s for a last turn on the devices, if need be", limit_s)
        taken = client.take_last_turn(ask, leaving=leaving)
    finally:
        if taken:
            _last_turns.append(client)
        else:
            client.close_now()


def _start_afresh_in_child() -> None:
    _last_asks.clear()
    _last_turns.clear()
    for client in list(_clients):
        client._start_afresh_in_child()


os.register_at_fork(after_in_child=_start_afresh_in_child)
