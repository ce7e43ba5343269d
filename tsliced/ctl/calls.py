"""Asks the daemon: one connection for each command, and a limit to every wait."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from libtimeslice.connection import Connection
from libtimeslice.environment import find_socket
from libtimeslice.errors import DaemonUnreachable
from libtimeslice.protocol import Message

#: Longest time for a connection and its welcome, seconds.
CONNECT_LIMIT_S = 10.0
#: Longest time for an answer that waits for nothing but the daemon itself, seconds.
REPLY_LIMIT_S = 30.0
#: How often a quiet stream of notices is looked after, seconds.
_NOTICE_TICK_S = 60.0


def socket_of(options: argparse.Namespace) -> str:
    """Returns the path of the daemon's socket for the given options."""
    return find_socket(options.socket)


def job_of(options: argparse.Namespace) -> str | None:
    """Returns the job that was named, or None: then the daemon finds it out from the process."""
    given: str | None = options.job
    return given or os.environ.get("TSLICE_JOB_ID") or None


def open_daemon(
    options: argparse.Namespace, *, job: str | None = None, uid: int | None = None
) -> Connection:
    """Connects to the daemon; close the connection, or use it in a ``with`` statement.

    `uid` is the user for whom an administrator acts.
    Raises DaemonUnreachable, or what the daemon answers instead of a welcome.
    """
    return Connection.open(
        socket_of(options), role="tool", job=job, uid=uid, limit_s=CONNECT_LIMIT_S
    )


def ask(daemon: Connection, request: str, **fields: object) -> Message:
    """Sends a request and returns the answer.

    Raises the error in the answer, and DaemonUnreachable if none comes in time.
    """
    try:
        return daemon.request({"t": request, **fields}, REPLY_LIMIT_S)
    except TimeoutError as exc:
        raise DaemonUnreachable(
            f"the daemon did not answer within {REPLY_LIMIT_S:.0f} s; its log may say why"
        ) from exc


def notices(daemon: Connection, kind: str) -> Iterator[Message]:
    """Yields the notices of one kind; raises DaemonUnreachable when the connection ends."""
    while True:
        message = daemon.take_notice(_NOTICE_TICK_S)
        if message is not None and message.get("t") == kind:
            yield message
