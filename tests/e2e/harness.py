"""A host to test on: one daemon, softcuda's devices, and ranks; all of them real processes.

Nothing here sleeps for a fixed time: what is waited for is polled, or read from a pipe, and every
wait has a limit. At the end nothing may be left: see `Host.close`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from history import Recorder, directory_of, is_stopped
from judging import Judged, judge, lines_of

from libtimeslice.connection import Connection

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MIB = 1 << 20
LIMIT_S = 30.0
POLL_S = 0.01

Settings = Mapping[str, Mapping[str, object]]
Found = TypeVar("Found")

#: Small devices need small margins, and tests short pauses. Jobs make room in one move from the
#: first time on, as those do of which the kind is known; `with_qualifying` has what is usual.
DEFAULTS: Settings = {
    "memory": {"snapshot_margin_bytes": "1 MiB", "host_margin_bytes": "1 MiB"},
    "limits": {"retry_min_s": 0.05, "retry_max_s": 0.2, "qualify": False},
    "scan": {"interval_s": 0.2},
    "groups.g1": {"devices": ["0"]},
    "groups.g2": {"devices": ["1"]},
}


def with_qualifying(settings: Settings | None) -> Settings:
    """Returns settings with which jobs show that they come back before they first make room."""
    settings = settings or {}
    return {**settings, "limits": {"qualify": True, **settings.get("limits", {})}}


def build_softcuda() -> Path:
    """Brings softcuda's libraries up to date and returns their directory."""
    command = ["make", "--silent", "-f", "cuda_ckpt/softcuda/build.mk", "softcuda"]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr
    return REPOSITORY / "build" / "softcuda"


def until(condition: Callable[[], Found], what: str, limit_s: float = LIMIT_S) -> Found:
    """Polls for something that no event announces, and returns it once it is true."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        time.sleep(POLL_S)
    return found


def own(job: str) -> str:
    """Returns what a job of the user who runs the tests is called in texts and events."""
    return f"{os.getuid()}/{job}"


def path_with(directory: Path) -> str:
    """Returns a PYTHONPATH that begins with a directory, and has `bench` for backends on it."""
    more = (str(directory), str(REPOSITORY), os.environ.get("PYTHONPATH"))
    return os.pathsep.join(filter(None, more))


def resident_bytes(pid: int) -> int:
    """Returns the anonymous memory of a process that is resident."""
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def fill_disk(directory: Path) -> Path:
    """Takes all the room that is left."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    assert os.statvfs(directory).f_bavail == 0
    return filler


def write_toml(path: Path, sections: Settings) -> None:
    """Writes tables of plain values."""
    lines: list[str] = []
    for name, section in sections.items():
        # A basic string of TOML is written as JSON writes one.
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
    path.write_text("\n".join([*lines, ""]))


class RankError(Exception):
    """A command of a rank failed; `type` is the name of the exception that it met."""

    def __init__(self, type: str, code: object, message: str) -> None:
        super().__init__(f"{type}({code}): {message}")
        self.type = type
        self.code = code
        self.message = message


class Pending:
    """A command whose answer has not been read yet."""

    def __init__(self, rank: Rank, name: str) -> None:
        self._rank = rank
        self._name = name
        self.answer: dict[str, Any] | None = None

    def wait(self, limit_s: float = LIMIT_S) -> Any:
        """Returns the command's value, or raises RankError with what it met instead."""
        end = time.monotonic() + limit_s
        while self.answer is None:
            left_s = end - time.monotonic()
            assert left_s > 0, f"{self._name} of {self._rank.job} did not end in {limit_s} s"
            self._rank.read(left_s)
        if "error" in self.answer:
            raise RankError(**self.answer["error"])
        return self.answer["value"]

    def is_over(self) -> bool:
        """Whether the answer has come."""
        if self.answer is None:
            self._rank.read(0.0)
        return self.answer is not None


