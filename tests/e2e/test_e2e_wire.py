"""What clients may send: each mistake has a coded answer, and costs nobody else anything."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, Host, Rank, RankError, own, path_with, until
from raw_client import HELLO, RawClient

from libtimeslice.protocol import encode

NOBODY = 65534
PENDING = 8
CONNECTIONS = 5


@pytest.fixture(scope="module")
def host(softcuda_build: Path) -> Iterator[Host]:
    """A host for all tests here: whatever one of them does, the next one finds it in order."""
    host = Host(
        softcuda_build,
        settings={
            "limits": {
                "max_clients_per_uid": CONNECTIONS,
                "max_pending_requests": PENDING,
                "handshake_timeout_s": 0.5,
                "max_frame_bytes": 4096,
                "max_send_buffer_bytes": 1 << 16,
            },
            "history": {"max_job_events_per_s": 1000.0},
        },
    )
    host.start_daemon()
    yield host
    host.close()


@pytest.fixture(scope="module")
def bystanders(host: Host) -> tuple[Rank, Rank]:
    """Two jobs that have nothing to do with it: one holds a group, and one waits for it."""
    holder, waiter = host.rank("holder"), host.rank("waiter")
    holder.do("acquire", groups="g1")
    waiter.start("acquire", groups="g1")
    until(lambda: host.group()["waiters"] == 1, "it waits")
    return holder, waiter


@pytest.fixture(autouse=True)
def _nobody_else_loses_anything(host: Host, bystanders: tuple[Rank, Rank]) -> Iterator[None]:
    before = host.status()
    yield
    after = host.status()
    assert after["pid"] == before["pid"], "the daemon is the same"
    held = bystanders[0].do("look")
    assert held["state"] == "held"
    group = after["groups"][0]
    assert group["holder"]["id"] == "holder"
    assert group["token"] == held["tokens"]["g1"]
    assert [entry["job"]["id"] for entry in group["queue"]] == ["waiter"]


@pytest.fixture
def client(host: Host) -> Iterator[RawClient]:
    """A connection on which nothing was said yet."""
    with RawClient(host.socket) as client:
        yield client


@pytest.fixture
def known(client: RawClient) -> RawClient:
    """A connection that said hello."""
    assert client.hello()["t"] == "welcome"
    return client


def deep(levels: int) -> dict[str, Any]:
    message: dict[str, Any] = {"t": "ping", "id": 1}
    for _ in range(levels):
        message = {"t": "ping", "id": 1, "more": message}
    return message


BAD_BYTES = {
    "no msgpack": (b"\0\0\0\2\xc1\xc1", "bad_frame"),
    "too long": ((1 << 21).to_bytes(4, "big"), "bad_frame"),
    "longer than this daemon takes": ((4097).to_bytes(4, "big"), "bad_frame"),
    "not a map": (b"\0\0\0\1\x90", "bad_frame"),
    "keys that are no strings": (b"\0\0\0\3\x81\x01\x02", "bad_frame"),
    "an empty frame": (b"\0\0\0\0", "bad_frame"),
    "text of another protocol": (b"GET / HTTP/1.1\r\n\r\n", "bad_frame"),
    "nested too deep": (encode(deep(20)), "bad_frame"),
    "a request before the hello": (encode({"t": "status", "id": 1}), "bad_request"),
    "an unknown message before it": (encode({"t": "nonsense", "id": 1}), "unknown_request"),
    "another version": (encode({**HELLO, "version": [2, 0]}), "unsupported_version"),
    "no version": (encode({**HELLO, "version": "1.0"}), "bad_request"),
    "a job that is no name": (encode({**HELLO, "job": "../etc"}), "bad_request"),
    "a role that is none": (encode({**HELLO, "role": "king"}), "bad_request"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_a_connection_that_begins_badly_is_told_why_and_closed(
    client: RawClient, name: str
) -> None:
    data, code = BAD_BYTES[name]
    client.send_bytes(data)
    answer = client.receive()
    assert (answer["t"], answer["code"]) == ("error", code)
    assert answer["message"]
    assert client.is_hung_up()


@pytest.mark.parametrize("name", [n for n, (_, code) in BAD_BYTES.items() if code == "bad_frame"])
def test_a_bad_frame_ends_a_session_s_connection_too(known: RawClient, name: str) -> None:
    known.send_bytes(BAD_BYTES[name][0])
    answer = known.receive()
    assert (answer["t"], answer["code"]) == ("error", "bad_frame")
    assert known.is_hung_up()


def test_a_frame_that_is_cut_short_ends_with_its_connection(host: Host, client: RawClient) -> None:
    client.send_bytes(encode(HELLO)[:10])
    client.socket.close()
    assert host.status()["groups"][0]["state"] == "held"


def test_a_frame_may_come_byte_by_byte(client: RawClient) -> None:
    for byte in encode(HELLO):
        client.send_bytes(bytes([byte]))
    assert client.receive()["t"] == "welcome"


def test_who_does_not_say_hello_in_time_is_let_go_g9(client: RawClient) -> None:
    client.send_bytes(encode(HELLO)[:10])
    answer = client.receive()
    assert answer["code"] == "bad_request"
    assert "0.5 s" in answer["message"]
    assert client.is_hung_up()


def test_a_second_hello_is_refused(known: RawClient) -> None:
    assert known.hello()["code"] == "bad_request"
    assert known.is_hung_up()


BAD_REQUESTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "an unknown request": ("make_coffee", {}, "unknown_request", "make_coffee"),
    "an unknown group": ("acquire", {"groups": ["g9"]}, "unknown_group", "known: g1, g2"),
    "a group twice": ("acquire", {"groups": ["g1", "g1"]}, "bad_request", "twice"),
    "groups that are no list": ("acquire", {"groups": "g1"}, "bad_request", "groups"),
    "no group at all": ("acquire", {"groups": []}, "bad_request", "groups"),
    "ranks that are no number": ("acquire", {"ranks": "two"}, "bad_request", "ranks"),
    "a negative time-out": ("acquire", {"timeout_s": -1}, "bad_request", "timeout_s"),
    "a time-out that is no number": (
        "acquire",
        {"timeout_s": float("nan")},
        "bad_request",
        "timeout_s",
    ),
    "a phase with a line break": ("acquire", {"phase": "a\nb"}, "bad_request", "phase"),
    "a lease that never was": ("release", {"lease": "x.1"}, "unknown_lease", "x.1"),
    "no lease": ("release", {}, "bad_request", "lease"),
    "a process that is none": ("attach", {"pid": 1 << 22}, "no_such_process", str(1 << 22)),
    "a process without CUDA": ("attach", {"pid": os.getpid()}, "not_cuda", str(os.getpid())),
    "an unknown group for it": (
        "attach",
        {"pid": os.getpid(), "groups": ["g9"]},
        "unknown_group",
        "g1, g2",
    ),
    "events without a number": ("events", {"limit": "all"}, "bad_request", "limit"),
    "a wait that is over at once": ("acquire", {"groups": ["g1"], "timeout_s": 0}, "timeout", "s"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_cannot_be_met_is_answered_and_the_connection_stays(
    known: RawClient, name: str
) -> None:
    request, fields, code, told = BAD_REQUESTS[name]
    found, message = known.refusal(request, **fields)
    assert found == code
    assert told in message
    assert known.ask("ping") == {"re": 2}


def test_a_thread_cannot_be_attached_as_if_it_were_a_process(known: RawClient) -> None:
    ready, end = threading.Event(), threading.Event()

    def stay() -> None:
        ready.set()
        end.wait(20)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert ready.wait(20)
        code, message = known.refusal("attach", pid=thread.native_id)
        assert code == "no_such_process"
        assert str(os.getpid()) in message, "it names the process to attach instead"
    finally:
        end.set()
        thread.join()


def test_a_notice_that_nobody_knows_is_passed_over(known: RawClient) -> None:
    known.send({"t": "gossip", "about": "others"})
    known.send({"re": 99})
    known.send({"t": "ack", "lease": "x.1"})
    assert known.ask("ping") == {"re": 1}


def test_more_open_requests_than_allowed_are_refused_and_the_others_stay_g9(
    host: Host, known: RawClient
) -> None:
    open_ones = [known.start("acquire", groups=["g1"]) for _ in range(PENDING)]
    code, message = known.refusal("acquire", groups=["g1"])
    assert code == "would_exceed_limit"
    assert str(PENDING) in message
    assert host.group()["waiters"] == 1 + PENDING
    # One that is answered makes room.
    cancelled = {known.start("cancel", acquire=open_ones[0])}
    assert known.receive()["err"]["code"] == "would_exceed_limit", "a cancel needs room as well"
    assert cancelled
    known.send({"t": "bye"})
    until(lambda: host.group()["waiters"] == 1, "its session took its requests along")


def test_figures_of_a_job_may_have_any_name(host: Host, known: RawClient) -> None:
    fields = {"kind": 1, "level": "high", "job": "mine", "self": True, "at": 2.5, "seq": -1}
    known.send({"t": "progress", "fields": fields})
    assert known.ask("ping") == {"re": 1}
    event = host.events("progress")[-1]
    assert (event["kind"], event["level"], event["job"]) == ("progress", "info", own("raw"))
    assert event["self"] is True
    assert event["seq"] > 0


def test_a_history_longer_than_a_frame_is_told_in_parts(known: RawClient) -> None:
    for step in range(500):
        fields = {f"text{number}": "x" * 250 for number in range(12)} | {"step": step}
        known.send({"t": "progress", "fields": fields})
    found: list[int] = []
    since: int | None = 0
    while True:
        answer = known.ask("events", since=since, follow=False, limit=10_000)
        steps = [event["step"] for event in answer["events"] if "text0" in event]
        found += steps
        if answer["next"] == since or not answer["events"]:
            break
        since = answer["next"]
    assert found == list(range(500))


def test_who_follows_events_gets_them_as_they_come(host: Host, known: RawClient) -> None:
    answer = known.ask("events", since=None, follow=True, limit=1)
    with RawClient(host.socket) as other:
        other.hello()
        for step in range(600):
            other.send({"t": "progress", "fields": {"step": step}})
    steps: list[int] = []
    while len(steps) < 600:
        message = known.receive()
        assert message["t"] == "event"
        assert message["event"]["seq"] >= answer["next"]
        if message["event"]["kind"] == "progress":
            steps.append(message["event"]["step"])
    assert steps == list(range(600)), "each one once, in order"


def test_who_does_not_read_what_was_asked_for_is_dropped_g9(host: Host, known: RawClient) -> None:
    def ask_for_ever() -> None:
        while True:
            known.start("status")

    with pytest.raises(ConnectionError):
        ask_for_ever()
    assert host.group()["state"] == "held"


def test_a_lease_of_another_session_cannot_be_released(host: Host, known: RawClient) -> None:
    granted = known.ask("acquire", groups=["g2"])
    with RawClient(host.socket) as other:
        other.hello()
        assert other.refusal("release", lease=granted["lease"])[0] == "unknown_lease"
    assert host.group("g2")["holder"]["id"] == "raw"
    known.send({"t": "bye"})


# --- the same again (G6)


def test_a_request_that_is_sent_again_has_the_same_answer_g6(host: Host) -> None:
    with RawClient(host.socket) as client:
        welcome = client.hello()
        granted = client.ask("acquire", groups=["g2"])
    with RawClient(host.socket) as client:
        again = client.hello(session=welcome["session"], secret=welcome["secret"])
        assert again["resumed"] is True
        assert again["leases"] == [{key: granted[key] for key in ("lease", "groups", "tokens")}]
        client.send({"t": "acquire", "id": 1, "groups": ["g2"]})
        repeated = client.receive()
        assert {**repeated, "ack_s": None} == {**granted, "ack_s": None}
        released = {"t": "release", "id": 2, "lease": granted["lease"]}
        client.send(released)
        answer = client.receive()
        assert answer == {"re": 2, "waiters": 0, "deferred": True}
        client.send(released)
        assert client.receive() == answer
        # The lease is over, and asking for it under its old number does not bring it back.
        client.send({"t": "acquire", "id": 1, "groups": ["g2"]})
        assert client.receive()["err"]["code"] == "lease_ended"
        assert host.group("g2")["holder"] is None
        client.send({"t": "bye"})


def test_a_waiting_request_that_is_sent_again_waits_at_its_place_g8(host: Host) -> None:
    with RawClient(host.socket) as client:
        welcome = client.hello()
        client.start("acquire", groups=["g1"])
        until(lambda: host.group()["waiters"] == 2, "it waits")
    with RawClient(host.socket) as client:
        client.hello(session=welcome["session"], secret=welcome["secret"])
        client.send({"t": "acquire", "id": 1, "groups": ["g1"]})
        assert client.ask("ping") == {"re": 1}
        assert host.group()["waiters"] == 2
        client.send({"t": "bye"})
    until(lambda: host.group()["waiters"] == 1, "it is gone")


def test_without_the_right_secret_a_session_cannot_be_taken_over(host: Host) -> None:
    with RawClient(host.socket) as owner:
        welcome = owner.hello()
        granted = owner.ask("acquire", groups=["g2"])
        for fields in (
            {"session": welcome["session"], "secret": bytes(16)},
            {"session": welcome["session"]},
            {"session": "f" * 16, "secret": welcome["secret"]},
        ):
            with RawClient(host.socket) as thief:
                answer = thief.hello(**fields)
                assert answer["resumed"] is False
                assert answer["session"] != welcome["session"]
                assert answer["leases"] == []
        assert host.group("g2")["token"] == granted["tokens"]["g2"]
        assert owner.ask("ping")
        owner.send({"t": "bye"})


def test_another_process_cannot_take_a_session_over_even_with_its_secret(
    host: Host, known: RawClient
) -> None:
    with RawClient(host.socket) as owner:
        welcome = owner.hello()
        program = (
            "import sys; from raw_client import RawClient\n"
            "client = RawClient(sys.argv[1])\n"
            "print(client.hello(session=sys.argv[2], secret=bytes.fromhex(sys.argv[3]))['resumed'])"
        )
        taken = subprocess.run(
            [
                *(sys.executable, "-c", program, str(host.socket)),
                *(welcome["session"], welcome["secret"].hex()),
            ],
            env=host.variables(PYTHONPATH=path_with(HERE)),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert taken.stdout == "False\n"


def test_a_session_goes_to_the_connection_that_came_last(host: Host) -> None:
    with RawClient(host.socket) as first, RawClient(host.socket) as second:
        welcome = first.hello()
        assert second.hello(session=welcome["session"], secret=welcome["secret"])["resumed"]
        assert first.is_hung_up()
        assert second.ask("ping")


# --- who may do what (G10)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def stranger(host: Host) -> Rank:
    """A process of a user who is nobody here."""
    rank = host.rank()
    rank.do("become", uid=NOBODY)
    return rank


@needs_root
def test_a_user_cannot_speak_for_another_s_job_g10(stranger: Rank) -> None:
    with pytest.raises(RankError, match=f"uid {NOBODY} may not act for uid 0") as caught:
        stranger.do("ask", name="ping", hello={"uid": 0, "job": "holder"})
    assert caught.value.code == "not_permitted"


@needs_root
def test_a_job_of_the_same_name_of_another_user_is_another_job_g10(
    host: Host, stranger: Rank
) -> None:
    answer = stranger.do("ask", name="acquire", hello={"job": "holder"}, groups=["g2"])
    assert answer["job"] == {"cluster": "", "uid": NOBODY, "id": "holder"}
    assert host.group("g2")["holder"]["uid"] == NOBODY
    stranger.kill()
    until(lambda: host.group("g2")["holder"] is None, "it is gone")


@needs_root
def test_a_process_of_another_user_cannot_be_attached_g10(
    bystanders: tuple[Rank, Rank], stranger: Rank
) -> None:
    for request in ("attach", "register"):
        with pytest.raises(RankError, match=f"not to uid {NOBODY}") as caught:
            stranger.do("ask", name=request, hello={}, pid=bystanders[0].pid)
        assert caught.value.code == "not_permitted"


@needs_root
def test_a_user_has_so_many_connections_and_no_more_g9(host: Host, stranger: Rank) -> None:
    refusal = f"uid {NOBODY} has {CONNECTIONS} connections, which is the limit max_clients_per_uid"
    assert stranger.do("crowd", count=CONNECTIONS + 1) == [*["welcome"] * CONNECTIONS, refusal]
    with RawClient(host.socket) as other:
        assert other.hello()["t"] == "welcome", "another user still comes in"
    free = "this one does again when some are closed"
    until(lambda: stranger.do("crowd", count=1) == ["welcome"], free)


@needs_root
def test_root_may_speak_for_any_user_g10(known: RawClient, host: Host) -> None:
    with RawClient(host.socket) as root:
        welcome = root.hello(uid=NOBODY, job="theirs")
        assert welcome["job"] == {"cluster": "", "uid": NOBODY, "id": "theirs"}
