"""What a history adds up to, by hand."""

from __future__ import annotations

from itertools import count

import pytest

from tsliced.host.history import Event, Fact
from tsliced.observe.accounts import Accounts, Duty

NUMBERS = count(1)
A, B = "1000/a", "1000/b"


def event(at: float, kind: str, /, **facts: Fact) -> Event:
    return {"seq": next(NUMBERS), "at": at, "kind": kind, "level": "info", **facts}


def granted(at: float, job: str = A, token: int = 1, /, **facts: Fact) -> Event:
    given: dict[str, Fact] = {"groups": "g1", "lease": f"{job}.{token}", "waited_s": 0.0}
    return event(at, "granted", job=job, token=token, **{**given, **facts})


def released(at: float, job: str = A, token: int = 1, /, **facts: Fact) -> Event:
    given: dict[str, Fact] = {"groups": "g1", "lease": f"{job}.{token}", "cause": "released"}
    return event(at, "released", job=job, **{**given, **facts})


def added(*events: Event, since: float = 0.0) -> Accounts:
    return Accounts(since).add_all(events)


def test_a_hold_is_from_the_begin_of_its_switch_to_its_release() -> None:
    accounts = added(
        granted(10.0, waited_s=4.0, switch_s=3.0, phase="rollout"), released(25.0, held_s=15.0)
    )
    group, job = accounts.groups["g1"], accounts.jobs[A]
    assert (group.leases, group.rounds, group.switches) == (1, 1, 1)
    assert (group.useful_s, group.switch_s, group.held_s) == (15.0, 3.0, 18.0)
    assert (group.waits.count, group.waits.total) == (1, 4.0)
    assert (group.holds.count, group.holds.total) == (1, 15.0)
    assert job.useful_s_by_phase == {"rollout": 15.0}
    assert accounts.duty("g1", 30.0) == Duty(held=0.6, useful=0.5, kernel=None)


def test_what_is_held_still_counts_up_to_the_end() -> None:
    accounts = added(granted(10.0, switch_s=1.0))
    assert accounts.useful_s("g1", 15.0) == 5.0
    assert accounts.held_s("g1", 15.0) == 6.0
    assert accounts.job_useful_s(A, 12.0) == 2.0
    assert accounts.groups["g1"].holds.count == 0
    assert accounts.useful_s("g2", 15.0) == 0.0


def test_a_lease_that_is_told_of_late_began_when_it_began() -> None:
    accounts = added(granted(10.0, held_s=2.0), released(15.0, held_s=7.0))
    assert accounts.groups["g1"].useful_s == 7.0


def test_a_round_of_several_ranks_holds_once() -> None:
    ranks = [granted(10.0, lease=f"rank{rank}") for rank in range(8)]
    ends = [released(20.0 + rank, lease=f"rank{rank}") for rank in range(8)]
    accounts = added(*ranks, *ends)
    group = accounts.groups["g1"]
    assert (group.leases, group.rounds, group.useful_s) == (8, 1, 17.0)
    assert accounts.jobs[A].useful_s == 17.0


def test_a_lease_over_two_groups_is_of_both_and_of_its_job_once() -> None:
    accounts = added(granted(10.0, groups="g1,g2"), released(14.0, groups="g1,g2"))
    assert [accounts.groups[name].useful_s for name in ("g1", "g2")] == [4.0, 4.0]
    assert accounts.jobs[A].useful_s == 4.0


def test_leases_that_nobody_waited_for_are_counted_by_their_sum() -> None:
    facts: dict[str, Fact] = {"job": A, "groups": "g1", "phase": "tool"}
    accounts = added(
        event(10.0, "held", level="debug", leases=6, held_s=3.0, ranks=2, **facts),
    )
    group = accounts.groups["g1"]
    assert (group.leases, group.rounds, group.useful_s) == (6, 3, 1.5)
    assert (group.waits.count, group.waits.total) == (6, 0.0)
    assert (group.holds.count, group.holds.total) == (3, 1.5)
    assert accounts.jobs[A].useful_s_by_phase == {"tool": 1.5}


def test_what_happened_before_counts_as_far_as_it_lasts_on() -> None:
    story = (
        granted(10.0, A, 1, switch_s=1.0, waited_s=5.0),
        released(20.0, A, 1, held_s=10.0),
        granted(22.0, B, 2, switch_s=1.0, waited_s=5.0),
        event(23.0, "operation", job=B, verb="restore", seconds=1.0, bytes=100),
        released(40.0, B, 2, held_s=18.0),
    )
    accounts = added(*story, since=30.0)
    group = accounts.groups["g1"]
    assert (group.leases, group.waits.count, group.switches) == (0, 0, 0)
    assert (group.useful_s, group.switch_s) == (10.0, 0.0)
    assert accounts.steps == {}
    # Of the second one only the end is there: a part of the history is gone.
    assert added(story[-1], since=30.0).groups["g1"].useful_s == 10.0
    # A switch that was under way.
    assert added(*story[2:], since=21.5).groups["g1"].switch_s == 0.5


