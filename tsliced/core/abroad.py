"""Tenancies over several hosts: what others say of them here, and what they are told.

Where a tenancy is led, the ranks on other hosts are known as those told them last (`Presence`,
reports). Elsewhere a tenancy is what its coordinator's orders say it is: an order for other groups
than before divides or joins what is here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tsliced.core.coordinator import NO_STAMP
from tsliced.core.homes import Homes
from tsliced.core.messages import Presence, PresentRank
from tsliced.core.model import (
    Cause,
    Goal,
    GroupName,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    TenancyKey,
)
from tsliced.core.signals import Effect, Order
from tsliced.core.tenancy import Tenancy
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
    )


@dataclass(slots=True, kw_only=True)
class Abroad(Homes):
    """Who there is, here and on the other hosts of what is led here."""

    # --- where it is led ----------------------------------------------------------------------

    def put_abroad(self, host: HostName, present: PresentRank) -> None:
        """Take in what another host says of one of its ranks."""
        rank = RankId(host, present.process)
        key = self.abroad.get(rank)
        if key is None:
            on = self.order_of.keys() & present.groups
            key = self._home_for(present.job, on)
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
            text = texts.get(key.job)
            if text is not None:
                tenancy.shortages[host] = Reason(cause=Cause.NO_HOST_MEMORY, text=text)
            elif tenancy.shortages.pop(host, None) is not None:
                relieved.append(key)
        return relieved

    # --- elsewhere ----------------------------------------------------------------------------

    def presence_of(self, group: GroupName, clients: Iterable[JobKey]) -> Presence:
        """Return what the arbiter of a group has to know of this host."""
        ranks: list[PresentRank] = []
        shortages: list[tuple[JobKey, str]] = []
        for key, tenancy in self.by_group[group].items():
            if (shortage := tenancy.participant.shortage) is not None:
                shortages.append((key.job, shortage.text))
            for rank in tenancy.participant.ranks.values():
                groups = self._groups_of(rank.devices) or set(key.groups)
                if group in groups and not rank.exited:
                    ranks.append(
                        PresentRank(
                            process=rank.id.process,
                            job=key.job,
                            state=rank.state,
                            device_bytes=rank.device_bytes,
                            groups=self.in_order(groups),
                        )
                    )
        return Presence(
            group=group,
            ranks=tuple(ranks),
            clients=tuple(clients),
            shortages=tuple(shortages),
        )

    def take_in(self, order: Order, lead: HostName, out: list[Effect]) -> Tenancy | None:
        """Return the tenancy that another host's order is for, made of what is here if need be.

        None: the order is stale, or comes from a host that does not lead it.
        """
        key = order.tenancy
        if any(
            group not in self.order_of or self.arbiter_of(group) != lead for group in key.groups
        ):
            return None
        tenancy = self.all.get(key)
        if tenancy is not None and order.stamp < tenancy.coordinator.stamp:
            return None
        if tenancy is None:
            touched = [
                other
                for other in self.tenancies_of(key.job)
                if not set(other.key.groups).isdisjoint(key.groups)
            ]
            if any(t.led_here or order.stamp < t.coordinator.stamp for t in touched):
                return None
            tenancy = self._regroup(key, touched, lead, out)
        out.append(tenancy.coordinator.follow(order))
        return tenancy

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
