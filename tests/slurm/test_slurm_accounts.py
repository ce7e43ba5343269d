"""Slurm's accounts and records: a slurmdbd says whose job is whose, and is told what it had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest
from harness import RankError, Settings, until
from slurm_accounting import Accounting
from slurm_jobs import Job, allocate, leave_nothing, opened_site, submit
from slurm_site import USERS, Site

#: Two of these do not fit on a device of 64 MiB.
STATE_MIB = 40
#: Short, so that a job that runs for seconds is told of more than once.
COMMENT_S = 0.5


@pytest.fixture(scope="module")
def accounted_all_day() -> Iterator[Site]:
    """A node that jobs of two accounts may lease, and those of a third may not."""
    settings: Settings = {
        "groups.n1": {"devices": ["n1:*"], "accounts": ["rl", "vision"]},
        "slurm": {"comment_s": COMMENT_S},
    }
    with opened_site("n1", settings=settings, with_accounting=True) as site:
        manage = accounting_of(site).manage
        manage("add", "account", "rl,vision,other")
        manage("add", "user", "alice", "account=rl,other")
        manage("add", "user", "bob", "account=vision,other")
        yield site


@pytest.fixture
def accounted(accounted_all_day: Site) -> Iterator[Site]:
    """That node with nobody on it, on which each test leaves nothing."""
    yield accounted_all_day
    leave_nothing(accounted_all_day)


def accounting_of(site: Site) -> Accounting:
    assert site.accounting is not None
    return site.accounting


def remark_of(site: Site, job: Job) -> str:
    """Returns the administrator's comment that the controller has on a job."""
    shown = site.run("scontrol", "show", "job", job.id).stdout
    return next((line.strip() for line in shown.splitlines() if "AdminComment=" in line), "")


def put_remark(site: Site, job: Job) -> str | None:
    """Has the comment written, as the daemon does; returns it, or None if there is no place."""
    command = ("tslicectl", "slurm", "comment", "--json", "--strict")
    environment = {"SLURM_JOB_ID": job.id, "SLURM_JOB_UID": str(USERS[job.user])}
    told = site.run(*command, "--socket", str(site.nodes["n1"].socket), env=environment).stdout
    written: str | None = json.loads(told)["comment"]
    return written


def stored(site: Site, job: Job, field: str) -> str:
    """Returns what the accounting has of a job."""
    return site.run("sacct", "-n", "-X", "-P", "-j", job.id, "-o", field).stdout.strip()


def test_a_group_is_for_jobs_of_its_accounts_whoever_runs_them_g10(accounted: Site) -> None:
    site = accounted
    allowed = [
        allocate(site, user, f"--account={account}")
        for user, account in (("alice", "rl"), ("bob", "vision"))
    ]
    for job in allowed:
        rank = job.rank("n1")
        assert rank.do("acquire", timeout=60)["groups"] == ["n1"]
        rank.do("release")
        job.end()
    other = allocate(site, "alice", "--account=other")
    with pytest.raises(RankError) as refused:
        other.rank("n1").do("acquire", groups="n1", timeout=60)
    assert refused.value.code == "not_permitted"
    other.end()
    strange = ("sbatch", "--account=rl", "--gres=tslice:1", "--wrap", "true")
    assert "Invalid account" in site.run(*strange, user="bob", check=False).stderr


def test_usage_by_account_is_what_the_jobs_of_each_account_had(accounted: Site) -> None:
    site, node = accounted, accounted.nodes["n1"]
    jobs = [
        allocate(site, user, f"--account={account}")
        for user, account in (("alice", "rl"), ("bob", "vision"))
    ]
    ranks = [job.trainer("n1", mib=STATE_MIB, seed=n) for n, job in enumerate(jobs)]
    for rank in (*ranks, *ranks):
        rank.do("acquire", timeout=60)
        rank.do("release")
    for job in jobs:
        job.end()
    told = [argument for job in jobs for argument in ("--job", job.id)]
    asked = ["tslicectl", "usage", "--socket", str(node.socket), "--json", *told]
    by_account = json.loads(site.run(*asked, "--by", "account").stdout)["usage"]
    by_job = json.loads(site.run(*asked).stdout)["usage"]
    accounts = {f"lab/{USERS[job.user]}/{job.id}": stored(site, job, "Account") for job in jobs}
    assert sorted(accounts.values()) == ["rl", "vision"]
    assert {row["name"]: row["account"] for row in by_job} == accounts
    for row in by_account:
        own = [each for each in by_job if each["account"] == row["name"]]
        for field in ("leases", "switches", "held_s", "useful_s", "waited_s", "parked_s"):
            assert row[field] == pytest.approx(sum(each[field] for each in own))
        assert row["leases"] == 3
        assert row["parked_s"] > 0
    assert [row["name"] for row in by_account] == ["rl", "vision"]


