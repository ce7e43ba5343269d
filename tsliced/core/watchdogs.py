"""Watchdogs in jobs' processes, which end a process that is kept from its devices for too long.

PyTorch ends a rank whose NCCL calls do not come back for some minutes, and a rank whose devices
were taken cannot make them. How long a job will be parked nobody knows; what is known is for how
long others held the group of late, and how long it takes to move its state.

Rules:

* Nobody's devices are taken without their doing for longer than a watchdog of theirs allows, as
  far as can be told: a lease is not taken back for `max_hold_s`, and a process that never asked for
  a lease is not frozen. Who waits is told why, and it is looked at again.
* What is not known threatens nobody: a watchdog that nobody reported, a group nobody else held.
* A job that is parked for nearly as long as its watchdog allows, of its own doing or not, is named
  once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tsliced.core.actions import Note, TellWarning
from tsliced.core.coordinator import Place
from tsliced.core.draining import Draining
from tsliced.core.events import WatchdogTold
from tsliced.core.model import Cause, GroupName, JobKey, RankId, RankState, Reason, TenancyKey
from tsliced.core.rank import Rank
from tsliced.core.rounds import Round
from tsliced.core.signals import Admitted, Evicted
from tsliced.core.tenancies import Outcome
from tsliced.core.tenancy import Tenancy
from tsliced.core.timers import TimerKey, TimerKind
from tsliced.core.value import value

#: Of each group so many holds, and so many moves, are remembered.
MAX_HOLDS, MAX_MOVES = 32, 8
#: Shorter holds are not worth their while to be remembered: no watchdog is so short, seconds.
MIN_HOLD_S = 0.1

#: A park is named when so much of a watchdog's time is over, while something can be done yet.
NEAR = 0.8

#: What somebody can do about a watchdog that is too short.
_HELPS = (
    "start it with longer ones (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, the process group's timeout) or "
    "without (TORCH_NCCL_ENABLE_MONITORING=0), or set limits.heed_watchdogs = false"
)


@value
class Watchdog:
    """The shortest watchdog of a tenancy, and whose it is."""

    rank: RankId
    limit_s: float


@value
class Threat:
    """A watchdog that would not outlast a park."""

    watchdog: Watchdog
    #: The longest that others held its groups of late.
    hold_s: float
    #: What moving its state off and back takes.
    switch_s: float

    def reason(self) -> Reason:
        """Return what keeps the devices from being taken, fit to be shown to a user."""
        text = (
            f"a watchdog ends it after {self.watchdog.limit_s:g} s without its devices, and it "
            f"would be without them for about {self.hold_s + self.switch_s:.1f} s: others held "
            f"them for up to {self.hold_s:.1f} s of late, and moving takes {self.switch_s:.1f} s"
        )
        return Reason(cause=Cause.WATCHDOG, text=text, rank=self.watchdog.rank)


@dataclass(slots=True, kw_only=True)
class Watchdogs(Draining):
    """The books of one host, with what is known of watchdogs and of how long jobs are parked."""

    #: Whether a job has ranks and lost all its clients.
    is_orphaned: Callable[[JobKey], bool] = lambda _job: False
    #: By group: who held it for how long, the latest last.
    holds: dict[GroupName, deque[tuple[JobKey, float]]] = field(default_factory=dict)
    #: By group: who was moved off or on, and how long it took.
    moves: dict[GroupName, deque[tuple[JobKey, float]]] = field(default_factory=dict)
    #: Since when tenancies are without their devices; those that were warned of are left out.
    parked_at: dict[TenancyKey, float] = field(default_factory=dict)
    #: Tenancies that stay for their watchdogs, and what was last said of each.
    spared: dict[TenancyKey, Reason] = field(default_factory=dict)

    # --- what is learned ----------------------------------------------------------------------

    def note_hold(self, job: JobKey, groups: Iterable[GroupName], held_s: float) -> None:
        """Remember for how long a job held groups that it has given back."""
        if held_s < MIN_HOLD_S:
            return
        for group in groups:
            self.holds.setdefault(group, deque(maxlen=MAX_HOLDS)).append((job, held_s))

    def note_move(self, outcome: Outcome, now: float) -> None:
        """Know since when a tenancy is parked, and how long moves take."""
        key = outcome.tenancy
        tenancy = self.tenancies.all.get(key)
        self.spared.pop(key, None)
        self._forget_gone()
        if tenancy is None or not isinstance(outcome, (Evicted, Admitted)):
            return
        parked, coordinator = self._is_parked(tenancy), tenancy.coordinator
        began_at = coordinator.began_at
        if parked or (isinstance(outcome, Admitted) and outcome.restored):
            # There and back at once counts as two of the same length.
            took_s = (now - began_at) / (2 if coordinator.qualifies else 1)
            for group in key.groups:
                moves = self.moves.setdefault(group, deque(maxlen=MAX_MOVES))
                moves.append((key.job, took_s))
        if parked:
            self.parked_at[key] = began_at
            self._set_clock(tenancy)
        else:
            self.parked_at.pop(key, None)
            self.timers.clear(TimerKey(TimerKind.WATCHDOG, key))

    def _forget_gone(self) -> None:
        """Forget of tenancies that are not there any more what nothing will end."""
        all_ = self.tenancies.all
        self.parked_at = {key: at for key, at in self.parked_at.items() if key in all_}
        self.spared = {key: reason for key, reason in self.spared.items() if key in all_}

    def on_watchdog(self, event: WatchdogTold) -> None:
        """A client said how long its process's watchdogs wait, or that it has none."""
        session = self.sessions.get(event.session)
        if session is None:
            return
        session.watchdog_s = event.limit_s
        key = self.tenancies.home.get(session.process)
        if key is not None:
            self.tenancies.tell_arbiters(self.tenancies.all[key])
            self.watch(key)

    def watch(self, key: TenancyKey) -> None:
        """Let the clock run for a parked tenancy of whose watchdogs something new may be known."""
        if key in self.parked_at:
            self._set_clock(self.tenancies.all[key])

    def watchdog_of(self, tenancy: Tenancy) -> Watchdog | None:
        """Return the shortest watchdog that is known of a tenancy's ranks."""
        known = [
            Watchdog(rank=rank.id, limit_s=limit_s)
            for rank in tenancy.participant.ranks.values()
            if (limit_s := self.watchdog_in(rank)) is not None
        ]
        known += [
            Watchdog(rank=rank, limit_s=present.watchdog_s)
            for rank, present in tenancy.abroad.items()
            if present.watchdog_s is not None
        ]
        return min(known, key=lambda watchdog: watchdog.limit_s, default=None)

    def watchdog_in(self, rank: Rank) -> float | None:
        """Return how long watchdogs wait in a rank: as it said itself, else as it was started."""
        sessions = (self.sessions[name] for name in self.by_process.get(rank.id.process, ()))
        told = [s.watchdog_s for s in sessions if s.watchdog_s is not None]
        return min(told, default=rank.watchdog_s)

    def _is_parked(self, tenancy: Tenancy | None) -> bool:
        if tenancy is None or tenancy.coordinator.place is not Place.OFF:
            return False
        return any(state is RankState.PARKED for _, state in tenancy.ranks())

    # --- who is left where it is --------------------------------------------------------------

    def threat_to(self, tenancy: Tenancy) -> Threat | None:
        """Return what is to be feared if a tenancy were parked now; None: nothing is known."""
        watchdog = self.watchdog_of(tenancy) if self.limits.heed_watchdogs else None
        if watchdog is None:
            return None
        groups, job = tenancy.key.groups, tenancy.key.job
        held = [s for group in groups for who, s in self.holds.get(group, ()) if who != job]
        if not held:
            return None
        threat = Threat(watchdog=watchdog, hold_s=max(held), switch_s=self.switch_s(tenancy))
        return threat if threat.hold_s + threat.switch_s > watchdog.limit_s else None

    def switch_s(self, tenancy: Tenancy) -> float:
        """Return what it takes to move a tenancy off its groups and back; 0: nothing is known.

        As long as it was not moved there itself, what others of its kind took counts, if more.
        """
        moves = [m for group in tenancy.key.groups for m in self.moves.get(group, ())]
        seen_s = 2 * max((seconds for _, seconds in moves), default=0.0)
        if any(job == tenancy.key.job for job, _ in moves):
            return seen_s
        return max(seen_s, tenancy.participant.switch_s or 0.0)

    def never_asked(self, job: JobKey) -> bool:
        """Whether a job is on devices though no client of it ever asked for them."""
        if self.tenancies.is_stranger(job):
            return True
        asked = any(session.leases or session.ended for session in self.sessions_of(job))
        return not asked and not self.is_orphaned(job)

    def spare_for(self, threat: Threat, tenancy: Tenancy, waiting: Iterable[Round]) -> None:
        """Leave a tenancy on its devices, and tell those who wait for them why."""
        key, reason = tenancy.key, threat.reason()
        if self.spared.get(key) != reason:
            self.spared[key] = reason
            facts = {
                **_facts(key, threat.watchdog),
                "hold_s": threat.hold_s,
                "switch_s": threat.switch_s,
                "reason": str(reason),
                "way_out": _HELPS,
            }
            self.out.append(Note(kind="pause_refused", level="warning", facts=facts))
        for round_ in waiting:
            self.tell_stalled(round_, key.job, reason, _HELPS)

    # --- who is parked for too long -----------------------------------------------------------

    def _set_clock(self, tenancy: Tenancy) -> None:
        if (watchdog := self.watchdog_of(tenancy)) is not None:
            due = self.parked_at[tenancy.key] + NEAR * watchdog.limit_s
            self.timers.set(TimerKey(TimerKind.WATCHDOG, tenancy.key), due)

    def on_watchdog_due(self, key: TenancyKey, now: float) -> None:
        """A parked tenancy's watchdog will not wait for much longer."""
        tenancy = self.tenancies.all.get(key)
        watchdog = self.watchdog_of(tenancy) if tenancy is not None else None
        if tenancy is None or watchdog is None or not self._is_parked(tenancy):
            self.parked_at.pop(key, None)
            return
        parked_s, rank = now - self.parked_at[key], watchdog.rank
        # The same sum as for the clock: another way to reckon might differ from it for ever.
        if now < self.parked_at[key] + NEAR * watchdog.limit_s:
            self._set_clock(tenancy)
            return
        # Once is enough.
        del self.parked_at[key]
        where = "" if rank.host == self.tenancies.host else f" on {rank.host}"
        text = (
            f"it has been without its devices for {parked_s:.0f} s, and a watchdog of its process "
            f"{rank.process.pid}{where} waits for {watchdog.limit_s:g} s: it may end itself"
        )
        facts = {**_facts(key, watchdog), "parked_s": parked_s, "reason": text, "way_out": _HELPS}
        self.out.append(Note(kind="watchdog", level="warning", facts=facts))
        self.out += [
            TellWarning(session=session.id, code=Cause.WATCHDOG.value, text=text)
            for session in self.sessions_of(key.job)
            if not session.agent
        ]


def _facts(key: TenancyKey, watchdog: Watchdog) -> dict[str, str | int | float | bool | None]:
    return {
        "job": str(key.job),
        "groups": ",".join(key.groups),
        "rank": str(watchdog.rank),
        "limit_s": watchdog.limit_s,
    }
