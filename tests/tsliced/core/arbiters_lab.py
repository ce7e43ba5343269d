"""What tests of leases over several arbiters have in common: hosts, jobs, and what must hold."""

from __future__ import annotations

from collections.abc import Iterable

from hosts_lab import N1, N2, N3, Lab, device, held, session_of
from simulated import Process, job
from world import LIMITS

from tsliced.core.messages import PeerMessage
from tsliced.core.model import (
    CoreLimits,
    DeviceId,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankState,
    TenancyKey,
    Token,
)
from tsliced.core.rounds import Round, RoundState

#: Groups of one host each, which arbitrates it.
A, B, C = GroupName("a"), GroupName("b"), GroupName("c")
HOST_OF = {A: N1, B: N2, C: N3}


def two(limits: CoreLimits = LIMITS) -> Lab:
    """Return two hosts, each with a group of its own."""
    return Lab({A: (N1,), B: (N2,)}, limits)


def three(limits: CoreLimits = LIMITS) -> Lab:
    """Return three hosts, each with a group of its own."""
    return Lab({A: (N1,), B: (N2,), C: (N3,)}, limits)


def ask(lab: Lab, name: str, host: HostName, *groups: GroupName) -> LeaseId:
    """Let a new client of a job ask for groups from a host."""
    lease = lab[host].acquire(lab[host].session(job(name)), *groups)
    lab.run()
    return lease


def again(lab: Lab, lease: LeaseId, host: HostName, *groups: GroupName) -> LeaseId:
    """Let the client that once asked for a lease ask for groups."""
    other = lab[host].acquire(session_of(lease), *groups)
    lab.run()
    return other


def give_back(lab: Lab, lease: LeaseId, host: HostName) -> None:
    """Let a client release its lease."""
    lab[host].release(lease)
    lab.run()


def come_up(lab: Lab, name: str, *groups: GroupName, host: HostName | None = None) -> ProcessId:
    """Let a job that holds groups make a context on a host's devices, and the daemon see it."""
    at = HOST_OF[groups[0]] if host is None else host
    rank = lab[at].context(job(name), *(device(at, group) for group in groups))
    lab[at].processes[rank].lawful = True
    lab[at].look()
    lab.run()
    return rank


def hold(
    lab: Lab, name: str, host: HostName, *groups: GroupName
) -> tuple[LeaseId, list[ProcessId]]:
    """Let a job acquire groups from a host, and come up with a rank on each of them."""
    lease = ask(lab, name, host, *groups)
    assert held(lab, lease, host)
    return lease, [come_up(lab, name, group) for group in groups]


def until(lab: Lab, kind: type[PeerMessage]) -> None:
    """Let things happen until a message of a kind arrives."""
    begun = len(lab.said)
    while not any(isinstance(message, kind) for _, _, message in lab.said[begun:]):
        assert lab.step(), f"no {kind.__name__} was ever said"


def said(lab: Lab, kind: type[PeerMessage]) -> list[PeerMessage]:
    """Return all messages of a kind that have arrived."""
    return [message for _, _, message in lab.said if isinstance(message, kind)]


def processes(lab: Lab) -> dict[ProcessId, tuple[HostName, Process]]:
    """Return all simulated processes with device state, and where each is."""
    return {p.id: (host, p) for host, world in lab.worlds.items() for p in world.processes.values()}


def states(lab: Lab, ranks: Iterable[ProcessId]) -> list[RankState]:
    """Return where some ranks are, by the devices."""
    there = processes(lab)
    return [there[rank][1].state for rank in ranks]


def holders(lab: Lab) -> dict[GroupName, set[JobKey]]:
    """Return whose clients believe to hold each group."""
    found: dict[GroupName, set[JobKey]] = {}
    for world in lab.worlds.values():
        for client in world.clients.values():
            for tokens in client.held.values():
                for group, _ in tokens:
                    found.setdefault(group, set()).add(client.job)
    return found


def assert_safe(lab: Lab) -> None:
    """Assert that nobody is beside anybody else, on devices and by what clients believe."""
    for group, jobs in holders(lab).items():
        assert len(jobs) == 1, f"{jobs} hold {group}"
    on: dict[DeviceId, set[JobKey | None]] = {}
    for _, process in processes(lab).values():
        for at in process.on:
            on.setdefault(at, set()).add(process.job)
    for at, jobs_on in on.items():
        assert len(jobs_on) == 1, f"{jobs_on} are on {at}"


