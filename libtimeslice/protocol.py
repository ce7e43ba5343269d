"""The wire between clients and daemon: frames, messages and their limits. Sans-I/O.

This module is the single definition of the wire, and both sides use it: it turns bytes into
messages and messages into bytes, and checks what a client asks for (by the rules for fields in
`libtimeslice.fields`). It knows no socket and no clock. `docs/protocol.md` describes the same for
implementers in other languages.

Safety rule: whatever bytes come in, `FrameReader.feed` and `parse_untrusted` return or raise
`ProtocolError`, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import msgpack
from msgpack.fallback import Packer as _SlowPacker

from libtimeslice.errors import ProtocolError
from libtimeslice.fields import (
    MAX_CAPS,
    MAX_EVENTS,
    MAX_FIELD_TEXT,
    MAX_FIELDS,
    MAX_ID,
    MAX_NAME,
    MAX_PID,
    MAX_RANKS,
    MAX_SECRET,
    MAX_TIMEOUT_S,
    MAX_UID,
    MIN_HEARTBEAT_S,
    flag_field,
    groups_field,
    id_field,
    id_or_none,
    int_field,
    is_name,
    name_field,
    names_field,
    number_field,
    optional_int_field,
    optional_number_field,
    optional_text_field,
    refuse_field,
    text_field,
)
from libtimeslice.fields import Message as Message

#: Major and minor. The same major understands each other; a minor only adds names.
PROTOCOL_VERSION = (1, 1)
HEADER_BYTES = 4
#: Largest body of a frame, in bytes.
MAX_FRAME = 1 << 20
#: How deep maps and lists may nest in a frame, the outermost map included.
MAX_DEPTH = 16
#: What a process has between being asked to end and its end, unless its killer says otherwise.
KILL_GRACE_S = 10.0


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
    NOT_FOUND = "not_found"
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


@dataclass_transform(frozen_default=True)
def _value(cls: type[T]) -> type[T]:
    """Makes a dataclass that is frozen for the type checker alone.

    A dataclass that is frozen at run time takes more than twice as long to be made, and so does one
    whose fields are given as keywords. The daemon makes one for each request.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


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
    heartbeat_s: float | None


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
class LastTurn:
    """Wants this process's state back before it ends, if it is away; answered as an acquire.

    `leaving`: it ends now, and keeps the devices until it is gone also if its state is there.
    """

    id: int
    leaving: bool
    timeout_s: float | None


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
class Heartbeat:
    """The client's own code goes on (notification)."""


@_value
class StatusQuery:
    """Asks for the state of all groups; `host` None: of the daemon that is asked."""

    id: int
    host: str | None


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
class ShowQuery:
    """Asks for all that is known of one thing."""

    id: int
    kind: Literal["job", "group", "device", "session", "lease"]
    name: str


@_value
class JobOrder:
    """Asks for something to be done about a job: by its own user, or an operator."""

    id: int
    verb: Literal["retry", "clear", "kill"]
    #: Its id, ``UID/ID``, or ``CLUSTER/UID/ID``.
    job: str
    #: Of a kill: from the request to end until the end.
    grace_s: float


@_value
class DrainOrder:
    """Asks for groups to be closed to those who do not hold them, or to be opened again."""

    id: int
    open: bool
    #: None, with no device either: all.
    groups: tuple[str, ...] | None
    #: By UUID or index: the group that it is in.
    device: str | None
    park: bool
    #: For those who wait.
    why: str | None


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
    | LastTurn
    | Cancel
    | Register
    | Attach
    | PhaseMark
    | Progress
    | QueueDepth
    | Heartbeat
    | StatusQuery
    | PsQuery
    | EventsQuery
    | ShowQuery
    | JobOrder
    | DrainOrder
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
        request_id=id_or_none(message),
    )


# The two on the hot path come first, with their checks spelled out rather than shared: the daemon
# has some fifteen microseconds for a request in all.


