"""The wire: frames whatever the chunks, requests whatever the bytes."""

from __future__ import annotations

import math
import random
import re
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libtimeslice import fields, protocol
from libtimeslice.errors import ProtocolError
from libtimeslice.protocol import (
    Acquire,
    Attach,
    Cancel,
    ErrorCode,
    EventsQuery,
    FrameReader,
    Heartbeat,
    Hello,
    LastTurn,
    PhaseMark,
    Progress,
    QueueDepth,
    Register,
    Release,
    Reply,
    encode,
    error_message,
    error_reply,
    parse_untrusted,
    reply,
)
from libtimeslice.protocol.parsing import PARSERS
from libtimeslice.protocol.requests import WatchdogNotice

ACQUIRE: dict[str, Any] = {
    "t": "acquire",
    "id": 7,
    "groups": ["n1", "n2"],
    "phase": "rollout",
    "ranks": 4,
    "arrive": "first",
    "timeout_s": 2.5,
}
HELLO: dict[str, Any] = {
    "t": "hello",
    "version": [1, 3],
    "client": "x/1",
    "caps": ["quiesce"],
    "job": "j",
    "uid": 1000,
    "role": "agent",
    "session": "s",
    "secret": b"\x00\xff",
    "ranks": 2,
    "heartbeat_s": 2.5,
    "watchdog_s": 480,
}
#: One good message of each kind.
GOOD: list[dict[str, Any]] = [
    HELLO,
    ACQUIRE,
    {"t": "release", "id": 1, "lease": "l"},
    {"t": "cancel", "id": 2, "acquire": 1},
    {"t": "register", "id": 3, "pid": None},
    {"t": "attach", "id": 4, "pid": 99, "groups": None},
    {"t": "phase", "name": "reward", "begin": True},
    {"t": "progress", "fields": {"step": 1, "loss": math.nan, "tag": "a", "ok": True}},
    {"t": "queue", "name": "q", "depth": 3, "target": None},
    {"t": "heartbeat"},
    {"t": "last_turn", "id": 30, "leaving": True, "timeout_s": 2.5},
    {"t": "status", "id": 5},
    {"t": "ps", "id": 6},
    {"t": "events", "id": 7, "since": None, "follow": True, "limit": 10},
    {"t": "ping", "id": 8},
    {"t": "bye"},
    {"t": "ack", "lease": "l"},
    {"re": 3, "err": {"code": "internal", "message": "m"}},
]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def fault_of(stream: bytes) -> str | None:
    """The code of what is wrong with a stream; any error but a ProtocolError fails the test."""
    try:
        for message in FrameReader().feed(stream):
            parse_untrusted(message)
    except ProtocolError as error:
        return error.code
    return None


messages = st.dictionaries(st.text(max_size=8), values, max_size=6)


@given(st.lists(messages, max_size=6), st.randoms(use_true_random=False))
def test_any_chunking_gives_the_same_messages(
    sent: list[dict[str, Any]], chance: random.Random
) -> None:
    stream = b"".join(encode(message) for message in sent)
    reader, got, start = FrameReader(), [], 0
    while start < len(stream):
        end = min(len(stream), start + chance.choice([1, 2, 3, 5, 17, 200]))
        got += reader.feed(stream[start:end])
        start = end
    assert got == sent
    assert FrameReader().feed(stream) == sent
    assert reader.pending_bytes == 0
    reader.feed_eof()


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_give_only_protocol_errors(data: bytes) -> None:
    framed = struct.pack(">I", len(data)) + data
    for stream in (data, framed, encode({"t": "ping", "id": 1}) + framed):
        assert fault_of(stream) in {None, *(code.value for code in ErrorCode)}


def test_mutated_messages_give_only_protocol_errors() -> None:
    chance = random.Random(1)
    frames = [encode(message) for message in GOOD]
    for _ in range(20_000):
        frame = bytearray(chance.choice(frames))
        for _ in range(chance.randint(1, 4)):
            frame[chance.randrange(4, len(frame))] = chance.randrange(256)
        assert fault_of(bytes(frame)) != ErrorCode.INTERNAL


