"""Other hosts: whether they are there, what they say, and what follows when they are not.

Rules:

* A group is granted to nobody while a host of it is not connected, or has not said yet who is on
  its devices.
* What a silent host holds stays held: nothing is concluded from silence. A move that is undecided
  goes back (see `coordinator`).
* A proof ends it: the host's system has booted anew, or an operator says that it is gone.
* A message is obeyed only from who may say it: a session's requests from its front, answers and
  orders from the arbiter, and everything about processes of a host from that host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from tsliced.core.actions import Note, Send
from tsliced.core.coordinator import Place
from tsliced.core.ending import Ending
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    ClientEvent,
    GrantConfirmed,
    HostDied,
    LastTurnRequested,
    PeerConnected,
    PeerDisconnected,
    PeerLost,
    ReleaseRequested,
    SessionClosed,
    SessionOpened,
    SignOfLife,
)
from tsliced.core.fronting import Fronting
from tsliced.core.leads import Leads
from tsliced.core.leasing import Leasing
from tsliced.core.links import Links
from tsliced.core.messages import (
    Cede,
    Ceded,
    Clear,
    Commit,
    Committed,
    EndJob,
    GiveBack,
    HandedOver,
    HandOver,
    HeldLeases,
    HostGone,
    LiveSessions,
    NotCeded,
    NotCleared,
    NotReserved,
    PeerMessage,
    Presence,
    PresentRank,
    RankGone,
    Reservations,
    Reserve,
    Reserved,
    StalledElsewhere,
    Taken,
    Unreserved,
    Waiting,
)
from tsliced.core.model import (
    Cause,
    Goal,
    GroupName,
    HostName,
    JobKey,
    RankId,
    RankState,
    Reason,
    TenancyKey,
)
from tsliced.core.remains import Remains
from tsliced.core.rounds import HELD, Borrower, Round
from tsliced.core.sessions import LEASE_HELD, Session
from tsliced.core.signals import Order, Report
from tsliced.core.strangers import Inhabitants
from tsliced.core.timers import TimerKey, TimerKind

#: By where a tenancy is: where no rank of it is, but by a host that went its own way.
_ASTRAY = {
    Place.ON: (RankState.FROZEN, RankState.PARKED),
    Place.OFF: (RankState.FROZEN,),
}


@dataclass(slots=True, kw_only=True)
class Hosts:
    """The other hosts of this one's groups. Mutate it only through its methods."""

    links: Links
    leasing: Leasing
    tenancies: Inhabitants
    fronting: Fronting
    remains: Remains
    ending: Ending
    leads: Leads
    #: By group: hosts that have said who is on their devices since they are connected.
    present: dict[GroupName, set[HostName]] = field(default_factory=dict)

    # --- events -------------------------------------------------------------------------------

    def on_event(
        self, event: PeerConnected | PeerDisconnected | PeerLost | HostDied, now: float
    ) -> None:
        """Take in what became of a host."""
        match event:
            case PeerConnected():
                self._on_connected(event, now)
            case PeerDisconnected(host=host):
                self._on_disconnected(host, now)
            case PeerLost(host=host):
                if host not in self.links.dead:
                    self._on_lost(host, now)
            case HostDied(host=host, by=by):
                self._on_declared_dead(host, f"{by} at {self.tenancies.host}", now)
            case _:
                assert_never(event)

    def _on_connected(self, event: PeerConnected, now: float) -> None:
        links, host, boot = self.links, event.host, event.boot
        if host in links.up:
            # Another connection takes the place of one that was not seen to end.
            self._on_disconnected(host, now)
        before = links.record(host)
        if before.boot not in ("", boot) and host not in links.dead:
            self._on_died(host, f"host {host} has booted anew", now)
        links.boots[host], links.incarnations[host] = boot, event.incarnation
        links.up.add(host)
        links.lost.discard(host)
        links.dead.pop(host, None)
        if (record := links.record(host)) != before:
            self.leasing.out.append(record)
        sessions = self.leasing.sessions.values()
        live = tuple(s.id for s in sessions if s.host is None and not s.tool)
        self._send(host, LiveSessions(sessions=live))
        for group in self.tenancies.order_of:
            if self._is_here(group) and host in self.tenancies.audience_of(group):
                self._tell_presence(group, host)
        self.leasing.out += self.tenancies.remind(host)
        # What is had comes before what is wanted, for one that has lost its books.
        self.leasing.on_arbiter_connected(host)
        self.fronting.on_connected(host, live)
        self.leads.on_connected(host)
        self.leasing.on_host_back(host)
        for key, tenancy in self.tenancies.all.items():
            if tenancy.lead == host:
                self.leasing.timers.clear(TimerKey(TimerKind.ALONE, key))
        for dead, by in links.dead.items():
            run = links.incarnations.get(dead, "")
            self._send(host, HostGone(host=dead, by=by, incarnation=run))
        self.look_for_silence()

    def _is_here(self, group: GroupName) -> bool:
        """Whether this host has devices of a group."""
        return self.tenancies.host in self.tenancies.hosts_of.get(group, ())

    def _on_disconnected(self, host: HostName, now: float) -> None:
        self.links.up.discard(host)
        for of_group in self.present.values():
            of_group.discard(host)
        for session in self._sessions_of(host):
            session.connected = False
        self.leads.forget_wishes(host)
        self.await_leads(now)
        self.look_for_silence()

    def _on_lost(self, host: HostName, now: float) -> None:
        self.links.lost.add(host)
        for round_ in self.leasing.borrowed_by(host):
            if round_.state is not HELD:
                # It has not been used, and cannot be any more.
                self.leasing.end_borrower(round_, now)
        self.leasing.out += self.tenancies.on_host_gone(host, now=now)
        self.look_for_silence()

    def await_leads(self, now: float) -> None:
        """Let the clock run for what is frozen here for a coordinator that is not connected."""
        at = now + self.leasing.limits.alone_s
        for key, tenancy in self.tenancies.all.items():
            timer = TimerKey(TimerKind.ALONE, key)
            frozen = not tenancy.led_here and tenancy.coordinator.goal is Goal.FROZEN
            waits = frozen and tenancy.lead not in self.links.up
            if waits and self.leasing.timers.get(timer) is None:
                self.leasing.timers.set(timer, at)

    def on_alone_due(self, key: TenancyKey, now: float) -> None:
        """A coordinator has been silent for long while ranks of here are frozen for it."""
        tenancy = self.tenancies.all.get(key)
        if tenancy is None or tenancy.lead in self.links.up:
            return
        before = tenancy.participant.alone
        self.leasing.out += self.tenancies.thaw_alone(key, now=now)
        if tenancy.participant.alone != before:
            facts = {"job": str(key.job), "groups": ",".join(key.groups), "host": tenancy.lead}
            self.leasing.out.append(Note(kind="thawed_alone", level="warning", facts=facts))

    def _on_declared_dead(self, host: HostName, by: str, now: float) -> None:
        """Take an operator's word, unless the host itself says otherwise."""
        if host in self.links.up or host == self.tenancies.host:
            self._doubt(host, f"{by} says that it is gone, but it is connected")
        elif host not in self.links.dead:
            self._on_died(host, f"host {host} is gone, says {by}", now)
            self.links.dead[host] = by
            self.leasing.out.append(self.links.record(host))
            for other in sorted(self.links.up):
                self._send(other, HostGone(host=host, by=by, incarnation=None))
            self.look_for_silence()

    def _on_told_dead(self, source: HostName, word: HostGone, now: float) -> None:
        """Take an operator's word that another host passes on, if it is about what is known here.

        It may be old: of a run after which the host was back.
        """
        host, by = word.host, word.by
        links = self.links
        here = links.incarnations.get(host, word.incarnation)
        if word.incarnation is None or word.incarnation == here:
            self._on_declared_dead(host, by, now)
        elif host not in links.up and host not in links.dead:
            self._doubt(host, f"{by} said at {source} that it is gone, but it has been back since")

    def _doubt(self, host: HostName, text: str) -> None:
        facts = {"host": host, "reason": text}
        self.leasing.out.append(Note(kind="host_alive", level="warning", facts=facts))

    def _on_died(self, host: HostName, text: str, now: float) -> None:
        """Nothing of what was on a host is left."""
        links, leasing = self.links, self.leasing
        links.up.discard(host)
        links.lost.discard(host)
        links.dead[host] = text
        facts = {"host": host, "reason": text}
        leasing.out.append(Note(kind="host_died", level="error", facts=facts))
        for rank in [rank for rank in self.tenancies.abroad if rank.host == host]:
            self._on_rank_gone(rank, now)
        for session in self._sessions_of(host):
            leasing.end_session(session.id, text, now)
        self.remains.on_host_died(host, now)
        for round_ in leasing.borrowed_by(host):
            leasing.end_borrower(round_, now)
        leasing.forget_claims(host)
        for round_ in leasing.on_arbiter_died(host):
            leasing.lose_held(round_, text, now)
        self.tenancies.drop_guests(lambda rank, _: rank.host == host)
        leasing.out += self.tenancies.on_host_gone(host, now=now)
        self.leads.on_died(host, now)
        for job in [key.job for key, t in self.tenancies.all.items() if t.lead == host]:
            leasing.tidy(job)
        self.fronting.on_arbiter_died(host, text)

    def _sessions_of(self, host: HostName) -> list[Session]:
        return [session for session in self.leasing.sessions.values() if session.host == host]

    # --- who is there -------------------------------------------------------------------------

    def look_for_silence(self) -> None:
        """Know anew which groups nobody can be let onto, because a host of them is not there."""
        leasing = self.leasing
        silent = {
            group: reason
            for group in self.tenancies.order_of
            if (reason := self._silence_of(group)) is not None
        }
        if silent == leasing.silent:
            return
        changed = leasing.silent.keys() ^ silent.keys()
        leasing.silent = silent
        leasing.set_all_aside(changed & silent.keys())
        leasing.todo += changed

    def _silence_of(self, group: GroupName) -> Reason | None:
        links, hosts = self.links, self.tenancies.hosts_of.get(group, ())
        if group not in self.leasing.arbiters:
            arbiter = self.tenancies.arbiter_of(group)
            if arbiter in links.up:
                return None
            text = f"host {arbiter}, which arbitrates group {group}, is not connected"
            return Reason(cause=Cause.SILENT, text=text)
        present = links.up.intersection(self.present.get(group, ()))
        # By sets: thousands of hosts may connect one after the other.
        silent = set(hosts).difference(present, links.dead, (self.tenancies.host,))
        if not silent:
            return None
        host = next(host for host in hosts if host in silent)
        if host in links.up:
            text = f"host {host} has not said yet who is on its devices of group {group}"
        else:
            how = "silent" if host in links.lost else "not connected"
            text = f"host {host} of group {group} is {how}: who is on its devices is not known"
        return Reason(cause=Cause.SILENT, text=text)

    # --- what they say ------------------------------------------------------------------------

    def on_said(self, host: HostName, message: PeerMessage, now: float) -> None:
        """Take in what another host says."""
        match message:
            case Order():
                self.leasing.out += self.tenancies.on_order(message, host, now=now)
            case Report():
                self.leasing.out += self.tenancies.on_report(message, host, now=now)
                self._find_strays_in(message, now)
            case Presence():
                self._on_presence(host, message, now)
            case LiveSessions():
                self._on_live_sessions(host, message, now)
            case HeldLeases():
                self.fronting.on_held(message, host)
            case RankGone(job=job, groups=groups, rank=rank):
                for tenancy in self.tenancies.tenancies_of(job):
                    if tenancy.lead == host and not set(groups).isdisjoint(tenancy.key.groups):
                        self.remains.on_rank_gone(tenancy.key, rank, now)
            case EndJob(job=job, text=text, grace_s=grace_s, onward=onward):
                if self._has_part_in(host, job):
                    text = f"{text} (by {host})"
                    self.ending.end_job(job, text=text, grace_s=grace_s, now=now, onward=onward)
            case HostGone():
                self._on_told_dead(host, message, now)
            case (
                SessionOpened()
                | SessionClosed()
                | AcquireRequested()
                | LastTurnRequested()
                | GrantConfirmed()
                | SignOfLife()
                | ReleaseRequested()
                | CancelRequested()
            ):
                self._on_client(host, message, now)
            case Reserve() | Commit() | GiveBack() | Reservations():
                self._on_borrower(host, message, now)
            case Reserved() | Committed() | Unreserved() | NotReserved() | Waiting():
                self._on_lender(host, message, now)
            case StalledElsewhere():
                self._on_stalled(host, message)
            case Clear() | NotCleared() | Cede() | NotCeded():
                self._on_wish(host, message, now)
            case HandOver() | HandedOver() | Ceded() | Taken():
                self._on_handover(host, message, now)
            case _:
                self.fronting.on_action(message, host, now)

    def _has_part_in(self, host: HostName, job: JobKey) -> bool:
        """Whether a host takes part in moving a job of here, or in what its clients ask for."""
        for tenancy in self.tenancies.tenancies_of(job):
            if host == tenancy.lead or host in tenancy.coordinator.hosts:
                return True
        sessions = self.leasing.sessions_of(job)
        if any(session.host == host for session in sessions):
            return True
        return host in self.fronting.arbiters_of(session.id for session in sessions)

    def _on_borrower(
        self, host: HostName, message: Reserve | Commit | GiveBack | Reservations, now: float
    ) -> None:
        leasing = self.leasing
        match message:
            case Reserve():
                if (round_ := leasing.open_for(host, message, now)) is not None:
                    leasing.advance(round_, now)
            case Commit():
                leasing.on_commit(host, message, now)
            case GiveBack(round=number, group=group):
                known = leasing.borrowers.get(Borrower(host, number, group))
                if known is not None:
                    leasing.end_borrower(leasing.rounds[known], now)
            case Reservations():
                leasing.note_claims(host, message.claims)
                for round_ in leasing.unwanted(host, message):
                    leasing.end_borrower(round_, now)
            case _:
                assert_never(message)

    def _on_lender(
        self,
        host: HostName,
        message: Reserved | Committed | Unreserved | NotReserved | Waiting,
        now: float,
    ) -> None:
        leasing = self.leasing
        round_: Round | None = None
        match message:
            case Reserved():
                round_ = leasing.on_reserved(host, message)
            case Committed():
                round_ = leasing.on_committed(host, message)
            case Unreserved():
                round_ = leasing.on_unreserved(host, message)
                if round_ is not None and round_.state is HELD:
                    text = f"{host}, which arbitrates {message.group}, has given it to others"
                    leasing.lose_held(round_, text, now)
                    return
            case NotReserved():
                leasing.on_not_reserved(host, message, now)
            case Waiting():
                if (holder := leasing.on_waiting(host, message)) is not None:
                    leasing.on_contended(holder, now)
            case _:
                assert_never(message)
        if round_ is not None:
            leasing.advance(round_, now)

    def _on_stalled(self, host: HostName, message: StalledElsewhere) -> None:
        round_ = self.leasing.rounds.get(message.round)
        there = round_.elsewhere.get(message.group) if round_ is not None else None
        if round_ is not None and there is not None and there.arbiter == host:
            self.leasing.tell_stalled(round_, message.job, message.reason, message.way_out)

    def _on_wish(
        self, host: HostName, message: Clear | NotCleared | Cede | NotCeded, now: float
    ) -> None:
        match message:
            case Clear():
                self.leads.on_clear(host, message)
            case NotCleared():
                self.leasing.on_not_cleared(message, now)
            case Cede():
                self.leads.on_cede(host, message)
            case NotCeded():
                self.leasing.on_not_ceded(host, message, now)
            case _:
                assert_never(message)

    def _on_handover(
        self, host: HostName, message: HandOver | HandedOver | Ceded | Taken, now: float
    ) -> None:
        match message:
            case HandOver(tenancy=key, stamp=stamp):
                effects = self.tenancies.on_hand_over(message, host)
                self.leasing.out += self.tenancies.run(effects, now)
                # Also where somebody else was obeyed: it need not wait for that.
                self.leasing.say(host, HandedOver(tenancy=key, stamp=stamp))
            case HandedOver():
                self.leads.on_handed_over(host, message)
            case Ceded():
                self.leads.on_ceded(host, message)
            case Taken():
                self.leads.on_taken(host, message)
            case _:
                assert_never(message)

    def _on_client(self, host: HostName, event: ClientEvent, now: float) -> None:
        """Take what a client of another host says through its front."""
        session = self.leasing.sessions.get(event.session)
        if session is not None and session.host != host:
            return
        match event:
            case SessionOpened():
                if session is None:
                    self.leasing.on_opened(event, host)
                    self.remains.on_opened(event.job)
                else:
                    self._reconnect(session, now)
            case SessionClosed():
                self.leasing.end_session(event.session, f"its client on {host} is gone", now)
            case AcquireRequested():
                self.leasing.on_acquire(event, now)
            case LastTurnRequested():
                self.leasing.on_last_turn(event, now)
            case GrantConfirmed():
                self.leasing.on_confirmed(event)
            case SignOfLife():
                self.leasing.on_sign_of_life(event.session, now)
            case ReleaseRequested():
                self.leasing.on_release(event, now)
            case CancelRequested():
                self.leasing.on_cancel(event, now)
            case _:
                assert_never(event)

    def _reconnect(self, session: Session, now: float) -> None:
        if not session.connected:
            self.leasing.on_resumed(session.id, now)

    def _on_live_sessions(self, host: HostName, live: LiveSessions, now: float) -> None:
        """Know which clients of a host are there still, and tell it what they hold."""
        alive = set(live.sessions)
        for session in self._sessions_of(host):
            if session.id in alive:
                self._reconnect(session, now)
            else:
                text = f"its client on {host} is gone"
                self.leasing.end_session(session.id, text, now)
        held = tuple(
            (session.id, lease.id)
            for session in self._sessions_of(host)
            for lease in session.leases.values()
            if lease.state is LEASE_HELD
        )
        self._send(host, HeldLeases(leases=held))

    def _on_presence(self, host: HostName, presence: Presence, now: float) -> None:
        group = presence.group
        tenancies, leasing = self.tenancies, self.leasing
        if host not in tenancies.hosts_of.get(group, ()):
            return
        for rank in tenancies.missing_from(host, presence):
            self._on_rank_gone(rank, now)
        guests: list[PresentRank] = []
        for present in presence.ranks:
            if group not in present.groups:
                continue
            if tenancies.is_moved_here(group, present):
                tenancies.put_abroad(host, present)
            else:
                guests.append(present)
                tenancies.leave_to(host, present)
                if present.lead == tenancies.host:
                    self._send(host, tenancies.correction(present))
        for key in tenancies.note_shortages(host, presence):
            pinned = tenancies.all[key].coordinator.pinned
            if pinned is not None and pinned.cause is Cause.NO_HOST_MEMORY:
                leasing.out += tenancies.clear(key.job, now=now)
        for key in tenancies.by_group[group]:
            leasing.watch(key)
        self._note_clients(host, presence, now)
        self._find_strays(host, group, now)
        if group in leasing.arbiters:
            tenancies.note_guests(host, presence, guests)
            self.present.setdefault(group, set()).add(host)
            self.look_for_silence()
            leasing.todo.append(group)

    def _note_clients(self, host: HostName, presence: Presence, now: float) -> None:
        group = presence.group
        before = self.remains.clients_abroad.get((host, group), frozenset())
        # Those of jobs that others move are these others' business.
        clients = frozenset(job for job in presence.clients if self.tenancies.led_on(job, group))
        self.remains.clients_abroad[host, group] = clients
        for job in sorted(before ^ clients):
            if job in clients:
                self.remains.on_opened(job)
            else:
                self.remains.on_left(job, now)

    def forget_clients(self) -> None:
        """Know nothing more of the clients of jobs that are not moved from here any more."""
        tenancies, abroad = self.tenancies, self.remains.clients_abroad
        for (host, group), jobs in abroad.items():
            gone = {j for j in jobs & tenancies.unled.keys() if not tenancies.led_on(j, group)}
            abroad[host, group] = jobs - gone
        tenancies.unled.clear()

    def _find_strays(self, host: HostName, group: GroupName, now: float) -> None:
        """Bring together what is not where its tenancy is, since a host went its own way."""
        for key, tenancy in list(self.tenancies.by_group[group].items()):
            coordinator = tenancy.coordinator
            astray = _ASTRAY.get(coordinator.place)
            if not tenancy.led_here or astray is None:
                continue
            away = any(present.state in astray for present in tenancy.abroad.values())
            # Where all run, callbacks may still wait to be told to resume.
            unheard = coordinator.place is Place.ON and coordinator.left_out(host)
            if away or unheard:
                self.leasing.out += self.tenancies.ask(key, now=now)

    def _find_strays_in(self, report: Report, now: float) -> None:
        """Bring back what a host has done for an order of before this one booted anew."""
        tenancy = self.tenancies.all.get(report.tenancy)
        if tenancy is None or not tenancy.led_here:
            return
        astray = _ASTRAY.get(tenancy.coordinator.place, ())
        if any(state in astray for _, state in report.states):
            self.leasing.out += self.tenancies.ask(report.tenancy, now=now)

    def _on_rank_gone(self, rank: RankId, now: float) -> None:
        key = self.tenancies.abroad[rank]
        reach = self.tenancies.all[key].reach
        self.leasing.out += self.tenancies.on_rank_gone_abroad(rank, now=now)
        self.on_rank_gone(key, reach, rank, now)

    def on_rank_gone(
        self, key: TenancyKey, reach: tuple[GroupName, ...], rank: RankId, now: float
    ) -> None:
        """Tell all whom it concerns that a rank is dead."""
        self.leasing.on_rank_gone(key, reach, rank)
        self.remains.on_rank_gone(key, rank, now)
        tenancy = self.tenancies.all.get(key)
        if tenancy is not None and tenancy.led_here:
            gone = RankGone(job=key.job, groups=key.groups, rank=rank)
            for host in dict.fromkeys(other.host for other in tenancy.abroad):
                self._send(host, gone)

    # --- what they are told -------------------------------------------------------------------

    def tell_presence(self) -> None:
        """Tell other hosts who is on the devices of this one, where that has changed."""
        for group, hosts in self.tenancies.untold.items():
            if self._is_here(group):
                for host in hosts:
                    self._tell_presence(group, host)
        self.tenancies.untold.clear()

    def _tell_presence(self, group: GroupName, host: HostName) -> None:
        jobs = dict.fromkeys(key.job for key in self.tenancies.by_group[group])
        clients = [job for job in jobs if self.remains.has_client_here(job)]
        presence = self.tenancies.presence_of(group, clients, self.leasing.watchdog_in)
        self._send(host, presence)

    def _send(self, host: HostName, message: PeerMessage) -> None:
        if host in self.links.up:
            self.leasing.out.append(Send(host=host, message=message))
