"""A real Slurm on this machine: its controller, a slurmd for each host, cgroups, and two users.

Hosts are those of ``net_hosts``: each has a network, a daemon and devices of its own. Nothing of
the machine is changed: users, cgroups and mounts are of name spaces that end with the site.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from harness import LIMIT_S, REPOSITORY, Settings, close_all, until
from namespaces import Network
from net_hosts import LIMITS, NET_TIMES, NetHost
from slurm_accounting import Accounting

HERE = Path(__file__).resolve().parent
PYTHON = "/usr/bin/python3"
USERS = {"alice": 21001, "bob": 21002}
#: Where Slurm's packages of Debian have their daemons.
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SPANK_HEADER = Path("/usr/include/slurm/spank.h")
#: Jobs that share the devices of a node.
TICKETS = 2
#: From SIGTERM to SIGKILL. Nothing may depend on more.
KILL_WAIT_S = 10

CONF = """\
ClusterName=lab
SlurmctldHost={controller}({address})
SlurmUser=root
AuthInfo=socket={root}/munge/s
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=100000,bf_interval=1
GresTypes=tslice
MpiDefault=none
PrologFlags=Alloc,Contain
Prolog={root}/prolog
Epilog={root}/epilog
TaskProlog={root}/taskprolog
PrologEpilogTimeout=60
PlugStackConfig={root}/plugstack.conf
KillWait={kill_wait}
SlurmdTimeout=8
ReturnToService=2
"""


def why_not() -> str | None:
    """Returns why there can be no Slurm here, if so."""
    if os.geteuid() != 0:
        return "a Slurm with users of its own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge"
        return f"{', '.join(missing)} missing (on Debian: apt-get install {packages})"
    if not Path(PYTHON).exists():
        return f"there is no {PYTHON} (on Debian: apt-get install python3)"
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        return "this Slurm's cgroup plugin for version 1 needs the freezer, which is not there"
    return None


class Node(NetHost):
    """A host of the site, on which jobs run."""

    def __init__(self, site: Site, softcuda: Path, settings: Settings) -> None:
        self.site = site
        super().__init__(softcuda, site.network, settings)

    def _prepare(self) -> None:
        super()._prepare()
        boot_id = self.directory / "boot_id"
        bind = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
        enter = self.site.enter(self.name)
        self.launcher = (*enter, "unshare", "--mount", "sh", "-c", bind, str(boot_id))

    def variables(self, **extra: str) -> dict[str, str]:
        """Returns the environment of a process of this host, which Slurm's own commands need."""
        return super().variables(SLURM_CONF=str(self.site.root / "slurm.conf"), **extra)

    def mark(self) -> int:
        """Returns where the history stands, for `events(since=)`: a site lives for many tests."""
        return int(self.ask("events", since=None, follow=False, limit=1)["next"])

    def used_bytes_of_all(self) -> int:
        """Returns what NVML says is in use on all devices, asked past the daemon."""
        return sum(map(self.used_bytes, range(2)))

    def device_environment(self) -> dict[str, str]:
        """Returns what tells programs where this node's devices are."""
        return {k: v for k, v in self._environment.items() if k.startswith("SOFTCUDA_")}

    def start_slurmd(self) -> None:
        """Starts this node's slurmd."""
        self.site.run("slurmd", "-N", self.name, on=self.name)

    def stop_slurmd(self) -> None:
        """Ends this node's slurmd; what it has started runs on."""
        _end(self.site.root / f"slurmd.{self.name}.pid", signal.SIGTERM)


