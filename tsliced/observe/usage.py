"""Who had how much of the devices: what the event history adds up to for users, accounts and jobs.

Held, useful and waited are those of `accounts`; parked is added here: from when a job's state was
off its devices until it was on them again, or the job had ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from tsliced.observe.accounts import Accounts, Event, Held, number

By = Literal["job", "user", "account", "group"]

#: Events that end a job and what is part of it.
_ENDS: Final = ("job_ended", "killing")


@dataclass(slots=True, kw_only=True)
class Usage:
    """What one job, user, account or group had, in seconds; of leases, their number."""

    name: str
    #: The user of a job, as a uid; None where several are added up.
    uid: int | None = None
    #: Slurm's account of a job; None: none, or not known.
    account: str | None = None
    jobs: int = 0
    leases: int = 0
    switches: int = 0
    held_s: float = 0.0
    useful_s: float = 0.0
    waited_s: float = 0.0
    parked_s: float = 0.0

    def add(self, other: Usage) -> None:
        """Count what another had too."""
        self.jobs += other.jobs
        self.leases += other.leases
        self.switches += other.switches
        self.held_s += other.held_s
        self.useful_s += other.useful_s
        self.waited_s += other.waited_s
        self.parked_s += other.parked_s


@dataclass(slots=True)
class _Parks:
    """For how long jobs were parked, and on which groups."""

    since_unix: float
    #: By job and groups: since when they are parked.
    open: dict[tuple[str, str], float] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def begin(self, job: str, groups: str, at: float) -> None:
        self.open.setdefault((job, groups), at)

    def end(self, key: tuple[str, str], at: float) -> None:
        began = self.open.pop(key, None)
        if began is not None:
            lasted_s = max(0.0, at - max(began, self.since_unix))
            self.seconds[key] = self.seconds.get(key, 0.0) + lasted_s

    def end_job(self, job: str, at: float) -> None:
        for key in [key for key in self.open if is_part(key[0], job)]:
            self.end(key, at)


def usage(events: Iterable[Event], by: By, *, since_unix: float, until_unix: float) -> list[Usage]:
    """Return what each job, user, account or group had from one instant to another.

    `events` are those of the history, the oldest first. What is held or parked at the end counts as
    far as it has lasted. The order is by name.
    """
    accounts, parks = Accounts(since_unix), _Parks(since_unix)
    of_account: dict[str, str] = {}
    for event in events:
        accounts.add(event)
        _note(event, parks, of_account)
    for key in list(parks.open):
        parks.end(key, until_unix)
    if by == "group":
        return sorted(_of_groups(accounts, parks, until_unix), key=lambda each: each.name)
    found = _of_jobs(accounts, parks, of_account, until_unix)
    if by != "job":
        found = _sums(found, by)
    return sorted(found, key=lambda each: each.name)


def _note(event: Event, parks: _Parks, of_account: dict[str, str]) -> None:
    kind, job, at = event["kind"], event.get("job"), event["at"]
    if not isinstance(job, str) or not isinstance(at, (int, float)):
        return
    groups = str(event.get("groups") or "")
    if kind == "evicted":
        parks.begin(job, groups, at)
    elif kind == "admitted":
        parks.end((job, groups), at - number(event, "seconds"))
    elif kind == "gone":
        for key in [key for key in parks.open if key[0] == job]:
            parks.end(key, at)
    elif kind in _ENDS:
        parks.end_job(job, at)
    elif kind == "job_known" and (account := event.get("account")) is not None:
        of_account[job] = str(account)


def _of_jobs(
    accounts: Accounts, parks: _Parks, of_account: Mapping[str, str], until_unix: float
) -> list[Usage]:
    found = []
    for job, had in accounts.jobs.items():
        useful_s = accounts.job_useful_s(job, until_unix)
        one = _row(job, had, useful_s)
        one.uid, one.jobs = _uid(job), 1
        one.account = of_account.get(_whole(job))
        one.parked_s = sum(s for (of, _), s in parks.seconds.items() if of == job)
        found.append(one)
    return found


def _of_groups(accounts: Accounts, parks: _Parks, until_unix: float) -> list[Usage]:
    found = []
    for group, had in accounts.groups.items():
        one = _row(group, had, accounts.useful_s(group, until_unix))
        parked = [(of, s) for (of, on), s in parks.seconds.items() if group in on.split(",")]
        one.parked_s = sum(seconds for _, seconds in parked)
        found.append(one)
    return found


def _row(name: str, had: Held, useful_s: float) -> Usage:
    return Usage(
        name=name,
        leases=had.leases,
        switches=had.switches,
        held_s=useful_s + had.switch_s,
        useful_s=useful_s,
        waited_s=had.waits.total,
    )


def _sums(jobs: Iterable[Usage], by: By) -> list[Usage]:
    found: dict[str, Usage] = {}
    for job in jobs:
        name = str(job.uid) if by == "user" else job.account or ""
        one = found.setdefault(name, Usage(name=name, uid=job.uid if by == "user" else None))
        one.add(job)
    return list(found.values())


def _uid(job: str) -> int | None:
    parts = job.split("/")
    return int(parts[-2]) if len(parts) > 1 and parts[-2].isdecimal() else None


def _whole(job: str) -> str:
    """Return the Slurm job of which a job may be a part with a name of its own."""
    head, _, id = job.rpartition("/")
    return f"{head}/{id.partition('.')[0]}"


def is_part(job: str, whole: str) -> bool:
    """Return whether a job is another one, or a part of it that has a name of its own."""
    return job == whole or job.startswith(f"{whole}.")