@pytest.mark.parametrize("leases", [0, 1])
def test_what_a_daemon_does_not_remember_ended_with_the_one_before(leases: int) -> None:
    accounts = added(
        granted(10.0),
        event(14.0, "queued", job=B, groups="g1", lease="b"),
        event(100.0, "started", groups="g1", leases=leases),
    )
    assert accounts.useful_s("g1", 110.0) == (100.0 if leases else 4.0)


def test_leases_that_are_taken_back_are_counted_by_cause() -> None:
    accounts = added(
        granted(1.0),
        released(2.0, cause="lease_ended"),
        granted(3.0, A, 2),
        released(4.0, A, 2),
    )
    assert accounts.reclaims == {"lease_ended": 1}


def test_leases_that_were_not_granted_are_counted_by_cause() -> None:
    facts: dict[str, Fact] = {"job": A, "groups": "g1", "lease": "x", "waited_s": 1.0}
    accounts = added(*(event(1.0, "not_granted", cause=c, **facts) for c in ("timeout",) * 2))
    assert accounts.not_granted == {"timeout": 2}


def test_steps_and_moves_have_seconds_bytes_and_causes_of_failure() -> None:
    facts: dict[str, Fact] = {"job": A, "groups": "g1", "epoch": 1}
    accounts = added(
        event(1.0, "hooks", verb="quiesce", seconds=0.5, cause=None, **facts),
        event(2.0, "operation", verb="freeze", seconds=0.25, bytes=0, cause=None, **facts),
        event(3.0, "operation", verb="snapshot", seconds=2.0, bytes=100, cause=None, **facts),
        event(3.0, "operation", verb="snapshot", seconds=4.0, bytes=300, cause=None, **facts),
        event(4.0, "operation", level="warning", verb="restore", seconds=1.0, bytes=0,
              cause="driver", **facts),
        event(5.0, "evicted", seconds=7.0, cause=None, **facts),
        event(6.0, "admission_failed", level="warning", seconds=1.0, cause="driver", **facts),
    )  # fmt: skip
    steps = accounts.steps
    assert steps["quiesce"].seconds.total == 0.5
    assert (steps["snapshot"].seconds.count, steps["snapshot"].seconds.total) == (2, 6.0)
    assert (steps["snapshot"].bytes, accounts.jobs[A].moved_bytes) == (400, 400)
    assert (steps["restore"].seconds.count, steps["restore"].failures) == (0, {"driver": 1})
    assert accounts.moves["evicted"].seconds.total == 7.0
    assert accounts.moves["admission_failed"].causes == {"driver": 1}
    assert (accounts.jobs[A].evictions, accounts.jobs[A].admissions) == (1, 0)
    assert accounts.warnings == {"operation": 1, "admission_failed": 1}


def test_the_kernel_s_duty_is_the_mean_of_a_group_s_devices() -> None:
    facts: dict[str, Fact] = {"group": "g1", "span_s": 10.0, "used_bytes": 1}
    accounts = added(
        event(10.0, "busy", device="GPU-1", busy_s=8.0, **facts),
        event(10.0, "busy", device="GPU-2", busy_s=2.0, **facts),
        event(20.0, "busy", device="GPU-1", busy_s=6.0, **facts),
    )
    assert (accounts.devices["GPU-1"].busy_s, accounts.devices["GPU-1"].seen_s) == (14.0, 20.0)
    assert accounts.duty("g1", 20.0).kernel == pytest.approx(0.4)


def test_phases_without_devices_are_counted_by_their_ends() -> None:
    facts: dict[str, Fact] = {"job": A, "pid": 1, "name": "reward"}
    accounts = added(
        event(1.0, "phase", begin=True, **facts),
        event(3.0, "phase", begin=False, times=1, seconds=2.0, **facts),
        event(9.0, "phase", begin=False, times=10, seconds=1.0, **facts),
        event(9.0, "something_else", job=A),
    )
    assert accounts.jobs[A].phases == {"reward": (11, 3.0)}
    accounts.forget_job(A)
    accounts.forget_job(A)
    assert accounts.jobs == {}
