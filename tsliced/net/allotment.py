"""The Slurm jobs of this host: what their hooks tell of them, and what the daemon does about it.

* ``began`` comes from a job's prolog. It is taken down at once, so that no job waits for it; what
  more there is to know the controller is asked afterwards.
* ``ended`` comes from its epilog, again and again until nothing is left: processes that Slurm did
  not end are ended, and the devices are looked at.
* When Slurm asks a job to end (``scancel``, its time limit) its parked processes get a turn on the
  devices, since what they do then, such as to save, may be in the middle of a driver call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Final

from libtimeslice.protocol import Message, SlurmNotice, error_reply, reply
from tsliced.core.events import EndAsked, KillRequested
from tsliced.core.model import GroupName, HostName, JobKey, ProcessId
from tsliced.driver import Driver
from tsliced.host.allocations import Allocation, Allocations, find_sentinel, is_tracked
from tsliced.host.cgroups import Cgroups
from tsliced.host.membership import SlurmJob
from tsliced.host.processes import ExitWatch, ProcessLimitError, identify
from tsliced.host.scan import ScanFailed
from tsliced.host.slurm import JobFacts, SlurmError, ask_job, expand_hosts, list_steps
from tsliced.net.authority import Authority
from tsliced.net.commenting import Commenting
from tsliced.net.connection import Peer
from tsliced.observe.details import Details

#: Of each question to Slurm. A client that says hello may wait for one of them.
ASK_LIMIT_S: Final = 3.0
#: Between two questions about the same thing.
ASK_AGAIN_S: Final = 10.0
LIST_AGAIN_S: Final = 1.0
#: The external step of a job comes after its prolog, if there is one at all.
SENTINEL_LOOK_S: Final = 0.5
SENTINEL_TRIES: Final = 120
#: Of all users; each costs some hundred bytes.
MAX_ALLOCATIONS: Final = 4096
#: From SIGTERM to SIGKILL for what Slurm has left: it had Slurm's own KillWait already.
LEFT_GRACE_S: Final = 1.0


class Allotment:
    """Knows this host's allocations. All methods belong to the event loop."""

    def __init__(
        self,
        driver: Driver,
        authority: Authority,
        allocations: Allocations,
        details: Details,
        *,
        commenting: Commenting | None = None,
        cgroups: Cgroups | None = None,
        ask: Callable[..., list[JobFacts]] = ask_job,
    ) -> None:
        self._driver = driver
        self._authority = authority
        self._allocations = allocations
        self._details = details
        self._membership = driver.around.membership
        self._commenting = commenting
        self._cgroups = cgroups or Cgroups()
        self._ask = ask
        self._sentinels: dict[ProcessId, str] = {}
        self._watch = ExitWatch(asyncio.get_running_loop(), self._on_sentinel_gone)
        self._asked_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._listed_at = 0.0
        allocations.on_change = self._membership.renew
        for allocation in allocations:
            self._start_watch(allocation)
        if commenting is not None:
            self._start(commenting.write_for_ever(), "commenting on Slurm jobs")

    def close(self) -> None:
        """Watch nobody any more."""
        self._watch.close()

    # --- what hooks tell ----------------------------------------------------------------------

    async def on_notice(self, peer: Peer, request: SlurmNotice) -> Message:
        """Take down what a hook tells; return the answer to it."""
        if not self._authority.is_admin(peer.uid):
            text = f"uid {peer.uid} may not tell of Slurm's jobs; root and the admin group may"
            return error_reply(request.id, "not_permitted", text)
        if request.verb == "began":
            known = self._allocations.get(request.job) is not None
            if not known and len(self._allocations) >= MAX_ALLOCATIONS:
                text = f"{MAX_ALLOCATIONS} Slurm jobs are known here already: did no epilog run?"
                return error_reply(request.id, "would_exceed_limit", text)
            return self._begin(request)
        return await self._end(request)

    def _begin(self, request: SlurmNotice) -> Message:
        allocation = Allocation(
            id=request.job,
            uid=request.uid,
            hosts=request.nodes,
            node=request.node,
            account=request.account,
        )
        self._allocations.put(allocation)
        job = str(self._key(allocation))
        self._driver.note("job_began", "info", job=job, nodes=request.nodes)
        self._start_watch(allocation)
        self._begin_asking(allocation.id, allocation.uid)
        return reply(request.id)

    async def _end(self, request: SlurmNotice) -> Message:
        known = self._allocations.get(request.job)
        allocation = known or Allocation(id=request.job, uid=request.uid)
        if not allocation.ending:
            allocation = replace(allocation, ending=True)
            self._allocations.put(allocation)
        if any(not other.ending for other in self._behind(allocation)):
            # Other components of the same job go on here: what is left is theirs.
            self._allocations.end(allocation.id)
            return reply(request.id, over=True, left=[], problems=[])
        jobs = self._jobs_of(allocation)
        for job in jobs:
            # Whoever was asked to end already is killed at the end of the grace.
            asked = self._driver.machine.ending.asked.get(job, {})
            if any(p not in asked for p in self._driver.machine.ending.processes_of(job)):
                kill = KillRequested(
                    job=job, by="the Slurm epilog", grace_s=LEFT_GRACE_S, onward=False
                )
                self._driver.post(kill)
        left, problems = await self._look(allocation)
        if not left:
            self._allocations.end(allocation.id)
            reason = "; ".join(problems) or None
            level = "warning" if problems else "info"
            self._driver.note("job_ended", level, job=str(self._key(allocation)), reason=reason)
            if self._commenting is not None:
                self._commenting.end(allocation)
        return reply(request.id, over=not left, left=left, problems=problems)

    async def _look(self, allocation: Allocation) -> tuple[list[Message], list[str]]:
        """Return what is left of a job on this host, and what is wrong with the devices."""
        left: dict[int, Message] = {}
        problems: list[str] = []
        try:
            found, lost = await self._driver.around.scanner.look_around()
        except ScanFailed as exc:
            problems.append(f"the devices could not be looked at: {exc}")
        else:
            problems += [f"device {uuid} is lost: {why}" for uuid, why in lost.items()]
            for rank in found:
                if rank.job is not None and _is_behind(rank.job, allocation):
                    pid = rank.process.pid
                    left[pid] = {"pid": pid, "name": rank.name, "device_bytes": rank.device_bytes}
        for job in self._jobs_of(allocation):
            for process in self._driver.machine.ending.processes_of(job):
                told: Message = {"pid": process.pid, "name": "", "device_bytes": 0}
                left.setdefault(process.pid, told)
        return list(left.values()), problems

    def _key(self, allocation: Allocation) -> JobKey:
        cluster = self._driver.machine.config.cluster
        return JobKey(cluster, allocation.uid, allocation.job_id)

    def _behind(self, allocation: Allocation) -> list[Allocation]:
        return self._allocations.of_job(allocation.job_id, allocation.uid)

    def _jobs_of(self, allocation: Allocation) -> list[JobKey]:
        """Return the jobs that an allocation is known by: the whole of it, and parts with names."""
        return [job for job in self._details.jobs() if _is_behind(job, allocation)]

    # --- what is known of jobs ----------------------------------------------------------------

    def usual_groups(
        self, job: JobKey, permitted: Collection[GroupName]
    ) -> tuple[GroupName, ...] | None:
        """Return the groups on a Slurm job's hosts, those of `permitted`; None: it is none.

        A job on several hosts so takes its turns on all of them together, since its ranks wait for
        one another.
        """
        behind = self._allocations.of_job(job.id, job.uid)
        config = self._driver.machine.config
        nodes = {node for each in behind for node in each.nodes}
        if not nodes:
            return None
        here = {each.node for each in behind}
        hosts = {config.host if node in here else HostName(node) for node in nodes}
        return tuple(
            group.name
            for group in config.groups
            if group.name in permitted and not hosts.isdisjoint(group.hosts or (config.host,))
        )

    # --- what Slurm is asked ------------------------------------------------------------------

    def knows(self, process: ProcessId, uid: int) -> bool:
        """Whether all is known of a process that matters for its job; see `learn`."""
        slurm = self._membership.slurm_job_of(process.pid)
        if slurm is None:
            return not self._untracked(uid)
        return slurm.id not in self._asking and not self._may_ask(slurm.id)

    async def learn(self, process: ProcessId, uid: int) -> None:
        """Find out to which job a process belongs, and about that job, as far as Slurm says it."""
        if self._membership.slurm_job_of(process.pid) is None and self._untracked(uid):
            await self._list(self._untracked(uid))
        slurm = self._membership.slurm_job_of(process.pid)
        if slurm is None:
            return
        if self._may_ask(slurm.id):
            self._begin_asking(slurm.id, uid)
        if (task := self._asking.get(slurm.id)) is not None:
            # Others wait for the same answer: who stops waiting does not take it from them.
            await asyncio.shield(task)

    def _untracked(self, uid: int) -> list[Allocation]:
        """Return a user's allocations whose processes are in no cgroup of Slurm's."""
        own = [a for a in self._allocations if a.uid == uid and not a.ending]
        if not own or time.monotonic() - self._listed_at < LIST_AGAIN_S:
            return []
        return [a for a in own if not is_tracked(a, self._cgroups)]

    async def _list(self, allocations: list[Allocation]) -> None:
        self._listed_at = time.monotonic()
        listed: dict[ProcessId, SlurmJob] = {}
        for allocation in allocations:
            node = allocation.node or self._driver.machine.config.host
            try:
                steps = await asyncio.to_thread(
                    list_steps, allocation.id, node, limit_s=ASK_LIMIT_S
                )
            except SlurmError as exc:
                self._driver.note("slurm", "warning", reason=str(exc))
                continue
            for pid, step in steps.items():
                if (process := identify(pid)) is not None:
                    listed[process] = SlurmJob(allocation.id, step)
        self._membership.note_listed(listed)

    def _may_ask(self, id: str) -> bool:
        """Whether not all is known of a job, and nobody has asked of late."""
        behind = [a for a in self._allocations if id in (a.id, a.job_id)]
        if behind and all(a.complete for a in behind):
            return False
        return time.monotonic() - self._asked_at.get(id, -ASK_AGAIN_S) >= ASK_AGAIN_S

    def _begin_asking(self, id: str, uid: int) -> None:
        old = time.monotonic() - ASK_AGAIN_S
        self._asked_at = {k: at for k, at in self._asked_at.items() if at > old}
        self._asked_at[id] = time.monotonic()
        task = self._asking[id] = self._start(self._complete(id, uid), "asking about a Slurm job")
        task.add_done_callback(lambda _: self._asking.pop(id, None))

    async def _complete(self, id: str, uid: int) -> None:
        """Ask the controller about a job of which not all is known."""
        facts = await self._facts_of(id)
        nodes = await self._expand([fact.nodes for fact in facts])
        own = next((fact for fact in facts if fact.id == id), None)
        # It may have ended, or begun anew, meanwhile.
        known = self._allocations.get(id)
        if known is None and own is not None:
            # Its prolog met no daemon.
            known = Allocation(id=id, uid=uid)
        if known is None or known.ending:
            return
        if own is None or own.uid != known.uid:
            # The controller does not answer, or knows better; what the hook told has to do.
            hosts = await self._expand([known.hosts] if known.hosts is not None else [])
            if self._allocations.get(id) == known:
                self._allocations.put(replace(known, nodes=hosts or known.nodes))
            return
        complete = replace(
            known,
            nodes=nodes or known.nodes,
            leader=own.leader if own.leader != id else "",
            account=own.account or known.account,
            tickets=own.tickets,
            ends_at_unix=own.ends_at_unix,
            complete=True,
        )
        self._allocations.put(complete)
        # For those who read of it later, as sums by account do.
        self._driver.note(
            "job_known",
            "info",
            job=str(self._key(complete)),
            account=complete.account,
            tickets=complete.tickets,
            nodes=",".join(complete.nodes),
        )
        if self._commenting is not None:
            self._commenting.look()

    async def _facts_of(self, id: str) -> list[JobFacts]:
        try:
            return await asyncio.to_thread(self._ask, id, limit_s=ASK_LIMIT_S)
        except SlurmError as exc:
            self._driver.note("slurm", "warning", job=id, reason=str(exc))
            return []

    async def _expand(self, lists: Iterable[str]) -> tuple[str, ...]:
        """Return all hosts of some lists, each once; none if one of them makes no sense."""
        try:
            found = [
                await asyncio.to_thread(expand_hosts, text, limit_s=ASK_LIMIT_S)
                for text in dict.fromkeys(lists)
            ]
        except SlurmError as exc:
            self._driver.note("slurm", "warning", reason=str(exc))
            return ()
        return tuple(dict.fromkeys(host for hosts in found for host in hosts))

    # --- jobs that are asked to end -----------------------------------------------------------

    def _start_watch(self, allocation: Allocation) -> None:
        self._start(self._find_sentinel(allocation.id), "finding the sentinel of a Slurm job")

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception as exc:
                # The edge of this task: a mistake of ours about one job must not end the daemon.
                self._driver.note("bug", "error", reason=f"{what}: {exc!r}")

        return self._driver.around.tasks.create_task(guarded(), name=what)

    async def _find_sentinel(self, id: str) -> None:
        """Watch the process of a job whose end tells that it was asked to end."""
        for _ in range(SENTINEL_TRIES):
            allocation = self._allocations.get(id)
            if allocation is None or allocation.ending:
                return
            pid = find_sentinel(allocation, self._cgroups)
            process = identify(pid) if pid is not None else None
            if process is not None:
                self._sentinels[process] = id
                try:
                    self._watch.add(process)
                except ProcessLimitError as exc:
                    self._driver.note("slurm", "warning", job=id, reason=str(exc))
                return
            await asyncio.sleep(SENTINEL_LOOK_S)

    def _on_sentinel_gone(self, process: ProcessId) -> None:
        allocation = self._allocations.get(self._sentinels.pop(process))
        if allocation is None or allocation.ending:
            return
        for job in self._jobs_of(allocation):
            self._driver.note("job_told_to_end", "info", job=str(job))
            self._driver.post(EndAsked(job=job))


def _is_behind(job: JobKey, allocation: Allocation) -> bool:
    """Whether a job is an allocation, or a part of it that has a name of its own."""
    return job.uid == allocation.uid and job.id.partition(".")[0] == allocation.job_id
