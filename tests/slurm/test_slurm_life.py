"""What befalls jobs under Slurm while they share devices; after each nothing of them is left."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from harness import LIMIT_S, RankError, until
from slurm_jobs import Job, SlurmRank, allocate, submit
from slurm_site import KILL_WAIT_S, TICKETS, Site

#: Two of these do not fit on a device of 64 MiB.
STATE_MIB = 40


class Pair:
    """Two jobs of two users on n1: alice's is parked, and bob's holds the devices."""

    def __init__(self, site: Site, *options: str) -> None:
        self.site = site
        self.node = site.nodes["n1"]
        self.since = self.node.mark()
        self.parked = allocate(site, "alice", *options)
        self.holder = allocate(site, "bob")
        self.rank = self.parked.trainer("n1", mib=STATE_MIB, seed=1)
        self.holding = self.holder.trainer("n1", mib=STATE_MIB, seed=2)
        self.holding.do("acquire", timeout=60)
        expected = {self.rank.pid: "parked", self.holding.pid: "running"}
        until(lambda: self.node.states() == expected, "both are known")

    def wait_for_event(self, kind: str, what: str, limit_s: float = LIMIT_S) -> None:
        """Waits until something stands in the history of the node since these jobs began."""
        until(lambda: self.node.events(kind, since=self.since), what, limit_s)

    def assert_parked_is_gone(self) -> None:
        """Waits until nothing of alice's job is left, while bob's goes on as it was."""
        until(lambda: self.node.states() == {self.holding.pid: "running"}, "it is gone")
        until(lambda: not self.node.job(self.parked.id), "nothing is known of it")
        assert self.holding.do("look")["state"] == "held"

    def close(self) -> None:
        """Ends what is left."""
        for job in (self.parked, self.holder):
            if job.state() == "RUNNING":
                job.end()
            job.close()


def has_ended(pid: int) -> bool:
    """Whether a process is no more, be it reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def test_a_parked_job_is_cancelled_and_leaves_nothing(site: Site) -> None:
    pair = Pair(site)
    pair.parked.cancel()
    pair.assert_parked_is_gone()
    pair.close()


def save_at_sigterm(rank: SlurmRank, file: Path) -> None:
    """Has SIGTERM copy the state of a rank from its device into a file."""
    rank.do("save_at_sigterm", file=str(file))


def test_a_parked_job_that_saves_when_it_is_cancelled_gets_its_turn_for_it(site: Site) -> None:
    pair = Pair(site)
    pair.holding.do("release")
    expected = pair.rank.do("acquire", timeout=60) and pair.rank.do("digest")
    pair.rank.do("release")
    pair.holding.do("acquire", timeout=60)
    saved = site.place_for_all() / "saved"
    save_at_sigterm(pair.rank, saved)
    pair.parked.cancel()
    pair.wait_for_event("turn_queued", "it waits for a turn")
    assert not saved.exists(), "its handler is blocked in the driver"
    pair.holding.do("release")
    until(saved.exists, "it has saved", KILL_WAIT_S)
    assert saved.read_text() == expected
    until(partial(has_ended, pair.rank.pid), "and has ended")
    saved.unlink()
    pair.close()


def test_a_parked_job_that_gets_no_turn_in_time_is_killed_as_slurm_says(site: Site) -> None:
    pair = Pair(site)
    saved = site.place_for_all() / "saved"
    save_at_sigterm(pair.rank, saved)
    began = time.monotonic()
    pair.parked.cancel()
    until(partial(has_ended, pair.rank.pid), "it is killed", 4 * KILL_WAIT_S)
    assert time.monotonic() - began > KILL_WAIT_S - 1, "it had its time"
    assert not saved.exists()
    pair.assert_parked_is_gone()
    pair.close()


def test_the_time_limit_ends_a_parked_job_and_lets_it_save_first(site: Site) -> None:
    pair = Pair(site)
    saved = site.place_for_all() / "saved"
    save_at_sigterm(pair.rank, saved)
    # Slurm counts in minutes, and looks twice in each.
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 2))
    site.run("scontrol", "update", f"JobId={pair.parked.id}", f"EndTime={end}")
    pair.wait_for_event("turn_queued", "it waits for a turn", 60)
    pair.holding.do("release")
    until(saved.exists, "it has saved", KILL_WAIT_S)
    pair.parked.wait_for("TIMEOUT")
    saved.unlink()
    pair.close()


