"""Operations that do not come back: which they are, and whom they hold up.

Rules:

* An alarm is raised once for an operation: when it has taken longer than its bytes explain, or as
  soon as its process is seen to be unable to run.
* Nothing is cut off for it, and groups that it does not concern go on. Who waits for it is told.
* It is over when the operation ends, or when a process that could not run can.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import Note, StartOperation
from tsliced.core.events import OperationHindered
from tsliced.core.granting import Granting
from tsliced.core.model import Cause, CoreLimits, OpId, Reason
from tsliced.core.rank import Rank
from tsliced.core.remedies import out_of_hang
from tsliced.core.rounds import RoundState
from tsliced.core.tenancies import Tenancies
from tsliced.core.tenancy import Tenancy
from tsliced.core.timers import TimerKey, TimerKind
from tsliced.core.value import value


@value
class Alarm:
    """An operation that something is wrong with."""

    start: StartOperation
    #: When the operation began.
    started_at: float
    reason: Reason

    def facts(self, now: float) -> dict[str, str | int | float | bool | None]:
        """Return what a line of the log says of it."""
        return {
            "job": str(self.start.tenancy.job),
            "groups": ",".join(self.start.tenancy.groups),
            "rank": str(self.start.rank),
            "verb": self.start.verb.value,
            "seconds": now - self.started_at,
            "reason": str(self.reason),
            "way_out": self.way_out,
        }

    def text(self, now: float) -> str:
        """Return a sentence that says how long it has been."""
        text = f"{self.start.verb.value} for {now - self.started_at:.0f} s: {self.reason}"
        return f"{text}; {self.way_out}" if self.way_out else text

    @property
    def way_out(self) -> str:
        """Return what helps; of a process that is stopped the reason says it."""
        is_stopped = self.reason.cause is Cause.STOPPED
        return "" if is_stopped else out_of_hang(self.start.tenancy.job)


@dataclass(slots=True, kw_only=True)
class Alarms:
    """The alarms of one host."""

    limits: CoreLimits
    tenancies: Tenancies
    granting: Granting
    stuck: dict[OpId, Alarm] = field(default_factory=dict)

    def arm(self, start: StartOperation) -> None:
        """Expect an operation that begins to end in the time that its bytes explain."""
        rank = self._rank(start)
        allowed_s = self.limits.stuck_base_s + rank.device_bytes / self.limits.stuck_bytes_per_s
        assert rank.operation is not None
        self._set_clock(start.op, rank.operation.started_at + allowed_s)

    def on_due(self, op: OpId, now: float) -> None:
        """An operation is late."""
        if op in self.stuck:
            return
        text = "the driver has not come back; nothing is killed in the middle of a call"
        self._raise(op, Cause.STUCK, text, now)

    def on_hindered(self, event: OperationHindered, now: float) -> None:
        """The process of an operation cannot run, so its driver cannot answer; or it can again."""
        start, alarm = self.tenancies.operations.get(event.op), self.stuck.get(event.op)
        if start is None:
            return
        if event.reason is not None:
            if alarm is None or alarm.reason.text != event.reason:
                self._raise(event.op, Cause.STOPPED, event.reason, now)
        elif alarm is not None and alarm.reason.cause is Cause.STOPPED:
            self._lower(event.op, "its process can run again", now)
            self._set_clock(event.op, now + self.limits.stuck_base_s)

    def on_ended(self, op: OpId, now: float) -> None:
        """An operation has come back."""
        self.granting.timers.clear(TimerKey(TimerKind.STUCK, op))
        if op in self.stuck:
            self._lower(op, "it ended", now)

    def _raise(self, op: OpId, cause: Cause, text: str, now: float) -> None:
        start = self.tenancies.operations[op]
        operation = self._rank(start).operation
        assert operation is not None
        reason = Reason(cause=cause, text=text, rank=start.rank)
        alarm = Alarm(start=start, started_at=operation.started_at, reason=reason)
        self.stuck[op] = alarm
        granting = self.granting
        granting.out.append(Note(kind="stuck", level="error", facts=alarm.facts(now)))
        told = granting.hung[start.tenancy] = Reason(cause=cause, text=alarm.text(now))
        granting.set_all_aside(self._tenancy(start).reach)
        for round_ in granting.concerned(start.tenancy):
            if round_.state is RoundState.MOVING:
                granting.tell_stalled(round_, start.tenancy.job, told)

    def _lower(self, op: OpId, text: str, now: float) -> None:
        alarm = self.stuck.pop(op)
        facts = {**alarm.facts(now), "reason": text}
        self.granting.out.append(Note(kind="unstuck", level="warning", facts=facts))
        key = alarm.start.tenancy
        if all(other.start.tenancy != key for other in self.stuck.values()):
            del self.granting.hung[key]
            self.granting.todo += key.groups

    def _set_clock(self, op: OpId, at: float) -> None:
        self.granting.timers.set(TimerKey(TimerKind.STUCK, op), at)

    def _rank(self, start: StartOperation) -> Rank:
        return self._tenancy(start).participant.ranks[start.rank.process]

    def _tenancy(self, start: StartOperation) -> Tenancy:
        # It may have become a part of another one since the operation began.
        return self.tenancies.all[self.tenancies.home[start.rank.process]]