@given(st.dictionaries(st.sampled_from([*ACQUIRE, *HELLO, "lease", "pid", "fields"]), values))
def test_maps_of_known_names_give_only_protocol_errors(fields: dict[str, Any]) -> None:
    for kind in ("acquire", "hello", "release", "progress", "attach", "queue", "events", "cancel"):
        assert fault_of(encode({**fields, "t": kind})) in (
            None,
            ErrorCode.BAD_REQUEST,
            ErrorCode.UNSUPPORTED_VERSION,
        )


@pytest.mark.parametrize(
    ("stream", "told"),
    [
        (struct.pack(">I", protocol.MAX_FRAME + 1), "exceeds the limit"),
        (struct.pack(">I", 0xFFFFFFFF), "exceeds the limit"),
        (b"\x00\x00\x00\x00", "not msgpack"),
        (b"\x00\x00\x00\x01\xc1", "not msgpack"),
        (b"\x00\x00\x00\x02\x81\xa1", "not msgpack"),
        (b"\x00\x00\x00\x02\xc0\xc0", "not msgpack"),
        (b"\x00\x00\x00\x03\x81\x01\x02", "not msgpack"),
        (b"\x00\x00\x00\x03\x81\xa1\xff", "not msgpack"),
        (b"\x00\x00\x00\x01\x90", "not a map"),
        (b"\x00\x00\x00\x01\x07", "not a map"),
    ],
)
def test_a_malformed_frame_is_told_apart(stream: bytes, told: str) -> None:
    with pytest.raises(ProtocolError, match=told) as raised:
        FrameReader().feed(stream)
    assert raised.value.code == "bad_frame"


def test_a_frame_may_nest_as_deep_as_the_limit_and_no_deeper() -> None:
    def nested(levels: int) -> bytes:
        value: object = 1
        for _ in range(levels - 1):
            value = [value]
        return encode({"a": value})

    assert FrameReader().feed(nested(protocol.MAX_DEPTH))
    for levels in (protocol.MAX_DEPTH + 1, 500):
        with pytest.raises(ProtocolError, match="deeper"):
            FrameReader().feed(nested(levels))
    bomb = b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ProtocolError) as raised:
        FrameReader().feed(struct.pack(">I", len(bomb)) + bomb)
    assert raised.value.code == "bad_frame"


def test_a_frame_with_many_small_lists_is_not_taken_for_a_deep_one() -> None:
    message: dict[str, Any] = {"groups": [[] for _ in range(100)]}
    assert FrameReader().feed(encode(message)) == [message]


def test_a_reader_stays_failed_and_forgets_its_bytes() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        reader.feed(b"\xff\xff\xff\xff" + b"x" * 100)
    assert reader.pending_bytes == 0
    with pytest.raises(ProtocolError):
        reader.feed(encode({"t": "ping", "id": 1}))


def test_a_stream_that_ends_inside_a_frame_is_an_error() -> None:
    reader = FrameReader()
    assert reader.feed(encode({"t": "ping", "id": 1})[:-1]) == []
    with pytest.raises(ProtocolError, match="inside a frame"):
        reader.feed_eof()


def test_a_frame_at_the_limit_passes_and_one_above_it_cannot_be_made() -> None:
    fitting = {"a": b"x" * (protocol.MAX_FRAME - 8)}
    frame = encode(fitting)
    assert len(frame) == protocol.MAX_FRAME + 4
    reader = FrameReader()
    got = [m for i in range(0, len(frame), 65536) for m in reader.feed(frame[i : i + 65536])]
    assert got == [fitting]
    with pytest.raises(ProtocolError, match="exceeds"):
        encode({"a": b"x" * protocol.MAX_FRAME})
    with pytest.raises(ProtocolError, match="exceeds the limit of 100"):
        FrameReader(max_frame=100).feed(encode({"a": "x" * 100}))


