"""Jobs on a test's Slurm: allocations of one of its users, and ranks in steps of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import slurm_accounting
from harness import LIMIT_S, Rank, Settings, build_softcuda, until
from namespaces import skip_without_namespaces
from slurm_site import PYTHON, Node, Site, why_not


class SlurmRank(Rank):
    """A rank in a step; its pid is not that of the ``srun`` whose pipes it is spoken with by."""

    def __init__(self, job: str, process: subprocess.Popen[bytes], node: Node) -> None:
        super().__init__(job, process, node.recorder)
        self.node = node
        self._pid: int = self.do("whoami")["pid"]

    @property
    def pid(self) -> int:
        return self._pid


class Job:
    """A job that has its allocation and runs nothing but what a test starts in it."""

    def __init__(self, site: Site, id: str, user: str) -> None:
        self.site = site
        self.id = id
        self.user = user
        self.ranks: list[SlurmRank] = []

    def rank(
        self,
        node: str,
        *srun: str,
        program: str = "rank.py",
        within: Sequence[str] = (),
        **environment: str,
    ) -> SlurmRank:
        """Starts a rank in a step of its own; `within` is a command that runs what it is given."""
        file = f"{self.site.root}/repository/tests/e2e/{program}"
        process = self.site.start(
            *("srun", f"--jobid={self.id}", "--overlap", "-N1", "-n1", f"-w{node}", "--quiet"),
            *("--unbuffered", *srun, *within, PYTHON, file),
            user=self.user,
            **environment,
        )
        rank = SlurmRank(self.id, process, self.site.nodes[node])
        self.ranks.append(rank)
        return rank

    def trainer(self, node: str, *, mib: int = 40, seed: int = 1) -> SlurmRank:
        """Starts a rank that has made its state on a device in a first turn of all usual groups."""
        rank = self.rank(node)
        rank.do("acquire", timeout=60)
        rank.do("context")
        rank.do("fill", mib=mib, seed=seed)
        rank.do("release")
        return rank

    def state(self) -> str:
        """Returns what Slurm says of it."""
        return self.site.show_job(self.id).get("JobState", "GONE")

    def wait_for(self, *states: str, limit_s: float = LIMIT_S) -> None:
        """Waits until Slurm says one of some states of it."""
        until(lambda: self.state() in states, f"job {self.id} is {states}", limit_s)

    def cancel(self, *options: str) -> None:
        """Cancels it as its user."""
        self.site.run("scancel", *options, self.id, user=self.user)

    def end(self) -> None:
        """Cancels it, and waits until it has ended."""
        self.cancel()
        self.wait_for("CANCELLED", "COMPLETED", "GONE")
        self.close()

    def close(self) -> None:
        """Lets go of its ranks."""
        for rank in self.ranks:
            rank.close()
        self.ranks.clear()


def allocate(site: Site, user: str, *options: str, nodes: str = "n1") -> Job:
    """Has a user get nodes, with a ticket of each, and returns the job once it runs."""
    job = submit(site, user, "--wrap", "sleep 1000", *options, nodes=nodes)
    job.wait_for("RUNNING")
    return job


def submit(site: Site, user: str, *options: str, nodes: str = "n1") -> Job:
    """Has a user submit a job for nodes, with a ticket of each; it may have to wait."""
    count = nodes.count(",") + 1
    done = site.run(
        *("sbatch", "--parsable", f"-N{count}", f"-w{nodes}", "--gres=tslice:1"),
        *("--output=/dev/null", *options),
        user=user,
    )
    return Job(site, done.stdout.strip(), user)


@contextmanager
def opened_site(
    *names: str, settings: Settings | None = None, with_accounting: bool = False
) -> Iterator[Site]:
    """Makes a site where there can be one, and closes it in the end."""
    reasons = [why_not(), slurm_accounting.why_not() if with_accounting else None]
    for reason in filter(None, reasons):
        pytest.skip(reason)
    skip_without_namespaces()
    site = Site(build_softcuda(), *names, settings=settings, with_accounting=with_accounting)
    try:
        yield site
    except BaseException:
        site.discard()
        raise
    site.close()


def leave_nothing(site: Site) -> None:
    """Ends the jobs that a test has left; nothing of them must be left then."""
    try:
        site.end_jobs()
        assert_nothing_is_left(site)
    except BaseException:
        # pytest shows this for a test that failed.
        sys.stdout.write(site.story())
        raise


def assert_nothing_is_left(site: Site, *names: str) -> None:
    """Waits until no job has anything: no lease, no process, no memory, no ticket, no node."""
    for name in names or site.names:
        node = site.nodes[name]
        until(partial(_is_empty, node), f"{name} is empty")
        assert node.used_bytes_of_all() == 0
    until(lambda: _tickets(site) == dict.fromkeys(site.names, 0), "all tickets are back")
    until(site.is_idle, "all nodes are in service")


def _is_empty(node: Node) -> bool:
    status = node.status()
    busy = [
        group
        for group in status["groups"]
        if group["holder"] or group["next"] or group["waiters"] or group["resident"]
    ]
    reserved: dict[str, Any] = status["memory"]
    return not (busy or status["jobs"] or node.states() or reserved["reserved_bytes"])


def _tickets(site: Site) -> dict[str, int]:
    """Returns how many tickets of each node are in use."""
    lines = site.run("sinfo", "-h", "-N", "-O", "NodeList:20,GresUsed:40").stdout.splitlines()
    found = dict(line.split() for line in lines)
    return {node: int(text.rpartition(":")[2]) for node, text in found.items()}
