"""The wire between the daemons of two hosts: frames, messages and their limits. Sans-I/O.

A frame is a length (4 bytes, big endian), a tag of 32 bytes once the connection is keyed, and a
msgpack map. The tag is made over the number of the frame and its map, with a key for each
direction: a frame that was changed, repeated, moved or sent back does not fit.

Safety rule: whatever bytes come in, this module returns or raises `PeerRefused`, and nothing else.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgpack

from libtimeslice.errors import ProtocolError
from libtimeslice.fields import (
    MAX_CAPS,
    MAX_ID,
    MAX_NAME,
    id_field,
    int_field,
    is_name,
    name_field,
    names_field,
    number_field,
    optional_text_field,
    refuse_field,
    text_field,
)
from libtimeslice.protocol import HEADER_BYTES, Message, decode_untrusted, encode
from tsliced.config import LOCAL

#: Major and minor. The same major understands each other; a minor only adds names.
PEER_VERSION: Final = (1, 1)
#: Sides that both have it say what their cores have to tell each other.
JOBS: Final = "jobs"
#: A side that has it is asked for its event history.
EVENTS: Final = "events"
#: What this side understands beyond the version.
FEATURES: Final = ("status", JOBS, EVENTS)
TAG_BYTES: Final = 32
NONCE_BYTES: Final = 32
#: A frame of a side that has not proved yet who it is.
GREETING_BYTES: Final = 4096
#: Groups that two hosts may share.
MAX_SHARED: Final = 4096
#: How the map of a `Say` begins, if this program made it. Most messages are one, and it is hot.
_SAY: Final = b"\x83\xa1t\xa3say"
#: How a TLS record begins: the other side speaks TLS, and this one does not.
_TLS_RECORDS: Final = (b"\x14\x03", b"\x15\x03", b"\x16\x03")


class PeerRefused(Exception):  # noqa: N818 - as ReloadRefused
    """One side does not go on with the other. `code` is stable; `told`: the other side said so."""

    def __init__(self, code: str, text: str, *, told: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.told = told
        #: Who the other side is, if it has proved that.
        self.host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The first message, of the side that connected."""

    version: tuple[int, int]
    auth: str
    host: str
    #: Whom it wants to reach.
    to: str
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """With a shared key: the side that was connected to proves that it has it."""

    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """... and so does the other one."""

    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """With MUNGE: shows that who sent it runs as a daemon may, first of the side connected to."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a daemon is, and what must be the same on both sides."""

    host: str
    #: One run of the daemon: it is another one after each start. The boot id of its system, a
    #: slash, and when it began.
    incarnation: str
    release: str
    features: tuple[str, ...]
    cluster: str
    heartbeat_s: float
    #: Groups that both hosts share, and digests of what they are.
    groups: dict[str, str]
    #: The same of all other groups: see `known_groups`.
    known: dict[str, str] = field(default_factory=dict)

    @property
    def boot(self) -> str:
        """The boot id of its system: with another one, all processes there are others."""
        return self.incarnation.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The same of the side that was connected to: the link is up."""

    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The last message of a side that does not go on."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """A sign of life, which is answered."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Answers a ping, with the time of the side that answers."""

    seq: int
    at_unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question about the host; `what` is "status" or "events", `query` what of the latter."""

    id: int
    what: str
    query: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to the question with this id, or why there is none."""

    id: int
    body: Message | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """What the core of one side tells that of the other: see `peer_codec`."""

    kind: str
    fields: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The daemon ends as it was asked to."""


PeerMessage: TypeAlias = (
    Greeting
    | Challenge
    | Proof
    | Credential
    | Hello
    | Welcome
    | Refusal
    | Ping
    | Pong
    | Ask
    | Answer
    | Say
    | Bye
)


# ---------------------------------------------------------------------------------------- frames


class _Key:
    """Tags the frames of one direction, each with its number."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def tag(self, body: bytes) -> bytes:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hmac.digest(self._key, number + body, "sha256")


