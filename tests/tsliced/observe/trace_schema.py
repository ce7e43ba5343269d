"""Our own check of Chrome traces: what viewers need to take them as they are meant."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

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
