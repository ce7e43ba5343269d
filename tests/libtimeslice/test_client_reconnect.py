"""Lost connections, lost answers, restarted and forgetful daemons."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from fake_daemon import Background, FakeConnection, FakeDaemon, state_of, wait_for

from libtimeslice import (
    AcquireTimeout,
    DaemonUnreachable,
    LeaseLost,
    LeaseState,
    Lost,
    NotPermitted,
    ProtocolError,
    TimeSlice,
    connect,
)
from libtimeslice.protocol import Message, encode, error_message


@pytest.fixture
def ts(daemon: FakeDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path, job="job-a", connect_timeout_s=5) as client:
        yield client


def test_an_acquire_whose_answer_was_lost_is_repeated_and_granted_once(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """G6."""
    daemon.lose_answer_to.add("acquire")
    with ts.lease("n1") as lease:
        assert list(daemon.held) == [lease.id]
        asked = [message for message in daemon.log if message["t"] == "acquire"]
        assert len(asked) == 2
        assert asked[0] == asked[1]
    assert daemon.held == {}


def test_a_release_whose_answer_was_lost_is_repeated_without_the_caller(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """G6."""
    lease = ts.acquire("n1")
    daemon.lose_answer_to.add("release")
    assert lease.release() is None
    daemon.wait_until(lambda: daemon.count("release") == 2)
    assert ts.status()
    assert daemon.held == {}


def test_a_holder_that_computes_gets_its_session_back_without_calling_anything(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """G8."""
    with ts.lease("n1") as lease:
        daemon.stop()
        daemon.start()
        daemon.wait_until(lambda: daemon.count("hello") == 2)
        assert daemon.last("hello")["session"] is not None
        wait_for_state(ts, lease.id, LeaseState.HELD)
        assert list(daemon.held) == [lease.id]
    assert daemon.held == {}


def test_the_keeper_leaves_a_good_connection_alone(daemon: FakeDaemon, ts: TimeSlice) -> None:
    ts.status()
    sock = ts._line.keep_connected(None)
    assert sock is not None
    assert ts._line.keep_connected(None) is sock
    assert ts.status()
    assert daemon.count("hello") == 1


def test_a_lease_is_uncertain_while_the_daemon_is_gone(daemon: FakeDaemon, ts: TimeSlice) -> None:
    with ts.lease("n1") as lease:
        daemon.stop()
        wait_for_state(ts, lease.id, LeaseState.UNCERTAIN)
        assert state_of(lease) is LeaseState.UNCERTAIN
        lease.check()
        with ts.lease("n1") as inner:
            assert state_of(inner) is LeaseState.UNCERTAIN
        daemon.start()
        wait_for_state(ts, lease.id, LeaseState.HELD)


def test_a_waiter_keeps_its_place_over_a_restart(daemon: FakeDaemon, ts: TimeSlice) -> None:
    """G8."""
    other = daemon.steal(("n1",))
    waiting = Background(lambda: ts.acquire("n1"))
    daemon.wait_until(lambda: daemon.waiting)
    daemon.stop()
    daemon.start()
    daemon.wait_until(lambda: daemon.count("acquire") == 2)
    assert len(daemon.waiting) == 1
    daemon.give_back(other)
    assert state_of(waiting.result()) is LeaseState.HELD


def test_all_waiting_threads_repeat_their_own_requests(daemon: FakeDaemon, ts: TimeSlice) -> None:
    others = [daemon.steal((group,)) for group in ("n1", "n2")]
    threads = [Background(lambda: ts.acquire("n1")), Background(lambda: ts.acquire("n2"))]
    daemon.wait_until(lambda: len(daemon.waiting) == 2)
    daemon.hang_up()
    daemon.wait_until(lambda: daemon.count("acquire") == 4)
    for other in others:
        daemon.give_back(other)
    assert [thread.result().groups for thread in threads] == [("n1",), ("n2",)]
    assert daemon.count("hello") == 2


def test_a_release_does_not_wait_for_a_daemon_that_is_gone(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    lease = ts.acquire("n1")
    daemon.stop()
    wait_for_state(ts, lease.id, LeaseState.UNCERTAIN)
    started = time.monotonic()
    assert lease.release() is None
    assert time.monotonic() - started < 1.0
    daemon.start()
    daemon.wait_until(lambda: daemon.count("release") == 1)
    daemon.wait_until(lambda: not daemon.held)


def test_a_daemon_that_forgot_the_session_makes_its_leases_lost(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    told: list[Lost] = []
    heard = threading.Event()

    @ts.on_lost
    def lost(notice: Lost) -> None:
        told.append(notice)
        heard.set()

    with ts.lease("n1") as lease:
        daemon.stop(forget=True)
        daemon.start()
        assert heard.wait(10)
        assert state_of(lease) is LeaseState.LOST
        assert told == [
            Lost(lease=lease.id, reason="the daemon does not know the session any more")
        ]
        with pytest.raises(LeaseLost) as raised:
            lease.check()
        assert raised.value.facts["groups"] == ("n1",)
        with ts.lease("n1") as again:
            assert again.id != lease.id
            assert state_of(again) is LeaseState.HELD
    assert daemon.held == {}
    assert daemon.count("release") == 1


def test_a_waiter_of_a_forgotten_session_asks_again_in_a_new_one(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    daemon.steal(("n1",))
    waiting = Background(lambda: ts.acquire("n1"))
    daemon.wait_until(lambda: daemon.waiting)
    daemon.stop(forget=True)
    daemon.start()
    assert state_of(waiting.result()) is LeaseState.HELD


def test_a_lease_is_lost_when_the_grace_is_over(daemon: FakeDaemon) -> None:
    daemon.grace_s = 0.3
    with connect(daemon.path, connect_timeout_s=0.1) as ts:
        lease = ts.acquire("n1")
        daemon.stop()
        wait_for_state(ts, lease.id, LeaseState.LOST)
        assert state_of(lease) is LeaseState.LOST
        assert "no daemon for 0.3 s" in (lease.reason or "")
        with pytest.raises(DaemonUnreachable, match="there is no socket"):
            ts.acquire("n1")
        daemon.start()
        assert state_of(ts.acquire("n2")) is LeaseState.HELD


def test_a_waiter_hears_when_the_grace_is_over(daemon: FakeDaemon, ts: TimeSlice) -> None:
    daemon.grace_s = 0.2
    daemon.steal(("n1",))
    waiting = Background(lambda: ts.acquire("n1"))
    daemon.wait_until(lambda: daemon.waiting)
    daemon.stop()
    with pytest.raises(DaemonUnreachable):
        waiting.result()


@pytest.mark.parametrize("remembers", [True, False])
def test_a_time_out_ends_the_wait_for_a_daemon_that_is_gone(
    daemon: FakeDaemon, ts: TimeSlice, monkeypatch: pytest.MonkeyPatch, remembers: bool
) -> None:
    """The acquire never reached the daemon. On reconnect it moves nobody, and leaves nothing."""
    monkeypatch.setattr("libtimeslice.client.TIMEOUT_SLACK_S", 0.01)
    monkeypatch.setattr("libtimeslice.client.SETTLE_LIMIT_S", 0.01)
    ts.status()
    daemon.stop()
    with pytest.raises(AcquireTimeout):
        ts.acquire("n1", timeout=0.1)
    daemon.remembers_cancels = remembers
    daemon.start()
    daemon.wait_until(lambda: daemon.count("cancel") == 2)
    daemon.wait_until(lambda: not daemon.held and not daemon.waiting)
    assert daemon.granted == (0 if remembers else 1)


def test_an_acquire_given_up_while_the_daemon_was_gone_is_withdrawn_on_reconnect(
    daemon: FakeDaemon, ts: TimeSlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G5: it was queued before the loss, so somebody must take it out of the queue."""
    monkeypatch.setattr("libtimeslice.client.TIMEOUT_SLACK_S", 0.01)
    monkeypatch.setattr("libtimeslice.client.SETTLE_LIMIT_S", 0.01)
    daemon.mute_timeouts = True
    daemon.steal(("n1",))
    waiting = Background(lambda: ts.acquire("n1", timeout=0.3))
    daemon.wait_until(lambda: daemon.waiting)
    daemon.stop()
    with pytest.raises(AcquireTimeout):
        waiting.result()
    daemon.start()
    daemon.wait_until(lambda: not daemon.waiting)
    assert daemon.last("cancel")["acquire"] == daemon.last("acquire")["id"]


