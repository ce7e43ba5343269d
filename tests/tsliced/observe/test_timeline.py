"""The history as intervals and series, by hand."""

from __future__ import annotations

from itertools import count

import pytest
from recordings import BEGIN, shared

from tsliced.host.history import Event, Fact
from tsliced.observe import timeline
from tsliced.observe.accounts import Accounts
from tsliced.observe.timeline import HostPhase, Move, Operation, Wait

NUMBERS = count(1)
A = "1000/a"
LEASE: dict[str, Fact] = {"job": A, "groups": "g1", "lease": "L1"}


def event(at: float, kind: str, /, **facts: Fact) -> Event:
    return {"seq": next(NUMBERS), "at": at, "kind": kind, "level": "info", **facts}


def test_a_hold_and_the_wait_before_it_are_known_by_the_grant() -> None:
    line = timeline.read(
        [
            event(10.0, "queued", **LEASE, round="queued"),
            event(
                14.0, "granted", **LEASE, token=1, phase="rollout", waited_s=4.0, switch_s=3.0,
                restored=True,
            ),
            event(25.0, "released", **LEASE, held_s=11.0),
        ]
    )  # fmt: skip
    (hold,) = line.holds
    assert (hold.begin, hold.end, hold.seconds) == (14.0, 25.0, 11.0)
    assert (hold.phase, hold.switch_s, hold.waited_s, hold.restored) == ("rollout", 3.0, 4.0, True)
    assert line.waits == [Wait(job=A, groups=("g1",), begin=10.0, end=14.0)]
    assert (line.begin, line.end, line.jobs, line.groups) == (10.0, 25.0, [A], ["g1"])


def test_ranks_of_one_round_are_one_hold_until_the_last_is_back() -> None:
    grants = [event(10.0, "granted", **{**LEASE, "lease": n}, token=7, waited_s=1.0) for n in "xy"]
    releases = [event(20.0 + n, "released", **{**LEASE, "lease": "xy"[n]}) for n in range(2)]
    (hold,) = timeline.read([*grants, *releases]).holds
    assert (hold.begin, hold.end) == (10.0, 21.0)


def test_what_began_before_or_goes_on_is_cut_off_at_the_span() -> None:
    events = [
        event(5.0, "released", **{**LEASE, "lease": "L0"}, held_s=50.0),
        event(6.0, "granted", **LEASE, token=1, waited_s=0.0),
        event(7.0, "queued", **{**LEASE, "lease": "L2", "job": "1000/b"}),
        event(8.0, "phase", job=A, pid=1, name="reward", begin=True),
    ]
    line = timeline.read(events, since_unix=0.0, until_unix=20.0)
    assert [(hold.begin, hold.end) for hold in line.holds] == [(0.0, 5.0), (6.0, 20.0)]
    assert [(wait.job, wait.begin, wait.end) for wait in line.waits] == [("1000/b", 7.0, 20.0)]
    assert [(phase.begin, phase.end) for phase in line.phases] == [(8.0, 20.0)]
    assert timeline.read(events, since_unix=0.0, until_unix=1.0).holds[0].end == 1.0


def test_leases_that_were_told_together_are_one_hold() -> None:
    (hold,) = timeline.read(
        [event(10.0, "held", **LEASE, phase="p", leases=40, ranks=4, held_s=8.0, token=1)]
    ).holds
    assert (hold.begin, hold.end, hold.rounds) == (8.0, 10.0, 10)


def test_moves_and_their_operations_end_when_they_were_told() -> None:
    common: dict[str, Fact] = {"job": A, "groups": "g1", "epoch": 7}
    line = timeline.read(
        [
            event(11.0, "operation", **common, rank="n1:7", verb="freeze", seconds=1.0, bytes=0),
            # Noted a little late: it cannot have begun before the one before it ended.
            event(15.0, "operation", **common, rank="n1:7", verb="snapshot", seconds=4.1, bytes=9),
            event(15.0, "operation", **common, rank="n1:7", verb="query", seconds=0.1, bytes=0),
            event(15.5, "evicted", **common, seconds=6.0, freeze_s=1.0, snapshot_s=4.2),
        ]
    )
    assert line.operations[1] == Operation(
        job=A, groups=("g1",), rank="n1:7", verb="snapshot", begin=11.0, end=15.0, bytes=9,
        reason=None, epoch=7,
    )  # fmt: skip
    assert len(line.operations) == 2
    steps = {"freeze": 1.0, "snapshot": 4.2}
    assert line.moves == [
        Move(
            job=A, groups=("g1",), kind="evicted", begin=9.5, end=15.5, steps=steps, epoch=7,
            moved=True,
        )
    ]  # fmt: skip
    empty = event(16.0, "evicted", **{**common, "epoch": 8}, seconds=0.1, snapshot_s=0.1)
    assert not timeline.read([empty]).moves[0].moved


