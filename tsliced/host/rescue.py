"""Bringing back what a daemon that is gone left frozen or parked, from its journal and the driver.

Rules:

* The driver is asked where a rank is, whatever the journal says. Who is asked waits for a worker of
  the daemon that is still in a call on that rank.
* All ranks of a job are restored before any of them is thawed: one that runs while its peer does
  not spins in a collective for ever.
* A restore that finds too little device memory is lost for ever, so there is none without a look at
  the devices by NVML. What does not fit is left as it is.
* What was done is written back, for the daemon that comes next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tsliced.core.actions import LeaseRecord, RankRecord, Record, SessionRecord, TenancyRecord
from tsliced.core.model import (
    DeviceId,
    Goal,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    TenancyKey,
    Verb,
)
from tsliced.core.recovery import rank_of
from tsliced.host.backends.base import Backend
from tsliced.host.devices import DeviceReading, DevicesError
from tsliced.host.memory import DeviceLedger, Shortage
from tsliced.host.processes import identify, is_alive
from tsliced.host.procfs import read_status_field


class Eye(Protocol):
    """What looks at the devices: `Devices`."""

    async def observe(self, uuids: Sequence[DeviceId]) -> dict[DeviceId, DeviceReading]:
        """Read some devices. Raises `DevicesError`."""
        ...


@dataclass(slots=True, kw_only=True)
class Patient:
    """A process to be brought back."""

    rank: RankId
    #: None: named by its pid, and not in the journal.
    record: RankRecord | None
    #: Device memory that a restore of it takes, at most.
    needs: tuple[tuple[DeviceId, int], ...]
    #: As the driver said at first; None: it could not be asked, or the process is gone.
    was: RankState | None = None
    now: RankState | None = None
    #: Why it is left as it is; None: nothing is left to do.
    reason: str | None = None

    @property
    def tenancy(self) -> TenancyKey | None:
        """Return the tenancy that the journal has it in."""
        return self.record.tenancy if self.record is not None else None


@dataclass(slots=True, kw_only=True)
class Case:
    """One job, whose ranks are brought back together; None: processes that were named by pid."""

    job: JobKey | None
    patients: list[Patient]


def cases_in(records: Iterable[Record]) -> list[Case]:
    """Return the jobs with ranks that live: holders first, then those who wait, then the rest."""
    ranks: dict[JobKey, list[Patient]] = {}
    sessions: dict[str, JobKey] = {}
    places: dict[JobKey, tuple[bool, int]] = {}
    for record in records:
        match record:
            case SessionRecord(session=session, job=job):
                sessions[session] = job
            case RankRecord() if is_alive(record.rank.process):
                needs = rank_of(record).needs()
                patient = Patient(rank=record.rank, record=record, needs=needs)
                ranks.setdefault(record.tenancy.job, []).append(patient)
            case LeaseRecord() if record.session in sessions:
                # Leases come behind the sessions that they refer to.
                job, place = sessions[record.session], (not record.tokens, record.place)
                places[job] = min(place, places.get(job, place))
            case _:
                pass
    order = sorted(ranks, key=lambda job: places.get(job, (True, 1 << 62)))
    return [Case(job=job, patients=ranks[job]) for job in order]


def case_of(pids: Iterable[int], host: HostName, devices: Iterable[DeviceId]) -> Case:
    """Return processes that were named by their pids, of which nothing else is known.

    A snapshot lies in its process's own memory, so what a restore needs is at most that; on which
    devices is not known, so each of them must have room. Raises `LookupError` for a pid of nobody.
    """
    everywhere = tuple(devices)
    patients = []
    for pid in pids:
        process = identify(pid)
        if process is None:
            raise LookupError(f"there is no process {pid}")
        most = _anonymous_bytes(process)
        needs = tuple((device, most) for device in everywhere)
        patients.append(Patient(rank=RankId(host, process), record=None, needs=needs))
    return Case(job=None, patients=patients)


def _anonymous_bytes(process: ProcessId) -> int:
    words = read_status_field(process.pid, "RssAnon")
    return int(words[0]) * 1024 if words else 0


@dataclass(slots=True, kw_only=True)
class Rescue:
    """Carries a rescue out. `eye` None: restores are made without a look at the devices."""

    #: All that the journal has.
    records: Sequence[Record]
    backend: Backend
    eye: Eye | None
    ledger: DeviceLedger
    #: To ask one rank, which includes the wait for a worker that is still in a call on it.
    query_limit_s: float
    #: Takes what was done for good, to be written down.
    keep: Callable[[Sequence[Record]], None]

    async def examine(self, case: Case) -> None:
        """Ask the driver where each rank of a job is."""
        if case.job is not None:
            for patient in case.patients:
                self.backend.belongs(patient.rank.process, case.job)
        await asyncio.gather(*map(self._ask, case.patients))

    async def treat(self, case: Case) -> None:
        """Bring a job back, as far as it can be; `examine` it first."""
        if all(patient.was is RankState.RUNNING for patient in case.patients):
            return
        if (obstacle := self._obstacle(case)) is not None:
            self._leave(case, obstacle)
            return
        parked = [p for p in case.patients if p.was is RankState.PARKED]
        if parked and (shortage := await self._shortage(case, parked)) is not None:
            self._leave(case, shortage)
            return
        for patient in parked:
            await self._do(patient, Verb.RESTORE)
            if patient.reason is not None:
                text = f"rank {patient.rank.process.pid} of this job could not be restored"
                self._leave(case, text)
                return
        for patient in case.patients:
            if patient.now is RankState.FROZEN:
                await self._do(patient, Verb.THAW)
        self._write_back(case)

    def _obstacle(self, case: Case) -> str | None:
        """Say why a job cannot be brought back as a whole, if so."""
        for patient in case.patients:
            pid = patient.rank.process.pid
            if patient.was is RankState.FAILED:
                return f"the device context of process {pid} is broken for good: end the job"
            if patient.was in (None, RankState.UNKNOWN):
                return f"where process {pid} is cannot be told: {patient.reason}"
        return None

    def _leave(self, case: Case, text: str) -> None:
        for patient in case.patients:
            if patient.now is not RankState.RUNNING and patient.reason is None:
                patient.reason = text

    async def _ask(self, patient: Patient) -> None:
        asking = asyncio.create_task(self.backend.state(patient.rank), name="ask")
        # Not cut off: the answer to it must not be taken for that to another question.
        if not (await asyncio.wait({asking}, timeout=self.query_limit_s))[0]:
            patient.reason = (
                f"no answer within {self.query_limit_s:g} s; a call of an earlier worker, or of a "
                "peer of the process, may still be in flight"
            )
            return
        outcome = asking.result()
        patient.was = patient.now = outcome.observed
        if outcome.failure is not None:
            patient.reason = str(outcome.failure)

    async def _shortage(self, case: Case, parked: Sequence[Patient]) -> str | None:
        """Say what is missing for the return of a job, if anything."""
        if self.eye is None:
            return None
        needs: dict[DeviceId, int] = {}
        for patient in parked:
            for device, need in patient.needs:
                needs[device] = needs.get(device, 0) + need
        try:
            readings = await self.eye.observe(list(needs))
        except DevicesError as exc:
            return f"the devices cannot be looked at: {exc}"
        # Nothing is promised beyond this job: the next one is measured by what is free then.
        answer = self.ledger.reserve(case.job, needs, readings)
        self.ledger.release(case.job)
        return f"device memory: {answer}" if isinstance(answer, Shortage) else None

    async def _do(self, patient: Patient, verb: Verb) -> None:
        outcome = await self.backend.run(verb, patient.rank, None)
        patient.now = outcome.observed
        failure: Reason | None = outcome.failure
        if failure is not None:
            patient.reason = str(failure)

    def _write_back(self, case: Case) -> None:
        """Let the next daemon know who runs, and that it has not left its devices."""
        records: list[Record] = [
            replace(patient.record, state=RankState.RUNNING, verb=None, residue=())
            for patient in case.patients
            if patient.record is not None and patient.now is RankState.RUNNING
        ]
        away = {
            patient.tenancy for patient in case.patients if patient.now is not RankState.RUNNING
        }
        back = {patient.tenancy for patient in case.patients} - away
        records += [
            replace(record, goal=Goal.ON)
            for record in self.records
            if isinstance(record, TenancyRecord) and record.tenancy in back
        ]
        self.keep(records)