def test_a_lease_taken_away_by_the_daemon_is_lost_at_once(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1") as lease:
        daemon.end_lease(lease.id, "revoked by the operator")
        assert not lease.contended
        assert state_of(lease) is LeaseState.LOST
        assert lease.reason == "revoked by the operator"
    assert daemon.count("release") == 0


def test_a_release_that_crosses_the_loss_is_answered_quietly(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1") as lease:
        daemon.end_lease(lease.id, "revoked")
    assert state_of(lease) is LeaseState.RELEASED


def test_a_daemon_that_always_hangs_up_ends_the_attempts(
    daemon: FakeDaemon, ts: TimeSlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libtimeslice.line.MAX_LOSSES", 3)

    def hang_up(connection: FakeConnection, message: Message) -> bool:
        if message.get("t") == "status":
            connection.hang_up()
        return message.get("t") == "status"

    daemon.intercept = hang_up
    with pytest.raises(DaemonUnreachable, match="was lost"):
        ts.status()
    assert daemon.count("status") == 4


def test_a_daemon_that_hangs_up_on_every_welcome_is_not_hammered(daemon: FakeDaemon) -> None:
    with connect(daemon.path, reply_limit_s=0.5) as ts:
        lease = ts.acquire("n1")
        daemon.stop()
        wait_for_state(ts, lease.id, LeaseState.UNCERTAIN)
        lease.release()  # something to repeat as soon as there is a welcome

        def hang_up(connection: FakeConnection, message: Message) -> bool:
            if message.get("t") == "hello":
                daemon._handle(connection, message)
            connection.hang_up()
            return True

        daemon.intercept = hang_up
        daemon.start()
        with pytest.raises(DaemonUnreachable):
            ts.status()
        assert 1 < daemon.count("hello") < 40


def test_a_daemon_that_finds_fault_is_not_asked_the_same_again(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    def complain(connection: FakeConnection, message: Message) -> bool:
        if message.get("t") != "status":
            return False
        connection.send(error_message("bad_frame", "cannot read this"))
        connection.hang_up()
        return True

    daemon.intercept = complain
    with pytest.raises(ProtocolError, match="cannot read this"):
        ts.status()
    assert daemon.count("status") == 1


def test_a_daemon_that_shuts_down_is_waited_for(daemon: FakeDaemon, ts: TimeSlice) -> None:
    ts.status()

    def shut_down_once(connection: FakeConnection, message: Message) -> bool:
        if message.get("t") != "hello" or daemon.count("hello") != 2:
            return False
        connection.send(error_message("shutting_down", "upgrade"))
        connection.hang_up()
        return True

    daemon.intercept = shut_down_once
    daemon.hang_up()
    assert ts.status()
    assert daemon.count("hello") == 3


@pytest.mark.parametrize(
    ("code", "kind"), [("unsupported_version", ProtocolError), ("not_permitted", NotPermitted)]
)
def test_a_daemon_that_turns_the_client_away_is_not_asked_twice(
    daemon: FakeDaemon, ts: TimeSlice, code: str, kind: type[Exception]
) -> None:
    def turn_away(connection: FakeConnection, _message: Message) -> bool:
        connection.send(error_message(code, "go away"))
        connection.hang_up()
        return True

    daemon.intercept = turn_away
    with pytest.raises(kind, match="go away"):
        ts.status()
    assert daemon.count("hello") == 1


def test_something_else_on_the_socket_is_told_apart(daemon: FakeDaemon, ts: TimeSlice) -> None:
    def chat(connection: FakeConnection, _message: Message) -> bool:
        connection.sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return True

    daemon.intercept = chat
    with pytest.raises(ProtocolError):
        ts.status()


def test_what_comes_right_behind_the_welcome_is_not_lost(daemon: FakeDaemon, ts: TimeSlice) -> None:
    with ts.lease("n1") as lease:
        welcomed = threading.Event()

        def tell_early(connection: FakeConnection, message: Message) -> bool:
            if message.get("t") != "hello" or message.get("session") is None:
                return False
            sent: list[Message] = []
            connection.catch = sent
            daemon._handle(connection, message)
            connection.catch = None
            notice = {"t": "contended", "lease": lease.id, "groups": ["n1"], "waiters": 2}
            connection.sock.sendall(encode(sent[0]) + encode(notice))
            welcomed.set()
            return True

        daemon.intercept = tell_early
        daemon.hang_up()
        assert welcomed.wait(10)
        wait_for(lambda: ts._session.grants[lease.id].waiters == 2)


def wait_for_state(ts: TimeSlice, lease: str, state: LeaseState) -> None:
    """Waits until the keeper's thread has found out, without calling into the client."""

    def known() -> LeaseState:
        grant = ts._session.grants.get(lease)
        return LeaseState.LOST if grant is None else grant.state

    wait_for(lambda: known() is state)