class Frames:
    """Turns messages into frames and back, for one connection.

    `max_bytes` may be changed while it goes on.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._sending: _Key | None = None
        self._receiving: _Key | None = None

    def use_keys(self, *, sending: bytes, receiving: bytes) -> None:
        """Tag every frame from now on."""
        self._sending, self._receiving = _Key(sending), _Key(receiving)

    def encode(self, message: PeerMessage) -> bytes:
        """Return a frame. Raises `PeerRefused` (``too_large``) beyond the limit."""
        try:
            body = encode(to_map(message))[HEADER_BYTES:]
        except ProtocolError as exc:
            raise PeerRefused("too_large", str(exc)) from exc
        return self.seal(body)

    def seal(self, body: bytes) -> bytes:
        """Return the frame of a message that is a map in msgpack already; raises as `encode`."""
        if len(body) > self.max_bytes:
            raise PeerRefused("too_large", f"{len(body)} bytes exceed the limit of a frame")
        tag = self._sending.tag(body) if self._sending is not None else b""
        return (len(tag) + len(body)).to_bytes(HEADER_BYTES, "big") + tag + body

    def length_untrusted(self, header: bytes) -> int:
        """Return how many bytes follow a header."""
        length = int.from_bytes(header, "big")
        if header[:2] in _TLS_RECORDS:
            raise PeerRefused("auth", 'the other side speaks TLS and this one does not: see "auth"')
        tag_bytes = TAG_BYTES if self._receiving is not None else 0
        if not tag_bytes < length <= self.max_bytes + tag_bytes:
            most = self.max_bytes
            raise PeerRefused("bad_frame", f"a frame of {length} bytes; the limit is {most}")
        return length

    def decode_untrusted(self, data: bytes) -> PeerMessage:
        """Return the message of what followed a header."""
        body = data
        if self._receiving is not None:
            body = data[TAG_BYTES:]
            if not hmac.compare_digest(self._receiving.tag(body), data[:TAG_BYTES]):
                raise PeerRefused("bad_tag", "a frame was changed, repeated or left out on its way")
        try:
            if body.startswith(_SAY):
                return _parse_say(_unpack_untrusted(body))
            return parse_untrusted(decode_untrusted(body))
        except ProtocolError as exc:
            raise PeerRefused("bad_message", str(exc)) from exc


# -------------------------------------------------------------------------------------- messages


def to_map(message: PeerMessage) -> Message:
    """Return a message as the map that is sent."""
    name = _NAMES[type(message)]
    if isinstance(message, Welcome):
        return {**to_map(message.hello), "t": name}
    if isinstance(message, Say):
        return {"t": name, "k": message.kind, "f": message.fields}
    fields = {field: getattr(message, field) for field in message.__dataclass_fields__}
    return {"t": name, **{k: v for k, v in fields.items() if v is not None}}


def parse_untrusted(message: Message) -> PeerMessage:
    """Check a message. Unknown fields are ignored. Raises `ProtocolError`."""
    kind = message.get("t")
    parse = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parse is None:
        raise ProtocolError(f"there is no message {kind!r:.80} between hosts", code="bad_request")
    return parse(message)


def _bytes_field(message: Message, field: str, length: int) -> bytes:
    value = message.get(field)
    if isinstance(value, bytes) and len(value) == length:
        return value
    refuse_field(message, field, f"must be {length} bytes")


def _parse_greeting(message: Message) -> Greeting:
    version = message.get("version")
    if not (isinstance(version, list) and [type(part) for part in version[:2]] == [int, int]):
        refuse_field(message, "version", "must be [major, minor]")
    return Greeting(
        version=(version[0], version[1]),
        auth=name_field(message, "auth"),
        host=name_field(message, "host"),
        to=name_field(message, "to"),
        nonce=_bytes_field(message, "nonce", NONCE_BYTES),
    )


def _parse_challenge(message: Message) -> Challenge:
    return Challenge(
        nonce=_bytes_field(message, "nonce", NONCE_BYTES),
        proof=_bytes_field(message, "proof", TAG_BYTES),
    )


def _digests_field(message: Message, field: str) -> dict[str, str]:
    groups = message.get(field)
    if not isinstance(groups, dict) or len(groups) > MAX_SHARED:
        refuse_field(message, field, f"must be a map of at most {MAX_SHARED} groups")
    if not all(is_name(name) and is_name(digest) for name, digest in groups.items()):
        refuse_field(message, field, f"must hold names of 1 to {MAX_NAME} printable characters")
    return groups


def _parse_hello(message: Message) -> Hello:
    return Hello(
        host=name_field(message, "host"),
        incarnation=name_field(message, "incarnation"),
        release=name_field(message, "release"),
        features=names_field(message, "features", MAX_CAPS, least=0),
        cluster=name_field(message, "cluster") if message.get("cluster") != "" else "",
        heartbeat_s=number_field(message, "heartbeat_s", 0, 1e6),
        groups=_digests_field(message, "groups"),
        # Daemons of version 1.0 know no groups of others.
        known=_digests_field(message, "known") if "known" in message else {},
    )


def _parse_ask(message: Message) -> Ask:
    query = message.get("query")
    if not isinstance(query, dict | None):
        refuse_field(message, "query", "must be a map")
    return Ask(id=id_field(message), what=name_field(message, "what"), query=query)


def _parse_answer(message: Message) -> Answer:
    body = message.get("body")
    error = optional_text_field(message, "error")
    if not isinstance(body, dict) and (body is not None or error is None):
        refuse_field(message, "body", "must be a map, unless there is an error")
    return Answer(id=id_field(message), body=body, error=error)


def _unpack_untrusted(body: bytes) -> Message:
    """Return the map of a `Say`, with tuples for lists.

    How deep it nests is not looked at: `peer_codec` follows it only as far as it should go.
    """
    try:
        message: Message = msgpack.unpackb(body, use_list=False)
    except Exception as exc:  # as in libtimeslice.protocol
        raise ProtocolError(f"a frame is not msgpack: {exc!r:.200}") from exc
    return message


def _parse_say(message: Message) -> Say:
    fields = message.get("f")
    if not isinstance(fields, list | tuple):
        refuse_field(message, "f", "must be a list")
    return Say(kind=name_field(message, "k"), fields=tuple(fields))


_PARSERS: Final[dict[str, Callable[[Message], PeerMessage]]] = {
    "greeting": _parse_greeting,
    "challenge": _parse_challenge,
    "proof": lambda message: Proof(proof=_bytes_field(message, "proof", TAG_BYTES)),
    "credential": lambda message: Credential(text=text_field(message, "text")),
    "hello": _parse_hello,
    "welcome": lambda message: Welcome(hello=_parse_hello(message)),
    "refusal": lambda m: Refusal(code=name_field(m, "code"), text=text_field(m, "text")),
    "ping": lambda message: Ping(seq=int_field(message, "seq", 0, MAX_ID)),
    "pong": lambda message: Pong(
        seq=int_field(message, "seq", 0, MAX_ID), at_unix=number_field(message, "at_unix", 0, 1e12)
    ),
    "ask": _parse_ask,
    "answer": _parse_answer,
    "say": _parse_say,
    "bye": lambda _message: Bye(),
}
_NAMES: Final[dict[type[Any], str]] = {
    Greeting: "greeting",
    Challenge: "challenge",
    Proof: "proof",
    Credential: "credential",
    Hello: "hello",
    Welcome: "welcome",
    Refusal: "refusal",
    Ping: "ping",
    Pong: "pong",
    Ask: "ask",
    Answer: "answer",
    Say: "say",
    Bye: "bye",
}


# ------------------------------------------------------------------------------------- agreement


def check_greeting(greeting: Greeting, *, host: str, auth: str, allowed: frozenset[str]) -> None:
    """Raise `PeerRefused` if this side does not go on with whoever greets it so."""
    theirs = greeting.version
    if theirs[0] != PEER_VERSION[0]:
        older = greeting.host if theirs[0] < PEER_VERSION[0] else host
        spoken = f"{PEER_VERSION[0]}.{PEER_VERSION[1]}"
        text = (
            f"version {theirs[0]}.{theirs[1]} is not spoken by {host}, {spoken} is; update {older}"
        )
        raise PeerRefused("version", text)
    if greeting.to != host:
        text = f"this is {host} and not {greeting.to}: look at peers.hosts on {greeting.host}"
        raise PeerRefused("wrong_host", text)
    if greeting.host not in allowed:
        text = f"{greeting.host} is not among the hosts of {host}: see peers.hosts there"
        raise PeerRefused("not_allowed", text)
    if greeting.auth != auth:
        text = f'peers.auth is "{greeting.auth}" on {greeting.host} and "{auth}" on {host}'
        raise PeerRefused("config", text)
    if greeting.host >= host:
        # Both would connect at the same time otherwise.
        text = f"of two hosts the one whose name comes first connects: {host} to {greeting.host}"
        raise PeerRefused("wrong_host", text)


def check_agreement(ours: Hello, theirs: Hello, *, suspect_s: float) -> None:
    """Raise `PeerRefused` (``config``) with what differs, if something does that must not."""
    here, there = ours.host, theirs.host
    if ours.cluster != theirs.cluster:
        text = f'daemon.cluster is "{ours.cluster}" on {here} and "{theirs.cluster}" on {there}'
        raise PeerRefused("config", text)
    if theirs.heartbeat_s >= suspect_s:
        text = (
            f"peers.heartbeat_s on {there}, {theirs.heartbeat_s:g} s, "
            f"must be less than peers.suspect_s on {here}, {suspect_s:g} s"
        )
        raise PeerRefused("config", text)
    if (ours.groups or theirs.groups) and JOBS not in theirs.features:
        text = f"{there} runs {theirs.release}, which cannot share groups with others; update it"
        raise PeerRefused("version", text)
    for name in sorted(ours.groups.keys() | theirs.groups.keys()):
        if name not in ours.groups or name not in theirs.groups:
            has, lacks = (here, there) if name in ours.groups else (there, here)
            text = f"group {name} spans {here} and {there} on {has}, and does not on {lacks}"
            raise PeerRefused("config", f"{text}; give both the same groups")
        if ours.groups[name] != theirs.groups[name]:
            raise _unlike(name, here, there)
    for name in sorted(ours.known.keys() & theirs.known.keys()):
        both = (ours.known[name], theirs.known[name])
        if both[0].removeprefix(LOCAL) == both[1].removeprefix(LOCAL):
            continue
        if not all(digest.startswith(LOCAL) for digest in both):
            raise _unlike(name, here, there)


def _unlike(group: str, *hosts: str) -> PeerRefused:
    text = f"group {group} is not the same on {' and '.join(sorted(hosts))}"
    return PeerRefused("config", f"{text}: devices, users, order and max_hold_s must agree")
