"""The wire between clients and daemon: frames, messages and their limits. Sans-I/O.

This module is the single definition of the wire, and both sides use it: it turns bytes into
messages and messages into bytes, and checks what a client asks for. It knows no socket and no
clock. `docs/protocol.md` describes the same for implementers in other languages.

Safety rule: whatever bytes come in, `FrameReader.feed` and `parse_untrusted` return or raise
`ProtocolError`, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import msgpack
from msgpack.fallback import Packer as _SlowPacker

from libtimeslice.errors import ProtocolError

#: A decoded frame. Its values are of any msgpack type until a `*_untrusted` function checked them.
Message = dict[str, Any]

#: Major and minor. The same major understands each other; a minor only adds names.
PROTOCOL_VERSION = (1, 0)
HEADER_BYTES = 4
#: Largest body of a frame, in bytes.
MAX_FRAME = 1 << 20
#: How deep maps and lists may nest in a frame, the outermost map included.
MAX_DEPTH = 16
MAX_ID = (1 << 63) - 1
MAX_GROUPS = 64
#: Characters in the name of a group, phase, queue, capability or progress field.
MAX_NAME = 128
#: Characters in any other string: ids of jobs, sessions and leases, names of clients, field values.
MAX_TEXT = 1024
MAX_SECRET = 256
MAX_CAPS = 64
MAX_FIELDS = 64
#: Characters in a string that a job reports of itself; a history keeps thousands of them.
MAX_FIELD_TEXT = 256
MAX_RANKS = 1 << 20
MAX_EVENTS = 10_000
#: Longest time-out that may be asked for, in seconds (about 31 years); use null for "no limit".
MAX_TIMEOUT_S = 1e9
MAX_PID = 1 << 22
MAX_UID = (1 << 32) - 2


class ErrorCode(str, Enum):
    """Codes of errors on the wire. Stable: new ones may come, none changes its meaning."""

    BAD_FRAME = "bad_frame"
    BAD_REQUEST = "bad_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_REQUEST = "unknown_request"
    UNKNOWN_GROUP = "unknown_group"
    NOT_PERMITTED = "not_permitted"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    WOULD_EXCEED_LIMIT = "would_exceed_limit"
    NO_HOST_MEMORY = "no_host_memory"
    NO_DEVICE_MEMORY = "no_device_memory"
    JOB_FAULTED = "job_faulted"
    PINNED = "pinned"
    BLOCKED = "blocked"
    REFUSED = "refused"
    NOT_CUDA = "not_cuda"
    NO_SUCH_PROCESS = "no_such_process"
    UNKNOWN_LEASE = "unknown_lease"
    LEASE_ENDED = "lease_ended"
    SESSION_UNKNOWN = "session_unknown"
    SHUTTING_DOWN = "shutting_down"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"

    def __str__(self) -> str:
        return self.value


# ---------------------------------------------------------------------------------------- frames

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
                    return [_decode_untrusted(data[HEADER_BYTES:])]
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
            messages.append(_decode_untrusted(bytes(buffer[body : body + length])))
            start = body + length
        del buffer[:start]
        return messages


#: Every byte that cannot open a list or a map in msgpack.
_NO_OPENER = bytes(set(range(256)) - {*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF})


def _decode_untrusted(body: bytes) -> Message:
    try:
        message = _unpack(body)
    except Exception as error:  # msgpack has no root: ValueError, OverflowError, MemoryError, ...
        raise ProtocolError(f"a frame is not msgpack: {error!r:.200}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame holds a {type(message).__name__}, not a map")
    # A frame nests no deeper than it has bytes that could open a list or a map; few have so many
    # that the exact walk is needed.
    if len(body.translate(None, _NO_OPENER)) > MAX_DEPTH:
        _check_nesting(message, 1)
    return message


def _check_nesting(value: list[object] | dict[str, object], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"a message nests deeper than {MAX_DEPTH} levels")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (list, dict)):
            _check_nesting(item, depth + 1)


# --------------------------------------------------------------------------------------- answers


def reply(request_id: int, **fields: object) -> Message:
    """Builds the answer to a request that succeeded."""
    return {"re": request_id, **fields}


def error_reply(request_id: int, code: str, message: str, **facts: object) -> Message:
    """Builds the answer to a request that failed."""
    return {"re": request_id, "err": {"code": str(code), "message": message, **facts}}


def error_message(code: str, message: str) -> Message:
    """Builds the last message before a connection is closed for a fault of the other side."""
    return {"t": "error", "code": str(code), "message": message}


# -------------------------------------------------------------------------------------- requests

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_options: bool) -> Callable[[object], object]:
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _value(cls: type[T]) -> type[T]:
    """Makes a dataclass that is frozen for the type checker alone.

    A dataclass that is frozen at run time takes more than twice as long to be made, and the daemon
    makes one for each request.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


