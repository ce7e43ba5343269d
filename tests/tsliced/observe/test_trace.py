"""Traces are what the format's description asks for, and what happened is in them."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
from recordings import BEGIN, shared

from tsliced.host.history import Event
from tsliced.observe import timeline
from tsliced.observe.trace import trace

#: What an event of each phase has, beside pid, tid, ts and name, and of which type; from the
#: "Trace Event Format" document.
SCHEMA: Mapping[str, Mapping[str, type]] = {
    "M": {"args": dict},
    "X": {"dur": int, "cat": str, "args": dict},
    "C": {"args": dict},
    "s": {"id": int, "cat": str},
    "f": {"id": int, "cat": str, "bp": str},
}
META = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def check(document: dict[str, Any]) -> None:
    """Asserts that a document is a trace that viewers take as it is meant."""
    document = json.loads(json.dumps(document, allow_nan=False))
    events = document["traceEvents"]
    latest = 0
    for event in events:
        phase = event["ph"]
        fields = {"pid": int, "tid": int, "ts": int, "name": str, **SCHEMA[phase]}
        assert set(event) == {"ph", *fields}, event
        for name, kind in fields.items():
            assert type(event[name]) is kind, event
        assert event["name"]
        assert event["ts"] >= 0
        if phase == "M":
            assert event["name"] in META
        else:
            assert event["ts"] >= latest, "in the order of time"
            latest = event["ts"]
        if phase == "X":
            assert event["dur"] >= 0
        if phase == "C":
            assert all(type(value) in (int, float) for value in event["args"].values())
    check_nesting(events)
    check_flows(events)
    check_names(events)


def slices_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    tracks: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"]
            tracks[event["pid"], event["tid"]].append((begin, begin + event["dur"]))
    return tracks


def check_nesting(events: list[dict[str, Any]]) -> None:
    for track, slices in slices_of(events).items():
        open_ends: list[int] = []
        for begin, end in slices:
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"slices of {track} overlap"
            open_ends.append(end)


def check_flows(events: list[dict[str, Any]]) -> None:
    """Each arrow has one beginning and, not before it, one end; both within a slice."""
    tracks = slices_of(events)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    for flow, begin in begins.items():
        assert begin["ts"] <= ends[flow]["ts"]
        for event in (begin, ends[flow]):
            inside = tracks[event["pid"], event["tid"]]
            assert any(a <= event["ts"] <= b for a, b in inside), event


def check_names(events: list[dict[str, Any]]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= named
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {e["pid"] for e in events} == processes


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
