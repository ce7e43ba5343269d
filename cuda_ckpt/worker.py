"""A helper process that makes the driver's calls for a daemon, one for each target process.

Why a process of its own. A call into the driver can hang, and a hung thread cannot be cancelled,
while a hung process can be given up. A caller that dies in the middle of a call leaves its target
hanging for ever, so the worker outlives the daemon until its call has ended: own session, all
signals blocked, out of reach of the OOM killer where that is permitted. Initialising the driver
costs seconds, which are paid once.

It is started by exec (CUDA does not survive fork) and speaks lines of JSON over an inherited Unix
stream socket:

* First it sends ``{"ready": true, "driver_version", "pid", "start_time"}``, or
  ``{"ready": false, "code", "name", "error", "message"}`` and exits with 1.
* A request is ``{"op_id", "op", "timeout_ms"?, "device_map"?}`` with op one of ``state``,
  ``restore_thread``, ``lock``, ``checkpoint``, ``restore``, ``unlock``.
* The reply is ``{"op_id", "ok", "code", "name", "error", "message", "state", "seconds"}``, for
  ``restore_thread`` also ``thread_id``. ``code`` is the driver's, or NOT_ASKED (-1) when the driver
  was not asked. ``error`` is the name of the exception class, empty when ok. ``state`` is what was
  observed after the call: a value of ProcessState, ``gone`` if the target is dead or its pid
  belongs to another process, null if unknown.
* Requests are handled one at a time. A malformed one is answered and changes nothing.
* When the socket closes, the worker ends the call that runs and exits with 0; it starts no other.

The four operations that change the target are written to the op file (``cuda_ckpt.op_file``) before
and after they are tried, so that a daemon that comes back learns what became of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cuda_ckpt import _system
from cuda_ckpt.errors import (
    CudaCheckpointError,
    InvalidRequestError,
    TargetGoneError,
    code_name,
)
from cuda_ckpt.op_file import (
    Json,
    OpFile,
    OpFileError,
    OpRecord,
    ProcessIdentity,
    read_op_file,
)
from cuda_ckpt.process import Driver, Process

__all__ = ["OpFileError", "OpRecord", "ProcessIdentity", "main", "read_op_file", "worker_command"]

NOT_ASKED = -1
GONE = "gone"
MAX_LINE_BYTES = 64 * 1024
MAX_OP_ID_CHARACTERS = 256
MUTATING_OPS = frozenset({"lock", "checkpoint", "restore", "unlock"})
OPS = MUTATING_OPS | {"state", "restore_thread"}

# These hide devices from the driver, and device maps need all of them.
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")

_FAILURE_FIELDS = ("code", "name", "error", "message")


def worker_command(
    *,
    fd: int,
    target_pid: int,
    target_start_time: int,
    op_file: str,
    library: str | None = None,
) -> list[str]:
    """Returns the command that starts a worker.

    Run it with ``pass_fds=(fd,)`` and keep no copy of ``fd`` yourself, or its end is never seen.
    ``op_file`` lies in a directory that only the daemon can write; one worker at a time owns it.
    """
    command = [sys.executable, "-m", "cuda_ckpt.worker", "--fd", str(fd)]
    command += ["--target-pid", str(target_pid), "--target-start-time", str(target_start_time)]
    command += ["--op-file", op_file]
    return command if library is None else [*command, "--library", library]


class _Options(NamedTuple):
    fd: int
    target: ProcessIdentity
    op_file: str
    library: str | None


class _BadRequestError(Exception):
    """A line that is not a request; ``op_id`` if it could be made out."""

    def __init__(self, message: str, op_id: str | None = None) -> None:
        super().__init__(message)
        self.op_id = op_id


class _Request(NamedTuple):
    op_id: str
    op: str
    timeout_ms: int
    device_map: dict[str, str] | None


class _Channel:
    """Lines of JSON over the socket to the daemon."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._hangup = select.poll()
        self._hangup.register(fd, 0)  # POLLHUP and POLLERR are always reported

    def send(self, message: Json) -> None:
        """Sends a message; one that nobody is left to read is dropped."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def lines(self) -> Iterator[bytes | None]:
        """Yields each line that comes, or None for one that was too long, until the daemon is gone.

        A line that came before the daemon went is not yielded after it: a request that nobody waits
        for is not started.
        """
        buffer, overlong = b"", False
        while True:
            line, newline, rest = buffer.partition(b"\n")
            if not newline:
                if len(buffer) > MAX_LINE_BYTES:
                    buffer, overlong = b"", True
                chunk = self._receive()
                if not chunk:
                    return
                buffer += chunk
                continue
            buffer = rest
            if self._hangup.poll(0):
                return
            yield None if overlong or len(line) > MAX_LINE_BYTES else line
            overlong = False

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(MAX_LINE_BYTES)
        except ConnectionError:
            return b""


class _Worker:
    """Carries out requests on one target."""

    def __init__(self, driver: Driver, target: ProcessIdentity, op_file: OpFile) -> None:
        self._driver = driver
        self._target = target
        self._op_file = op_file

    def handle(self, line: bytes | None) -> Json:
        """Answers one line from the daemon; never raises for what the line holds."""
        try:
            request = _parse_request_untrusted(line)
        except _BadRequestError as exc:
            return _reply(exc.op_id, InvalidRequestError(str(exc), operation="request"))
        if request.op in MUTATING_OPS:
            return self._change(request)
        return self._query(request)

    def _query(self, request: _Request) -> Json:
        found: Json = {"state": None}

        def ask() -> None:
            process = self._open()
            if request.op == "state":
                found["state"] = process.state.value
            else:
                found["thread_id"] = process.restore_thread_id

        error, seconds = _timed(ask)
        if isinstance(error, TargetGoneError) and self._target_is_gone():
            found["state"] = GONE
        return _reply(request.op_id, error, seconds=round(seconds, 6), **found)

    def _change(self, request: _Request) -> Json:
        try:
            self._op_file.begin(request.op_id, request.op)
        except OpFileError as exc:
            return _reply(request.op_id, exc)
        error, seconds = _timed(lambda: self._call(request))
        reply = _reply(request.op_id, error, state=None, seconds=round(seconds, 6))
        # The result is on disk before the state is asked for, because that may hang. That it could
        # not be written does not undo the operation: the reply still carries it.
        with contextlib.suppress(OpFileError):
            self._op_file.end(reply)
        reply["state"] = self._observe()
        with contextlib.suppress(OpFileError):
            self._op_file.end(reply)
        return reply

    def _call(self, request: _Request) -> None:
        process = self._open()
        if request.op == "lock":
            process.lock(request.timeout_ms)
        elif request.op == "checkpoint":
            process.checkpoint()
        elif request.op == "restore":
            process.restore(request.device_map)
        else:
            process.unlock()

    def _observe(self) -> str | None:
        try:
            return self._open().state.value
        except CudaCheckpointError:
            return GONE if self._target_is_gone() else None

    def _open(self) -> Process:
        return Process(self._target.pid, self._driver, start_time=self._target.start_time)

    def _target_is_gone(self) -> bool:
        try:
            return not _system.is_alive(*self._target)
        except OSError:
            return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a worker until its socket closes; returns the exit status."""
    _system.block_signals()
    try:
        options = _parse_options(sys.argv[1:] if arguments is None else arguments)
        channel = _Channel(options.fd)
    except (ValueError, OSError) as exc:
        sys.stderr.write(f"cuda_ckpt.worker: {exc}\n")
        return 2
    _leave_the_daemon()
    try:
        driver = Driver(options.library)
        driver.init()
    except CudaCheckpointError as exc:
        failure = _reply(None, exc)
        channel.send({"ready": False} | {key: failure[key] for key in _FAILURE_FIELDS})
        return 1
    identity = ProcessIdentity(os.getpid(), _system.start_time(os.getpid()) or 0)
    channel.send({"ready": True, "driver_version": driver.version, **identity._asdict()})
    worker = _Worker(driver, options.target, OpFile(options.op_file, options.target, identity))
    for line in channel.lines():
        channel.send(worker.handle(line))
    return 0


