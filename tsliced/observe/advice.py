"""What somebody who runs a job should hear, because they would not find it out: once for each job.

* ``short_holds``: leases that are over sooner than the switch took that each of them needed. Such
  phases cost everybody more than they bring.
* ``never_yields``: a lease that is held for long while others wait. Whoever holds it may not know
  that it shares its devices at all.

That a park comes near the limit of a watchdog the core says itself, which has the clocks for it.

No clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tsliced.core.machine import Machine
from tsliced.core.model import JobKey
from tsliced.core.rounds import Round, RoundState
from tsliced.observe.accounts import Event, number

SHORT_HOLDS: Final = "short_holds"
NEVER_YIELDS: Final = "never_yields"
#: Kinds of events that are looked at.
KINDS: Final = frozenset({"granted", "released"})

#: One may be an accident, or the first look at something.
_TIMES: Final = 3
#: Shorter switches are not worth a word, seconds.
_LEAST_SWITCH_S: Final = 0.1
#: What a phase should last, in switches, so that no more than a tenth is lost.
_WORTH: Final = 9
#: Jobs that are remembered; those that were heard of longest ago go first.
_MOST_JOBS: Final = 4096


Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that a job should hear."""

    job: str
    code: str
    text: str


@dataclass(slots=True)
class _Known:
    """What is known of one job."""

    short: int = 0
    #: What it was told already.
    told: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Advisor:
    """Learns from events, and looks at who holds."""

    #: By token: the switch that a grant took.
    _switches: OrderedDict[int, float] = field(default_factory=OrderedDict)
    #: By lease: the token of such a grant.
    _tokens: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _jobs: OrderedDict[str, _Known] = field(default_factory=OrderedDict)

    def add(self, event: Event) -> Advice | None:
        """Take an event of `KINDS` in; return what its job should hear of it, if anything."""
        if event["kind"] == "granted":
            switch_s = number(event, "switch_s")
            if switch_s >= _LEAST_SWITCH_S:
                token = int(number(event, "token"))
                self._switches[token] = switch_s
                self._tokens[str(event["lease"])] = token
                _limit(self._switches)
                _limit(self._tokens)
            return None
        return self._on_released(event)

    def _on_released(self, event: Event) -> Advice | None:
        token = self._tokens.pop(str(event["lease"]), None)
        # Ranks of one round have their lease together: the first that is back speaks for all.
        switch_s = self._switches.pop(token, None) if token is not None else None
        held_s = number(event, "held_s")
        if switch_s is None or held_s >= switch_s:
            return None
        job = str(event["job"])
        known = self._know(job)
        known.short += 1
        if known.short < _TIMES or SHORT_HOLDS in known.told:
            return None
        known.told.add(SHORT_HOLDS)
        text = (
            f"{known.short} of its leases were shorter than the switch that each of them took: "
            f"the latest was held for {held_s:.2f} s after a switch of {switch_s:.2f} s. Hold one "
            f"lease over several short phases, of {_WORTH * switch_s:.0f} s or more"
        )
        return Advice(job=job, code=SHORT_HOLDS, text=text)

    def look(self, machine: Machine, *, limit_s: float, now: float) -> list[tuple[JobKey, Advice]]:
        """Return what holders should hear behind whom somebody has waited for so long."""
        found = []
        leasing = machine.leasing
        for name, arbiter in leasing.arbiters.items():
            if arbiter.chosen is None or not arbiter.queue:
                continue
            round_ = leasing.rounds[arbiter.chosen]
            first = leasing.rounds[next(iter(arbiter.queue))]
            blocked_s = now - max(_granted_at(round_, now), first.asked_at)
            known = self._know(str(round_.job))
            if blocked_s < limit_s or NEVER_YIELDS in known.told:
                continue
            known.told.add(NEVER_YIELDS)
            text = (
                f"it has held {name} for {blocked_s:.0f} s while {first.job} waits: give it back "
                "between phases (with ts.lease(...) around each of them), or the operator may set "
                "max_hold_s for the group"
            )
            advice = Advice(job=str(round_.job), code=NEVER_YIELDS, text=text)
            found.append((round_.job, advice))
        return found

    def _know(self, job: str) -> _Known:
        known = self._jobs.setdefault(job, _Known())
        self._jobs.move_to_end(job)
        _limit(self._jobs)
        return known


def _granted_at(round_: Round, now: float) -> float:
    """Return since when a round of clients holds; now, if it does not."""
    if round_.state is not RoundState.HELD or not round_.members:
        return now
    return max(lease.granted_at for lease in round_.members.values())


def _limit(books: OrderedDict[Key, Value]) -> None:
    while len(books) > _MOST_JOBS:
        books.popitem(last=False)
