"""One connection to the daemon of another host, as messages: bytes in, bytes out, and its end.

The streams of asyncio would do, and cost as much as all the rest of what is done about a message: a
daemon that coordinates a job over thousands of hosts takes one of each in every step of a move.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import cast

from libtimeslice.protocol import HEADER_BYTES
from tsliced.config import PeerSettings
from tsliced.net.peer_auth import check_certificate
from tsliced.net.peer_messages import (
    GREETING_BYTES,
    Bye,
    Frames,
    PeerMessage,
    PeerRefused,
    Refusal,
)

#: What may have come of a side that is not heard yet; then nothing more is read.
MOST_UNHEARD = 1 << 16


class PeerGone(Exception):  # noqa: N818 - as PeerRefused
    """The connection cannot be made, or ended; the text says how."""


class Link(asyncio.Protocol):
    """A connection. Belongs to the event loop; close it.

    First each message is asked for, since keys and limits change with what is said (`receive`);
    then they are handed over as they come (`serve`).
    """

    def __init__(self, settings: PeerSettings) -> None:
        self.frames = Frames(max_bytes=GREETING_BYTES)
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._is_paused = False
        #: Whom to hand messages over to.
        self._take: Callable[[PeerMessage], bool] | None = None
        #: Who waits: for more bytes, or for the end of `serve`.
        self._waiter: asyncio.Future[None] | None = None
        #: How it ended, once it has.
        self._end: PeerGone | PeerRefused | None = None
        #: Why this side ended it.
        self._dropped = ""

    # --- what the loop calls ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # Those of uvloop are not of this class.
        self._transport = cast("asyncio.Transport", transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            set_options(sock, self._settings)

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        if self._take is not None:
            self._hand_over(data)
            return
        self._buffer += data
        if len(self._buffer) > MOST_UNHEARD and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End. What came before and was not asked for yet can still be had."""
        if isinstance(exc, ssl.SSLError):
            self._end = refused_by_tls(exc)
        else:
            # What this side did is the better reason.
            said = self._dropped or (exc.strerror if isinstance(exc, OSError) else None)
            self._end = PeerGone(said or "it closed the connection")
        self._wake(self._end if self._take is not None else None)

    def _wake(self, exc: Exception | None = None) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if exc is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(exc)

    # --- what comes ---------------------------------------------------------------------------

    async def receive(self) -> PeerMessage:
        """Return the next message. Raises `PeerGone` or `PeerRefused`."""
        while True:
            if self._dropped:
                raise PeerGone(self._dropped)
            if (frame := self._next_frame()) is not None:
                return self.frames.decode_untrusted(frame)
            if self._end is not None:
                raise self._end
            self._read_on()
            await self._wait()

    async def expect(self, kind: type[PeerMessage]) -> PeerMessage:
        """Return the next message, which must be of one kind; a refusal is raised."""
        message = await self.receive()
        if isinstance(message, Refusal):
            raise PeerRefused(message.code, message.text, told=True)
        if not isinstance(message, kind):
            raise PeerRefused("bad_message", f"{type(message).__name__} came out of turn")
        return message

    async def serve(self, take: Callable[[PeerMessage], bool]) -> None:
        """Hand over each message within the call that brings it, until `take` returns False.

        Raises `PeerGone` or `PeerRefused`, and what `take` raises.
        """
        if self._end is not None and not self._buffer:
            raise self._end
        self._take = take
        self._read_on()
        ended = self._wait()
        self._hand_over(b"")
        if self._end is not None:
            self._wake(self._end)
        await ended

    def _read_on(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def _wait(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _hand_over(self, data: bytes) -> None:
        take, frames = self._take, self.frames
        assert take is not None
        if self._waiter is None or self._dropped:
            # It has ended for whoever listened.
            return
        try:
            if not self._buffer and len(data) > HEADER_BYTES:
                header = data[:HEADER_BYTES]
                if frames.length_untrusted(header) == len(data) - HEADER_BYTES:
                    # The usual case is one whole frame: it never enters the buffer.
                    if not take(frames.decode_untrusted(data[HEADER_BYTES:])):
                        self._wake()
                    return
            self._buffer += data
            while (frame := self._next_frame()) is not None:
                if not take(frames.decode_untrusted(frame)):
                    self._wake()
                    return
        except Exception as exc:
            self._wake(exc)

    def _next_frame(self) -> bytes | None:
        """Return what followed a header, if all of it is here and this side still listens."""
        buffer = self._buffer
        if len(buffer) < HEADER_BYTES or self._dropped:
            return None
        end = HEADER_BYTES + self.frames.length_untrusted(bytes(buffer[:HEADER_BYTES]))
        if len(buffer) < end:
            return None
        frame = bytes(buffer[HEADER_BYTES:end])
        del buffer[:end]
        return frame

    # --- what goes out ------------------------------------------------------------------------

    def send(self, message: PeerMessage) -> None:
        """Send a message; a side that does not read loses its connection.

        Raises `PeerRefused` (``too_large``), and then nothing is sent.
        """
        if not self.transport.is_closing():
            self._write(self.frames.encode(message))

    def send_bodies(self, bodies: Iterable[bytes]) -> None:
        """Send messages that are maps in msgpack already, with one write.

        As `send`, but if one of them is too large the connection is of no more use: drop it.
        """
        if not self.transport.is_closing():
            self._write(b"".join([self.frames.seal(body) for body in bodies]))

    def _write(self, data: bytes) -> None:
        most = self._settings.max_unsent_bytes
        if self.transport.get_write_buffer_size() > most:
            self.drop(f"it has not read {most} bytes that were sent to it")
            return
        self.transport.write(data)

    # --- what it is ---------------------------------------------------------------------------

    @property
    def transport(self) -> asyncio.Transport:
        """The connection itself."""
        assert self._transport is not None, "it was made"
        return self._transport

    @property
    def address(self) -> str:
        """Where the other side is."""
        name = self.transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "unknown"

    def check_certificate(self, host: str) -> None:
        """With TLS: raise `PeerRefused` if the other side is not this host."""
        if (session := self.transport.get_extra_info("ssl_object")) is not None:
            check_certificate(session.getpeercert(), host)

    def trust(self) -> None:
        """Take frames of the usual size from now on: the other side has proved who it is."""
        self.frames.max_bytes = self._settings.max_peer_frame_bytes

    # --- its end ------------------------------------------------------------------------------

    def refuse(self, refusal: PeerRefused) -> None:
        """Say why this side does not go on, unless it was the other one; then close."""
        if not refusal.told:
            self.send(Refusal(code=refusal.code, text=printable(str(refusal))))
        self.close()

    def leave(self) -> None:
        """Say that this daemon ends; then close."""
        self.send(Bye())
        self.close()

    def close(self) -> None:
        """Close after what was sent; the kernel gives up on that in time: see `set_options`."""
        self.transport.close()

    def drop(self, reason: str) -> None:
        """End it at once."""
        self._dropped = reason
        self.transport.abort()


def set_options(sock: socket.socket, settings: PeerSettings) -> None:
    """Have the kernel send at once, and give up when the other side is LOST too."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(settings.lost_s * 1000))


def refused_by_tls(error: ssl.SSLError) -> PeerRefused:
    """Return what the other side's TLS, or this one's, objects to."""
    reason = getattr(error, "verify_message", None) or error.reason or str(error)
    return PeerRefused("auth", f"TLS: {printable(reason).lower().replace('_', ' ')}")


def printable(text: str) -> str:
    """Return a text as a message may hold it."""
    return "".join(c if c.isprintable() else "?" for c in text)[:1000] or "no reason"
