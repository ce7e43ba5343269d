"""Another configuration for a machine that runs.

Rules:

* Nothing in use changes under its users: a group that a round has, waits for or gathers for, or
  that a job's state belongs to, keeps its devices, and its place among the others that are in use.
* It is taken as a whole or not at all.
* Clocks that run already run to the instant that was set for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tsliced.core.arbiter import Arbiter
from tsliced.core.model import CoreLimits, GroupConfig, GroupName, HostName
from tsliced.core.policy import FairnessBounds, Fifo

if TYPE_CHECKING:
    from tsliced.core.events import Reconfigured
    from tsliced.core.machine import Machine, MachineConfig


def bounds_of(limits: CoreLimits) -> FairnessBounds:
    """Return the part of the limits that is about fairness."""
    return FairnessBounds(max_passed_over=limits.max_passed_over, max_wait_s=limits.max_wait_s)


def arbiters_of(
    config: MachineConfig, known: Mapping[GroupName, Arbiter]
) -> dict[GroupName, Arbiter]:
    """Return the arbiters of the groups of this host: those that are `known`, and new ones."""
    bounds = bounds_of(config.limits)
    here = (group.name for group in config.groups if group.arbiter(config.host) == config.host)
    return {
        name: known.get(name)
        or Arbiter(name=name, policy=config.policies.get(name, Fifo()), bounds=bounds)
        for name in here
    }


def longest_holds(config: MachineConfig) -> dict[GroupName, float]:
    """Return how long each group may be held while others wait, for those that have a limit."""
    limits = ((g.name, g.max_hold_s or config.limits.max_hold_s) for g in config.groups)
    return {name: limit for name, limit in limits if limit is not None}


def hosts_of(config: MachineConfig) -> dict[GroupName, tuple[HostName, ...]]:
    """Return the hosts of each group, its arbiter first."""
    return {group.name: group.hosts or (config.host,) for group in config.groups}


def objections(machine: Machine, groups: tuple[GroupConfig, ...]) -> Iterator[str]:
    """Yield what stands in the way of having `groups` instead of those that are there."""
    new = {group.name: group for group in groups}
    staying: list[GroupName] = []
    for group in machine.config.groups:
        user = _user_of(machine, group.name)
        if user is None:
            continue
        if group.name not in new:
            yield f"group {group.name} cannot be removed: {user}"
        elif set(new[group.name].devices) != set(group.devices):
            yield f"group {group.name} cannot get other devices: {user}"
        elif new[group.name].hosts != group.hosts:
            yield f"group {group.name} cannot get other hosts: {user}"
        else:
            staying.append(group.name)
    if staying != [name for name in new if name in staying]:
        yield f"the order of {', '.join(staying)} cannot change: all of them are in use"


def _user_of(machine: Machine, group: GroupName) -> str | None:
    """Say who uses a group, if anybody does."""
    for round_ in machine.leasing.rounds.values():
        if group in round_.groups:
            return f"job {round_.job} has it or waits for it"
    for lease in machine.fronting.leases.values():
        if group in lease.groups:
            return f"job {machine.leasing.sessions[lease.session].job} has it"
    key = next(iter(machine.tenancies.by_group[group]), None)
    return None if key is None else f"state of job {key.job} belongs to it"


def reconfigure(machine: Machine, event: Reconfigured) -> None:
    """Take over another configuration, to which there are no objections."""
    assert not any(objections(machine, event.groups)), "nothing in use changes under its users"
    leasing, tenancies = machine.leasing, machine.tenancies
    machine.config = replace(machine.config, groups=event.groups, limits=event.limits)
    arbiters = arbiters_of(machine.config, leasing.arbiters)
    for arbiter in arbiters.values():
        arbiter.bounds = bounds_of(event.limits)
    leasing.arbiters = arbiters
    tenancies.by_group = {g.name: tenancies.by_group.get(g.name, {}) for g in event.groups}
    tenancies.hosts_of = hosts_of(machine.config)
    tenancies.group_of = {device: g.name for g in event.groups for device in g.devices}
    tenancies.order_of = {group.name: place for place, group in enumerate(event.groups)}
    machine.elsewhere = frozenset(tenancies.order_of) - arbiters.keys()
    machine.hosts.look_for_silence()
    leasing.limits = tenancies.limits = machine.alarms.limits = event.limits
    machine.remains.limits = event.limits
    leasing.max_hold_s = longest_holds(machine.config)
    for group in leasing.drains.keys() - arbiters.keys():
        leasing.set_drain(group, None)
        del leasing.vacated[group]
    for tenancy in tenancies.all.values():
        tenancy.coordinator.limits = tenancy.participant.limits = event.limits
    for session_id, groups in event.permitted:
        session = leasing.sessions.get(session_id)
        if session is not None and session.groups != groups:
            session.groups = groups
            leasing.out.append(session.record())
