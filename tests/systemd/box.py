"""A machine in a box: a real systemd as the first process of name spaces of its own.

tsliced is installed in it as a user would, from the bundle, with Debian's own Python; devices are
softcuda's. Nothing of it is left when it is closed, whatever was done in it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import LIMIT_S, REPOSITORY, Rank, until
from history import Recorder

HERE = Path(__file__).resolve().parent
SOFTCUDA = "/opt/softcuda"
DEVICES = "/var/lib/softcuda"
RANK = "/opt/tests/rank.py"
SOCKET = "/run/tsliced/tsliced.sock"
PYTHON = "/usr/local/lib/tsliced/current/bin/python"

#: Of a bundle that differs in nothing but this.
NEXT_VERSION = "99.0.0"

ENVIRONMENT = {
    "LD_LIBRARY_PATH": SOFTCUDA,
    "SOFTCUDA_DIR": DEVICES,
    "SOFTCUDA_DEVICES": "2",
    "SOFTCUDA_MEM_MIB": "64",
}

#: Small devices need small margins, and tests short pauses.
DEVICE_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "daemon": {
        "nvml_library": f"{SOFTCUDA}/libnvidia-ml.so.1",
        "cuda_library": f"{SOFTCUDA}/libcuda.so.1",
    },
    "memory": {"snapshot_margin_bytes": "1 MiB", "host_margin_bytes": "1 MiB"},
    "limits": {"retry_min_s": 0.05, "retry_max_s": 0.2},
    "scan": {"interval_s": 0.2},
}
SETTINGS: Mapping[str, Mapping[str, object]] = {
    **DEVICE_SETTINGS,
    "daemon": {"host": "n1", **DEVICE_SETTINGS["daemon"]},
    "groups.g1": {"devices": ["0"]},
    "groups.g2": {"devices": ["1"]},
}

DROP_IN = "/etc/systemd/system/tsliced.service.d/test.conf"


def why_not() -> str | None:
    """Returns why there can be no box here, if so."""
    if os.geteuid() != 0:
        return "a box with a systemd in it needs root"
    if not Path("/lib/systemd/systemd").exists():
        return "there is no systemd (on Debian: apt-get install systemd)"
    if not Path("/usr/bin/python3").exists():
        return "there is no /usr/bin/python3 (on Debian: apt-get install python3-venv)"
    probe = "unshare --pid --fork --mount --cgroup --uts --ipc mount -t tmpfs tmpfs /mnt"
    made = subprocess.run(probe.split(), capture_output=True, text=True, timeout=LIMIT_S)
    if made.returncode:
        return f"this root may not make name spaces: {made.stderr.strip()}"
    return None


class BoxRank(Rank):
    """A rank in a box; its pid is the one that it has out here."""

    def __init__(self, job: str, process: subprocess.Popen[bytes]) -> None:
        # What clients in a box saw is not judged: its directory is another one there.
        super().__init__(job, process, Recorder(Path("/nonexistent")))
        self._pid = until(lambda: _rank_below(process.pid), "the rank runs")

    @property
    def pid(self) -> int:
        return self._pid

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: _state(self.pid) == "T", "it has stopped")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        super().kill()


class Box:
    """A running box. `within` is a command that makes its surroundings, such as its network."""

    def __init__(self, *, within: Sequence[str] = ()) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tsliced-box-"))
        unified = Path("/sys/fs/cgroup/unified")
        base = unified if unified.is_dir() else Path("/sys/fs/cgroup")
        self._cgroup = base / self.directory.name
        self._ranks: list[BoxRank] = []
        self._eye: BoxRank | None = None
        self._cgroup.mkdir()
        shown = {
            "build/package": "/opt/bundles",
            "build/softcuda": SOFTCUDA,
            "tests/e2e": "/opt/tests",
        }
        binds = [f"{REPOSITORY / there}={here}" for there, here in shown.items()]
        inner = ["bash", str(HERE / "box_init.sh"), str(self.directory), *binds]
        # Into its own cgroup first, so that the box has a subtree of its own.
        script = f'echo $$ > {self._cgroup}/cgroup.procs; exec "$@"'
        spaces = ["unshare", "--pid", "--fork", "--mount", "--cgroup", "--uts", "--ipc"]
        self._log = (self.directory.parent / f"{self.directory.name}.log").open("w+b")
        self._unshare = subprocess.Popen(
            ["bash", "-c", script, "bash", *within, *spaces, *inner],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self._pid = until(self._find_init, "the box has a systemd")
            until(self._booted, "it has booted")
        except BaseException:
            sys.stdout.write(self.log())
            self.close()
            raise

    def _find_init(self) -> int:
        assert self._unshare.poll() is None, f"the box did not come up: {self.log()}"
        below = children(self._unshare.pid)
        return next((pid for pid in below if _name(pid) == "systemd"), 0)

    def _booted(self) -> bool:
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in ("running", "degraded")

    def log(self) -> str:
        """Returns what the box's first process said."""
        return Path(self._log.name).read_text(errors="replace")

    # --- in the box ---------------------------------------------------------------------------

    def enter(self, *command: str) -> list[str]:
        """Returns the command that runs a command in the box."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return ["nsenter", "-t", str(self._pid), "-a", "--", "env", "-i", path, *command]

    def run(
        self, *command: str, check: bool = True, limit_s: float = 2 * LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the box to its end."""
        done = subprocess.run(self.enter(*command), capture_output=True, text=True, timeout=limit_s)
        if check and done.returncode:
            journal = self.journal()
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}\n{journal}")
        return done

    def journal(self) -> str:
        """Returns what the daemon and the service manager have logged of it."""
        return self.run(
            "journalctl",
            "--no-pager",
            "-u",
            "tsliced.service",
            "-n",
            "60",
            "-o",
            "short",
            check=False,
        ).stdout

    def write(self, path: str, text: str) -> None:
        """Writes a file in the box."""
        subprocess.run(
            self.enter("sh", "-c", f'mkdir -p "$(dirname {path})" && cat >{path}'),
            input=text,
            text=True,
            check=True,
            timeout=LIMIT_S,
        )

    # --- tsliced in the box -------------------------------------------------------------------

    def install(self, bundle: str) -> str:
        """Installs a version from its bundle, with no network, and returns what it says."""
        return self.run(f"/opt/bundles/{bundle}/install.sh").stdout

    def configure(self, settings: Mapping[str, Mapping[str, object]] | None = None) -> None:
        """Writes the configuration, with some settings changed; None takes a section away."""
        sections = {name: dict(values) for name, values in SETTINGS.items()}
        for name, values in (settings or {}).items():
            sections.setdefault(name, {}).update(values)
            if not values:
                del sections[name]
        lines: list[str] = []
        for name, section in sections.items():
            # A basic string of TOML is written as JSON writes one.
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
        self.write("/etc/tsliced/tsliced.toml", "\n".join([*lines, ""]))

    def drop_in(self, *lines: str) -> None:
        """Lets the unit know of softcuda, and adds lines to its [Service]."""
        environment = [f"Environment={key}={value}" for key, value in ENVIRONMENT.items()]
        text = ["[Service]", *environment, f"ReadWritePaths={DEVICES}", *lines, ""]
        self.write(DROP_IN, "\n".join(text))
        self.run("systemctl", "daemon-reload")

    def fresh(self) -> None:
        """Ends everything that a test left, and forgets all state."""
        self.end_ranks()
        self.run("systemctl", "stop", "tsliced.socket", "tsliced.service")
        self.run("systemctl", "reset-failed", "tsliced.socket", "tsliced.service", check=False)
        self.run("rm", "-rf", "/var/lib/tsliced")
        self.make_devices()
        self.configure()

    def make_devices(self) -> None:
        """Gives the box its devices, with nothing on them, and tells the unit where they are."""
        self.run("sh", "-c", f"rm -rf {DEVICES} && mkdir -m 777 {DEVICES}")
        settings = [f"{key}={value}" for key, value in ENVIRONMENT.items()]
        self.run("env", *settings, f"{SOFTCUDA}/softcuda-init")
        self.drop_in()

    def end_ranks(self) -> None:
        """Ends all ranks."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGCONT)
            rank.close()
        self._ranks.clear()
        self._eye = None

    def start(self) -> None:
        """Starts the daemon as an operator does."""
        self.run("systemctl", "start", "tsliced.socket", "tsliced.service")

    def show(self, name: str, unit: str = "tsliced.service") -> str:
        """Returns a property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def main_pid(self) -> int:
        """Returns the daemon's pid as it is out here."""
        inner = int(self.show("MainPID"))
        assert inner, f"the daemon runs:\n{self.journal()}"
        return self.outer(inner)

    def outer(self, inner: int) -> int:
        """Returns the pid out here of a process in the box."""
        space = os.readlink(f"/proc/{self._pid}/ns/pid")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{pid}/status") as file:
                line = next(line for line in file if line.startswith("NSpid:"))
                if line.split()[-1] == str(inner) and os.readlink(f"/proc/{pid}/ns/pid") == space:
                    return int(pid)
        raise AssertionError(f"there is no process {inner} in the box")

    def rank(self, job: str, *properties: str, **environment: str) -> BoxRank:
        """Starts a rank in the box, in a scope of its own as a login would have."""
        variables = {**ENVIRONMENT, "TSLICE_SOCKET": SOCKET, "TSLICE_JOB_ID": job, **environment}
        settings = [f"{key}={value}" for key, value in variables.items()]
        scope = ["systemd-run", "--scope", "--quiet", "--collect"]
        scope += [f"--property={each}" for each in properties]
        process = subprocess.Popen(
            self.enter(*settings, *scope, PYTHON, RANK),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        rank = BoxRank(job, process)
        self._ranks.append(rank)
        return rank

    def ask(self, name: str) -> dict[str, Any]:
        """Asks the daemon something, from within the box."""
        if self._eye is None:
            self._eye = self.rank("eye")
        answer: dict[str, Any] = self._eye.do("ask", name=name, hello={"role": "tool"})
        return answer

    def status(self) -> dict[str, Any]:
        """Returns the daemon's view of everything."""
        status: dict[str, Any] = self.ask("status")["status"]
        return status

    def group(self, name: str = "g1") -> dict[str, Any]:
        """Returns the daemon's view of a group."""
        return next(group for group in self.status()["groups"] if group["name"] == name)

    def wait_for_new_daemon(self, old: int, limit_s: float = LIMIT_S) -> int:
        """Waits until another daemon than one that ended serves, and returns its pid out here."""

        def serves() -> int:
            with suppress(AssertionError):  # it comes or goes just now
                if self.show("ActiveState") == "active" and (new := self.main_pid()) != old:
                    return new
            return 0

        return until(serves, "another daemon serves", limit_s)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the box and all that is in it."""
        self.end_ranks()
        # With the first process of a pid name space all others of it end; mounts end with them.
        for pid in children(self._unshare.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._unshare.wait(LIMIT_S)
        self._log.close()
        Path(self._log.name).unlink()
        until(self._cgroup_removed, "its cgroups are empty")
        shutil.rmtree(self.directory)

    def _cgroup_removed(self) -> bool:
        below = sorted(self._cgroup.rglob("*/"), reverse=True)
        for each in (*below, self._cgroup):
            if each.is_dir():
                with suppress(OSError):
                    each.rmdir()
        return not self._cgroup.exists()


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, whichever thread of it did."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _rank_below(pid: int) -> int:
    """Returns the rank that a command to enter the box became or started."""
    for each in (pid, *children(pid)):
        with suppress(OSError):
            if RANK.encode() in Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")[1:2]:
                return each
    return 0
