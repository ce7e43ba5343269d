"""The way of a round to its grant: groups, then devices, then tokens.

Rules:

* A round takes its groups one after the other, in the configured order, and keeps what it has while
  it waits for the next: no two rounds can wait for each other.
* Nothing is moved before a round has all of its groups. Then whoever else is on them is evicted,
  its own tenancies are admitted, and only when all run is it granted, with a new token per group.
* What a round needs is looked at anew whenever something changed (`advance`); no step of it is
  remembered that could be wrong by then.

Safety rule: a grant leaves only while nobody else's state is on the round's groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tsliced.core.actions import (
    FaultRecord,
    Grant,
    Note,
    Refuse,
    TellContended,
    TellRankLost,
    TellStalled,
)
from tsliced.core.arbiter import Arbiter
from tsliced.core.coordinator import Place
from tsliced.core.model import (
    LASTING,
    Cause,
    CoreLimits,
    GroupName,
    JobKey,
    LeaseId,
    ProcessId,
    Reason,
    RequestId,
    RoundId,
    SessionId,
    TenancyKey,
)
from tsliced.core.numbers import Numbers
from tsliced.core.policy import Waiter
from tsliced.core.rounds import Round, RoundState
from tsliced.core.sessions import Lease, LeaseState, Session
from tsliced.core.signals import (
    AdmissionFailed,
    Admitted,
    Blocked,
    Effect,
    Evicted,
    EvictionFailed,
)
from tsliced.core.tenancies import Bound, Outcome, Tenancies, Tenancy
from tsliced.core.timers import TimerKey, TimerKind, Timers

#: How often a round's admission may find company on its devices before it is refused.
MAX_ADMIT_TRIES = 5


#: Causes that are error codes of the wire too.
_REFUSAL_CODES = frozenset({Cause.NO_HOST_MEMORY, Cause.NO_DEVICE_MEMORY, Cause.NOT_PERMITTED})


def _fault_note(kind: str, key: TenancyKey, reason: Reason) -> Note:
    facts = {"job": str(key.job), "groups": ",".join(key.groups), "reason": str(reason)}
    return Note(kind=kind, level="error", facts=facts)


@dataclass(slots=True, kw_only=True)
class Granting:
    """The books of one host, and the rounds in them. What it wants done is added to `out`."""

    limits: CoreLimits
    arbiters: dict[GroupName, Arbiter]
    tenancies: Tenancies
    numbers: Numbers
    timers: Timers[TimerKey]
    random: Random
    out: list[Effect] = field(default_factory=list)
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    by_process: dict[ProcessId, dict[SessionId, None]] = field(default_factory=dict)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    rounds: dict[RoundId, Round] = field(default_factory=dict)
    faults: dict[JobKey, Reason] = field(default_factory=dict)
    #: Order of arrival given out last.
    last_place: int = 0

    def put_lease(self, session: Session, lease: Lease, round_: Round) -> None:
        """Enter a lease into the books."""
        session.leases[lease.request] = lease
        self.leases[lease.id] = lease
        round_.members[lease.id] = lease
        round_.took_part.add(session.id)

    def confirm(self, lease: Lease) -> None:
        if lease.unconfirmed:
            lease.unconfirmed = False
            self.timers.clear(TimerKey(TimerKind.CONFIRM, lease.id))

    def await_confirmation(self, lease: Lease, now: float) -> None:
        lease.unconfirmed = True
        self.timers.set(TimerKey(TimerKind.CONFIRM, lease.id), now + self.limits.ack_s)

    def on_retry_due(self, round_id: RoundId, now: float) -> None:
        """The pause before another try is over."""
        if (round_ := self.rounds.get(round_id)) is not None:
            self.advance(round_, now)

    # --- the way of a round -------------------------------------------------------------------

    def take_place(self, round_: Round, now: float) -> None:
        """Let a round queue once it is complete."""
        if round_.state is RoundState.GATHERING:
            if not round_.complete(round_.ranks - round_.lost):
                return
            self.last_place += 1
            round_.state, round_.asked_at = RoundState.QUEUED, now
            round_.place = self.last_place
        self.advance(round_, now)

    def advance_all(self, now: float) -> None:
        """Look at every round that has groups, after a change that concerns them all."""
        for arbiter in self.arbiters.values():
            if arbiter.chosen is not None:
                self.advance(self.rounds[arbiter.chosen], now)

    def advance(self, round_: Round, now: float) -> None:
        """Take a round as far as it can go now."""
        if round_.state is RoundState.QUEUED and self._reserve(round_, now):
            round_.state, round_.switch_began_at = RoundState.MOVING, now
        if round_.state is RoundState.MOVING and self._clear_devices(round_, now):
            round_.state = RoundState.GRANTING
        if round_.state is RoundState.GRANTING:
            self._grant_round(round_, now)

    def _reserve(self, round_: Round, now: float) -> bool:
        while round_.reserved < len(round_.groups):
            arbiter = self.arbiters[round_.groups[round_.reserved]]
            if arbiter.chosen != round_.id:
                if round_.id not in arbiter.queue:
                    self._enqueue(arbiter, round_)
                if arbiter.choose(now=now) != round_.id:
                    return False
            round_.reserved += 1
        return True

    def _enqueue(self, arbiter: Arbiter, round_: Round) -> None:
        arbiter.enqueue(
            Waiter(
                round=round_.id,
                job=round_.job,
                asked_at=round_.asked_at,
                place=round_.place,
            )
        )
        if arbiter.chosen is not None and len(arbiter.queue) == 1:
            self._tell_contended(self.rounds[arbiter.chosen])

    def _clear_devices(self, round_: Round, now: float) -> bool:
        """Order what must be moved; return whether nothing must."""
        try:
            own = self.tenancies.cover(round_.job, round_.groups, self.out)
        except Bound as bound:
            self._refuse_round(round_, "refused", str(bound.reason), now)
            return False
        if own is None:
            return False
        keys = {tenancy.key for tenancy in own}
        others = {
            tenancy.key: tenancy
            for group in round_.groups
            for tenancy in self.tenancies.residents(group)
            if tenancy.key not in keys
        }
        for tenancy in others.values():
            self._clear_off(tenancy, round_, now)
        if others:
            return False
        ready = True
        for tenancy in own:
            if not tenancy.ready:
                ready = False
                self._bring_on(tenancy, round_, now)
        return ready and round_.id in self.rounds

    def _clear_off(self, tenancy: Tenancy, round_: Round, now: float) -> None:
        coordinator = tenancy.coordinator
        round_.moved = True
        if not coordinator.stable or self._pausing(round_):
            return
        stuck = coordinator.pinned or (
            coordinator.reason if coordinator.place is Place.BLOCKED else None
        )
        if stuck is not None:
            self._stall(round_, tenancy.key.job, stuck)
            return
        self.out += self.tenancies.evict(tenancy.key, now=now)

    def _bring_on(self, tenancy: Tenancy, round_: Round, now: float) -> None:
        coordinator = tenancy.coordinator
        if not coordinator.stable or self._pausing(round_):
            return
        if coordinator.place is Place.BLOCKED:
            assert coordinator.reason is not None
            self._refuse_round(round_, "blocked", str(coordinator.reason), now)
            return
        self.out += self.tenancies.admit(tenancy.key, now=now)

    def _pausing(self, round_: Round) -> bool:
        return self.timers.get(TimerKey(TimerKind.RETRY, round_.id)) is not None

    def _grant_round(self, round_: Round, now: float) -> None:
        if self.numbers.left() < len(round_.groups):
            # The next block is on its way; `NumbersReserved` comes back here.
            return
        tokens = []
        for group in round_.groups:
            token = self.numbers.take()
            assert token is not None
            tokens.append((group, token))
        for group in round_.groups:
            jobs = {tenancy.key.job for tenancy in self.tenancies.residents(group)}
            assert jobs <= {round_.job}, "nobody else is on the devices at a grant"
        round_.state = RoundState.HELD
        for lease in list(round_.members.values()):
            lease.tokens = tuple(tokens)
            self.hold(lease, round_, now)

    def hold(self, lease: Lease, round_: Round, now: float) -> None:
        if not lease.tokens:
            # It joined a round that is held: same grant, same tokens.
            lease.tokens = next(m.tokens for m in round_.members.values() if m.tokens)
        lease.state, lease.granted_at = LeaseState.HELD, now
        self.timers.clear(TimerKey(TimerKind.ACQUIRE, lease.id))
        if now > lease.asked_at:
            self.await_confirmation(lease, now)
        self.out.append(lease.record(round_.place))
        self.out.append(self._granted_note(lease, round_))
        self.grant(lease, round_, now)

    def grant(self, lease: Lease, round_: Round, now: float) -> None:
        self.out.append(
            Grant(
                session=lease.session,
                request=lease.request,
                lease=lease.id,
                tokens=lease.tokens,
                waited_s=lease.granted_at - lease.asked_at,
                restored=round_.restored,
                switch_s=self._switch_s(lease, round_),
                contended=self.waiters_of(lease) > 0,
                ack_s=self.limits.ack_s if lease.unconfirmed else None,
            )
        )

    def _switch_s(self, lease: Lease, round_: Round) -> float:
        return lease.granted_at - round_.switch_began_at if round_.moved else 0.0

    def waiters_of(self, lease: Lease) -> int:
        if len(lease.groups) == 1:
            return len(self.arbiters[lease.groups[0]].queue)
        return len({r for group in lease.groups for r in self.arbiters[group].queue})

    # --- the end of a lease -------------------------------------------------------------------

    def end_lease(
        self, lease: Lease, *, code: str, text: str, now: float, waiters: int = 0
    ) -> None:
        """Take a lease out of all books, and let whoever waits for it go on."""
        round_ = self.rounds[lease.round]
        held = lease.state is LeaseState.HELD
        del self.leases[lease.id]
        del round_.members[lease.id]
        self.confirm(lease)
        self.timers.clear(TimerKey(TimerKind.ACQUIRE, lease.id))
        session = self.sessions.get(lease.session)
        if session is not None:
            del session.leases[lease.request]
            self.out.append(
                session.remember(
                    lease.id,
                    lease.request,
                    code=code,
                    text=text,
                    waiters=waiters,
                    deferred=waiters == 0,
                    limit=self.limits.max_answers,
                )
            )
        if held:
            self.out.append(self._released_note(lease, round_, code, now))
        else:
            # It may ask again and belong to the same round.
            round_.took_part.discard(lease.session)
        if not round_.members:
            self._end_round(round_, now)

    def _end_round(self, round_: Round, now: float) -> None:
        del self.rounds[round_.id]
        self.timers.clear(TimerKey(TimerKind.RETRY, round_.id))
        if round_.state is RoundState.GATHERING:
            return
        free: list[Arbiter] = []
        for group in round_.groups:
            arbiter = self.arbiters[group]
            was_chosen = arbiter.chosen == round_.id
            last_waiter = len(arbiter.queue) == 1
            arbiter.leave(round_.id)
            if was_chosen:
                free.append(arbiter)
            elif arbiter.chosen is not None and last_waiter and not arbiter.queue:
                self._tell_contended(self.rounds[arbiter.chosen])
        # Only when it has left all of them: whoever is chosen for one goes on to the next.
        for arbiter in free:
            self._choose_next(arbiter, now)
        if round_.state is RoundState.MOVING:
            self._spare(round_, now)

    def _choose_next(self, arbiter: Arbiter, now: float) -> None:
        arbiter.choose(now=now)
        # A round that was let go on just before may have had this one chosen on its way.
        if arbiter.chosen is not None:
            self.advance(self.rounds[arbiter.chosen], now)

    def _spare(self, round_: Round, now: float) -> None:
        """Turn back the evictions that only this round needed."""
        for group in round_.groups:
            for tenancy in self.tenancies.residents(group):
                wanted = any(
                    (chosen := self.arbiters[g].chosen) is not None
                    and self.rounds[chosen].job != tenancy.key.job
                    for g in tenancy.key.groups
                )
                if not wanted:
                    self.out += self.tenancies.take_back(tenancy.key, now=now)

    # --- what coordinators say ----------------------------------------------------------------

    def on_outcome(self, outcome: Outcome, now: float) -> None:
        """Take in how a move ended."""
        key = outcome.tenancy
        chosen = {
            round_id: self.rounds[round_id]
            for group in key.groups
            if (round_id := self.arbiters[group].chosen) is not None
        }
        match outcome:
            case Evicted():
                pass
            case Admitted(restored=restored):
                for round_ in chosen.values():
                    round_.restored |= restored and round_.job == key.job
            case EvictionFailed(reason=reason):
                self._on_eviction_failed(key, reason, chosen, now)
            case AdmissionFailed(reason=reason):
                self._on_admission_failed(key, reason, chosen, now)
            case Blocked(reason=reason):
                self.out.append(_fault_note("blocked", key, reason))
        for round_ in chosen.values():
            if round_.id in self.rounds:
                self._bring_back(round_, now)
                self.advance(round_, now)
        self.out += self.tenancies.drop(key)
        self.forget_job(key.job)

    def _bring_back(self, round_: Round, now: float) -> None:
        """Restore a holder's state that turns out to be parked (found after a restart)."""
        if round_.state is not RoundState.HELD:
            return
        for tenancy in self.tenancies.cover(round_.job, round_.groups, self.out) or ():
            if tenancy.coordinator.place is Place.OFF and tenancy.participant.ranks:
                self.out += self.tenancies.admit(tenancy.key, now=now)

    def _on_eviction_failed(
        self, key: TenancyKey, reason: Reason, chosen: dict[RoundId, Round], now: float
    ) -> None:
        if reason.cause is Cause.CANCELLED:
            return
        for round_ in chosen.values():
            if round_.job == key.job:
                continue
            tries = round_.evict_tries[key] = round_.evict_tries.get(key, 0) + 1
            if reason.cause in LASTING or tries >= self.limits.max_evict_tries:
                coordinator = self.tenancies.all[key].coordinator
                if coordinator.pinned is None:
                    coordinator.pinned = reason
                    self.out.append(coordinator.record())
                    self.out.append(_fault_note("pinned", key, reason))
            else:
                self._stall(round_, key.job, reason)
                self._pause(round_, tries, now)

    def _on_admission_failed(
        self, key: TenancyKey, reason: Reason, chosen: dict[RoundId, Round], now: float
    ) -> None:
        for round_ in chosen.values():
            if round_.job != key.job:
                continue
            round_.admit_tries += 1
            company = reason.cause in (Cause.OCCUPIED, Cause.STRANGER)
            if company and round_.admit_tries < MAX_ADMIT_TRIES:
                self._stall(round_, key.job, reason)
                if reason.cause is Cause.STRANGER:
                    self._pause(round_, round_.admit_tries, now)
                continue
            if reason.cause in (Cause.DRIVER, Cause.FAILED, Cause.UNSUPPORTED):
                self.set_fault(key.job, reason)
            code = reason.cause.value if reason.cause in _REFUSAL_CODES else "refused"
            self._refuse_round(round_, code, str(reason), now)

    def _pause(self, round_: Round, tries: int, now: float) -> None:
        limits = self.limits
        pause_s = min(limits.retry_max_s, limits.retry_min_s * 2 ** (tries - 1))
        # Jitter: two hosts that turned back together must not try again together.
        pause_s *= 0.5 + self.random.random()
        self.timers.set(TimerKey(TimerKind.RETRY, round_.id), now + pause_s)

    # --- faults -------------------------------------------------------------------------------

    def set_fault(self, job: JobKey, reason: Reason) -> None:
        """Refuse a job until its processes are gone or the fault is cleared."""
        self.faults[job] = reason
        self.out.append(FaultRecord(job=job, reason=reason))

    def clear_fault(self, job: JobKey) -> None:
        """Let a faulted job try again."""
        if self.faults.pop(job, None) is not None:
            self.out.append(FaultRecord(job=job, reason=None))

    def forget_job(self, job: JobKey) -> None:
        """Clear a job's fault when nothing of it is left."""
        if job not in self.faults or self.tenancies.by_job.get(job):
            return
        if not any(session.job == job for session in self.sessions.values()):
            self.clear_fault(job)

    def on_rank_gone(self, key: TenancyKey, process: ProcessId, now: float) -> None:
        """Tell a job that a rank of it died, and look again at what waited for it."""
        for session in self.sessions.values():
            if session.job != key.job:
                continue
            for lease in session.leases.values():
                if not set(lease.groups).isdisjoint(key.groups):
                    text = f"rank {process.pid} of this job ended"
                    self.out.append(
                        TellRankLost(session=session.id, lease=lease.id, pid=process.pid, text=text)
                    )
        self.out += self.tenancies.drop(key)
        self.forget_job(key.job)
        for group in key.groups:
            if (chosen := self.arbiters[group].chosen) is not None:
                self.advance(self.rounds[chosen], now)

    def revoke_unwritten(self, lease_id: LeaseId, reason: Reason, now: float) -> None:
        """Take back a grant that could not be written down and was not sent."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            text = f"the daemon cannot write its journal: {reason.text}"
            self.refuse_lease(lease, "unavailable", text, now)

    # --- refusals and messages ----------------------------------------------------------------

    def refuse(self, session: SessionId, request: RequestId, code: str, text: str) -> None:
        self.out.append(Refuse(session=session, request=request, code=code, text=text))

    def refuse_lease(self, lease: Lease, code: str, text: str, now: float) -> None:
        self.refuse(lease.session, lease.request, code, text)
        self.end_lease(lease, code=code, text=text, now=now)

    def _refuse_round(self, round_: Round, code: str, text: str, now: float) -> None:
        for lease in list(round_.members.values()):
            self.refuse_lease(lease, code, text, now)

    def _stall(self, round_: Round, job: JobKey, reason: Reason) -> None:
        if round_.stalled == reason:
            return
        round_.stalled = reason
        for lease in round_.members.values():
            self.out.append(
                TellStalled(session=lease.session, lease=lease.id, job=job, reason=reason)
            )

    def _tell_contended(self, round_: Round) -> None:
        if round_.state is not RoundState.HELD:
            return
        for lease in round_.members.values():
            self.out.append(
                TellContended(
                    session=lease.session,
                    lease=lease.id,
                    groups=lease.groups,
                    waiters=self.waiters_of(lease),
                )
            )

    def _granted_note(self, lease: Lease, round_: Round) -> Note:
        return Note(
            kind="granted",
            level="info",
            facts={
                "job": str(round_.job),
                "groups": ",".join(lease.groups),
                "lease": lease.id,
                "token": lease.tokens[0][1].as_int(),
                "phase": lease.phase or None,
                "waited_s": lease.granted_at - lease.asked_at,
                "restored": round_.restored,
                "switch_s": self._switch_s(lease, round_),
            },
        )

    def _released_note(self, lease: Lease, round_: Round, code: str, now: float) -> Note:
        return Note(
            kind="released",
            level="info",
            facts={
                "job": str(round_.job),
                "groups": ",".join(lease.groups),
                "lease": lease.id,
                "held_s": now - lease.granted_at,
                "cause": code,
            },
        )

    def check_invariants(self, *, full: bool) -> None:
        """Assert what must hold between any two events; `full` looks at every round."""
        for arbiter in self.arbiters.values():
            arbiter.check_invariants(full=full)
            assert arbiter.chosen is None or arbiter.chosen in self.rounds
        if not full:
            return
        for round_ in self.rounds.values():
            assert round_.members, "a round without members is over"
            if round_.state in (RoundState.MOVING, RoundState.GRANTING, RoundState.HELD):
                owners = {self.arbiters[group].chosen for group in round_.groups}
                assert owners == {round_.id}, "it has all of its groups"
        for lease in self.leases.values():
            assert self.sessions[lease.session].leases[lease.request] is lease
            assert self.rounds[lease.round].members[lease.id] is lease
