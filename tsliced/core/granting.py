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
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from tsliced.core.actions import TellLost
from tsliced.core.arbiter import Arbiter
from tsliced.core.clearing import Clearing
from tsliced.core.coordinator import MAX_DOUBLINGS, Place
from tsliced.core.messages import Cede, NotCeded, NotReserved
from tsliced.core.model import (
    LASTING,
    Cause,
    Drain,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    RankId,
    Reason,
    RoundId,
    TenancyKey,
    Token,
)
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
from tsliced.core.rounds import ASIDE, GATHERING, GRANTING, HELD, MOVING, QUEUED, Elsewhere, Round
from tsliced.core.sessions import LEASE_HELD, LEASE_WAITING, Lease
from tsliced.core.signals import AdmissionFailed, Admitted, Blocked, Evicted, EvictionFailed
from tsliced.core.tenancies import Outcome
from tsliced.core.tenancy import Bound, Tenancy
from tsliced.core.timers import TimerKey, TimerKind

#: How often a round's admission may find company on its devices before it is refused.
MAX_ADMIT_TRIES = 5

#: Causes that are error codes of the wire too.
_REFUSAL_CODES = frozenset({Cause.NO_HOST_MEMORY, Cause.NO_DEVICE_MEMORY, Cause.NOT_PERMITTED})

#: Causes for which a job is held back.
_OWN_FAULTS = frozenset({Cause.DRIVER, Cause.FAILED, Cause.UNSUPPORTED})

#: Somebody else is on the devices.
_COMPANY = frozenset({Cause.OCCUPIED, Cause.STRANGER})


def _token_of(there: Elsewhere | None) -> Token | None:
    return there.token if there is not None else None


