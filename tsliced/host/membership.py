"""To which job a process belongs.

A process is asked about in this order:

1. It was registered through the socket, by itself or for it.
2. It is in the cgroup of a Slurm job. Such a path can only be made by root, so this is proof; where
   Slurm tracks processes in another way, so is what slurmd itself says (``scontrol listpids``). The
   rest may only refine it: two experiments in one allocation, told apart by ``TSLICE_JOB_ID``,
   are the jobs ``<slurm id>.<TSLICE_JOB_ID>``.
3. ``TSLICE_JOB_ID`` in its environment, or in that of its nearest ancestor that still has one:
   setproctitle overwrites the environment of a process, as Ray's actors do, but not of its parents.
4. It descends from a registered process.
5. ``SLURM_JOB_ID`` in its environment or in an ancestor's. It comes after 4 because it is coarser:
   children of a driver that said over the socket which experiment it is belong to that experiment.

3 and 4 are decided by the nearest ancestor that says anything. The uid of the job is always the
real uid of the process by the kernel, and what an ancestor of another uid says doesn't count:
nobody can put their process into a job of someone else, nor be put there.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from libtimeslice.environment import nccl_heartbeat_s
from tsliced.core.model import JobKey, ProcessId
from tsliced.host.cgroups import UNIFIED, Cgroups
from tsliced.host.processes import (
    ProcessLimitError,
    ancestors,
    environment,
    is_alive,
    uid_of,
)
from tsliced.host.procfs import Stat, read_stat

#: Builds of Slurm with multiple slurmd per host (Debian's) put the node's name into the path.
_SLURM_VERSION_1: Final = re.compile(
    r"/slurm(?:_[^/]+)?/uid_(?P<uid>\d+)/job_(?P<job>\d+)(?=/|$)(?:/step_(?P<step>[^/]+))?"
)
_SLURM_VERSION_2: Final = re.compile(
    r"/system\.slice/(?:[^/]+_)?slurmstepd\.scope/job_(?P<job>\d+)(?=/|$)(?:/step_(?P<step>[^/]+))?"
)
#: Where Slurm's plugins put a job's processes, the most telling first: proctrack has the freezer.
_CONTROLLERS: Final = ("freezer", "memory", "devices", "cpuset", "cpuacct", "name=systemd")

_SLURM_ID: Final = re.compile(r"[0-9]{1,10}")
#: What may be a job's id: it is shown, logged, and written into paths and labels.
_JOB_ID: Final = re.compile(r"[A-Za-z0-9._:@+=,\[\]-]{1,128}")


class SlurmJob(NamedTuple):
    """The Slurm job and step of a process, by its cgroup."""

    id: str
    #: A number, ``batch``, ``extern`` or ``interactive``; None directly in the job's cgroup.
    step: str | None


class FoundProcess(NamedTuple):
    """A process and the job it belongs to."""

    process: ProcessId
    #: None: a stranger.
    job: JobKey | None
    uid: int
    name: str
    #: How long PyTorch's monitor of NCCL waits, if it was started with that; None: not known.
    watchdog_s: float | None = None


class _Known(NamedTuple):
    found: FoundProcess
    #: State of the registrations when it was found.
    version: int


def check_job_id(text: str) -> str:
    """Return the id of a job, or raise ValueError saying what an id may be."""
    if not _JOB_ID.fullmatch(text):
        raise ValueError(
            f"{text[:160]!r} cannot be a job's id: "
            "use 1 to 128 letters, digits and . _ : @ + = , [ ] -"
        )
    return text


class Membership:
    """Knows registered processes, and finds the job of any other.

    `register`, `forget` and `default_job` are for the loop; `classify` and `job_of` may run in a
    thread meanwhile. `limit` bounds the registered and the remembered processes. `root_uid` owns
    the cgroups of Slurm (a test without root gives its own). `leader_of` names the job of which
    another one is a component.
    """

    def __init__(
        self,
        cluster: str,
        *,
        cgroups: Cgroups | None = None,
        limit: int = 65_536,
        root_uid: int = 0,
        leader_of: Callable[[str], str] = str,
    ) -> None:
        self._cluster = cluster
        self._cgroups = cgroups or Cgroups()
        self._proc = self._cgroups.proc
        self._limit = limit
        self._root_uid = root_uid
        self._leader_of = leader_of
        #: Processes that slurmd says are of its jobs, where their cgroups do not say it.
        self._listed: dict[ProcessId, SlurmJob] = {}
        self._registered: dict[ProcessId, JobKey] = {}
        #: Rises with each change of the registrations, which may change what else is found.
        self._version = 0
        self._known: OrderedDict[ProcessId, _Known] = OrderedDict()

    def register(self, process: ProcessId, job: JobKey) -> None:
        """Take somebody's word that a process belongs to a job; check first that they may say so.

        Raises:
            ProcessLimitError: too many processes are registered.
        """
        if self._registered.get(process) == job:
            return
        if process not in self._registered and len(self._registered) >= self._limit:
            raise ProcessLimitError(
                f"{self._limit} processes are registered, which is the limit", limit=self._limit
            )
        self._registered[process] = job
        self._version += 1

    def forget(self, process: ProcessId) -> None:
        """Take a registration back, when the process died or its session ended.

        Descendants that were already found to be in its job stay there.
        """
        if self._registered.pop(process, None) is not None:
            self._version += 1

    def note_listed(self, listed: Mapping[ProcessId, SlurmJob]) -> None:
        """Know which processes slurmd says are of its jobs, instead of those it said before."""
        if listed != self._listed:
            self._listed = dict(listed)
            self.renew()

    def renew(self) -> None:
        """Look everybody up again: what jobs are called has changed."""
        self._version += 1

    def registered(self, job: JobKey) -> list[ProcessId]:
        """Return the processes that were said to belong to a job."""
        return [process for process, of in self._registered.items() if of == job]

    def job_of(self, process: ProcessId) -> JobKey | None:
        """Return the job of a process, or None if it belongs to none, or is gone."""
        registered = self._registered.get(process)
        if registered is not None:
            return registered
        uid = uid_of(process.pid, proc=self._proc)
        return None if uid is None else self._look_up(process, uid)

    def _look_up(self, process: ProcessId, uid: int) -> JobKey | None:
        """Return the job that a process of a user is found to belong to, if it still lives."""
        found = self._find_id(process, uid)
        # What was read of the pid must have been of this process.
        if found is None or not is_alive(process, proc=self._proc):
            return None
        return JobKey(self._cluster, uid, found)

    def default_job(
        self, process: ProcessId, requested: str | None = None, ranks: int | None = None
    ) -> JobKey:
        """Return the job of a client that says hello, `requested` or found, else one of its own.

        Inside a Slurm job, `requested` names a part of that job. Ranks of one host without any
        other sign share their parent, which is torchrun's agent.

        Raises:
            ValueError: `requested` cannot be a job's id.
            ProcessLookupError: the client is gone.
        """
        if requested is not None:
            check_job_id(requested)
        stat = read_stat(process.pid, proc=self._proc)
        uid = uid_of(process.pid, proc=self._proc)
        if stat is None or uid is None or stat.start_time != process.start_time:
            raise ProcessLookupError(f"process {process.pid} is gone")
        if requested is not None:
            slurm = self.slurm_job_of(process.pid)
            name = _refine(slurm.id, requested) if slurm else requested
            return JobKey(self._cluster, uid, name)
        found = self._registered.get(process)
        if found is None or found.uid != uid:
            # It may have become another user since then, whose job is another one.
            found = self._look_up(process, uid)
        if found is not None:
            return found
        # An orphan's parent is init, which is the parent of unrelated orphans too.
        is_ranked = ranks is not None and ranks > 1 and stat.parent > 1
        return JobKey(
            self._cluster, uid, f"group-{stat.parent}" if is_ranked else f"pid-{process.pid}"
        )

    def classify(self, pids: Iterable[int]) -> list[FoundProcess]:
        """Return who has each pid and to which job it belongs; those gone are left out.

        A process that was found to be in a job is looked up once: after that, a call costs the
        reading of one small file for each pid.
        """
        found = (self._classify(pid) for pid in pids)
        return [process for process in found if process is not None]

    def slurm_job_of(self, pid: int) -> SlurmJob | None:
        """Return the Slurm job of a process by its root-owned cgroup, else by slurmd, or None."""
        paths = self._cgroups.paths(pid)
        for controller in (*_CONTROLLERS, UNIFIED):
            pattern = _SLURM_VERSION_1 if controller else _SLURM_VERSION_2
            match = pattern.match(paths.get(controller, ""))
            if match and self._is_made_by_root(controller, match.string[: match.end("job")]):
                return SlurmJob(self._leader_of(match["job"]), match["step"])
        return self._listed_job_of(pid) if self._listed else None

    def _listed_job_of(self, pid: int) -> SlurmJob | None:
        """Return the Slurm job of a process, or of its nearest ancestor, that slurmd has listed."""
        stat = read_stat(pid, proc=self._proc)
        for each in (stat, *ancestors(pid, proc=self._proc)) if stat is not None else ():
            found = self._listed.get(ProcessId(each.pid, each.start_time))
            if found is not None:
                return SlurmJob(self._leader_of(found.id), found.step)
        return None

    def _is_made_by_root(self, controller: str, path: str) -> bool:
        """Whether a cgroup, and so the name that it has, was made by root."""
        directory = self._cgroups.directory(controller, path)
        if directory is None:
            return False
        try:
            return os.stat(directory).st_uid == self._root_uid
        except FileNotFoundError:
            return False

    def _classify(self, pid: int) -> FoundProcess | None:
        stat = read_stat(pid, proc=self._proc)
        if stat is None or stat.is_dead:
            return None
        process = ProcessId(pid, stat.start_time)
        known = self._known.get(process)
        version = self._version
        if known is not None and known.version == version:
            return known.found
        uid = uid_of(pid, proc=self._proc)
        if uid is None:
            return None
        job = self.job_of(process)
        if job is None and known is not None:
            # The registered ancestor that told us is gone; its children don't change sides.
            job = known.found.job
        watchdog_s = nccl_heartbeat_s(environment(pid, proc=self._proc) or {}, default=None)
        found = FoundProcess(process, job, uid, stat.name, watchdog_s)
        if job is not None:
            self._remember(found, version)
        return found

    def _remember(self, found: FoundProcess, version: int) -> None:
        self._known[found.process] = _Known(found, version)
        self._known.move_to_end(found.process)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def _find_id(self, process: ProcessId, uid: int) -> str | None:
        slurm = self.slurm_job_of(process.pid)
        named, coarse = self._search(process, uid, slurm)
        if slurm is not None:
            return _refine(slurm.id, named)
        return named or coarse

    def _search(
        self, process: ProcessId, uid: int, slurm: SlurmJob | None
    ) -> tuple[str | None, str | None]:
        """Return what the process or its nearest telling ancestor names: a job, a Slurm job."""
        coarse: str | None = None
        for stat in self._family(process, uid):
            if slurm is not None:
                # Who is outside of the allocation has no say in it.
                theirs = self.slurm_job_of(stat.pid)
                if theirs is None or theirs.id != slurm.id:
                    break
            registered = self._registered.get(ProcessId(stat.pid, stat.start_time))
            if registered is not None and registered.uid == uid:
                return registered.id, coarse
            values = environment(stat.pid, proc=self._proc) or {}
            named = values.get("TSLICE_JOB_ID", "")
            if _JOB_ID.fullmatch(named):
                return named, coarse
            if coarse is None and _SLURM_ID.fullmatch(values.get("SLURM_JOB_ID", "")):
                coarse = values["SLURM_JOB_ID"]
        return None, coarse

    def _family(self, process: ProcessId, uid: int) -> Iterator[Stat]:
        """Yield a process, then those of its ancestors that have the same real uid."""
        stat = read_stat(process.pid, proc=self._proc)
        if stat is None or stat.start_time != process.start_time:
            return
        yield stat
        for ancestor in ancestors(process.pid, proc=self._proc):
            if uid_of(ancestor.pid, proc=self._proc) == uid:
                yield ancestor


def _refine(slurm_id: str, name: str | None) -> str:
    """Return the id of a job in a Slurm allocation; a name that has the number already stays."""
    if name is None or name == slurm_id:
        return slurm_id
    return name if name.startswith(slurm_id + ".") else f"{slurm_id}.{name}"
