"""Who moves what: tenancies that go from one host's coordinator to another's, and back.

A tenancy is moved by the host at which its job asked for it: the arbiter of the first group of the
lease. When the job asks elsewhere for a part of it, or for more, whoever moves it cedes it:

    round's host        host that moves it        participants
    Cede        ──────▶ divide; stop moving it
                                HandOver  ──────▶ note who moves it now
                                          ◀────── HandedOver
                ◀────── Ceded
    Taken       ──────▶ forget it

Rules:

* A participant obeys another host only on the word of the one that it obeyed before, or, if that is
  gone, of the arbiter. So nobody moves a tenancy whose participants may still obey somebody else.
* An arbiter asks whoever moves what is on its groups to take it off (`Clear`).
* Each step is on record and repeated until it is answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import HandoverRecord
from tsliced.core.coordinator import NO_STAMP, Place
from tsliced.core.leasing import Leasing
from tsliced.core.lending import NO_ROUND
from tsliced.core.messages import (
    Cede,
    Ceded,
    CededTenancy,
    Clear,
    HandedOver,
    HandOver,
    NotCeded,
    NotCleared,
    PresentRank,
    Taken,
)
from tsliced.core.model import (
    LASTING,
    Cause,
    Counter,
    GroupName,
    HostName,
    JobKey,
    Reason,
    RoundId,
    Stamp,
    TenancyKey,
)
from tsliced.core.remedies import out_of_pin
from tsliced.core.rounds import HELD
from tsliced.core.signals import Effect, EvictionFailed
from tsliced.core.strangers import Inhabitants
from tsliced.core.tenancies import Outcome
from tsliced.core.tenancy import Bound, Tenancy


@dataclass(slots=True, kw_only=True, eq=False)
class Handover:
    """A tenancy on its way to another host's coordinator."""

    part: CededTenancy
    to: HostName
    #: Participants that have not taken note of it.
    waiting: set[HostName]

    def record(self, *, over: bool = False) -> HandoverRecord:
        """Return what must be kept of it."""
        return HandoverRecord(
            tenancy=self.part.tenancy,
            stamp=self.part.stamp,
            to=None if over else self.to,
            on=self.part.on,
            pinned=self.part.pinned,
        )


