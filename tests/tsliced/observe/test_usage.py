"""What the event history adds up to for users, accounts, jobs and groups."""

from __future__ import annotations

from tsliced.host.history import Fact
from tsliced.observe.usage import Usage, usage

Event = dict[str, Fact]

#: Two jobs of one user, of which one is Slurm's, and one of another user's.
A, B, C = "lab/1000/7", "lab/1000/8.sweep", "lab/1001/9"


def event(at: float, kind: str, job: str, **facts: Fact) -> Event:
    return {"at": at, "kind": kind, "level": "info", "job": job, "groups": "g1", **facts}


def granted(
    at: float, job: str, token: int, *, waited_s: float = 0.0, switch_s: float = 0.0
) -> Event:
    lease = f"s.{token}"
    return event(
        at,
        "granted",
        job,
        lease=lease,
        token=token,
        waited_s=waited_s,
        switch_s=switch_s,
        held_s=0.0,
    )


def released(at: float, job: str, token: int, held_s: float) -> Event:
    return event(at, "released", job, lease=f"s.{token}", held_s=held_s, cause="released")


#: A holds from 100 to 110, then B from 112 with a switch of 2 s, while A is parked until 130.
STORY = [
    event(90.0, "job_known", A, account="rl"),
    event(91.0, "job_known", "lab/1000/8", account="vision"),
    granted(100.0, A, 1),
    released(110.0, A, 1, 10.0),
    event(111.0, "evicted", A, seconds=1.0),
    granted(112.0, B, 2, waited_s=5.0, switch_s=2.0),
    released(120.0, B, 2, 8.0),
    event(121.0, "evicted", B, seconds=1.0),
    event(131.0, "admitted", A, seconds=1.0),
    granted(131.0, A, 3, waited_s=11.0, switch_s=1.0),
    event(140.0, "job_ended", "lab/1000/8"),
]


def of(by: str, since_unix: float = 0.0, until_unix: float = 150.0) -> dict[str, Usage]:
    rows = usage(STORY, by, since_unix=since_unix, until_unix=until_unix)  # type: ignore[arg-type]  # by name
    assert [row.name for row in rows] == sorted(row.name for row in rows)
    return {row.name: row for row in rows}


def test_a_job_has_what_it_held_usefully_waited_and_was_parked() -> None:
    rows = of("job")
    a, b = rows[A], rows[B]
    assert (a.uid, a.account, a.leases, a.switches) == (1000, "rl", 2, 1)
    # What lasts on counts up to the end of the span.
    assert (a.useful_s, a.held_s, a.waited_s) == (10.0 + 19.0, 10.0 + 19.0 + 1.0, 11.0)
    assert a.parked_s == 130.0 - 111.0
    assert (b.useful_s, b.held_s, b.waited_s) == (8.0, 10.0, 5.0)
    assert b.parked_s == 140.0 - 121.0, "until its end"


def test_a_part_of_a_slurm_job_is_of_the_account_of_the_whole() -> None:
    assert of("job")[B].account == "vision"


def test_jobs_are_added_up_for_users_accounts_and_groups() -> None:
    (user,) = of("user").values()
    assert (user.name, user.uid, user.jobs, user.leases) == ("1000", 1000, 2, 3)
    assert user.held_s == 30.0 + 10.0
    accounts = of("account")
    assert {name: row.held_s for name, row in accounts.items()} == {"rl": 30.0, "vision": 10.0}
    (group,) = of("group").values()
    assert (group.name, group.held_s, group.waited_s) == ("g1", 40.0, 16.0)
    assert group.parked_s == 38.0


def test_of_what_began_before_the_span_only_that_within_it_counts() -> None:
    a = of("job", since_unix=125.0)[A]
    assert a.parked_s == 5.0
    assert a.useful_s == 19.0


def test_a_job_without_an_account_is_of_none_and_one_that_only_waits_has_nothing() -> None:
    rows = usage([event(1.0, "queued", C)], "account", since_unix=0.0, until_unix=2.0)
    assert [(row.name, row.jobs, row.held_s) for row in rows] == [("", 1, 0.0)]


def test_a_park_ends_with_its_job_and_not_with_another_that_is_called_alike() -> None:
    story = [event(1.0, "evicted", C), event(2.0, "gone", "1000/other"), event(3.0, "gone", C)]
    rows = usage(story, "job", since_unix=0.0, until_unix=9.0)
    assert [(row.name, row.parked_s) for row in rows] == [(C, 2.0)]


def test_a_park_of_which_the_end_is_not_known_lasts_on() -> None:
    rows = usage([event(1.0, "evicted", C)], "job", since_unix=0.0, until_unix=4.0)
    assert [(row.name, row.parked_s) for row in rows] == [(C, 3.0)]
