"""Slurm's hooks: whatever becomes of the daemon, they end in time and the node stays in service."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial

import pytest
from harness import until
from slurm_jobs import Job, allocate, submit
from slurm_site import PYTHON, SPANK_HEADER, USERS, Node, Site

#: What the scripts allow prolog and epilog to take.
LIMITS_S = {"prolog": 7.0, "epilog": 14.0}


def kill(node: Node) -> None:
    """The daemon is gone, and its socket is left."""
    node.kill_daemon()


def stop(node: Node) -> None:
    """The daemon is not there at all."""
    assert node.stop_daemon() == 0
    assert not node.socket.exists()


def hang(node: Node) -> None:
    """The daemon is there and does not answer."""
    assert node.daemon is not None
    os.kill(node.daemon.pid, signal.SIGSTOP)


def await_links(site: Site) -> None:
    """Waits until the daemons see each other."""
    for node in site.nodes.values():
        until(partial(_is_linked, node), f"{node.name} is linked")


def _is_linked(node: Node) -> bool:
    return bool(node.status()["peers"][0]["state"] == "connected")


@pytest.mark.parametrize("breaks", [kill, stop, hang])
def test_without_a_daemon_a_job_begins_and_ends_and_the_node_stays_in_service(
    site: Site, breaks: Callable[[Node], None]
) -> None:
    node = site.nodes["n1"]
    breaks(node)
    began = time.monotonic()
    job = submit(site, "alice", "--wrap", "true")
    try:
        until(lambda: job.state() in ("COMPLETING", "COMPLETED"), "it has run")
        job.wait_for("COMPLETED")
        # Beyond what the hooks may take there is what Slurm itself needs, on a busy machine.
        assert time.monotonic() - began < sum(LIMITS_S.values()) + 15
        until(site.is_idle, "the node is in service")
    finally:
        if breaks is hang:
            assert node.daemon is not None
            os.kill(node.daemon.pid, signal.SIGCONT)
        else:
            node.start_daemon()
    await_links(site)


def is_drained(site: Site) -> bool:
    """Whether n1 takes no jobs, be it that it answers just now or not."""
    return site.states()["n1"].startswith("drain")


def check_health(site: Site) -> None:
    """Runs the health check of n1, as its slurmd does."""
    environment = {"SLURMD_NODENAME": "n1"}
    site.run(str(site.root / "healthcheck"), on="n1", env=environment, limit_s=60)


def test_a_health_check_drains_a_node_without_a_daemon_and_puts_it_back(site: Site) -> None:
    check_health(site)
    assert not is_drained(site)
    node = site.nodes["n1"]
    stop(node)
    try:
        check_health(site)
        assert is_drained(site)
        assert "Reason=tsliced: socket" in site.run("scontrol", "show", "node", "n1").stdout
    finally:
        node.start_daemon()
    check_health(site)
    assert not is_drained(site)
    await_links(site)


def test_a_health_check_leaves_alone_what_somebody_else_has_drained(site: Site) -> None:
    site.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=disks")
    check_health(site)
    assert is_drained(site)
    site.run("scontrol", "update", "NodeName=n1", "State=RESUME")


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_a_hook_ends_within_its_limit_while_the_daemon_hangs(site: Site, hook: str) -> None:
    node = site.nodes["n1"]
    assert node.daemon is not None
    os.kill(node.daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        environment = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "9", "SLURM_JOB_UID": "1"}
        done = site.run(str(site.root / hook), on="n1", env=environment)
        assert time.monotonic() - began < LIMITS_S[hook] + 2
        assert "daemon" in done.stderr
    finally:
        os.kill(node.daemon.pid, signal.SIGCONT)


#: Makes device state, and ends when it is killed.
STRANGER = "import rank, signal; rank.context(); rank.fill(8); signal.pause()"
#: The same in a turn, which it keeps if it is told so.
MEMBER = """
import rank, signal, sys
from libtimeslice import connect
turn = connect().lease(timeout=60)
turn.__enter__()
rank.context()
rank.fill(40)
if sys.argv[1:] != ["holds"]:
    turn.__exit__(None, None, None)
