"""Ends processes of a job: asks them first, and kills those that are left.

Rules:

* A process that is held still (frozen, parked) cannot handle a signal: it is killed at once.
* All others have `grace_s` from SIGTERM on, which also gives a driver call in flight time to end.
* Who is asked again has the grace of the latest request.

Whether somebody may ask for it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tsliced.core.actions import EndProcesses, Note, Send
from tsliced.core.fronting import Fronting
from tsliced.core.leasing import Leasing
from tsliced.core.messages import EndJob
from tsliced.core.model import JobKey, ProcessId
from tsliced.core.tenancies import Tenancies
from tsliced.core.timers import TimerKey, TimerKind, Timers


@dataclass(slots=True, kw_only=True)
class Ending:
    """Who was asked to end. Mutate it only through its methods."""

    leasing: Leasing
    tenancies: Tenancies
    fronting: Fronting
    timers: Timers[TimerKey]
    #: By job: asked, not killed yet, and not known to be gone.
    asked: dict[JobKey, dict[ProcessId, None]] = field(default_factory=dict)

    def processes_of(self, job: JobKey) -> tuple[ProcessId, ...]:
        """Return the job's ranks and its clients; whoever only asks questions is none of them."""
        ranks = (rank.id.process for rank in self.tenancies.ranks_of_job(job))
        sessions = self.leasing.sessions_of(job)
        clients = (s.process for s in sessions if not s.tool and s.host is None)
        return tuple(dict.fromkeys((*ranks, *clients)))

    def end_job(
        self, job: JobKey, *, text: str, grace_s: float, now: float, onward: bool = True
    ) -> int:
        """End all processes of a job; return how many they are here.

        `text`: why, for the log. `onward`: those on other hosts too.
        """
        processes = self.processes_of(job)
        self.end(job, processes, text=text, grace_s=grace_s, now=now)
        if onward:
            self._end_elsewhere(job, text=text, grace_s=grace_s)
        return len(processes)

    def _end_elsewhere(self, job: JobKey, *, text: str, grace_s: float) -> None:
        tenancies = self.tenancies.tenancies_of(job)
        hosts = {rank.host: False for tenancy in tenancies for rank in tenancy.abroad}
        sessions = self.leasing.sessions_of(job)
        hosts |= {s.host: False for s in sessions if s.host is not None}
        # Who leads, or arbitrates, knows of more hosts.
        hosts |= dict.fromkeys(self.fronting.arbiters_of(s.id for s in sessions), True)
        hosts |= {tenancy.lead: True for tenancy in tenancies if not tenancy.led_here}
        for host, further in hosts.items():
            end = EndJob(job=job, text=text, grace_s=grace_s, onward=further)
            self.leasing.out.append(Send(host=host, message=end))

    def end(
        self,
        job: JobKey,
        processes: Iterable[ProcessId],
        *,
        text: str,
        grace_s: float,
        now: float,
    ) -> None:
        """End some processes of a job; those that can are asked first."""
        able: list[ProcessId] = []
        unable: list[ProcessId] = []
        for process in processes:
            (unable if self.tenancies.at_rest(process) else able).append(process)
        if not able and not unable:
            return
        facts: dict[str, str | int | float | bool | None] = {
            "job": str(job),
            "pids": _pids([*able, *unable]),
            "grace_s": grace_s if able else 0.0,
            "reason": text,
        }
        self.leasing.out.append(Note(kind="ending", level="warning", facts=facts))
        if unable:
            self._forget(job, unable)
            self.leasing.out.append(EndProcesses(processes=tuple(unable), kill=True))
        if able:
            self.asked.setdefault(job, {}).update(dict.fromkeys(able))
            self.timers.set(TimerKey(TimerKind.ENDING, job), now + grace_s)
            self.leasing.out.append(EndProcesses(processes=tuple(able), kill=False))

    def on_due(self, job: JobKey) -> None:
        """Kill those of a job that were asked and are still there."""
        left = tuple(self.asked.pop(job))
        facts = {"job": str(job), "pids": _pids(left), "reason": "they did not end when asked"}
        self.leasing.out.append(Note(kind="killing", level="warning", facts=facts))
        self.leasing.out.append(EndProcesses(processes=left, kill=True))

    def on_exit(self, process: ProcessId) -> None:
        """A process is gone."""
        for job, asked in list(self.asked.items()):
            if process in asked:
                self._forget(job, [process])

    def _forget(self, job: JobKey, processes: Iterable[ProcessId]) -> None:
        asked = self.asked.get(job, {})
        for process in processes:
            asked.pop(process, None)
        if job in self.asked and not asked:
            del self.asked[job]
            self.timers.clear(TimerKey(TimerKind.ENDING, job))


def _pids(processes: Iterable[ProcessId]) -> str:
    return ",".join(str(process.pid) for process in processes)
