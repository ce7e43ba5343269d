"""docs/slurm.md, word for word: two bare nodes become nodes that share their devices.

Each node is a box with a real systemd. What the page takes for granted (names that resolve, a Slurm
that is configured but for sharing, users) is made here, and so are softcuda's devices.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import slurm_site
from box import DEVICE_SETTINGS, ENVIRONMENT, PYTHON, RANK, Box, why_not
from harness import REPOSITORY, Rank, build_softcuda, until
from history import Recorder
from namespaces import Network, skip_without_namespaces
from slurm_site import USERS

NAMES = ("n1", "n2")
PAGE = REPOSITORY / "docs" / "slurm.md"
#: A block of commands, and where they are to be typed.
BLOCK = re.compile(r"<!-- (?P<where>[^>]+) -->\n```sh\n(?P<commands>.*?)```\n", re.S)
#: What each node has before: a Slurm without sharing.
SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=n1
SlurmUser=root
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName=n1 CPUs=16 RealMemory=1000
NodeName=n2 CPUs=16 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES OverSubscribe=YES State=UP
"""


class Block(NamedTuple):
    """Commands of the page, and where they are typed."""

    where: str
    commands: str


def blocks() -> list[Block]:
    """Returns all commands of the page, in order."""
    return [Block(match["where"], match["commands"]) for match in BLOCK.finditer(PAGE.read_text())]


class Cluster:
    """Two boxes on one network, which are bare nodes as the page takes them."""

    def __init__(self, stack: ExitStack, bundle: Path) -> None:
        network = Network(*NAMES)
        stack.callback(network.close)
        self.nodes: dict[str, Box] = {}
        for name in NAMES:
            box = Box(within=network.inside(name))
            stack.callback(box.close)
            self.nodes[name] = box
        hosts = "".join(f"{address} {name}\n" for name, address in network.addresses.items())
        users = "".join(f"{name}:x:{uid}:{uid}::/tmp:/bin/sh\n" for name, uid in USERS.items())
        archive = f"/opt/bundles/{bundle.name}.tar.gz"
        for name, box in self.nodes.items():
            box.make_devices()
            box.write("/tmp/hosts", hosts)
            box.write("/tmp/users", users)
            box.write("/etc/slurm/slurm.conf", SLURM_CONF)
            # A box has both versions of cgroups, which this plugin refuses to find by itself.
            box.write("/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n")
            box.write("/etc/tsliced/tsliced.toml.d/devices.toml", toml_of(DEVICE_SETTINGS))
            box.run("rm", "-f", "/etc/slurm/gres.conf")
            script = (
                f"hostname {name}; cat /tmp/hosts >>/etc/hosts; cat /tmp/users >>/etc/passwd; "
                f"ln -s {archive} /root/{bundle.name}.tar.gz; mkdir -p /var/lib/slurm"
            )
            box.run("sh", "-ec", script)

    def type(self, block: Block) -> dict[str, str]:
        """Types a block where it says, and returns what is printed on each node."""
        where = list(NAMES) if block.where == "every node" else [block.where[-2:]]
        shell = ["env", "-C", "/root", "sh", "-ec", block.commands]
        if block.where.startswith("a user"):
            shell = self.as_user("alice", "sh", "-ec", block.commands)
        with ThreadPoolExecutor() as pool:
            done = pool.map(lambda name: self.nodes[name].run(*shell), where)
            return {name: each.stdout for name, each in zip(where, done, strict=True)}

    def as_user(self, user: str, *command: str) -> list[str]:
        """Returns a command of a user, who has been told where softcuda is."""
        uid = str(USERS[user])
        variables = [f"{key}={value}" for key, value in ENVIRONMENT.items()]
        who = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        return [*who, "env", "-C", "/tmp", f"USER={user}", *variables, *command]

    def states(self) -> dict[str, str]:
        """Returns the states of the nodes, as Slurm has them."""
        told = self.nodes["n1"].run("sinfo", "-h", "-N", "-o", "%n %T", check=False).stdout
        return dict(line.split() for line in told.splitlines())

    def is_ready(self) -> bool:
        """Whether the nodes are in service, and the daemons see each other."""
        if self.states() != dict.fromkeys(NAMES, "idle"):
            return False
        checked = [
            box.run("tslicectl", "cluster", "check", check=False) for box in self.nodes.values()
        ]
        return not any(each.returncode for each in checked)

    def is_drained_and_known(self) -> bool:
        """Whether the second node is drained, and has told the controller what it has."""
        shown = self.nodes["n1"].run("scontrol", "show", "node", "n2", check=False).stdout
        return "State=IDLE+DRAIN " in shown

    def ranks(self) -> dict[str, dict[int, str]]:
        """Returns the states of all ranks, by node and pid in its box."""
        told = {
            name: json.loads(box.run("tslicectl", "ps", "--json").stdout)["ranks"]
            for name, box in self.nodes.items()
        }
        return {name: {r["pid"]: r["state"] for r in ranks} for name, ranks in told.items()}


