"""Decides whether what the clients wrote down may have happened.

Judged from what clients saw alone (`history`), with three things taken from the daemon's log: that
a request was queued, which no client is told, that it was set aside and came back, and that a lease
was taken back.

* Exclusion: two jobs hold one group at one time. A hold begins when the grant is in the client's
  hands and ends when it begins to give it back, when its process dies, or when it is taken back.
* Tokens: those of a group rise in the order of the grants, whatever happened to the daemon.
* Order: who was queued before somebody else asked is granted before them, unless up to `passes`
  times somebody may go first, or it could not have been granted (it was set aside) meanwhile.
* Answers: an acquire without an end, though its process lives, is lost. `pending` names them, for
  whoever knows whether they ought to be over.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from history import start_time

Line = dict[str, Any]

#: Times of the log are whole milliseconds of another clock than the clients'.
CLOCKS_APART_S = 0.005
#: From a refusal to the moment at which a client has written it down, on a busy machine and over a
#: restart of the daemon.
ANSWER_TAKES_S = 5.0
_DAY_S = 24 * 3600
_LOGGED = re.compile(
    r"(\d\d):(\d\d):(\d\d\.\d{3}) \w+ +(queued|set_aside|queued_again|released) (.*)"
)


@dataclass(slots=True, kw_only=True)
class Acquire:
    """One request of one client, and what became of it."""

    who: str
    pid: int
    job: str
    groups: tuple[str, ...]
    ranks: int
    invoked_at: float
    #: When its answer came; None: none did.
    ended_at: float | None = None
    lease: str | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    #: When it was not relied on any more; `inf`: it is held still.
    until: float = inf
    queued_at: float | None = None
    #: When it was set aside, and when it had its place again.
    aside: list[tuple[float, float]] = field(default_factory=list)
    #: Its process lives.
    alive: bool = False
    #: The same grant was told before: to another lease that it is nested in, or for a repeated
    #: request.
    repeated: bool = False
    #: The daemon's log says that it was taken back.
    taken_back: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The daemon's names of the grants that it stands on."""
        return tuple(self.lease.split("+")) if self.lease is not None else ()

    @property
    def granted(self) -> bool:
        return self.lease is not None and not self.repeated

    def __str__(self) -> str:
        end = "no answer" if self.ended_at is None else f"answered {self.ended_at:.4f}"
        held = f" {self.lease} {self.tokens} until {self.until:.4f}" if self.lease else ""
        queued = f" queued {self.queued_at:.4f}" if self.queued_at is not None else ""
        return f"{self.job} ({self.who}) asked {self.invoked_at:.4f}{queued} {end}{held}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must not happen, and who took part in it."""

    rule: str
    group: str
    acquires: tuple[Acquire, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"{self.rule} on {self.group}:", *map(str, self.acquires)])


@dataclass(slots=True, kw_only=True)
class Judged:
    """All acquires of a history, and what is wrong with them."""

    acquires: list[Acquire]
    violations: list[Violation]

    def pending(self) -> list[Acquire]:
        """Acquires that were not answered though who asked lives."""
        return [a for a in self.acquires if a.ended_at is None and a.alive]

    def report(self) -> str:
        """Says what is wrong."""
        return "\n".join(map(str, self.violations))


def judge(
    *directories: Path, logs: Iterable[Path] = (), order: Iterable[str] = (), passes: int = 0
) -> Judged:
    """Reads what was written so far by the clients of one host, or of several, and judges it.

    logs: of the daemons; one may not be there.
    order: the groups in the configured order, in which a lease of several reserves them.
    passes: how often a waiter may be passed over.
    """
    histories = _read(*directories)
    every = [line for lines in histories.values() for line in lines]
    killed = [line for line in every if line["what"] == "killed"]
    acquires = [a for who, lines in histories.items() for a in _acquires(who, lines, killed)]
    _mark_repeated(acquires)
    _end_elsewhere(acquires, histories)
    for log in filter(Path.exists, logs):
        queued, taken_back = _read_log(log)
        _take_back(acquires, taken_back)
        _find_queued(acquires, queued)
    forgotten = sorted(line["at"] for line in every if line["what"] == "forgotten")
    for acquire in acquires:
        # What a daemon has no memory of it cannot keep: from then on its token alone protects it.
        ends = [at for at in forgotten if at > _ended_at(acquire)]
        acquire.until = min(acquire.until, *ends[:1], inf)
    violations = [
        *_overlaps(acquires),
        *_tokens(acquires),
        *_inversions(acquires, tuple(order), passes, every),
    ]
    return Judged(acquires=acquires, violations=violations)