def test_a_suspended_job_is_not_moved_and_goes_on_when_it_is_resumed(site: Site) -> None:
    jobs = [allocate(site, user) for user in ("alice", "bob")]
    node = site.nodes["n1"]
    since = node.mark()
    resident = jobs[0].trainer("n1", mib=STATE_MIB, seed=1)
    digest = resident.do("digest")
    site.run("scontrol", "suspend", jobs[0].id)
    until(lambda: frozen(resident.pid), "all of it is suspended")
    # Whatever the driver were asked, it would say so.
    node.fault(f"lock {resident.pid} * error:600")
    waiter = jobs[1].rank("n1")
    asked = waiter.start("acquire", timeout=60)
    failed = until(lambda: node.events("eviction_failed", since=since), "it cannot be moved")
    assert all("cgroup is frozen" in event["reason"] for event in failed)
    node.fault()
    site.run("scontrol", "resume", jobs[0].id)
    assert asked.wait(60)["state"] == "held"
    waiter.do("release")
    assert resident.do("acquire", timeout=60)["restored"] is True
    assert resident.do("digest") == digest
    resident.do("release")
    for job in jobs:
        job.end()


def test_a_parked_job_that_is_suspended_loses_its_turn_and_nothing_else(
    site: Site,
) -> None:
    pair = Pair(site)
    pair.holding.do("release")
    pair.rank.do("acquire", timeout=60)
    digest = pair.rank.do("digest")
    pair.rank.do("release")
    pair.holding.do("acquire", timeout=60)
    asked = pair.rank.start("acquire", timeout=60)
    until(lambda: pair.node.group("n1")["waiters"] == 1, "it waits for its turn")
    site.run("scontrol", "suspend", pair.parked.id)
    until(lambda: frozen(pair.rank.pid), "all of it is suspended")
    # Whatever the driver were asked, it would say so.
    pair.node.fault(f"restore {pair.rank.pid} * error:600")
    pair.holding.do("release")
    pair.wait_for_event("admission_failed", "it cannot be brought back")
    failed = pair.node.events("admission_failed", since=pair.since)
    assert all("cgroup is frozen" in event["reason"] for event in failed)
    assert pair.node.states()[pair.rank.pid] == "parked", "and it has lost nothing"
    assert pair.holding.do("acquire", timeout=60)["state"] == "held", "nobody waits for it"
    pair.holding.do("release")
    pair.node.fault()
    site.run("scontrol", "resume", pair.parked.id)
    with pytest.raises(RankError) as refused:
        asked.wait(60)
    assert "cgroup is frozen" in str(refused.value)
    assert pair.rank.do("acquire", timeout=60)["restored"] is True
    assert pair.rank.do("digest") == digest
    pair.rank.do("release")
    pair.close()