@_value
class Hello:
    """First message of a connection."""

    version: tuple[int, int]
    client: str
    caps: tuple[str, ...]
    job: str | None
    uid: int | None
    role: Literal["client", "agent", "tool"]
    session: str | None
    secret: bytes | None
    ranks: int | None


@_value
class Acquire:
    """Asks for a lease; answered when it is granted. `groups` None: all that the job may use."""

    id: int
    groups: tuple[str, ...] | None
    phase: str | None
    ranks: int | None
    arrive: Literal["all", "first"]
    timeout_s: float | None


@_value
class Release:
    """Gives a lease back."""

    id: int
    lease: str


@_value
class Cancel:
    """Withdraws the acquire with the id `acquire`."""

    id: int
    acquire: int


@_value
class Register:
    """Makes a process known as a rank of the job; `pid` None is the caller itself."""

    id: int
    pid: int | None


@_value
class Attach:
    """Makes a process that never calls us known as a rank; `groups` None: find out."""

    id: int
    pid: int
    groups: tuple[str, ...] | None


@_value
class PhaseMark:
    """A named phase began or ended (notification)."""

    name: str
    begin: bool


@_value
class Progress:
    """Figures of the job's own, for reports (notification)."""

    fields: dict[str, float | int | str | bool]


@_value
class QueueDepth:
    """Backlog between two stages of the job, in its own items (notification)."""

    name: str
    depth: float
    target: float | None


@_value
class StatusQuery:
    """Asks for the state of all groups."""

    id: int


@_value
class PsQuery:
    """Asks for all known ranks."""

    id: int


@_value
class EventsQuery:
    """Asks for history from number `since` on; with `follow`, also for what is to come."""

    id: int
    since: int | None
    follow: bool
    limit: int


@_value
class Ping:
    """Asks for an empty answer."""

    id: int


@_value
class Bye:
    """Ends the session and releases its leases (notification)."""


@_value
class Ack:
    """Confirms that the grant of a lease arrived (notification)."""

    lease: str


@_value
class Reply:
    """Answers the daemon's request with the id `re`; `error` is None if it succeeded."""

    re: int
    error: dict[str, object] | None
    fields: Message


Request = (
    Hello
    | Acquire
    | Release
    | Cancel
    | Register
    | Attach
    | PhaseMark
    | Progress
    | QueueDepth
    | StatusQuery
    | PsQuery
    | EventsQuery
    | Ping
    | Bye
    | Ack
    | Reply
)


def parse_untrusted(message: Message) -> Request:
    """Checks what a client sent and returns it as a value that needs no further checks of form.

    Fields that are unknown are ignored: a newer client may send them. Raises ProtocolError with
    `request_id` set where there is a request to answer, and one of these codes:

    * `bad_request`: a field is missing, of the wrong type, or beyond its limit;
    * `unknown_request`: no such message; ignore it if there is no request to answer;
    * `unsupported_version`: a hello of another major version.
    """
    kind = message.get("t")
    parse = _PARSERS.get(kind) if kind.__class__ is str else None
    if parse is not None:
        return parse(message)
    if kind is None and "re" in message:
        return _parse_reply(message)
    raise ProtocolError(
        f"there is no message {kind!r:.80}",
        code=ErrorCode.UNKNOWN_REQUEST,
        request_id=_id_or_none(message),
    )


