"""Tenancies over several hosts: what others say of them here, and what they are told.

Where a tenancy is led, the ranks on other hosts are known as those told them last (`Presence`,
reports). Elsewhere a tenancy is what its coordinator's orders say it is: an order for other groups
than before divides or joins what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tsliced.core.actions import TenancyEndedRecord
from tsliced.core.coordinator import NO_STAMP, Place
from tsliced.core.homes import Homes
from tsliced.core.messages import CededTenancy, HandOver, Presence, PresentRank
from tsliced.core.model import (
    Cause,
    Counter,
    Goal,
    GroupName,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    Stamp,
    TenancyKey,
)
from tsliced.core.rank import Rank
from tsliced.core.signals import Effect, Order, Report
from tsliced.core.tenancy import Bound, Tenancy, bound_by
from tsliced.core.value import maker

_make_present = maker(PresentRank)


def _in_state(present: PresentRank, state: RankState) -> PresentRank:
    """Return what is known of a rank, but for its state: `replace` takes four times as long."""
    return _make_present(
        process=present.process,
        job=present.job,
        state=state,
        device_bytes=present.device_bytes,
        groups=present.groups,
        lead=present.lead,
        term=present.term,
        watchdog_s=present.watchdog_s,
        stranger=present.stranger,
        home=present.home,
    )


@dataclass(slots=True, kw_only=True)
class Abroad(Homes):
    """Who there is, here and on the other hosts of what is led here."""

    # --- where it is led ----------------------------------------------------------------------

    def put_abroad(self, host: HostName, present: PresentRank) -> None:
        """Take in what another host says of one of its ranks."""
        rank = RankId(host, present.process)
        key = self.abroad.get(rank)
        told = self.all.get(TenancyKey(present.job, present.home))
        if told is not None and told.led_here and told.key != key:
            # It stops and runs with those with whom its own host moves it.
            self.leave_to(host, present)
            key = told.key
        elif key is None:
            on = self.order_of.keys() & present.groups
            key = self._home_for(present.job, on, led_here=True)
        # It may have been moved from here before, by orders that nothing is known of any more.
        self.all[key].coordinator.exceed(present.term)
        self.all[key].abroad[rank] = present
        self.settle_abroad(rank, key)

    def see_abroad(
        self, tenancy: Tenancy, host: HostName, states: Iterable[tuple[ProcessId, RankState]]
    ) -> None:
        """Know where ranks of a tenancy are that another host has reported on."""
        for process, state in states:
            rank = RankId(host, process)
            home = tenancy if rank in tenancy.abroad else self.tenancy_of(rank)
            if home is not None and (present := home.abroad[rank]).state is not state:
                home.abroad[rank] = _in_state(present, state)

    def is_moved_here(self, group: GroupName, present: PresentRank) -> bool:
        """Whether a rank that another host has on a group is for this one to move."""
        if present.lead != self.host:
            return present.lead in self.links.dead and self.arbiter_of(group) == self.host
        own = self._touched(TenancyKey(present.job, present.groups))
        # Else its participants are being told that somebody else moves it.
        return not own or any(tenancy.led_here for tenancy in own)

    def leave_to(self, host: HostName, present: PresentRank) -> None:
        """Know that a rank of another host is not moved with the tenancy that it was in."""
        rank = RankId(host, present.process)
        if (key := self.abroad.pop(rank, None)) is not None:
            del self.all[key].abroad[rank]
            self.forget_reach(self.all[key], rank)

    def note_guests(
        self, host: HostName, presence: Presence, guests: Iterable[PresentRank]
    ) -> None:
        """Know who is on a group of an arbiter here and is moved from elsewhere."""
        before = self.guests.pop(presence.group, {})
        of_group = {rank: guest for rank, guest in before.items() if rank.host != host}
        of_group |= {RankId(host, present.process): present for present in guests}
        if of_group:
            self.guests[presence.group] = of_group

    def take_misled(self) -> set[GroupName]:
        """Move the guests from here that took this host to do so too early; return their groups."""
        jobs, taken = set(self.reshaped), dict[RankId, PresentRank]()
        self.reshaped.clear()
        for group, of_group in self.guests.items():
            for rank, guest in of_group.items():
                misled = guest.job in jobs and guest.lead == self.host
                if misled and self.is_moved_here(group, guest):
                    taken[rank] = guest
        if taken:
            self.drop_guests(lambda rank, _: rank in taken)
        for rank, guest in taken.items():
            self.put_abroad(rank.host, guest)
        return {group for guest in taken.values() for group in guest.groups}

    def drop_guests(self, gone: Callable[[RankId, PresentRank], bool]) -> None:
        """Forget guests that are none any more."""
        left = {
            group: {rank: guest for rank, guest in of_group.items() if not gone(rank, guest)}
            for group, of_group in self.guests.items()
        }
        self.guests = {group: of_group for group, of_group in left.items() if of_group}

    def correction(self, present: PresentRank) -> HandOver:
        """Return what tells a host that takes this one to move a rank who does."""
        own = self._touched(TenancyKey(present.job, present.groups))[0]
        key = self._key(present.job, self.order_of.keys() & present.groups)
        # A host that has not obeyed anybody yet refuses what is not later than nothing.
        stamp = max(own.coordinator.stamp, NO_STAMP._replace(step=1))
        return HandOver(tenancy=key, stamp=stamp, to=own.lead)

    def missing_from(self, host: HostName, presence: Presence) -> list[RankId]:
        """Return the ranks that a host no longer has, or not of that job, by what it says now."""
        seen = {(rank.process, rank.job) for rank in presence.ranks}
        return [
            rank
            for rank, key in self.abroad.items()
            if rank.host == host
            and (rank.process, key.job) not in seen
            and presence.group in self.all[key].abroad[rank].groups
        ]

    def note_shortages(self, host: HostName, presence: Presence) -> list[TenancyKey]:
        """Know which tenancies could not be parked there; return those that could not and can."""
        relieved: list[TenancyKey] = []
        texts = dict(presence.shortages)
        for key, tenancy in self.by_group[presence.group].items():
            text = texts.get(key.job) if tenancy.led_here else None
            if text is not None:
                tenancy.shortages[host] = Reason(cause=Cause.NO_HOST_MEMORY, text=text)
            elif tenancy.shortages.pop(host, None) is not None:
                relieved.append(key)
        return relieved

    def unite(self, parts: list[Tenancy], out: list[Effect]) -> list[Tenancy]:
        """Make one of stable tenancies of a job that are all on."""
        united = self._unite(parts, out)
        assert united is not None, "all of them are stable"
        return united

    def part_off(
        self, tenancy: Tenancy, wanted: set[GroupName], out: list[Effect]
    ) -> list[Tenancy]:
        """Return the part of a stable tenancy that is on some groups, as one of its own.

        Raises `Bound` if a process stands in the way.
        """
        if tenancy.beyond and not wanted.issuperset(tenancy.reach):
            raise Bound(bound_by(tenancy.reach, next(iter(tenancy.beyond.values()))))
        if not wanted.issuperset(tenancy.key.groups):
            out += self._divide(tenancy, wanted)
        return self._within(tenancy.key.job, wanted.intersection(tenancy.key.groups))

    def follow(self, tenancy: Tenancy, lead: HostName, stamp: Stamp) -> list[Effect]:
        """Let another host move a tenancy from now on."""
        coordinator = tenancy.coordinator
        self.unclaim(tenancy.key)
        self.unled[tenancy.key.job] = None
        for rank in tenancy.abroad:
            del self.abroad[rank]
        tenancy.abroad, tenancy.shortages = {}, {}
        tenancy.lead = coordinator.lead = lead
        coordinator.hosts, coordinator.stamp, coordinator.pinned = (), stamp, None
        coordinator.place = Place.OFF if tenancy.participant.away else Place.ON
        self.tell_arbiters(tenancy)
        return [coordinator.record()]

    def take(self, part: CededTenancy) -> list[Effect]:
        """Move a tenancy from now on that another host has ceded."""
        key, out = part.tenancy, list[Effect]()
        touched = [t for t in self._touched(key) if t.led_here or t.key == key]
        latest = max((t.coordinator.stamp for t in touched), default=NO_STAMP)
        was_taken = latest > part.stamp or any(
            t.led_here and t.coordinator.stamp == part.stamp for t in touched
        )
        # Stamps of what this host moves beside it tell nothing while a part here waits for it.
        if was_taken and not any(self._waits_for(part, tenancy) for tenancy in self._touched(key)):
            # By this host, or by another one since.
            return []
        others = [t for t in self._touched(key) if t not in touched]
        if others:
            # It is the part that they do not move any more of what they go on moving here.
            touched.append(self._regroup(key, others, others[0].lead, out))
        terms = (part.stamp.term, *(t.coordinator.stamp.term for t in touched))
        on = part.on and all(t.coordinator.place is Place.ON for t in touched if t.led_here)
        groups = set(key.groups)
        whole = self._key(key.job, groups.union(*(t.key.groups for t in touched)))
        if touched:
            out += self._rebuild(touched, [whole])
        else:
            self.make(whole)
        tenancy = self.all[whole]
        self._lead(tenancy, Stamp(self.term_after(max(terms)), Counter(0, 0), 0))
        coordinator = tenancy.coordinator
        coordinator.place = Place.ON if on else Place.OFF
        coordinator.goal = Goal.ON if on else Goal.OFF
        coordinator.pinned = coordinator.pinned or part.pinned
        self._take_ranks(part, tenancy)
        return [*out, coordinator.record(), *coordinator.introduction()]

    def disown(self, tenancy: Tenancy, lost: Mapping[HostName, set[GroupName]]) -> list[Effect]:
        """Move no longer what other hosts have on some groups, as they obey somebody else.

        Groups on which nothing is left of a stable tenancy are not a part of it any more.
        """
        key = tenancy.key
        for rank, present in list(tenancy.abroad.items()):
            if not lost.get(rank.host, set()).isdisjoint(present.groups):
                self.leave_to(rank.host, present)
        used = {group for _, on in self._whereabouts(tenancy) for group in on}
        gone = set[GroupName]().union(*lost.values()) - used
        left = [group for group in key.groups if group not in gone]
        if len(left) == len(key.groups):
            return []
        if left:
            return self._rebuild([tenancy], [self._key(key.job, left)])
        self._forget(tenancy)
        return [TenancyEndedRecord(tenancy=key)]

    def _take_ranks(self, part: CededTenancy, tenancy: Tenancy) -> None:
        """Know the ranks on other hosts that a ceded tenancy has."""
        for host, present in part.ranks:
            if host != self.host:
                rank = RankId(host, present.process)
                tenancy.abroad[rank] = present
                self.settle_abroad(rank, tenancy.key)
        taken = {RankId(host, present.process) for host, present in part.ranks}
        self.drop_guests(lambda rank, _: rank in taken)

    def _lead(self, tenancy: Tenancy, stamp: Stamp) -> None:
        """Let the coordinator of this host move a tenancy."""
        coordinator = tenancy.coordinator
        tenancy.lead, coordinator.lead = self.host, None
        coordinator.hosts = self.hosts_of_all(tenancy.key.groups)
        coordinator.stamp = stamp

    def adopt(self, dead: HostName, out: list[Effect]) -> list[TenancyKey]:
        """Move what a host moved on groups of here and cannot any more; return what that is."""
        orphans: dict[JobKey, dict[GroupName, int]] = {}
        for group in self.order_of:
            if self.arbiter_of(group) == self.host:
                for job, term in self._moved_by(dead, group):
                    terms = orphans.setdefault(job, {})
                    terms[group] = max(terms.get(group, 0), term)
        adopted: list[TenancyKey] = []
        for job, terms in orphans.items():
            key = self._key(job, terms)
            touched = self._touched(key)
            if any(tenancy.lead != dead for tenancy in touched):
                # A part of it is moved from elsewhere, where the rest is found too.
                continue
            tenancy = self._regroup(key, touched, self.host, out)
            self._lead(tenancy, Stamp(self.term_after(max(terms.values())), Counter(0, 0), 0))
            tenancy.coordinator.place = Place.ON
            adopted.append(key)
        jobs = {key.job for key in adopted}
        self.drop_guests(lambda _, guest: guest.lead == dead and guest.job in jobs)
        return adopted

    def _moved_by(self, lead: HostName, group: GroupName) -> Iterator[tuple[JobKey, int]]:
        """Yield the jobs that a host moves on a group, each with the term of its orders."""
        for tenancy in self.by_group[group].values():
            if tenancy.lead == lead:
                yield tenancy.key.job, tenancy.coordinator.stamp.term
        for guest in self.guests.get(group, {}).values():
            if guest.lead == lead:
                yield guest.job, guest.term

    def is_stranger(self, job: JobKey) -> bool:
        """Whether a job stands for a process of no known one, of whatever host."""
        if job in self.stranger_jobs:
            return True
        return any(p.stranger for t in self.tenancies_of(job) for p in t.abroad.values())

    # --- elsewhere ----------------------------------------------------------------------------

    def presence_of(
        self,
        group: GroupName,
        clients: Iterable[JobKey],
        watchdog_in: Callable[[Rank], float | None],
    ) -> Presence:
        """Return what the arbiter of a group has to know of this host."""
        ranks: list[PresentRank] = []
        shortages: list[tuple[JobKey, str]] = []
        for key, tenancy in self.by_group[group].items():
            if (shortage := tenancy.participant.shortage) is not None:
                shortages.append((key.job, shortage.text))
            for rank in tenancy.participant.ranks.values():
                groups = self._groups_of(rank.devices) or set(key.groups)
                if group in groups and not rank.exited:
                    ranks.append(self.present(rank, tenancy, watchdog_in(rank)))
        return Presence(
            group=group,
            ranks=tuple(ranks),
            clients=tuple(clients),
            shortages=tuple(shortages),
        )

    def present(self, rank: Rank, tenancy: Tenancy, watchdog_s: float | None) -> PresentRank:
        """Return what other hosts have to know of a rank of this one."""
        groups = self._groups_of(rank.devices) or set(tenancy.key.groups)
        return PresentRank(
            process=rank.id.process,
            job=tenancy.key.job,
            state=rank.state,
            device_bytes=rank.device_bytes,
            groups=self.in_order(groups),
            lead=tenancy.lead,
            term=tenancy.coordinator.stamp.term,
            watchdog_s=watchdog_s,
            stranger=tenancy.key.job in self.stranger_jobs,
            home=tenancy.key.groups,
        )

    def audience_of(self, group: GroupName) -> list[HostName]:
        """Return the other hosts that have to know who is on a group's devices here."""
        there = self.by_group[group].values()
        hosts = {self.arbiter_of(group): None, **dict.fromkeys(t.lead for t in there)}
        return [host for host in hosts if host != self.host]

    def _waits_for(self, part: CededTenancy, tenancy: Tenancy) -> bool:
        """Whether this host knows of a tenancy that it is handed over, and does not move it yet."""
        return not tenancy.led_here and tenancy.coordinator.stamp == part.stamp

    def on_hand_over(self, message: HandOver, sender: HostName) -> list[Effect]:
        """Obey another host from now on, where the one that says so was obeyed."""
        to, out = message.to, list[Effect]()
        others = [
            tenancy
            for tenancy in self._touched(message.tenancy)
            if tenancy.lead != sender or message.stamp <= tenancy.coordinator.stamp
        ]
        key, mine = self._part_without(others, message.tenancy)
        tenancy = self.all.get(key)
        if tenancy is None and mine:
            tenancy = self._regroup(key, mine, sender, out)
        if tenancy is not None:
            # Whoever is to move it does so once it knows that all participants obey it.
            lead = to if to != self.host else sender
            out += self.follow(tenancy, lead, message.stamp)
        return out

    def _touched(self, key: TenancyKey) -> list[Tenancy]:
        own = self.tenancies_of(key.job)
        return [tenancy for tenancy in own if not set(tenancy.key.groups).isdisjoint(key.groups)]

    def _part_without(
        self, others: list[Tenancy], key: TenancyKey
    ) -> tuple[TenancyKey, list[Tenancy]]:
        """Return the part of a tenancy that is in none of some others here, and what it has."""
        mine = [tenancy for tenancy in self._touched(key) if tenancy not in others]
        if not others:
            return key, mine
        return self._key(key.job, set(key.groups) - _groups_of_all(others)), mine

    def take_in(self, order: Order, lead: HostName, out: list[Effect]) -> Tenancy | None:
        """Return the tenancy that another host's order is for, made of what is here if need be.

        Where others move some of it here, it is the part that they do not. None: the order comes
        from a host that moves nothing of it here, or no longer, or not yet.
        """
        others = self._not_obeying(order, lead)
        key, mine = self._part_without(others, order.tenancy)
        if others and not mine:
            return None
        # Else those who come up here would be moved by a host that moves nobody any more.
        empty = [tenancy for tenancy in mine if self._yields(tenancy, lead)]
        quiesced = self._displace(empty, set(key.groups), out)
        tenancy = self.all.get(key)
        if tenancy is None:
            tenancy = self._regroup(key, [t for t in mine if t not in empty], lead, out)
        tenancy.participant.quiesced |= quiesced
        tenancy.part_of = order.tenancy if others else None
        if tenancy.lead != lead:
            tenancy.lead = tenancy.coordinator.lead = lead
            self.tell_arbiters(tenancy)
        out.append(tenancy.coordinator.follow(order))
        return tenancy

    def _not_obeying(self, order: Order, lead: HostName) -> list[Tenancy]:
        return [
            tenancy
            for tenancy in self._touched(order.tenancy)
            if order.stamp < tenancy.coordinator.stamp
            or not self._obeys(tenancy, lead, order.tenancy.groups)
            if not self._yields(tenancy, lead)
        ]

    def _yields(self, tenancy: Tenancy, lead: HostName) -> bool:
        """Whether another host may move a tenancy, as there is nothing of it here to be moved."""
        if tenancy.lead in (lead, self.host) or self._is_left(tenancy):
            return False
        participant = tenancy.participant
        return not participant.busy and (
            participant.order is None or participant.answer is not None
        )

    def refuse(self, order: Order, lead: HostName) -> Report:
        """Return the answer to an order of a host that moves nothing of a tenancy here.

        It need not wait for what others move. But what obeys a later order of its own runs on.
        """
        others = _groups_of_all(self._not_obeying(order, lead))
        runs = any(
            tenancy.lead == lead and tenancy.has_ranks for tenancy in self._touched(order.tenancy)
        )
        failure: Reason | None = None
        if order.goal is Goal.FROZEN and runs:
            text = f"what it has on {', '.join(sorted(others))} of {self.host} obeys later orders"
            failure = Reason(cause=Cause.SILENT, text=text)
        return self.nothing_of(order, others, failure)

    def is_stale(self, order: Order, lead: HostName) -> bool:
        """Whether an order has been overtaken by a later one of the same host, or means nothing.

        Only who arbitrates a group ever moves anything.
        """
        key = order.tenancy
        arbiters = {self.arbiter_of(group) for group in self.order_of}
        if lead not in arbiters or not self.order_of.keys() >= set(key.groups):
            return True
        return any(
            t.lead == lead
            and t.coordinator.stamp.term == order.stamp.term
            and order.stamp < t.coordinator.stamp
            for t in self._touched(key)
        )

    def _obeys(self, tenancy: Tenancy, host: HostName, groups: Iterable[GroupName]) -> bool:
        """Whether a host may move a tenancy's part on groups.

        It did so before, or arbitrates them and nobody else moves it.
        """
        if tenancy.lead == host:
            return host != self.host
        orphaned = tenancy.lead not in self.links.up and not tenancy.led_here
        on = set(tenancy.key.groups).intersection(groups)
        return orphaned and all(self.arbiter_of(group) == host for group in on)

    def _regroup(
        self, key: TenancyKey, old: list[Tenancy], lead: HostName, out: list[Effect]
    ) -> Tenancy:
        """Make the tenancy `key`, and one of what is left over of each that it takes from."""
        if not old:
            return self.make(key, lead=lead)
        rests: dict[TenancyKey, Tenancy] = {}
        for tenancy in old:
            if rest := set(tenancy.key.groups).difference(key.groups):
                rests[self._key(key.job, rest)] = tenancy
        out += self._rebuild(old, [key, *rests])
        for rest_key, tenancy in rests.items():
            # What becomes of it, its coordinator says; until then it is looked at.
            made = self.all[rest_key]
            made.coordinator.stamp, made.coordinator.goal = (
                tenancy.coordinator.stamp,
                tenancy.coordinator.goal,
            )
            out += [made.coordinator.record(), self.look(rest_key)]
        made = self.all[key]
        made.lead = made.coordinator.lead = lead
        return made

    def look(self, key: TenancyKey) -> Order:
        """Return what finds out where the ranks of this host are, without moving any."""
        return Order(host=self.host, tenancy=key, stamp=NO_STAMP, goal=Goal.QUERY)


def _groups_of_all(tenancies: Iterable[Tenancy]) -> set[GroupName]:
    return {group for tenancy in tenancies for group in tenancy.key.groups}
