"""What the daemon shows of itself: the maps behind `status` and `ps`."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from libtimeslice import __version__ as VERSION  # noqa: N812 - a constant
from libtimeslice.protocol import Message
from tsliced.core.alarms import Alarm
from tsliced.core.coordinator import Place
from tsliced.core.machine import Machine
from tsliced.core.model import (
    DeviceId,
    Drain,
    GroupConfig,
    GroupName,
    HostName,
    JobKey,
    RankState,
)
from tsliced.core.rank import Rank
from tsliced.core.remedies import out_of_loss, out_of_orphan
from tsliced.core.rounds import Round, RoundState
from tsliced.core.tenancy import Tenancy
from tsliced.host.devices import Device
from tsliced.host.memory import HOST, HostMemory
from tsliced.host.moves import Moves
from tsliced.host.processes import command_name
from tsliced.host.scan import Scanner
from tsliced.observe.moving import Moving

SCHEMA = 1
#: Waiters of a group, and jobs, that are listed one by one: an answer is one message.
MOST_SHOWN = 1000
#: Groups in the line of ``systemctl status``.
MOST_IN_A_LINE = 8

_ROUND_STATES = {
    RoundState.QUEUED: "reserved",
    RoundState.MOVING: "switching",
    RoundState.GRANTING: "switching",
    RoundState.HELD: "held",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """Figures of a group."""

    #: None: nobody holds it.
    held_s: float | None
    waiters: int
    oldest_wait_s: float
    #: ``blocked``, ``stuck``, ``lost`` or ``uncertain``; None: it goes to whoever is next.
    standstill: str | None


@dataclass(slots=True, kw_only=True)
class StatusPage:
    """Looks at the machine; changes nothing."""

    machine: Machine
    scanner: Scanner
    inventory: tuple[Device, ...]
    backend: str
    memory: HostMemory
    reserved_bytes: Callable[[], Mapping[str, int]]
    clock: Callable[[], float] = time.monotonic
    #: Where the other hosts stand.
    peers: Callable[[], list[Message]] = list
    moves: Moves = field(default_factory=Moves)
    moving: Moving = field(init=False)
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at = self.clock()
        self.moving = Moving(machine=self.machine, moves=self.moves)

    def status(self) -> Message:
        """Return the whole state of this host, for people and programs."""
        now = self.clock()
        machine = self.machine
        driver = self.inventory[0].driver_version if self.inventory else None
        return {
            "schema": SCHEMA,
            "host": machine.config.host,
            "version": VERSION,
            "pid": os.getpid(),
            "uptime_s": now - self._started_at,
            "driver": driver,
            "backend": self.backend,
            "groups": [self.group(group, now) for group in machine.config.groups],
            "jobs": self._all_jobs(now),
            "peers": self.other_hosts(),
            "sessions": len(machine.leasing.sessions),
            "memory": {
                "available_bytes": self.memory.host_available_bytes(),
                "reserved_bytes": self.reserved_bytes().get(HOST, 0),
            },
        }

    def ranks(self) -> list[Message]:
        """Return every rank of this host."""
        now = self.clock()
        return [
            self.rank(tenancy, rank, now)
            for tenancy in self.machine.tenancies.all.values()
            for rank in tenancy.participant.ranks.values()
        ]

    def other_hosts(self) -> list[Message]:
        """Return where each other host stands, and who says that it is dead."""
        dead = self.machine.hosts.links.dead
        return [{**peer, "dead_by": dead.get(peer["host"])} for peer in self.peers()]

    # --- groups -------------------------------------------------------------------------------

    def group(self, group: GroupConfig, now: float) -> Message:
        """Return who has a group, who waits for it, and what it stands still for.

        Of one that another host arbitrates only what is known here.
        """
        here = self.machine.config.host
        hosts = group.hosts or (here,)
        known = {"name": group.name, "hosts": list(hosts), "arbiter": hosts[0]}
        stands = self._arbitrated(group, now) if hosts[0] == here else self._elsewhere(hosts[0])
        devices = [self.device(device) for device in group.devices]
        move = self.moving.of_group(group.name, now)
        return {**known, "devices": devices, **stands, "move": move}

    def _elsewhere(self, arbiter: HostName) -> Message:
        """Return the same keys for a group of another arbiter, who has not told who holds it."""
        peer = next((peer for peer in self.peers() if peer["host"] == arbiter), None)
        reason = f"there is no link to {arbiter}" if peer is None else None
        if peer is not None and peer["state"] != "connected":
            reason = f"{arbiter} is {peer['state']}: {peer['reason'] or 'it just left'}"
        return {
            **dict.fromkeys(("holder", "lease_since_s", "phase", "token", "next", "drain")),
            "state": "elsewhere",
            "unasked": False,
            "resident": [],
            "waiters": None,
            "queue": [],
            "reason": reason,
        }

    def _arbitrated(self, group: GroupConfig, now: float) -> Message:
        leasing = self.machine.leasing
        arbiter = leasing.arbiters[group.name]
        chosen = leasing.rounds[arbiter.chosen] if arbiter.chosen is not None else None
        residents = self.machine.tenancies.residents(group.name)
        holder = chosen if chosen is not None and _held(chosen) else None
        lease = next(iter(holder.members.values()), None) if holder is not None else None
        since = lease.granted_at if lease is not None else holder.turn_began_at if holder else now
        state = "free" if chosen is None else _ROUND_STATES[chosen.state]
        reason: object = chosen.stalled if chosen is not None else None
        drain = leasing.drains.get(group.name)
        if (standstill := self._standstill(group, now)) is not None:
            state, reason = standstill
        elif drain is not None:
            left = chosen is not None or (drain.park and residents)
            state, reason = "draining" if left else "drained", f"drained by {drain.by}"
        waiting = self._waiters(group)
        return {
            "state": state,
            "holder": job_map(holder.job) if holder is not None else None,
            "lease_since_s": now - since if holder is not None else None,
            "phase": (lease.phase or None) if lease is not None else None,
            # It has a turn that it did not ask for.
            "unasked": holder is not None and holder.turn_s is not None,
            "token": _token(holder, group),
            "next": job_map(chosen.job) if chosen is not None and holder is None else None,
            "resident": [job_map(tenancy.key.job) for tenancy in residents],
            "waiters": len(waiting),
            "queue": [self._waiting(round_, now) for round_ in islice(waiting, MOST_SHOWN)],
            "drain": _drain_map(drain, now_unix=time.time()) if drain is not None else None,
            "reason": str(reason) if reason is not None else None,
        }

    def summary(self, group: GroupConfig, now: float) -> GroupSummary:
        """Return the figures of a group that this host arbitrates."""
        leasing = self.machine.leasing
        arbiter = leasing.arbiters[group.name]
        chosen = leasing.rounds[arbiter.chosen] if arbiter.chosen is not None else None
        held_s = None
        if chosen is not None and _held(chosen):
            began = [lease.granted_at for lease in chosen.members.values()]
            held_s = now - min(began, default=chosen.turn_began_at)
        waiters = self._waiters(group)
        standstill = self._standstill(group, now)
        return GroupSummary(
            held_s=held_s,
            waiters=len(waiters),
            oldest_wait_s=max((now - round_.asked_at for round_ in waiters), default=0.0),
            standstill=standstill[0] if standstill is not None else None,
        )

    def _waiters(self, group: GroupConfig) -> list[Round]:
        leasing = self.machine.leasing
        aside = (r for name in leasing.aside if group.name in (r := leasing.rounds[name]).groups)
        queue = leasing.arbiters[group.name].queue
        return [*map(leasing.rounds.__getitem__, queue), *aside]

    def _standstill(self, group: GroupConfig, now: float) -> tuple[str, object] | None:
        """Return why a group is given to nobody, if so: a state and the reason."""
        leasing, residents = self.machine.leasing, self.machine.tenancies.residents(group.name)
        blocked = next((t for t in residents if t.coordinator.place is Place.BLOCKED), None)
        if blocked is not None:
            return "blocked", leasing.explain_stop(blocked, now)
        if (alarm := self._alarm(group.name)) is not None:
            return "stuck", alarm.text(now)
        if (lost := next(filter(None, map(leasing.lost.get, group.devices)), None)) is not None:
            return "lost", f"{lost}; {out_of_loss()}"
        if (silence := leasing.silent.get(group.name)) is not None:
            # Whoever holds it has it still, as far as anybody knows; nobody else is let on.
            return "uncertain", silence
        return None

    def _alarm(self, group: GroupName) -> Alarm | None:
        """Return what does not come back and keeps a group from being given to anybody."""
        alarms, tenancies = self.machine.alarms.stuck.values(), self.machine.tenancies.all
        return next((a for a in alarms if group in tenancies[a.start.tenancy].reach), None)

    def _waiting(self, round_: Round, now: float) -> Message:
        phase = next((lease.phase for lease in round_.members.values()), "")
        return {
            "job": job_map(round_.job),
            "waited_s": now - round_.asked_at,
            "phase": phase or None,
            "ranks": round_.ranks,
            "arrived": len(round_.members),
        }

    def device(self, uuid: DeviceId) -> Message:
        """Return what is known of a device."""
        device = next((d for d in self.inventory if d.uuid == uuid), None)
        reading = self.scanner.readings.get(uuid)
        return {
            "uuid": uuid,
            "index": device.index if device is not None else -1,
            "name": device.name if device is not None else "unknown",
            "total_bytes": device.total_bytes if device is not None else 0,
            "used_bytes": reading.used_bytes if reading is not None else None,
            "utilization_pct": self.scanner.utilization.get(uuid),
            "problems": self._problems(uuid, device),
        }

    def _problems(self, uuid: DeviceId, device: Device | None) -> list[str]:
        loss = self.machine.leasing.lost.get(uuid)
        lost = [f"{loss}; {out_of_loss()}"] if loss is not None else []
        return [*lost, *(device.warnings() if device is not None else ())]

    # --- jobs ---------------------------------------------------------------------------------

    def _all_jobs(self, now: float) -> list[Message]:
        leasing, tenancies = self.machine.leasing, self.machine.tenancies
        rounds: defaultdict[JobKey, list[Round]] = defaultdict(list)
        for round_ in leasing.rounds.values():
            rounds[round_.job].append(round_)
        jobs = {*tenancies.by_job, *rounds, *leasing.faults}
        # Those with something on this host come first, should there be more than are shown.
        shown = sorted(jobs, key=lambda job: (job not in tenancies.by_job, job))[:MOST_SHOWN]
        return [self._job_in(job, rounds.get(job, []), now) for job in shown]

    def job(self, job: JobKey, now: float) -> Message:
        """Return where a job stands, and what it is held back for."""
        rounds = [r for r in self.machine.leasing.rounds.values() if r.job == job]
        return self._job_in(job, rounds, now)

    def _job_in(self, job: JobKey, rounds: list[Round], now: float) -> Message:
        leasing, tenancies = self.machine.leasing, self.machine.tenancies
        own, ranks = tenancies.tenancies_of(job), tenancies.ranks_of_job(job)
        parked = [rank for rank in ranks if rank.state is RankState.PARKED]
        held = [lease for r in rounds if _held(r) for lease in r.members.values()]
        stops = (stop for t in own if (stop := leasing.explain_stop(t, now)) is not None)
        fault = leasing.explain_fault(job, now) if job in leasing.faults else next(stops, None)
        orphaned = self.machine.remains.is_orphaned(job)
        return {
            "job": job_map(job),
            "state": _state_of(fault is not None, orphaned, rounds, own, bool(parked)),
            "groups": list(dict.fromkeys(group for t in own for group in t.key.groups)),
            "ranks": len(ranks),
            "device_bytes": sum(r.device_bytes for r in ranks if r.state is not RankState.PARKED),
            "parked_bytes": sum(r.parked_bytes for r in parked),
            "residue_bytes": sum(r.residue_bytes for r in parked),
            "parked_s": _parked_s(own, now),
            "held_s": max((now - lease.granted_at for lease in held), default=0.0),
            "waited_s": max((now - r.asked_at for r in rounds if not _held(r)), default=0.0),
            "switches": sum(tenancy.coordinator.moves for tenancy in own),
            "move": next(filter(None, (self.moving.of(t, now) for t in own)), None),
            # Who of a round has not asked yet is found by who has.
            "gathering": [
                {
                    "groups": list(r.groups),
                    "ranks": r.ranks,
                    "arrived": [leasing.sessions[s].process.pid for s in r.took_part],
                }
                for r in rounds
                if r.state is RoundState.GATHERING
            ],
            "orphaned": orphaned,
            "rank_lost": self.machine.remains.has_lost(job),
            "idle_s": self._idle_s(own, now),
            "standstill": self._standstill_of(job, own),
            "reason": str(fault) if fault is not None else self._remark(job, own, now),
            "way_out": fault.way_out if fault is not None else None,
        }

    def _standstill_of(self, job: JobKey, own: list[Tenancy]) -> str | None:
        """Return in a word what a job stands still for, the worst first."""
        if any(tenancy.coordinator.place is Place.BLOCKED for tenancy in own):
            return "blocked"
        if job in self.machine.leasing.faults:
            return "faulted"
        if any(tenancy.coordinator.pinned is not None for tenancy in own):
            return "pinned"
        return None

    def _idle_s(self, own: list[Tenancy], now: float) -> float | None:
        """Return for how long a job has been parked without asking for anything, if so."""
        idle = self.machine.leasing.idle
        return max((now - idle[t.key] for t in own if t.key in idle), default=None)

    def _remark(self, job: JobKey, own: list[Tenancy], now: float) -> str | None:
        """Say what is odd about a job that is not held back for anything."""
        if self.machine.remains.is_orphaned(job):
            return f"no client of it is left, and its processes live on; {out_of_orphan(job)}"
        if self.machine.remains.has_lost(job):
            return "a rank of it died, and it has asked for nothing since"
        if (idle_s := self._idle_s(own, now)) is not None:
            text = f"it is parked and has asked for nothing for {idle_s:.0f} s"
            return f"{text}; if it uses its devices without a lease, it is blocked"
        return None

    def rank(self, tenancy: Tenancy, rank: Rank, now: float) -> Message:
        """Return where a rank is, and what is being done to it."""
        process, operation = rank.id.process, rank.operation
        alarm = self.machine.alarms.stuck.get(operation.op) if operation is not None else None
        return {
            "job": job_map(tenancy.key.job),
            "host": rank.id.host,
            "pid": process.pid,
            "start_time": process.start_time,
            "name": command_name(process.pid) or "",
            "uid": tenancy.key.job.uid,
            "groups": list(tenancy.key.groups),
            "devices": sorted(rank.devices),
            "device_bytes": rank.device_bytes,
            "residue_bytes": rank.residue_bytes,
            "state": rank.state.value,
            "orphaned": self.machine.remains.is_orphaned(tenancy.key.job),
            "doing": operation.verb.value if operation is not None else None,
            "doing_s": now - operation.started_at if operation is not None else None,
            "progress": self.moving.of_rank(rank),
            "reason": str(alarm.reason) if alarm is not None else None,
        }


def summary(machine: Machine) -> str:
    """Return the state of this host in one line, for ``systemctl status``."""
    leasing, here = machine.leasing, machine.config.host
    devices = sum(len(group.devices) for group in machine.config.groups)
    groups = [group for group in machine.config.groups if (group.hosts or (here,))[0] == here]
    parts = []
    for group in groups[:MOST_IN_A_LINE]:
        arbiter = leasing.arbiters[group.name]
        chosen = leasing.rounds[arbiter.chosen] if arbiter.chosen is not None else None
        part = f"{group.name} free"
        if chosen is not None:
            part = f"{group.name} {_ROUND_STATES[chosen.state]} by job {chosen.job}"
        waiters = len(arbiter.queue)
        parts.append(f"{part}, {waiters} waiting" if waiters else part)
    if len(groups) > MOST_IN_A_LINE:
        parts.append(f"and {len(groups) - MOST_IN_A_LINE} more groups")
    return f"serving {devices} devices; {'; '.join(parts) or 'no groups'}"


def _held(round_: Round) -> bool:
    return round_.state is RoundState.HELD


def _parked_s(own: list[Tenancy], now: float) -> float | None:
    """Return for how long a job has been off its devices, if it has state that is parked."""
    moved_at = [
        tenancy.coordinator.began_at
        for tenancy in own
        if tenancy.coordinator.place is Place.OFF
        and any(state is RankState.PARKED for _, state in tenancy.ranks())
    ]
    return now - min(moved_at) if moved_at else None


def _drain_map(drain: Drain, *, now_unix: float) -> Message:
    return {"by": drain.by, "park": drain.park, "since_s": max(0.0, now_unix - drain.since_unix)}


def job_map(job: JobKey) -> Message:
    """Return a job's key as a map."""
    return {"cluster": job.cluster, "uid": job.uid, "id": job.id}


def _token(holder: Round | None, group: GroupConfig) -> int | None:
    if holder is None:
        return None
    return next((token.as_int() for name, token in holder.tokens if name == group.name), None)


def _state_of(
    faulted: bool, orphaned: bool, rounds: list[Round], own: list[Tenancy], parked: bool
) -> str:
    if faulted:
        return "faulted"
    if orphaned:
        return "orphaned"
    # A turn that nobody asked for says nothing of what the job wants.
    asked = [round_ for round_ in rounds if round_.turn_s is None]
    if any(_held(round_) for round_ in asked):
        return "held"
    if asked:
        return "waiting"
    if any(tenancy.resident for tenancy in own):
        return "resident"
    return "parked" if parked else "idle"