# The two on the hot path come first, with their checks spelled out rather than shared: the daemon
# has some fifteen microseconds for a request in all.


def _parse_acquire(message: Message) -> Acquire:
    get = message.get
    arrive = get("arrive", "all")
    if arrive != "all" and arrive != "first":
        _refuse(message, "arrive", "must be 'all' or 'first'")
    return Acquire(
        id=_id(message),
        groups=_groups(message),
        # Most are absent, and a call to find that out costs as much as the rest.
        phase=None if get("phase") is None else _name(message, "phase"),
        ranks=None if get("ranks") is None else _int(message, "ranks", 1, MAX_RANKS),
        arrive=arrive,
        timeout_s=(
            None if get("timeout_s") is None else _number(message, "timeout_s", 0, MAX_TIMEOUT_S)
        ),
    )


def _parse_release(message: Message) -> Release:
    return Release(id=_id(message), lease=_text(message, "lease"))


def _parse_hello(message: Message) -> Hello:
    version = message.get("version")
    if not (isinstance(version, list) and [type(part) for part in version[:2]] == [int, int]):
        _refuse(message, "version", "must be [major, minor]")
    if version[0] != PROTOCOL_VERSION[0]:
        raise ProtocolError(
            f"protocol version {version[0]}.{version[1]} is not spoken here, "
            f"{PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]} is; update the older side",
            code=ErrorCode.UNSUPPORTED_VERSION,
        )
    role = message.get("role", "client")
    if role not in ("client", "agent", "tool"):
        _refuse(message, "role", "must be 'client', 'agent' or 'tool'")
    secret = message.get("secret")
    if secret is not None and not (isinstance(secret, bytes) and len(secret) <= MAX_SECRET):
        _refuse(message, "secret", f"must be at most {MAX_SECRET} bytes")
    return Hello(
        version=(version[0], version[1]),
        client=_text(message, "client"),
        caps=_names(message, "caps", MAX_CAPS, least=0) if "caps" in message else (),
        job=_optional_text(message, "job"),
        uid=_optional_int(message, "uid", 0, MAX_UID),
        role=role,
        session=_optional_text(message, "session"),
        secret=secret,
        ranks=_optional_int(message, "ranks", 1, MAX_RANKS),
    )


def _parse_cancel(message: Message) -> Cancel:
    return Cancel(id=_id(message), acquire=_int(message, "acquire", 1, MAX_ID))


def _parse_register(message: Message) -> Register:
    return Register(id=_id(message), pid=_optional_int(message, "pid", 1, MAX_PID))


def _parse_attach(message: Message) -> Attach:
    return Attach(id=_id(message), pid=_int(message, "pid", 1, MAX_PID), groups=_groups(message))


def _parse_phase(message: Message) -> PhaseMark:
    return PhaseMark(name=_name(message, "name"), begin=_flag(message, "begin"))


def _parse_progress(message: Message) -> Progress:
    fields = message.get("fields")
    if not isinstance(fields, dict) or len(fields) > MAX_FIELDS:
        _refuse(message, "fields", f"must be a map of at most {MAX_FIELDS} fields")
    for name, value in fields.items():
        if not _is_name(name):
            _refuse(message, "fields", f"must have names of 1 to {MAX_NAME} printable characters")
        if isinstance(value, str) and len(value) > MAX_FIELD_TEXT:
            _refuse(message, "fields", f"has a string of more than {MAX_FIELD_TEXT} characters")
        if not isinstance(value, (bool, int, float, str)):
            _refuse(message, "fields", "must have values that are numbers, strings or booleans")
    return Progress(fields=fields)


def _parse_queue(message: Message) -> QueueDepth:
    return QueueDepth(
        name=_name(message, "name"),
        depth=_number(message, "depth", 0, math.inf),
        target=_optional_number(message, "target", 0, math.inf),
    )


def _parse_events(message: Message) -> EventsQuery:
    limit = _optional_int(message, "limit", 1, MAX_EVENTS)
    return EventsQuery(
        id=_id(message),
        since=_optional_int(message, "since", 0, MAX_ID),
        follow=_flag(message, "follow", absent=False),
        limit=MAX_EVENTS if limit is None else limit,
    )


