"""Whose comments are written by this host, and that nothing depends on it; see also tests/slurm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from in_process import HOST, LIMIT_S, Inside, inside, until

from tsliced.host.allocations import Allocation, Allocations
from tsliced.host.history import Event
from tsliced.net.commenting import Commenting


def allocation(id: str, *nodes: str, complete: bool = True) -> Allocation:
    return Allocation(id=id, uid=1000, nodes=nodes, node=HOST, complete=complete)


def told(daemon: Inside) -> list[Event]:
    events = daemon.driver.around.history.since(0, 100).events
    return [event for event in events if event["kind"] == "slurm"]


def comment_on(
    tmp_path: Path, allocations: Iterable[Allocation], *, count: int, interval_s: float = 0.01
) -> list[Event]:
    """Comment on jobs, with nobody at the socket; return what is told of the first failures."""

    async def run() -> list[Event]:
        async with asyncio.timeout(LIMIT_S), inside(tmp_path) as daemon:
            known = Allocations()
            for each in allocations:
                known.put(each)
            socket = str(tmp_path / "nobody")
            commenting = Commenting(
                daemon.driver, known, socket=socket, interval_s=lambda: interval_s
            )
            commenting.look()
            task = asyncio.create_task(commenting.write_for_ever())
            await until(lambda: len(told(daemon)) >= count or task.done(), "it is told")
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return told(daemon)

    return asyncio.run(run())


def test_a_failure_is_told_aloud_once_and_others_are_written_of_all_the_same(
    tmp_path: Path,
) -> None:
    events = comment_on(tmp_path, [allocation("7", "n1"), allocation("8", "n1", "n2")], count=2)
    assert [(event["job"], event["level"]) for event in events[:2]] == [
        ("7", "warning"),
        ("8", "debug"),
    ]
    assert "written: there is no socket at" in str(events[0]["reason"])


def test_of_a_job_on_several_hosts_the_first_one_writes_if_they_are_known(tmp_path: Path) -> None:
    jobs = [allocation("7", "n2", "n1"), allocation("8", "n1", complete=False)]
    events = comment_on(tmp_path, [*jobs, allocation("9", "n1")], count=1, interval_s=1e6)
    assert [event["job"] for event in events] == ["9"]


def test_jobs_that_have_ended_are_written_of_once_if_it_is_for_this_host(tmp_path: Path) -> None:
    async def run() -> list[Event]:
        async with asyncio.timeout(LIMIT_S), inside(tmp_path) as daemon:
            socket = str(tmp_path / "nobody")
            commenting = Commenting(
                daemon.driver, Allocations(), socket=socket, interval_s=lambda: 0.01
            )
            commenting.end(allocation("7", "n2", "n1"))
            commenting.end(allocation("8", "n1"))
            task = asyncio.create_task(commenting.write_for_ever())
            await until(lambda: told(daemon), "it is told")
            commenting.end(allocation("9", "n1"))
            await until(lambda: len(told(daemon)) > 1, "and of the next one")
            task.cancel()
            return told(daemon)

    assert [event["job"] for event in asyncio.run(run())] == ["8", "9"]


def test_while_it_is_off_nothing_is_written_and_then_of_who_is_there(tmp_path: Path) -> None:
    async def run() -> list[Event]:
        async with asyncio.timeout(LIMIT_S), inside(tmp_path) as daemon:
            asked: list[None] = []
            known = Allocations()

            def interval_s() -> float:
                asked.append(None)
                return 0.0 if len(asked) == 1 else 1e6

            socket = str(tmp_path / "nobody")
            commenting = Commenting(daemon.driver, known, socket=socket, interval_s=interval_s)
            commenting.end(allocation("7", "n1"))
            task = asyncio.create_task(commenting.write_for_ever())
            await until(lambda: asked, "it is off")
            known.put(allocation("8", "n1"))
            commenting.look()
            await until(lambda: told(daemon), "the next one is written of")
            task.cancel()
            return told(daemon)

    assert [event["job"] for event in asyncio.run(run())] == ["8"]
