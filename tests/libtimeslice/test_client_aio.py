"""The asyncio client, on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from fake_daemon import LIMIT_S, FakeConnection, FakeDaemon, state_of

from libtimeslice import (
    AcquireTimeout,
    ClientClosed,
    DaemonUnreachable,
    LeaseLost,
    LeaseState,
    Lost,
    NotPermitted,
    Released,
    UnknownGroup,
)
from libtimeslice.aio import AsyncLease, AsyncTimeSlice, connect
from libtimeslice.protocol import Message, error_message

Main = Callable[[FakeDaemon, AsyncTimeSlice], Coroutine[Any, Any, None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, daemon: FakeDaemon) -> Callable[..., None]:
    """Runs a coroutine function with a client, on either kind of loop."""

    def run_main(main: Main, **options: Any) -> None:
        async def with_client() -> None:
            async with connect(daemon.path, job="j", **options) as ts:
                await asyncio.wait_for(main(daemon, ts), 2 * LIMIT_S)

        if request.param == "uvloop":
            loop = uvloop.new_event_loop()
            try:
                loop.run_until_complete(with_client())
            finally:
                loop.close()
        else:
            asyncio.run(with_client())
        daemon.wait_until(lambda: not daemon.connections)

    return run_main


async def until(daemon: FakeDaemon, true: Callable[[], object]) -> None:
    """Waits for the daemon's state without blocking the loop."""
    await asyncio.to_thread(daemon.wait_until, true)


async def until_here(true: Callable[[], object]) -> None:
    """Waits for the client's state, which changes on this very loop."""
    limit = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < limit
        await asyncio.sleep(0.001)


