"""Steps at whose borders all ranks of a job are paused together."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial

import pytest
from fake_daemon import LIMIT_S, Background, FakeDaemon

from libtimeslice import Pause, Resume, connect
from libtimeslice.steps import Agree, PausableStep, TorchAgreement

RANKS = 4
RESUME = Resume(groups=("g1",))


def pause_of(move: int | None = 7, *, timeout_s: float = LIMIT_S) -> Pause:
    return Pause(groups=("g1",), timeout_s=timeout_s, move=move)


def soon() -> float:
    return time.monotonic() + LIMIT_S


def waits(call: Background) -> bool:
    """Whether a call does not return for a while."""
    end = time.monotonic() + 0.1
    while call.running and time.monotonic() < end:
        time.sleep(0.005)
    return call.running


def alone(number: int, _pause: Pause, _deadline: float) -> int:
    return number


class Ranks:
    """Threads that stand for ranks: each queues what the others must queue too, a few ahead."""

    def __init__(self, agree: Callable[[int], Agree], *, ahead: int = 4) -> None:
        self.queued = [0] * RANKS
        self.finished: list[int] = []
        self._ahead = ahead
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self.steps = [PausableStep(agree=agree(n), finish=self._finish(n)) for n in range(RANKS)]
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(RANKS)]

    def __enter__(self) -> Ranks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for step in self.steps:
            step.resume(RESUME)
        # All end behind the same step, as a training loop does.
        self.pause()
        self._ended.set()
        for step in self.steps:
            step.resume(RESUME)
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    def pause(self) -> None:
        """Pauses all ranks, one a moment after the other, and waits until all are."""
        asked = []
        for step in self.steps:
            asked.append(Background(partial(step.pause, pause_of())))
            time.sleep(0.002)
        for answer in asked:
            answer.result()

    def get_beyond(self, step: int) -> None:
        """Waits until every rank has queued more than so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: min(self.queued) > step, LIMIT_S)

    def _run(self, rank: int) -> None:
        while True:
            with self.steps[rank]:
                if self._ended.is_set():
                    return
                with self._changed:
                    self.queued[rank] += 1
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._behind(rank) <= self._ahead, LIMIT_S)

    def _behind(self, rank: int) -> int:
        return self.queued[rank] - min(self.queued)

    def _finish(self, rank: int) -> Callable[[], None]:
        def finish() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._behind(rank) == 0, LIMIT_S), "it hangs"
                self.finished.append(rank)

        return finish


def in_one_process() -> Callable[[int], Agree]:
    """Agreement of threads: whoever is last knows the largest."""
    meeting, numbers = threading.Barrier(RANKS), [0] * RANKS

    def of(rank: int) -> Agree:
        def agree(number: int, _pause: Pause, _deadline: float) -> int:
            meeting.wait(LIMIT_S)  # nobody writes while others still read the numbers before
            numbers[rank] = number
            meeting.wait(LIMIT_S)
            return max(numbers)

        return agree

    return of


def test_all_ranks_are_paused_behind_the_same_step_with_their_device_work_done() -> None:
    with Ranks(in_one_process()) as ranks:
        for _ in range(20):
            ranks.finished.clear()
            ranks.pause()
            assert sorted(ranks.finished) == list(range(RANKS))
            assert len(set(ranks.queued)) == 1, "none has queued what another has not"
            before = ranks.queued[0]
            for step in ranks.steps:
                step.resume(RESUME)
            ranks.get_beyond(before)


def test_a_rank_between_two_steps_is_paused_at_once_and_begins_none_until_it_may() -> None:
    step = PausableStep(agree=alone, finish=lambda: None)
    step.pause(pause_of())
    entered = Background(lambda: step.__enter__())
    assert waits(entered)
    step.resume(RESUME)
    entered.result()


