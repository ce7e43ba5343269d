"""What jobs show of leaving their devices and coming back, and what it is good for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from in_process import D1, LIMIT_S, MIB, Inside, inside, job, process_of, until

from tsliced.core.events import QualifyRequested
from tsliced.core.model import Cause, CoreLimits, FoundRank, ProcessId, RankState, Reason, Verb
from tsliced.host.backends.base import Outcome, failed
from tsliced.qualifying import Qualifying

Story: TypeAlias = Callable[[Inside], Awaitable[None]]
LIMITS = CoreLimits(retry_min_s=0.01, retry_max_s=0.05, max_evict_tries=3)


def tell(tmp_path: Path, story: Story) -> None:
    """Run a story on a fresh driver, within a limit."""

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), inside(tmp_path, limits=LIMITS) as daemon:
            await story(daemon)

    asyncio.run(run())


def of(daemon: Inside) -> Qualifying:
    qualifying = daemon.driver.around.qualifying
    assert qualifying is not None
    return qualifying


def test_who_comes_back_whole_has_made_its_kind_known(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as first, process_of("b") as second:
            await daemon.make_room("a", first, 10 * MIB)
            found = of(daemon).shown(job("a"))
            assert (found["state"], found["reason"]) == ("qualified", None)
            assert found["ranks"][0]["back_bytes"] == 10 * MIB
            await daemon.make_room("b", second, 10 * MIB)
            assert daemon.backend.calls[-2:] == [f"freeze {second.pid}", f"snapshot {second.pid}"]
            assert f"restore {second.pid}" not in daemon.backend.calls
            assert of(daemon).shown(job("b"))["state"] == "known"

    tell(tmp_path, story)


def test_who_comes_back_with_less_is_named_and_makes_nothing_known(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        daemon.backend.lost_bytes = 2 * MIB
        with process_of("a") as first, process_of("b") as second:
            await daemon.make_room("a", first, 10 * MIB)
            found = of(daemon).shown(job("a"))
            assert found["state"] == "failed"
            assert f"process {first.pid} had 10,485,760 bytes" in found["reason"]
            assert "came back with 8,388,608" in found["reason"]
            assert "not_whole" in daemon.log.getvalue()
            await daemon.make_room("b", second, 10 * MIB)
            assert f"restore {second.pid}" in daemon.backend.calls, "it is tried again"

    tell(tmp_path, story)


def test_what_nvml_shows_late_is_waited_for(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        daemon.backend.lost_bytes = 2 * MIB
        with process_of("a") as rank:
            loop = asyncio.get_running_loop()

            def thawed() -> bool:
                return daemon.backend.calls[-1:] == [f"thaw {rank.pid}"]

            async def appear() -> None:
                await until(thawed, "it is thawed")
                loop.call_later(0.1, daemon.devices.put, rank, 10 * MIB)

            late = asyncio.create_task(appear())
            await daemon.make_room("a", rank, 10 * MIB)
            await late
            assert of(daemon).shown(job("a"))["state"] == "qualified"

    tell(tmp_path, story)


def test_a_process_that_is_being_ended_tells_nothing_of_its_kind(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            await daemon.make_room("a", rank, 10 * MIB)
            ranks = daemon.machine.tenancies.tenancies_of(job("a"))[0].participant.ranks
            on_devices = frozenset({D1})
            found = FoundRank(process=rank, job=job("a"), devices=on_devices, device_bytes=MIB)
            for observed, is_good in ((RankState.UNKNOWN, True), (RankState.PARKED, False)):
                outcome = failed(ranks[rank].id, Cause.UNSUPPORTED, "no CUDA", observed)
                of(daemon).on_operation(ranks[rank].id, Verb.RESTORE, outcome)
                earlier = await of(daemon).recall(found)
                assert earlier is not None
                assert earlier.qualified is is_good

    tell(tmp_path, story)


@pytest.mark.parametrize("cause", [Cause.UNSUPPORTED, Cause.DRIVER])
def test_only_what_is_not_supported_is_held_against_others_of_the_kind(
    tmp_path: Path, cause: Cause
) -> None:
    async def story(daemon: Inside) -> None:
        failure = Reason(cause=cause, text="it says no")
        daemon.backend.instead["restore"] = Outcome(observed=RankState.PARKED, failure=failure)
        with process_of("a") as first, process_of("b") as second:
            await daemon.make_room("a", first, 10 * MIB)
            daemon.devices.put(second, 10 * MIB)
            del daemon.backend.instead["restore"]
            session = daemon.open("b", second)
            grant = await daemon.grant(session)
            daemon.release(session, grant.lease)
            request = daemon.ask(daemon.open("c"))
            if cause is Cause.DRIVER:
                await daemon.answer(request)
                return
            await until(lambda: "pinned" in daemon.log.getvalue(), "it stays")
            assert f"freeze {second.pid}" not in daemon.backend.calls
            assert of(daemon).shown(job("b"))["state"] == "failed"
            (tenancy,) = daemon.machine.tenancies.tenancies_of(job("b"))
            assert tenancy.coordinator.pinned is not None

    tell(tmp_path, story)


def test_who_came_back_itself_is_not_judged_by_others_of_its_kind(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            daemon.devices.put(rank, 10 * MIB)
            session = daemon.open("a", rank)
            grant = await daemon.grant(session)
            daemon.release(session, grant.lease)
            daemon.driver.post(QualifyRequested(job=job("a")))
            await until(lambda: of(daemon).shown(job("a"))["state"] == "qualified", "it is back")
            name = of(daemon)._name(rank)
            assert name is not None
            of(daemon).kinds.keep_failure(name, "cat", "801")
            await daemon.grant(daemon.open("b"))
            assert daemon.backend.calls[-1] == f"snapshot {rank.pid}"

    tell(tmp_path, story)


def test_what_is_expected_goes_by_the_rank_itself_and_else_by_its_kind(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as first, process_of("b") as second:
            assert of(daemon).expected_s(first, Verb.SNAPSHOT, MIB) is None
            await daemon.make_room("a", first, 10 * MIB)
            took = of(daemon).shown(job("a"))["ranks"][0]
            daemon.devices.put(second, 20 * MIB)
            session = daemon.open("b", second)
            grant = await daemon.grant(session)
            daemon.release(session, grant.lease)
            found = await of(daemon).recall(await look_at(daemon, second))
            assert found is not None
            assert found.qualified
            assert found.switch_s == pytest.approx(2 * (took["out_s"] + took["in_s"]))
            expected = of(daemon).expected_s(second, Verb.SNAPSHOT, 10 * MIB)
            assert expected == pytest.approx(took["out_s"])

    async def look_at(daemon: Inside, process: ProcessId) -> FoundRank:
        seen = await daemon.driver.around.scanner.look_at(process)
        assert seen is not None
        await until(lambda: process in daemon.machine.tenancies.home, "it is known")
        return seen

    tell(tmp_path, story)
