"""The histories of several hosts as one: what has the same number on both is told apart."""

from __future__ import annotations

from typing import Any

from tsliced.observe import timeline
from tsliced.observe.accounts import Accounts
from tsliced.observe.merging import merged


def event(at: float, kind: str, **facts: Any) -> dict[str, Any]:
    return {"seq": int(at), "at": at, "kind": kind, "level": "info", **facts}


def granted(at: float, job: str, group: str, token: int) -> dict[str, Any]:
    facts = {"job": job, "groups": group, "lease": "L1", "token": token, "waited_s": 0.0}
    return event(at, "granted", switch_s=0.0, **facts)


def released(at: float, job: str, group: str) -> dict[str, Any]:
    return event(at, "released", job=job, groups=group, lease="L1", held_s=1.0, cause="released")


def test_rounds_of_two_hosts_with_the_same_number_are_two() -> None:
    one = [granted(100.0, "7/a", "g1", 5), released(110.0, "7/a", "g1")]
    two = [granted(102.0, "7/b", "g2", 5), released(105.0, "7/b", "g2")]
    both = list(merged({"n1": one, "n2": two}, {}))
    assert [each["origin"] for each in both] == ["n1", "n2", "n2", "n1"]
    accounts = Accounts().add_all(both)
    assert {name: job.useful_s for name, job in accounts.jobs.items()} == {"7/a": 10.0, "7/b": 3.0}
    line = timeline.read(both)
    assert {hold.job: hold.seconds for hold in line.holds} == {"7/a": 10.0, "7/b": 3.0}


def test_a_machine_that_was_started_anew_ends_what_its_own_jobs_held() -> None:
    one = [granted(100.0, "7/a", "g1", 5), event(103.0, "stopped"), event(120.0, "started")]
    two = [granted(101.0, "7/b", "g2", 6), released(130.0, "7/b", "g2")]
    both = list(merged({"n1": one, "n2": two}, {}))
    accounts = Accounts().add_all(both)
    assert {name: job.useful_s for name, job in accounts.jobs.items()} == {"7/a": 3.0, "7/b": 29.0}
    line = timeline.read(both)
    assert {hold.job: hold.end for hold in line.holds if hold.job == "7/b"} == {"7/b": 130.0}
    assert [hold.end for hold in line.holds if hold.job == "7/a"] == [103.0]


def test_times_are_those_of_one_clock_and_never_run_backwards() -> None:
    one = [event(100.0, "x"), event(104.0, "y")]
    # Its clock is 50 s ahead, and was set back meanwhile.
    two = [event(152.0, "x"), event(151.0, "y")]
    both = list(merged({"n1": one, "n2": two}, {"n2": 50.0}))
    assert [(each["at"], each["origin"]) for each in both] == [
        (100.0, "n1"),
        (102.0, "n2"),
        (102.0, "n2"),
        (104.0, "n1"),
    ]


def test_devices_are_named_with_their_host_and_figures_of_jobs_are_left_alone() -> None:
    busy = event(100.0, "busy", device="0", group="g1", busy_s=1.0, span_s=2.0)
    told = event(101.0, "progress", job="7/a", device="cuda:0", origin=3.0)
    both = list(merged({"n1": [busy, told], "n2": [busy]}, {}))
    assert sorted(Accounts().add_all(both).devices) == ["n1:0", "n2:0"]
    (figures,) = [each for each in both if each["kind"] == "progress"]
    assert figures["device"] == "cuda:0"
