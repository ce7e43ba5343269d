"""What is left of a job: ranks without a client, and ranks that lost one of theirs.

Rules:

* A job whose last client is gone while ranks of it live is ORPHANED: nobody can ask for anything in
  its name. It is named after a moment, since whoever leaves says goodbye before its process ends,
  and ended after `orphan_s`.
* When a rank dies, the others of its tenancy may wait for it for ever in a collective. They are
  told (elsewhere); with `on_rank_lost = "kill"` those that lived then are ended when their job has
  asked for nothing for `rank_lost_s`. Time in which it waits for a turn, or is kept still by us,
  does not count.

Both are on record; their clocks start anew with the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import Note, RemainsRecord
from tsliced.core.ending import Ending
from tsliced.core.leasing import Leasing
from tsliced.core.model import (
    CoreLimits,
    GroupName,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    TenancyKey,
)
from tsliced.core.remedies import out_of_orphan
from tsliced.core.sessions import LeaseState
from tsliced.core.strangers import Inhabitants
from tsliced.core.timers import TimerKey, TimerKind, Timers

#: From a client's end to the moment at which its job counts as orphaned.
ORPHAN_DELAY_S = 2.0


@dataclass(slots=True, kw_only=True)
class Remnant:
    """What is left of one job."""

    #: When its last client was gone; None: it has one.
    orphaned_at: float | None = None
    #: It was named as orphaned.
    named: bool = False
    #: It was ended for it.
    ended: bool = False
    #: When a rank of it died; the others that lived then.
    lost_at: float = 0.0
    survivors: dict[ProcessId, None] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Remains:
    """The jobs of which something is left. Mutate it only through its methods."""

    leasing: Leasing
    tenancies: Inhabitants
    timers: Timers[TimerKey]
    limits: CoreLimits
    ending: Ending
    jobs: dict[JobKey, Remnant] = field(default_factory=dict)
    #: By host and group: jobs with ranks and a client there.
    clients_abroad: dict[tuple[HostName, GroupName], frozenset[JobKey]] = field(
        default_factory=dict
    )

    # --- orphans ------------------------------------------------------------------------------

    def on_left(self, job: JobKey, now: float) -> None:
        """The last session of a job ended."""
        led = any(tenancy.led_here for tenancy in self.tenancies.tenancies_of(job))
        if self._has_client(job) or not led or not self._ranks_of(job):
            # Where it is led from, all its clients are known.
            return
        remnant = self.jobs.setdefault(job, Remnant())
        if remnant.orphaned_at is None:
            remnant.orphaned_at = now
            self._set_clock(job, remnant)

    def on_opened(self, job: JobKey) -> None:
        """A client of a job is there, perhaps again."""
        remnant = self.jobs.get(job)
        if remnant is not None and remnant.orphaned_at is not None and self._has_client(job):
            was_named = remnant.named
            remnant.orphaned_at, remnant.named, remnant.ended = None, False, False
            self._settle(job, remnant, changed=was_named)

    def is_orphaned(self, job: JobKey) -> bool:
        """Whether a job has ranks and no client, for more than a moment."""
        remnant = self.jobs.get(job)
        return remnant is not None and remnant.named

    def on_host_died(self, host: HostName, now: float) -> None:
        """No client that was on a host is left."""
        there = [of for of in self.clients_abroad if of[0] == host]
        jobs = {job for of in there for job in self.clients_abroad.pop(of)}
        for job in sorted(jobs):
            self.on_left(job, now)

    def has_client_here(self, job: JobKey) -> bool:
        """Whether a client of a job is connected to this host."""
        sessions = self.leasing.sessions_of(job)
        return any(not session.tool and session.host is None for session in sessions)

    def _has_client(self, job: JobKey) -> bool:
        if any(not session.tool for session in self.leasing.sessions_of(job)):
            return True
        return any(job in jobs for jobs in self.clients_abroad.values())

    def _ranks_of(self, job: JobKey) -> list[RankId]:
        if self.tenancies.is_stranger(job):
            # It never had a client.
            return []
        here = [rank.id for rank in self.tenancies.ranks_of_job(job) if not rank.exited]
        tenancies = self.tenancies.tenancies_of(job)
        return [*here, *(rank for tenancy in tenancies for rank in tenancy.abroad)]

    # --- survivors ----------------------------------------------------------------------------

    def on_rank_gone(self, key: TenancyKey, gone: RankId, now: float) -> None:
        """A rank died, here or on another host; only those of this host are looked after here."""
        job = key.job
        process = gone.process if gone.host == self.tenancies.host else None
        tenancy = self.tenancies.all.get(key)
        ranks = tenancy.participant.ranks.values() if tenancy is not None else ()
        left = {rank.id.process: None for rank in ranks if not rank.exited}
        remnant = self.jobs.get(job)
        if remnant is None and not left:
            return
        remnant = self.jobs.setdefault(job, Remnant())
        if left and process not in remnant.survivors:
            remnant.lost_at = now
            remnant.survivors.update(left)
            facts: dict[str, str | int | float | bool | None] = {
                "job": str(job),
                "groups": ",".join(key.groups),
                "pid": gone.process.pid,
                "host": None if process is not None else gone.host,
                "left": len(left),
            }
            self.leasing.out.append(Note(kind="rank_lost", level="info", facts=facts))
        if process is not None:
            remnant.survivors.pop(process, None)
        if not self._ranks_of(job):
            remnant.orphaned_at, remnant.named = None, False
        self._settle(job, remnant, changed=True)

    def has_lost(self, job: JobKey) -> bool:
        """Whether a job lost a rank, and asked for nothing since."""
        remnant = self.jobs.get(job)
        return (
            remnant is not None
            and bool(remnant.survivors)
            and self._latest(job, remnant.lost_at) == remnant.lost_at
        )

    def _latest(self, job: JobKey, since: float) -> float:
        return max([since, *(session.asked_at for session in self.leasing.sessions_of(job))])

    def _goes_on(self, job: JobKey) -> bool:
        """Whether a job waits for its turn, or it may be our doing that it does not get on."""
        keys = self.tenancies.by_job.get(job, ())
        if any(self.tenancies.any_still(job, key.groups) for key in keys):
            return True
        sessions = self.leasing.sessions_of(job)
        leases = (lease for session in sessions for lease in session.leases.values())
        return any(lease.state is LeaseState.WAITING for lease in leases)

    # --- clocks -------------------------------------------------------------------------------

    def resume(self, now: float) -> None:
        """After a restart: let the clocks run anew, and forget what died meanwhile unseen."""
        for job, remnant in list(self.jobs.items()):
            alive = self._ranks_of(job)
            here = {rank.process for rank in alive if rank.host == self.tenancies.host}
            remnant.survivors = {p: None for p in remnant.survivors if p in here}
            remnant.lost_at = now
            if remnant.orphaned_at is not None:
                remnant.orphaned_at = now if alive and not self._has_client(job) else None
                remnant.named = remnant.orphaned_at is not None
            self._settle(job, remnant, changed=True)

    def _settle(self, job: JobKey, remnant: Remnant, *, changed: bool) -> None:
        """Bring clock and record of a job up to date."""
        if changed:
            survivors = tuple(remnant.survivors)
            record = RemainsRecord(job=job, orphaned=remnant.named, survivors=survivors)
            self.leasing.out.append(record)
        if remnant.orphaned_at is None and not remnant.survivors:
            del self.jobs[job]
            self.timers.clear(TimerKey(TimerKind.REMAINS, job))
            return
        self._set_clock(job, remnant)

    def _set_clock(self, job: JobKey, remnant: Remnant) -> None:
        limits = self.limits
        due: list[float] = []
        if remnant.orphaned_at is not None:
            if not remnant.named:
                due.append(remnant.orphaned_at + ORPHAN_DELAY_S)
            elif limits.orphan_s is not None and not remnant.ended:
                due.append(remnant.orphaned_at + limits.orphan_s)
        if remnant.survivors and limits.on_rank_lost == "kill":
            due.append(self._latest(job, remnant.lost_at) + limits.rank_lost_s)
        if due:
            self.timers.set(TimerKey(TimerKind.REMAINS, job), min(due))

    def on_due(self, job: JobKey, now: float) -> None:
        """Name an orphan, or end what is left of a job."""
        remnant = self.jobs[job]
        self._judge_orphan(job, remnant, now)
        self._judge_survivors(job, remnant, now)
        self._settle(job, remnant, changed=False)

    def _judge_orphan(self, job: JobKey, remnant: Remnant, now: float) -> None:
        at, orphan_s = remnant.orphaned_at, self.limits.orphan_s
        if at is None:
            return
        if not remnant.named and now >= at + ORPHAN_DELAY_S:
            remnant.named = True
            pids = ",".join(str(rank.process.pid) for rank in self._ranks_of(job))
            facts: dict[str, str | int | float | bool | None] = {
                "job": str(job),
                "pids": pids,
                "ends_in_s": None if orphan_s is None else max(0.0, at + orphan_s - now),
                "reason": f"no client of it is left; {out_of_orphan(job)}",
            }
            self.leasing.out.append(Note(kind="orphaned", level="warning", facts=facts))
            survivors = tuple(remnant.survivors)
            self.leasing.out.append(RemainsRecord(job=job, orphaned=True, survivors=survivors))
        if remnant.named and not remnant.ended and orphan_s is not None and now >= at + orphan_s:
            remnant.ended = True
            text = f"no client of it is left for {now - at:.0f} s (orphan_s)"
            grace_s = self.limits.end_grace_s
            self.ending.end_job(job, text=text, grace_s=grace_s, now=now)

    def _judge_survivors(self, job: JobKey, remnant: Remnant, now: float) -> None:
        limits = self.limits
        if not remnant.survivors or limits.on_rank_lost != "kill":
            return
        if self._goes_on(job):
            remnant.lost_at = now
            return
        since = self._latest(job, remnant.lost_at)
        # Added as the clock was set: a difference might be too small by a rounding, for ever.
        if now < since + limits.rank_lost_s:
            return
        silent_s = now - since
        text = f"a rank was lost, and the job asks for nothing since {silent_s:.0f} s (rank_lost_s)"
        survivors, remnant.survivors = tuple(remnant.survivors), {}
        self.ending.end(job, survivors, text=text, grace_s=limits.end_grace_s, now=now)
        self.leasing.out.append(RemainsRecord(job=job, orphaned=remnant.named, survivors=()))