class Site:
    """The whole of it. Close it."""

    def __init__(
        self,
        softcuda: Path,
        *names: str,
        settings: Settings | None = None,
        with_accounting: bool = False,
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="tsliced-slurm-", dir="/dev/shm"))
        self.root.chmod(0o755)
        self.network = Network(*names)
        self.names = names
        self.nodes: dict[str, Node] = {}
        self._softcuda = softcuda
        self._processes: list[subprocess.Popen[Any]] = []
        self._cgroup = Path("/sys/fs/cgroup/freezer") / self.root.name
        self._cgroup.mkdir()
        self._holder = self._enter_name_spaces()
        self.accounting = Accounting(self) if with_accounting else None
        try:
            self._make(settings or {})
        except BaseException:
            self.discard()
            raise

    def _make(self, settings: Settings) -> None:
        self._start_munged()
        for name in self.names:
            self.nodes[name] = Node(self, self._softcuda, self._settings(name, settings))
        self._write_conf()
        self._write_hooks()
        for node in self.nodes.values():
            node.launch_daemon()
        if self.accounting is not None:
            self.accounting.start()
        self.start_slurmctld()
        for node in self.nodes.values():
            node.start_slurmd()
        for node in self.nodes.values():
            until(node.serves, f"the daemon of {node.name} serves")
        until(self.is_idle, "all nodes are idle")

    # --- name spaces --------------------------------------------------------------------------

    def _enter_name_spaces(self) -> subprocess.Popen[bytes]:
        join = f"echo $$ > {self._cgroup}/cgroup.procs; "
        users = [f"{name}={uid}" for name, uid in USERS.items()]
        packages = sysconfig.get_path("purelib")
        inner = ["bash", str(HERE / "slurm_site.sh"), str(self.root), str(REPOSITORY), packages]
        process = subprocess.Popen(
            ["bash", "-c", f'{join}exec "$@"', "bash", "unshare", "-m", "-C", *inner, *users],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the name spaces are made"
        return process

    def enter(self, node: str | None = None, user: str | None = None) -> list[str]:
        """Returns a command that runs what it is given at the site: on a node, as a user."""
        net = node or self.names[0]
        command = ["nsenter", "-t", str(self._holder.pid), "-m", "-C"]
        command += [f"--net=/run/netns/{self.network.namespace(net)}"]
        if user is not None:
            command += ["-S", str(USERS[user]), "-G", str(USERS[user])]
        return [*command, "--"]

    def environment(self, **extra: str) -> dict[str, str]:
        """Returns the environment of whoever works at the site."""
        return {
            "PATH": f"{self.root}/bin:{PATH}",
            "PYTHONPATH": f"{self.root}/repository:{self.root}/packages",
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "LD_LIBRARY_PATH": str(self.root / "repository/build/softcuda"),
            "LANG": "C.UTF-8",
            **extra,
        }

    def run(
        self,
        *command: str,
        on: str | None = None,
        user: str | None = None,
        check: bool = True,
        limit_s: float = LIMIT_S,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command at the site to its end."""
        done = subprocess.run(
            [*self.enter(on, user), *command],
            env=self.environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            cwd="/",
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def start(
        self, *command: str, on: str | None = None, user: str | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Starts a program at the site that is spoken with by pipes."""
        process = subprocess.Popen(
            [*self.enter(on, user), *command],
            env=self.environment(**environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd="/",
        )
        self._processes.append(process)
        return process

    # --- Slurm --------------------------------------------------------------------------------

    def _start_munged(self) -> None:
        place = self.root / "munge"
        place.mkdir()
        key = place / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{o}={place / n}" for o, n in MUNGE_FILES.items()]
        self._munged = self.start("munged", "--foreground", "--force", *files)
        until((place / "s").exists, "munged serves")

    def _settings(self, name: str, settings: Settings) -> Settings:
        sections: dict[str, dict[str, object]] = {
            "daemon": {"host": name, "cluster": "lab"},
            "peers": {
                "munge_socket": str(self.root / "munge/s"),
                "hosts": [f"{each}={self.network.addresses[each]}" for each in self.names],
                **NET_TIMES,
            },
            "limits": dict(LIMITS),
            # It would start a program for each of many short jobs.
            "slurm": {"comment_s": 0},
        }
        for section, values in settings.items():
            sections[section] = {**sections.get(section, {}), **values}
        return sections

    def _write_conf(self) -> None:
        (self.root / "state").mkdir()
        lines = [
            CONF.format(
                root=self.root,
                controller=os.uname().nodename.partition(".")[0],
                address=self.network.addresses[self.names[0]],
                kill_wait=KILL_WAIT_S,
            )
        ]
        for name in self.names:
            (self.root / f"spool.{name}").mkdir()
            address = self.network.addresses[name]
            lines.append(
                f"NodeName={name} NodeAddr={address} CPUs=64 RealMemory=1000 Gres=tslice:{TICKETS}"
            )
        nodes = ",".join(self.names)
        lines.append(f"PartitionName=shared Nodes={nodes} Default=YES OverSubscribe=YES State=UP")
        if self.accounting is not None:
            lines += self.accounting.lines()
        (self.root / "slurm.conf").write_text("\n".join([*lines, ""]))
        plugin = f"optional {self.root}/spank_tslice.so\n" if self._build_plugin() else ""
        (self.root / "plugstack.conf").write_text(plugin)
        gres = f"NodeName={nodes} Name=tslice Count={TICKETS} Flags=CountOnly\n"
        (self.root / "gres.conf").write_text(gres)
        cgroup = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.root}/cgroup\n"
        (self.root / "cgroup.conf").write_text(cgroup)

    def _build_plugin(self) -> bool:
        """Builds the plugin for srun as docs/slurm.md has it, where there are headers for it."""
        if not SPANK_HEADER.exists():
            return False
        source = REPOSITORY / "systemd/slurm/spank_tslice.c"
        target = self.root / "spank_tslice.so"
        options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        command = ["gcc", *options, "-o", str(target), str(source)]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return True

    def _write_hooks(self) -> None:
        """Puts the product's own hooks in place, told where this site's daemons and devices are."""
        directory = self.root / "bin"
        directory.mkdir()
        write_script(
            directory / "tslicectl",
            f"export PYTHONPATH={self.root}/repository:{self.root}/packages",
            f'exec {PYTHON} -m tsliced.ctl "$@"',
        )
        for hook in ("prolog", "epilog", "taskprolog", "healthcheck"):
            lines = ["case $SLURMD_NODENAME in"]
            for node in self.nodes.values():
                told = {"TSLICE_SOCKET": str(node.socket)}
                exports = " ".join(f"{key}={value}" for key, value in told.items())
                lines.append(f"{node.name}) export {exports} ;;")
            lines.append("esac")
            if hook == "taskprolog":
                for node in self.nodes.values():
                    devices = node.device_environment()
                    says = "; ".join(f"echo export {k}={v}" for k, v in devices.items())
                    lines.append(f"[ $SLURMD_NODENAME = {node.name} ] && {{ {says}; }}")
            lines += [
                f"export PATH={directory}:{PATH} SLURM_CONF={self.root}/slurm.conf",
                f"exec {self.root}/repository/systemd/slurm/{hook}",
            ]
            write_script(self.root / hook, *lines)

    def start_slurmctld(self) -> None:
        """Starts the controller, with whatever state it has."""
        self.run("slurmctld")
        until(self._answers, "the controller answers")

    def stop_slurmctld(self) -> None:
        """Asks the controller to end, which saves its state, and waits until it has."""
        _end(self.root / "slurmctld.pid", signal.SIGTERM)

    def _answers(self) -> bool:
        return self.run("scontrol", "ping", check=False).returncode == 0

    def states(self) -> dict[str, str]:
        """Returns the states of all nodes."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%n %T").stdout.split("\n")
        return dict(line.split() for line in lines if line)

    def is_idle(self) -> bool:
        """Whether all nodes are in service, and nobody is on them."""
        return self.states() == dict.fromkeys(self.names, "idle")

    def show_job(self, job: str) -> dict[str, str]:
        """Returns what Slurm knows of a job."""
        text = self.run("scontrol", "show", "job", "-o", job).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def place_for_all(self) -> Path:
        """Returns an empty directory in which all users may write."""
        place = self.root / "out"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        place.chmod(0o777)
        return place

    def pids_of_jobs(self) -> list[int]:
        """Returns all processes in Slurm's cgroups of jobs, which none can leave by itself."""
        found: list[int] = []
        for file in self._cgroup.rglob("cgroup.procs"):
            if "/job_" in str(file):
                with suppress(OSError):  # it has ended meanwhile
                    found += map(int, file.read_text().split())
        return found

    def cgroup_of_no_job(self) -> Path:
        """Returns a directory of the freezer that Slurm knows nothing of."""
        return self._cgroup

    def lose_power(self, name: str) -> None:
        """Ends everything on a node, and nobody elsewhere hears of it."""
        self.network.isolate(name)
        (self.root / f"slurmd.{name}.pid").unlink()
        self.nodes[name].lose_power()

    def boot(self, name: str) -> None:
        """Starts a node anew."""
        self.nodes[name].boot()
        self.nodes[name].start_slurmd()

    def story(self) -> str:
        """Returns what all daemons have logged of late."""
        logs = [*(node.log for node in self.nodes.values()), *sorted(self.root.glob("*.log"))]
        texts = [f"== {log}\n{log.read_text(errors='replace')[-4000:]}" for log in logs]
        return "\n".join(texts)

    # --- the end ------------------------------------------------------------------------------

    def end_jobs(self) -> None:
        """Ends whatever jobs there are; a test that ended its own leaves none."""
        if ids := self.run("squeue", "-h", "-o", "%A").stdout.split():
            self.run("scancel", "--full", "--signal=KILL", *ids, check=False)
            self.run("scancel", *ids, check=False)

    def close(self) -> None:
        """Ends everything; what clients saw is judged, as with all hosts."""
        try:
            close_all(list(self.nodes.values()))
        finally:
            self.discard()

    def discard(self) -> None:
        """Leaves nothing, whatever went wrong."""
        for pid_file in self.root.glob("*.pid"):
            _end(pid_file, signal.SIGKILL)
        for node in self.nodes.values():
            node.discard()
        for process in (*self._processes, self._holder):
            process.kill()
            with process:  # its pipes are closed
                process.wait(LIMIT_S)
        _empty(self._cgroup)
        self.network.close()
        shutil.rmtree(self.root, ignore_errors=True)


MUNGE_FILES = {
    "socket": "s",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
    "key-file": "key",
}


def _end(pid_file: Path, number: signal.Signals) -> None:
    """Ends a daemon that its file names, and waits for it; none may be there."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, number)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(LIMIT_S * 1000), f"{pid_file.stem} ends"
        finally:
            os.close(descriptor)
    pid_file.unlink(missing_ok=True)


def write_script(path: Path, *lines: str) -> None:
    """Writes a shell script that everybody may run."""
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def _empty(cgroup: Path) -> None:
    """Ends whatever is in a cgroup or below it, and takes it away."""
    directories = [*sorted(cgroup.rglob("*/"), reverse=True), cgroup]
    for directory in directories:
        for pid in (directory / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
    until(partial(_removed, directories), f"{cgroup} is empty")


def _removed(directories: Sequence[Path]) -> bool:
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()
    return not any(directory.exists() for directory in directories)