def _parse_acquire(message: Message) -> Acquire:
    get = message.get
    arrive = get("arrive", "all")
    if arrive != "all" and arrive != "first":
        refuse_field(message, "arrive", "must be 'all' or 'first'")
    # Most are absent, and a call to find that out costs as much as the rest.
    return Acquire(
        id_field(message),
        groups_field(message),
        None if get("phase") is None else name_field(message, "phase"),
        None if get("ranks") is None else int_field(message, "ranks", 1, MAX_RANKS),
        arrive,
        None if get("timeout_s") is None else number_field(message, "timeout_s", 0, MAX_TIMEOUT_S),
    )


def _parse_release(message: Message) -> Release:
    return Release(id_field(message), text_field(message, "lease"))


def _parse_hello(message: Message) -> Hello:
    version = message.get("version")
    if not (isinstance(version, list) and [type(part) for part in version[:2]] == [int, int]):
        refuse_field(message, "version", "must be [major, minor]")
    if version[0] != PROTOCOL_VERSION[0]:
        older = "libtimeslice in the job" if version[0] < PROTOCOL_VERSION[0] else "tsliced"
        raise _unsupported_version(version, older)
    role = message.get("role", "client")
    if role not in ("client", "agent", "tool"):
        refuse_field(message, "role", "must be 'client', 'agent' or 'tool'")
    secret = message.get("secret")
    if secret is not None and not (isinstance(secret, bytes) and len(secret) <= MAX_SECRET):
        refuse_field(message, "secret", f"must be at most {MAX_SECRET} bytes")
    return Hello(
        version=(version[0], version[1]),
        client=text_field(message, "client"),
        caps=names_field(message, "caps", MAX_CAPS, least=0) if "caps" in message else (),
        job=optional_text_field(message, "job"),
        uid=optional_int_field(message, "uid", 0, MAX_UID),
        role=role,
        session=optional_text_field(message, "session"),
        secret=secret,
        ranks=optional_int_field(message, "ranks", 1, MAX_RANKS),
        heartbeat_s=optional_number_field(message, "heartbeat_s", MIN_HEARTBEAT_S, MAX_TIMEOUT_S),
    )


def check_version_untrusted(welcome: Message) -> None:
    """Raises ProtocolError (`unsupported_version`) if a welcome is of another major version."""
    version = welcome.get("version")
    if not (isinstance(version, list) and [type(part) for part in version[:2]] == [int, int]):
        raise ProtocolError("a welcome without a version", code=ErrorCode.BAD_REQUEST)
    if version[0] != PROTOCOL_VERSION[0]:
        older = "tsliced" if version[0] < PROTOCOL_VERSION[0] else "libtimeslice in the job"
        raise _unsupported_version(version, older)


def _unsupported_version(theirs: list[int], older: str) -> ProtocolError:
    return ProtocolError(
        f"protocol version {theirs[0]}.{theirs[1]} is not spoken here, "
        f"{PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]} is; update {older}, which is the older side",
        code=ErrorCode.UNSUPPORTED_VERSION,
    )


def _parse_last_turn(message: Message) -> LastTurn:
    return LastTurn(
        id=id_field(message),
        leaving=flag_field(message, "leaving", absent=False),
        timeout_s=optional_number_field(message, "timeout_s", 0, MAX_TIMEOUT_S),
    )


def _parse_cancel(message: Message) -> Cancel:
    return Cancel(id=id_field(message), acquire=int_field(message, "acquire", 1, MAX_ID))


def _parse_register(message: Message) -> Register:
    return Register(id=id_field(message), pid=optional_int_field(message, "pid", 1, MAX_PID))


def _parse_attach(message: Message) -> Attach:
    return Attach(
        id=id_field(message),
        pid=int_field(message, "pid", 1, MAX_PID),
        groups=groups_field(message),
    )


def _parse_phase(message: Message) -> PhaseMark:
    return PhaseMark(name=name_field(message, "name"), begin=flag_field(message, "begin"))


