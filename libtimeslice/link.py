"""Opens connections to the daemon: connect, say hello, try again within a limit.

Blocking, and used by every thread that connects: the caller of the blocking client, the keeper of
either client, and the agent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from libtimeslice.errors import DaemonUnreachable, ProtocolError, Unavailable, error_from
from libtimeslice.protocol import FrameReader, Message, check_version_untrusted, encode

#: Bytes to ask the kernel for at a time; the usual message has about a hundred.
READ_BYTES = 16384
#: The kernel gives a blocked read back after this time, so that whoever reads can look at limits,
#: and at signals: Python does not see one that comes just before the read begins to block.
TICK_S = 1.0
#: A daemon that takes nothing in for this long is as good as gone.
SEND_LIMIT_S = 10.0
#: Longest that one connection attempt waits for its welcome. A daemon that starts may need seconds.
_WELCOME_LIMIT_S = 10.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0
# Of its own, so that a job that seeds the global generator for its experiment keeps its sequence.
_jitter = random.Random()
os.register_at_fork(after_in_child=_jitter.seed)  # else the ranks of a job pause in step


class OutOfTime(TimeoutError):  # noqa: N818 - as those in `errors`
    """A wait of this library's ended. A class of its own, because a caller's signal handler may
    raise TimeoutError into any wait, and that is an interrupt like others.
    """


@dataclass(slots=True, kw_only=True)
class Link:
    """A connection on which the daemon said welcome."""

    sock: socket.socket
    reader: FrameReader
    welcome: Message
    #: Messages that came right behind the welcome.
    backlog: list[Message]


def pause_s(failures: int, *, longest_s: float = _LONGEST_PAUSE_S) -> float:
    """How long to pause after so many failures in a row (1 or more), seconds.

    It doubles up to a limit. The jitter is there because a restart wakes every client at once.
    """
    whole_s: float = min(longest_s, _FIRST_PAUSE_S * 2 ** min(failures - 1, 30))
    return _jitter.uniform(whole_s / 2, whole_s)


def remaining(deadline: float | None, *, most_s: float) -> float:
    """Seconds until a monotonic instant, from 0 to `most_s`; None is never."""
    if deadline is None:
        return most_s
    return max(0.0, min(most_s, deadline - time.monotonic()))


def open_link(path: str, hello: Message, *, limit_s: float = _WELCOME_LIMIT_S) -> Link:
    """Connects once and waits for the welcome.

    Raises DaemonUnreachable if nobody answers within the limit, else what the daemon answered.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        return _shake_hands(sock, path, hello, time.monotonic() + limit_s)
    except OSError as error:
        sock.close()
        raise DaemonUnreachable(_why(path, error), socket=path) from error
    except BaseException:
        sock.close()
        raise


def open_within(
    path: str,
    hello: Callable[[], Message],
    *,
    until: float,
) -> Link:
    """Connects, again and again if need be, until the monotonic instant `until`.

    `hello` is asked anew for each attempt. Raises the last Unavailable, or at once anything else
    that a daemon answered, such as `session_unknown` or `unsupported_version`.
    """
    for failures in itertools.count(1):
        limit_s = max(0.05, remaining(until, most_s=_WELCOME_LIMIT_S))
        try:
            return open_link(path, hello(), limit_s=limit_s)
        except Unavailable:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise
        time.sleep(min(pause_s(failures), left_s))
    raise AssertionError("counting does not end")


def wait_for_hangup(sock: socket.socket, *, limit_s: float) -> bool:
    """Waits until the other side closes; returns False if it did not within the limit.

    It listens for nothing else, so messages do not wake the thread that is in here: on the request
    path it costs nothing but a look of the kernel's at the wait queue.
    """
    poller = select.poll()
    try:
        poller.register(sock.fileno(), select.POLLRDHUP)
    except (OSError, ValueError):  # closed on this side
        return True
    return bool(poller.poll(limit_s * 1000))


def hang_up(sock: socket.socket) -> None:
    """Ends a connection and wakes every thread that waits on it, without closing the descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def make_blocking(sock: socket.socket) -> None:
    """Lets the kernel watch the time.

    A time-out of Python's would put a poll before each read: a system call more on every request.
    """
    sock.setblocking(True)
    for option, limit_s in ((socket.SO_RCVTIMEO, TICK_S), (socket.SO_SNDTIMEO, SEND_LIMIT_S)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(limit_s), 0))


def _shake_hands(sock: socket.socket, path: str, hello: Message, deadline: float) -> Link:
    _limit(sock, deadline)
    sock.connect(path)
    # A daemon that has no room says so without reading the hello.
    with contextlib.suppress(BrokenPipeError):
        sock.sendall(encode(hello))
    reader = FrameReader()
    messages: list[Message] = []
    while not messages:
        _limit(sock, deadline)
        data = sock.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("it closed the connection before its welcome")
        messages = reader.feed(data)
    welcome = messages.pop(0)
    if welcome.get("t") == "error":
        raise error_from(welcome)
    if welcome.get("t") != "welcome":
        raise ProtocolError(
            f"expected a welcome, not {welcome.get('t')!r:.80}; is {path} tsliced's?"
        )
    check_version_untrusted(welcome)
    return Link(sock=sock, reader=reader, welcome=welcome, backlog=messages)


def _limit(sock: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it did not answer in time")
    sock.settimeout(left_s)


def _why(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no socket at {path}; start tsliced, or set TSLICE_SOCKET"
    if isinstance(error, ConnectionRefusedError):
        return f"no daemon listens at {path}; is tsliced running?"
    if isinstance(error, PermissionError):
        return f"this user may not open {path}"
    return f"the daemon at {path} cannot be reached: {error}"