def toml_of(settings: Mapping[str, Mapping[str, object]]) -> str:
    lines: list[str] = []
    for name, section in settings.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
    return "\n".join([*lines, ""])


class Team:
    """A job of a user on both nodes, with a rank on each of them."""

    def __init__(self, cluster: Cluster, user: str) -> None:
        self._cluster = cluster
        self._box = cluster.nodes["n1"]
        submit = ["sbatch", "--parsable", "--nodes=2", "--gres=tslice:1", "--output=/dev/null"]
        submitted = self._box.run(*cluster.as_user(user, *submit, "--wrap=sleep 1000"))
        self.id = submitted.stdout.strip()
        self.user = user
        until(lambda: self._state() == "RUNNING", f"job {self.id} runs")
        self.ranks = [self._rank(name) for name in NAMES]

    def _state(self) -> str:
        return self._box.run("squeue", "-h", "-j", self.id, "-o", "%T", check=False).stdout.strip()

    def _rank(self, node: str) -> Rank:
        step = ["srun", f"--jobid={self.id}", "--overlap", "-N1", "-n1", f"-w{node}", "--quiet"]
        command = self._cluster.as_user(self.user, *step, "--unbuffered", PYTHON, RANK)
        process = subprocess.Popen(
            self._box.enter(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        return Rank(self.id, process, Recorder(Path("/nonexistent")))

    def load(self) -> None:
        """Makes state on both nodes, in a turn of both."""
        assert self.acquire() == list(NAMES)
        for number, rank in enumerate(self.ranks):
            rank.do("context")
            rank.do("fill", mib=40, seed=int(self.id) * 10 + number)
        self.digests = self.look()
        self.release()

    def acquire(self) -> list[str]:
        """Waits for a lease that names no groups, and returns which it has."""
        groups: list[str] = self.ranks[0].do("acquire", timeout=60)["groups"]
        return groups

    def release(self) -> None:
        self.ranks[0].do("release")

    def look(self) -> list[str]:
        return [rank.do("digest") for rank in self.ranks]

    def has_remark(self) -> bool:
        """Whether the daemon, in the sandbox of its service, has written into Slurm's record."""
        form = ("-h", "-j", self.id, "-O", "admin_comment:200")
        return self._box.run("squeue", *form).stdout.startswith("tslice leases=")

    def cancel(self) -> None:
        """Has its user cancel it, and waits until Slurm has forgotten it."""
        self._box.run(*self._cluster.as_user(self.user, "scancel", self.id))
        until(lambda: not self._state(), f"job {self.id} has ended")
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def cluster(bundle: Path) -> Iterator[Cluster]:
    for reason in (why_not(), slurm_site.why_not()):
        if reason is not None:
            pytest.skip(reason)
    skip_without_namespaces()
    build_softcuda()
    with ExitStack() as stack:
        made = Cluster(stack, bundle)
        yield made
        # pytest shows this for a test that failed.
        for box in made.nodes.values():
            sys.stdout.write(box.run("journalctl", "--no-pager", "-n", "100").stdout)


@pytest.mark.timeout(300)
def test_two_bare_nodes_become_shared_as_the_page_says_and_jobs_of_two_users_alternate_on_both_g12(
    cluster: Cluster,
) -> None:
    for block in blocks():
        if "tslicectl cluster check" in block.commands:
            until(cluster.is_ready, "the nodes are ready", 60)
        if "State=RESUME" in block.commands:
            until(cluster.is_drained_and_known, "the controller knows the node again", 60)
        if "State=DRAIN" in block.commands:
            # All is set up, and jobs have run: now at the same time.
            alternate(cluster)
        told = cluster.type(block)
        if "sinfo" in block.commands:
            assert [line.split() for line in told["n1"].splitlines()[1:3]] == [
                ["n1", "idle", "tslice:2"],
                ["n2", "idle", "tslice:2"],
            ]
        if "State=DRAIN" in block.commands:
            assert cluster.states()["n2"] == "drained"
    until(cluster.is_ready, "the node is shared again", 60)
    squeue = cluster.nodes["n1"].run("squeue", "-h").stdout
    assert squeue == ""


def alternate(cluster: Cluster) -> None:
    """Lets jobs of two users on both nodes take turns, with all that they have on the devices."""
    until(
        lambda: cluster.nodes["n1"].run("squeue", "-h").stdout == "", "the page's jobs have ended"
    )
    teams = [Team(cluster, user) for user in ("alice", "bob")]
    for team in teams:
        team.load()
    assert teams[0].digests != teams[1].digests
    for turn in range(4):
        team = teams[turn % 2]
        assert team.acquire() == list(NAMES)
        for states in cluster.ranks().values():
            assert sorted(states.values()) == ["parked", "running"]
        assert team.look() == team.digests
        team.release()
    for team in teams:
        until(team.has_remark, "Slurm's record says that it shares")
        team.cancel()
    until(lambda: cluster.ranks() == {name: {} for name in NAMES}, "nothing of them is left")