def _parse_reply(message: Message) -> Reply:
    error = message.get("err")
    if error is not None and not isinstance(error, dict):
        _refuse(message, "err", "must be a map with code and message")
    return Reply(re=_int(message, "re", 1, MAX_ID), error=error, fields=message)


_PARSERS: dict[object, Callable[[Message], Request]] = {
    "acquire": _parse_acquire,
    "release": _parse_release,
    "hello": _parse_hello,
    "cancel": _parse_cancel,
    "register": _parse_register,
    "attach": _parse_attach,
    "phase": _parse_phase,
    "progress": _parse_progress,
    "queue": _parse_queue,
    "status": lambda message: StatusQuery(id=_id(message)),
    "ps": lambda message: PsQuery(id=_id(message)),
    "events": _parse_events,
    "ping": lambda message: Ping(id=_id(message)),
    "bye": lambda _message: Bye(),
    "ack": lambda message: Ack(lease=_text(message, "lease")),
}


# ---------------------------------------------------------------------------------------- checks
# bool is a subclass of int, and `True` is no count: hence `__class__ is int` throughout.


def _refuse(message: Message, field: str, rule: str) -> NoReturn:
    raise ProtocolError(
        f"field {field!r} of {message.get('t', 'reply')!r:.80} {rule}",
        code=ErrorCode.BAD_REQUEST,
        request_id=_id_or_none(message),
    )


def _id_or_none(message: Message) -> int | None:
    found = message.get("id")
    return found if found.__class__ is int and 0 < found <= MAX_ID else None


def _id(message: Message) -> int:
    found = message.get("id")
    if found.__class__ is int and 0 < found <= MAX_ID:
        return found
    _refuse(message, "id", "must be a positive integer")


def _int(message: Message, field: str, least: int, most: int) -> int:
    value = message.get(field)
    if value.__class__ is int and least <= value <= most:
        return value
    _refuse(message, field, f"must be an integer from {least} to {most}")


def _optional_int(message: Message, field: str, least: int, most: int) -> int | None:
    return None if message.get(field) is None else _int(message, field, least, most)


def _number(message: Message, field: str, least: float, most: float) -> float:
    value = message.get(field)
    # A comparison with NaN is false, so NaN is refused here as well.
    if value.__class__ in (float, int) and least <= value <= most:
        return value
    _refuse(message, field, f"must be a number from {least} to {most}")


def _optional_number(message: Message, field: str, least: float, most: float) -> float | None:
    return None if message.get(field) is None else _number(message, field, least, most)


def _flag(message: Message, field: str, absent: bool | None = None) -> bool:
    value = message.get(field, absent)
    if isinstance(value, bool):
        return value
    _refuse(message, field, "must be true or false")


def _is_name(value: object) -> bool:
    # Names end up in log lines and reports: no line breaks, no terminal control codes.
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _name(message: Message, field: str) -> str:
    value = message.get(field)
    if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable():
        return value
    _refuse(message, field, f"must be 1 to {MAX_NAME} printable characters")


def _text(message: Message, field: str) -> str:
    value = message.get(field)
    if not (isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()):
        _refuse(message, field, f"must be 1 to {MAX_TEXT} printable characters")
    return value


def _optional_text(message: Message, field: str) -> str | None:
    return None if message.get(field) is None else _text(message, field)


def _names(message: Message, field: str, most: int, *, least: int = 1) -> tuple[str, ...]:
    values = message.get(field)
    if not (isinstance(values, list) and least <= len(values) <= most):
        _refuse(message, field, f"must be a list of {least} to {most} names")
    for value in values:
        if not _is_name(value):
            _refuse(message, field, f"must hold names of 1 to {MAX_NAME} printable characters")
    return tuple(values)


def _groups(message: Message) -> tuple[str, ...] | None:
    if message.get("groups") is None:
        return None
    groups = _names(message, "groups", MAX_GROUPS)
    if len(groups) > 1 and len(set(groups)) != len(groups):
        _refuse(message, "groups", "names a group twice")
    return groups
