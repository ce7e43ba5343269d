"""The Slurm jobs that have a part of this host, as Slurm's own hooks told: the allocations.

A job's prolog tells of it before anything of the job runs, its epilog when all should have ended.
What is known here widens nothing that the kernel says of a process (`membership`): it says which
hosts the job has, whose account it runs on, and to which job a component belongs.

They are kept in a file of the state directory, for a daemon that is restarted, and forgotten when
the machine boots, because Slurm's jobs on it ended with it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from tsliced.host.cgroups import UNIFIED, Cgroups

FILE_NAME: Final = "allocations.json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One Slurm job on this host."""

    id: str
    uid: int
    #: All hosts of the job, by the names that Slurm has for them: as it abbreviates them, and each
    #: by itself; and this one's name among them.
    hosts: str | None = None
    nodes: tuple[str, ...] = ()
    node: str | None = None
    #: Whose component it is, of a heterogeneous job; the job itself otherwise.
    leader: str = ""
    account: str | None = None
    #: How many of the node's tickets it has; None: not known.
    tickets: int | None = None
    #: When its time limit ends it, in seconds since 1970; None: never, or not known.
    ends_at_unix: float | None = None
    #: The controller was asked about it, and answered.
    complete: bool = False
    #: Its epilog runs.
    ending: bool = False

    @property
    def job_id(self) -> str:
        """The id that its processes have as one job."""
        return self.leader or self.id


class Allocations:
    """The allocations of this host. All methods belong to the event loop.

    `on_change` is called when an id begins or ceases to be another job's component.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._path = directory / FILE_NAME if directory is not None else None
        self._known: dict[str, Allocation] = {}
        self.on_change: Callable[[], None] = lambda: None
        if self._path is not None:
            self._known = {each.id: each for each in _load(self._path)}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(list(self._known.values()))

    def get(self, id: str) -> Allocation | None:
        """Return what is known of a Slurm job, by its own id."""
        return self._known.get(id)

    def leader_of(self, id: str) -> str:
        """Return the id that a Slurm job's processes have as one job."""
        known = self._known.get(id)
        return known.job_id if known is not None else id

    def account_of(self, job_id: str) -> str | None:
        """Return the account that a Slurm job runs on; None: it has none, or it is not known."""
        behind = (each for each in self._known.values() if each.job_id == job_id)
        return next((each.account for each in behind if each.account is not None), None)

    def of_job(self, job_id: str, uid: int) -> list[Allocation]:
        """Return the allocations behind a job's id, which may be that of a part of a Slurm job."""
        leader = job_id.partition(".")[0]
        return [a for a in self._known.values() if a.job_id == leader and a.uid == uid]

    def put(self, allocation: Allocation) -> None:
        """Know a job, or more of it. One that was requeued comes again under its id."""
        if self._known.get(allocation.id) != allocation:
            self._known[allocation.id] = allocation
            self._save()

    def end(self, id: str) -> None:
        """Forget a job of which nothing is left."""
        if self._known.pop(id, None) is not None:
            self._save()

    def _save(self) -> None:
        self.on_change()
        if self._path is None:
            return
        temporary = self._path.with_suffix(".new")
        content = {"boot_id": _boot_id(), "jobs": [asdict(each) for each in self]}
        # A job that is not known after a restart has the groups of this host alone, no worse.
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(content))
            temporary.replace(self._path)


def _load(path: Path) -> list[Allocation]:
    names = {item.name for item in fields(Allocation)}
    try:
        content = json.loads(path.read_text())
        if content["boot_id"] != _boot_id():
            return []
        jobs = [{k: v for k, v in job.items() if k in names} for job in content["jobs"]]
        return [Allocation(**{**job, "nodes": tuple(job["nodes"])}) for job in jobs]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def find_sentinel(allocation: Allocation, cgroups: Cgroups) -> int | None:
    """Return a process of a job that does nothing but end when Slurm asks the job to end.

    With ``PrologFlags=Contain`` each job has an external step on each node, of one sleeping process
    and whatever a login adopted into it. Slurm signals it with all others, so its end is how this
    host hears of ``scancel`` and of the time limit; there is no hook for that.
    """
    for directory in _external_steps(allocation, cgroups):
        with contextlib.suppress(OSError):
            pids = [int(pid) for pid in (directory / "cgroup.procs").read_text().split()]
            for pid in pids:
                # As root: it is none of the user's processes.
                if os.stat(f"{cgroups.proc}/{pid}").st_uid == 0 and _is_sleep(pid, cgroups.proc):
                    return pid
    return None


def is_tracked(allocation: Allocation, cgroups: Cgroups) -> bool:
    """Whether Slurm has put a job into a cgroup, which then says of each process that it is its."""
    return any(True for _ in _directories(allocation, cgroups, ""))


def _external_steps(allocation: Allocation, cgroups: Cgroups) -> Iterator[Path]:
    for directory in _directories(allocation, cgroups, "/step_extern"):
        yield directory
        yield from directory.glob("user/task_*")


def _directories(allocation: Allocation, cgroups: Cgroups, below: str) -> Iterator[Path]:
    """Yield the directories of a job, or of a step of it, in all hierarchies that may have them.

    Builds of Slurm for several slurmd on one machine (Debian's) put the node's name into the path.
    """
    job = f"job_{allocation.id}{below}"
    nodes = (allocation.node,) if allocation.node is not None else ()
    if (root := cgroups.directory("freezer", "/")) is not None:
        for slurm in ("slurm", *(f"slurm_{node}" for node in nodes)):
            yield from Path(root).glob(f"{slurm}/uid_{allocation.uid}/{job}")
    if (root := cgroups.directory(UNIFIED, "/")) is not None:
        for scope in ("slurmstepd.scope", *(f"{node}_slurmstepd.scope" for node in nodes)):
            yield from Path(root).glob(f"system.slice/{scope}/{job}")


def _is_sleep(pid: int, proc: str) -> bool:
    return Path(f"{proc}/{pid}/comm").read_text().strip() == "sleep"
