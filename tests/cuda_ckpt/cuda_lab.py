"""Where CUDA processes are started and checkpointed by tests: on softcuda, or on a real driver.

The test process itself never loads a driver. Whatever calls one runs in a child of its own session,
with a time limit, so that a driver that hangs fails one test and not the run.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cuda_ckpt.worker import OpRecord, read_op_file, worker_command

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
LIMIT_S = 30.0


class Lines:
    """Lines from a file descriptor, each waited for with a limit."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = b""

    def next(self, limit_s: float = LIMIT_S) -> str:
        """Returns the next line; raises TimeoutError after the limit and EOFError at the end."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                raise TimeoutError(f"no line within {limit_s} s")
            chunk = os.read(self._fd, 65536)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()


class Target:
    """A running ``device_target.py``."""

    def __init__(self, environment: dict[str, str], mib: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "device_target.py"), str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        assert self.process.stdout is not None
        self._lines = Lines(self.process.stdout.fileno())
        assert self.answer() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, command: str) -> str:
        """Sends a command and waits for its answer."""
        self.send(command)
        return self.answer()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())

    def answer(self, limit_s: float = LIMIT_S) -> str:
        """Waits for the answer to a command that was sent; raises TimeoutError after the limit."""
        return self._lines.next(limit_s)

    def host_memory_bytes(self) -> int:
        """Returns the resident memory of the process."""
        with open(f"/proc/{self.pid}/status") as file:
            line = next(line for line in file if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def end(self) -> None:
        """Kills the process and reaps it."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class WorkerClient:
    """The daemon's side of a worker."""

    def __init__(
        self,
        environment: dict[str, str],
        op_file: Path,
        target: tuple[int, int],
        library: str | None = None,
    ) -> None:
        self.op_file = str(op_file)
        self.socket, theirs = socket.socketpair()
        command = worker_command(
            fd=theirs.fileno(),
            target_pid=target[0],
            target_start_time=target[1],
            op_file=self.op_file,
            library=library,
        )
        # It starts with the rights of the daemon's session, as a careless daemon would start it.
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._lines = Lines(self.socket.fileno())
        self.ready = self.receive()

    def request(self, op: str, **fields: object) -> dict[str, object]:
        """Sends a request and waits for its reply."""
        op_id = f"test-{op}"
        self.send_line({"op_id": op_id, "op": op, **fields})
        reply = self.receive()
        assert reply["op_id"] == op_id
        return reply

    def send_line(self, message: object) -> None:
        self.send_bytes(json.dumps(message).encode() + b"\n")

    def send_bytes(self, content: bytes) -> None:
        self.socket.sendall(content)

    def receive(self) -> dict[str, object]:
        message = json.loads(self._lines.next())
        assert isinstance(message, dict)
        return message

    def wait_for_start(self, op: str) -> OpRecord:
        """Waits until the op file says that ``op`` runs."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            record = read_op_file(self.op_file)
            if record is not None and record.op == op and record.result is None:
                return record
            assert time.monotonic() < deadline, f"{op} did not start: {record}"
            time.sleep(0.002)

    def end(self) -> None:
        """Closes the socket; the worker must end by itself."""
        self.socket.close()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait(LIMIT_S)


class Lab:
    """An environment with a driver, and the processes started in it."""

    def __init__(self, environment: dict[str, str], directory: Path) -> None:
        self.environment = environment
        self.directory = directory
        self._running: list[Target | WorkerClient] = []

    def target(self, mib: int = 16) -> Target:
        target = Target(self.environment, mib)
        self._running.append(target)
        return target

    def worker(
        self,
        target: tuple[int, int],
        *,
        library: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> WorkerClient:
        op_file = self.directory / f"op-{len(self._running)}.json"
        worker = WorkerClient(environment or self.environment, op_file, target, library)
        self._running.append(worker)
        return worker

    def write_faults(self, *lines: str) -> None:
        """Tells softcuda what to break: lines of ``operation pid nth action``."""
        Path(self.environment["SOFTCUDA_FAULTS"]).write_text("".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        while self._running:
            self._running.pop().end()


def softcuda_lab(build: Path, **settings: str) -> Lab:
    """Makes a lab on softcuda with two devices of 64 MiB, apart from all others."""
    # Device memory is a file; /dev/shm keeps it off the disk.
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="cuda-ckpt-", dir=base))
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SOFTCUDA_", "CUDA_")) or key == "CUDA_HOME"
    }
    environment |= {
        "LD_LIBRARY_PATH": str(build),
        "SOFTCUDA_DIR": str(directory / "devices"),
        "SOFTCUDA_DEVICES": "2",
        "SOFTCUDA_MEM_MIB": "64",
        "SOFTCUDA_FAULTS": str(directory / "faults"),
        **settings,
    }
    return Lab(environment, directory)


def close_softcuda_lab(lab: Lab) -> None:
    try:
        lab.close()
    finally:
        shutil.rmtree(lab.directory, ignore_errors=True)


def wait_for_blocked_signal(pid: int, number: int) -> None:
    """Waits until a process holds a signal back, which shows that it has begun its work."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        with open(f"/proc/{pid}/status") as file:
            mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk:"))
        if mask >> (number - 1) & 1:
            return
        assert time.monotonic() < deadline, f"process {pid} lets signals in"
        time.sleep(0.002)


def run_limited(
    command: Sequence[str], environment: dict[str, str], limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Runs a command as the leader of a session; past the limit all of that session is killed."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            raise AssertionError(f"{command} took over {limit_s} s\n{output}{errors}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
