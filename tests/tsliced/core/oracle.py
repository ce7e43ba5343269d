"""What must hold whatever the core does: judged by what clients know and what is physically true.

The oracle knows nothing of the implementation. It looks at what goes in and what comes out, and at
the simulated processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from clients import Client
from world import Process, World

from tsliced.core.actions import Action, Grant, Refuse, Send, StartOperation
from tsliced.core.events import AcquireRequested, DrainOrdered, Event
from tsliced.core.model import (
    DeviceId,
    GroupName,
    JobKey,
    LeaseId,
    RankState,
    SessionId,
    Token,
    Verb,
)
from tsliced.core.timers import TimerKind


@dataclass(slots=True, kw_only=True)
class Oracle:
    """Watches a world and raises `AssertionError` at the first breach."""

    world: World
    #: All hosts that groups are on; empty: there is but one.
    worlds: tuple[World, ...] = ()
    #: No faults, cancels or deaths: the order of grants is the order of arrival.
    orderly: bool = False
    last: dict[GroupName, Token] = field(default_factory=dict)
    #: Whose the last token was.
    owner: dict[GroupName, JobKey] = field(default_factory=dict)
    granted: dict[LeaseId, tuple[tuple[GroupName, Token], ...]] = field(default_factory=dict)
    refused: set[LeaseId] = field(default_factory=set)
    #: By group, in the order of arrival: single requests for that group alone.
    asked: dict[GroupName, list[LeaseId]] = field(default_factory=dict)
    drained: set[GroupName] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.worlds = self.worlds or (self.world,)

    @property
    def clients(self) -> Iterator[Client]:
        """The clients on all hosts."""
        return (client for world in self.worlds for client in world.clients.values())

    @property
    def processes(self) -> Iterator[Process]:
        """The processes on all hosts."""
        return (process for world in self.worlds for process in world.processes.values())

    def _client(self, session: SessionId) -> Client | None:
        return next((w.clients[session] for w in self.worlds if session in w.clients), None)

    def watch(self, what: Event | Action) -> None:
        """Judge one event or action; the world calls it for each."""
        match what:
            case AcquireRequested(groups=(group,), ranks=1):
                lease = LeaseId(f"{what.session}.{what.request}")
                queue = self.asked.setdefault(group, [])
                if lease not in queue:
                    queue.append(lease)
            case DrainOrdered(group=group, drain=drain):
                (self.drained.discard if drain is None else self.drained.add)(group)
            case (Grant() as grant) | Send(message=(Grant() as grant)):
                # One for a client of another host is judged when it is sent there.
                self._judge_grant(grant)
            case Refuse():
                self.refused.add(LeaseId(f"{what.session}.{what.request}"))
            case StartOperation(verb=Verb.THAW):
                self._judge_thaw(what)
            case _:
                pass

    def _judge_grant(self, grant: Grant) -> None:
        client = self._client(grant.session)
        if client is None:
            # Its process died, and the daemon has not been told yet.
            return
        if (before := self.granted.get(grant.lease)) is not None:
            assert grant.tokens == before, "G6: a grant that is told again is the same"
            return
        self.granted[grant.lease] = grant.tokens
        joins = all(self.last.get(group) == token for group, token in grant.tokens)
        for group, token in grant.tokens:
            self._judge_exclusion(client.job, group, token)
            last = self.last.get(group)
            # Only a round of several ranks has one token for several leases.
            fresh = last is None or token > last
            assert fresh or (token == last and self.owner[group] == client.job), "G2: tokens rise"
            # What could not be written down may be lost with the daemon.
            closed = group in self.drained and any(
                ("drain", group) in world.journal for world in self.worlds
            )
            assert not (closed and fresh), f"{group} is drained, and {client.job} is let onto it"
            self.last[group], self.owner[group] = token, client.job
            if self.orderly:
                self._judge_order(group, grant.lease)
        if not joins:
            self._judge_devices(client.job, {group for group, _ in grant.tokens})

    def on_power_lost(self) -> None:
        """A host is to begin anew without what it kept: grants that nobody has may be made anew."""
        told = {lease for client in self.clients for lease in client.held}
        answered = {
            LeaseId(f"{client.session}.{request}")
            for client in self.clients
            for request, answer in client.answers.items()
            if isinstance(answer, Grant)
        }
        for lease in self.granted.keys() - told - answered:
            del self.granted[lease]

    def _judge_exclusion(self, owner: JobKey, group: GroupName, token: Token) -> None:
        for client in self.clients:
            for lease, tokens in client.held.items():
                held = dict(tokens).get(group)
                if held is None:
                    continue
                assert client.job == owner, f"G1: {client.job} holds {group} with {lease}"
                assert held == token, f"{owner} has two grants of {group}"

    def _judge_order(self, group: GroupName, lease: LeaseId) -> None:
        queue = self.asked.get(group, [])
        if lease in queue:
            ahead = set(queue[: queue.index(lease)]) - self.granted.keys() - self.refused
            assert not ahead, f"G4: {ahead} came before {lease}"

    def _judge_devices(self, owner: JobKey, groups: set[GroupName]) -> None:
        devices = frozenset[DeviceId]().union(*(w.devices_of(groups) for w in self.worlds))
        open_ones = {s for world in self.worlds for s in world.machine.leasing.sessions}
        speakers = {c.process for c in self.clients if c.session in open_ones}
        for process in self.processes:
            if process.came_strange and process.id not in speakers:
                # Whose it is was said once, and may be forgotten with who said it.
                continue
            if process.job == owner and process.devices & devices:
                assert process.state is RankState.RUNNING, f"granted while {process} does not run"
            elif process.job is not None and process.on & devices and not self.world.crowded:
                known = process.holds and (process.lawful or process.seen)
                assert not known, f"G1: granted while {process} is on the devices"

    def _judge_thaw(self, start: StartOperation) -> None:
        if self._thaws_alone(start):
            return
        known = (world.machine.tenancies.all.get(start.tenancy) for world in self.worlds)
        mine = {process for t in known if t is not None for process in t.participant.ranks}
        states = {process.state for process in self.processes if process.id in mine}
        assert RankState.PARKED not in states, "all of a tenancy are restored before any is thawed"

    def _thaws_alone(self, _start: StartOperation) -> bool:
        """Whether a host lets run what it has frozen, because its coordinator is silent."""
        return False

    def judge_rest(self) -> None:
        """Judge a world in which nothing is in flight and nothing is broken any more."""
        for client in self.clients:
            assert not client.open, f"no answer to {client.open}"
        for process in self.processes:
            assert process.state is not RankState.FROZEN, f"{process} is frozen for good"

    def judge_clocks(self) -> None:
        """Judge that no clock outlives what it runs for."""
        machine = self.world.machine
        leasing, tenancies = machine.leasing, machine.tenancies
        owners: dict[TimerKind, Collection[object]] = {
            TimerKind.ACQUIRE: leasing.leases,
            TimerKind.CONFIRM: leasing.leases,
            TimerKind.GRACE: leasing.sessions,
            TimerKind.RETRY: leasing.rounds,
            TimerKind.BARRIER: tenancies.all,
            TimerKind.STUCK: tenancies.operations,
            TimerKind.PARK: leasing.drains,
            TimerKind.SILENCE: leasing.sessions,
            TimerKind.HOLD: leasing.rounds,
            TimerKind.TURN: leasing.turns,
            TimerKind.REMAINS: machine.remains.jobs,
            TimerKind.ENDING: machine.ending.asked,
        }
        for kind, owner in machine.timers._at:
            assert kind not in owners or owner in owners[kind], f"a {kind} clock of {owner}"

    def judge_empty(self) -> None:
        """Judge a world that everybody has left: nothing of them is remembered."""
        machine = self.world.machine
        leasing, tenancies = machine.leasing, machine.tenancies
        tables = {
            "sessions": leasing.sessions,
            "by_process": leasing.by_process,
            "by_job": leasing.by_job,
            "leases": leasing.leases,
            "rounds": leasing.rounds,
            "rounds that were set aside": leasing.aside,
            "tenancies in calls that do not come back": leasing.hung,
            "tenancies that are tried": leasing.tried,
            "faults": leasing.faults,
            "gangs": leasing.gangs,
            "todo": leasing.todo,
            "tenancies": tenancies.all,
            "tenancies by job": tenancies.by_job,
            "home": tenancies.home,
            "steps": tenancies.steps,
            "operations": tenancies.operations,
            "hooks": tenancies.hooks,
            "strangers": tenancies.strangers,
            "jobs of strangers": tenancies.stranger_jobs,
            "claims": tenancies.claims,
            "turns": leasing.turns,
            "idle ones": leasing.idle,
            "remains": machine.remains.jobs,
            "who was asked to end": machine.ending.asked,
            "signals": tenancies.signals,
            "touched": tenancies.touched,
            "stuck": machine.alarms.stuck,
            "ranks on other hosts": tenancies.abroad,
            "news for arbiters": tenancies.untold,
            "jobs that were moved for others": tenancies.arrived,
            "clients of other hosts": leasing.foreign,
            "jobs with clients on other hosts": [
                job for jobs in machine.remains.clients_abroad.values() for job in jobs
            ],
            "sessions that ended": leasing.gone,
            "leases elsewhere": machine.fronting.leases,
            "requests elsewhere": machine.fronting.open,
            # Which boot of another host was seen last is remembered as long as there is that host.
            "journal": [key for key in self.world.journal if key[0] != "host"],
        }
        for group, keys in tenancies.by_group.items():
            tables[f"tenancies on {group}"] = keys
        for group, arbiter in leasing.arbiters.items():
            tables[f"queue of {group}"] = arbiter.queue
            assert arbiter.chosen is None, f"{group} is free"
        left = {name: table for name, table in tables.items() if table}
        assert not left, f"remembered of those who are gone: {left}"
        assert machine.deadline is None, "nobody's time is waited for"