def test_a_rank_that_does_not_come_to_the_step_in_time_says_where_it_is() -> None:
    step = PausableStep(agree=lambda *_: 3, finish=lambda: None)
    with (
        step,
        pytest.raises(TimeoutError, match="behind step 3, and this one has begun 1 and is in"),
    ):
        step.pause(pause_of(timeout_s=0.05))
    with pytest.raises(TimeoutError, match="between two"):
        step.pause(pause_of(timeout_s=0.05))
    step.resume(RESUME)
    with step:
        pass


def test_device_work_that_fails_stops_the_move() -> None:
    def finish() -> None:
        raise RuntimeError("device-side assert")

    step = PausableStep(agree=alone, finish=finish)
    with pytest.raises(RuntimeError, match="device-side assert"):
        step.pause(pause_of())


def test_the_daemon_pauses_and_resumes_the_steps_of_a_client(daemon: FakeDaemon) -> None:
    with connect(daemon.path, job="j") as ts:
        step = ts.pausable_step()
        daemon.wait_until(lambda: daemon.agent_caps() == [("empty_cache", "quiesce")])
        with step:
            quiesce = {"t": "quiesce", "groups": ["n1"], "timeout_s": 0.05, "move": 1}
            assert "TimeoutError" in daemon.ask_agent(quiesce)["err"]["message"]
        assert "err" not in daemon.ask_agent({**quiesce, "timeout_s": 5.0})
        entered = Background(lambda: step.__enter__())
        assert waits(entered)
        assert "err" not in daemon.ask_agent({"t": "resume", "groups": ["n1"]})
        entered.result()


# ---- through torch


class Store:
    """What torch.distributed keeps for all ranks."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, name: str, value: str) -> None:
        self.kept[name] = value.encode()

    def get(self, name: str) -> bytes:
        return self.kept[name]

    def check(self, names: list[str]) -> bool:
        return self.kept.keys() >= set(names)

    def delete_key(self, name: str) -> bool:
        return self.kept.pop(name, None) is not None


class Distributed:
    """torch.distributed of one rank of two."""

    def __init__(self) -> None:
        self.store, self.rank, self.size, self.initialized = Store(), 0, 2, True
        self.distributed_c10d = types.SimpleNamespace(_get_default_store=lambda: self.store)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.size


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    fake, torch = Distributed(), types.ModuleType("torch")
    torch.__dict__["distributed"] = fake
    torch.__dict__["cuda"] = types.SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return fake


def test_ranks_of_torch_agree_on_the_largest_number_for_each_move_anew(
    distributed: Distributed,
) -> None:
    agree = TorchAgreement()
    distributed.store.set("timeslice/7/1", "12")
    assert agree(9, pause_of(7), soon()) == 12
    waiting = Background(lambda: agree(20, pause_of(8), soon()))
    assert waits(waiting), "the number for the move before does not count"
    distributed.store.set("timeslice/8/1", "3")
    assert waiting.result() == 20
    assert "timeslice/7/0" not in distributed.store.kept, "what is over is not kept"


def test_a_rank_that_does_not_speak_is_named(distributed: Distributed) -> None:
    with pytest.raises(TimeoutError, match="rank 1 did not say"):
        TorchAgreement()(9, pause_of(), time.monotonic() + 0.05)


def test_a_daemon_that_does_not_number_its_moves_cannot_pause_ranks_together(
    distributed: Distributed,
) -> None:
    with pytest.raises(RuntimeError, match=r"protocol 1\.1"):
        TorchAgreement()(9, pause_of(None), soon())


@pytest.mark.parametrize("lack", ["torch", "a process group", "peers"])
def test_a_rank_without_peers_in_torch_stands_for_itself(
    distributed: Distributed, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    if lack == "torch":
        monkeypatch.delitem(sys.modules, "torch")
    elif lack == "a process group":
        distributed.initialized = False
    else:
        distributed.size = 1
    assert TorchAgreement()(9, pause_of(None), soon()) == 9
    assert distributed.store.kept == {}