def assert_at_rest(lab: Lab) -> None:
    """Assert that nothing is under way, nothing is left over, and all hosts agree on who moves."""
    assert_safe(lab)
    _assert_nothing_pends(lab)
    _assert_reservations_agree(lab)
    _assert_leads_agree(lab)
    _assert_holders_run(lab)


def _assert_nothing_pends(lab: Lab) -> None:
    for host, world in lab.worlds.items():
        leads, tenancies = world.machine.leads, world.machine.tenancies
        assert not leads.waiting, (host, leads.unwelcome, leads.asked, leads.arriving)
        assert not leads.handovers, (host, leads.handovers)
        assert not leads.due, (host, leads.due)
        for key, tenancy in tenancies.all.items():
            stable = not tenancy.led_here or tenancy.coordinator.stable
            assert stable, (host, key, tenancy.coordinator.place)


def _assert_reservations_agree(lab: Lab) -> None:
    """Assert that for each round that has or wants a group elsewhere one stands for it there."""
    wanted = {
        (host, number, group): (there.arbiter, there.token if there.committed else None)
        for host, world in lab.worlds.items()
        for number, round_ in world.machine.leasing.rounds.items()
        for group, there in round_.elsewhere.items()
    }
    standing = {
        borrower: (host, _kept_of(world.machine.leasing.rounds[number]))
        for host, world in lab.worlds.items()
        for borrower, number in world.machine.leasing.borrowers.items()
    }
    assert standing == wanted
    for host, world in lab.worlds.items():
        borrowed = {
            (host, number, group) for group, number in world.machine.leasing.borrowed.items()
        }
        kept = {key for key, (_, token) in wanted.items() if key[0] == host and token is not None}
        assert borrowed == kept, host


def _kept_of(round_: Round) -> Token | None:
    return round_.tokens[0][1] if round_.state is RoundState.HELD else None


def _assert_leads_agree(lab: Lab) -> None:
    """Assert that each rank is moved by one host, which knows it, as do the arbiters."""
    for host, world in lab.worlds.items():
        for process in world.machine.tenancies.home:
            _assert_known(lab, host, process)
        for group, guests in world.machine.tenancies.guests.items():
            for rank, guest in guests.items():
                there = lab[rank.host].machine.tenancies
                assert rank.process in there.home, f"{host} has a guest {rank} on {group}: a ghost"
                at = there.all[there.home[rank.process]]
                assert guest.lead == at.lead, f"{host} takes {guest.lead} to move {rank}"
                known = at.participant.ranks[rank.process].state
                assert guest.state.holds_device or not known.holds_device, (host, rank)
        for rank, key in world.machine.tenancies.abroad.items():
            home = lab[rank.host].machine.tenancies.home
            assert rank.process in home, f"{host} moves a ghost {rank} of {key}"


def _assert_known(lab: Lab, host: HostName, process: ProcessId) -> None:
    """Assert that the arbiters of the groups that a rank is on know that it is."""
    tenancies = lab[host].machine.tenancies
    tenancy = tenancies.all[tenancies.home[process]]
    rank = tenancy.participant.ranks[process]
    assert rank.state is lab[host].processes[process].state, f"{process} is not where {host} says"
    if tenancy.lead != host:
        lead = lab[tenancy.lead].machine.tenancies
        assert rank.id in lead.abroad, f"{tenancy.lead} knows nothing of {rank.id}"
        term = lead.all[lead.abroad[rank.id]].coordinator.stamp.term
        assert term >= tenancy.coordinator.stamp.term, f"{host} refuses what {tenancy.lead} orders"
    for group in tenancies._groups_of(rank.devices):
        arbiter = tenancies.arbiter_of(group)
        if arbiter not in (host, tenancy.lead):
            guests = lab[arbiter].machine.tenancies.guests.get(group, {})
            assert rank.id in guests, f"{arbiter} knows of no {rank.id} on {group}"


def _assert_holders_run(lab: Lab) -> None:
    for group, (owner,) in ((group, tuple(jobs)) for group, jobs in holders(lab).items()):
        for host, process in processes(lab).values():
            if process.job == owner and device(host, group) in process.devices:
                assert process.state is RankState.RUNNING, f"{process} does not run on {group}"


def leads(lab: Lab, host: HostName, name: str = "a") -> dict[tuple[GroupName, ...], HostName]:
    """Return who moves each tenancy of a job, as far as a host knows."""
    known = lab[host].machine.tenancies.tenancies_of(job(name))
    return {tenancy.key.groups: tenancy.lead for tenancy in known}


def key(*groups: GroupName, name: str = "a") -> TenancyKey:
    return TenancyKey(job(name), groups)
