"""Barriers that take long: which step of which move waits, for how long, and for whom.

Rules:

* As long as a coordinator waits for the answers to an order, this is said every
  `barrier_report_s`. Between two tries nobody is waited for, and nothing is said.
* Nothing is decided here: what is too long is the coordinator's matter, and that of `alarms`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsliced.core.actions import Note
from tsliced.core.granting import Granting
from tsliced.core.model import HostName, RankId, TenancyKey, Verb
from tsliced.core.tenancies import Tenancies
from tsliced.core.tenancy import Tenancy
from tsliced.core.timers import TimerKey, TimerKind
from tsliced.core.value import value

#: No more ranks than this are named in one line of the log.
MAX_NAMED = 16


@value
class Awaited:
    """A host that has not answered the standing order, and what is known here of its doings."""

    host: HostName
    #: The preparation in flight (scan, reserve, hooks, rescan), if there is one.
    step: str | None = None
    #: Each operation in flight, and for how many seconds it has been.
    operations: tuple[tuple[RankId, Verb, float], ...] = ()

    def __str__(self) -> str:
        doing = [self.step] if self.step is not None else []
        doing += [f"pid {r.process.pid} {verb.value} {s:.1f} s" for r, verb, s in self.operations]
        more = len(doing) - MAX_NAMED
        named = doing[:MAX_NAMED] + ([f"{more} more"] if more > 0 else [])
        return f"{self.host} ({', '.join(named)})" if named else self.host


def awaited(tenancy: Tenancy, now: float) -> list[Awaited]:
    """Return the hosts that a tenancy's coordinator waits for; none if it waits for nobody."""
    return [
        _of_this_host(tenancy, now) if host == tenancy.participant.host else Awaited(host=host)
        for host in tenancy.coordinator.missing
    ]


def _of_this_host(tenancy: Tenancy, now: float) -> Awaited:
    participant = tenancy.participant
    operations = ((rank.id, rank.operation) for rank in participant.ranks.values())
    return Awaited(
        host=participant.host,
        step=participant.pending.step.value if participant.pending is not None else None,
        operations=tuple(
            (rank, operation.verb, now - operation.started_at)
            for rank, operation in operations
            if operation is not None
        ),
    )


@dataclass(slots=True, kw_only=True)
class Barriers:
    """The barriers of one host's coordinators."""

    tenancies: Tenancies
    granting: Granting

    def follow(self, key: TenancyKey) -> None:
        """Let the clock run for what a coordinator waits for by now, if it does."""
        timers, timer = self.granting.timers, TimerKey(TimerKind.AWAITED, key)
        tenancy = self.tenancies.all.get(key)
        if tenancy is None or not tenancy.coordinator.waits:
            timers.clear(timer)
            return
        if timers.get(timer) is None:
            timers.set(
                timer, tenancy.coordinator.ordered_at + self.granting.limits.barrier_report_s
            )

    def on_due(self, key: TenancyKey, now: float) -> None:
        """Say whom a coordinator still waits for."""
        coordinator = self.tenancies.all[key].coordinator
        due = coordinator.ordered_at + self.granting.limits.barrier_report_s
        if now < due:
            # The clock was set for an order that was answered.
            self.granting.timers.set(TimerKey(TimerKind.AWAITED, key), due)
            return
        missing = awaited(self.tenancies.all[key], now)
        facts = {
            "job": str(key.job),
            "groups": ",".join(key.groups),
            "step": coordinator.place.value,
            "seconds": now - coordinator.ordered_at,
            "missing": "; ".join(map(str, missing)),
        }
        self.granting.out.append(Note(kind="barrier", level="info", facts=facts))
        again = now + self.granting.limits.barrier_report_s
        self.granting.timers.set(TimerKey(TimerKind.AWAITED, key), again)