@dataclass(slots=True, kw_only=True)
class Granting(Clearing):
    """The books of one host, and what moves the rounds in them on."""

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
        for round_ in [self.rounds[number] for number in self.aside]:
            if round_.must_not_wait:
                self._refuse_nested(round_, now)

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
        if placed and round_.state is not HELD:
            # The place is all its members'; none is left here if it was refused at once.
            for lease in round_.members.values():
                self.keep_lease(lease)

    def _waits(self, round_: Round) -> bool:
        """Whether a round has to wait for somebody else's to end, as far as is known here."""
        if round_.state is not QUEUED:
            return round_.state is ASIDE
        wants = round_.groups[round_.reserved :]
        # An arbiter elsewhere knows itself whether a round has to wait there.
        return bool(wants) and wants[0] not in round_.elsewhere

    def _refuse_nested(self, round_: Round, now: float) -> None:
        """Let nobody wait for a group who holds one that comes after it: others wait in order."""
        if round_.stands_for is not None:
            text = f"{round_.groups[0]} must be waited for"
            self._refuse_round(round_, "would_deadlock", text, now)
            return
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
        elif self._waits(round_) and round_.must_not_wait:
            self._refuse_nested(round_, now)
            return
        if round_.state is HELD and round_.stands_for is not None:
            # Whoever came onto the devices before it came up leaves them.
            self._clear_for(round_, now)
        if round_.state in (MOVING, GRANTING):
            # Also while it waits for tokens: somebody may have come onto the devices meanwhile.
            hindered = self.lost or self.silent or round_.job in self.faults
            if round_.elsewhere:
                hindered = hindered or any(there.leads for there in round_.elsewhere.values())
            settled = not hindered and self.tenancies.settled(round_.job, round_.groups)
            clear = settled or self._clear_devices(round_, now)
            round_.state = GRANTING if clear else MOVING
        if round_.state is GRANTING:
            self._grant_round(round_, now)

    def _reserve(self, round_: Round, now: float) -> bool:
        if (self.drains or len(round_.groups) > 1) and self.set_aside(round_):
            return False
        while round_.reserved < len(round_.groups):
            group = round_.groups[round_.reserved]
            arbiter = self.arbiters.get(group)
            if arbiter is None:
                if not self.reserve_elsewhere(round_, group):
                    return False
            elif arbiter.chosen != round_.id and not arbiter.claim(round_.id):
                if round_.id not in arbiter.queue:
                    self._enqueue(arbiter, round_, now)
                if arbiter.choose(now=now) != round_.id:
                    return False
            round_.reserved += 1
        return not round_.elsewhere or self.commit(round_)

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
        if round_.stands_for is not None:
            return self._clear_for(round_, now)
        if not self._gather(round_):
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
        for tenancy in self._as_one(others.values(), round_):
            self._clear_off(tenancy, round_, now)
        if not self._clear_guests(round_):
            return False
        if others:
            return False
        missing = [tenancy for tenancy in own if not tenancy.ready]
        for tenancy in missing:
            if tenancy.coordinator.stable and not self._pausing(round_):
                self.out += self.tenancies.admit(tenancy.key, now=now)
        return not missing

    def _clear_for(self, round_: Round, now: float) -> bool:
        """Clear a group for a round of another host, which moves itself what it leads."""
        (home, _, group), clear = round_.borrower, True
        for tenancy in self.tenancies.residents(group):
            if tenancy.key.job != round_.job:
                self._clear_off(tenancy, round_, now)
                clear = False
        for guest in self.tenancies.guests_on(group):
            if guest[0] != round_.job and guest[1] != home:
                self._ask_to_clear(round_, guest, group)
                clear = False
        return clear

    def on_not_ceded(self, host: HostName, message: NotCeded, now: float) -> None:
        """Another host cannot cede what it moves of a round's job."""
        round_ = self.rounds.get(message.round)
        if round_ is not None and host in round_.ceding:
            self._refuse_round(round_, message.code, message.text, now)

    def on_not_reserved(self, host: HostName, message: NotReserved, now: float) -> None:
        """A round cannot have a group of an arbiter elsewhere."""
        round_ = self.rounds.get(message.round)
        there = round_.elsewhere.get(message.group) if round_ is not None else None
        if round_ is None or there is None or there.arbiter != host:
            return
        if message.code != "would_deadlock":
            self._refuse_round(round_, message.code, message.text, now)
            return
        self._refuse_nested(round_, now)
        if round_.members and there.token is None:
            # Others of it may wait.
            self._want(round_, message.group, there)

    def lose_held(self, round_: Round, text: str, now: float) -> None:
        """End a round that is held, of which an arbiter elsewhere has taken a group back."""
        for lease in list(round_.members.values()):
            self.take_away(lease, text, now)

    def on_host_back(self, host: HostName) -> None:
        """Ask a host again what it has not answered."""
        for round_ in self.rounds.values():
            if round_.ceding.get(host) is False:
                self.say(host, Cede(round=round_.id, job=round_.job, groups=round_.groups))
            round_.clearing.clear()
        self.advance_all()

    def end_borrower(self, round_: Round, now: float) -> None:
        """A round of another host does not have or want a group of here any more."""
        self._end_round(round_, now)

    def _as_one(self, others: Collection[Tenancy], round_: Round) -> list[Tenancy]:
        """Make one tenancy of those of each job that leave together, so that they stop together."""
        by_job: dict[JobKey, list[Tenancy]] = {}
        for tenancy in others:
            by_job.setdefault(tenancy.key.job, []).append(tenancy)
        wanted = set(round_.groups)
        leaving: list[Tenancy] = []
        for parts in by_job.values():
            apart = [part for part in parts if part.runs_within and wanted.issuperset(part.reach)]
            free = [part for part in apart if not part.coordinator.given_up]
            if len(free) > 1:
                leaving += [part for part in parts if part not in free]
                leaving += self.tenancies.unite(free, self.out)
            else:
                leaving += parts
        return leaving

    def _clear_off(self, tenancy: Tenancy, round_: Round, now: float) -> None:
        round_.moved = True
        if not tenancy.coordinator.stable or self._pausing(round_):
            return
        if (obstacle := self._obstacle(tenancy)) is not None:
            self.tell_stalled(round_, tenancy.key.job, *obstacle)
            return
        if self.never_asked(tenancy.key.job) and (threat := self.threat_to(tenancy)) is not None:
            self.spare_for(threat, tenancy, [round_])
            self._pause(round_, MAX_DOUBLINGS, now)
            return
        self.out += self.tenancies.make_room(tenancy.key, now=now)

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

    def _grant_round(self, round_: Round, now: float) -> None:
        if round_.stands_for is not None:
            self.lend(round_, now)
            return
        here = len(round_.groups) - len(round_.elsewhere)
        tokens = self.numbers.take_several(here)
        if tokens is None:
            # The next block is on its way; `NumbersReserved` comes back here.
            return
        for group in round_.groups:
            assert self.chosen_for(group) is round_, "a grant is of groups that it has"
            self.tenancies.assert_alone(group, round_.job)
        round_.state = HELD
        if round_.elsewhere:
            own, there = iter(tokens), round_.elsewhere
            tokens = [_token_of(there.get(group)) or next(own) for group in round_.groups]
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
            self.note_hold(round_.job, lease.groups, now - lease.granted_at)
        else:
            # It may ask again and belong to the same round.
            round_.took_part.discard(lease.session)
            if lease.queued:
                self.note_not_granted(lease, code, now)
        self.strike_lease(lease, code, text, waiters)
        if not round_.members:
            self._end_round(round_, now)

    def _end_round(self, round_: Round, now: float) -> None:
        del self.rounds[round_.id]
        if round_.paused:
            self.timers.clear(TimerKey(TimerKind.RETRY, round_.id))
        self.aside.pop(round_.id, None)
        if round_.stands_for is not None and round_.state is HELD:
            self.note_hold(round_.job, round_.groups, now - round_.kept_at)
        if round_.hold_from is not None:
            self.timers.clear(TimerKey(TimerKind.HOLD, round_.id))
        if round_.state is not GATHERING:
            # Only then is anything free: who is chosen for one group goes on to the next.
            self.leave_all(round_)
        self.forget_borrower(round_)
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

    def bring_back(self, key: TenancyKey, now: float) -> None:
        """Restore state of a holder that has become this host's to move, if it is parked."""
        self._bring_back(key, self.concerned(key), now)

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
                self.pin(key, replace(reason, text=text), now)
                # Whoever clears it means that all of it is tried again.
                del round_.evict_tries[key]
            else:
                hooks = self.tenancies.all[key].participant.hook_sessions
                helps = toward_a_freeze(reason, has_callbacks=bool(hooks))
                self.tell_stalled(round_, key.job, reason, helps)
                self._pause(round_, tries, now)
        if self.pause_parking(self.tenancies.all[key].reach, now) and reason.cause in LASTING:
            self.pin(key, reason, now)

    def pin(self, key: TenancyKey, reason: Reason, now: float) -> None:
        """Give up to evict a tenancy."""
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
        # It may have become a part of another one since.
        tenancy = self.tenancies.all.get(key)
        qualifies = not gone and tenancy is not None and tenancy.coordinator.qualifies
        if at_fault and (key in self.tried or qualifies):
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

    def qualify(self, job: JobKey, now: float) -> None:
        """Have what a job has on devices leave them and come back, unless it is at work there."""
        for key in list(self.tenancies.by_job.get(job, ())):
            tenancy = self.tenancies.all[key]
            coordinator = tenancy.coordinator
            movable = coordinator.place is Place.ON and not coordinator.given_up
            if movable and tenancy.has_ranks and not self._is_held(tenancy):
                self.out += self.tenancies.evict(key, now=now, qualifies=True, insists=True)

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
        if round_.stands_for is not None:
            self.refuse_elsewhere(round_, code, text)
            self._end_round(round_, now)
            return
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
        self.check_lending()
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

    def _has(self, round_: Round, group: GroupName) -> bool:
        arbiter, there = self.arbiters.get(group), round_.elsewhere.get(group)
        if arbiter is not None:
            return arbiter.chosen == round_.id
        return there is not None and there.token is not None

    def _check_round(self, round_: Round) -> None:
        if round_.turn_s is None and round_.stands_for is None:
            assert round_.members, "a round without members is over"
        has = [group for group in round_.groups if self._has(round_, group)]
        assert has == list(round_.groups[: round_.reserved]), "it takes its groups in their order"
        if round_.state is QUEUED and round_.reserved < len(round_.groups):
            group = round_.groups[round_.reserved]
            waits = group in round_.elsewhere or round_.id in self.arbiters[group].queue
            assert waits, "it waits for the next one"
        elif round_.state is QUEUED:
            assert round_.elsewhere, "it waits until what it has is kept for it"
        elif round_.state is ASIDE:
            assert round_.id in self.aside, "it is known to want what it cannot have"
        elif round_.state is not GATHERING:
            assert round_.reserved == len(round_.groups), "it has all of its groups"
        states = {lease.state for lease in round_.members.values()}
        held = round_.state is HELD
        assert states <= {LEASE_HELD if held else LEASE_WAITING}