def _parse_progress(message: Message) -> Progress:
    fields = message.get("fields")
    if not isinstance(fields, dict) or len(fields) > MAX_FIELDS:
        refuse_field(message, "fields", f"must be a map of at most {MAX_FIELDS} fields")
    for name, value in fields.items():
        if not is_name(name):
            refuse_field(
                message, "fields", f"must have names of 1 to {MAX_NAME} printable characters"
            )
        if isinstance(value, str) and len(value) > MAX_FIELD_TEXT:
            refuse_field(
                message, "fields", f"has a string of more than {MAX_FIELD_TEXT} characters"
            )
        if not isinstance(value, (bool, int, float, str)):
            refuse_field(
                message, "fields", "must have values that are numbers, strings or booleans"
            )
    return Progress(fields=fields)


def _parse_queue(message: Message) -> QueueDepth:
    return QueueDepth(
        name=name_field(message, "name"),
        depth=number_field(message, "depth", 0, math.inf),
        target=optional_number_field(message, "target", 0, math.inf),
    )


def _parse_events(message: Message) -> EventsQuery:
    limit = optional_int_field(message, "limit", 1, MAX_EVENTS)
    return EventsQuery(
        id=id_field(message),
        since=optional_int_field(message, "since", 0, MAX_ID),
        follow=flag_field(message, "follow", absent=False),
        limit=MAX_EVENTS if limit is None else limit,
    )


def _parse_status(message: Message) -> StatusQuery:
    host = None if message.get("host") is None else name_field(message, "host")
    return StatusQuery(id=id_field(message), host=host)


def _parse_show(message: Message) -> ShowQuery:
    kind = message.get("kind")
    if kind not in ("job", "group", "device", "session", "lease"):
        refuse_field(message, "kind", "must be 'job', 'group', 'device', 'session' or 'lease'")
    return ShowQuery(id=id_field(message), kind=kind, name=text_field(message, "name"))


def _parse_job_order(message: Message) -> JobOrder:
    grace_s = optional_number_field(message, "grace_s", 0, MAX_TIMEOUT_S)
    return JobOrder(
        id=id_field(message),
        verb=message["t"],
        job=text_field(message, "job"),
        grace_s=KILL_GRACE_S if grace_s is None else grace_s,
    )


def _parse_drain_order(message: Message) -> DrainOrder:
    return DrainOrder(
        id=id_field(message),
        open=message["t"] == "undrain",
        groups=groups_field(message),
        device=optional_text_field(message, "device"),
        park=flag_field(message, "park", absent=False),
        why=optional_text_field(message, "why"),
    )


def _parse_reply(message: Message) -> Reply:
    error = message.get("err")
    if error is not None and not isinstance(error, dict):
        refuse_field(message, "err", "must be a map with code and message")
    return Reply(re=int_field(message, "re", 1, MAX_ID), error=error, fields=message)


_PARSERS: dict[object, Callable[[Message], Request]] = {
    "acquire": _parse_acquire,
    "release": _parse_release,
    "hello": _parse_hello,
    "last_turn": _parse_last_turn,
    "cancel": _parse_cancel,
    "register": _parse_register,
    "attach": _parse_attach,
    "phase": _parse_phase,
    "progress": _parse_progress,
    "queue": _parse_queue,
    "heartbeat": lambda _message: Heartbeat(),
    "status": _parse_status,
    "ps": lambda message: PsQuery(id=id_field(message)),
    "events": _parse_events,
    "show": _parse_show,
    "retry": _parse_job_order,
    "clear": _parse_job_order,
    "kill": _parse_job_order,
    "drain": _parse_drain_order,
    "undrain": _parse_drain_order,
    "ping": lambda message: Ping(id=id_field(message)),
    "bye": lambda _message: Bye(),
    "ack": lambda message: Ack(lease=text_field(message, "lease")),
}
