"""Which ranks belong together, and who is on a device.

A job's groups are divided into the finest sets that it ever leased apart, and never finer than its
processes: a rank with contexts in two groups binds them. One that reaches beyond its tenancy's
groups makes the tenancy resident there too, until the job leases them together and they become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tsliced.core.actions import FreeMemory, Note, Send, TenancyEndedRecord, WatchProcess
from tsliced.core.coordinator import Coordinator, Place
from tsliced.core.links import Links
from tsliced.core.messages import PresentRank
from tsliced.core.model import (
    CoreLimits,
    DeviceId,
    FoundRank,
    GroupName,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    SessionId,
    TenancyKey,
)
from tsliced.core.numbers import Numbers
from tsliced.core.participant import Participant
from tsliced.core.rank import Rank
from tsliced.core.signals import Effect, Order, Report
from tsliced.core.tenancy import Bound, Tenancy, bound_by

#: A rank in one of these runs only when somebody lets it.
_STILL = (RankState.FROZEN, RankState.PARKED)


@dataclass(slots=True, kw_only=True)
class Homes:
    """Who there is. Mutate it only through its methods."""

    host: HostName
    group_of: Mapping[DeviceId, GroupName]
    order_of: Mapping[GroupName, int]
    numbers: Numbers
    limits: CoreLimits
    all: dict[TenancyKey, Tenancy] = field(default_factory=dict)
    by_job: dict[JobKey, dict[TenancyKey, None]] = field(default_factory=dict)
    #: By each group on whose devices it may be.
    by_group: dict[GroupName, dict[TenancyKey, Tenancy]] = field(init=False)
    home: dict[ProcessId, TenancyKey] = field(default_factory=dict)
    hooks: dict[JobKey, dict[SessionId, None]] = field(default_factory=dict)
    #: Seen on the devices and of no known job.
    strangers: dict[ProcessId, FoundRank] = field(default_factory=dict)
    #: Jobs that stand for processes of this host of no known job, where those are to be frozen.
    stranger_jobs: dict[JobKey, ProcessId] = field(default_factory=dict)
    links: Links = field(default_factory=Links)
    #: All hosts of each group that others have devices of too, or alone; the first is its arbiter.
    hosts_of: Mapping[GroupName, tuple[HostName, ...]] = field(default_factory=dict)
    #: Ranks on other hosts, of tenancies that are led here.
    abroad: dict[RankId, TenancyKey] = field(default_factory=dict)
    #: By job and group of an arbiter here: other hosts that move the job there, if it is there.
    claimed: dict[tuple[JobKey, GroupName], dict[HostName, None]] = field(default_factory=dict)
    #: Jobs of which this host no longer moves something that it moved.
    unled: dict[JobKey, None] = field(default_factory=dict)
    #: Groups of arbiters elsewhere on which this host no longer moves what it moved.
    unclaimed: dict[GroupName, None] = field(default_factory=dict)
    #: By group: ranks on other hosts that others than this one move, as their own hosts said last.
    guests: dict[GroupName, dict[RankId, PresentRank]] = field(default_factory=dict)
    #: Jobs with tenancies that have come or gone while there were guests.
    reshaped: dict[JobKey, None] = field(default_factory=dict)
    #: On their way to other hosts' coordinators, which have not taken them yet.
    leaving: dict[TenancyKey, None] = field(default_factory=dict)
    #: Groups of which other hosts do not know yet who is on their devices here, and those hosts.
    untold: dict[GroupName, dict[HostName, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_group = {group: {} for group in self.order_of}

    # --- who they are -------------------------------------------------------------------------

    def cover(
        self, job: JobKey, groups: tuple[GroupName, ...], out: list[Effect]
    ) -> list[Tenancy] | None:
        """Return the job's tenancies that make up `groups`; None while one of them is moving.

        Divides a larger tenancy where the job leases a part of it for the first time, and makes
        one of what has none yet; what follows from that is added to `out`. Raises `Bound` if a
        process stands in the way.
        """
        wanted = set(groups)
        own: list[Tenancy] = []
        theirs: list[Tenancy] = []
        for tenancy in self.tenancies_of(job):
            (own if tenancy.led_here else theirs).append(tenancy)
        touched = [t for t in theirs if not wanted.isdisjoint(t.key.groups)]
        quiesced = self._displace([t for t in touched if not self._is_left(t)], wanted, out)
        concerned = [tenancy for tenancy in own if not wanted.isdisjoint(tenancy.reach)]
        for tenancy in concerned:
            if tenancy.beyond and not wanted.issuperset(tenancy.reach):
                raise Bound(bound_by(tenancy.reach, next(iter(tenancy.beyond.values()))))
            if wanted.issuperset(tenancy.key.groups):
                continue
            if not tenancy.coordinator.stable:
                return None
            if tenancy.coordinator.place is Place.BLOCKED:
                return [tenancy]
            out += self._divide(tenancy, wanted)
        if any(self._is_left(tenancy) for tenancy in touched):
            # It is on its way to here.
            return None
        covering = self._within(job, wanted)
        if rest := wanted.difference(*(tenancy.key.groups for tenancy in covering)):
            made = self.make(self._key(job, rest), lead=self.host)
            made.participant.quiesced = quiesced
            covering.append(made)
        if any(tenancy.beyond for tenancy in covering):
            return self._unite(covering, out)
        return self._join(covering, out) if len(covering) > 1 else covering

    def _displace(
        self, empty: Iterable[Tenancy], wanted: set[GroupName], out: list[Effect]
    ) -> bool:
        """Forget what other hosts move on some groups, and of which there is nothing here.

        Returns whether sessions of the job wait to be told to resume.
        """
        quiesced = False
        for tenancy in empty:
            participant = tenancy.participant
            quiesced |= participant.quiesced
            if participant.order is not None and participant.answer is None:
                nothing = self.nothing_of(participant.order, wanted)
                out.append(Send(host=tenancy.lead, message=nothing))
            self._forget(tenancy)
            out.append(TenancyEndedRecord(tenancy=tenancy.key))
        return quiesced

    def _is_left(self, tenancy: Tenancy) -> bool:
        """Whether there is something here of a tenancy that another host moves."""
        return tenancy.has_ranks or tenancy.key in self.leaving

    def nothing_of(
        self, order: Order, others: set[GroupName], failure: Reason | None = None
    ) -> Report:
        """Return the answer to an order that is not obeyed: `others` are not for it to move."""
        groups = order.tenancy.groups
        return Report(
            host=self.host,
            tenancy=order.tenancy,
            stamp=order.stamp,
            failure=failure,
            states=(),
            disowned=tuple(group for group in groups if group in others),
        )

    def regain_held(self, job: JobKey, groups: tuple[GroupName, ...]) -> None:
        """After a restart: know that a holder may be on its groups, with ranks or without."""
        within = self._within(job, set(groups))
        for tenancy in within:
            if not tenancy.participant.ranks:
                tenancy.coordinator.place = Place.ON
        rest = set(groups).difference(*(tenancy.key.groups for tenancy in within))
        if rest:
            self.make(self._key(job, rest), Place.ON, self.host)

    def _within(self, job: JobKey, groups: set[GroupName]) -> list[Tenancy]:
        own = (tenancy for tenancy in self.tenancies_of(job) if tenancy.led_here)
        return [tenancy for tenancy in own if groups.issuperset(tenancy.key.groups)]

    def _key(self, job: JobKey, groups: Iterable[GroupName]) -> TenancyKey:
        return TenancyKey(job, self.in_order(groups))

    def in_order(self, groups: Iterable[GroupName]) -> tuple[GroupName, ...]:
        """Return groups in the order in which they are reserved."""
        return tuple(sorted(groups, key=self.order_of.__getitem__))

    def arbiter_of(self, group: GroupName) -> HostName:
        """Return the host that arbitrates a group."""
        hosts = self.hosts_of.get(group)
        return hosts[0] if hosts else self.host

    def hosts_of_all(self, groups: Iterable[GroupName]) -> tuple[HostName, ...]:
        """Return all hosts of some groups, in the order of these."""
        hosts = (self.hosts_of.get(group) or (self.host,) for group in groups)
        return tuple(dict.fromkeys(host for of_group in hosts for host in of_group))

    def term_after(self, term: int) -> int:
        """Return a term above this one in which nobody but this host ever moves anything."""
        hosts = sorted({self.host}.union(*self.hosts_of.values()))
        of_here = hosts.index(self.host)
        return term + 1 + (of_here - term - 1) % len(hosts)

    def make(
        self, key: TenancyKey, place: Place = Place.OFF, lead: HostName | None = None
    ) -> Tenancy:
        """Enter a new tenancy into the books; it is led by its first group's arbiter, or `lead`."""
        lead = lead or self.arbiter_of(key.groups[0])
        led_here = lead == self.host
        participant = Participant(
            host=self.host,
            tenancy=key,
            numbers=self.numbers,
            limits=self.limits,
            hook_sessions=dict(self.hooks.get(key.job, {})),
            away=place is Place.OFF,
            company=self.company_of,
        )
        coordinator = Coordinator(
            tenancy=key,
            hosts=self.hosts_of_all(key.groups) if led_here else (),
            numbers=self.numbers,
            limits=self.limits,
            links=self.links,
            lead=None if led_here else lead,
            place=place,
        )
        tenancy = Tenancy(key=key, lead=lead, coordinator=coordinator, participant=participant)
        self.all[key] = tenancy
        self._note_reshaped(key.job)
        self.by_job.setdefault(key.job, {})[key] = None
        for group in key.groups:
            self.by_group[group][key] = tenancy
        return tenancy

    def _note_reshaped(self, job: JobKey) -> None:
        if self.guests:
            self.reshaped[job] = None

    def company_of(self, key: TenancyKey) -> RankId | None:
        """Return a rank of another job that is on a tenancy's devices here, or comes onto them.

        No scan sees who only comes: by an order, say, of a coordinator that has forgotten it.
        """
        devices = {d for rank in self.all[key].participant.ranks.values() for d in rank.devices}
        for other in dict.fromkeys(there for group in key.groups for there in self.by_group[group]):
            for rank in self.all[other].participant.ranks.values():
                if other.job != key.job and rank.is_or_comes_on and devices & rank.devices:
                    return rank.id
        return None

    def residents(self, group: GroupName) -> list[Tenancy]:
        """Return the tenancies led here whose state must be assumed to be on a group's devices."""
        there = self.by_group[group].values()
        return [tenancy for tenancy in there if tenancy.led_here and tenancy.resident]

    def guests_on(self, group: GroupName) -> list[tuple[JobKey, HostName]]:
        """Return the jobs that are on a group's devices and are moved from elsewhere, and where."""
        there = self.by_group[group].values()
        found = {
            (tenancy.key.job, tenancy.lead): None
            for tenancy in there
            if not tenancy.led_here and tenancy.participant.on_devices
        }
        guests = self.guests.get(group, {}).values()
        on = (guest for guest in guests if guest.state.holds_device)
        found |= {(guest.job, self._lead_of_guest(guest)): None for guest in on}
        return list(found)

    def _lead_of_guest(self, guest: PresentRank) -> HostName:
        """Return who moves a guest. If it takes this host to do so: who moves its job there."""
        if guest.lead != self.host:
            return guest.lead
        own = self.tenancies_of(guest.job)
        leads = (t.lead for t in own if not set(t.key.groups).isdisjoint(guest.groups))
        return next(leads, self.host)

    def led_on(self, job: JobKey, group: GroupName) -> list[Tenancy]:
        """Return the tenancies of a job that this host moves and that may be on a group."""
        there = self.by_group[group].values()
        return [tenancy for tenancy in there if tenancy.led_here and tenancy.key.job == job]

    def moves_ranks_on(self, job: JobKey, group: GroupName) -> bool:
        """Whether this host moves a rank of a job that has a context on a group's devices."""
        led = self.led_on(job, group)
        return any(group in on for tenancy in led for _, on in self._whereabouts(tenancy))

    def leads_of(self, job: JobKey, groups: Iterable[GroupName]) -> list[HostName]:
        """Return the other hosts that move what a job has on groups of arbiters of this host."""
        leads: dict[HostName, None] = {}
        for group in groups:
            leads |= self.claimed.get((job, group), {})
            for tenancy in self.by_group[group].values():
                elsewhere = tenancy.key.job == job and not tenancy.led_here
                if elsewhere and self._is_left(tenancy):
                    leads[tenancy.lead] = None
            for guest in self.guests.get(group, {}).values():
                if guest.job == job:
                    leads[self._lead_of_guest(guest)] = None
        leads.pop(self.host, None)
        return list(leads)

    def assert_alone(
        self, group: GroupName, job: JobKey, but_led_by: HostName | None = None
    ) -> None:
        """Assert that nobody but the job is on the group's devices, as every grant does.

        `but_led_by`: what that host moves it has to take off itself.
        """
        arbitrated_here = self.arbiter_of(group) == self.host
        for tenancy in self.by_group[group].values():
            if tenancy.key.job == job or tenancy.lead == but_led_by:
                continue
            if tenancy.led_here:
                there = tenancy.resident
            else:
                # Else its arbiter has looked at what others move.
                there = arbitrated_here and tenancy.participant.on_devices
            assert not there, f"{tenancy.key.job} is on {group} too"
        if arbitrated_here and self.guests:
            for guest in self.guests.get(group, {}).values():
                alone = guest.job == job or self._lead_of_guest(guest) == but_led_by
                assert alone or not guest.state.holds_device, f"{guest.job} is on {group} too"

    def settled(self, job: JobKey, groups: tuple[GroupName, ...]) -> bool:
        """Whether one tenancy of the job covers `groups`, runs, and is alone on their devices."""
        covered = False
        if self.guests and self._meets_guests(job, groups):
            return False
        if self.claimed and any((job, group) in self.claimed for group in groups):
            return False
        for group in groups:
            for tenancy in self.by_group[group].values():
                if tenancy.key.job != job:
                    if tenancy.resident:
                        return False
                elif not tenancy.led_here:
                    return False
                elif tenancy.key.groups == groups and tenancy.runs_within:
                    covered = True
                else:
                    # Another one of the job is here because a rank of it binds the groups.
                    return False
        return covered

    def _meets_guests(self, job: JobKey, groups: Iterable[GroupName]) -> bool:
        """Whether others move something of a job on groups, or have somebody on their devices."""
        guests = (guest for group in groups for guest in self.guests.get(group, {}).values())
        return any(guest.job == job or guest.state.holds_device for guest in guests)

    def _divide(self, tenancy: Tenancy, wanted: set[GroupName]) -> list[Effect]:
        parts = [wanted.intersection(tenancy.key.groups), set(tenancy.key.groups) - wanted]
        for rank, groups in self._whereabouts(tenancy):
            if not any(groups <= part for part in parts):
                raise Bound(bound_by(self.in_order(groups), rank))
        return self._rebuild([tenancy], [self._key(tenancy.key.job, part) for part in parts])

    def _whereabouts(self, tenancy: Tenancy) -> list[tuple[RankId, set[GroupName]]]:
        """Return a tenancy's ranks on all hosts, each with the groups on whose devices it is."""
        here = tenancy.participant.ranks.values()
        known = self.order_of.keys()
        return [
            *((rank.id, self._groups_of(rank.devices)) for rank in here),
            *((rank, known & present.groups) for rank, present in tenancy.abroad.items()),
        ]

    def _unite(self, parts: list[Tenancy], out: list[Effect]) -> list[Tenancy] | None:
        """Make one of tenancies that a rank binds; None while one of them is moving."""
        if not all(part.coordinator.stable for part in parts):
            return None
        if any(part.coordinator.place is Place.BLOCKED for part in parts):
            return parts
        key = self._key(parts[0].key.job, {group for part in parts for group in part.key.groups})
        out += self._rebuild(parts, [key])
        return [self.all[key]]

    def _join(self, parts: list[Tenancy], out: list[Effect]) -> list[Tenancy] | None:
        """Make one of the parts that are off, so that none of them runs before all are restored.

        Returns None while one of them is moving. A lease on a part divides them again.
        """
        if not all(part.coordinator.stable for part in parts):
            return None
        away = [part for part in parts if part.coordinator.place is Place.OFF]
        if len(away) < 2:
            return parts
        united = self._unite(away, out)
        assert united is not None, "all of them are stable"
        return [*(part for part in parts if part not in away), *united]

    def _rebuild(self, old: list[Tenancy], keys: list[TenancyKey]) -> list[Effect]:
        """Put new tenancies in place of stable ones, and each rank where its devices are."""
        all_on = all(tenancy.coordinator.place is Place.ON for tenancy in old)
        pinned = next((p for t in old if (p := t.coordinator.pinned) is not None), None)
        out: list[Effect] = []
        for tenancy in old:
            self._forget(tenancy)
            out.append(TenancyEndedRecord(tenancy=tenancy.key))
            # What comes instead reserves anew before its next move.
            out.append(FreeMemory(tenancy=tenancy.key, host=True, device=True))
        for key in keys:
            made = self.make(key, Place.ON if all_on else Place.OFF, old[0].lead)
            # That there was a move at all tells a restart that callbacks may have to resume, and
            # whoever obeys orders of what was there before would refuse lower ones.
            made.coordinator.stamp = max(tenancy.coordinator.stamp for tenancy in old)
            made.coordinator.pinned = pinned
            made.coordinator.qualified = all(t.coordinator.qualified for t in old)
            made.coordinator.stopped_at = max(tenancy.coordinator.stopped_at for tenancy in old)
            made.coordinator.moves = max(tenancy.coordinator.moves for tenancy in old)
            made.participant.quiesced = any(tenancy.participant.quiesced for tenancy in old)
            out.append(made.coordinator.record())
        for tenancy in old:
            for process, rank in tenancy.participant.ranks.items():
                key = _best(keys, self._groups_of(rank.devices))
                self.all[key].participant.ranks[process] = rank
                self._settle_in(process, key)
                out.append(rank.record(key))
            for rank_id, present in tenancy.abroad.items():
                key = _best(keys, set(present.groups))
                self.all[key].abroad[rank_id] = present
                self.settle_abroad(rank_id, key)
            for key in keys:
                self.all[key].shortages |= tenancy.shortages
        return out

    def settle_abroad(self, rank: RankId, key: TenancyKey) -> None:
        """Enter where a rank on another host belongs, and what it reaches beyond that."""
        self.abroad[rank] = key
        tenancy = self.all[key]
        known = self.order_of.keys() & tenancy.abroad[rank].groups
        self._reach(tenancy, rank, known)

    def _reach(self, tenancy: Tenancy, rank: RankId, groups: set[GroupName]) -> None:
        for group in self.in_order(groups.difference(tenancy.reach)):
            tenancy.beyond[group] = rank
            self.by_group[group][tenancy.key] = tenancy

    def forget_reach(self, tenancy: Tenancy, gone: RankId) -> None:
        """Know that a rank which is not a tenancy's any more reaches nowhere for it."""
        for group, rank in list(tenancy.beyond.items()):
            if rank == gone:
                del tenancy.beyond[group]
                del self.by_group[group][tenancy.key]
        for process in tenancy.participant.ranks:
            self._settle_in(process, tenancy.key)
        for rank in tenancy.abroad:
            self.settle_abroad(rank, tenancy.key)

    def _forget(self, tenancy: Tenancy) -> None:
        self.tell_arbiters(tenancy)
        key = tenancy.key
        if tenancy.led_here:
            self.unclaim(key)
            self.unled[key.job] = None
        del self.all[key]
        self._note_reshaped(key.job)
        of_job = self.by_job[key.job]
        del of_job[key]
        if not of_job:
            del self.by_job[key.job]
        for group in tenancy.reach:
            del self.by_group[group][key]

    def forget_claim(self, host: HostName, job: JobKey, groups: Iterable[GroupName]) -> None:
        """Know that another host does not move a job on groups of arbiters here."""
        for group in groups:
            hosts = self.claimed.get((job, group), {})
            hosts.pop(host, None)
            if not hosts:
                self.claimed.pop((job, group), None)

    def unclaim(self, key: TenancyKey) -> None:
        """Let arbiters elsewhere know that this host does not move a tenancy any more."""
        elsewhere = (group for group in key.groups if self.arbiter_of(group) != self.host)
        self.unclaimed.update(dict.fromkeys(elsewhere))

    def drop_unused(self, job: JobKey, *, abandoned: bool) -> list[Effect]:
        """Forget a job's tenancies that have no ranks and are off. `abandoned`: no session left.

        One that is on without a known rank is kept for a job that may have made one unseen.
        """
        out: list[Effect] = []
        for key in list(self.by_job.get(job, ())):
            tenancy = self.all[key]
            gone = (Place.OFF, Place.ON) if abandoned else (Place.OFF,)
            if tenancy.has_ranks or tenancy.participant.busy or key in self.leaving:
                continue
            if tenancy.led_here and tenancy.coordinator.place not in gone:
                continue
            if tenancy.participant.owes_resume:
                continue
            self._forget(tenancy)
            out.append(TenancyEndedRecord(tenancy=key))
        return out

    def _groups_of(self, devices: Iterable[DeviceId]) -> set[GroupName]:
        return {self.group_of[device] for device in devices if device in self.group_of}

    # --- their ranks --------------------------------------------------------------------------

    def put(self, found: FoundRank, groups: tuple[GroupName, ...] = ()) -> list[Effect]:
        """Take in a process that was seen on devices, or registered for `groups`."""
        key = self.home.get(found.process)
        job = key.job if key is not None else found.job
        if job is None:
            return self._put_stranger(found)
        on = self._groups_of(found.devices) or set(groups)
        if not on:
            return []
        self.strangers.pop(found.process, None)
        watchdog_s: float | None = None
        if key is not None:
            participant = self.all[key].participant
            watchdog_s = participant.ranks[found.process].watchdog_s
            out = participant.put(found)
        else:
            key = self._home_for(job, on)
            watch = WatchProcess(process=found.process)
            out = [watch, *self.all[key].participant.put(found)]
        if out:
            # Else it is where it was.
            self._settle_in(found.process, key)
        if out or found.watchdog_s not in (None, watchdog_s):
            self.tell_arbiters(self.all[key])
        return out

    def tell_arbiters(self, tenancy: Tenancy) -> None:
        """Let other hosts know whom a tenancy has on the devices of this one."""
        for group in tenancy.reach:
            hosts = {self.arbiter_of(group): None, tenancy.lead: None}
            hosts.pop(self.host, None)
            if hosts:
                self.untold.setdefault(group, {}).update(hosts)

    def regain(self, rank: Rank, key: TenancyKey) -> None:
        """Take a rank back from the journal, into a tenancy that is known."""
        self.all[key].participant.ranks[rank.id.process] = rank
        self._settle_in(rank.id.process, key)

    def _settle_in(self, process: ProcessId, key: TenancyKey) -> None:
        self.home[process] = key
        tenancy = self.all[key]
        rank = tenancy.participant.ranks[process]
        self._reach(tenancy, rank.id, self._groups_of(rank.devices))

    def _home_for(self, job: JobKey, on: set[GroupName], *, led_here: bool = False) -> TenancyKey:
        """Return where a rank on some groups belongs. `led_here`: to what this host moves."""
        keys = self.by_job.get(job, {})
        if led_here:
            keys = {key: None for key in keys if self.all[key].led_here}
        if inside := next((key for key in keys if on.issubset(key.groups)), None):
            return inside
        # One that it reaches beyond, unless all that it is on is new.
        if touched := next((key for key in keys if not on.isdisjoint(key.groups)), None):
            return touched
        # It runs there, but who else does is looked at before its job is let on.
        lead = self.host if led_here else self._mover_of(job, on)
        return self.make(self._key(job, on), lead=lead).key

    def _mover_of(self, job: JobKey, groups: set[GroupName]) -> HostName | None:
        """Return which other host moves what a job has on groups, if this one knows of any."""
        guests = (guest for group in groups for guest in self.guests.get(group, {}).values())
        return next((self._lead_of_guest(guest) for guest in guests if guest.job == job), None)

    def _put_stranger(self, found: FoundRank) -> list[Effect]:
        if found.process in self.strangers:
            return []
        self.strangers[found.process] = found
        return [WatchProcess(process=found.process), *self.note_stranger(found)]

    def note_stranger(self, found: FoundRank) -> list[Effect]:
        """Note that a process of no known job is on the devices."""
        facts: dict[str, str | int | float | bool | None] = {
            "pid": found.process.pid,
            "uid": found.uid,
            "name": found.name,
            "device": ",".join(sorted(found.devices)),
            "bytes": found.device_bytes,
        }
        return [Note(kind="stranger", level="warning", facts=facts)]

    def observe(self, found: Iterable[FoundRank]) -> list[Effect]:
        """Take in what a scan, or the regular look, saw."""
        out: list[Effect] = []
        for process in found:
            out += self.put(process)
        return out

    def tenancies_of(self, job: JobKey) -> list[Tenancy]:
        """Return the tenancies of a job."""
        return [self.all[key] for key in self.by_job.get(job, ())]

    def ranks_of_job(self, job: JobKey) -> list[Rank]:
        """Return the ranks of all tenancies of a job."""
        return [r for tenancy in self.tenancies_of(job) for r in tenancy.participant.ranks.values()]

    def ranks_of(self, key: TenancyKey) -> Iterable[Rank]:
        """Return a tenancy's ranks."""
        return self.all[key].participant.ranks.values()

    def turns_back(self, key: TenancyKey) -> bool:
        """Whether a tenancy is on its way back to where it was."""
        return self.all[key].coordinator.place is Place.TURNING_BACK

    def tenancy_of(self, rank: RankId) -> Tenancy | None:
        """Return the tenancy that a process of any host is a rank of, if it is known as one."""
        key = self.home.get(rank.process) if rank.host == self.host else self.abroad.get(rank)
        return self.all[key] if key is not None else None

    def holds_still(self, rank: RankId) -> bool:
        """Whether a process of any host is a rank that we keep from running."""
        tenancy = self.tenancy_of(rank)
        if tenancy is None:
            return False
        if (present := tenancy.abroad.get(rank)) is not None:
            return present.state in _STILL or not tenancy.coordinator.stable
        known = tenancy.participant.ranks[rank.process]
        return known.operation is not None or known.state in _STILL

    def any_still(self, job: JobKey, groups: Iterable[GroupName]) -> bool:
        """Whether state of a job on any of the groups is frozen, parked or being moved."""
        wanted = set(groups)
        return any(
            tenancy.has_ranks and not tenancy.ready and not wanted.isdisjoint(tenancy.reach)
            for tenancy in self.tenancies_of(job)
        )

    def at_rest(self, process: ProcessId) -> bool:
        """Whether a process is a rank that we keep from running, with no driver call in flight."""
        key = self.home.get(process)
        if key is None:
            return False
        rank = self.all[key].participant.ranks[process]
        return rank.operation is None and rank.state in _STILL

    def add_hooks(self, job: JobKey, session: SessionId) -> None:
        """A session of the job can quiesce and resume."""
        self.hooks.setdefault(job, {})[session] = None
        for key in self.by_job.get(job, ()):
            self.all[key].participant.hook_sessions[session] = None

    def remove_hooks(self, job: JobKey, session: SessionId) -> None:
        """A session is gone."""
        self.hooks.get(job, {}).pop(session, None)
        if not self.hooks.get(job):
            self.hooks.pop(job, None)
        for key in self.by_job.get(job, ()):
            self.all[key].participant.hook_sessions.pop(session, None)


def _best(keys: Sequence[TenancyKey], on: set[GroupName]) -> TenancyKey:
    """Return which of some tenancies a rank on these groups belongs to: where all of it is."""
    inside = (key for key in keys if on.issubset(key.groups))
    return next(inside, None) or max(keys, key=lambda key: len(on.intersection(key.groups)))
