"""Today's client with the daemons of earlier versions: what they sent, it understands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_daemon import FakeConnection, FakeDaemon, state_of, wait_for
from golden import frame_of, spoken, versions

from libtimeslice import (
    AcquireTimeout,
    Cancelled,
    LeaseState,
    Pause,
    ProtocolError,
    Resume,
    TimeSlice,
    TimeSliceError,
    UnknownGroup,
    connect,
)
from libtimeslice.connection import Connection
from libtimeslice.protocol import Message

SESSION = "58a31a804c87c75e"
LEASE = f"{SESSION}.1"


class OldDaemon:
    """Answers each request with a kept frame, in which only the id is put right."""

    def __init__(self, daemon: FakeDaemon, version: str) -> None:
        self.frames = spoken(version, "daemon")
        #: By request: the name of the frame that answers it.
        self.answers = {
            "hello": "welcome",
            "acquire": "grant",
            "release": "released",
            "cancel": "confirm-cancel",
            "register": "registered",
            "status": "status",
            "ps": "ranks",
            "events": "events",
            "ping": "pong",
            "attach": "not-cuda",
        }
        self.daemon = daemon
        self.by_role: dict[str, FakeConnection] = {}
        daemon.intercept = self._on_message

    def _on_message(self, connection: FakeConnection, message: Message) -> bool:
        kind = message.get("t")
        if kind == "hello":
            self.by_role[message["role"]] = connection
        if kind is None:
            self.daemon.replies.append(message)
        elif (name := self.answers.get(kind)) is not None:
            answer = self.frames[name]
            self._send(connection, {**answer, "re": message["id"]} if "re" in answer else answer)
        return True

    def say(self, name: str, role: str = "client") -> None:
        """Sends a notification or a request of the daemon's own."""
        self._send(self.by_role[role], self.frames[name])

    def _send(self, connection: FakeConnection, message: Message) -> None:
        connection.sock.sendall(frame_of(message))

    def answer_to(self, name: str) -> Message:
        """Asks the agent, and returns what it says."""
        number = self.frames[name]["id"]
        self.say(name, "agent")
        replies = self.daemon.replies
        self.daemon.wait_until(lambda: [reply for reply in replies if reply["re"] == number])
        return next(reply for reply in replies if reply["re"] == number)


@pytest.fixture(params=versions())
def old(daemon: FakeDaemon, request: pytest.FixtureRequest) -> OldDaemon:
    return OldDaemon(daemon, request.param)


@pytest.fixture
def ts(daemon: FakeDaemon, old: OldDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path, job="golden", reply_limit_s=5) as client:
        yield client


def test_a_lease_from_its_grant_to_its_release(old: OldDaemon, ts: TimeSlice) -> None:
    lease = ts.acquire("g1", timeout=600)
    assert (lease.id, lease.tokens) == (LEASE, {"g1": 123556472415059972})
    assert (lease.waited_s, lease.restored, lease.switch_s) == (0.1709245679999185, True, 0.125)
    assert lease.contended
    old.daemon.wait_until(lambda: {"t": "ack", "lease": LEASE} in old.daemon.log)
    assert (ts.job, ts._session.grace_s) == ("golden", 10.0)
    old.say("uncontended")
    wait_for(lambda: not lease.contended)
    old.say("contended")
    wait_for(lambda: lease.contended)
    assert ts._session.grants[LEASE].waiters == 2
    assert ts.release() == (1, False)


def test_a_lease_that_costs_nothing_is_not_acknowledged(old: OldDaemon, ts: TimeSlice) -> None:
    old.answers["acquire"] = "grant-at-once"
    with ts.lease() as lease:
        assert lease.groups == ("g1", "g2")
        assert (lease.restored, lease.contended) == (False, False)
        old.answers["release"] = "released-before"
    assert not ts.holding
    assert old.daemon.count("ack") == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("timeout", AcquireTimeout),
        ("unknown-group", UnknownGroup),
        ("cancelled", Cancelled),
        ("too-many", TimeSliceError),
    ],
)
def test_a_refused_acquire(
    old: OldDaemon, ts: TimeSlice, name: str, kind: type[TimeSliceError]
) -> None:
    old.answers["acquire"] = name
    with pytest.raises(kind) as raised:
        ts.acquire("g1")
    assert raised.value.code == old.frames[name]["err"]["code"]
    assert raised.value.message == old.frames[name]["err"]["message"]


