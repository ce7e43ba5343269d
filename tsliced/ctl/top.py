"""`tslicectl top`: who has the devices, who waits and what is moved, as it goes on."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from libtimeslice.connection import Connection
from libtimeslice.errors import TimeSliceError
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.failures import DONE, SIGNALLED, CommandError
from tsliced.ctl.options import Commands, positive_seconds
from tsliced.ctl.output import print_json

if TYPE_CHECKING:
    from rich.live import Live

_DESCRIPTION = """\
Shows who has the devices, who waits, what is moved, and the latest events, again and again. q ends
it, the space bar looks at once. With --once, or in a pipe, it prints one such screen.
"""
DEFAULT_INTERVAL_S = 1.0
#: Events that a screen may show.
MOST_EVENTS = 50
_QUIT, _LOOK = frozenset("qQ\x03\x04"), frozenset(" r")


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    top = commands.add(
        "top", "show live who has the devices, who waits and what moves", description=_DESCRIPTION
    )
    top.add_argument("--once", action="store_true", help="print one screen, for pipes")
    top.add_argument(
        "--interval",
        metavar="SECONDS",
        type=positive_seconds,
        default=DEFAULT_INTERVAL_S,
        help=f"look so often (default {DEFAULT_INTERVAL_S:g})",
    )
    top.set_defaults(call=show_top)


def show_top(options: argparse.Namespace) -> int:
    """Shows one screen, or screens until somebody quits."""
    with Source(options) as source:
        status, events = source.look()
        if options.json:
            print_json({"status": status, "events": events})
            return DONE
        # Only here, so that all other commands work without it.
        try:
            from rich.console import Console
            from rich.live import Live

            from tsliced.ctl.top_screen import screen
        except ImportError as exc:
            text = "top needs the Python package rich: pip install rich"
            raise CommandError(text, code="no_rich") from exc
        console = Console(highlight=False)
        if options.once or not console.is_terminal:
            console.print(screen(status, events, console=console))
            return DONE
        with Live(console=console, screen=True, auto_refresh=False) as live:

            def draw(note: str) -> None:
                live.update(
                    screen(source.status, source.events, console=console, note=note), refresh=True
                )

            watch(source, draw, live, options.interval)
    return DONE


class Source:
    """What the daemon says; it may go away and come back meanwhile."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._daemon: Connection | None = None
        self._next: int | None = None
        self._latest: deque[Message] = deque(maxlen=MOST_EVENTS)
        self.status: Message = {}

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._drop()

    @property
    def events(self) -> list[Message]:
        """The latest events, the oldest first."""
        return list(self._latest)

    def look(self) -> tuple[Message, list[Message]]:
        """Returns the status and the latest events. Raises what the daemon answers instead."""
        try:
            if self._daemon is None:
                self._daemon = open_daemon(self._options)
            self.status = ask(self._daemon, "status")["status"]
            answer = ask(self._daemon, "events", since=self._next, follow=False, limit=MOST_EVENTS)
        except TimeSliceError:
            self._drop()
            raise
        self._next = answer["next"]
        self._latest += answer["events"]
        return self.status, self.events

    def _drop(self) -> None:
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None


def watch(source: Source, draw: Callable[[str], None], live: Live, interval_s: float) -> None:
    """Draws until somebody quits; says so while there is no daemon."""
    note = ""
    with keyboard() as typed, suspending(live) as undisturbed, ending():
        while True:
            with undisturbed():
                draw(note)
            until = time.monotonic() + interval_s
            while (left_s := until - time.monotonic()) > 0:
                key = typed(left_s)
                if key in _QUIT:
                    return
                if key in _LOOK:
                    break
            try:
                source.look()
                note = ""
            except TimeSliceError as error:
                note = f"{error.message}; trying again"


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits for a key; the terminal is as it was afterwards.

    Without a keyboard it only waits.
    """
    if not sys.stdin.isatty():
        yield _only_wait
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def typed(limit_s: float) -> str:
        if not select.select([descriptor], [], [], limit_s)[0]:
            return ""
        # An end of file is somebody who hung up.
        return os.read(descriptor, 1).decode(errors="replace") or "q"

    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield typed
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _only_wait(limit_s: float) -> str:
    time.sleep(limit_s)
    return ""


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the command by an exception, so that the terminal is restored."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(SIGNALLED + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        pass  # the usual way to leave such a screen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def suspending(live: Live) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Lets Ctrl-Z give the terminal back as it was, and `fg` take it again.

    Yields what makes it wait meanwhile: in the middle of a screen, what gives the terminal back
    would stay in a buffer, and the shell would find the terminal as it must not be.
    """
    busy = wanted = False

    def suspend() -> None:
        nonlocal busy, wanted
        busy, wanted = True, False
        live.stop()
        with usual_mode():
            os.kill(os.getpid(), signal.SIGSTOP)
        live.start(refresh=True)
        busy = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal wanted
        wanted = True
        if not busy:
            suspend()

    @contextlib.contextmanager
    def undisturbed() -> Iterator[None]:
        nonlocal busy
        busy = True
        try:
            yield
        finally:
            busy = False
        if wanted:
            suspend()

    before = signal.signal(signal.SIGTSTP, stop)
    try:
        yield undisturbed
    finally:
        signal.signal(signal.SIGTSTP, before)


@contextlib.contextmanager
def usual_mode() -> Iterator[None]:
    """Echoes and collects lines for a while, as a shell expects."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    now: list[Any] = termios.tcgetattr(descriptor)
    usual = list(now)
    usual[tty.LFLAG] |= termios.ECHO | termios.ICANON
    termios.tcsetattr(descriptor, termios.TCSANOW, usual)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, now)