def lines_of(directory: Path, what: str) -> list[Line]:
    """Returns all lines of one kind."""
    return [line for lines in _read(directory).values() for line in lines if line["what"] == what]


# --- reading ------------------------------------------------------------------------------------


def _read(*directories: Path) -> dict[str, list[Line]]:
    histories = {}
    for path in sorted(path for directory in directories for path in directory.glob("*.jsonl")):
        lines = path.read_text().split("\n")
        # What comes behind the last line break was being written when its writer was killed.
        histories[path.stem] = [json.loads(line) for line in lines[:-1]]
    return histories


class Queued(NamedTuple):
    """What the daemon's log says of a request that has to wait."""

    at: float
    job: str
    groups: frozenset[str]
    aside: list[tuple[float, float]]


def _read_log(path: Path) -> tuple[dict[str, Queued], dict[str, float]]:
    """Returns when leases were queued, and when they were taken back, by the clients' clock."""
    queued: dict[str, Queued] = {}
    taken_back: dict[str, float] = {}
    aside: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    now, monotonic = time.time(), time.monotonic()
    local = time.localtime(now)
    of_day = local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec + now % 1
    with path.open(errors="replace") as file:
        for line in file:
            if (match := _LOGGED.match(line)) is None:
                continue
            hours, minutes, seconds, kind, facts = match.groups()
            ago_s = (of_day - int(hours) * 3600 - int(minutes) * 60 - float(seconds)) % _DAY_S
            if ago_s > _DAY_S / 2:  # by a hair in the future
                ago_s -= _DAY_S
            words = dict(word.partition("=")[::2] for word in facts.split(" "))
            lease = words.get("lease", "")
            if kind == "queued":
                at = monotonic - ago_s + CLOCKS_APART_S
                groups = frozenset(words.get("groups", "").split(","))
                queued.setdefault(lease, Queued(at, words.get("job", ""), groups, aside[lease]))
            elif kind == "set_aside":
                aside[lease].append((monotonic - ago_s - CLOCKS_APART_S, inf))
            elif kind == "queued_again":
                began_at, _ = aside[lease].pop()
                aside[lease].append((began_at, monotonic - ago_s + CLOCKS_APART_S))
            elif words.get("cause") != "released":
                taken_back[lease] = monotonic - ago_s - CLOCKS_APART_S
    return queued, taken_back


def _acquires(who: str, lines: list[Line], killed: list[Line]) -> Iterator[Acquire]:
    """Yields what one client asked for."""
    if not lines or lines[0]["what"] != "begin":
        return
    begin = lines[0]
    pid = begin["pid"]
    alive = start_time(pid) == begin["start_time"]
    ends = [line["at"] for line in killed if line["pid"] == pid and line["at"] >= begin["at"]]
    # Nobody knows when exactly it died of itself: not before its last word.
    end = inf if alive else min(ends, default=lines[-1]["at"])
    asked: dict[int, Acquire] = {}
    held: defaultdict[str, list[Acquire]] = defaultdict(list)
    for line in lines:
        match line["what"]:
            case "invoke":
                asked[line["n"]] = Acquire(
                    who=who,
                    pid=pid,
                    job=line["job"] or f"pid-{pid}",
                    groups=tuple(line["groups"]),
                    ranks=line["ranks"],
                    invoked_at=line["at"],
                    alive=alive,
                    until=end,
                )
            case "fail":
                asked[line["n"]].ended_at = line["at"]
            case "ok":
                acquire = asked[line["n"]]
                acquire.ended_at, acquire.job = line["at"], line["job"]
                acquire.lease, acquire.tokens = line["lease"], line["tokens"]
                acquire.groups = tuple(line["tokens"])
                held[line["lease"]].append(acquire)
            case "release" | "lost" if held[line["lease"]]:
                # Of those that are nested the one that was there first lasts to the end.
                held[line["lease"]].pop().until = line["at"]
            case "left":
                # Whatever comes on this connection now, nobody reads it.
                for acquire in asked.values():
                    if acquire.ended_at is None:
                        acquire.until = line["at"]
            case _:
                pass
    yield from asked.values()


def _mark_repeated(acquires: list[Acquire]) -> None:
    seen: set[str] = set()
    for acquire in sorted(acquires, key=_ended_at):
        acquire.repeated = bool(acquire.names) and seen.issuperset(acquire.names)
        seen.update(acquire.names)


