"""What the daemon shows of itself, in each state that a group and a job can be in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import D1, D2, G1, G2, LIMIT_S, MIB, Inside, inside, job, process_of, until

import tsliced.observe.status
from libtimeslice import __version__
from libtimeslice.protocol import FrameReader, encode
from tsliced.core.actions import TellStalled
from tsliced.core.events import AcquireRequested, RankRegistered, SessionClosed
from tsliced.core.model import Cause, FoundRank, RankState, Reason, RequestId
from tsliced.host.backends.base import Outcome
from tsliced.host.devices import Device
from tsliced.host.memory import HostMemory
from tsliced.observe.status import StatusPage

UID = os.getuid()
A, B = ({"cluster": "", "uid": UID, "id": name} for name in "ab")


def page_of(daemon: Inside) -> StatusPage:
    device = Device(
        uuid=D1, index=3, name="Model", total_bytes=64 * MIB, driver_version="580.95.05"
    )
    around = daemon.driver.around
    return StatusPage(
        machine=daemon.machine,
        scanner=around.scanner,
        inventory=(device,),
        backend="cuda",
        memory=HostMemory(),
        reserved_bytes=around.ledgers.host.promised,
    )


class Page:
    """The status as a client gets it."""

    def __init__(self, daemon: Inside) -> None:
        self._page = page_of(daemon)

    def status(self) -> dict[str, Any]:
        (message,) = FrameReader().feed(encode(self._page.status()))
        return message

    def group(self, name: str = G1) -> dict[str, Any]:
        return next(group for group in self.status()["groups"] if group["name"] == name)

    def job(self, name: str) -> dict[str, Any]:
        return next(j for j in self.status()["jobs"] if j["job"]["id"] == name)

    def ranks(self) -> list[dict[str, Any]]:
        (message,) = FrameReader().feed(encode({"ranks": self._page.ranks()}))
        ranks: list[dict[str, Any]] = message["ranks"]
        return ranks


def tell(tmp_path: Path, story: Callable[[Inside, Page], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), inside(tmp_path) as daemon:
            await story(daemon, Page(daemon))

    asyncio.run(run())


def test_a_host_where_nothing_happens(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        await daemon.driver.around.scanner.look([G1])
        status = page.status()
        assert (status["schema"], status["host"], status["version"]) == (1, "n1", __version__)
        assert (status["driver"], status["backend"]) == ("580.95.05", "cuda")
        assert status["pid"] == os.getpid()
        assert status["jobs"] == []
        assert status["memory"]["available_bytes"] > 0
        assert status["memory"]["reserved_bytes"] == 0
        group = page.group()
        assert group["state"] == "free"
        for name in ("holder", "next", "lease_since_s", "phase", "token", "reason"):
            assert group[name] is None
        assert (group["resident"], group["waiters"], group["queue"]) == ([], 0, [])
        (device,) = group["devices"]
        assert (device["uuid"], device["index"], device["name"]) == (D1, 3, "Model")
        assert (device["total_bytes"], device["used_bytes"]) == (64 * MIB, 0)
        (other,) = page.group(G2)["devices"]
        assert (other["uuid"], other["name"], other["used_bytes"]) == (D2, "unknown", None)

    tell(tmp_path, story)


def test_a_group_that_is_held_and_waited_for(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        first, second = daemon.open("a"), daemon.open("b")
        daemon.driver.post(
            AcquireRequested(session=first, request=RequestId(100), groups=(G1,), phase="train")
        )
        granted = await daemon.answer(RequestId(100))
        daemon.ask(second)
        await until(lambda: page.group()["waiters"], "it is waited for")
        group = page.group()
        assert (group["state"], group["holder"], group["phase"]) == ("held", A, "train")
        assert group["token"] == dict(granted.tokens)[G1].as_int()  # type: ignore[union-attr]
        assert group["lease_since_s"] >= 0
        assert group["resident"] == [A]
        (waiting,) = group["queue"]
        assert (waiting["job"], waiting["phase"], waiting["arrived"]) == (B, None, 1)
        assert waiting["waited_s"] >= 0
        assert page.job("a")["state"] == "held"
        assert page.job("a")["held_s"] >= 0
        assert page.job("b")["state"] == "waiting"
        assert page.status()["sessions"] == 2

    tell(tmp_path, story)


def test_a_switch_shows_who_comes_and_what_is_being_done(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        with process_of("a") as rank:
            first = daemon.open("a", rank)
            lease = await daemon.grant(first)
            daemon.devices.put(rank, 8 * MIB)
            daemon.release(first, lease.lease)
            await until(lambda: page.job("a")["state"] == "resident", "its state stays")
            assert page.group()["state"] == "free"
            daemon.backend.gate.clear()
            request = daemon.ask(daemon.open("b"))
            await until(lambda: daemon.backend.calls, "it is being frozen")
            group = page.group()
            assert (group["state"], group["holder"], group["next"]) == ("switching", None, B)
            (shown,) = page.ranks()
            assert shown["pid"] == rank.pid
            assert shown["job"] == A
            assert (shown["host"], shown["name"], shown["uid"]) == ("n1", "cat", UID)
            assert (shown["groups"], shown["devices"]) == ([G1], [D1])
            assert shown["device_bytes"] == 8 * MIB
            assert (shown["state"], shown["doing"]) == ("running", "freeze")
            assert shown["doing_s"] >= 0
            assert page.status()["memory"]["reserved_bytes"] == 8 * MIB
            daemon.backend.gate.set()
            await daemon.answer(request)
            (shown,) = page.ranks()
            assert (shown["state"], shown["doing"], shown["doing_s"]) == ("parked", None, None)
            parked = page.job("a")
            assert (parked["state"], parked["ranks"]) == ("parked", 1)
            assert (parked["parked_bytes"], parked["device_bytes"]) == (8 * MIB, 0)
            assert parked["switches"] == 2, "it came on, and it was taken off"
            assert page.status()["memory"]["reserved_bytes"] == 0, "it is in use, not promised"

    tell(tmp_path, story)


def test_a_round_that_gathers_shows_who_came(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        with process_of("a") as rank:
            session = daemon.open("a", rank)
            daemon.driver.post(
                AcquireRequested(session=session, request=RequestId(1), groups=(G1,), ranks=2)
            )
            await until(lambda: page.status()["jobs"], "it gathers")
            assert page.job("a")["gathering"] == [
                {"groups": [G1], "ranks": 2, "arrived": [rank.pid]}
            ]
            assert page.job("a")["state"] == "waiting"
            assert page.group()["state"] == "free"

    tell(tmp_path, story)


def test_a_group_that_is_kept_for_a_lease_of_several_is_reserved(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        await daemon.grant(daemon.open("b"), G2)
        daemon.ask(daemon.open("a"), G1, G2)
        await until(lambda: page.group(G2)["waiters"], "it waits for the second one")
        assert (page.group()["state"], page.group()["next"]) == ("reserved", A)

    tell(tmp_path, story)


def test_why_a_waiter_waits_is_shown(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        with process_of("a") as rank:
            first = daemon.open("a", rank)
            daemon.release(first, (await daemon.grant(first)).lease)
            daemon.devices.put(rank, MIB)
            why = Reason(cause=Cause.UNSUPPORTED, text="managed memory")
            daemon.backend.instead["snapshot"] = Outcome(observed=RankState.FROZEN, failure=why)
            daemon.ask(daemon.open("b"))
            await until(lambda: daemon.clients.of(TellStalled), "it is told")
            assert "managed memory" in page.group()["reason"]
            assert "managed memory" in page.job("a")["reason"], "what is pinned says so"

    tell(tmp_path, story)


def test_a_group_whose_process_is_broken_is_blocked_with_the_reason(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        with process_of("a") as rank:
            first = daemon.open("a", rank)
            daemon.release(first, (await daemon.grant(first)).lease)
            daemon.devices.put(rank, MIB)
            why = Reason(cause=Cause.FAILED, text="its context is lost")
            daemon.backend.instead["snapshot"] = Outcome(observed=RankState.FAILED, failure=why)
            daemon.ask(daemon.open("b"))
            await until(lambda: page.group()["state"] == "blocked", "it is blocked")
            assert page.group()["reason"]
            assert page.ranks()[0]["state"] == "failed"

    tell(tmp_path, story)


def test_a_group_with_a_silent_host_is_uncertain_and_who_holds_it_is_shown(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        await daemon.grant(daemon.open("a"), G1)
        # What `Hosts` concludes from its links.
        daemon.machine.leasing.silent = {G1: Reason(cause=Cause.SILENT, text="n2 is silent")}
        group = page.group()
        assert (group["state"], group["reason"]) == ("uncertain", "n2 is silent")
        assert group["holder"] == A
        assert page.group(G2)["state"] == "free"

    tell(tmp_path, story)


def test_with_more_waiters_than_fit_into_an_answer_all_are_counted_and_some_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tsliced.observe.status, "MOST_SHOWN", 3)

    async def story(daemon: Inside, page: Page) -> None:
        with process_of("z") as rank:
            session = daemon.open("z", rank)
            await daemon.grant(session)
            for number in range(5):
                daemon.ask(daemon.open(f"a{number}"))
            await until(lambda: page.group()["waiters"] == 5, "all wait")
            assert [w["job"]["id"] for w in page.group()["queue"]] == ["a0", "a1", "a2"]
            shown = [j["job"]["id"] for j in page.status()["jobs"]]
            assert shown == ["z", "a0", "a1"], "those with something on the host come first"

    tell(tmp_path, story)


def test_what_has_no_client_is_an_orphan(tmp_path: Path) -> None:
    async def story(daemon: Inside, page: Page) -> None:
        with process_of("a") as rank:
            session = daemon.open("a", rank)
            await daemon.grant(session)
            found = FoundRank(process=rank, job=job("a"), devices=frozenset({D1}), device_bytes=MIB)
            daemon.driver.post(RankRegistered(job=job("a"), found=found, groups=(G1,)))
            await until(lambda: page.job("a")["ranks"], "its rank is known")
            assert (page.job("a")["orphaned"], page.ranks()[0]["orphaned"]) == (False, False)
            assert page.job("a")["reason"] is None
            assert page.group()["unasked"] is False
            daemon.driver.post(SessionClosed(session=session))
            await until(lambda: page.job("a")["orphaned"], "it is an orphan")
            assert page.job("a")["state"] == "orphaned"
            assert "tslicectl kill" in page.job("a")["reason"]
            assert page.ranks()[0]["orphaned"] is True

    tell(tmp_path, story)
