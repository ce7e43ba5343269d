"""The event history, asked by time, job, group and kind, also beyond what is in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Host, own, until
from raw_client import RawClient

STEPS = 300


@pytest.fixture(scope="module")
def host(softcuda_build: Path) -> Iterator[Host]:
    history = {"max_events": 20, "max_job_events_per_s": 1000.0, "flush_interval_s": 0.05}
    host = Host(softcuda_build, settings={"history": history})
    host.start_daemon()
    yield host
    host.close()


@pytest.fixture(scope="module")
def told(host: Host) -> tuple[float, float]:
    """Two jobs that told much; the time before and after."""
    before = time.time()
    with RawClient(host.socket) as one, RawClient(host.socket) as other:
        one.hello(job="one")
        other.hello(job="other")
        for step in range(STEPS):
            one.send({"t": "progress", "fields": {"step": step}})
            other.send({"t": "progress", "fields": {"step": -step}})
        # An answer may come before what was told on the same connection has its place in time.
        until(lambda: len(events(host, "--since", "1h", "--kind", "progress")) == 2 * STEPS, "all")
    return before, time.time()


def events(host: Host, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tsliced.ctl", "events", "--socket", str(host.socket)]
    run = subprocess.run(
        [*command, "--json", *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    found: list[dict[str, Any]] = json.loads(run.stdout)["events"]
    return found


def test_all_that_a_job_told_is_found_though_memory_holds_less(
    host: Host, told: tuple[float, float]
) -> None:
    found = events(host, "--job", "one", "--kind", "progress")
    assert [event["step"] for event in found] == list(range(STEPS))
    assert {event["job"] for event in found} == {own("one")}
    latest = events(host, "--job", own("one"), "--kind", "progress", "--limit", "3")
    assert latest == found[-3:]
    first = events(host, "--since", "0", "--job", "one", "--kind", "progress", "--limit", "3")
    assert first == found[:3]


def test_events_are_found_by_time(host: Host, told: tuple[float, float]) -> None:
    before, after = told
    assert len(events(host, "--since", "1h", "--kind", "progress")) == 2 * STEPS
    assert events(host, "--until", f"@{before}", "--kind", "progress") == []
    assert events(host, "--since", f"@{after}", "--kind", "progress") == []
    found = events(host, "--since", "1h", "--until", f"@{after}", "--kind", "progress")
    middle = found[STEPS]["at"]
    later = events(host, "--since", f"@{middle}", "--kind", "progress")
    assert later == [event for event in found if event["at"] >= middle]


def test_who_follows_a_group_hears_of_that_group_only(host: Host) -> None:
    rank = host.rank("a")
    with RawClient(host.socket) as follower:
        follower.hello(role="tool")
        answer = follower.ask("events", since=0, follow=True, groups=["g2"], kinds=["granted"])
        assert answer["events"] == []
        for group in ("g1", "g2"):
            rank.do("acquire", groups=group)
            rank.do("release")
        # Somebody who reads the history hears of leases that would be summed up later.
        host.events()
        event = follower.receive()["event"]
        assert (event["kind"], event["groups"]) == ("granted", "g2")
