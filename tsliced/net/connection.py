"""One client connection: bytes to checked requests, messages to bytes, and its limits."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from dataclasses import dataclass
from errno import EMFILE, ENFILE, ENODATA, ENOPROTOOPT, EOPNOTSUPP, ESRCH
from typing import Protocol, cast

from libtimeslice.errors import ProtocolError
from libtimeslice.protocol import (
    FrameReader,
    Hello,
    Message,
    Request,
    encode,
    error_message,
    error_reply,
    parse_untrusted,
)
from tsliced.config import ServerLimits
from tsliced.core.model import ProcessId, SessionId
from tsliced.host.processes import identify
from tsliced.net.survivors import Kept, Vault, name_of

#: More than this in its buffers makes a connection one that the desk looks after.
MUCH_BYTES = 64 << 10

_UCRED = struct.Struct("3i")
#: Linux 6.5 and later: a descriptor of the very process that connected. Python has no name for it.
SO_PEERPIDFD = 77


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who connected, as the kernel says; pid and uid are those of the host's name spaces."""

    process: ProcessId
    uid: int


class Desk(Protocol):
    """What a connection reports to: the server."""

    limits: ServerLimits

    def admit(self, connection: Connection) -> str | None:
        """Enter a connection into the books, or return why there is no room for it."""
        ...

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        """The first message came."""
        ...

    def on_request(self, connection: Connection, request: Request) -> None:
        """A later message came."""
        ...

    def on_buffered(self, connection: Connection, *, much: bool) -> None:
        """Much is in the buffers of a connection, or no longer."""
        ...

    def on_closed(self, connection: Connection) -> None:
        """The connection is gone."""
        ...


