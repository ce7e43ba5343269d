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

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from tsliced.core.actions import TellLost
from tsliced.core.arbiter import Arbiter
from tsliced.core.coordinator import MAX_DOUBLINGS, Place
from tsliced.core.model import (
    LASTING,
    Cause,
    Drain,
    GroupName,
    JobKey,
    LeaseId,
    RankId,
    Reason,
    RoundId,
    TenancyKey,
)
from tsliced.core.numbers import Numbers
from tsliced.core.policy import Waiter
from tsliced.core.remedies import (
    Standstill,
    out_of_block,
    out_of_fault,
    out_of_loss,
    out_of_pin,
    out_of_silence,
    toward_a_freeze,
)
from tsliced.core.rounds import ASIDE, GATHERING, GRANTING, HELD, MOVING, QUEUED, Round
from tsliced.core.sessions import LEASE_HELD, LEASE_WAITING, Lease
from tsliced.core.signals import AdmissionFailed, Admitted, Blocked, Evicted, EvictionFailed
from tsliced.core.tenancies import Outcome
from tsliced.core.tenancy import Bound, Tenancy
from tsliced.core.timers import TimerKey, TimerKind
from tsliced.core.watchdogs import MIN_HOLD_S, Watchdogs

if TYPE_CHECKING:
    from random import Random

#: How often a round's admission may find company on its devices before it is refused.
MAX_ADMIT_TRIES = 5

#: Causes that are error codes of the wire too.
_REFUSAL_CODES = frozenset({Cause.NO_HOST_MEMORY, Cause.NO_DEVICE_MEMORY, Cause.NOT_PERMITTED})

#: Causes for which a job is held back.
_OWN_FAULTS = frozenset({Cause.DRIVER, Cause.FAILED, Cause.UNSUPPORTED})

#: Somebody else is on the devices.
_COMPANY = frozenset({Cause.OCCUPIED, Cause.STRANGER})


