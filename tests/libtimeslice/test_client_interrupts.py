"""Ctrl-C at any moment leaves no lease and no place in a queue behind."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fake_daemon import Background, FakeDaemon

import libtimeslice
from libtimeslice import TimeSlice, connect

LIBRARY = str(Path(libtimeslice.__file__).parent)


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line of the library that this thread runs.

    Python looks for signals when a call begins or returns, so most of these places are real. The
    end of a `with` is not: no signal comes between its last line and its exit, but tracing would.
    """

    def __init__(self, line: int) -> None:
        self._left = line
        self._entered: set[tuple[FrameType, int]] = set()
        self.raised_in: str | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, _argument: Any) -> Any:
        return self._on_line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _is_end_of_with(self, frame: FrameType) -> bool:
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not source.strip().startswith("with "):
            return False
        seen = (frame, frame.f_lineno) in self._entered
        self._entered.add((frame, frame.f_lineno))
        return seen

    def _on_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and self.raised_in is None and not self._is_end_of_with(frame):
            self._left -= 1
            if self._left == 0:
                self.raised_in = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._on_line


@pytest.fixture
def ts(daemon: FakeDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path) as client:
        client.status()
        yield client


def nothing_is_left(daemon: FakeDaemon, ts: TimeSlice, where: str | None) -> None:
    """Fails unless the daemon and the client agree that nothing is held."""
    with daemon.changed:
        free = daemon.changed.wait_for(lambda: not daemon.held and not daemon.waiting, 10)
    assert free, f"interrupted at {where}: {list(daemon.held)} {len(daemon.waiting)}"
    assert not ts.holding, where
    assert not ts._session.asking, where


def test_an_interrupt_at_any_line_between_question_and_body_leaks_no_lease(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """G5. Every line of the library that runs before the body is tried, the waiting included."""
    daemon.ack_s = 1.0
    places = []
    for line in range(1, 500):
        context = ts.lease("n1", timeout=60)
        interrupt = InterruptAt(line)
        try:
            with interrupt.watch():
                context.__enter__()
        except KeyboardInterrupt:
            places.append(interrupt.raised_in)
            nothing_is_left(daemon, ts, interrupt.raised_in)
        else:
            context.__exit__(None, None, None)
            break
    assert len(places) > 60, "the lines were not counted"
    nothing_is_left(daemon, ts, None)


def test_an_interrupt_at_any_line_of_a_nested_question_keeps_the_outer_lease(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    outer = ts.acquire("n1")
    for line in range(1, 500):
        context = ts.lease("n1")
        interrupt = InterruptAt(line)
        try:
            with interrupt.watch():
                context.__enter__()
        except KeyboardInterrupt:
            assert list(daemon.held) == [outer.id], interrupt.raised_in
            (grant,) = ts._session.grants.values()
            assert grant.holders == {outer}, interrupt.raised_in
        else:
            context.__exit__(None, None, None)
            break
    assert line > 10
    ts.release()
    nothing_is_left(daemon, ts, None)


def test_an_interrupt_at_any_line_of_the_exit_still_releases(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """But for the first, where the `try` begins: Python offers no way."""
    for line in range(2, 500):
        context = ts.lease("n1")
        context.__enter__()
        interrupt = InterruptAt(line)
        try:
            with interrupt.watch():
                context.__exit__(None, None, None)
        except KeyboardInterrupt:
            nothing_is_left(daemon, ts, interrupt.raised_in)
        else:
            break
    assert line > 40
    nothing_is_left(daemon, ts, None)


def test_a_real_ctrl_c_ends_a_wait_and_its_place_in_the_queue(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    other = daemon.steal(("n1",))
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        daemon.wait_until(lambda: daemon.waiting)
        signal.pthread_kill(main, signal.SIGINT)

    presser = Background(press)
    with pytest.raises(KeyboardInterrupt), ts.lease("n1"):
        pytest.fail("it was granted")
    presser.result()
    daemon.give_back(other)
    nothing_is_left(daemon, ts, "the wait")
    assert ts.status()


def test_an_interrupt_while_another_thread_waits_does_not_disturb_it(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    others = [daemon.steal((group,)) for group in ("n1", "n2")]
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        daemon.wait_until(lambda: len(daemon.waiting) == 2)
        signal.pthread_kill(main, signal.SIGINT)

    def ask() -> tuple[str, ...]:
        daemon.wait_until(lambda: len(daemon.waiting) == 1)
        return ts.acquire("n2").groups

    presser, second = Background(press), Background(ask)
    with pytest.raises(KeyboardInterrupt):
        ts.acquire("n1")
    presser.result()
    for other in others:
        daemon.give_back(other)
    assert second.result() == ("n2",)
    ts.release()
    nothing_is_left(daemon, ts, "the wait")
