"""Traces are what the format's description asks for, and what happened is in them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from recordings import BEGIN, shared
from trace_schema import check

from tsliced.host.history import Event
from tsliced.observe import timeline
from tsliced.observe.trace import trace


def made(events: list[Event]) -> list[dict[str, Any]]:
    document = trace(timeline.read(events), "n1")
    check(document)
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_a_trace_of_two_jobs_that_share_is_valid_and_has_all_of_it() -> None:
    events = made(shared(1.0))
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"GPU-0", "GPU-1", "leases of trainer", "moves", "host phases"} <= names
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"devices", "counters", "job 1000/a", "job 1000/b"}
    kinds = {e["cat"] for e in events if e["ph"] == "X"}
    assert kinds == {"hold", "wait", "switch", "phase", "move", "operation"}
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert {
        "busy GPU-0", "queue trajectories of 1000/a", "waiting for trainer", "parked bytes",
    } <= counters  # fmt: skip


def test_each_hand_off_to_another_job_is_an_arrow() -> None:
    events = shared(0.5)
    line = timeline.read(events)
    turns = sorted(line.holds, key=lambda hold: hold.begin)
    expected = sum(a.job != b.job for a, b in itertools.pairwise(turns))
    arrows = [e for e in made(events) if e["ph"] == "s"]
    assert len(arrows) == expected > 5


def test_times_are_microseconds_from_the_beginning() -> None:
    line = timeline.read(shared(0.2), since_unix=BEGIN)
    first = min(line.holds, key=lambda hold: hold.begin)
    slices = [e for e in trace(line)["traceEvents"] if e.get("cat") == "hold"]
    assert min(e["ts"] for e in slices) == round(1e6 * (first.begin - BEGIN))


def test_a_group_of_which_no_device_was_looked_at_has_a_track() -> None:
    events = [event for event in shared(0.2) if event["kind"] != "busy"]
    names = {e["args"]["name"] for e in made(events) if e["name"] == "thread_name"}
    assert "group trainer" in names


def test_leases_of_one_job_that_overlap_are_on_two_tracks() -> None:
    def lease(name: str, begin: float, end: float) -> list[Event]:
        facts: Event = {"job": "1000/a", "groups": "g1", "lease": name, "level": "info", "seq": 1}
        token = int(name)
        return [
            {**facts, "kind": "granted", "at": begin, "token": token, "waited_s": 0.0},
            {**facts, "kind": "released", "at": end},
        ]

    events = [*lease("1", 0.0, 10.0), *lease("2", 5.0, 15.0)]
    names = {e["args"]["name"] for e in made(events) if e["name"] == "thread_name"}
    assert "leases of g1 (2)" in names


@pytest.mark.parametrize("broken", ["overlap", "type", "order"])
def test_the_check_sees_what_is_wrong(broken: str) -> None:
    document = trace(timeline.read(shared(0.2)))
    slices = [e for e in document["traceEvents"] if e.get("cat") == "hold"]
    if broken == "overlap":
        first, following = [e for e in slices if e["tid"] == slices[0]["tid"]][:2]
        first["dur"] = following["ts"] - first["ts"] + 1
    elif broken == "type":
        slices[0]["ts"] = float(slices[0]["ts"])
    else:
        slices[0]["ts"], slices[-1]["ts"] = slices[-1]["ts"], slices[0]["ts"]
    with pytest.raises(AssertionError):
        check(document)
