"""on_accelerators of the blocking client around coroutine functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from fake_daemon import LIMIT_S, FakeConnection, FakeDaemon

from libtimeslice import TimeSlice, UnknownGroup, connect
from libtimeslice.protocol import Message


@pytest.fixture
def ts(daemon: FakeDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path) as client:
        yield client


async def until(daemon: FakeDaemon, true: object) -> None:
    """Waits for the daemon's state without blocking the loop."""
    await asyncio.to_thread(daemon.wait_until, true)  # type: ignore[arg-type]  # any callable


def test_a_coroutine_function_is_leased_without_blocking_the_loop(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    other = daemon.steal(("n1",))

    inside: list[int] = []

    async def main() -> list[int]:
        all_are_inside = asyncio.Event()

        # Each asks in a thread of its own: one that asks when the others are over asks anew.
        @ts.on_accelerators("n1")
        async def step(value: int) -> int:
            inside.append(value)
            if len(inside) == 5:
                all_are_inside.set()
            await all_are_inside.wait()
            assert len(daemon.held) == 1
            return value

        steps = [asyncio.ensure_future(step(number)) for number in range(5)]
        await until(daemon, lambda: daemon.waiting)
        assert not any(task.done() for task in steps)
        daemon.give_back(other)
        return await asyncio.wait_for(asyncio.gather(*steps), LIMIT_S)

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
    assert daemon.held == {}
    assert daemon.count("acquire") == 1


def test_an_error_of_the_acquire_and_one_of_the_body_come_out(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    @ts.on_accelerators("nope")
    async def never() -> None:
        raise AssertionError("it ran")

    @ts.on_accelerators("n1")
    async def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(UnknownGroup):
        asyncio.run(never())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fails())
    assert daemon.held == {}


def test_a_cancelled_task_leaves_the_queue(daemon: FakeDaemon, ts: TimeSlice) -> None:
    """G5."""
    other = daemon.steal(("n1",))

    @ts.on_accelerators("n1")
    async def never() -> None:
        raise AssertionError("it ran")

    async def main() -> None:
        task = asyncio.ensure_future(never())
        await until(daemon, lambda: daemon.waiting)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(daemon, lambda: not daemon.waiting)

    asyncio.run(main())
    daemon.give_back(other)
    assert daemon.held == {}


def test_a_grant_that_crosses_the_cancel_of_a_task_is_handed_back(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """G5."""
    other = daemon.steal(("n1",))

    def grant_on_cancel(connection: FakeConnection, message: Message) -> bool:
        if message.get("t") == "ping":  # what wakes the thread that waits
            daemon.give_back(other)
        return False

    daemon.intercept = grant_on_cancel

    @ts.on_accelerators("n1")
    async def never() -> None:
        raise AssertionError("it ran")

    async def main() -> None:
        task = asyncio.ensure_future(never())
        await until(daemon, lambda: daemon.waiting)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Rarely the thread notices before it reads, and its cancel comes before the ping.
        await until(daemon, lambda: daemon.count("ping") == 1 and not daemon.waiting)
        await until(daemon, lambda: daemon.count("release") == daemon.granted)
        assert daemon.held == {}

    asyncio.run(main())


def test_a_task_cancelled_at_the_moment_of_its_grant_holds_nothing(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    @ts.on_accelerators("n1")
    async def step() -> None:
        await asyncio.sleep(0)

    async def main() -> None:
        for turns in range(12):
            task = asyncio.ensure_future(step())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(daemon, lambda: not daemon.held and not daemon.waiting)

    asyncio.run(main())


def test_an_asynchronous_generator_cannot_be_decorated(ts: TimeSlice) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        ts.on_accelerators("n1")(numbers)