signal.pause()
"""


def orphan(site: Site, job: Job, program: str, *arguments: str) -> int:
    """Starts what outlives its job, as it can where Slurm tracks processes without cgroups."""
    script = 'setsid "$@" >/dev/null 2>&1 & echo $!; sleep 1000'
    step = site.start(
        *("srun", f"--jobid={job.id}", "--overlap", "-wn1", "--quiet", "sh", "-c", script, "sh"),
        *(PYTHON, "-c", program, *arguments),
        user=job.user,
        PYTHONPATH=f"{site.environment()['PYTHONPATH']}:{site.root}/repository/tests/e2e",
    )
    assert step.stdout is not None
    pid = int(step.stdout.readline())
    node = site.nodes["n1"]
    until(lambda: node.states() == {pid: "running"}, "it is on a device")
    assert node.job(job.id)["ranks"] == 1
    (site.cgroup_of_no_job() / "cgroup.procs").write_text(str(pid))
    return pid


def test_an_epilog_ends_what_slurm_has_left_and_finds_the_devices_empty(site: Site) -> None:
    node = site.nodes["n1"]
    job = allocate(site, "alice")
    orphan(site, job, STRANGER)
    since = node.mark()
    job.cancel()
    ended = until(lambda: node.events("job_ended", since=since), "the epilog is over")
    assert ended[0]["reason"] is None
    assert node.states() == {}
    assert node.used_bytes_of_all() == 0


@pytest.mark.parametrize("holds", [True, False], ids=["holds", "is parked"])
def test_an_epilog_ends_an_orphan_with_its_lease_its_parked_state_and_its_memory(
    site: Site, holds: bool
) -> None:
    node = site.nodes["n1"]
    job, other = allocate(site, "alice"), allocate(site, "bob")
    pid = orphan(site, job, MEMBER, *(["holds"] if holds else []))
    waiter = other.rank("n1")
    asked = waiter.start("acquire", timeout=60)
    if holds:
        until(lambda: node.group("n1")["waiters"] == 1, "the other one waits")
    else:
        asked.wait(60)
        assert node.states() == {pid: "parked"}
    since = node.mark()
    job.cancel()
    asked_to = until(lambda: node.events("ending", since=since), "the epilog ends what is left")
    ended = until(lambda: node.events("job_ended", since=since), "the epilog is over")
    assert ended[0]["at"] - asked_to[0]["at"] < 10, "it has so long"
    assert ended[0]["reason"] is None, "the devices were looked at"
    assert (node.states(), node.job(job.id)) == ({}, {})
    assert asked.wait(60)["state"] == "held"
    assert node.status()["memory"]["reserved_bytes"] == 0
    assert node.used_bytes_of_all() == 0
    waiter.do("release")
    other.end()


def test_only_root_tells_of_jobs_g10(site: Site) -> None:
    told = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "1", "SLURM_JOB_UID": str(USERS["bob"])}
    socket = str(site.nodes["n1"].socket)
    for hook in ("prolog", "epilog"):
        command = ["tslicectl", "slurm", hook, "--strict", "--socket", socket]
        done = site.run(*command, user="alice", env=told, check=False)
        assert done.returncode == 4, done.stderr
        assert "may not tell of Slurm's jobs" in done.stderr


def test_a_hook_that_is_called_by_hand_says_what_is_missing(site: Site) -> None:
    done = site.run("tslicectl", "slurm", "epilog", "--strict", check=False)
    assert done.returncode == 2
    assert "SLURM_JOB_ID" in done.stderr
    assert site.run("tslicectl", "slurm", "epilog").returncode == 0


def test_a_job_whose_prolog_met_no_daemon_is_asked_about_when_it_first_speaks(site: Site) -> None:
    node = site.nodes["n1"]
    node.kill_daemon()
    job = allocate(site, "alice", nodes="n1,n2")
    node.start_daemon()
    await_links(site)
    lease = job.rank("n1").do("acquire", timeout=60)
    assert lease["groups"] == ["n1", "n2"]
    job.end()


@pytest.mark.skipif(
    not SPANK_HEADER.exists(),
    reason=f"there is no {SPANK_HEADER} (on Debian: apt-get install libslurm-dev)",
)
def test_an_option_of_srun_names_an_experiment_or_turns_sharing_off(site: Site) -> None:
    job = allocate(site, "alice")

    def told(option: str) -> subprocess.CompletedProcess[str]:
        step = ["srun", f"--jobid={job.id}", "--overlap", "-n1", "--quiet", option]
        script = "echo $TSLICE_JOB_ID ${TSLICE_MODE:-none}"
        return site.run(*step, "sh", "-c", script, user="alice", check=False)

    assert told("--tslice=sweep").stdout.split() == ["sweep", "none"]
    assert told("--tslice=off").stdout.split() == [job.id, "off"]
    refused = told(f"--tslice={'x' * 129}")
    assert refused.returncode != 0
    assert "1 to 128 characters" in refused.stderr
    job.end()
