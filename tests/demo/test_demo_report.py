"""The demo's figures, computed from a small history that can be checked by hand."""

from __future__ import annotations

import pytest

from demo.report import (
    Duty,
    count_switches,
    duty_lines,
    group_duty,
    job_duty,
    leases,
    length,
    operation_lines,
    operations,
    percentile,
    union,
)
from libtimeslice.protocol import Message

JOB_A = "1000/a"
JOB_B = "mars/1000/b"


def event(kind: str, at: float, job: str, **facts: object) -> Message:
    return {"seq": 0, "kind": kind, "at": at, "level": "info", "job": job, **facts}


#: Ten seconds: both ranks of A hold from 0 to 4, then 1 s to move A off and 1 s to bring B on, and
#: B holds from 6 to 9.
HISTORY = [
    event("granted", 100.0, JOB_A, lease="a0"),
    event("granted", 100.0, JOB_A, lease="a1"),
    event("released", 103.0, JOB_A, lease="a0"),
    event("released", 104.0, JOB_A, lease="a1"),
    event("operation", 105.0, JOB_A, verb="snapshot", seconds=0.9, bytes=300, reason=None),
    event("evicted", 105.0, JOB_A, seconds=1.0),
    event("operation", 106.0, JOB_B, verb="restore", seconds=0.7, bytes=200, reason=None),
    event("operation", 106.0, JOB_B, verb="restore", seconds=0.5, bytes=100, reason=None),
    event("operation", 106.0, JOB_B, verb="restore", seconds=9.0, bytes=100, reason="no room"),
    event("admitted", 106.0, JOB_B, seconds=1.0),
    event("granted", 106.0, JOB_B, lease="b0"),
    event("released", 109.0, JOB_B, lease="b0"),
]
SPAN = (100.0, 110.0)


def shares(duty: Duty) -> tuple[float, float, float]:
    assert duty.kernel is not None
    return round(duty.held, 6), round(duty.useful, 6), round(duty.kernel, 6)


def test_the_group_is_held_while_leased_or_moved_and_useful_while_leased() -> None:
    assert shares(group_duty("g", HISTORY, SPAN, 0.5)) == (0.9, 0.7, 0.5)


def test_leases_count_from_their_grant_though_they_are_told_of_later_and_together() -> None:
    late = [
        event("held", 102.0, JOB_A, leases=3, held_s=1.5),
        event("granted", 104.0, JOB_A, lease="a0", held_s=1.0),
        event("released", 105.0, JOB_A, lease="a0", held_s=2.0),
    ]
    assert leases(late, 110.0) == {"a": [(100.5, 102.0), (103.0, 105.0)]}


def test_a_job_is_charged_for_its_own_way_onto_the_devices_only() -> None:
    assert shares(job_duty("a", HISTORY, SPAN, 2.0)) == (0.4, 0.4, 0.2)
    assert shares(job_duty("b", HISTORY, SPAN, 1.5)) == (0.4, 0.3, 0.15)


def test_a_lease_without_an_end_lasts_to_the_end_of_the_span() -> None:
    assert shares(job_duty("a", HISTORY[:3], SPAN, 0.0)) == (1.0, 1.0, 0.0)


def test_operations_count_what_succeeded_and_add_up_bytes() -> None:
    found = {one.verb: one for one in operations(HISTORY)}
    assert set(found) == {"snapshot", "restore"}
    restore = found["restore"]
    assert (restore.count, restore.moved_bytes) == (2, 300)
    assert (restore.p50_s, restore.p95_s) == (0.5, 0.7)


def test_an_eviction_that_moves_nothing_is_no_switch() -> None:
    assert count_switches(HISTORY) == 1
    assert count_switches([*HISTORY, event("evicted", 111.0, JOB_B, seconds=0.0)]) == 1


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.5, 10.0), (0.95, 19.0), (0.951, 20.0), (1.0, 20.0)]
)
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile([float(n) for n in range(20, 0, -1)], share) == value


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_overlapping_times_count_once() -> None:
    intervals = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (8.0, 8.0)]
    assert union(intervals) == [(0.0, 4.0), (5.0, 6.0)]
    assert length(intervals) == 5.0


def test_tables_show_percent_and_milliseconds() -> None:
    lines = duty_lines([Duty(name="group g", held=0.914, useful=0.7, kernel=0.049)])
    assert lines[1].split() == ["group", "g", "91%", "70%", "5%"]
    assert duty_lines([Duty(name="g", held=1, useful=1, kernel=None)])[1].split()[-1] == "-"
    assert operation_lines(operations(HISTORY))[1].split() == [
        "snapshot", "1", "900", "ms", "900", "ms", "300", "B"
    ]  # fmt: skip
