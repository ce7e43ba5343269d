"""The clocks that run against whoever holds a lease.

Rules:

* A client that promised signs of life (`heartbeat_s`) and gives none while it holds loses its
  leases: it is alive for the kernel, and hung for all others.
* A group may have a longest hold (`max_hold_s`). Its holder is warned `hold_warning_s` before, and
  the lease is taken back when the time is over and somebody waits; if nobody does, once somebody
  does.
* Neither clock runs while the holder's state is moved, frozen or parked, which is our doing; the
  one for signs of life starts anew afterwards.
* What is taken back ends like any other lease: its token is refused from then on, and its ranks
  are evicted only if somebody waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tsliced.core.actions import Note, TellHoldWarning
from tsliced.core.granting import Granting
from tsliced.core.model import GroupName, JobKey, RoundId, SessionId, TenancyKey
from tsliced.core.rounds import Round, RoundState
from tsliced.core.sessions import Lease, LeaseState, Session
from tsliced.core.tenancies import Outcome
from tsliced.core.timers import TimerKey, TimerKind


@dataclass(slots=True, kw_only=True)
class Holding(Granting):
    """Rounds that may hold for ever, and those that may not."""

    #: By group, where there is a limit.
    max_hold_s: dict[GroupName, float] = field(default_factory=dict)

    # dataclass(slots=True) makes a second class, which `super()` without arguments does not know.

    def hold(self, lease: Lease, now: float) -> None:
        """Let a lease have what its round holds, and let its clocks run."""
        Granting.hold(self, lease, now)
        session = self.sessions[lease.session]
        if session.heartbeat_s is not None:
            self.expect_signs(session, now)
        if self.max_hold_s:
            self._limit_hold(self.rounds[lease.round], now)

    def resume_clocks(self, now: float) -> None:
        """After a restart: let the clocks run anew for what is held."""
        for round_ in self.rounds.values():
            if round_.state is RoundState.HELD:
                self._limit_hold(round_, now)

    def _is_still(
        self, job: JobKey, groups: Iterable[GroupName], sessions: Iterable[SessionId]
    ) -> bool:
        """Whether it may be our doing that these sessions of a job do not get on."""
        if self.tenancies.any_still(job, groups):
            return True
        ranks = (self.rank_of(self.sessions[session]) for session in sessions)
        return any(self.tenancies.holds_still(rank) for rank in ranks)

    def restart_clocks(self, session: Session, now: float) -> None:
        """A client is back: what it could not be told is due now, and its silence is over."""
        if session.heartbeat_s is not None:
            self.expect_signs(session, now)
        for lease in session.leases.values():
            round_ = self.rounds[lease.round]
            if round_.hold_from is not None:
                round_.warned = False
                self._set_hold_clock(round_)

    # --- signs of life ------------------------------------------------------------------------

    def on_sign_of_life(self, session_id: SessionId, now: float) -> None:
        """A client's own code has shown that it goes on."""
        if (session := self.sessions.get(session_id)) is not None:
            session.heard_at = now

    def expect_signs(self, session: Session, now: float) -> None:
        """Let the clock run anew for a client that promised signs of life and holds something."""
        assert session.heartbeat_s is not None, "only what was promised is expected"
        session.heard_at = now
        if any(_held(session)):
            self.timers.set(TimerKey(TimerKind.SILENCE, session.id), now + session.heartbeat_s)

    def on_silence_due(self, session_id: SessionId, now: float) -> None:
        """A client may have been silent for too long."""
        session = self.sessions.get(session_id)
        if session is None or session.heartbeat_s is None or not session.connected:
            # While the connection is down another clock runs, and this one starts anew after it.
            return
        held = list(_held(session))
        groups = {group for lease in held for group in lease.groups}
        if held and self._is_still(session.job, groups, [session.id]):
            self.expect_signs(session, now)
            return
        due = session.heard_at + session.heartbeat_s
        if held and now < due:
            self.timers.set(TimerKey(TimerKind.SILENCE, session.id), due)
            return
        silent_s = now - session.heard_at
        text = f"no sign of life for {silent_s:.1f} s; one was promised every "
        for lease in held:
            self._revoke(lease, "silent", f"{text}{session.heartbeat_s:g} s (heartbeat_s)", now)

    # --- the longest hold ---------------------------------------------------------------------

    def _limit_hold(self, round_: Round, now: float) -> None:
        limit_s = self._limit_of(round_)
        if limit_s is None or round_.hold_from is not None:
            return
        round_.hold_from, round_.max_hold_s = now, limit_s
        self._set_hold_clock(round_)

    def _limit_of(self, round_: Round) -> float | None:
        limits = (self.max_hold_s.get(group) for group in round_.groups)
        return min((limit for limit in limits if limit is not None), default=None)

    def _set_hold_clock(self, round_: Round) -> None:
        assert round_.hold_from is not None
        assert round_.max_hold_s is not None
        at = round_.hold_from + round_.max_hold_s
        if not round_.warned:
            at -= min(round_.max_hold_s, self.limits.hold_warning_s)
        self.timers.set(TimerKey(TimerKind.HOLD, round_.id), at)

    def on_hold_due(self, round_id: RoundId, now: float) -> None:
        """Warn a holder, or take back what it has held for too long."""
        round_ = self.rounds.get(round_id)
        if round_ is None or round_.hold_from is None:
            return
        if self._is_still(round_.job, round_.groups, _sessions(round_)):
            # The end of what keeps it still sets the clock again.
            return
        if not all(self.sessions[session].connected for session in _sessions(round_)):
            # It could not be told, and relies on its lease until the grace is over.
            again = now + max(self.limits.grace_s, self.limits.retry_max_s)
            self.timers.set(TimerKey(TimerKind.HOLD, round_.id), again)
            return
        limit_s = round_.max_hold_s
        assert limit_s is not None, "a clock runs for it"
        if not round_.warned:
            self._warn(round_, max(0.0, round_.hold_from + limit_s - now))
            round_.warned = True
        if now < round_.hold_from + limit_s:
            round_.overdue = False
            self._set_hold_clock(round_)
            return
        waiters = max(self.waiters_of(lease) for lease in round_.members.values())
        if not waiters:
            round_.overdue = True
            return
        if self._is_spared(round_):
            self.timers.set(TimerKey(TimerKind.HOLD, round_id), now + self.limits.retry_max_s)
            return
        text = f"it was held for {now - round_.hold_from:.1f} s while others wait; "
        for lease in list(round_.members.values()):
            self._revoke(lease, "max_hold", f"{text}max_hold_s is {limit_s:g}", now)

    def _is_spared(self, round_: Round) -> bool:
        """Whether it keeps what it has because a watchdog would not outlast the time without."""
        for tenancy in self.tenancies.tenancies_of(round_.job):
            if set(round_.groups).isdisjoint(tenancy.reach):
                continue
            if (threat := self.threat_to(tenancy)) is not None:
                own = (group for group in round_.groups if group in self.arbiters)
                queues = (self.arbiters[group].queue for group in own)
                waiting = dict.fromkeys(round_id for queue in queues for round_id in queue)
                self.spare_for(threat, tenancy, map(self.rounds.__getitem__, waiting))
                return True
        return False

    def on_contended(self, round_: Round, now: float) -> None:
        """It is known anew how many wait for what a round has of an arbiter elsewhere."""
        if round_.state is not RoundState.HELD:
            return
        self.tell_holder(round_)
        if round_.overdue:
            self.timers.set(TimerKey(TimerKind.HOLD, round_.id), now)

    def _warn(self, round_: Round, ends_in_s: float) -> None:
        for lease in round_.members.values():
            waiters = self.waiters_of(lease)
            facts = {**self._facts(lease), "ends_in_s": ends_in_s, "waiters": waiters}
            self.out.append(Note(kind="hold_warning", level="info", facts=facts))
            self.out.append(
                TellHoldWarning(
                    session=lease.session,
                    lease=lease.id,
                    groups=lease.groups,
                    ends_in_s=ends_in_s,
                    waiters=waiters,
                )
            )

    def _revoke(self, lease: Lease, cause: str, text: str, now: float) -> None:
        facts = {**self._facts(lease), "cause": cause, "reason": text}
        self.out.append(Note(kind="revoked", level="warning", facts=facts))
        self.take_away(lease, text, now)

    # --- what keeps a holder still ------------------------------------------------------------

    def on_outcome(self, outcome: Outcome, now: float) -> None:
        """Take in how a move ended, and give the job's clocks the time back that it took."""
        tenancy = self.tenancies.all.get(outcome.tenancy)
        began_at = tenancy.coordinator.began_at if tenancy is not None else now
        Granting.on_outcome(self, outcome, now)
        job = outcome.tenancy.job
        for session in self.sessions_of(job):
            session.heard_at = now
        if not self.max_hold_s:
            return
        for round_ in self._rounds_of(job):
            if round_.hold_from is not None:
                self._give_back_time(round_, outcome.tenancy, began_at, now)

    def _rounds_of(self, job: JobKey) -> list[Round]:
        leases = (lease for session in self.sessions_of(job) for lease in session.leases.values())
        return [
            self.rounds[round_id] for round_id in dict.fromkeys(lease.round for lease in leases)
        ]

    def _give_back_time(
        self, round_: Round, moved: TenancyKey, began_at: float, now: float
    ) -> None:
        assert round_.hold_from is not None
        since = round_.still_since
        if since is None:
            ranks = (self.rank_of(self.sessions[session]) for session in _sessions(round_))
            of_ranks = (self.tenancies.tenancy_of(rank) for rank in ranks)
            in_it = any(t is not None and t.key == moved for t in of_ranks)
            if not in_it and set(round_.groups).isdisjoint(moved.groups):
                return
            since = max(began_at, round_.hold_from)
        if self._is_still(round_.job, round_.groups, _sessions(round_)):
            round_.still_since = since
            return
        round_.still_since = None
        round_.hold_from += now - since
        self._set_hold_clock(round_)


def _held(session: Session) -> Iterable[Lease]:
    return (lease for lease in session.leases.values() if lease.state is LeaseState.HELD)


def _sessions(round_: Round) -> list[SessionId]:
    return [lease.session for lease in round_.members.values()]
