"""The demo's figures, computed from a small history that can be checked by hand."""

from __future__ import annotations

import os

import pytest

from demo.job import Result
from demo.recording import history_of
from demo.report import count_switches, duty_lines, operation_lines, operations
from libtimeslice.protocol import Message
from tsliced.observe import timeline
from tsliced.observe.report.figures import figures

JOB_A = "1000/a"
JOB_B = "mars/1000/b"


def event(kind: str, at: float, job: str, **facts: object) -> Message:
    return {
        "seq": 0,
        "kind": kind,
        "at": at,
        "level": "info",
        "job": job,
        "groups": "demo",
        **facts,
    }


#: Ten seconds: both ranks of A hold from 0 to 4, then 1 s to move A off and 1 s to bring B on, and
#: B holds from 6 to 9.
HISTORY = [
    event("granted", 100.0, JOB_A, lease="a0", token=1, waited_s=0.0, switch_s=0.0),
    event("granted", 100.0, JOB_A, lease="a1", token=1, waited_s=0.0, switch_s=0.0),
    event("released", 103.0, JOB_A, lease="a0"),
    event("released", 104.0, JOB_A, lease="a1"),
    event("operation", 105.0, JOB_A, rank="n1:1", verb="snapshot", seconds=0.9, bytes=300, epoch=1),
    event("evicted", 105.0, JOB_A, seconds=1.0, snapshot_s=0.9, epoch=1),
    event("operation", 106.0, JOB_B, rank="n1:2", verb="restore", seconds=0.7, bytes=200, epoch=2),
    event("operation", 106.0, JOB_B, rank="n1:3", verb="restore", seconds=0.5, bytes=100, epoch=2),
    event(
        "operation", 106.0, JOB_B, rank="n1:4", verb="restore", seconds=0.9, bytes=100,
        reason="no room",
    ),
    event("admitted", 106.0, JOB_B, seconds=1.0, restore_s=0.7, epoch=2),
    event("granted", 106.0, JOB_B, lease="b0", token=2, waited_s=2.0, switch_s=2.0),
    event("released", 109.0, JOB_B, lease="b0"),
]  # fmt: skip


def test_duty_is_that_of_reports_and_the_ranks_own_clock() -> None:
    line = timeline.read(HISTORY, since_unix=100.0, until_unix=110.0)
    lines = duty_lines(figures(HISTORY, line), {"a": 4.0, "b": 2.5})
    assert [row.split() for row in lines] == [
        ["DUTY", "HELD", "USEFUL", "KERNEL"],
        ["group", "demo", "90%", "70%", "-"],
        ["job", "a", "40%", "40%", "40%"],
        ["job", "b", "50%", "30%", "25%"],
    ]


def test_operations_count_what_succeeded_and_add_up_bytes() -> None:
    snapshot, restore = operations(HISTORY)
    assert (snapshot.verb, snapshot.seconds.count, snapshot.moved_bytes) == ("snapshot", 1, 300)
    assert (restore.verb, restore.seconds.count, restore.moved_bytes) == ("restore", 2, 300)
    assert restore.seconds.p50 == pytest.approx(0.5)
    assert restore.seconds.p95 == pytest.approx(0.7)
    assert operation_lines([restore])[1].split() == [
        "restore",
        "2",
        "500",
        "ms",
        "700",
        "ms",
        "300",
        "B",
    ]


def test_an_eviction_that_moves_nothing_is_no_switch() -> None:
    assert (
        count_switches(
            [*HISTORY, event("evicted", 110.0, JOB_B, seconds=0.1, snapshot_s=0.1, epoch=3)]
        )
        == 1
    )
    assert count_switches([]) == 0


def test_a_job_that_ran_alone_is_a_history_like_any_other() -> None:
    result = Result(
        job="a",
        rank=0,
        digest="",
        phases=[("rollout", True, 10.0, 12.0), ("reward", False, 12.0, 15.0)],
        progress=[(15.5, {"step": 1, "reward": 0.25})],
    )
    line = timeline.read(history_of(result))
    assert line.jobs == [f"{os.getuid()}/a"]
    assert [(hold.phase, hold.begin, hold.end) for hold in line.holds] == [("rollout", 10.0, 12.0)]
    assert [(phase.name, phase.begin) for phase in line.phases] == [("reward", 12.0)]
    assert line.figures[f"{os.getuid()}/a", "reward"].values == [0.25]
