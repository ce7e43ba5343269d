"""Frames: bytes into messages and messages into bytes, within the limits of a frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import msgpack
from msgpack.fallback import Packer as _SlowPacker

from libtimeslice.errors import ProtocolError
from libtimeslice.fields import Message

HEADER_BYTES = 4
#: Largest body of a frame, in bytes.
MAX_FRAME = 1 << 20
#: How deep maps and lists may nest in a frame, the outermost map included.
MAX_DEPTH = 16

if msgpack.Packer is _SlowPacker:  # the C extension is missing, and this packer is not thread-safe
    _pack = cast("Callable[[Message], bytes]", msgpack.packb)
else:
    # One packer for all: the C packer holds the interpreter lock through `pack` (nothing in a
    # message calls back into Python), and making one for each message costs more than packing.
    _pack = cast("Callable[[Message], bytes]", msgpack.Packer(use_bin_type=True).pack)

_unpack = cast("Callable[[bytes], object]", msgpack.unpackb)


def encode(message: Message) -> bytes:
    """Turns a message into one frame.

    Raises ProtocolError (`bad_frame`) if it exceeds `MAX_FRAME`, TypeError or ValueError if a value
    in it is of no msgpack type: both are mistakes of this side.
    """
    body = _pack(message)
    size = len(body)
    if size > MAX_FRAME:
        raise ProtocolError(f"a message of {size} bytes exceeds the limit of {MAX_FRAME}")
    return size.to_bytes(HEADER_BYTES, "big") + body


class FrameReader:
    """Turns the bytes of one connection into messages.

    After an error the reader stays failed, because the start of the next frame is unknown: close
    the connection. Messages that came with the same bytes as the error are dropped with it.
    """

    __slots__ = ("_buffer", "_failure", "_max_frame")

    def __init__(self, *, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._failure: ProtocolError | None = None
        self._max_frame = max_frame

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not ended yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """Takes bytes in and returns the messages that they complete, in order.

        Raises ProtocolError (`bad_frame`) for a frame that is too long, is not msgpack, is not a
        map with string keys, or nests too deep.
        """
        if self._failure is not None:
            raise self._failure
        try:
            if not self._buffer and len(data) > HEADER_BYTES:
                length = int.from_bytes(data[:HEADER_BYTES], "big")
                if length + HEADER_BYTES == len(data) and length <= self._max_frame:
                    # The usual case is one whole frame: it never enters the buffer. (For a frame of
                    # the usual size a slice costs a third of what a memoryview does.)
                    return [decode_untrusted(data[HEADER_BYTES:])]
            self._buffer += data
            return self._take()
        except ProtocolError as error:
            self._failure = error
            self._buffer.clear()
            raise

    def feed_eof(self) -> None:
        """Tells that the peer closed; raises ProtocolError if that cut a frame short."""
        if self._failure is None and self._buffer:
            raise ProtocolError(f"the connection ended inside a frame ({self.pending_bytes} bytes)")

    def _take(self) -> list[Message]:
        messages: list[Message] = []
        buffer, start, size = self._buffer, 0, len(self._buffer)
        while size - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            length = int.from_bytes(buffer[start:body], "big")
            if length > self._max_frame:
                raise ProtocolError(
                    f"a frame of {length} bytes exceeds the limit of {self._max_frame}"
                )
            if size - body < length:
                break
            messages.append(decode_untrusted(bytes(buffer[body : body + length])))
            start = body + length
        del buffer[:start]
        return messages


#: 1 for each byte that can open a list or a map in msgpack, 0 for the others.
_OPENS = bytes(0x80 <= byte < 0xA0 or 0xDC <= byte <= 0xDF for byte in range(256))


def decode_untrusted(body: bytes) -> Message:
    """Returns the message that the body of a frame holds; raises ProtocolError (`bad_frame`)."""
    try:
        message = _unpack(body)
    except Exception as error:  # msgpack has no root: ValueError, OverflowError, MemoryError, ...
        raise ProtocolError(f"a frame is not msgpack: {error!r:.200}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__}, not a map")
    # A frame nests no deeper than it has bytes that could open a list or a map; few have so many
    # that the exact walk is needed.
    if body.translate(_OPENS).count(1) > MAX_DEPTH:
        _check_nesting(message, 1)
    return message


def _check_nesting(value: list[object] | dict[str, object], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"a message nests deeper than {MAX_DEPTH} levels")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (list, dict)):
            _check_nesting(item, depth + 1)