def frozen(pid: int) -> bool:
    """Whether the freezer of Slurm holds a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"


def test_a_requeued_job_is_a_new_arrival(site: Site) -> None:
    pair = Pair(site, "--requeue")
    before = pair.node.job(pair.parked.id)
    site.run("scontrol", "requeue", pair.parked.id)
    pair.assert_parked_is_gone()
    pair.parked.close()
    pair.parked.wait_for("PENDING")
    # Slurm lets two minutes pass before it begins a requeued job again.
    site.run("scontrol", "update", f"JobId={pair.parked.id}", "StartTime=now")
    pair.parked.wait_for("RUNNING", limit_s=60)
    again = pair.parked.rank("n1")
    asked = again.start("acquire", timeout=60)
    until(lambda: pair.node.group("n1")["waiters"] == 1, "it waits, behind all others")
    pair.holding.do("release")
    lease = asked.wait()
    assert (lease["state"], lease["restored"]) == ("held", False)
    assert before["switches"] > pair.node.job(pair.parked.id)["switches"]
    again.do("release")
    pair.close()


def test_tasks_of_an_array_are_jobs_of_their_own_and_as_many_run_as_there_are_tickets(
    site: Site,
) -> None:
    array = submit(site, "alice", "--array=1-3", "--wrap", "sleep 1000")
    running = partial(_ids, site, "-t", "RUNNING")
    until(lambda: len(running()) == TICKETS, "as many run as there are tickets")
    assert len(_ids(site)) == TICKETS + 1
    jobs = [Job(site, id, "alice") for id in running()]
    ranks = [job.trainer("n1", mib=STATE_MIB, seed=int(job.id)) for job in jobs]
    expected = {rank.pid: rank.job for rank in ranks}
    until(lambda: _known(site) == expected, "each is known")
    array.cancel()
    for job in jobs:
        job.close()


def _is_parked(rank: SlurmRank) -> bool:
    return rank.node.states().get(rank.pid) == "parked"


def _is_known(rank: SlurmRank) -> bool:
    return rank.pid in rank.node.states()


def _known(site: Site) -> dict[int, str]:
    """Returns which job each rank on n1 is known to belong to."""
    return {rank["pid"]: rank["job"]["id"] for rank in site.nodes["n1"].ask("ps")["ranks"]}


def _ids(site: Site, *options: str) -> list[str]:
    return site.run("squeue", "-h", "-r", "-o", "%A", *options).stdout.split()


def test_components_of_a_heterogeneous_job_are_one_job_that_leaves_at_once(site: Site) -> None:
    part = ("-N1", "-n1", "--gres=tslice:1")
    done = site.run(
        *("sbatch", "--parsable", *part, "-wn1", "--output=/dev/null", ":", *part, "-wn2"),
        *("--wrap", "sleep 1000"),
        user="alice",
    )
    job = Job(site, done.stdout.strip(), "alice")
    job.wait_for("RUNNING")
    ranks = [job.rank(node, f"--het-group={number}") for number, node in enumerate(("n1", "n2"))]
    lease = ranks[1].do("acquire", timeout=60)
    assert lease["groups"] == ["n1", "n2"]
    for number, rank in enumerate(ranks):
        rank.do("context")
        rank.do("fill", mib=STATE_MIB, seed=number)
    ranks[1].do("release")
    for rank in ranks:
        until(partial(_is_known, rank), "it is known")
    ranks[1].do("acquire", timeout=60)
    ranks[1].do("release")
    other = allocate(site, "bob", nodes="n2")
    waiter = other.rank("n2")
    waiter.do("acquire", timeout=60)
    for rank in ranks:
        until(partial(_is_parked, rank), "both leave, though one node is wanted")
    waiter.do("release")
    job.end()
    other.end()


def test_slurms_daemons_restart_and_parked_jobs_do_not_notice(site: Site) -> None:
    pair = Pair(site)
    node = pair.node
    node.stop_slurmd()
    site.stop_slurmctld()
    site.start_slurmctld()
    node.start_slurmd()
    pair.holding.do("release")
    assert pair.rank.do("acquire", timeout=60)["restored"] is True
    pair.rank.do("release")
    until(lambda: pair.parked.state() == "RUNNING", "Slurm knows it still")
    pair.close()


def test_a_daemon_that_restarts_knows_slurms_jobs_still(site: Site) -> None:
    pair = Pair(site)
    pair.node.kill_daemon()
    pair.node.start_daemon()
    pair.holding.do("release")
    pair.parked.cancel()
    pair.wait_for_event("job_ended", "its epilog was here")
    pair.close()


def test_a_node_that_is_drained_takes_no_jobs_and_those_on_it_go_on(site: Site) -> None:
    pair = Pair(site)
    site.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    later = submit(site, "alice", "--wrap", "true")
    pair.holding.do("release")
    assert pair.rank.do("acquire", timeout=60)["restored"] is True
    pair.rank.do("release")
    assert later.state() == "PENDING"
    pair.close()
    site.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    later.wait_for("COMPLETED")


def test_a_node_that_fails_and_comes_back_has_no_job_and_the_other_node_none_of_it(
    site: Site,
) -> None:
    job = allocate(site, "alice", "--no-requeue", nodes="n1,n2")
    ranks = [job.rank(node) for node in ("n1", "n2")]
    ranks[0].do("acquire", timeout=60)
    for number, rank in enumerate(ranks):
        rank.do("context")
        rank.do("fill", mib=STATE_MIB, seed=number)
    ranks[0].do("release")
    site.lose_power("n2")
    until(lambda: site.states()["n2"].startswith("down"), "Slurm gives it up", 60)
    job.wait_for("NODE_FAIL", "FAILED", "CANCELLED", "GONE")
    job.close()
    other = allocate(site, "bob")
    waiter = other.rank("n1")
    assert waiter.do("acquire", timeout=60)["state"] == "held", "the other node goes on"
    waiter.do("release")
    other.end()
    site.boot("n2")
    until(site.is_idle, "it is in service again", 60)