class Rank:
    """A running ``rank.py``."""

    def __init__(self, job: str, process: subprocess.Popen[bytes], recorder: Recorder) -> None:
        self.job = job
        self.process = process
        self._recorder = recorder
        self._buffer = b""
        self._unanswered: list[Pending] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, name: str, /, **arguments: object) -> Pending:
        """Sends a command and returns at once; commands run one after the other."""
        pending = Pending(self, name)
        self._unanswered.append(pending)
        assert self.process.stdin is not None
        line = json.dumps({"name": name, "arguments": arguments}) + "\n"
        self.process.stdin.write(line.encode())
        return pending

    def do(self, name: str, /, limit_s: float = LIMIT_S, **arguments: object) -> Any:
        """Runs a command to its end and returns its value."""
        return self.start(name, **arguments).wait(limit_s)

    def read(self, limit_s: float) -> None:
        """Takes in what comes within the limit."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(limit_s * 1000):
            return
        data = os.read(descriptor, 1 << 16)
        assert data, f"a rank of {self.job} ended with status {self.process.wait(LIMIT_S)}"
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._unanswered.pop(0).answer = json.loads(line)

    def stop(self) -> None:
        """Stops the process, and waits until all of it has stopped."""
        self._recorder.write("stopped", pid=self.pid)
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def end(self) -> None:
        """Lets the process come to its end, with all that it does then."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        """Ends the process at once, and reaps it."""
        self._recorder.write("killed", pid=self.pid)
        self.process.kill()
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Host:
    """Devices in a directory of their own, a daemon, and everything that was started beside it."""

    #: Without groups in its settings it has those of `DEFAULTS`.
    has_default_groups = True

    def __init__(
        self,
        softcuda: Path,
        *,
        settings: Settings | None = None,
        launcher: Sequence[str] = (),
        user: Sequence[str] = (),
        **environment: str,
    ) -> None:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        # Device memory and the journal are files; the kernel limits paths of sockets.
        self.directory = Path(tempfile.mkdtemp(prefix="ts-", dir=base))
        self.directory.chmod(0o755)
        self.histories = directory_of(self.directory / "s")
        self.histories.mkdir()
        self.histories.chmod(0o1777)
        self.recorder = Recorder(self.histories)
        self.socket = self.directory / "s"
        self.log = self.directory / "log"
        self.config = self.directory / "tsliced.toml"
        self.settings = settings or {}
        #: A command that makes the daemon's surroundings, and then runs what it is given.
        self.launcher = tuple(launcher)
        #: A command that runs what it is given as another user: everything is started by it.
        self.user = tuple(user)
        self._softcuda = softcuda
        self._environment = {
            "LD_LIBRARY_PATH": str(softcuda),
            "SOFTCUDA_DIR": str(self.directory / "devices"),
            "SOFTCUDA_DEVICES": "2",
            "SOFTCUDA_MEM_MIB": "64",
            "TSLICE_SOCKET": str(self.socket),
            **environment,
        }
        #: Where the daemon finds the driver and NVML; empty: where they are installed.
        self.libraries = {
            "nvml_library": str(softcuda / "libnvidia-ml.so.1"),
            "cuda_library": str(softcuda / "libcuda.so.1"),
        }
        self.daemon: subprocess.Popen[bytes] | None = None
        self._ranks: list[Rank] = []
        self._others: list[subprocess.Popen[str]] = []
        self._eye: Rank | None = None
        self._prepare()
        self._make_devices()

    @property
    def name(self) -> str:
        """What other hosts call it."""
        return str(self.settings.get("daemon", {}).get("host", "n1"))

    def _prepare(self) -> None:
        """Lays out what another kind of host has elsewhere."""

    def _make_devices(self) -> None:
        subprocess.run(
            [*self.user, self._softcuda / "softcuda-init"],
            env=self.variables(),
            check=True,
            timeout=LIMIT_S,
            stdout=subprocess.DEVNULL,
        )

    def variables(self, **extra: str) -> dict[str, str]:
        """Returns the environment of a process of this host."""
        foreign = ("TSLICE_", "SLURM_", "CUDA_", "SOFTCUDA_", "RAY_", "JOURNAL_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return {**kept, **self._environment, **extra}

    # --- the daemon ---------------------------------------------------------------------------

    def start_daemon(
        self, *, program: Sequence[str] = ("-m", "tsliced"), **environment: str
    ) -> None:
        """Starts the daemon, the first or the next, and waits until it serves."""
        self.launch_daemon(program=program, **environment)
        until(self.serves, "the daemon serves")

    def launch_daemon(
        self, *, program: Sequence[str] = ("-m", "tsliced"), **environment: str
    ) -> None:
        """Starts the daemon and does not wait for it."""
        self.write_config(self.config, self.settings)
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [*self.launcher, *self.user, sys.executable, *program, *self.arguments()],
                # Backends of the tests lie here.
                env=self.variables(PYTHONPATH=path_with(HERE), **environment),
                stdout=log,
                stderr=log,
            )

    def arguments(self) -> list[str]:
        """Returns how the daemon is called."""
        return ["--config", str(self.config)]

    def serves(self) -> bool:
        """Whether the daemon answers; it must not have ended."""
        assert self.daemon is not None
        status = self.daemon.poll()
        assert status is None, f"the daemon ended with status {status}:\n{self.log.read_text()}"
        with suppress(Exception), self.connection():
            return True
        return False

    def descriptors(self) -> int:
        """Returns how many file descriptors the daemon has open."""
        assert self.daemon is not None
        return len(os.listdir(f"/proc/{self.daemon.pid}/fd"))

    def stop_daemon(self) -> int:
        """Asks the daemon to end, and returns its exit status."""
        assert self.daemon is not None
        self.daemon.terminate()
        status = self.daemon.wait(LIMIT_S)
        self.daemon = None
        return status

    def kill_daemon(self) -> None:
        """Ends the daemon as a crash would."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait(LIMIT_S)
        self.daemon = None

    def end_daemon(self, end: str) -> None:
        """Ends the daemon by a "crash", or by a "stop" that it is asked for."""
        if end == "crash":
            self.kill_daemon()
        else:
            assert self.stop_daemon() == 0, "it waits for nothing and loses nothing"

    def write_config(self, path: Path, settings: Settings) -> Path:
        """Writes the configuration of this host's daemon, with some settings changed."""
        sections: dict[str, dict[str, object]] = {
            "daemon": {
                "socket": str(self.socket),
                "state_dir": str(self.directory / "state"),
                "host": "n1",
                **self.libraries,
                "log_level": "debug",
            }
        }
        has_groups = not self.has_default_groups or groups_in(settings)
        for name, values in DEFAULTS.items():
            if not (has_groups and name.startswith("groups.")):
                sections[name] = dict(values)
        for name, values in settings.items():
            sections.setdefault(name, {}).update(values)
        write_toml(path, sections)
        return path

    # --- what the daemon says -----------------------------------------------------------------

    @contextmanager
    def connection(self, *, role: str = "tool", job: str | None = None) -> Iterator[Connection]:
        """Yields a connection for single requests."""
        with Connection.open(str(self.socket), role=role, job=job, limit_s=LIMIT_S) as connection:
            yield connection

    def ask(self, name: str, *, job: str | None = None, **fields: object) -> dict[str, Any]:
        """Sends one request on a connection of its own, and returns the answer."""
        with self.connection(job=job) as connection:
            return connection.request({"t": name, **fields}, LIMIT_S)

    def status(self) -> dict[str, Any]:
        """Returns the daemon's view of everything."""
        status: dict[str, Any] = self.ask("status")["status"]
        return status

    def group(self, name: str = "g1") -> dict[str, Any]:
        """Returns the daemon's view of a group."""
        return next(group for group in self.status()["groups"] if group["name"] == name)

    def job(self, name: str) -> dict[str, Any]:
        """Returns the daemon's view of a job; empty if it knows of none."""
        jobs = self.status()["jobs"]
        return next((job for job in jobs if job["job"]["id"] == name), {})

    def states(self) -> dict[int, str]:
        """Returns the states of all ranks that the daemon knows, by pid."""
        return {rank["pid"]: rank["state"] for rank in self.ask("ps")["ranks"]}

    def doing(self, *, for_s: float = 0.0) -> set[str]:
        """Returns the operations on ranks that have been under way so long."""
        ranks = self.ask("ps")["ranks"]
        return {rank["doing"] for rank in ranks if rank["doing"] and rank["doing_s"] >= for_s}

    def events(self, *kinds: str, since: int = 0) -> list[dict[str, Any]]:
        """Returns the history, the oldest first, of some kinds or of all."""
        events = self.ask("events", since=since, follow=False, limit=10_000)["events"]
        return [event for event in events if not kinds or event["kind"] in kinds]

    def grants(self, *, job: str = "", group: str = "", since: int = 0) -> int:
        """Returns how many leases were granted, to one job or to all, on one group or on any."""
        return sum(
            event.get("leases", 1)
            for event in self.events("granted", "held", since=since)
            if job in ("", event["job"]) and group in ("", event["groups"])
        )

    def operations(self, *verbs: str, since: int = 0) -> list[dict[str, Any]]:
        """Returns the operations on ranks that ended, the oldest first."""
        events = self.events("operation", since=since)
        return [event for event in events if not verbs or event["verb"] in verbs]

    # --- ranks --------------------------------------------------------------------------------

    def rank(
        self,
        job: str = "",
        *,
        program: str = "rank.py",
        arguments: Sequence[str] = (),
        told: bool = False,
        within: Sequence[str] = (),
        **environment: str,
    ) -> Rank:
        """Starts a rank. What job it is of stands in its environment; or, if it is to be `told`, it
        says so to the daemon when it first connects. Without a job it says nothing at all.

        `within` is a command that makes its surroundings, and then runs what it is given.
        """
        if job:
            environment["RANK_JOB" if told else "TSLICE_JOB_ID"] = job
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*within, *self.user, sys.executable, str(HERE / program), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=self.variables(**environment),
            )
        rank = Rank(job, process, self.recorder)
        self._ranks.append(rank)
        return rank

    def spawn(self, command: list[str]) -> subprocess.Popen[str]:
        """Starts any other program; its standard output is read by who asked for it."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=self.variables(), text=True
            )
        self._others.append(process)
        return process

    def trainer(self, job: str, *, mib: int = 40, seed: int = 0, group: str = "g1") -> Rank:
        """Starts a rank that has made its device state in a first turn."""
        rank = self.rank(job)
        rank.do("initialise", group=group, mib=mib, seed=seed)
        return rank

    def add_hooks(self, rank: Rank, **how: object) -> None:
        """Has a rank register callbacks, and waits until its agent has a session for them."""
        sessions = self.status()["sessions"]
        rank.start("hooks", **how).wait()
        until(lambda: self.status()["sessions"] > sessions, "its agent is connected")

    def used_bytes(self, device: int = 0) -> int:
        """Returns what NVML says is in use on a device, asked past the daemon."""
        if self._eye is None:
            self._eye = self.rank("eye")
        used: int = self._eye.do("used_bytes", device=device)
        return used

    def fault(self, *lines: str) -> None:
        """Tells softcuda what to break from now on: lines of ``operation pid nth action``."""
        path = self.directory / "devices" / "faults"
        temporary = path.with_suffix(".new")
        temporary.write_text("".join(f"{line}\n" for line in lines))
        temporary.rename(path)

    # --- what clients saw ---------------------------------------------------------------------

    def group_names(self) -> list[str]:
        """Returns the names of all groups, in the order in which they are reserved."""
        return groups_in(self.settings) or groups_in(DEFAULTS)

    def judge(self) -> Judged:
        """Returns what the clients wrote down so far, and what of it must not have happened."""
        return judge_all([self])

    def called(self) -> list[str]:
        """Returns the callbacks that ranks ran or are about to run, in their order."""
        lines = lines_of(self.histories, "called")
        return [line["callback"] for line in sorted(lines, key=lambda line: line["at"])]

    def forget(self) -> None:
        """Notes that the daemon's memory is about to be lost, and with it all places."""
        self.recorder.write("forgotten")

    def known_waiters(self) -> set[str]:
        """Returns the jobs that the daemon knows to wait for something."""
        status = self.status()
        waiting = [entry["job"] for group in status["groups"] for entry in group["queue"]]
        waiting += [group["next"] for group in status["groups"] if group["next"]]
        waiting += [job["job"] for job in status["jobs"] if job["gathering"]]
        return {f"{job['uid']}/{job['id']}" for job in waiting}

    def running_pids(self) -> set[int]:
        """Returns the ranks that no signal keeps from running."""
        return {rank.pid for rank in self._ranks if not is_stopped(rank.pid)}

    # --- the end ------------------------------------------------------------------------------

    def close_ranks(self) -> None:
        """Ends all ranks, and waits for none of them."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGCONT)
            rank.close()
        self._ranks.clear()
        self._eye = None

    def workers(self) -> list[int]:
        """Returns the workers of this host's daemons that still run."""
        mark = str(self.directory / "state" / "workers").encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is(pid, mark)]

    def close(self, *, answer_limit_s: float = LIMIT_S) -> None:
        """Ends everything; then the daemon must have ended well, and nothing may be left.

        What clients saw is judged before. Whoever still waits is in a queue, or gets an answer
        within the limit.
        """
        close_all([self], answer_limit_s=answer_limit_s)

    def end(self) -> None:
        """Ends all processes, the daemon as one that is asked for it."""
        self.close_ranks()
        for process in self._others:
            process.kill()
            process.communicate()
        if self.daemon is not None:
            assert self.daemon.poll() is None, f"the daemon ended: {self.daemon.poll()}"
            assert self.stop_daemon() == 0, "the daemon ended badly"
        until(lambda: not self.workers(), "all workers end")
        assert not self.socket.exists(), "the daemon takes its socket away"

    def discard(self) -> None:
        """Leaves nothing, whatever went wrong; tells what the daemon wrote."""
        # pytest shows this for a test that failed.
        sys.stdout.write(self.log.read_text(errors="replace") if self.log.exists() else "")
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait(LIMIT_S)
        for pid in self.workers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


