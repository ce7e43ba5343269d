"""Ctrl-C at any moment leaves no lease and no place in a queue behind."""

from __future__ import annotations

import dis
import linecache
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from fake_daemon import Background, FakeDaemon

import libtimeslice
from libtimeslice import TimeSlice, connect
from libtimeslice.connection import ConnectionLost

LIBRARY = str(Path(libtimeslice.__file__).parent)


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th line of the library that this thread runs.

    Python looks for signals when a call begins or returns, so most of these places are real. The
    end of a `with` is not: no signal comes between its last line and its exit, but tracing would.

    With `bytecode` it raises in the middle of lines too: before the n-th instruction that comes
    behind one after which Python looks for signals.
    """

    def __init__(self, place: int, *, bytecode: bool = False) -> None:
        self._left = place
        self._bytecode = bytecode
        self._looks: dict[CodeType, set[int]] = {}
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
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if not self._bytecode:
            return self._on_line
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode" and self.raised_in is None:
            looks = self._looks.get(frame.f_code)
            if looks is None:
                looks = self._looks[frame.f_code] = places_for_signals(frame.f_code)
            if frame.f_lasti in looks:
                self._count(frame)
        return self._on_opcode

    def _count(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0:
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.raised_in = f"{where} ({frame.f_lasti})"
            sys.settrace(None)
            raise KeyboardInterrupt

    def _is_end_of_with(self, frame: FrameType) -> bool:
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not source.strip().startswith("with "):
            return False
        seen = (frame, frame.f_lineno) in self._entered
        self._entered.add((frame, frame.f_lineno))
        return seen

    def _on_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and self.raised_in is None and not self._is_end_of_with(frame):
            self._count(frame)
        return self._on_line


def places_for_signals(code: CodeType) -> set[int]:
    """Returns the offsets of the instructions before which a signal can come in.

    Python looks for signals at the end of a call, at the beginning of a function and when it jumps
    back (ceval.c: CHECK_EVAL_BREAKER); not between any two instructions.
    """
    found, looked = set(), False
    for instruction in dis.get_instructions(code):
        if looked:
            found.add(instruction.offset)
        name = instruction.opname
        looked = name.startswith(("CALL", "JUMP_BACKWARD")) or name in ("RESUME", "JUMP_ABSOLUTE")
    return found


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


def test_an_interrupt_at_any_bytecode_between_question_and_body_leaks_no_lease(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """G5. As above, but wherever Python looks for signals, and the daemon answers with a wait."""
    daemon.ack_s = 1.0
    for place in range(1, 2000):
        context = ts.lease("n1", timeout=60)
        interrupt = InterruptAt(place, bytecode=True)
        try:
            with interrupt.watch():
                context.__enter__()
        except KeyboardInterrupt:
            nothing_is_left(daemon, ts, interrupt.raised_in)
        else:
            context.__exit__(None, None, None)
            break
    assert 100 < place < 1999, "the places were not counted"
    nothing_is_left(daemon, ts, None)


def test_an_interrupt_at_any_bytecode_of_the_exit_still_releases(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """But for the very first, before the `try` is begun."""
    for place in range(2, 2000):
        context = ts.lease("n1")
        context.__enter__()
        interrupt = InterruptAt(place, bytecode=True)
        try:
            with interrupt.watch():
                context.__exit__(None, None, None)
        except KeyboardInterrupt:
            nothing_is_left(daemon, ts, interrupt.raised_in)
        else:
            break
    assert 60 < place < 1999, "the places were not counted"
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


def test_who_waits_to_send_is_not_held_up_by_one_that_was_interrupted_before_it_was_done(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    connection = ts._line.connected(None)
    with connection._send_lock:  # it never gets there, and another thread is in its place
        sender = Background(lambda: connection.send({"t": "ping", "id": 1}))
        connection.fail("a send was interrupted")
        with pytest.raises(ConnectionLost):
            sender.result()
    assert ts.status()
