"""What must hold over all hosts at once, beyond what the oracle asks for of each.

It looks at what goes in and out of the machines, and at the simulated processes; of the machines'
state it takes only which processes they know as a tenancy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from oracle import Oracle
from simulated import Process

from tsliced.core.actions import Action, Grant, RunHooks, StartOperation
from tsliced.core.events import Event, GroupsObserved, GroupsScanned, HooksRun, PeerSaid
from tsliced.core.model import (
    FoundRank,
    Goal,
    GroupName,
    HostName,
    JobKey,
    OpId,
    ProcessId,
    RankState,
    SessionId,
    Stamp,
    TenancyKey,
    Verb,
)
from tsliced.core.signals import Order


@dataclass(slots=True, kw_only=True)
class Referee(Oracle):
    """Judges several hosts. `hear` is told who did what; `watch` is the oracle's part of it."""

    #: Counts what was heard.
    _moment: int = 0
    #: When each process was first seen by a daemon, and when each job was last granted each group.
    _seen_at: dict[ProcessId, int] = field(default_factory=dict)
    _granted_at: dict[tuple[JobKey, GroupName], int] = field(default_factory=dict)
    #: The latest order that each host got from a coordinator elsewhere.
    _orders: dict[tuple[HostName, TenancyKey], tuple[Stamp, Goal]] = field(default_factory=dict)
    #: Processes that their host let run by itself, because its coordinator was silent.
    _alone: set[ProcessId] = field(default_factory=set)
    #: Sessions that were told to quiesce, and not yet to resume; and by which hooks they are told.
    _quiesced: dict[SessionId, TenancyKey] = field(default_factory=dict)
    _resuming: dict[tuple[HostName, OpId], RunHooks] = field(default_factory=dict)

    def hear(self, host: HostName, what: Event | Action) -> None:
        """Judge what a daemon was told, or does."""
        self._moment += 1
        match what:
            case PeerSaid(message=Order() as order):
                self._note_order(order)
            case GroupsScanned(found=found) | GroupsObserved(found=found):
                self._note_found(found)
            case RunHooks(quiesce=True):
                self._quiesced |= dict.fromkeys(what.sessions, what.tenancy)
            case RunHooks():
                self._resuming[host, what.op] = what
            case HooksRun(op=op):
                resumed = self._resuming.pop((host, op), None)
                for session in resumed.sessions if resumed is not None else ():
                    self._quiesced.pop(session, None)
            case StartOperation(verb=Verb.FREEZE):
                self._alone.discard(what.rank.process)
            case StartOperation(verb=Verb.SNAPSHOT):
                self._judge_snapshot(what)
            case StartOperation(verb=Verb.THAW):
                self._judge_company(what)
            case _:
                pass
        self.watch(what)

    def _note_order(self, order: Order) -> None:
        place = order.host, order.tenancy
        if place not in self._orders or order.stamp > self._orders[place][0]:
            self._orders[place] = order.stamp, order.goal

    def _note_found(self, found: tuple[FoundRank, ...]) -> None:
        for process in found:
            self._seen_at.setdefault(process.process, self._moment)

    def _known(self, tenancy: TenancyKey) -> Iterator[Process]:
        """Return the processes that are known as a tenancy's, on any host."""
        for world in self.worlds:
            known = world.machine.tenancies.all.get(tenancy)
            ranks = known.participant.ranks if known is not None else ()
            yield from (world.processes[rank] for rank in ranks if rank in world.processes)

    def _judge_snapshot(self, start: StartOperation) -> None:
        """Assert that no rank runs that was known when its job was let on."""
        tenancy = start.tenancy
        granted = (self._granted_at.get((tenancy.job, group), 0) for group in tenancy.groups)
        granted_at = max(granted)
        for process in self._known(tenancy):
            late = self._seen_at.get(process.id, self._moment) >= granted_at
            if process.state is RankState.RUNNING and not late:
                assert process.id in self._alone, f"snapshot of {start.rank} while {process} runs"

    def _judge_company(self, start: StartOperation) -> None:
        """Assert that nothing is let run where another job's state is."""
        thawed = next((p for p in self.processes if p.id == start.rank.process), None)
        for other in self.processes if thawed is not None else ():
            assert thawed is not None
            alien = other.job != thawed.job and other.holds and other.lawful
            beside = alien and not other.devices.isdisjoint(thawed.devices)
            assert not beside, f"{thawed} is let run where {other} is"

    def _thaws_alone(self, start: StartOperation) -> bool:
        _, goal = self._orders.get((start.rank.host, start.tenancy), (None, None))
        alone = goal is Goal.FROZEN
        if alone:
            self._alone.add(start.rank.process)
        return alone

    def _judge_grant(self, grant: Grant) -> None:
        first = grant.lease not in self.granted
        Oracle._judge_grant(self, grant)
        client = self._client(grant.session)
        if client is None or not first:
            return
        groups = {group for group, _ in grant.tokens}
        for group in groups:
            self._granted_at[client.job, group] = self._moment
        for session, tenancy in self._quiesced.items():
            other = self._client(session)
            waits = other is not None and not other.ended and other.job == client.job
            # One whose host has nothing of what is granted is told with what it has elsewhere.
            here = any(session in w.clients and w.devices_of(groups) for w in self.worlds)
            mine = waits and here and not groups.isdisjoint(tenancy.groups)
            assert not mine, f"{grant.lease} is granted before {session} was told to resume"