@dataclass(slots=True, kw_only=True)
class Granting(Watchdogs):
    """The books of one host, and what moves the rounds in them on."""

    numbers: Numbers
    random: Random
    #: Order of arrival given out last.
    last_place: int = 0
    #: Being brought back because an operator wants it tried again: no round waits for them.
    tried: dict[TenancyKey, None] = field(default_factory=dict)

    def on_retry_due(self, round_id: RoundId, now: float) -> None:
        """The pause before another try is over."""
        if (round_ := self.rounds.get(round_id)) is not None:
            self.advance(round_, now)
            for key in list(self.tenancies.by_job.get(round_.job, ())):
                if not set(round_.groups).isdisjoint(self.tenancies.all[key].reach):
                    self._bring_back(key, [round_], now)

    def work_off(self, now: float) -> None:
        """Let the next round have what is free, and look again at who has what has changed."""
        if self.aside:
            self._let_back(now)
        while self.todo:
            group = self.todo.popleft()
            if (arbiter := self.arbiters.get(group)) is None:
                # Another host's.
                continue
            arbiter.choose(now=now)
            if (round_ := self.chosen_for(group)) is not None:
                self.advance(round_, now)
            else:
                self.park(group, now)
        for group in self.vacated:
            self.spare(group, now)
        self.vacated.clear()

    def drain(self, group: GroupName, drain: Drain | None, now: float) -> None:
        """Let nobody more onto a group, or let jobs in again."""
        if not self.set_drain(group, drain):
            return
        if drain is not None:
            self.set_all_aside([group])
        self.work_off(now)

    def _let_back(self, now: float) -> None:
        for round_ in self.come_back():
            self.advance(round_, now)

    # --- the way of a round -------------------------------------------------------------------

    def take_place(self, round_: Round, now: float) -> None:
        """Let a round queue once it is complete."""
        placed = round_.state is GATHERING
        if placed:
            if not round_.complete(round_.ranks - round_.lost):
                return
            self.last_place += 1
            round_.state, round_.asked_at = QUEUED, now
            round_.place = self.last_place
        self.advance(round_, now)
        if round_.state in (QUEUED, ASIDE):
            self._refuse_nested(round_, now)
        if placed and round_.state is not HELD:
            # The place is all its members'; none is left here if it was refused at once.
            for lease in round_.members.values():
                self.keep_lease(lease)

    def _refuse_nested(self, round_: Round, now: float) -> None:
        """Let nobody wait for a group who holds one that comes after it: others wait in order."""
        for lease in list(round_.members.values()):
            if (held := lease.out_of_order) is not None:
                first = lease.groups[0]
                text = f"{first} must be waited for, comes before {held}, and {held} is held"
                text += "; lease both together, or give the other one back first"
                self.refuse_lease(lease, "would_deadlock", text, now)

    def advance_all(self) -> None:
        """Look at every round that has groups, after a change that concerns them all."""
        self.todo.extend(self.arbiters)

    def advance(self, round_: Round, now: float) -> None:
        """Take a round as far as it can go now."""
        if round_.state is QUEUED and self._reserve(round_, now):
            round_.state, round_.switch_began_at = MOVING, now
        if round_.state in (MOVING, GRANTING):
            # Also while it waits for tokens: somebody may have come onto the devices meanwhile.
            hindered = self.lost or self.silent or round_.job in self.faults
            settled = not hindered and self.tenancies.settled(round_.job, round_.groups)
            clear = settled or self._clear_devices(round_, now)
            round_.state = GRANTING if clear else MOVING
        if round_.state is GRANTING:
            self._grant_round(round_, now)

    def _reserve(self, round_: Round, now: float) -> bool:
        if (self.drains or len(round_.groups) > 1) and self.set_aside(round_):
            return False
        while round_.reserved < len(round_.groups):
            arbiter = self.arbiters[round_.groups[round_.reserved]]
            if arbiter.chosen != round_.id and not arbiter.claim(round_.id):
                if round_.id not in arbiter.queue:
                    self._enqueue(arbiter, round_, now)
                if arbiter.choose(now=now) != round_.id:
                    return False
            round_.reserved += 1
        return True

    def _enqueue(self, arbiter: Arbiter, round_: Round, now: float) -> None:
        arbiter.enqueue(
            Waiter(
                round=round_.id,
                job=round_.job,
                asked_at=round_.asked_at,
                place=round_.place,
            )
        )
        if arbiter.chosen is None:
            return
        if len(arbiter.queue) == 1:
            self.note_holders(arbiter.name, now)
            self.tell_contended(arbiter.name)
        if (holder := self.rounds[arbiter.chosen]).overdue:
            self.timers.set(TimerKey(TimerKind.HOLD, holder.id), round_.asked_at)

    def _clear_devices(self, round_: Round, now: float) -> bool:
        """Order what must be moved; return whether nothing must."""
        if round_.job in self.faults:
            text = str(self.explain_fault(round_.job, now))
            self._refuse_round(round_, "job_faulted", text, now)
            return False
        if (silence := self.silence_of(round_)) is not None:
            self.tell_stalled(round_, round_.job, silence, out_of_silence())
            return False
        if (loss := self.loss_of(round_)) is not None:
            self.tell_stalled(round_, round_.job, loss, out_of_loss())
            return False
        try:
            own = self.tenancies.cover(round_.job, round_.groups, self.out)
        except Bound as bound:
            self._refuse_round(round_, "refused", str(bound.reason), now)
            return False
        if own is None:
            return False
        if (
            blocked := next((t for t in own if t.coordinator.place is Place.BLOCKED), None)
        ) is not None:
            self._refuse_round(round_, "blocked", str(self.explain_stop(blocked, now)), now)
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
        missing = [tenancy for tenancy in own if not tenancy.ready]
        for tenancy in missing:
            if tenancy.coordinator.stable and not self._pausing(round_):
                self.out += self.tenancies.admit(tenancy.key, now=now)
        return not missing

    def _clear_off(self, tenancy: Tenancy, round_: Round, now: float) -> None:
        coordinator = tenancy.coordinator
        round_.moved = True
        if not coordinator.stable or self._pausing(round_):
            return
        if (obstacle := self._obstacle(tenancy)) is not None:
            self.tell_stalled(round_, tenancy.key.job, *obstacle)
            return
        if self.never_asked(tenancy.key.job) and (threat := self.threat_to(tenancy)) is not None:
            self.spare_for(threat, tenancy, [round_])
            self._pause(round_, MAX_DOUBLINGS, now)
            return
        self.out += self.tenancies.evict(tenancy.key, now=now)

    def _obstacle(self, tenancy: Tenancy) -> tuple[Reason, str] | None:
        """Say why a tenancy in the way must stay, if it must, and what helps."""
        if (stop := self.stop_of(tenancy)) is not None:
            return stop
        for group in tenancy.reach:
            holder = self.chosen_for(group)
            if holder is None or holder.job != tenancy.key.job:
                continue
            if holder.state is HELD:
                # A process of it reaches from what its job holds to what others want.
                text = f"it holds {group}, and a process of it has contexts elsewhere too"
                rank = next(iter(tenancy.beyond.values()), None)
                return Reason(cause=Cause.BOUND_GROUPS, text=text, rank=rank), ""
        return None

    def explain_fault(self, job: JobKey, now: float) -> Standstill:
        """Say what a faulted job is held back for."""
        return Standstill(self.faults[job], now - self.faulted_at[job], out_of_fault(job))

    def explain_stop(self, tenancy: Tenancy, now: float) -> Standstill | None:
        """Say why a tenancy is BLOCKED or PINNED; None: it is not."""
        if (stop := self.stop_of(tenancy)) is None:
            return None
        return Standstill(stop[0], now - tenancy.coordinator.stopped_at, stop[1])

    def _pausing(self, round_: Round) -> bool:
        return self.timers.get(TimerKey(TimerKind.RETRY, round_.id)) is not None

    def _grant_round(self, round_: Round, now: float) -> None:
        tokens = self.numbers.take_several(len(round_.groups))
        if tokens is None:
            # The next block is on its way; `NumbersReserved` comes back here.
            return
        for group in round_.groups:
            assert self.arbiters[group].chosen == round_.id, "a grant is of groups that it has"
            self.tenancies.assert_alone(group, round_.job)
        round_.state = HELD
        round_.tokens = tuple(zip(round_.groups, tokens, strict=True))
        for lease in round_.members.values():
            self.hold(lease, now)

    def hold(self, lease: Lease, now: float) -> None:
        """Let a lease have what its round holds."""
        lease.tokens = self.rounds[lease.round].tokens
        lease.state, lease.granted_at = LEASE_HELD, now
        if lease.limited:
            self.stop_clock(lease)
        self.keep_lease(lease)
        if now > lease.asked_at:
            self.await_confirmation(lease, now)
        if lease.queued:
            self.note_granted(lease, now)
        else:
            self.note_later(lease, now)
        self.tell_granted(lease)

    def hold_rest(self, round_: Round, now: float) -> None:
        """After a restart: let those of a held round hold it too whose grant was not written."""
        for lease in round_.members.values():
            if lease.state is LEASE_WAITING:
                self.hold(lease, now)

    # --- the end of a lease -------------------------------------------------------------------

    def end_lease(
        self, lease: Lease, *, code: str, text: str, now: float, waiters: int = 0
    ) -> None:
        """End a lease, and let whoever waits for what it had go on."""
        round_ = self.rounds[lease.round]
        if lease.state is LEASE_HELD:
            self.note_released(lease, code, waiters, now)
            if now - lease.granted_at >= MIN_HOLD_S:
                self.note_hold(lease, now)
        else:
            # It may ask again and belong to the same round.
            round_.took_part.discard(lease.session)
        self.strike_lease(lease, code, text, waiters)
        if not round_.members:
            self._end_round(round_, now)

    def _end_round(self, round_: Round, now: float) -> None:
        del self.rounds[round_.id]
        if round_.paused:
            self.timers.clear(TimerKey(TimerKind.RETRY, round_.id))
        self.aside.pop(round_.id, None)
        if round_.hold_from is not None:
            self.timers.clear(TimerKey(TimerKind.HOLD, round_.id))
        if round_.state is not GATHERING:
            # Only then is anything free: who is chosen for one group goes on to the next.
            for group in round_.groups:
                self.leave(self.arbiters[group], round_)
        for key in self.tenancies.by_job.get(round_.job, ()):
            tenancy = self.tenancies.all[key]
            if tenancy.participant.beyond:
                self.todo.extend(tenancy.reach)
        if round_.state is not HELD or round_.job not in self.by_job:
            self.tidy(round_.job)

    # --- what coordinators say ----------------------------------------------------------------

    def on_outcome(self, outcome: Outcome, now: float) -> None:
        """Take in how a move ended."""
        key = outcome.tenancy
        self.note_move(outcome, now)
        chosen = self.concerned(key)
        match outcome:
            case Evicted():
                self._bring_back(key, chosen, now)
            case Admitted(restored=restored):
                for round_ in chosen:
                    if restored and round_.job == key.job:
                        round_.moved = round_.restored = True
            case EvictionFailed(reason=reason):
                self._on_eviction_failed(key, reason, chosen, now)
            case AdmissionFailed(reason=reason):
                self._on_admission_failed(key, reason, chosen, now)
                self._bring_back(key, chosen, now)
            case Blocked(reason=reason):
                self.note_fault("blocked", key, reason, out_of_block(key.job, reason))
                self.set_all_aside(self.tenancies.all[key].reach)
            case _:
                assert_never(outcome)
        self.tried.pop(key, None)
        self.todo += [group for round_ in chosen for group in round_.groups[:1]]
        self.todo += self.drains
        self.work_off(now)
        self.tidy(key.job)

    def concerned(self, key: TenancyKey) -> list[Round]:
        """Return the rounds that have groups on whose devices the tenancy may be."""
        tenancy = self.tenancies.all.get(key)
        groups = tenancy.reach if tenancy is not None else key.groups
        chosen = (self.chosen_for(group) for group in groups)
        return list({round_.id: round_ for round_ in chosen if round_ is not None}.values())

    def _bring_back(self, key: TenancyKey, chosen: list[Round], now: float) -> None:
        """Restore a holder's state that turns out to be parked (found after a restart)."""
        tenancy = self.tenancies.all.get(key)
        if tenancy is None or tenancy.coordinator.place is not Place.OFF:
            return
        mine = (r for r in chosen if r.id in self.rounds and r.state is HELD and r.job == key.job)
        holders = list(mine)
        if tenancy.has_ranks and holders and not any(map(self._pausing, holders)):
            self.out += self.tenancies.admit(key, now=now)

    def _on_eviction_failed(
        self, key: TenancyKey, reason: Reason, chosen: list[Round], now: float
    ) -> None:
        # It may have become a part of another since, and what is in the way is looked at anew.
        gone = key not in self.tenancies.all or self._is_gone(reason)
        if gone or reason.cause is Cause.CANCELLED:
            return
        for round_ in chosen:
            if round_.job == key.job or round_.state is not MOVING:
                continue
            tries = round_.evict_tries[key] = round_.evict_tries.get(key, 0) + 1
            enough = tries >= self.limits.max_evict_tries and not reason.is_ours
            if reason.cause in LASTING or enough:
                text = f"given up after {tries} tries: {reason.text}" if tries > 1 else reason.text
                self._pin(key, replace(reason, text=text), now)
                # Whoever clears it means that all of it is tried again.
                del round_.evict_tries[key]
            else:
                hooks = self.tenancies.all[key].participant.hook_sessions
                helps = toward_a_freeze(reason, has_callbacks=bool(hooks))
                self.tell_stalled(round_, key.job, reason, helps)
                self._pause(round_, tries, now)
        if self.pause_parking(self.tenancies.all[key].reach, now) and reason.cause in LASTING:
            self._pin(key, reason, now)

    def _pin(self, key: TenancyKey, reason: Reason, now: float) -> None:
        tenancy = self.tenancies.all[key]
        if tenancy.coordinator.pinned is None:
            self.out += tenancy.coordinator.pin(reason, now=now)
            has_callbacks = bool(tenancy.participant.hook_sessions)
            way_out = out_of_pin(key.job, reason, has_callbacks=has_callbacks)
            self.note_fault("pinned", key, reason, way_out)
            self.set_all_aside(tenancy.reach)

    def _on_admission_failed(
        self, key: TenancyKey, reason: Reason, chosen: list[Round], now: float
    ) -> None:
        gone = self._is_gone(reason)
        own = [round_ for round_ in chosen if round_.job == key.job]
        at_fault = reason.cause in _OWN_FAULTS and not gone and not reason.is_ours
        if at_fault and key in self.tried:
            self.set_fault(key, reason, now)
        for round_ in own:
            round_.admit_tries += 1
            passes = reason.cause in _COMPANY or reason.is_ours
            early = round_.admit_tries < MAX_ADMIT_TRIES
            # What another job left there is no reason to refuse this one, however long it stays.
            if reason.cause is Cause.OCCUPIED or ((passes or gone) and early):
                if passes:
                    self.tell_stalled(round_, key.job, reason)
                waits = early and round_.state is not HELD and self._others_on(key)
                if passes and not waits:
                    # Nobody can be sent away, but whatever it is may pass.
                    self._pause(round_, round_.admit_tries, now)
                continue
            if at_fault:
                self.set_fault(key, reason, now)
            code = reason.cause.value if reason.cause in _REFUSAL_CODES else "refused"
            if reason.is_ours:
                code = "unavailable"
            self._refuse_round(round_, code, str(reason), now)

    def retry(self, job: JobKey, now: float) -> None:
        """Try again at once what failed for a job: keep no pause, and bring back who was at fault.

        Only onto groups that nobody has or is on; else its next acquire tries it.
        """
        for key in list(self.tenancies.by_job.get(job, ())):
            tenancy = self.tenancies.all[key]
            for round_ in self.concerned(key):
                self.timers.clear(TimerKey(TimerKind.RETRY, round_.id))
                round_.evict_tries.pop(key, None)
            for group in tenancy.reach:
                self.timers.clear(TimerKey(TimerKind.PARK, group))
            away = tenancy.coordinator.place is Place.OFF and tenancy.has_ranks
            if away and all(self._is_empty(group) for group in tenancy.reach):
                self.tried[key] = None
                self.out += self.tenancies.admit(key, now=now)

    def _is_empty(self, group: GroupName) -> bool:
        arbiter = self.arbiters.get(group)
        free = arbiter is not None and arbiter.chosen is None and group not in self.drains
        return free and not self.tenancies.residents(group)

    def _others_on(self, key: TenancyKey) -> bool:
        residents = (t for group in key.groups for t in self.tenancies.residents(group))
        return any(tenancy.key.job != key.job for tenancy in residents)

    def _is_gone(self, reason: Reason) -> bool:
        """Whether the rank that stood in the way is dead, and with it the reason."""
        return reason.rank is not None and self.tenancies.tenancy_of(reason.rank) is None

    def _pause(self, round_: Round, tries: int, now: float) -> None:
        limits = self.limits
        pause_s = min(limits.retry_max_s, limits.retry_min_s * 2 ** min(tries - 1, MAX_DOUBLINGS))
        # Jitter: two hosts that turned back together must not try again together.
        pause_s *= 0.5 + self.random.random()
        round_.paused = True
        self.timers.set(TimerKey(TimerKind.RETRY, round_.id), now + pause_s)

    def on_rank_gone(self, key: TenancyKey, reach: Iterable[GroupName], rank: RankId) -> None:
        """Tell a job that a rank of it died, and look again at what waited for it."""
        self.clear_fault_of(key.job, rank)
        self.tell_rank_lost(key, rank)
        self.todo.extend(reach)
        self.tidy(key.job)

    def tell_moving(self, reason: Reason) -> None:
        """Tell those for whom something is moved what is in the way, unless they know of it."""
        for group in self.arbiters:
            round_ = self.chosen_for(group)
            if round_ is not None and round_.state is MOVING and round_.stalled is None:
                self.tell_stalled(round_, round_.job, reason)

    def revoke_unwritten(self, lease_id: LeaseId, text: str, now: float) -> None:
        """Take back a grant that could not be written down and was not sent."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            self.refuse_lease(lease, "unavailable", text, now)

    # --- refusals -----------------------------------------------------------------------------

    def refuse_lease(self, lease: Lease, code: str, text: str, now: float) -> None:
        """End a lease that its client has no grant of."""
        self.refuse(lease.session, lease.request, code, text)
        self.end_lease(lease, code=code, text=text, now=now)

    def take_away(self, lease: Lease, text: str, now: float) -> None:
        """End a lease that its client holds, as far as it knows."""
        self.end_lease(lease, code="lease_ended", text=text, now=now)
        self.out.append(TellLost(session=lease.session, lease=lease.id, text=text))

    def _refuse_round(self, round_: Round, code: str, text: str, now: float) -> None:
        for lease in list(round_.members.values()):
            if lease.state is LEASE_HELD:
                self.take_away(lease, text, now)
            else:
                self.refuse_lease(lease, code, text, now)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        for arbiter in self.arbiters.values():
            arbiter.check_invariants()
            assert arbiter.chosen is None or arbiter.chosen in self.rounds
        self.check_drains()
        assert not self.todo, "nothing is left for later"
        for round_ in self.rounds.values():
            self._check_round(round_)
        for lease in self.leases.values():
            assert self.sessions[lease.session].leases[lease.request] is lease
            assert self.rounds[lease.round].members[lease.id] is lease
            assert (lease.state is LEASE_HELD) == bool(lease.tokens)
        for lease_id, lease in self.untold.items():
            assert self.leases.get(lease_id) is lease, "what is told as over is not held"
        assert self.untold_timed or not (self.untold or self.tallies), "it is told in time"
        uids = Counter(self.sessions[lease.session].job.uid for lease in self.leases.values())
        assert self.leases_by_uid == uids, "who has how many leases"

    def _check_round(self, round_: Round) -> None:
        if round_.turn_s is None:
            assert round_.members, "a round without members is over"
        has = [group for group in round_.groups if self.arbiters[group].chosen == round_.id]
        assert has == list(round_.groups[: round_.reserved]), "it takes its groups in their order"
        if round_.state is QUEUED:
            group = round_.groups[round_.reserved]
            assert round_.id in self.arbiters[group].queue, "it waits for the next one"
        elif round_.state is ASIDE:
            assert round_.id in self.aside, "it is known to want what it cannot have"
        elif round_.state is not GATHERING:
            assert round_.reserved == len(round_.groups), "it has all of its groups"
        states = {lease.state for lease in round_.members.values()}
        held = round_.state is HELD
        assert states <= {LEASE_HELD if held else LEASE_WAITING}
