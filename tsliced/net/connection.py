"""One client connection: bytes to checked requests, messages to bytes, and its limits."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
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

_UCRED = struct.Struct("3i")


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
        self.peer: Peer | None = None
        #: Set by the desk when the hello was accepted.
        self.session: SessionId | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See who it is, and give it a limited time to say hello."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = _peer_of(transport.get_extra_info("socket"))
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
        for message in messages:
            if self._transport is None or self._transport.is_closing():
                return
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the desk."""
        self._transport = None
        self._end_handshake()
        self._desk.on_closed(self)

    # --- towards the client -------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

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
            transport.abort()
        else:
            transport.write(frame)
        return True

    def refuse(self, code: str, text: str) -> None:
        """Say why, then close."""
        self.send(error_message(code, text))
        self.close()

    def close(self) -> None:
        """Close after what was sent."""
        self._end_handshake()
        if self._transport is not None:
            self._transport.close()

    # --- messages -----------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        try:
            request = parse_untrusted(message)
        except ProtocolError as exc:
            self._on_mistake(exc)
            return
        if self.session is not None:
            self._desk.on_request(self, request)
        elif isinstance(request, Hello):
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


def _peer_of(sock: socket.socket) -> Peer | None:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(data)
    process = identify(pid)
    return None if process is None else Peer(process=process, uid=uid)
