"""Tenancies of processes that belong to no known job.

Rules:

* A stranger on a group's devices is noted once. It is left alone, unless strangers are to be
  frozen (`freeze`): then it is a job of its own, which leaves like any other when somebody is let
  on.
* When it turns out whose it is (its job's client says hello, or it is registered), it becomes a
  rank of that job, as soon as neither of them is being moved.

Which job stands for a stranger is on record: after a restart it may be parked, and would wait for
ever for a turn that nobody asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tsliced.core.actions import FreeMemory, StrangerRecord, TenancyEndedRecord
from tsliced.core.coordinator import Place
from tsliced.core.model import FoundRank, Goal, GroupName, JobKey, ProcessId, RankState
from tsliced.core.signals import Effect, Evicted
from tsliced.core.tenancies import Tenancies
from tsliced.core.tenancy import Tenancy


@dataclass(slots=True, kw_only=True)
class Inhabitants(Tenancies):
    """All tenancies, those of strangers among them."""

    cluster: str = ""
    #: Strangers become jobs of their own.
    freeze: bool = False
    #: Strangers no longer: the job that each turned out to be of.
    claims: dict[ProcessId, JobKey] = field(default_factory=dict)

    def put(self, found: FoundRank, groups: tuple[GroupName, ...] = ()) -> list[Effect]:
        """Take in a process that was seen on devices, or registered for `groups`."""
        key = self.home.get(found.process)
        out: list[Effect] = []
        if key is not None:
            if found.job is not None:
                self.claim(found.process, found.job)
        elif found.job is None and self.freeze and self._groups_of(found.devices):
            job = self._job_for(found)
            self.stranger_jobs[job] = found.process
            out += [StrangerRecord(job=job, process=found.process), *self.note_stranger(found)]
            found = replace(found, job=job)
        return [*out, *Tenancies.put(self, found, groups)]

    def _job_for(self, found: FoundRank) -> JobKey:
        """Return the key of the job that stands for a stranger."""
        name = f"stranger-{found.process.pid}"
        if len(self.hosts_of_all(self._groups_of(found.devices))) > 1:
            # A process of another host may have the same number.
            name = f"{name}-{self.host}"
        return JobKey(self.cluster, found.uid, name)

    def claim(self, process: ProcessId, job: JobKey) -> None:
        """Know whose a process is that was taken for a stranger."""
        key = self.home.get(process)
        if key is not None and key.job in self.stranger_jobs and key.job != job:
            self.claims[process] = job

    def settle_claims(self) -> list[Effect]:
        """Let those that are strangers no longer be ranks of their jobs, where nothing moves."""
        out: list[Effect] = []
        for process, job in list(self.claims.items()):
            key = self.home.get(process)
            if key is None or key.job not in self.stranger_jobs:
                del self.claims[process]
            elif self._may_adopt(process, self.all[key], job):
                del self.claims[process]
                out += self._adopt(process, self.all[key], job)
        return out

    def _may_adopt(self, process: ProcessId, old: Tenancy, job: JobKey) -> bool:
        """Whether nothing moves of what a process leaves, and of what it becomes a part of."""
        on = self._groups_of(old.participant.ranks[process].devices)
        own = self.tenancies_of(job)
        concerned = [old, *(tenancy for tenancy in own if not on.isdisjoint(tenancy.reach))]
        at_rest, stable = (Place.ON, Place.OFF), (Goal.ON, Goal.OFF)
        return all(
            # Of what another host moves only its latest order is known.
            (tenancy.led_here or tenancy.coordinator.goal in stable)
            and tenancy.coordinator.place in at_rest
            and not tenancy.participant.busy
            for tenancy in concerned
        )

    def _adopt(self, process: ProcessId, old: Tenancy, job: JobKey) -> list[Effect]:
        rank = old.participant.ranks[process]
        del self.home[process]
        self._forget(old)
        out: list[Effect] = [
            TenancyEndedRecord(tenancy=old.key),
            # Whatever comes next reserves anew.
            FreeMemory(tenancy=old.key, host=True, device=True),
            *self._forget_stranger(old.key.job),
        ]
        key = self._home_for(job, self._groups_of(rank.devices))
        tenancy = self.all[key]
        tenancy.participant.ranks[process] = rank
        self._settle_in(process, key)
        self.tell_arbiters(tenancy)
        if rank.state is RankState.PARKED and tenancy.coordinator.place is Place.ON:
            # Its job may run there, but not all of it: who holds gets it back.
            tenancy.coordinator.place, tenancy.coordinator.goal = Place.OFF, Goal.OFF
            self.signals.append(Evicted(tenancy=key))
        return [*out, tenancy.coordinator.record(), rank.record(key)]

    def drop_unused(self, job: JobKey, *, abandoned: bool) -> list[Effect]:
        """Forget a job's tenancies that have no ranks and are off, and a stranger that is gone."""
        out = Tenancies.drop_unused(self, job, abandoned=abandoned)
        if job in self.stranger_jobs and job not in self.by_job:
            out += self._forget_stranger(job)
        return out

    def _forget_stranger(self, job: JobKey) -> list[Effect]:
        del self.stranger_jobs[job]
        return [StrangerRecord(job=job, process=None)]
