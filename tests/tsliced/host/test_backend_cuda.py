"""The CUDA backend: real workers on real processes, over softcuda."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal

import pytest
from backend_lab import Place, rank_id, reason_of
from in_process import until

from tsliced.core.model import Cause, ProcessId, RankId, RankState
from tsliced.host.backends import cuda
from tsliced.host.backends.base import BackendError
from tsliced.host.backends.cuda import CudaBackend


def test_a_rank_that_is_broken_for_good_is_said_to_be(place: Place) -> None:
    _, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        await backend.freeze(name, timeout_s=5)
        place.host.fault("checkpoint * * fail:801")
        outcome = await backend.snapshot(name)
        assert outcome.observed is RankState.FAILED
        assert reason_of(outcome)[0] is Cause.FAILED

    place.tell(story)


def test_a_process_that_cannot_run_is_not_looked_at(place: Place) -> None:
    rank, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        await backend.freeze(name, timeout_s=5)
        rank.stop()
        with pytest.raises(BackendError, match="SIGCONT"):
            await backend.probe(name.process)

    place.tell(story)


def test_the_driver_tells_who_has_cuda_in_it(place: Place) -> None:
    _, name = place.rank()
    plain = rank_id(place.host.rank())

    async def story(backend: CudaBackend) -> None:
        assert await backend.probe(name.process)
        assert not await backend.probe(plain.process)
        assert len(place.host.workers()) == 1, "no worker for a process without the driver's thread"

    place.tell(story)


def test_a_driver_that_does_not_answer_is_not_waited_for_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, name = place.rank()
    monkeypatch.setattr(cuda, "PROBE_LIMIT_S", 0.2)

    async def story(backend: CudaBackend) -> None:
        place.host.fault(f"thread {rank.pid} 1 delay:600")
        with pytest.raises(BackendError, match=r"did not answer within 0\.2 s"):
            await backend.probe(name.process)
        # The late answer is that of the first question.
        outcome = await backend.state(name)
        assert (outcome.observed, outcome.failure) == (RankState.RUNNING, None)

    place.tell(story)


def test_a_worker_that_dies_idle_is_replaced_without_anybody_noticing(place: Place) -> None:
    rank, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        await backend.freeze(name, timeout_s=5)
        (worker,) = place.host.workers()
        os.kill(worker, signal.SIGKILL)
        outcome = await backend.snapshot(name)
        assert (outcome.observed, outcome.failure) == (RankState.PARKED, None)
        assert place.host.workers() != [worker]
        assert (await backend.restore(name)).failure is None
        assert (await backend.thaw(name)).failure is None

    place.tell(story)
    assert len(rank.do("digest")) == 64


def test_a_worker_that_dies_in_the_middle_of_a_call_is_told_of_and_nothing_is_tried_again(
    place: Place,
) -> None:
    _, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        await backend.freeze(name, timeout_s=5)
        place.host.fault("checkpoint * * delay:3000")
        snapshot = asyncio.create_task(backend.snapshot(name))
        await until(lambda: began(place, name, "checkpoint"), "it has begun")
        os.kill(place.host.workers()[0], signal.SIGKILL)
        outcome = await snapshot
        assert outcome.observed is RankState.UNKNOWN
        cause, text = reason_of(outcome)
        assert cause is Cause.DRIVER
        assert "worker ended" in text

    place.tell(story)


def began(place: Place, name: RankId, op: str) -> bool:
    path = place.directory / f"{name.process.pid}-{name.process.start_time}.json"
    if not path.exists():
        return False
    content = json.loads(path.read_text())
    return content["op"] == op and content["result"] is None


# The daemon that ends here leaves a worker behind, on purpose.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_worker_of_an_earlier_daemon_is_waited_for_before_its_rank_is_touched(
    place: Place,
) -> None:
    _, name = place.rank()
    earlier: list[int] = []

    async def before(backend: CudaBackend) -> None:
        await backend.freeze(name, timeout_s=5)
        place.host.fault("checkpoint * * delay:700")
        asyncio.create_task(backend.snapshot(name))  # noqa: RUF006 - this daemon won't hear of it
        await until(lambda: began(place, name, "checkpoint"), "it has begun")
        earlier.extend(place.host.workers())

    async def after(backend: CudaBackend) -> None:
        assert place.host.workers() == earlier, "it is in the middle of its call"
        outcome = await backend.state(name)
        assert outcome.observed is RankState.PARKED, "asked when the call was over"
        assert not set(earlier) & set(place.host.workers())

    place.tell(before, leave=True)
    gc.collect()
    place.tell(after)


def test_a_driver_that_cannot_be_used_is_told_of(place: Place) -> None:
    _, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        cause, text = reason_of(await backend.freeze(name, timeout_s=5))
        assert cause is Cause.DRIVER
        assert "no-such-libcuda" in text
        with pytest.raises(BackendError, match="no-such-libcuda"):
            await backend.probe(name.process)

    place.tell(story, library="/no-such-libcuda.so.1")


def test_what_cannot_be_an_op_file_is_named_and_nothing_is_tried(place: Place) -> None:
    _, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        path = place.directory / f"{name.process.pid}-{name.process.start_time}.json"
        path.write_text("{")
        _, text = reason_of(await backend.freeze(name, timeout_s=5))
        assert str(path) in text
        assert place.host.workers() == []
        path.unlink()
        assert (await backend.freeze(name, timeout_s=5)).observed is RankState.FROZEN

    place.tell(story)


def test_what_workers_wrote_of_processes_that_are_gone_is_swept_away(place: Place) -> None:
    _, name = place.rank()
    pid, start_time = name.process
    kept = place.directory / f"{pid}-{start_time}.json"
    files = [kept, *(place.directory / f"{n}.json" for n in (f"{pid}-1", "4194304-5", "nonsense"))]
    for file in files:
        file.write_text("{}")

    async def story(_backend: CudaBackend) -> None:
        # What may be another backend's is not ours to take away.
        assert set(place.directory.iterdir()) == {kept, files[-1]}

    place.tell(story)


def test_the_worker_of_a_rank_that_died_goes_with_what_it_wrote(place: Place) -> None:
    rank, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        backend.prepare(name.process)
        await until(place.host.workers, "its worker is started early")
        await backend.freeze(name, timeout_s=5)
        assert list(place.directory.iterdir())
        rank.kill()
        backend.forget(name.process)
        assert list(place.directory.iterdir()) == []
        await until(lambda: not place.host.workers(), "its worker ends")
        backend.forget(name.process)

    place.tell(story)


def test_a_backend_that_closes_lets_a_call_run_to_its_end(place: Place) -> None:
    rank, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        await backend.freeze(name, timeout_s=5)
        place.host.fault("checkpoint * * delay:300")
        snapshot = asyncio.create_task(backend.snapshot(name))
        await until(lambda: began(place, name, "checkpoint"), "it has begun")
        await backend.close()
        cause, text = reason_of(await snapshot)
        assert (cause, text) == (Cause.DRIVER, "the daemon let its worker go")
        await until(lambda: not place.host.workers(), "the worker ends")
        assert not began(place, name, "checkpoint"), "with its result written down"

    place.tell(story)

    async def again(backend: CudaBackend) -> None:
        assert (await backend.state(name)).observed is RankState.PARKED

    place.tell(again)
    assert rank.process.poll() is None


def test_processes_of_one_pid_after_another_have_workers_of_their_own(place: Place) -> None:
    _, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        stranger = RankId(name.host, ProcessId(name.process.pid, name.process.start_time - 1))
        outcome = await backend.state(stranger)
        assert outcome.failure is not None, "that process is gone, whoever has its pid"
        assert (await backend.state(name)).observed is RankState.RUNNING

    place.tell(story)


@pytest.mark.parametrize("moment", ["soon", "at the end of the daemon"])
def test_a_worker_that_is_never_told_of_its_targets_death_is_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setenv("SOFTCUDA_DEATH_HANGS", "1")
    monkeypatch.setattr(cuda, "DEAD_TARGET_LIMIT_S", 0.2 if moment == "soon" else 3600.0)
    rank, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        place.host.fault("lock * * stall")
        freeze = asyncio.create_task(backend.freeze(name, timeout_s=5))
        await until(lambda: began(place, name, "lock"), "it has begun")
        rank.kill()
        assert not freeze.done()
        assert place.host.workers(), "its driver does not come back"
        backend.forget(name.process)
        assert reason_of(await freeze) == (Cause.DRIVER, "its process has ended")
        if moment == "soon":
            await until(lambda: not place.host.workers(), "it is ended")

    place.tell(story)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("death", ["before the daemon starts", "afterwards"])
def test_a_worker_that_an_earlier_daemon_left_with_a_dead_target_is_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    monkeypatch.setenv("SOFTCUDA_DEATH_HANGS", "1")
    monkeypatch.setattr(cuda, "DEAD_TARGET_LIMIT_S", 0.2)
    rank, name = place.rank()

    async def before(backend: CudaBackend) -> None:
        place.host.fault("lock * * stall")
        asyncio.create_task(backend.freeze(name, timeout_s=5))  # noqa: RUF006 - nobody hears of it
        await until(lambda: began(place, name, "lock"), "it has begun")

    async def after(backend: CudaBackend) -> None:
        if death == "afterwards":
            asked = asyncio.create_task(backend.state(name))
            await asyncio.sleep(0.2)  # it waits for the earlier one, or is about to
            assert not asked.done()
            rank.kill()
            backend.forget(name.process)
            assert reason_of(await asked)[1] == "its process has ended"
        await until(lambda: not place.host.workers(), "it is ended")

    place.tell(before, leave=True)
    gc.collect()
    if death == "before the daemon starts":
        rank.kill()
    place.tell(after)


def test_who_asks_a_worker_that_is_let_go_while_it_starts_has_an_answer(place: Place) -> None:
    rank, name = place.rank()

    async def story(backend: CudaBackend) -> None:
        asked = asyncio.create_task(backend.state(name))
        await asyncio.sleep(0)
        rank.kill()
        backend.forget(name.process)
        assert reason_of(await asked)[1] == "its process has ended"

    place.tell(story)