@pytest.mark.parametrize("confirmation", ["confirm-cancel", "confirm-cancel-late"])
def test_an_acquire_that_is_given_up(
    old: OldDaemon, ts: TimeSlice, monkeypatch: pytest.MonkeyPatch, confirmation: str
) -> None:
    monkeypatch.setattr("libtimeslice.client.TIMEOUT_SLACK_S", 0.01)
    monkeypatch.setattr("libtimeslice.client.SETTLE_LIMIT_S", 0.01)
    del old.answers["acquire"]
    old.answers["cancel"] = confirmation
    with pytest.raises(AcquireTimeout):
        ts.acquire("g1", timeout=0.01)
    assert old.daemon.last("cancel")["acquire"] == old.daemon.last("acquire")["id"]


def test_a_lost_lease(old: OldDaemon, ts: TimeSlice) -> None:
    lease = ts.acquire("g1")
    old.say("stalled")
    old.say("rank-lost")
    old.say("lost")
    # (To ask whether it is contended is to read what came.)
    wait_for(lambda: lease.contended and state_of(lease) is LeaseState.LOST)
    assert lease.reason == "its grant was not confirmed within 10 s"


def test_a_session_goes_on_with_a_new_connection(old: OldDaemon, ts: TimeSlice) -> None:
    lease = ts.acquire("g1")
    old.answers["hello"] = "welcome-back"
    old.daemon.hang_up()
    assert ts.status()
    hello = old.daemon.last("hello")
    assert (hello["session"], hello["secret"]) == (SESSION, old.frames["welcome"]["secret"])
    assert state_of(lease) is LeaseState.HELD


def test_a_session_that_is_not_known_any_more(old: OldDaemon, ts: TimeSlice) -> None:
    lease = ts.acquire("g1")
    old.answers["hello"] = "session-unknown"
    old.daemon.hang_up()
    wait_for(lambda: state_of(lease) is LeaseState.LOST)
    old.answers["hello"] = "welcome"
    assert ts.status()


@pytest.mark.parametrize("name", ["refusal", "unsupported-version"])
def test_a_hello_that_is_refused(old: OldDaemon, ts: TimeSlice, name: str) -> None:
    old.answers["hello"] = name
    with pytest.raises(TimeSliceError) as raised:
        ts.status()
    assert raised.value.code == old.frames[name]["code"]


def test_what_a_rank_is_asked(old: OldDaemon, ts: TimeSlice) -> None:
    asked: list[Pause | Resume] = []
    ts.on_pause(asked.append)
    ts.on_resume(asked.append)
    assert ts.register() == ("g1", "g2")
    old.daemon.wait_until(lambda: "agent" in old.by_role)
    assert old.answer_to("quiesce") == {"re": 1}
    assert old.answer_to("resume") == {"re": 2}
    assert old.answer_to("empty-cache") == {"re": 3, "bytes": 0}
    pause = Pause(groups=("g1",), timeout_s=10.0, move=old.frames["quiesce"].get("move"))
    assert asked == [pause, Resume(groups=("g1",))]


def test_what_a_tool_is_told(old: OldDaemon, daemon: FakeDaemon) -> None:
    with Connection.open(str(daemon.path)) as tool:
        for name, frame in (("ps", "ranks"), ("events", "events"), ("ping", "pong")):
            answer = tool.request({"t": name}, 5)
            assert {**answer, "re": 0} == {**old.frames[frame], "re": 0}
        with pytest.raises(TimeSliceError) as raised:
            tool.request({"t": "attach", "pid": 4242}, 5)
        assert raised.value.code == "not_cuda"
        old.say("event", "tool")
        assert tool.take_notice(5) == old.frames["event"]


@pytest.mark.parametrize(
    ("version", "advice"),
    [([2, 0], "update libtimeslice"), ([0, 9], "update tsliced"), (None, "without a version")],
)
def test_a_welcome_of_another_major_version_is_refused_with_what_to_do(
    old: OldDaemon, daemon: FakeDaemon, version: object, advice: str
) -> None:
    old.frames["welcome"]["version"] = version
    with connect(daemon.path) as ts, pytest.raises(ProtocolError, match=advice):
        ts.status()
