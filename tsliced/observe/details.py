"""All that is known of one job, group, device, session, lease or host: the maps behind `show`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from libtimeslice.protocol import Message
from tsliced.core.barriers import awaited
from tsliced.core.machine import Machine
from tsliced.core.model import GroupName, JobKey, LeaseId, SessionId
from tsliced.core.remedies import Standstill
from tsliced.core.sessions import Lease, LeaseState, Session
from tsliced.core.tenancy import Tenancy
from tsliced.host.allocations import Allocation, Allocations
from tsliced.observe.status import StatusPage, job_map
from tsliced.qualifying import Qualifying


class NotFound(Exception):  # noqa: N818 - an answer
    """There is no such thing; the text says what there is."""

    def __init__(self, text: str, code: str = "not_found") -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True, kw_only=True)
class Details:
    """Looks at the machine; changes nothing."""

    machine: Machine
    status: StatusPage
    allocations: Allocations = field(default_factory=Allocations)
    qualifying: Qualifying | None = None
    clock: Callable[[], float] = time.monotonic

    def jobs(self) -> list[JobKey]:
        """Return the jobs that something is known of; whoever only asks questions is none."""
        leasing = self.machine.leasing
        clients = (s.job for s in leasing.sessions.values() if not s.tool)
        return list(dict.fromkeys((*self.machine.tenancies.by_job, *leasing.faults, *clients)))

    def show(self, kind: str, name: str) -> Message:
        """Return what is known of anything but a job. Raises `NotFound`."""
        match kind:
            case "group":
                return self._group(name)
            case "device":
                return self._device(name)
            case "session":
                return self._session_named(name)
            case "host":
                return self._host(name)
            case _:
                return self._lease_named(name)

    def _host(self, name: str) -> Message:
        peers = self.status.other_hosts()
        for peer in peers:
            if peer["host"] == name:
                groups = [g.name for g in self.machine.config.groups if name in g.hosts]
                return {"kind": "host", **peer, "groups": groups}
        if name == self.machine.config.host:
            raise NotFound(f"{name} is this host: see tslicectl status")
        known = ", ".join(peer["host"] for peer in peers) or "none"
        raise NotFound(f"there is no link to a host {name!r}; there are: {known}")

    # --- jobs ---------------------------------------------------------------------------------

    def job(self, job: JobKey) -> Message:
        """Return what is known of a job."""
        now, leasing = self.clock(), self.machine.leasing
        tenancies = self.machine.tenancies.tenancies_of(job)
        sessions = [session for session in leasing.sessions_of(job) if not session.tool]
        return {
            "kind": "job",
            "name": str(job),
            **self.status.job(job, now),
            "standstills": self.standstills(job),
            "qualification": self.qualifying.shown(job) if self.qualifying is not None else None,
            "tenancies": [self._tenancy(tenancy, now) for tenancy in tenancies],
            "rank_list": [
                self.status.rank(tenancy, rank, now)
                for tenancy in tenancies
                for rank in tenancy.participant.ranks.values()
            ],
            "leases": [self._lease(lease, now) for s in sessions for lease in s.leases.values()],
            "sessions": [self._session(session) for session in sessions],
            "allocations": [_allocation(each) for each in self.allocations.of_job(job.id, job.uid)],
        }

    def standstills(self, job: JobKey) -> list[Message]:
        """Return what a job does not go on for, and what helps."""
        now, leasing = self.clock(), self.machine.leasing
        found = [
            (self._place(tenancy), tenancy.key.groups, stop)
            for tenancy in self.machine.tenancies.tenancies_of(job)
            if (stop := leasing.explain_stop(tenancy, now)) is not None
        ]
        if job in leasing.faults:
            found.insert(0, ("faulted", (), leasing.explain_fault(job, now)))
        found += [
            (
                "stuck",
                alarm.start.tenancy.groups,
                Standstill(alarm.reason, now - alarm.started_at, alarm.way_out),
            )
            for alarm in self.machine.alarms.stuck.values()
            if alarm.start.tenancy.job == job
        ]
        return [
            {
                "state": state,
                "groups": list(groups),
                "cause": stop.reason.cause.value,
                "reason": str(stop.reason),
                "pid": stop.reason.rank.process.pid if stop.reason.rank else None,
                "since_s": stop.seconds,
                "way_out": stop.way_out,
            }
            for state, groups, stop in found
        ]

    def _tenancy(self, tenancy: Tenancy, now: float) -> Message:
        coordinator = tenancy.coordinator
        return {
            "job": job_map(tenancy.key.job),
            "groups": list(tenancy.key.groups),
            "beyond": list(tenancy.beyond),
            "state": self._place(tenancy),
            "resident": tenancy.resident,
            "moving_s": None if coordinator.stable else now - coordinator.began_at,
            "waiting": self._waiting(tenancy, now),
            "switches": coordinator.moves,
            "ranks": len(tenancy.participant.ranks),
        }

    def _waiting(self, tenancy: Tenancy, now: float) -> Message | None:
        """Return whom a move waits for just now, and for how long it has."""
        missing = awaited(tenancy, now)
        if not missing:
            return None
        return {
            "step": tenancy.coordinator.place.value,
            "waiting_s": now - tenancy.coordinator.ordered_at,
            "missing": [
                {
                    "host": host.host,
                    "step": host.step,
                    "operations": [
                        {"pid": rank.process.pid, "verb": verb.value, "seconds": seconds}
                        for rank, verb, seconds in host.operations
                    ],
                    "text": str(host),
                }
                for host in missing
            ],
        }

    def _place(self, tenancy: Tenancy) -> str:
        coordinator = tenancy.coordinator
        return "pinned" if coordinator.pinned is not None else coordinator.place.value

    # --- groups and devices -------------------------------------------------------------------

    def _group(self, name: str) -> Message:
        now, machine = self.clock(), self.machine
        group = next((group for group in machine.config.groups if group.name == name), None)
        if group is None:
            known = ", ".join(group.name for group in machine.config.groups) or "none"
            raise NotFound(f"there is no group {name!r}; there are: {known}", "unknown_group")
        tenancies = [machine.tenancies.all[key] for key in machine.tenancies.by_group[group.name]]
        return {
            "kind": "group",
            **self.status.group(group, now),
            "standstills": [
                {**stop, "job": job_map(job)}
                for job in dict.fromkeys(tenancy.key.job for tenancy in tenancies)
                for stop in self.standstills(job)
                if not stop["groups"] or name in stop["groups"]
            ],
            "tenancies": [self._tenancy(tenancy, now) for tenancy in tenancies],
            "rank_list": [
                self.status.rank(tenancy, rank, now)
                for tenancy in tenancies
                for rank in tenancy.participant.ranks.values()
            ],
        }

    def group_of(self, device: str) -> GroupName:
        """Return the group of a device, by UUID or index. Raises `NotFound`."""
        found = next((d for d in self.status.inventory if device in (d.uuid, str(d.index))), None)
        uuid = found.uuid if found is not None else device
        for group in self.machine.config.groups:
            if uuid in group.devices:
                return group.name
        known = ", ".join(f"{d.index} ({d.uuid})" for d in self.status.inventory) or "none"
        why = "in no group" if found is not None else "not here"
        raise NotFound(f"device {device!r} is {why}; there are: {known}")

    def _device(self, name: str) -> Message:
        group_name = self.group_of(name)
        group = next(g for g in self.machine.config.groups if g.name == group_name)
        devices = (self.status.device(uuid) for uuid in group.devices)
        device = next(d for d in devices if name in (d["uuid"], str(d["index"])))
        shown = self._group(group_name)
        return {
            "kind": "device",
            **device,
            "group": shown,
            "rank_list": [r for r in shown["rank_list"] if device["uuid"] in r["devices"]],
        }

    # --- sessions and leases ------------------------------------------------------------------

    def _session_named(self, name: str) -> Message:
        session = self.machine.leasing.sessions.get(SessionId(name))
        if session is None:
            raise NotFound(f"there is no session {name!r}; tslicectl show job lists a job's")
        now = self.clock()
        leases = [self._lease(lease, now) for lease in session.leases.values()]
        return {"kind": "session", **self._session(session), "leases": leases}

    def _session(self, session: Session) -> Message:
        return {
            "session": session.id,
            "job": job_map(session.job),
            "pid": session.process.pid,
            "connected": session.connected,
            "agent": session.agent,
            "hooks": session.hooks,
            "groups": list(session.groups),
        }

    def _lease_named(self, name: str) -> Message:
        lease = self.machine.leasing.leases.get(LeaseId(name))
        if lease is None:
            raise NotFound(f"there is no lease {name!r}, or it is over; see tslicectl show job")
        return {"kind": "lease", **self._lease(lease, self.clock())}

    def _lease(self, lease: Lease, now: float) -> Message:
        leasing = self.machine.leasing
        round_, session = leasing.rounds[lease.round], leasing.sessions[lease.session]
        held = lease.state is LeaseState.HELD
        return {
            "lease": lease.id,
            "job": job_map(session.job),
            "session": session.id,
            "pid": session.process.pid,
            "groups": list(lease.groups),
            "phase": lease.phase or None,
            "state": round_.state.value,
            "since_s": now - (lease.granted_at if held else lease.asked_at),
            "tokens": {group: token.as_int() for group, token in lease.tokens},
            "ranks": lease.ranks,
            "arrived": len(round_.members),
            "waiters": leasing.waiters_of(lease) if held else None,
            "reason": str(round_.stalled) if round_.stalled is not None and not held else None,
        }


def _allocation(allocation: Allocation) -> Message:
    """Return what Slurm said of a job, or of one component of it."""
    return {
        "slurm_job": allocation.id,
        "nodes": list(allocation.nodes),
        "account": allocation.account,
        "tickets": allocation.tickets,
        "ends_at_unix": allocation.ends_at_unix,
        "ending": allocation.ending,
    }
