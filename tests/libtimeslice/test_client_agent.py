"""The agent: what the daemon asks a rank, and what it tells it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator

import pytest
from fake_daemon import LIMIT_S, Background, FakeDaemon, state_of

from libtimeslice import (
    Contended,
    HoldWarning,
    LeaseState,
    Lost,
    Pause,
    Resume,
    TimeSlice,
    Waiting,
    connect,
)
from libtimeslice.aio import connect as aio_connect


@pytest.fixture
def ts(daemon: FakeDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path, job="j") as client:
        yield client


def test_registering_makes_a_rank_and_starts_an_agent(daemon: FakeDaemon, ts: TimeSlice) -> None:
    assert ts.register() == ("n1",)
    assert daemon.last("register")["pid"] is None
    daemon.wait_until(lambda: daemon.agent_caps() == [("empty_cache",)])
    assert daemon.last("hello")["job"] == "j"
    assert daemon.ask_agent({"t": "empty_cache"}) == {"re": 1, "bytes": 0}
    assert threading.active_count() >= 2


def test_an_agent_quiesces_and_resumes_by_its_callbacks(daemon: FakeDaemon, ts: TimeSlice) -> None:
    heard: list[object] = []
    ts.on_pause(heard.append)
    ts.on_resume(heard.append)
    daemon.wait_until(lambda: daemon.agent_caps() == [("empty_cache", "quiesce")])
    assert daemon.ask_agent({"t": "quiesce", "groups": ["n1"], "timeout_s": 5.0}) == {"re": 1}
    assert daemon.ask_agent({"t": "resume", "groups": ["n1"]}) == {"re": 2}
    assert heard == [Pause(groups=("n1",), timeout_s=5.0), Resume(groups=("n1",))]


def test_capabilities_that_come_later_are_announced_on_a_new_connection(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    ts.on_contended(lambda contended: None)
    daemon.wait_until(lambda: daemon.agent_caps() == [("empty_cache",)])
    ts.on_pause(lambda pause: None)
    daemon.wait_until(lambda: daemon.agent_caps() == [("empty_cache", "quiesce")])


def test_a_callback_that_fails_is_the_answer_and_not_the_end(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    @ts.on_pause
    def busy(pause: Pause) -> None:
        raise OSError("still writing")

    daemon.wait_until(daemon.agent_caps)
    answer = daemon.ask_agent({"t": "quiesce", "groups": ["n1"], "timeout_s": 5.0})
    assert answer["err"]["code"] == "internal"
    assert "OSError: still writing" in answer["err"]["message"]
    assert daemon.ask_agent({"t": "empty_cache"})["bytes"] == 0
    unknown = daemon.ask_agent({"t": "dance"})
    assert unknown["err"]["code"] == "unknown_request"


def test_contention_and_loss_are_told_while_the_caller_computes(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    heard: queue.Queue[Contended | Lost] = queue.Queue()

    @ts.on_contended
    def fails(contended: Contended) -> None:
        raise ValueError("a callback that fails does not keep the next from running")

    ts.on_contended(heard.put)
    ts.on_lost(heard.put)
    lease = ts.acquire("n1")
    daemon.queue_up(("n1",))
    assert heard.get(timeout=LIMIT_S) == Contended(lease=lease.id, groups=("n1",), waiters=1)
    daemon.clear_queue()
    assert heard.get(timeout=LIMIT_S) == Contended(lease=lease.id, groups=("n1",), waiters=0)
    daemon.end_lease(lease.id, "operator")
    assert heard.get(timeout=LIMIT_S) == Lost(lease=lease.id, reason="operator")
    assert state_of(lease) is LeaseState.LOST
    assert daemon.count("hello") == 2
    assert heard.empty()


def test_a_hold_that_may_end_is_told_while_the_caller_computes(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    heard: queue.Queue[HoldWarning] = queue.Queue()
    ts.on_hold_warning(heard.put)
    lease = ts.acquire("n1")
    told = {"lease": lease.id, "groups": ["n1"], "ends_in_s": 30, "waiters": 2}
    warning = {"t": "hold_warning", **told}
    daemon.tell_holder(lease.id, warning)
    expected = HoldWarning(lease=lease.id, groups=("n1",), ends_in_s=30.0, waiters=2)
    assert heard.get(timeout=LIMIT_S) == expected


def test_how_far_a_move_has_come_is_told_to_whoever_waits_for_it(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    heard: queue.Queue[Waiting] = queue.Queue()
    ts.on_waiting(heard.put)
    lease = ts.acquire("n1")
    daemon.tell_holder(
        lease.id,
        {
            "t": "moving",
            "lease": "L9",
            "job": {"cluster": "", "uid": 0, "id": "a"},
            "step": "snapshotting",
            "seconds": 2.0,
            "done_bytes": 4,
            "total_bytes": 10,
            "bytes_per_s": 2.0,
            "left_s": 3.0,
            "measured": True,
        },
    )
    assert heard.get(timeout=LIMIT_S) == Waiting(
        lease="L9",
        job="a",
        step="snapshotting",
        done_bytes=4,
        total_bytes=10,
        bytes_per_s=2.0,
        left_s=3.0,
    )


def test_contention_is_told_also_if_another_thread_reads(daemon: FakeDaemon, ts: TimeSlice) -> None:
    heard: queue.Queue[Contended] = queue.Queue()
    ts.on_contended(heard.put)
    lease = ts.acquire("n1")
    other = daemon.steal(("n2",))
    waiting = Background(lambda: ts.acquire("n2"))
    daemon.wait_until(lambda: daemon.waiting)
    daemon.queue_up(("n1",))
    assert heard.get(timeout=LIMIT_S).lease == lease.id
    daemon.give_back(other)
    waiting.result()


def test_a_lease_that_begins_contended_is_told_once(daemon: FakeDaemon, ts: TimeSlice) -> None:
    heard: queue.Queue[Contended] = queue.Queue()
    daemon.queue_up(("n2",))  # makes the fake say so in the grant
    ts.on_contended(heard.put)
    lease = ts.acquire("n1")
    notice = Contended(lease=lease.id, groups=("n1",), waiters=1)
    assert heard.get(timeout=LIMIT_S) == notice
    daemon.queue_up(("n1",))
    daemon.clear_queue()
    assert heard.get(timeout=LIMIT_S) == Contended(lease=lease.id, groups=("n1",), waiters=0)


def test_loss_is_told_though_no_daemon_is_there_for_the_agent(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    heard: queue.Queue[Lost] = queue.Queue()
    daemon.grace_s = 0.1
    ts.on_lost(heard.put)
    lease = ts.acquire("n1")
    daemon.stop()
    assert heard.get(timeout=LIMIT_S).lease == lease.id


def test_why_a_turn_does_not_come_is_logged(
    daemon: FakeDaemon, ts: TimeSlice, caplog: pytest.LogCaptureFixture
) -> None:
    with ts.lease("n1") as lease:
        for session in daemon.sessions.values():
            session.send({"t": "stalled", "lease": lease.id, "reason": "b cannot be moved: ipc"})
        assert not lease.contended
    assert "b cannot be moved: ipc" in caplog.text


def test_an_agent_reconnects_by_itself_and_registers_again(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    ts.register()
    daemon.wait_until(lambda: daemon.count("register") == 2)
    daemon.stop(forget=True)
    daemon.start()
    daemon.wait_until(lambda: daemon.count("register") == 3)
    assert daemon.ask_agent({"t": "empty_cache"})["bytes"] == 0


@pytest.mark.parametrize("forget", [False, True], ids=["known", "forgotten"])
def test_a_pause_that_the_daemon_has_forgotten_is_over(
    daemon: FakeDaemon, ts: TimeSlice, forget: bool
) -> None:
    heard: queue.Queue[Pause | Resume] = queue.Queue()
    ts.on_pause(heard.put)
    ts.on_resume(heard.put)
    daemon.wait_until(daemon.agent_caps)
    assert "err" not in daemon.ask_agent({"t": "quiesce", "groups": ["n1"], "timeout_s": 5.0})
    assert isinstance(heard.get(timeout=LIMIT_S), Pause)
    hellos = daemon.count("hello")
    daemon.stop(forget=forget)
    daemon.start()
    daemon.wait_until(lambda: daemon.count("hello") > hellos)
    if not forget:
        # Who knows of the pause says when it is over.
        assert "err" not in daemon.ask_agent({"t": "empty_cache"})
        assert heard.empty()
        daemon.ask_agent({"t": "resume", "groups": ["n1"]})
    assert heard.get(timeout=LIMIT_S) == Resume(groups=("n1",))
    assert "err" not in daemon.ask_agent({"t": "empty_cache"})
    assert heard.empty(), "and it is over once"


def test_an_agent_ends_with_its_client(daemon: FakeDaemon) -> None:
    with connect(daemon.path) as ts:
        ts.on_pause(lambda pause: None)
        daemon.wait_until(daemon.agent_caps)
        agent = next(t for t in threading.enumerate() if t.name == "timeslice-agent")
    agent.join(LIMIT_S)
    assert not agent.is_alive()
    daemon.wait_until(lambda: not daemon.connections)
    ts.on_resume(lambda resume: None)
    assert not any(t.name == "timeslice-agent" for t in threading.enumerate())


def test_a_coroutine_function_is_a_callback_too(daemon: FakeDaemon, ts: TimeSlice) -> None:
    heard = []

    @ts.on_pause
    async def pause(notice: Pause) -> None:
        await asyncio.sleep(0)
        heard.append(notice.groups)

    daemon.wait_until(daemon.agent_caps)
    daemon.ask_agent({"t": "quiesce", "groups": ["n2"], "timeout_s": 5.0})
    assert heard == [("n2",)]


def test_callbacks_of_the_asyncio_client_run_on_its_loop(daemon: FakeDaemon) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard: list[object] = []
        async with aio_connect(daemon.path) as ts:

            @ts.on_pause
            async def pause(notice: Pause) -> None:
                heard.append((notice.groups, asyncio.get_running_loop() is loop))

            @ts.on_resume
            def resume(notice: Resume) -> None:
                heard.append((notice.groups, asyncio.get_running_loop() is loop))

            await ts.status()
            await asyncio.to_thread(daemon.wait_until, daemon.agent_caps)
            for message in (
                {"t": "quiesce", "groups": ["n1"], "timeout_s": 5.0},
                {"t": "resume", "groups": ["n1"]},
            ):
                answer = await asyncio.to_thread(daemon.ask_agent, message)
                assert "err" not in answer
            assert heard == [(("n1",), True), (("n1",), True)]

    asyncio.run(main())
    daemon.wait_until(lambda: not daemon.connections)


def test_a_callback_that_outlives_the_pauses_time_out_is_cancelled_and_answered(
    daemon: FakeDaemon,
) -> None:
    async def main() -> None:
        cancelled = asyncio.Event()
        async with aio_connect(daemon.path) as ts:

            @ts.on_pause
            async def pause(notice: Pause) -> None:
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.set()

            await ts.status()
            await asyncio.to_thread(daemon.wait_until, daemon.agent_caps)
            message = {"t": "quiesce", "groups": ["n1"], "timeout_s": 0.05}
            answer = await asyncio.to_thread(daemon.ask_agent, message)
            assert "TimeoutError" in answer["err"]["message"]
            await asyncio.wait_for(cancelled.wait(), LIMIT_S)

    asyncio.run(main())