class Connection(asyncio.Protocol):
    """Talks to one client. A peer's mistake ends its connection and concerns nobody else."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._reader = FrameReader(max_frame=desk.limits.max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.TimerHandle | None = None
        self._most_unsent = desk.limits.max_send_buffer_bytes
        self._said_hello = False
        #: The client does not read as fast as we write; frames of it are not complete.
        self._writes_much = self._reads_much = False
        self.peer: Peer | None = None
        #: Set by the desk when the hello was accepted.
        self.session: SessionId | None = None
        self._kept: Kept | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See who it is, and give it a limited time to say hello."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MUCH_BYTES)
        try:
            self.peer = peer_of(transport.get_extra_info("socket"))
        except OSError as exc:
            self._refuse_unseen(exc)
            return
        if self.peer is None:
            # It died between connect and now.
            self._transport.abort()
            return
        if (refusal := self._desk.admit(self)) is not None:
            self.refuse("would_exceed_limit", refusal)
            return
        limit_s = self._desk.limits.handshake_timeout_s
        loop = asyncio.get_running_loop()
        text = f"no complete hello came within {limit_s:g} s"
        self._handshake = loop.call_later(limit_s, self.refuse, "bad_request", text)

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        try:
            messages = self._reader.feed(data)
        except ProtocolError as exc:
            self.refuse(exc.code, str(exc))
            return
        if not messages or self._reads_much:
            # A frame of the usual size comes at once.
            is_much = self._reader.pending_bytes > MUCH_BYTES
            if is_much or self._reads_much:
                self._reads_much = is_much
                self._tell_buffered()
        for message in messages:
            if self._transport is None or self._transport.is_closing():
                return
            self._on_message(message)

    def pause_writing(self) -> None:
        """Note that the client does not read as fast as we write."""
        self._writes_much = True
        self._tell_buffered()

    def resume_writing(self) -> None:
        """Note that it has caught up."""
        self._writes_much = False
        self._tell_buffered()

    def _tell_buffered(self) -> None:
        self._desk.on_buffered(self, much=self._writes_much or self._reads_much)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the desk."""
        self._transport = None
        self._end_handshake()
        if self._kept is not None:
            self._kept.end()
            self._kept = None
        self._desk.on_closed(self)

    # --- towards the client -------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def buffered_bytes(self) -> int:
        """What it has not sent, and what has come of a frame that is not complete."""
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return waiting + self._reader.pending_bytes

    def drop(self) -> None:
        """End it at once, with all that is in its buffers."""
        if self._transport is not None:
            self._prepare_end(self._transport)
            self._transport.abort()

    def send(self, message: Message) -> bool:
        """Send a message; return False, and send nothing, if it exceeds a frame.

        A client that does not read is dropped when its buffer is full.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return True
        try:
            frame = encode(message)
        except ProtocolError:
            return False
        # Asked before it is written: one message may be larger than all that may wait.
        if transport.get_write_buffer_size() > self._most_unsent:
            self.drop()
            return True
        transport.write(frame)
        if self._writes_much:
            self._tell_buffered()
        return True

    def refuse(self, code: str, text: str) -> None:
        """Say why, then close."""
        self.send(error_message(code, text))
        self.close()

    def close(self) -> None:
        """Close after what was sent."""
        self._end_handshake()
        if self._transport is not None:
            self._prepare_end(self._transport)
            self._transport.close()

    def _prepare_end(self, transport: asyncio.Transport) -> None:
        if self._kept is not None and not transport.is_closing():
            self._kept.on_closing(transport.get_extra_info("socket").fileno())

    def _refuse_unseen(self, error: OSError) -> None:
        """Let somebody go about whom nothing can be found out now; others are not touched."""
        if error.errno in (EMFILE, ENFILE):
            text = "the daemon has no file descriptor left; raise LimitNOFILE of its unit"
            self.refuse("would_exceed_limit", text)
        else:
            self.refuse("unavailable", f"who you are cannot be found out: {error.strerror}")

    # --- beyond this daemon -------------------------------------------------------------------

    def keep(self, vault: Vault, session: SessionId) -> None:
        """Have the service manager keep the connection too, in case that this daemon ends."""
        if self._transport is None:
            return
        name = name_of(session)
        if vault.store(name, self._transport.get_extra_info("socket").fileno()):
            self._kept = Kept(name, vault)

    def leave(self) -> None:
        """Leave the connection to the next daemon if it is kept, else close it."""
        if self._kept is None or self._transport is None:
            self.close()
            return
        self._kept = None
        self._end_handshake()
        self._transport.abort()

    # --- messages -----------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        try:
            request = parse_untrusted(message)
        except ProtocolError as exc:
            self._on_mistake(exc)
            return
        if self.session is not None:
            self._desk.on_request(self, request)
        elif self._said_hello:
            self.refuse("bad_request", "wait for the welcome before you go on")
        elif isinstance(request, Hello):
            self._said_hello = True
            self._end_handshake()
            self._desk.on_hello(self, request)
        else:
            self.refuse("bad_request", "the first message of a connection is a hello")

    def _on_mistake(self, error: ProtocolError) -> None:
        if self.session is None:
            self.refuse(error.code, str(error))
        elif error.request_id is not None:
            self.send(error_reply(error.request_id, error.code, str(error)))
        # A notification that is not understood is of a newer client: nobody waits for an answer.

    def _end_handshake(self) -> None:
        if self._handshake is not None:
            self._handshake.cancel()
            self._handshake = None


def peer_of(sock: socket.socket) -> Peer | None:
    """Return who connected, or None if it died meanwhile.

    Its pid may have been given to another process since then. Where the kernel offers a descriptor
    of the process itself, that is ruled out: it still lives when its start time has been read.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(data)
    pidfd = None
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as exc:
        if exc.errno in (ESRCH, ENODATA):
            return None
        if exc.errno not in (ENOPROTOOPT, EOPNOTSUPP):
            raise
    try:
        process = identify(pid)
        if process is None or (pidfd is not None and _has_ended(pidfd)):
            return None
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return Peer(process=process, uid=uid)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
