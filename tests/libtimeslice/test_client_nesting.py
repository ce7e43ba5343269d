"""What a client says of the leases that a request is inside of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from fake_daemon import FakeDaemon

from libtimeslice import TimeSlice, connect
from libtimeslice.aio import connect as aio_connect
from libtimeslice.protocol import Message


@pytest.fixture
def ts(daemon: FakeDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path, job="j") as client:
        yield client


def asked(daemon: FakeDaemon) -> list[Message]:
    """Return the acquires that the daemon has seen."""
    return [message for message in daemon.log if message["t"] == "acquire"]


def test_a_lease_inside_of_another_says_so_and_one_after_it_does_not(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n2") as outer, ts.lease("n1"):
        pass
    with ts.lease("n1"):
        pass
    assert [message.get("inside") for message in asked(daemon)] == [None, [outer.id], None]


def test_what_another_thread_asks_for_meanwhile_is_inside_of_nothing(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n2"):
        thread = threading.Thread(target=lambda: ts.acquire("n1").release())
        thread.start()
        thread.join(10)
    assert [message.get("inside") for message in asked(daemon)] == [None, None]


def test_a_plain_acquire_counts_until_it_is_released(daemon: FakeDaemon, ts: TimeSlice) -> None:
    outer = ts.acquire("n2")
    ts.acquire("n1").release()
    outer.release()
    ts.acquire("n1").release()
    assert [message.get("inside") for message in asked(daemon)] == [None, [outer.id], None]


def test_a_task_is_inside_of_what_it_was_started_in_and_its_sibling_is_not(
    daemon: FakeDaemon,
) -> None:
    async def run() -> str:
        async with aio_connect(daemon.path) as client:

            async def inner() -> None:
                async with client.lease("n1"):
                    pass

            async with client.lease("n2") as outer:
                await asyncio.create_task(inner())
            await asyncio.create_task(inner())
            return outer.id

    outer = asyncio.run(run())
    assert [message.get("inside") for message in asked(daemon)] == [None, [outer], None]
