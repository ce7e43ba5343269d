"""What the cores of two hosts tell each other, as frames between them."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import layouts_of, strategy_for

from tsliced.core.events import AcquireRequested, SessionOpened
from tsliced.core.messages import LiveSessions, PeerMessage, Presence, PresentRank
from tsliced.core.model import (
    Cause,
    Counter,
    DeviceId,
    Epoch,
    Goal,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankState,
    Reason,
    RequestId,
    SessionId,
    Stamp,
    TenancyKey,
)
from tsliced.core.signals import Order, Report
from tsliced.net import peer_codec
from tsliced.net.peer_codec import MAX_ITEMS, MAX_REASON, Encoder, decode_untrusted, encode
from tsliced.net.peer_messages import Frames, PeerRefused, Say

N1, N2 = HostName("n1"), HostName("n2")
KINDS = typing.get_args(PeerMessage)
LAYOUT = Path(__file__).with_name("peer_layout.txt")

JOB = JobKey("lab", 1000, "train")
TENANCY = TenancyKey(JOB, (GroupName("both"),))
STAMP = Stamp(0, Counter(7, 12), 2)
PROCESS = ProcessId(4711, 123456)
ORDER = Order(host=N2, tenancy=TENANCY, stamp=STAMP, goal=Goal.FROZEN)
REPORT = Report(
    host=N2,
    tenancy=TENANCY,
    stamp=STAMP,
    failure=Reason(cause=Cause.STUCK, text="it hangs"),
    states=((PROCESS, RankState.FROZEN),),
)
ACQUIRE = AcquireRequested(session=SessionId("s-1"), request=RequestId(3))
PRESENCE = Presence(
    group=GroupName("both"),
    ranks=(
        PresentRank(
            process=PROCESS,
            job=JOB,
            state=RankState.RUNNING,
            device_bytes=1 << 40,
            groups=(GroupName("both"),),
            lead=N2,
            term=1,
            home=(GroupName("both"),),
        ),
    ),
    clients=(JOB,),
    shortages=((JOB, "no host memory"),),
)

_printable = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=20)
_name = _printable.filter(bool)
#: What honest daemons say.
WITHIN: Mapping[object, st.SearchStrategy[Any]] = {
    **dict.fromkeys((HostName, GroupName, SessionId, LeaseId, DeviceId), _name),
    str: _printable,
    bytes: st.just(b""),
    bool: st.booleans(),
    float: st.floats(0, 1e9),
    int: st.integers(0, 2**63 - 1),
    JobKey: st.builds(JobKey, _printable, st.integers(-1, 2**32 - 2), _name),
    ProcessId: st.builds(ProcessId, st.integers(1, 2**22), st.integers(0, 2**63 - 1)),
    Epoch: st.builds(Counter, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
}


def said(body: bytes) -> Say:
    message = Frames(max_bytes=1 << 20).decode_untrusted(body)
    assert isinstance(message, Say)
    return message


def through(message: PeerMessage) -> PeerMessage:
    return decode_untrusted(said(encode(message)), speaker=N1, listener=N2)


def as_heard(message: PeerMessage) -> PeerMessage:
    """Returns what N2 hears when N1 says it."""
    if isinstance(message, Report):
        return replace(message, host=N1)
    return replace(message, host=N2) if isinstance(message, Order) else message


def refusal_of(kind: str, plain: Sequence[Any]) -> str:
    with pytest.raises(PeerRefused) as caught:
        decode_untrusted(Say(kind=kind, fields=tuple(plain)), speaker=N1, listener=N2)
    assert caught.value.code == "bad_message"
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, database=None)
@given(data=st.data())
def test_what_is_said_is_heard(kind: type[PeerMessage], data: st.DataObject) -> None:
    message = data.draw(strategy_for(kind, WITHIN))
    heard = through(message)
    assert heard == as_heard(message)
    assert repr(heard) == repr(as_heard(message)), "and has the types of the core"


def test_a_report_is_of_whoever_says_it_and_an_order_for_whoever_hears_it_g10() -> None:
    liar = replace(REPORT, host=HostName("n9"))
    assert through(liar) == replace(REPORT, host=N1)
    assert b"n9" not in encode(liar)
    assert through(replace(ORDER, host=HostName("n9"))) == ORDER


def test_the_secret_of_a_session_never_travels_g10() -> None:
    opened = SessionOpened(
        session=SessionId("s-1"), job=JOB, process=PROCESS, secret=b"hidden", groups=()
    )
    assert b"hidden" not in encode(opened)
    assert through(opened) == replace(opened, secret=b"")


def test_an_order_for_many_hosts_is_encoded_once() -> None:
    encoder = Encoder()
    orders = [replace(ORDER, host=HostName(f"n{number}")) for number in range(3)]
    bodies = [encoder.encode(order) for order in orders]
    assert bodies[0] is bodies[1] is bodies[2]
    assert bodies[0] == encode(ORDER)
    changes: list[dict[str, Any]] = [
        {"goal": Goal.OFF},
        {"stamp": STAMP._replace(step=3)},
        {"tenancy": TENANCY._replace(groups=(GroupName("other"),))},
    ]
    for change in changes:
        other = replace(ORDER, **change)
        assert encoder.encode(other) == encode(other) != bodies[0]
        assert encoder.encode(ACQUIRE) == encode(ACQUIRE)
        assert encoder.encode(ORDER) == bodies[0]


def test_fields_of_a_later_version_are_not_looked_at_and_missing_ones_are_their_defaults() -> None:
    plain = said(encode(ACQUIRE)).fields
    assert len(plain) == len(fields(AcquireRequested))
    for few in (plain[:2], plain[:4], [*plain, "new", {"more": 1}]):
        heard = decode_untrusted(
            Say(kind="acquire_requested", fields=tuple(few)), speaker=N1, listener=N2
        )
        assert heard == ACQUIRE
    assert "at least 2" in refusal_of("acquire_requested", plain[:1])


def test_a_text_for_people_is_made_fit_to_be_shown_and_cut_off() -> None:
    undecodable = b"caf\xe9\n".decode("utf-8", "surrogateescape")
    odd = replace(REPORT, failure=Reason(cause=Cause.DRIVER, text=undecodable))
    heard = through(odd)
    assert isinstance(heard, Report)
    assert heard.failure == Reason(cause=Cause.DRIVER, text="caf??")
    long = replace(REPORT, failure=Reason(cause=Cause.DRIVER, text="x" * 10_000))
    heard = through(long)
    assert isinstance(heard, Report)
    assert heard.failure == Reason(cause=Cause.DRIVER, text="x" * MAX_REASON)


def _with(message: PeerMessage, path: tuple[int, ...], value: object) -> tuple[str, list[Any]]:
    """Returns a message as it is said, with one value in it replaced."""
    whole = said(encode(message))
    # Lists that can be changed, whatever the message was made of.
    plain: Any = msgpack.unpackb(msgpack.packb(whole.fields))
    at = plain
    for index in path[:-1]:
        at = at[index]
    at[path[-1]] = value
    return whole.kind, plain


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (ORDER, (0,), 7),
        (ORDER, (0, 0, 0), "a\nb"),
        (ORDER, (0, 0, 1), -2),
        (ORDER, (0, 0, 1), True),
        (ORDER, (0, 0, 1), 1 << 32),
        (ORDER, (0, 0, 2), ""),
        (ORDER, (0, 0, 2), "x" * 1025),
        (ORDER, (0, 0), ["lab", 1000]),
        (ORDER, (0, 1), "both"),
        (ORDER, (0, 1), [""]),
        (ORDER, (0, 1), ["\x1b[2J"]),
        (ORDER, (0, 1), {}),
        (ORDER, (0, 1), ["g"] * (MAX_ITEMS + 1)),
        (ORDER, (1, 0), -1),
        (ORDER, (1, 1, 0), 1 << 32),
        (ORDER, (1, 1, 1), -1),
        (ORDER, (1, 2), 1.5),
        (ORDER, (2,), "sideways"),
        (ORDER, (2,), []),
        (REPORT, (2,), []),
        (REPORT, (2, 1), None),
        (REPORT, (3,), None),
        (REPORT, (3, 0), [[4711, 1]]),
        (REPORT, (3, 0, 0, 0), 0),
        (REPORT, (3, 0, 0, 0), (1 << 22) + 1),
        (ACQUIRE, (5,), "yes"),
        (ACQUIRE, (6,), float("nan")),
        (ACQUIRE, (6,), float("inf")),
        (ACQUIRE, (6,), 1e300),
        (ACQUIRE, (6,), True),
        (PRESENCE, (1, 0, 3), -1),
        (PRESENCE, (2, 0), [["lab", 1000, "train"], "why", "more"]),
    ],
)
def test_what_nobody_may_say_is_refused(
    message: PeerMessage, path: tuple[int, ...], value: object
) -> None:
    kind, plain = _with(message, path, value)
    assert len(refusal_of(kind, plain)) < 300


@pytest.mark.parametrize("path", [(0,), (0, 0, 0), (0, 0, 1), (0, 1), (1, 0), (1, 1), (2,)])
@pytest.mark.parametrize("depth", [20, 200, 900, 100_000])
def test_what_nests_without_end_is_refused_wherever_it_stands_g9(
    path: tuple[int, ...], depth: int
) -> None:
    mark = "0123456789abcdef"
    kind, plain = _with(ORDER, path, mark)
    whole: bytes = msgpack.packb({"t": "say", "k": kind, "f": plain})
    body = whole.replace(msgpack.packb(mark), b"\x91" * depth + b"\xc0")
    with pytest.raises(PeerRefused) as caught:
        decode_untrusted(said(body), speaker=N1, listener=N2)
    assert len(str(caught.value)) < 300


def test_values_that_come_again_are_known_again_and_the_same() -> None:
    first, again = through(REPORT), through(REPORT)
    assert isinstance(first, Report)
    assert isinstance(again, Report)
    assert first.tenancy is again.tenancy
    assert first.states[0] is again.states[0]
    # Of another implementation, which packs its map in another order.
    fields = msgpack.unpackb(encode(REPORT))["f"]
    frame = msgpack.packb({"k": "report", "f": fields, "t": "say"})
    assert repr(decode_untrusted(said(frame), speaker=N1, listener=N2)) == repr(first)


def test_no_more_values_are_kept_than_there_is_room_for_g9(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_codec, "MAX_KNOWN", 8)
    for pid in range(1, 100):
        process = PROCESS._replace(pid=pid)
        report = replace(REPORT, states=((process, RankState.PARKED),))
        assert through(report) == as_heard(report)
    codec = peer_codec._PeerCodecs().of(ProcessId)
    known = next(
        cell.cell_contents
        for cell in codec.unpack.__closure__ or ()
        if isinstance(cell.cell_contents, dict)
    )
    sizes = []
    for pid in range(1, 100):
        codec.unpack((pid, 1))
        sizes.append(len(known))
    assert max(sizes) == 8


def test_a_kind_that_nobody_knows_is_refused() -> None:
    assert "treason" in refusal_of("treason", [])


@settings(max_examples=300, deadline=None, database=None)
@given(
    message=st.sampled_from([ORDER, REPORT, ACQUIRE, PRESENCE]),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_whatever_comes_is_heard_or_refused_and_nothing_else_g9(
    message: PeerMessage, changes: list[tuple[int, int]]
) -> None:
    body = bytearray(encode(message))
    for place, byte in changes:
        body[place % len(body)] = byte
    try:
        heard = Frames(max_bytes=1 << 20).decode_untrusted(bytes(body))
        assert isinstance(heard, Say)
        message = decode_untrusted(heard, speaker=N1, listener=N2)
    except PeerRefused:
        return
    # What is let in can be said again.
    assert through(message) == as_heard(message)


def test_what_is_known_of_all_ranks_of_a_large_host_fits_into_a_frame() -> None:
    ranks = PRESENCE.ranks * 4096
    assert len(encode(replace(PRESENCE, ranks=ranks))) < 1 << 20
    sessions = tuple(SessionId(f"{number:016x}") for number in range(16_384))
    assert len(encode(LiveSessions(sessions=sessions))) < 1 << 20


def test_no_layout_changes_without_being_seen() -> None:
    # If this fails: once a release has spoken it, a field may be added at the end of a class, with
    # a default, and a class with a name that was not there. Anything else is another major version.
    assert "\n".join(layouts_of(KINDS)) + "\n" == LAYOUT.read_text()
