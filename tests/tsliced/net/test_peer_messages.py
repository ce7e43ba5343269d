"""The wire between daemons: frames that fit, messages that are whole, and hosts that agree."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libtimeslice.errors import ProtocolError
from tsliced.net.peer_messages import (
    FEATURES,
    NONCE_BYTES,
    PEER_VERSION,
    TAG_BYTES,
    Answer,
    Ask,
    Bye,
    Challenge,
    Credential,
    Frames,
    Greeting,
    Hello,
    PeerMessage,
    PeerRefused,
    Ping,
    Pong,
    Proof,
    Refusal,
    Say,
    Welcome,
    check_agreement,
    check_greeting,
    parse_untrusted,
    to_map,
)

LIMIT = 1 << 16
KEYS = {"sending": b"a" * 32, "receiving": b"b" * 32}
GREETING = Greeting(version=PEER_VERSION, auth="psk", host="n1", to="n2", nonce=b"n" * NONCE_BYTES)
HELLO = Hello(
    host="n1",
    incarnation="boot/1",
    release="0.1.0",
    features=FEATURES,
    cluster="",
    heartbeat_s=1.0,
    groups={"both": "0123"},
    known={"far": "4567", "own": "=89"},
)
MESSAGES: list[PeerMessage] = [
    GREETING,
    Challenge(nonce=b"n" * NONCE_BYTES, proof=b"p" * TAG_BYTES),
    Proof(proof=b"p" * TAG_BYTES),
    Credential(text="MUNGE:AwQDAAC"),
    HELLO,
    Welcome(hello=replace(HELLO, host="n2", cluster="lab")),
    Refusal(code="config", text="no"),
    Ping(seq=1),
    Pong(seq=1, at_unix=12.5),
    Ask(id=7, what="status"),
    Answer(id=7, body={"host": "n2"}),
    Answer(id=7, error="no"),
    Say(kind="live_sessions", fields=("s-1",)),
    Bye(),
]


def pair() -> tuple[Frames, Frames]:
    """Returns the two sides of a keyed connection."""
    one, other = Frames(max_bytes=LIMIT), Frames(max_bytes=LIMIT)
    one.use_keys(**KEYS)
    other.use_keys(sending=KEYS["receiving"], receiving=KEYS["sending"])
    return one, other


def take(frames: Frames, frame: bytes) -> PeerMessage:
    """Takes one whole frame in, as a link does."""
    assert frames.length_untrusted(frame[:4]) == len(frame) - 4
    return frames.decode_untrusted(frame[4:])


def code_of(frames: Frames, frame: bytes) -> str:
    with pytest.raises(PeerRefused) as caught:
        take(frames, frame)
    return caught.value.code


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("keyed", [False, True])
def test_a_message_arrives_as_it_was_sent(message: PeerMessage, keyed: bool) -> None:
    one, other = pair() if keyed else (Frames(max_bytes=LIMIT), Frames(max_bytes=LIMIT))
    for _ in range(2):
        assert take(other, one.encode(message)) == message


@given(st.integers(min_value=0), st.integers(min_value=0, max_value=7))
def test_a_frame_that_was_changed_anywhere_is_refused(place: int, bit: int) -> None:
    one, other = pair()
    frame = bytearray(one.encode(HELLO))
    place = 4 + place % (len(frame) - 4)
    frame[place] ^= 1 << bit
    assert code_of(other, bytes(frame)) == "bad_tag"


def test_a_frame_that_is_repeated_moved_left_out_or_sent_back_is_refused() -> None:
    frames = [Ping(seq=1), Ping(seq=2), Ping(seq=3)]

    one, other = pair()
    first = one.encode(frames[0])
    take(other, first)
    assert code_of(other, first) == "bad_tag", "repeated"

    one, other = pair()
    one.encode(frames[0])
    second = one.encode(frames[1])
    assert code_of(other, second) == "bad_tag", "the one before it is missing"

    one, other = pair()
    assert code_of(one, one.encode(frames[0])) == "bad_tag", "sent back to whom it came from"

    one, _ = pair()
    _, other_connection = pair()
    other_connection.use_keys(sending=b"c" * 32, receiving=b"d" * 32)
    assert code_of(other_connection, one.encode(frames[0])) == "bad_tag", "of another connection"


def test_frames_without_a_tag_are_refused_once_there_are_keys() -> None:
    _, other = pair()
    assert code_of(other, Frames(max_bytes=LIMIT).encode(HELLO)) == "bad_tag"
    with pytest.raises(PeerRefused, match="limit"):
        other.length_untrusted((TAG_BYTES).to_bytes(4, "big"))


def test_frames_beyond_the_limit_are_neither_sent_nor_taken() -> None:
    frames = Frames(max_bytes=LIMIT)
    with pytest.raises(PeerRefused) as caught:
        frames.encode(Answer(id=1, body={"x": "y" * LIMIT}))
    assert caught.value.code == "too_large"
    for length in (0, LIMIT + 1, (1 << 32) - 1):
        with pytest.raises(PeerRefused) as caught:
            frames.length_untrusted(length.to_bytes(4, "big"))
        assert caught.value.code == "bad_frame"


def test_what_is_too_large_takes_no_number_away() -> None:
    one, other = pair()
    with pytest.raises(PeerRefused):
        one.encode(Answer(id=1, body={"x": "y" * LIMIT}))
    assert take(other, one.encode(Bye())) == Bye()


@pytest.mark.parametrize("header", [b"\x16\x03\x01\x02", b"\x15\x03\x03\x00"])
def test_a_side_that_speaks_tls_is_named_as_such(header: bytes) -> None:
    with pytest.raises(PeerRefused, match="speaks TLS"):
        Frames(max_bytes=LIMIT).length_untrusted(header)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_comes_of_it(data: bytes) -> None:
    for frames in (Frames(max_bytes=LIMIT), pair()[0]):
        with pytest.raises(PeerRefused):
            frames.decode_untrusted(b"\xc1" + data)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_field_of_any_other_kind_is_refused_or_fits(
    message: PeerMessage, data: st.DataObject
) -> None:
    sent = to_map(message)
    field = data.draw(st.sampled_from(sorted(sent)))
    sent[field] = data.draw(_VALUES)
    try:
        parsed = parse_untrusted(msgpack.unpackb(msgpack.packb(sent)))
    except ProtocolError:
        return
    # As bytes, for a number that is none is not equal to itself.
    again = msgpack.packb(to_map(parsed))
    assert msgpack.packb(to_map(parse_untrusted(msgpack.unpackb(again)))) == again


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_unknown_fields_are_ignored_and_missing_ones_are_not(message: PeerMessage) -> None:
    sent = msgpack.unpackb(msgpack.packb(to_map(message)))
    assert parse_untrusted({**sent, "later": [1]}) == message
    for field in sent.keys() - {"error", "body", "cluster", "known"}:
        with pytest.raises(ProtocolError):
            parse_untrusted({name: value for name, value in sent.items() if name != field})


def refused(greeting: Greeting) -> str:
    with pytest.raises(PeerRefused) as caught:
        check_greeting(greeting, host="n2", auth="psk", allowed=frozenset({"n1", "n3"}))
    return f"{caught.value.code}: {caught.value}"


def test_who_greets_is_refused_with_what_is_wrong() -> None:
    check_greeting(GREETING, host="n2", auth="psk", allowed=frozenset({"n1"}))
    newer = replace(GREETING, version=(PEER_VERSION[0] + 1, 0))
    older = replace(GREETING, version=(PEER_VERSION[0] - 1, 9))
    assert refused(newer).endswith("update n2")
    assert refused(older).endswith("update n1")
    assert refused(replace(GREETING, to="n9")).startswith("wrong_host: this is n2 and not n9")
    assert refused(replace(GREETING, host="n9")).startswith("not_allowed: n9")
    assert refused(replace(GREETING, host="n2")).startswith("not_allowed: n2")
    assert refused(replace(GREETING, host="n3")).startswith("wrong_host: of two hosts")
    assert refused(replace(GREETING, auth="none")) == (
        'config: peers.auth is "none" on n1 and "psk" on n2'
    )


def test_a_later_minor_version_is_let_in() -> None:
    later = replace(GREETING, version=(PEER_VERSION[0], PEER_VERSION[1] + 3))
    check_greeting(later, host="n2", auth="psk", allowed=frozenset({"n1"}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cluster": "lab"}, 'daemon.cluster is "" on n1 and "lab" on n2'),
        ({"heartbeat_s": 3.0}, "peers.heartbeat_s on n2, 3 s, must be less than peers.suspect_s"),
        ({"groups": {}}, "group both spans n1 and n2 on n1, and does not on n2"),
        ({"groups": {"both": "0123", "c": "1"}}, "group c spans n1 and n2 on n2, and does not"),
        ({"groups": {"both": "4567"}}, "group both is not the same on n1 and n2"),
        ({"known": {"far": "0000"}}, "group far is not the same on n1 and n2"),
        ({"known": {"far": "=0000"}}, "group far is not the same on n1 and n2"),
        ({"known": {"own": "0000"}}, "group own is not the same on n1 and n2"),
    ],
)
def test_hosts_that_do_not_agree_are_told_what_differs(
    change: dict[str, object], text: str
) -> None:
    theirs = replace(HELLO, host="n2")
    check_agreement(HELLO, theirs, suspect_s=3.0)
    with pytest.raises(PeerRefused) as caught:
        check_agreement(HELLO, replace(theirs, **change), suspect_s=3.0)  # type: ignore[arg-type]  # any field
    assert caught.value.code == "config"
    assert str(caught.value).startswith(text)


def test_a_host_that_cannot_speak_of_jobs_shares_no_group() -> None:
    theirs = replace(HELLO, host="n2", features=("status",))
    with pytest.raises(PeerRefused, match="cannot share groups with others; update it") as caught:
        check_agreement(HELLO, theirs, suspect_s=3.0)
    assert caught.value.code == "version"
    check_agreement(replace(HELLO, groups={}), replace(theirs, groups={}), suspect_s=3.0)


@pytest.mark.parametrize(
    "known", [{}, {"far": "=4567"}, {"own": "=other"}, {"own": "89"}, {"another": "1"}]
)
def test_groups_that_one_host_has_for_itself_or_the_other_does_not_know_may_differ(
    known: dict[str, str],
) -> None:
    check_agreement(HELLO, replace(HELLO, host="n2", known=known), suspect_s=3.0)
