"""Managed tensors as the daemon moves them: a job that stands still, and orders to its agent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_daemon import LIMIT_S, FakeDaemon, wait_for
from tensor_digests import digest
from test_client_processes import run

from libtimeslice import PausableStep, Pause, Resume, TimeSlice, connect

QUIESCE = {"t": "quiesce", "groups": ["n1"], "timeout_s": 5.0, "move": 1}
RESUME = {"t": "resume", "groups": ["n1"], "timeout_s": 5.0, "move": 1}


@pytest.fixture
def ts(daemon: FakeDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path, job="j") as client:
        yield client


class Loop:
    """A job whose thread uses its tensor in each step, and would fail if it were away."""

    def __init__(self, step: PausableStep, tensor: Any) -> None:
        self.step, self.tensor = step, tensor
        self.steps = 0
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._ended.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "it stands still though nobody asks for that"
        assert self._failed is None, self._failed

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                with self.step:
                    assert self.tensor.untyped_storage().nbytes() == 4 * self.tensor.numel()
                    self.tensor += 1
                    self.steps += 1
        except BaseException as failed:
            self._failed = failed


def ask(daemon: FakeDaemon, order: str) -> dict[str, Any]:
    return daemon.ask_agent({"t": "tensors", "do": order})


def state(daemon: FakeDaemon, order: str) -> str:
    """Gives an order that must succeed, and returns where the tensors are then."""
    answer = ask(daemon, order)
    assert "err" not in answer, answer
    return str(answer["state"])


def refused(daemon: FakeDaemon, order: str) -> tuple[str, str]:
    """Gives an order that must be refused, and returns the code and where the tensors are."""
    error = ask(daemon, order)["err"]
    return error["code"], error["state"]


def manage(ts: TimeSlice, *objects: object, **how: Any) -> PausableStep:
    step = ts.pausable_step()
    ts.torch.manage(*objects, device="cpu", **how)
    return step


def test_a_process_that_manages_tensors_is_known_as_a_rank_when_that_returns(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    manage(ts, torch.ones(10))
    (caps,) = daemon.agent_caps()
    assert caps == ("empty_cache", "quiesce", "tensors")
    known = daemon.count("register")
    assert known > 0
    ts.torch.manage(torch.ones(5))
    assert daemon.count("register") == known
    assert ts.torch.bytes == 60


def test_a_job_stands_still_behind_a_step_while_its_tensors_are_away_g12(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    tensor = torch.ones(1000)
    with Loop(manage(ts, tensor), tensor) as loop:
        wait_for(lambda: loop.steps > 10)
        for _ in range(3):
            assert "err" not in daemon.ask_agent(dict(QUIESCE))
            steps, before = loop.steps, digest(tensor)
            assert state(daemon, "freeze") == "frozen"
            moved = ask(daemon, "snapshot")
            assert (moved["state"], moved["bytes"]) == ("parked", 4000)
            assert moved["regions"] == [
                {"name": "", "policy": "save", "storages": 1, "bytes": 4000}
            ]
            assert tensor.untyped_storage().nbytes() == 0
            assert loop.steps == steps
            assert state(daemon, "restore") == "frozen"
            assert digest(tensor) == before
            thawed = ask(daemon, "thaw")
            assert (thawed["state"], thawed["bytes"]) == ("paused", 0), "a thaw moves nothing"
            assert loop.steps == steps
            assert "err" not in daemon.ask_agent(dict(RESUME))
            assert state(daemon, "query") == "running"
            wait_for(lambda: loop.steps > steps)  # noqa: B023 - called here and now
    assert ts.torch.last_move is not None
    assert ts.torch.last_move.bytes == 4000


def test_orders_out_of_turn_are_refused_and_move_nothing(daemon: FakeDaemon, ts: TimeSlice) -> None:
    tensor = torch.ones(1000)
    manage(ts, tensor)
    for order in ("freeze", "snapshot"):
        assert refused(daemon, order) == ("unavailable", "running")
    assert refused(daemon, "sing") == ("bad_request", "running")
    daemon.ask_agent(dict(QUIESCE))
    assert refused(daemon, "snapshot") == ("unavailable", "paused")
    state(daemon, "freeze")
    assert daemon.ask_agent(dict(RESUME))["err"]["code"] == "unavailable"
    state(daemon, "snapshot")
    assert refused(daemon, "thaw") == ("unavailable", "parked")
    assert daemon.ask_agent(dict(RESUME))["err"]["code"] == "unavailable"
    state(daemon, "restore")
    state(daemon, "thaw")
    assert "err" not in daemon.ask_agent(dict(RESUME))
    assert tensor.sum() == 1000


def test_an_order_that_is_repeated_has_the_same_answer_and_moves_nothing_g6(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    tensor = torch.rand(1000)
    before = digest(tensor)
    manage(ts, tensor)
    daemon.ask_agent(dict(QUIESCE))
    for order in ("freeze", "snapshot", "restore", "thaw"):
        first = ask(daemon, order)
        again = ask(daemon, order)
        assert {**first, "re": 0} == {**again, "re": 0}
    assert digest(tensor) == before


def test_a_tensor_that_cannot_be_moved_is_named_before_anything_is_frozen(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    holder = {"cache": torch.ones(3)}
    manage(ts, regions={"kv": holder})
    daemon.ask_agent(dict(QUIESCE))
    holder["cache"] = torch.eye(3).to_sparse()
    error = ask(daemon, "freeze")["err"]
    assert (error["code"], error["state"]) == ("refused", "paused")
    assert error["message"].startswith("kv['cache'] ")
    assert "err" not in daemon.ask_agent(dict(RESUME))


def test_nothing_is_managed_where_nothing_would_stop_the_job(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with pytest.raises(ValueError, match="pausable_step"):
        ts.torch.manage(torch.ones(3), device="cpu")
    assert ts.torch.bytes == 0
    assert ts.torch.last_move is None
    ts.register()
    daemon.wait_until(daemon.agent_caps)
    assert refused(daemon, "freeze") == ("not_found", "running")
    ts.on_pause(lambda pause: None)
    ts.torch.manage(torch.ones(3))
    assert ts.torch.bytes == 12
    with pytest.raises(ValueError, match="managed already"):
        ts.torch.manage(torch.ones(3), device="cuda")


@pytest.mark.parametrize("first", ["its function", "its step"])
def test_what_was_discarded_is_filled_before_a_step_uses_it(
    daemon: FakeDaemon, ts: TimeSlice, first: str
) -> None:
    tensor = torch.zeros(1000)

    def fill(_resume: Resume) -> None:
        tensor.fill_(42)

    if first == "its function":
        ts.on_resume(fill)
    step = ts.pausable_step()
    if first == "its step":
        ts.on_resume(fill)
    ts.torch.manage(regions={"base": tensor}, policy={"base": "discard"}, device="cpu")
    daemon.ask_agent(dict(QUIESCE))
    for order in ("freeze", "snapshot", "restore", "thaw"):
        state(daemon, order)
    tensor.zero_()  # whatever the allocator left there
    seen: queue.Queue[float] = queue.Queue()

    def use() -> None:
        with step:
            seen.put(float(tensor.sum()))

    thread = threading.Thread(target=use)
    thread.start()
    daemon.ask_agent(dict(RESUME))
    assert seen.get(timeout=LIMIT_S) == 42_000
    thread.join(LIMIT_S)


def test_a_pause_that_failed_is_none(daemon: FakeDaemon, ts: TimeSlice) -> None:
    @ts.on_pause
    def busy(pause: Pause) -> None:
        raise OSError("still writing")

    manage(ts, torch.ones(3))
    assert "err" in daemon.ask_agent(dict(QUIESCE))
    assert refused(daemon, "freeze") == ("unavailable", "running")


def test_a_job_whose_pause_is_forgotten_waits_for_its_tensors_before_it_goes_on(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    tensor = torch.ones(1000)
    with Loop(manage(ts, tensor), tensor) as loop:
        wait_for(lambda: loop.steps > 10)
        daemon.ask_agent(dict(QUIESCE))
        state(daemon, "freeze")
        state(daemon, "snapshot")
        steps, hellos = loop.steps, daemon.count("hello")
        daemon.stop(forget=True)
        daemon.start()
        daemon.wait_until(lambda: daemon.count("hello") > hellos and daemon.agent_caps())
        daemon.replies.clear()  # it counts from 1 again
        assert state(daemon, "query") == "parked"
        assert state(daemon, "restore") == "frozen"
        assert loop.steps == steps
        state(daemon, "thaw")
        wait_for(lambda: loop.steps > steps)
        assert state(daemon, "query") == "running"


def test_who_closes_while_its_tensors_are_away_can_have_them_back(daemon: FakeDaemon) -> None:
    tensor = torch.rand(1000)
    before = digest(tensor)
    with connect(daemon.path, job="j") as ts:
        manage(ts, tensor)
        daemon.ask_agent(dict(QUIESCE))
        state(daemon, "freeze")
        state(daemon, "snapshot")
    assert state(daemon, "restore") == "frozen"
    assert state(daemon, "thaw") == "paused"
    assert digest(tensor) == before
    daemon.wait_until(lambda: not daemon.connections)


def test_tensors_are_managed_also_where_nothing_is_shared(daemon: FakeDaemon) -> None:
    with connect(daemon.path, mode="off") as ts:
        manage(ts, torch.ones(3))
        assert ts.torch.bytes == 12
    assert daemon.count("hello") == 0


def test_a_daemon_that_is_away_is_not_waited_for_for_ever(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(daemon.path, connect_timeout_s=0.1) as ts:
        daemon.stop()
        manage(ts, torch.ones(3))
        assert "the daemon does not know of managed tensors" in caplog.text
        daemon.start()
        daemon.wait_until(lambda: daemon.count("register") == 1)


def test_a_forked_child_manages_nothing(daemon: FakeDaemon) -> None:
    script = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from libtimeslice import connect
ts = connect(sys.argv[1], job="j")
ts.pausable_step()
ts.torch.manage(torch.ones(3), device="cpu")
pid = os.fork()
if pid == 0:
    os._exit(ts.torch.bytes)
assert os.waitpid(pid, 0)[1] == 0
print(ts.torch.bytes, end="")
"""
    assert run(daemon, script) == "12"