@dataclass(slots=True, kw_only=True)
class Leads:
    """What this host moves for others, cedes, and takes. Mutate it only through its methods."""

    leasing: Leasing
    tenancies: Inhabitants
    #: What arbiters elsewhere want taken off, and how often that has failed.
    unwelcome: dict[tuple[JobKey, GroupName], int] = field(default_factory=dict)
    #: By host and round: what it wants to move itself, and cannot be ceded yet.
    asked: dict[tuple[HostName, RoundId], Cede] = field(default_factory=dict)
    handovers: dict[TenancyKey, Handover] = field(default_factory=dict)
    #: By host and round: the tenancies that it gets, not all of them handed over yet.
    due: dict[tuple[HostName, RoundId], tuple[JobKey, list[TenancyKey]]] = field(
        default_factory=dict
    )
    #: Ceded to this host, and not taken yet, because what they become a part of is moving.
    arriving: list[tuple[HostName, Ceded]] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """Whether there is something that waits until nothing moves any more."""
        return bool(self.unwelcome or self.asked or self.arriving or self.tenancies.disowned)

    def settle(self, now: float) -> bool:
        """Do what could not be done before, where nothing moves any more; return whether it did."""
        before = self._left()
        for key in list(self.tenancies.disowned):
            self._let_go(key, now)
        for job, group in list(self.unwelcome):
            self._try_to_clear(job, group, now)
        for (host, _), cede in list(self.asked.items()):
            self._try_to_cede(host, cede)
        for host, ceded in list(self.arriving):
            self._try_to_take(host, ceded, now)
        return before != self._left() or bool(self.tenancies.signals)

    def _left(self) -> tuple[int, ...]:
        disowned = self.tenancies.disowned
        return len(self.unwelcome), len(self.asked), len(self.arriving), len(disowned)

    def _let_go(self, key: TenancyKey, now: float) -> None:
        """Move no longer what other hosts obey somebody else for, once nothing of it moves."""
        tenancies = self.tenancies
        tenancy = tenancies.all.get(key)
        if tenancy is not None and not tenancy.coordinator.stable:
            return
        by_host = tenancies.disowned.pop(key)
        if tenancy is None or tenancy.coordinator.given_up:
            return
        # What its job has leased it will be ceded.
        had = {group for group in key.groups if self._is_had(key.job, group)}
        lost = {host: groups - had for host, groups in by_host.items()}
        self.leasing.out += tenancies.run(tenancies.disown(tenancy, lost), now)

    def _is_had(self, job: JobKey, group: GroupName) -> bool:
        round_ = self.leasing.chosen_for(group)
        return round_ is not None and round_.job == job

    # --- taking off ---------------------------------------------------------------------------

    def on_clear(self, host: HostName, clear: Clear) -> None:
        """An arbiter elsewhere wants its group cleared of a job."""
        job, group = clear.job, clear.group
        if host != self.tenancies.arbiter_of(group):
            return
        there = self._on(job, group)
        if not there:
            self._tell_unknown(job, group)
            return
        self.unwelcome.setdefault((job, group), 0)
        for tenancy in there:
            if tenancy.coordinator.given_up:
                self._tell_not_cleared(tenancy, group, tenancy.coordinator.stop)

    def forget_wishes(self, host: HostName) -> None:
        """Forget what a host wanted: it says so again when it is back."""
        arbiter_of = self.tenancies.arbiter_of
        self.unwelcome = {
            what: tries for what, tries in self.unwelcome.items() if arbiter_of(what[1]) != host
        }
        self.asked = {who: cede for who, cede in self.asked.items() if who[0] != host}

    def _on(self, job: JobKey, group: GroupName) -> list[Tenancy]:
        return [tenancy for tenancy in self.tenancies.led_on(job, group) if tenancy.resident]

    def _tell_unknown(self, job: JobKey, group: GroupName) -> None:
        """Let an arbiter ask again: it will be here then, or known there to be gone."""
        text = f"{self.tenancies.host} knows of nothing that job {job} has on {group}"
        reason = Reason(cause=Cause.SILENT, text=text)
        message = NotCleared(job=job, group=group, reason=reason, way_out="", given_up=False)
        self.leasing.say(self.tenancies.arbiter_of(group), message)

    def _try_to_clear(self, job: JobKey, group: GroupName, now: float) -> None:
        if any(ceded.job == job for _, ceded in self.arriving):
            # It may be a part of that.
            return
        there = self._on(job, group)
        if not there:
            del self.unwelcome[job, group]
            if not self.tenancies.moves_ranks_on(job, group):
                # Of those that have left, the arbiter hears from where they are.
                self._tell_unknown(job, group)
        for tenancy in there:
            coordinator = tenancy.coordinator
            if not coordinator.stable or coordinator.given_up:
                continue
            chosen = (self.leasing.chosen_for(other) for other in tenancy.reach)
            if any(round_ is not None and round_.state is HELD for round_ in chosen):
                text = f"it holds a group that {group} is bound to by a process"
                reason = Reason(cause=Cause.BOUND_GROUPS, text=text)
                del self.unwelcome[job, group]
                self._tell_not_cleared(tenancy, group, reason)
                return
            self.leasing.out += self.tenancies.evict(tenancy.key, now=now)

    def on_outcome(self, outcome: Outcome, now: float) -> None:
        """Tell arbiters elsewhere what could not be taken off."""
        if outcome.tenancy in self.tenancies.disowned:
            self._let_go(outcome.tenancy, now)
        tenancy = self.tenancies.all.get(outcome.tenancy)
        if tenancy is None or not isinstance(outcome, EvictionFailed):
            return
        reason = outcome.reason
        if reason.cause is Cause.CANCELLED:
            return
        job, reach = tenancy.key.job, tenancy.reach
        for group in [group for of, group in self.unwelcome if of == job and group in reach]:
            tries = self.unwelcome[job, group] = self.unwelcome[job, group] + 1
            enough = tries >= self.leasing.limits.max_evict_tries and not reason.is_ours
            if reason.cause in LASTING or enough:
                self.leasing.pin(tenancy.key, reason, now)
            self._tell_not_cleared(tenancy, group, reason)

    def _tell_not_cleared(self, tenancy: Tenancy, group: GroupName, reason: Reason | None) -> None:
        assert reason is not None, "what is given up has a reason"
        job, given_up = tenancy.key.job, tenancy.coordinator.given_up
        has_callbacks = bool(tenancy.participant.hook_sessions)
        way_out = out_of_pin(job, reason, has_callbacks=has_callbacks) if given_up else ""
        message = NotCleared(
            job=job, group=group, reason=reason, way_out=way_out, given_up=given_up
        )
        self.leasing.say(self.tenancies.arbiter_of(group), message)

    # --- ceding -------------------------------------------------------------------------------

    def on_cede(self, host: HostName, cede: Cede) -> None:
        """Another host wants to move what a job has on groups."""
        self.asked[host, cede.round] = cede

    def offer(self) -> None:
        """Cede what came onto a group while its job holds that by a round of another host."""
        for (host, _, group), number in self.leasing.borrowers.items():
            job, held = self.leasing.rounds[number].job, self.leasing.rounds[number].state is HELD
            if not held:
                continue
            led = self.tenancies.led_on(job, group)
            if any(t.has_ranks and not t.beyond and len(t.key.groups) == 1 for t in led):
                cede = Cede(round=NO_ROUND, job=job, groups=(group,))
                self.asked.setdefault((host, NO_ROUND), cede)

    def _try_to_cede(self, host: HostName, cede: Cede) -> None:
        tenancies, wanted = self.tenancies, set(cede.groups)
        concerned = [
            tenancy
            for tenancy in tenancies.tenancies_of(cede.job)
            if tenancy.led_here and not wanted.isdisjoint(tenancy.reach)
        ]
        if not all(tenancy.coordinator.stable for tenancy in concerned):
            return
        going = {
            key: handover.to
            for key, handover in self.handovers.items()
            if key.job == cede.job and not wanted.isdisjoint(key.groups)
        }
        if any(to != host for to in going.values()):
            return
        del self.asked[host, cede.round]
        blocked = next((t for t in concerned if t.coordinator.place is Place.BLOCKED), None)
        if blocked is not None:
            # What is left of its last move may still be under way.
            self._refuse(host, cede, "blocked", str(blocked.coordinator.reason))
            return
        try:
            parts = [
                part
                for tenancy in concerned
                for part in tenancies.part_off(tenancy, wanted, self.leasing.out)
            ]
        except Bound as bound:
            self._refuse(host, cede, "refused", str(bound.reason))
            return
        before = self.due.get((host, cede.round), (cede.job, []))[1]
        keys = dict.fromkeys([*before, *going, *(part.key for part in parts)])
        self.due[host, cede.round] = cede.job, list(keys)
        for part in parts:
            self._hand_over(part, host)
        self._tell_ceded(host)

    def _refuse(self, host: HostName, cede: Cede, code: str, text: str) -> None:
        self.leasing.say(host, NotCeded(round=cede.round, job=cede.job, code=code, text=text))

    def _hand_over(self, tenancy: Tenancy, to: HostName) -> None:
        """Stop moving a tenancy, and let its participants know who does."""
        coordinator, key, tenancies = tenancy.coordinator, tenancy.key, self.tenancies
        stamp = Stamp(tenancies.term_after(coordinator.stamp.term), Counter(0, 0), 0)
        part = CededTenancy(
            tenancy=key,
            stamp=stamp,
            on=coordinator.place is Place.ON,
            pinned=coordinator.pinned,
            ranks=(*self._ranks_here(tenancy), *_ranks_abroad(tenancy)),
        )
        hosts = {host for host in coordinator.hosts if host != self.tenancies.host}
        handover = Handover(part=part, to=to, waiting=hosts - self.tenancies.links.dead.keys())
        self.handovers[key] = handover
        tenancies.leaving[key] = None
        self.leasing.out.append(handover.record())
        self.leasing.out += self.tenancies.follow(tenancy, to, stamp)
        for host in sorted(handover.waiting):
            self.leasing.say(host, HandOver(tenancy=key, stamp=stamp, to=to))

    def _ranks_here(self, tenancy: Tenancy) -> list[tuple[HostName, PresentRank]]:
        here = self.tenancies.host
        ranks = tenancy.participant.ranks.values()
        watchdog_in = self.leasing.watchdog_in
        return [(here, self.tenancies.present(rank, tenancy, watchdog_in(rank))) for rank in ranks]

    def on_handed_over(self, host: HostName, message: HandedOver) -> None:
        """A participant knows who moves its tenancy."""
        handover = self.handovers.get(message.tenancy)
        if handover is not None and handover.part.stamp == message.stamp:
            handover.waiting.discard(host)
            self._tell_ceded(handover.to)

    def _tell_ceded(self, host: HostName) -> None:
        """Tell a host of what it has to move, where all participants know of it."""
        for (to, round_id), (job, keys) in list(self.due.items()):
            parts = [self.handovers[key] for key in keys]
            if to == host and not any(part.waiting for part in parts):
                tenancies = tuple(part.part for part in parts)
                self.leasing.say(host, Ceded(round=round_id, job=job, tenancies=tenancies))
                if not parts:
                    del self.due[to, round_id]

    def on_taken(self, host: HostName, message: Taken) -> None:
        """Another host moves a tenancy now."""
        handover = self.handovers.get(message.tenancy)
        if handover is None or handover.to != host or handover.part.stamp != message.stamp:
            return
        self._end(handover)
        self.due = {who: (job, keys) for who, (job, keys) in self.due.items() if keys}

    def _end(self, handover: Handover) -> None:
        key = handover.part.tenancy
        del self.handovers[key], self.tenancies.leaving[key]
        self.due = {
            who: (job, [due for due in keys if due != key]) for who, (job, keys) in self.due.items()
        }
        self.leasing.out.append(handover.record(over=True))
        self.leasing.todo += key.groups
        self.leasing.tidy(key.job)

    def resume(self, record: HandoverRecord, to: HostName) -> None:
        """After a restart: go on handing a tenancy over. Its ranks are found by who moves it."""
        key = record.tenancy
        part = CededTenancy(
            tenancy=key, stamp=record.stamp, on=record.on, pinned=record.pinned, ranks=()
        )
        hosts = self.tenancies.hosts_of_all(key.groups)
        waiting = {host for host in hosts if host != self.tenancies.host}
        self.handovers[key] = Handover(part=part, to=to, waiting=waiting)
        self.tenancies.leaving[key] = None
        # For no round of it that is known here: whoever takes it does without.
        self.due[to, NO_ROUND] = key.job, [*self.due.get((to, NO_ROUND), (key.job, []))[1], key]

    # --- taking -------------------------------------------------------------------------------

    def on_ceded(self, host: HostName, ceded: Ceded) -> None:
        """Another host has ceded what a round of here asked for, or had asked for."""
        self.arriving = [(who, other) for who, other in self.arriving if other != ceded]
        self.arriving.append((host, ceded))

    def _try_to_take(self, host: HostName, ceded: Ceded, now: float) -> None:
        tenancies = self.tenancies
        own = [t for t in tenancies.tenancies_of(ceded.job) if t.led_here]
        groups = {group for part in ceded.tenancies for group in part.tenancy.groups}
        touched = [tenancy for tenancy in own if not groups.isdisjoint(tenancy.key.groups)]
        if not all(tenancy.coordinator.stable for tenancy in touched):
            return
        self.arriving.remove((host, ceded))
        self._take_back(groups, ceded)
        for part in ceded.tenancies:
            self.leasing.out += tenancies.run(tenancies.take(part), now)
            self.leasing.say(host, Taken(tenancy=part.tenancy, stamp=part.stamp))
        self.leasing.todo += tenancies.take_misled()
        for tenancy in tenancies.tenancies_of(ceded.job):
            if tenancy.led_here and not groups.isdisjoint(tenancy.key.groups):
                self.leasing.bring_back(tenancy.key, now)
        if (round_ := self.leasing.on_ceded(host, ceded.round, now)) is not None:
            self.leasing.advance(round_, now)

    def _take_back(self, groups: set[GroupName], ceded: Ceded) -> None:
        """Hand nothing over that has been ceded to here meanwhile."""
        latest = max((part.stamp for part in ceded.tenancies), default=NO_STAMP)
        crossing = [
            handover
            for key, handover in self.handovers.items()
            if key.job == ceded.job and not groups.isdisjoint(key.groups)
        ]
        for handover in [handover for handover in crossing if handover.part.stamp < latest]:
            self._end(handover)
            self._tell_ceded(handover.to)

    # --- hosts that come and go ---------------------------------------------------------------

    def on_connected(self, host: HostName) -> None:
        """Say again what a host has not answered."""
        for handover in [h for h in self.handovers.values() if host in h.waiting]:
            part = handover.part
            self.leasing.say(host, HandOver(tenancy=part.tenancy, stamp=part.stamp, to=handover.to))
        self._tell_ceded(host)

    def on_died(self, host: HostName, now: float) -> None:
        """Wait for nothing from a host that is gone, and move what it moved on groups of here."""
        for handover in list(self.handovers.values()):
            handover.waiting.discard(host)
            if handover.to == host:
                self._end(handover)
            else:
                self._tell_ceded(handover.to)
        self.due = {who: what for who, what in self.due.items() if who[0] != host}
        out: list[Effect] = []
        adopted = self.tenancies.adopt(host, out)
        self.leasing.out += self.tenancies.run(out, now)
        for key in adopted:
            self.leasing.out += self.tenancies.ask(key, now=now)


def _ranks_abroad(tenancy: Tenancy) -> list[tuple[HostName, PresentRank]]:
    return [(rank.host, present) for rank, present in tenancy.abroad.items()]