def test_phases_have_their_beginnings_unless_they_were_put_together() -> None:
    common: dict[str, Fact] = {"job": A, "pid": 1, "name": "reward"}
    line = timeline.read(
        [
            event(10.0, "phase", **common, begin=True),
            event(15.0, "phase", **common, begin=False, times=1, seconds=4.9),
            event(30.0, "phase", **common, begin=False, times=5, seconds=8.0),
        ]
    )
    assert line.phases == [
        HostPhase(job=A, name="reward", begin=10.0, end=15.0),
        HostPhase(job=A, name="reward", begin=22.0, end=30.0, times=5),
    ]


def test_figures_are_numbers_and_queues_have_targets() -> None:
    line = timeline.read(
        [
            event(1.0, "progress", job=A, step=1, reward=0.5, tag="x", good=True),
            event(2.0, "queue", job=A, name="q", depth=3.0, target=8.0),
        ]
    )
    assert {name for _, name in line.figures} == {"step", "reward"}
    assert line.figures[A, "reward"].values == [0.5]
    queue = line.queues[A, "q"]
    assert (queue.at, queue.values, queue.target) == ([2.0], [3.0], 8.0)


def test_a_device_of_which_nothing_was_told_was_idle() -> None:
    common: dict[str, Fact] = {"device": "GPU-0", "group": "g1", "used_bytes": 0}
    line = timeline.read(
        [
            event(10.0, "busy", **common, busy_s=5.0, span_s=10.0),
            event(20.0, "busy", **common, busy_s=8.0, span_s=10.0),
            event(60.0, "busy", **common, busy_s=2.0, span_s=10.0),
        ]
    )
    series = line.busy["GPU-0"]
    assert list(zip(series.at, series.values, strict=True)) == [
        (0.0, 0.0), (10.0, 0.5), (20.0, 0.8), (50.0, 0.0), (60.0, 0.2),
    ]  # fmt: skip
    assert line.devices_of("g1") == ["GPU-0"]


def test_intervals_add_up_to_what_the_accounts_have() -> None:
    events = shared(1.0)
    line = timeline.read(events)
    accounts = Accounts(BEGIN).add_all(events)
    useful = sum(hold.seconds for hold in line.holds)
    switching = sum(hold.switch_s for hold in line.holds)
    account = accounts.groups["trainer"]
    assert useful == pytest.approx(account.useful_s)
    assert switching == pytest.approx(account.switch_s)
    moved = sum(o.bytes for o in line.operations)
    assert moved == sum(accounts.steps[verb].bytes for verb in ("snapshot", "restore"))


def test_gaps_are_where_one_job_neither_holds_nor_waits() -> None:
    line = timeline.read(
        [
            event(10.0, "granted", **LEASE, token=1, waited_s=2.0),
            event(20.0, "released", **LEASE),
            event(40.0, "granted", **{**LEASE, "lease": "L2"}, token=2, waited_s=5.0),
            event(50.0, "released", **{**LEASE, "lease": "L2"}),
        ]
    )
    assert list(timeline.gaps(line.holds, line.waits)) == [(20.0, 35.0)]


def test_a_wait_ends_also_without_a_grant() -> None:
    line = timeline.read(
        [
            event(7.0, "queued", **LEASE),
            event(9.0, "not_granted", **LEASE, waited_s=2.0, cause="timeout"),
            event(9.5, "not_granted", **{**LEASE, "lease": "unknown"}, cause="timeout"),
        ],
        until_unix=20.0,
    )
    assert line.waits == [Wait(job=A, groups=("g1",), begin=7.0, end=9.0)]


@pytest.mark.parametrize("leases", [0, 2])
def test_what_a_daemon_does_not_remember_ended_with_the_one_before(leases: int) -> None:
    line = timeline.read(
        [
            event(6.0, "granted", **LEASE, token=1, waited_s=0.0),
            event(7.0, "queued", **{**LEASE, "lease": "L2", "job": "1000/b"}),
            event(8.0, "phase", job=A, pid=1, name="reward", begin=True),
            event(100.0, "started", groups="g1", leases=leases),
        ],
        until_unix=110.0,
    )
    ends = {each.end for each in (*line.holds, *line.waits, *line.phases)}
    assert ends == {110.0 if leases else 8.0}
