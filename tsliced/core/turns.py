"""Turns that nobody asks for.

A parked job that asks for nothing may be blocked: in a call to the driver outside of any lease,
while it saves, ends, or handles a signal. It cannot say so. And a stranger that was frozen never
asks.

Rules:

* A job that is parked and asks for nothing for `idle_park_s` is named, once until it is back.
* With `courtesy_turn_s` it then gets a turn: a round without members, which queues like any other
  behind all who came before it, is granted, and is over after that time. Its state stays where it
  is until somebody waits, as after any lease.
* A job that was asked to end gets one of `ending_turn_s` as soon as it is parked: what it does to
  end, such as to save, does not wait for `idle_park_s`.
* A stranger gets such a turn, of `stranger_turn_s`, whenever it was taken off, until it is gone.
* A job that asks for something itself needs no turn and has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import Note
from tsliced.core.coordinator import Place
from tsliced.core.holding import Holding
from tsliced.core.model import Arrival, JobKey, RoundId, TenancyKey
from tsliced.core.rounds import Round, RoundState
from tsliced.core.signals import Admitted, Evicted
from tsliced.core.tenancies import Outcome
from tsliced.core.tenancy import Tenancy
from tsliced.core.timers import TimerKey, TimerKind

#: As with `RoundState`: every release asks for it.
_OFF = Place.OFF


@dataclass(slots=True, kw_only=True)
class Turns(Holding):
    """The books of one host, with the turns in them that nobody asked for."""

    #: By round: the tenancy whose turn it is.
    turns: dict[RoundId, TenancyKey] = field(default_factory=dict)
    #: Parked tenancies whose jobs ask for nothing, and since when.
    idle: dict[TenancyKey, float] = field(default_factory=dict)
    #: Jobs whose processes were asked to end, and are there.
    told_to_end: set[JobKey] = field(default_factory=set)

    # --- who is idle --------------------------------------------------------------------------

    def on_outcome(self, outcome: Outcome, now: float) -> None:
        """Take in how a move ended, and know who may be blocked from now on."""
        Holding.on_outcome(self, outcome, now)
        match outcome:
            case Evicted(tenancy=key):
                stranger = self.tenancies.is_stranger(key.job)
                self._await_idle(key, 0.0 if stranger else self._patience_s(key.job), now)
            case Admitted(tenancy=key):
                self.idle.pop(key, None)
            case _:
                pass

    def on_end_asked(self, job: JobKey, now: float) -> None:
        """Give a job that was asked to end its devices, now if it is parked, or when it is."""
        led = [t.key for t in self.tenancies.tenancies_of(job) if t.led_here and t.has_ranks]
        if led:
            self.told_to_end.add(job)
        for key in led:
            self._await_idle(key, 0.0, now)

    def _patience_s(self, job: JobKey) -> float | None:
        return 0.0 if job in self.told_to_end else self.limits.idle_park_s

    def _await_idle(self, key: TenancyKey, delay_s: float | None, now: float) -> None:
        if delay_s is not None and self._is_parked(self.tenancies.all.get(key)):
            self.timers.set(TimerKey(TimerKind.IDLE, key), now + delay_s)

    def on_idle_due(self, key: TenancyKey, now: float) -> None:
        """A parked job has asked for nothing for so long, unless it has."""
        tenancy = self.tenancies.all.get(key)
        if tenancy is None or not self._is_parked(tenancy) or key in self.turns.values():
            return
        if any(session.leases for session in self.sessions_of(key.job)):
            # The end of the last of them lets the clock run anew.
            return
        if key.job in self.told_to_end:
            turn_s = self.limits.ending_turn_s
        elif self.tenancies.is_stranger(key.job):
            turn_s = self.limits.stranger_turn_s
        else:
            turn_s = self.limits.courtesy_turn_s
            self._name(tenancy, now)
        if turn_s > 0:
            self._queue_turn(tenancy, turn_s, now)

    def _name(self, tenancy: Tenancy, now: float) -> None:
        key, since_s = tenancy.key, self.limits.idle_park_s
        if key in self.idle or since_s is None:
            return
        self.idle[key] = now - since_s
        pids = sorted(rank.process.pid for rank, _ in tenancy.ranks())
        facts: dict[str, str | int | float | bool | None] = {
            "job": str(key.job),
            "groups": ",".join(key.groups),
            "pids": ",".join(map(str, pids)),
            "since_s": since_s,
            "reason": "it asks for nothing; if it uses its devices without a lease, it is blocked",
        }
        self.out.append(Note(kind="idle_parked", level="warning", facts=facts))

    # --- their turns --------------------------------------------------------------------------

    def _queue_turn(self, tenancy: Tenancy, turn_s: float, now: float) -> None:
        self.last_round = RoundId(self.last_round + 1)
        round_ = Round(
            id=self.last_round,
            job=tenancy.key.job,
            groups=self.tenancies.in_order(tenancy.reach),
            ranks=1,
            arrival=Arrival.FIRST,
            asked_at=now,
            turn_s=turn_s,
        )
        self.rounds[round_.id] = round_
        self.turns[round_.id] = tenancy.key
        self._note_turn("turn_queued", round_)
        self.take_place(round_, now)

    def _grant_round(self, round_: Round, now: float) -> None:
        Holding._grant_round(self, round_, now)
        if round_.turn_s is not None and round_.state is RoundState.HELD:
            round_.turn_began_at = now
            self.timers.set(TimerKey(TimerKind.TURN, round_.id), now + round_.turn_s)
            self._note_turn("turn", round_)

    def on_turn_due(self, round_id: RoundId, now: float) -> None:
        """A turn is over."""
        round_ = self.rounds[round_id]
        self._note_turn("turn_over", round_)
        self._end_round(round_, now)

    def end_turns(self, job: JobKey, now: float) -> None:
        """Take back what a job was to be given unasked: it asks by itself."""
        for round_id, key in list(self.turns.items()):
            if key.job == job:
                self._end_round(self.rounds[round_id], now)
        for key in list(self.idle):
            if key.job == job:
                del self.idle[key]

    def check_turns(self, now: float) -> None:
        """Take back the turns of those that are gone."""
        for round_id, key in list(self.turns.items()):
            tenancy = self.tenancies.all.get(key)
            if tenancy is None or not tenancy.has_ranks:
                self._end_round(self.rounds[round_id], now)
        for key in list(self.idle):
            if key not in self.tenancies.all:
                del self.idle[key]
        for job in sorted(self.told_to_end):
            if not any(tenancy.has_ranks for tenancy in self.tenancies.tenancies_of(job)):
                # Another run of it, under the same id, is asked for nothing yet.
                self.told_to_end.discard(job)

    def _refuse_round(self, round_: Round, code: str, text: str, now: float) -> None:
        if round_.turn_s is None:
            Holding._refuse_round(self, round_, code, text, now)
            return
        self._note_turn("turn_failed", round_, f"{code}: {text}")
        self._end_round(round_, now)

    def _end_round(self, round_: Round, now: float) -> None:
        limits, delay_s = self.limits, self._patience_s(round_.job)
        if round_.turn_s is not None:
            del self.turns[round_.id]
            self.timers.clear(TimerKey(TimerKind.TURN, round_.id))
            # One that failed is tried again, but not at once.
            delay_s = max(limits.retry_max_s, round_.turn_s)
        Holding._end_round(self, round_, now)
        for key in self.tenancies.by_job.get(round_.job, ()):
            if self.tenancies.all[key].coordinator.place is _OFF:
                self._await_idle(key, delay_s, now)

    def _note_turn(self, kind: str, round_: Round, reason: str | None = None) -> None:
        facts = {
            "job": str(round_.job),
            "groups": ",".join(round_.groups),
            "turn_s": round_.turn_s,
            "reason": reason,
        }
        level = "info" if reason is None else "warning"
        self.out.append(Note(kind=kind, level=level, facts=facts))
