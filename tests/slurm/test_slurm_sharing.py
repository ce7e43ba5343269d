"""Jobs of two users on the same devices, as Slurm starts them."""

from __future__ import annotations

import json

from harness import until
from slurm_jobs import Job, SlurmRank, allocate, submit
from slurm_site import PYTHON, USERS, Site

#: Two of these do not fit on a device of 64 MiB.
STATE_MIB = 40


def test_jobs_of_two_users_alternate_on_the_same_devices_and_a_third_pends_for_a_ticket_g12(
    site: Site,
) -> None:
    node = site.nodes["n1"]
    jobs = [allocate(site, user) for user in ("alice", "bob")]
    ranks = [job.trainer("n1", mib=STATE_MIB, seed=n) for n, job in enumerate(jobs, start=1)]
    third = submit(site, "alice", "--wrap", "true")
    expected: dict[SlurmRank, str] = {}
    tokens = [0]
    comes, leaves = ranks
    for _ in range(4):
        lease = comes.do("acquire", timeout=60)
        assert lease["groups"] == ["n1"]
        tokens.append(lease["tokens"]["n1"])
        assert node.states() == {comes.pid: "running", leaves.pid: "parked"}
        assert comes.do("digest") == expected.setdefault(comes, comes.do("digest"))
        comes.do("release")
        comes, leaves = leaves, comes
    assert len(set(expected.values())) == 2
    assert tokens == sorted(set(tokens)), "each grant has a higher token"
    uids = {rank["pid"]: rank["uid"] for rank in node.ask("ps")["ranks"]}
    assert sorted(uids.values()) == [21001, 21002]
    until(lambda: site.show_job(third.id)["Reason"] == "Resources", "there is no ticket for it")
    assert third.state() == "PENDING"
    jobs[0].end()
    third.wait_for("COMPLETED")
    jobs[1].end()
    assert_used(site, jobs)


def assert_used(site: Site, jobs: list[Job]) -> None:
    """Looks at what tslicectl says of what two jobs had, as a document and as values."""
    socket = str(site.nodes["n1"].socket)
    told = [arg for job in jobs for arg in ("--job", job.id)]
    command = ["tslicectl", "usage", "--socket", socket, *told]
    rows = json.loads(site.run(*command, "--json").stdout)["usage"]
    assert [(row["name"], row["leases"]) for row in rows] == [
        (f"lab/{USERS[job.user]}/{job.id}", 3) for job in jobs
    ]
    for row in rows:
        assert 0 < row["useful_s"] < row["held_s"]
        assert row["waited_s"] > 0
        assert row["parked_s"] > 0
    users = site.run(*command, "--by", "user", "--csv").stdout.splitlines()
    assert [line.split(",")[1] for line in users] == ["uid", *map(str, sorted(USERS.values()))]


def load(job: Job, *nodes: str) -> list[SlurmRank]:
    """Starts a rank on each node that has made its state, in a turn of all of them."""
    ranks = [job.rank(node) for node in nodes]
    lease = ranks[0].do("acquire", timeout=60)
    assert lease["groups"] == list(nodes), "without a name it is of all the job's nodes"
    for number, rank in enumerate(ranks):
        rank.do("context")
        rank.do("fill", mib=STATE_MIB, seed=int(job.id) * 10 + number)
    ranks[0].do("release")
    return ranks


def test_two_jobs_on_two_nodes_alternate_on_both_at_once_g12(site: Site) -> None:
    jobs = [allocate(site, user, nodes="n1,n2") for user in ("alice", "bob")]
    teams = [load(job, "n1", "n2") for job in jobs]
    digests: dict[int, list[str]] = {}
    for turn in range(4):
        comes, leaves = teams[turn % 2], teams[(turn + 1) % 2]
        comes[0].do("acquire", timeout=60)
        states = {pid: s for node in site.nodes.values() for pid, s in node.states().items()}
        expected = {rank.pid: "running" for rank in comes} | {r.pid: "parked" for r in leaves}
        assert states == expected
        looked = [rank.do("digest") for rank in comes]
        assert looked == digests.setdefault(turn % 2, looked)
        comes[0].do("release")
    assert digests[0] != digests[1]
    for job in jobs:
        job.end()