def _end_elsewhere(acquires: list[Acquire], histories: dict[str, list[Line]]) -> None:
    """Ends leases that were given back on another connection of the same session."""
    given_back = {
        line["lease"]: (who, line["at"])
        for who, lines in histories.items()
        for line in lines
        if line["what"] in ("release", "lost")
    }
    for acquire in acquires:
        who, at = given_back.get(acquire.lease or "", (acquire.who, inf))
        if who != acquire.who and at > _ended_at(acquire):
            acquire.until = min(acquire.until, at)


def _take_back(acquires: list[Acquire], taken_back: dict[str, float]) -> None:
    for acquire in acquires:
        if ends := [taken_back[name] for name in acquire.names if name in taken_back]:
            acquire.taken_back, acquire.until = True, min(acquire.until, *ends)


def _find_queued(acquires: list[Acquire], queued: dict[str, Queued]) -> None:
    """Finds when each request was queued; one that was never granted is known by who asked."""
    told = {name for acquire in acquires for name in acquire.names}
    rest = [entry for name, entry in queued.items() if name not in told]
    for acquire in acquires:
        found = [queued[name] for name in acquire.names if name in queued]
        if acquire.lease is None:
            end = _ended_at(acquire) + 2 * CLOCKS_APART_S
            found = [
                entry
                for entry in rest
                if (entry.job, entry.groups) == (acquire.job, frozenset(acquire.groups))
                and acquire.invoked_at <= entry.at <= end
            ]
        if len(found) == 1:
            acquire.queued_at, acquire.aside = found[0].at, found[0].aside


def _ended_at(acquire: Acquire) -> float:
    return acquire.ended_at if acquire.ended_at is not None else inf


# --- judging ------------------------------------------------------------------------------------


def _by_group(acquires: list[Acquire]) -> dict[str, list[Acquire]]:
    """Returns the grants of each group, in the order in which they were seen."""
    groups: defaultdict[str, list[Acquire]] = defaultdict(list)
    for acquire in sorted(acquires, key=_ended_at):
        # One that was taken back before its client, stopped maybe, saw it was never relied on.
        if acquire.granted and acquire.until >= _ended_at(acquire):
            for group in acquire.groups:
                groups[group].append(acquire)
    return groups


def _overlaps(acquires: list[Acquire]) -> Iterator[Violation]:
    for group, grants in _by_group(acquires).items():
        latest: Acquire | None = None
        for grant in grants:
            begun_at = _ended_at(grant)
            if latest is not None and latest.job != grant.job and latest.until > begun_at:
                yield Violation(rule="two jobs hold it", group=group, acquires=(latest, grant))
            if latest is None or grant.until > latest.until:
                latest = grant


def _tokens(acquires: list[Acquire]) -> Iterator[Violation]:
    for group, grants in _by_group(acquires).items():
        last: Acquire | None = None
        for grant in grants:
            if last is not None and not _rises(last, grant, group):
                rule = "the token does not rise"
                yield Violation(rule=rule, group=group, acquires=(last, grant))
            last = grant


def _rises(last: Acquire, grant: Acquire, group: str) -> bool:
    before, token = last.tokens[group], grant.tokens[group]
    # All ranks of a round have one token.
    same = last.job == grant.job and last.ranks > 1 and grant.ranks > 1
    return token > before or (token == before and same)


def _inversions(
    acquires: list[Acquire], order: tuple[str, ...], passes: int, lines: list[Line]
) -> Iterator[Violation]:
    """Yields who was passed over too often.

    A lease of several groups waits for one after the other, so its place counts for the first. A
    round of several ranks takes its place when it is complete, which nobody here can see.
    """
    forgotten = [line["at"] for line in lines if line["what"] == "forgotten"]
    place = {group: number for number, group in enumerate(order)}
    grants = _by_group(acquires)
    for early in acquires:
        if early.queued_at is None or early.ranks > 1:
            continue
        group = min(early.groups, key=lambda name: place.get(name, len(place)))
        end = min(_ended_at(early), early.until)
        if early.lease is None:
            # It left the queue some time before it was told so, and one that is stopped hears of
            # nothing at all.
            stops = [x["at"] for x in lines if x["what"] == "stopped" and x["pid"] == early.pid]
            end = min([end - ANSWER_TAKES_S, *(at for at in stops if at > early.invoked_at)])
        passed = [
            late
            for late in grants.get(group, ())
            if late.ranks == 1
            and late.invoked_at > early.queued_at
            and _ended_at(late) < end
            and not any(early.queued_at <= at <= _ended_at(late) for at in forgotten)
            and not any(a <= _ended_at(late) and late.invoked_at <= b for a, b in early.aside)
        ]
        if len(passed) > passes:
            rule = f"passed over {len(passed)} times, {passes} allowed"
            yield Violation(rule=rule, group=group, acquires=(early, *passed))