def groups_in(settings: Settings) -> list[str]:
    """Returns the groups that settings have tables of, in their order."""
    names = (name for name in settings if name.startswith("groups."))
    return [name.removeprefix("groups.") for name in names]


def judge_all(hosts: Sequence[Host]) -> Judged:
    """Returns what the clients of all hosts saw; the first one's settings say what is in order."""
    groups = hosts[0].group_names()
    names = ("daemon", "limits", *(f"groups.{group}" for group in groups))
    settings = [hosts[0].settings.get(name, {}) for name in names]
    fifo = all(values.get("policy", "fifo") == "fifo" for values in settings)
    bound = hosts[0].settings.get("limits", {}).get("max_passed_over", 8)
    return judge(
        *(host.histories for host in hosts),
        logs=[host.log for host in hosts],
        order=groups,
        passes=0 if fifo else int(str(bound)),
    )


def close_all(hosts: Sequence[Host], *, answer_limit_s: float = LIMIT_S) -> None:
    """Ends hosts that belong together, and judges what their clients saw; see `Host.close`."""
    try:
        lost = _lost_waiters(hosts, answer_limit_s)
        for host in hosts:
            host.end()
        judged = judge_all(hosts)
        assert not judged.violations, judged.report()
        assert not lost, f"waiters are lost: {lost}"
    finally:
        for host in hosts:
            host.discard()


def _lost_waiters(hosts: Sequence[Host], limit_s: float) -> list[str]:
    """Returns who waits for an answer still when the limit is over, and is in no queue."""
    end = time.monotonic() + limit_s
    while all(host.daemon is not None and host.daemon.poll() is None for host in hosts):
        known = set().union(*(host.known_waiters() for host in hosts))
        pids = set().union(*(host.running_pids() for host in hosts))
        pending = judge_all(hosts).pending()
        lost = [str(a) for a in pending if a.pid in pids and a.job not in known]
        if not lost or time.monotonic() > end:
            return lost
        time.sleep(POLL_S)
    return []


class MakeHost(Protocol):
    """The fixture of that name."""

    def __call__(
        self,
        *,
        settings: Settings | None = None,
        launcher: Sequence[str] = (),
        **environment: str,
    ) -> Host: ...


def _is(pid: int, mark: bytes) -> bool:
    """Whether a process was started with something on its command line, and still runs."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return mark in file.read()
    return False