def test_ranks_on_two_nodes_that_ask_for_themselves_are_one_round(site: Site) -> None:
    job = allocate(site, "alice", nodes="n1,n2")
    ranks = [job.rank(node, WORLD_SIZE="2") for node in ("n1", "n2")]
    asked = [rank.start("acquire", timeout=60) for rank in ranks]
    leases = [answer.wait() for answer in asked]
    assert [lease["groups"] for lease in leases] == [["n1", "n2"]] * 2
    assert leases[0]["tokens"] == leases[1]["tokens"]
    for rank in ranks:
        rank.do("release")
    job.end()


def test_tasks_are_told_socket_job_and_groups_and_keep_what_their_user_has_set(site: Site) -> None:
    job = allocate(site, "alice", nodes="n1,n2")

    def told(*names: str, node: str = "n2", **environment: str) -> list[str | None]:
        script = f"import os; print(*[os.environ.get(n) for n in {names!r}], sep='|')"
        command = ["srun", f"--jobid={job.id}", "--overlap", "-N1", "-n1", f"-w{node}"]
        done = site.run(*command, PYTHON, "-c", script, user="alice", env=environment)
        return [None if v == "None" else v for v in done.stdout.strip().split("|")]

    names = ("TSLICE_SOCKET", "TSLICE_JOB_ID", "TSLICE_GROUPS", "SPT_NOENV")
    assert told(*names) == [str(site.nodes["n2"].socket), job.id, "job=n1,n2", "1"]
    own = {"TSLICE_JOB_ID": "sweep", "TSLICE_GROUPS": "trainer=n1"}
    assert told(*names[1:3], **own) == ["sweep", "trainer=n1"]
    # A job that is submitted from within another one inherits its environment.
    stale = {"TSLICE_JOB_ID": "1", "TSLICE_FROM_SLURM": "TSLICE_JOB_ID=1 TSLICE_GROUPS=job=n9"}
    assert told(names[1], names[2], **stale, TSLICE_GROUPS="job=n9") == [job.id, "job=n1,n2"]
    job.end()


def test_a_batch_script_is_told_too_and_the_command_line_knows_its_job(site: Site) -> None:
    out = site.place_for_all()
    script = "tslicectl acquire --json && tslicectl show job $SLURM_JOB_ID"
    job = submit(site, "bob", f"--output={out}/%j", "--wrap", script)
    job.wait_for("COMPLETED")
    text = (out / job.id).read_text()
    assert f"Slurm job  {job.id}, 1 of its node's tickets" in text
    assert '"groups": ["n1"]' in text


def test_experiments_of_one_allocation_are_jobs_of_their_own_that_alternate(site: Site) -> None:
    job = allocate(site, "alice")
    ranks = []
    for number, name in enumerate("ab"):
        rank = job.rank("n1", TSLICE_JOB_ID=name)
        rank.job = f"{job.id}.{name}"
        ranks.append(rank)
        rank.do("initialise", group="n1", mib=STATE_MIB, seed=number)
    expected = {ranks[0].pid: "parked", ranks[1].pid: "running"}
    until(lambda: site.nodes["n1"].states() == expected, "each is where it belongs")
    jobs = {r["pid"]: r["job"]["id"] for r in site.nodes["n1"].ask("ps")["ranks"]}
    assert jobs == {rank.pid: rank.job for rank in ranks}
    job.end()


def test_a_task_in_mount_and_pid_name_spaces_of_its_own_is_its_jobs_and_is_parked_g12(
    site: Site,
) -> None:
    job, other = allocate(site, "alice"), allocate(site, "bob")
    # As containers of enroot and pyxis are: no other privileges than the user's.
    contained = job.rank(
        "n1", within=("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    )
    assert contained.do("whoami") == {"pid": 1, "uid": 0}, "it knows itself by another pid and uid"
    contained.do("acquire", timeout=60)
    contained.do("context")
    contained.do("fill", mib=STATE_MIB, seed=1)
    digest = contained.do("digest")
    contained.do("release")
    rank = other.trainer("n1", mib=STATE_MIB, seed=2)
    node = site.nodes["n1"]

    def seen() -> dict[str, str]:
        return {r["job"]["id"]: r["state"] for r in node.ask("ps")["ranks"]}

    until(lambda: seen() == {job.id: "parked", other.id: "running"}, "both are known")
    uids = {r["job"]["id"]: r["uid"] for r in node.ask("ps")["ranks"]}
    assert uids == {job.id: USERS["alice"], other.id: USERS["bob"]}
    contained.do("acquire", timeout=60)
    assert contained.do("digest") == digest
    contained.do("release")
    assert node.states()[rank.pid] == "parked"
    job.end()
    other.end()