def test_a_lease_tells_the_grant_and_ends_with_its_block(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        assert daemon.log == []
        async with ts.lease("n1", timeout=60, phase="rollout") as lease:
            assert list(daemon.held) == [lease.id]
            assert (lease.token, lease.restored, lease.switch_s) == (1, True, 0.25)
            async with ts.lease("n1") as inner, ts.lease("n2"):
                assert inner.id == lease.id
            assert state_of(lease) is LeaseState.HELD
        assert state_of(lease) is LeaseState.RELEASED
        assert daemon.held == {}
        assert daemon.count("acquire") == 2
        assert daemon.last("hello")["job"] == "j"

    run(main)


def test_signs_of_life_are_sent_if_they_were_promised(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        await ts.heartbeat()
        async with connect(daemon.path, heartbeat_s=1000) as promising:
            await promising.heartbeat()
            await promising.heartbeat()
            await promising.status()
        assert daemon.count("heartbeat") == 1

    run(main)


def test_acquire_release_status_register_and_notices(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        await ts.acquire("n1")
        second = await ts.acquire("n2")
        assert await ts.release(second) == Released(waiters=0, deferred=True)
        assert await ts.release() == Released(waiters=0, deferred=True)
        assert await second.release() is None
        with pytest.raises(ValueError, match="nothing was acquired"):
            await ts.release()
        async with ts.phase("reward"):
            await ts.progress(step=1, loss=0.5)
            await ts.queue("q", depth=3, target=4)
        assert len((await ts.status())["groups"]) == 2
        assert daemon.count("phase") == 2
        assert daemon.last("progress")["fields"] == {"step": 1, "loss": 0.5}
        assert daemon.last("queue")["depth"] == 3
        assert await ts.register() == ("n1",)
        await until(daemon, lambda: daemon.agent_caps() == [("empty_cache",)])

    run(main)


def test_many_tasks_wait_at_the_same_time(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        daemon.groups = tuple(f"g{number}" for number in range(8))
        others = {group: daemon.steal((group,)) for group in daemon.groups}
        tasks = {group: asyncio.ensure_future(ts.acquire(group)) for group in daemon.groups}
        joined = asyncio.ensure_future(ts.acquire("g3"))
        await until(daemon, lambda: len(daemon.waiting) == 8)
        for group in reversed(daemon.groups):
            daemon.give_back(others[group])
            assert (await tasks[group]).groups == (group,)
        assert (await joined).id == (await tasks["g3"]).id
        assert daemon.count("acquire") == 8

    run(main)


def test_time_outs_leave_no_trace(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G5."""
    monkeypatch.setattr("libtimeslice.aio.TIMEOUT_SLACK_S", 0.01)

    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        other = daemon.steal(("n1",))
        with pytest.raises(AcquireTimeout):
            await ts.acquire("n1", timeout=0)
        daemon.mute_timeouts = True
        with pytest.raises(AcquireTimeout):
            await ts.acquire("n1", timeout=0.02)
        await until(daemon, lambda: not daemon.waiting)
        first = asyncio.ensure_future(ts.acquire("n1"))
        await until(daemon, lambda: daemon.waiting)
        with pytest.raises(AcquireTimeout):  # it waits for the first, not for the daemon
            await ts.acquire("n1", timeout=0.01)
        daemon.give_back(other)
        await (await first).release()
        assert daemon.held == {}

    run(main)


def test_a_cancelled_task_leaves_the_queue_and_hands_a_crossing_grant_back(
    run: Callable[..., None],
) -> None:
    """G5."""

    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        other = daemon.steal(("n1",))
        task = asyncio.ensure_future(ts.acquire("n1"))
        await until(daemon, lambda: daemon.waiting)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(daemon, lambda: not daemon.waiting)

        def grant_on_cancel(connection: FakeConnection, message: Message) -> bool:
            if message.get("t") == "cancel":
                daemon.give_back(other)
            return False

        task = asyncio.ensure_future(ts.acquire("n1"))
        await until(daemon, lambda: daemon.waiting)
        daemon.intercept = grant_on_cancel
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(daemon, lambda: daemon.count("release") == 1)
        assert not ts.holding

    run(main)


def test_a_task_cancelled_at_any_moment_holds_nothing(run: Callable[..., None]) -> None:
    """G5."""

    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        await ts.status()
        for turns in range(15):
            task = asyncio.ensure_future(ts.acquire("n1"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns > 10:
                await until(daemon, lambda: daemon.held or daemon.waiting)
            if not task.cancel():
                await (await task).release()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                await task.result().release()
            await until(daemon, lambda: not daemon.held and not daemon.waiting)
            assert not ts.holding

    run(main)


def test_contention_is_heard_by_the_loop(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        async with ts.lease("n1") as lease:
            assert not lease.contended
            daemon.queue_up(("n1",))
            await until_here(lambda: lease.contended)

    run(main)


def test_a_grant_is_acknowledged_if_the_daemon_wants_to_know(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        daemon.ack_s = 1.0
        lease = await ts.acquire("n1")
        await until(daemon, lambda: daemon.count("ack") == 1)
        assert daemon.last("ack")["lease"] == lease.id

    run(main)


def test_off_accelerators_lets_others_in_and_takes_the_devices_back(
    run: Callable[..., None],
) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        async with ts.lease("n1") as lease, ts.lease("n2"):
            before = lease.token
            async with lease.off_accelerators():
                assert len(daemon.held) == 1
                async with ts.lease("n1"):
                    assert len(daemon.held) == 2
            assert lease.token > before
            async with ts.off_accelerators():
                assert daemon.held == {}
            assert len(daemon.held) == 2
            with pytest.raises(AcquireTimeout):
                async with lease.off_accelerators(timeout=0):
                    daemon.steal(("n1",))
            assert state_of(lease) is LeaseState.LOST
            with pytest.raises(LeaseLost):
                lease.check()

    run(main)


def test_on_accelerators_decorates_coroutine_functions(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        @ts.on_accelerators("n1", phase="train")
        async def step(depth: int) -> int:
            """Trains."""
            return len(daemon.held) if depth == 0 else await step(depth - 1)

        @ts.on_accelerators
        async def everywhere() -> int:
            return len(daemon.held)

        assert await step(2) == 1
        assert step.__doc__ == "Trains."
        assert await everywhere() == 1
        around = ts.on_accelerators("n2")
        async with around, around as lease:
            assert lease.groups == ("n2",)
        assert daemon.held == {}
        assert daemon.count("acquire") == 3
        with pytest.raises(TypeError, match="no coroutine function"):
            ts.on_accelerators("n1")(lambda: None)  # type: ignore[type-var]  # the point of it

    run(main)


def test_refusals_raise_by_kind(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        with pytest.raises(UnknownGroup):
            await ts.acquire("nope")
        async with ts.lease("n1"):
            pass

    run(main)


def test_lost_answers_are_asked_for_again(run: Callable[..., None]) -> None:
    """G6."""

    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        daemon.lose_answer_to.add("acquire")
        lease = await ts.acquire("n1")
        assert list(daemon.held) == [lease.id]
        daemon.lose_answer_to.add("release")
        assert await lease.release() is None
        await until(daemon, lambda: daemon.count("release") == 2)
        assert daemon.held == {}

    run(main)


def test_a_session_is_resumed_while_the_loop_is_blocked(run: Callable[..., None]) -> None:
    """G8: a training step inside a coroutine must not cost the lease."""

    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        async with ts.lease("n1") as lease:
            daemon.stop()
            daemon.start()
            daemon.wait_until(lambda: daemon.count("hello") == 2)  # blocks the loop
            await until_here(lambda: lease.state is LeaseState.HELD)
            assert await ts.status()
            assert list(daemon.held) == [lease.id]

    run(main)


def test_waiters_keep_their_place_over_a_restart(run: Callable[..., None]) -> None:
    """G8."""

    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        other = daemon.steal(("n1",))
        task = asyncio.ensure_future(ts.acquire("n1"))
        await until(daemon, lambda: daemon.waiting)
        await asyncio.to_thread(daemon.stop)
        daemon.start()
        await until(daemon, lambda: daemon.count("acquire") == 2)
        daemon.give_back(other)
        assert state_of(await task) is LeaseState.HELD

    run(main)


def test_a_forgotten_session_loses_its_leases_and_starts_anew(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        heard: asyncio.Queue[Lost] = asyncio.Queue()
        ts.on_lost(heard.put_nowait)
        async with ts.lease("n1") as lease:
            await asyncio.to_thread(daemon.stop, forget=True)
            daemon.start()
            lost = await asyncio.wait_for(heard.get(), LIMIT_S)
            assert lost.lease == lease.id
            assert state_of(lease) is LeaseState.LOST
            async with ts.lease("n1") as again:
                assert state_of(again) is LeaseState.HELD
        assert daemon.count("release") == 1

    run(main)


def test_a_daemon_that_stays_away_ends_session_and_waits(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        daemon.grace_s = 0.1
        lease = await ts.acquire("n1")
        other = daemon.steal(("n2",))
        task = asyncio.ensure_future(ts.acquire("n2"))
        await until(daemon, lambda: daemon.waiting)
        await asyncio.to_thread(daemon.stop)
        with pytest.raises(DaemonUnreachable):
            await task
        assert state_of(lease) is LeaseState.LOST
        with pytest.raises(DaemonUnreachable):
            await ts.status()
        daemon.give_back(other)
        daemon.start()
        assert await ts.status()

    run(main, connect_timeout_s=0.1)


def test_a_daemon_that_turns_the_client_away_is_believed(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        def turn_away(connection: FakeConnection, _message: Message) -> bool:
            connection.send(error_message("not_permitted", "go away"))
            connection.hang_up()
            return True

        daemon.intercept = turn_away
        with pytest.raises(NotPermitted, match="go away"):
            await ts.status()
        assert daemon.count("hello") == 1

    run(main)


def test_a_silent_daemon_costs_the_reply_limit(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        daemon.intercept = lambda _connection, message: message.get("t") == "status"
        with pytest.raises(DaemonUnreachable, match="did not answer"):
            await ts.status()

    run(main, reply_limit_s=0.05)


def test_messages_that_do_not_fit_the_socket_are_sent_when_it_has_room(
    run: Callable[..., None],
) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        await ts.status()
        connection = await ts._line.connected(None)
        with daemon.changed:  # the daemon reads one message and then no more
            for number in range(400):
                connection.send(
                    {
                        "t": "progress",
                        "fields": {"n": number, **{f"f{i}": "x" * 30 for i in range(50)}},
                    }
                )
            assert connection._unsent
        assert await ts.status()
        assert daemon.last("progress")["fields"]["n"] == 399

    run(main)


def test_a_closed_client_says_so_also_to_those_who_wait(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        daemon.steal(("n1",))
        task = asyncio.ensure_future(ts.acquire("n1"))
        await until(daemon, lambda: daemon.waiting)
        held = await ts.acquire("n2")
        await ts.close()
        with pytest.raises(ClientClosed):
            await task
        with pytest.raises(ClientClosed):
            await ts.status()
        assert state_of(held) is LeaseState.RELEASED
        await until(daemon, lambda: daemon.byes == 1)

    run(main)


def test_a_client_without_a_daemon_runs_unshared_if_it_may(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSLICE_MODE", "off")

    async def main() -> None:
        async with connect(daemon.path) as ts, ts.lease("n1") as lease:
            assert lease.token == 0
            async with lease.off_accelerators(), ts.phase("reward"):
                await ts.progress(step=1)
            assert lease.state is LeaseState.HELD
            assert await ts.register() == ()
            assert await ts.status() == {"groups": []}

    asyncio.run(main())
    assert daemon.log == []


def test_a_client_belongs_to_one_loop(daemon: FakeDaemon) -> None:
    ts = connect(daemon.path)

    async def use() -> None:
        await ts.status()

    asyncio.run(use())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(use())
    ts.close_now()
    daemon.wait_until(lambda: daemon.byes == 1 and not daemon.connections)


def test_a_client_that_nobody_uses_any_more_is_closed(daemon: FakeDaemon) -> None:
    async def main() -> None:
        ts = connect(daemon.path)
        async with ts.lease("n1"):
            pass
        gone = weakref.ref(ts)
        del ts
        gc.collect()
        assert gone() is None
        await until(daemon, lambda: daemon.byes == 1 and not daemon.connections)

    asyncio.run(main())


def test_leases_can_be_passed_on_and_used_as_context_managers(run: Callable[..., None]) -> None:
    async def main(daemon: FakeDaemon, ts: AsyncTimeSlice) -> None:
        async with await ts.acquire("n1") as lease:
            assert isinstance(lease, AsyncLease)
        assert daemon.held == {}

    run(main)