def _leave_the_daemon() -> None:
    """Cuts the ties by which a terminal, the environment or the OOM killer reach the calls."""
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    for variable in _DEVICE_VARIABLES:
        os.environ.pop(variable, None)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")


def _parse_options(arguments: Sequence[str]) -> _Options:
    # Not argparse: every rank of every job has a worker, and would pay for its imports.
    if len(arguments) % 2:
        raise ValueError("options come in pairs of --name value")
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    try:
        options = _Options(
            fd=int(given.pop("--fd")),
            target=ProcessIdentity(
                int(given.pop("--target-pid")), int(given.pop("--target-start-time"))
            ),
            op_file=given.pop("--op-file"),
            library=given.pop("--library", None),
        )
    except KeyError as exc:
        raise ValueError(f"option {exc.args[0]} is missing") from exc
    if given:
        raise ValueError(f"unknown option {next(iter(given))}")
    return options


def _parse_request_untrusted(line: bytes | None) -> _Request:
    """Parses one line; raises only _BadRequestError."""
    if line is None:
        raise _BadRequestError(f"a line is longer than {MAX_LINE_BYTES} bytes")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise _BadRequestError(f"not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise _BadRequestError("a request is a JSON object")
    op_id, op = content.get("op_id"), content.get("op")
    if not isinstance(op_id, str) or not 0 < len(op_id) <= MAX_OP_ID_CHARACTERS:
        raise _BadRequestError(f"op_id is a string of 1..{MAX_OP_ID_CHARACTERS} characters")
    if not isinstance(op, str) or op not in OPS:
        raise _BadRequestError(f"op is one of {', '.join(sorted(OPS))}", op_id)
    timeout_ms, device_map = content.get("timeout_ms"), content.get("device_map")
    if timeout_ms is not None and (isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int)):
        raise _BadRequestError("timeout_ms is a whole number of milliseconds", op_id)
    if (timeout_ms is not None) != (op == "lock"):
        raise _BadRequestError("timeout_ms goes with lock, and lock needs it", op_id)
    if device_map is not None and (op != "restore" or not _is_map_of_strings(device_map)):
        raise _BadRequestError("device_map goes with restore and maps UUIDs to UUIDs", op_id)
    return _Request(op_id, op, timeout_ms or 0, device_map)


def _is_map_of_strings(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())


def _timed(call: Callable[[], None]) -> tuple[CudaCheckpointError | None, float]:
    started = time.monotonic()
    try:
        call()
    except CudaCheckpointError as exc:
        return exc, time.monotonic() - started
    return None, time.monotonic() - started


def _reply(op_id: str | None, error: CudaCheckpointError | None, **observed: object) -> Json:
    code = 0 if error is None else NOT_ASKED if error.code is None else error.code
    name = "NOT_ASKED" if code == NOT_ASKED else error.name if error else code_name(0)
    return {
        "op_id": op_id,
        "ok": error is None,
        "code": code,
        "name": name,
        "error": "" if error is None else type(error).__name__,
        "message": "" if error is None else str(error),
        "state": None,
        "seconds": 0.0,
        **observed,
    }


if __name__ == "__main__":
    sys.exit(main())