def test_one_good_message_of_each_kind_is_understood() -> None:
    parsed = [parse_untrusted(message) for message in GOOD]
    assert len({type(request) for request in parsed}) == len(GOOD)
    assert parsed[0] == Hello(
        version=(1, 3),
        client="x/1",
        caps=("quiesce",),
        job="j",
        uid=1000,
        role="agent",
        session="s",
        secret=b"\x00\xff",
        ranks=2,
        heartbeat_s=2.5,
        watchdog_s=480,
    )
    assert parsed[1] == Acquire(
        id=7, groups=("n1", "n2"), phase="rollout", ranks=4, arrive="first", timeout_s=2.5
    )
    assert parsed[2:6] == [
        Release(id=1, lease="l"),
        Cancel(id=2, acquire=1),
        Register(id=3, pid=None),
        Attach(id=4, pid=99, groups=None),
    ]
    assert parsed[6] == PhaseMark(name="reward", begin=True)
    assert isinstance(parsed[7], Progress)
    assert parsed[8] == QueueDepth(name="q", depth=3, target=None)
    assert parsed[9] == Heartbeat()
    assert parsed[10] == LastTurn(id=30, leaving=True, timeout_s=2.5)
    assert parsed[13] == EventsQuery(id=7, since=None, follow=True, limit=10)
    assert isinstance(parsed[17], Reply)
    assert parsed[17].error == {"code": "internal", "message": "m"}


def test_absent_optional_fields_have_their_defaults_and_unknown_ones_are_ignored() -> None:
    assert parse_untrusted({"t": "acquire", "id": 1, "colour": {"a": [1]}}) == Acquire(
        id=1, groups=None, phase=None, ranks=None, arrive="all", timeout_s=None
    )
    hello = parse_untrusted({"t": "hello", "version": [1, 0], "client": "c"})
    assert isinstance(hello, Hello)
    assert (hello.role, hello.caps, hello.job) == ("client", (), None)
    assert hello.heartbeat_s is None
    assert hello.watchdog_s is None


def test_a_watchdog_is_told_with_its_limit_or_that_there_is_none() -> None:
    assert parse_untrusted({"t": "watchdog", "limit_s": 90}) == WatchdogNotice(limit_s=90)
    assert parse_untrusted({"t": "watchdog", "limit_s": None}) == WatchdogNotice(limit_s=None)
    with pytest.raises(ProtocolError, match="limit_s"):
        parse_untrusted({"t": "watchdog", "limit_s": "soon"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 0),
        ("id", True),
        ("id", "7"),
        ("id", 1 << 63),
        ("groups", []),
        ("groups", "n1"),
        ("groups", [1]),
        ("groups", [""]),
        ("groups", ["n1", "n1"]),
        ("groups", ["x" * 129]),
        ("groups", ["a\nb"]),
        ("groups", [f"g{number}" for number in range(65)]),
        ("phase", "\x1b[2J"),
        ("ranks", 0),
        ("ranks", 1.5),
        ("arrive", "some"),
        ("arrive", ["all"]),
        ("timeout_s", -0.1),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
        ("timeout_s", True),
    ],
)
def test_an_acquire_with_a_bad_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=f"field '{field}'") as raised:
        parse_untrusted({**ACQUIRE, field: value})
    assert raised.value.code == "bad_request"
    assert raised.value.request_id == (None if field == "id" else 7)


