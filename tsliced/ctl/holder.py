"""The process that `tslicectl acquire` leaves behind, and how other commands find it.

It holds one lease. It listens on a Unix socket that is named after the lease, in a directory that
is the user's alone; whoever connects and writes ``release`` gets one line of JSON back when that is
done. It also ends when the lease is lost or when it gets SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import FrameType

from libtimeslice.errors import TimeSliceError
from libtimeslice.lease import Lease
from tsliced.ctl.failures import (
    FAILED,
    NOT_FOUND,
    NOT_PERMITTED,
    SIGNALLED,
    CommandError,
    failure_from,
)
from tsliced.ctl.holding import LOOK_S, facts_of, is_lost, lease_for, open_client
from tsliced.ctl.options import add_common_options, add_lease_options

_REQUEST = b"release\n"
#: A holder that is asked to release has so long to do it, seconds.
RELEASE_LIMIT_S = 30.0
#: A holder that has told that it failed has so long to end, seconds.
END_LIMIT_S = 10.0
_MAX_ANSWER = 65536


# --- The side of tslicectl -------------------------------------------------------------------


def start(options: argparse.Namespace) -> dict[str, object]:
    """Starts a holder, waits until it has its lease, and returns what it tells about it.

    Raises CommandError with what it failed of. If the wait is interrupted, nothing is left behind.
    """
    runtime_directory()  # say what is wrong with it before waiting in a queue
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    child = subprocess.Popen(
        [sys.executable, "-m", "tsliced.ctl.holder", *_arguments(options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        with child.stdout:
            told = json.loads(child.stdout.readline() or b"{}")
    except BaseException:
        child.terminate()
        raise
    if "lease" in told:
        return dict(told)
    child.wait(END_LIMIT_S)
    error = told.get("error") or {"code": "internal", "message": "the holder ended", "status": 1}
    raise CommandError(error["message"], code=error["code"], status=error["status"])


def tell_release(lease: str) -> dict[str, object]:
    """Has a lease released by its holder; returns ``released``, ``waiters`` and ``deferred``.

    Raises CommandError if no holder of ours has this lease.
    """
    path = socket_path_of(lease)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(RELEASE_LIMIT_S)
        try:
            sock.connect(str(path))
            sock.sendall(_REQUEST)
            answer = sock.makefile("rb").readline(_MAX_ANSWER)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            path.unlink(missing_ok=True)  # left over from a holder that was killed
            raise CommandError(
                f"no process of yours holds a lease {lease}", code="unknown_lease", status=NOT_FOUND
            ) from error
        except OSError as error:
            raise CommandError(
                f"the process that holds {lease} does not answer: {error}", code="holder"
            ) from error
    if not answer:
        raise CommandError(f"the process that held {lease} has just ended", code="holder")
    return dict(json.loads(answer))


def runtime_directory() -> Path:
    """Returns the user's own directory for sockets, made if it is missing.

    Raises CommandError if it belongs to somebody else or is open to others.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.access(given, os.W_OK | os.X_OK):
        path = Path(given) / "tslicectl"
    else:
        path = Path("/tmp") / f"tslicectl-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    private = not stat.S_IMODE(found.st_mode) & 0o077
    if not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and private):
        raise CommandError(
            f"{path} is not a directory of yours alone; remove it, or set XDG_RUNTIME_DIR",
            code="not_permitted",
            status=NOT_PERMITTED,
        )
    return path


def socket_path_of(lease: str) -> Path:
    """Returns where the holder of a lease listens; ids may be longer than a socket's path."""
    return runtime_directory() / f"{hashlib.sha256(lease.encode()).hexdigest()[:24]}.sock"


def _arguments(options: argparse.Namespace) -> list[str]:
    """Returns the options again as arguments, for the holder."""
    arguments = [f"--group={group}" for group in options.group or ()]
    for name in ("socket", "job", "timeout", "phase", "ranks"):
        value = getattr(options, name)
        if value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


# --- The holder ------------------------------------------------------------------------------


def main() -> int:
    """Gets a lease, tells our parent, and holds it until it is to be released."""
    parser = argparse.ArgumentParser(prog="tsliced.ctl.holder", description=__doc__)
    add_common_options(parser, socket=None, json=False)
    add_lease_options(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    try:
        with open_client(options) as client, lease_for(options, client) as lease:
            path = socket_path_of(lease.id)
            path.unlink(missing_ok=True)
            try:
                with _listen(path) as listener:
                    _tell({**facts_of(lease, client), "holder_pid": os.getpid()})
                    return _hold(listener, lease)
            finally:
                path.unlink(missing_ok=True)
    except TimeSliceError as error:
        return _tell_failure(failure_from(error))
    except CommandError as error:
        return _tell_failure(error)
    except BrokenPipeError:
        return FAILED  # nobody is there to be told; the lease is released already


def _hold(listener: socket.socket, lease: Lease) -> int:
    """Waits for somebody who wants the lease released, and serves them."""
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if is_lost(lease):
                return FAILED
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(LOOK_S)
            if connection.recv(len(_REQUEST)) != _REQUEST:
                continue
            released = lease.release()
            answer = {
                "released": lease.id,
                "waiters": released.waiters if released else 0,
                "deferred": released.deferred if released else False,
            }
            connection.sendall(json.dumps(answer).encode() + b"\n")
            return 0


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(LOOK_S)
    return listener


def _tell(facts: dict[str, object]) -> None:
    """Writes one line to our parent and lets go of its pipe and its terminal.

    If the parent is gone, this raises BrokenPipeError and the lease is released: nobody would ever
    know of it.
    """
    os.write(1, json.dumps(facts).encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _tell_failure(error: CommandError) -> int:
    failure = {"code": error.code, "message": error.message, "status": error.status}
    _tell({"error": failure})
    return error.status


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(SIGNALLED + signum)


if __name__ == "__main__":
    sys.exit(main())