def test_a_limit_of_tickets_on_an_account_holds_its_jobs_back(accounted: Site) -> None:
    site, manage = accounted, accounting_of(accounted).manage
    manage("modify", "account", "rl", "set", "GrpTRES=gres/tslice=1")
    first = allocate(site, "alice", "--account=rl")
    second = submit(site, "alice", "--account=rl", "--wrap", "true")
    until(lambda: site.show_job(second.id)["Reason"].startswith("AssocGrp"), "it may have no more")
    others = submit(site, "bob", "--account=vision", "--wrap", "true")
    others.wait_for("COMPLETED")
    assert second.state() == "PENDING", "though there was a ticket"
    manage("modify", "account", "rl", "set", "GrpTRES=gres/tslice=-1")
    first.end()
    second.wait_for("COMPLETED")


def test_slurms_records_of_a_job_say_what_it_had_of_the_devices(accounted: Site) -> None:
    site = accounted
    job = allocate(site, "alice", "--account=rl")
    until(lambda: "AdminComment=tslice leases=0" in remark_of(site, job), "that it shares")
    rank = job.rank("n1")
    for _ in range(3):
        rank.do("acquire", timeout=60)
        rank.do("release")
    until(lambda: "leases=3" in remark_of(site, job), "what it had so far")
    assert remark_of(site, job).endswith("groups=n1")
    rank.do("acquire", timeout=60)
    job.end()
    # The controller has what was so before; the accounting is told of the end.
    # It may take its time to hear of the job at all.
    last = until(lambda: put_remark(site, job) or "", "there is a place for it")
    assert last.startswith("tslice leases=4 switches=0 held_s=")
    until(lambda: stored(site, job, "AdminComment") == last, "the sums")


def test_a_task_of_an_array_has_its_own_record(accounted: Site) -> None:
    site = accounted
    array = submit(site, "bob", "--account=vision", "--array=1-2", "--wrap", "sleep 1000")
    listed = partial(site.run, "squeue", "-h", "-r", "-t", "R", "-o", "%A")
    until(lambda: len(listed().stdout.split()) == 2, "both run")
    ids = listed().stdout.split()
    tasks = [Job(site, id, "bob") for id in ids]
    rank = tasks[0].rank("n1")
    rank.do("acquire", timeout=60)
    rank.do("release")

    def leases() -> list[str]:
        form = "JobID:24,admin_comment:200"
        lines = site.run("squeue", "-h", "-r", "-O", form).stdout.splitlines()
        told = {line.split()[0]: line.split()[2] for line in lines if "tslice" in line}
        return [told.get(id, "") for id in ids]

    until(lambda: leases() == ["leases=1", "leases=0"], "each has what is said of it")
    array.cancel()
    tasks[0].close()


def test_what_somebody_else_has_written_there_stays(accounted: Site) -> None:
    site = accounted
    job = submit(site, "alice", "--hold", "--wrap", "sleep 1000")
    site.run("scontrol", "update", f"JobId={job.id}", "AdminComment=ask Carol")
    site.run("scontrol", "release", job.id)
    job.wait_for("RUNNING")
    assert put_remark(site, job) is None
    job.end()
    assert "AdminComment=ask Carol" in remark_of(site, job)
    assert stored(site, job, "AdminComment") == "ask Carol"


def test_without_accounting_a_job_has_its_record_until_it_ends(site: Site) -> None:
    job = allocate(site, "alice")
    assert remark_of(site, job) == "", "here the daemon writes none"
    text = put_remark(site, job)
    assert remark_of(site, job) == f"AdminComment={text}"
    forged = ("scontrol", "update", f"JobId={job.id}", "AdminComment=tslice leases=0")
    assert "denied" in site.run(*forged, user="alice", check=False).stderr
    job.end()
    assert put_remark(site, job) is None