@pytest.mark.parametrize(
    "message",
    [
        {"t": "release", "id": 1},
        {"t": "release", "id": 1, "lease": "x" * 1025},
        {"t": "progress", "fields": {str(number): 1 for number in range(65)}},
        {"t": "progress", "fields": {"a": [1]}},
        {"t": "progress", "fields": {"a": "x" * 1025}},
        {"t": "progress", "fields": {"": 1}},
        {"t": "progress", "fields": []},
        {"t": "phase", "name": "p", "begin": 1},
        {"t": "queue", "name": "q", "depth": math.nan},
        {"t": "queue", "name": "q", "depth": -1},
        {"t": "events", "id": 1, "limit": 0},
        {"t": "events", "id": 1, "follow": "yes"},
        {"t": "attach", "id": 1, "pid": 0},
        {"t": "show", "id": 1, "kind": "planet", "name": "x"},
        {"t": "show", "id": 1, "kind": "job"},
        {"t": "retry", "id": 1, "job": "a\x00b"},
        {"t": "kill", "id": 1, "job": "a", "grace_s": -1},
        {"t": "drain", "id": 1, "groups": []},
        {"t": "drain", "id": 1, "park": "yes"},
        {"t": "undrain", "id": 1, "device": 0},
        {"t": "host_dead", "id": 1},
        {"t": "slurm_job", "id": 1, "verb": "pends", "job": "7", "uid": 0},
        {"t": "slurm_job", "id": 1, "verb": "began", "job": "7.a", "uid": 0},
        {"t": "slurm_job", "id": 1, "verb": "began", "job": "12345678901", "uid": 0},
        {"t": "slurm_job", "id": 1, "verb": "began", "job": "7", "uid": -1},
        {"t": "host_dead", "id": 1, "host": "n2", "why": "a\nb"},
        {**HELLO, "version": [1]},
        {**HELLO, "version": "1.0"},
        {**HELLO, "version": [True, 0]},
        {**HELLO, "role": "root"},
        {**HELLO, "secret": "text"},
        {**HELLO, "secret": b"x" * 257},
        {**HELLO, "caps": [7]},
        {**HELLO, "job": "a\x00b"},
        {**HELLO, "heartbeat_s": 0},
        {**HELLO, "heartbeat_s": "1"},
        {**HELLO, "watchdog_s": -1},
        {"re": "1"},
        {"re": 1, "err": "no"},
    ],
)
def test_what_is_beyond_its_limits_is_a_bad_request(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as raised:
        parse_untrusted(message)
    assert raised.value.code == "bad_request"


def test_another_major_version_is_refused_and_another_minor_is_not() -> None:
    parse_untrusted({**HELLO, "version": [1, 99]})
    with pytest.raises(ProtocolError, match=r"version 2\.0") as raised:
        parse_untrusted({**HELLO, "version": [2, 0]})
    assert raised.value.code == "unsupported_version"


@pytest.mark.parametrize("kind", [None, 7, "nope", ["acquire"], {"a": 1}])
def test_an_unknown_message_is_told_with_its_id_if_it_has_one(kind: object) -> None:
    for request_id in (5, None):
        with pytest.raises(ProtocolError) as raised:
            parse_untrusted({"t": kind, "id": request_id})
        assert raised.value.code == "unknown_request"
        assert raised.value.request_id == request_id


def test_answers_have_the_form_of_the_wire() -> None:
    assert reply(3, waiters=1) == {"re": 3, "waiters": 1}
    refused = error_reply(3, ErrorCode.PINNED, "why", job="a")
    assert refused == {"re": 3, "err": {"code": "pinned", "message": "why", "job": "a"}}
    assert type(refused["err"]["code"]) is str
    assert error_message("bad_frame", "m") == {"t": "error", "code": "bad_frame", "message": "m"}


def test_frames_are_plain_msgpack_behind_a_big_endian_length() -> None:
    frame = encode({"t": "ping", "id": 1, "raw": b"\xff"})
    assert struct.unpack(">I", frame[:4])[0] == len(frame) - 4
    assert msgpack.unpackb(frame[4:]) == {"t": "ping", "id": 1, "raw": b"\xff"}


PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_for_implementers_names_every_message_code_and_limit() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in PARSERS if f"`{name}`" not in page]
    missing = [name for name in missing if f"### {name}" not in page and f'"{name}"' not in page]
    missing += [str(code) for code in ErrorCode if f"| `{code}` |" not in page]
    for limit in (protocol.MAX_FRAME, fields.MAX_TEXT, fields.MAX_EVENTS, fields.MAX_PID):
        if f"{limit:,}".replace(",", " ") not in page:
            missing.append(str(limit))
    assert missing == []


def test_the_example_frame_of_the_page_is_what_is_sent() -> None:
    (line,) = re.findall(r"^00 00 00 0c .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert bytes.fromhex(line) == encode({"t": "ping", "id": 1})
