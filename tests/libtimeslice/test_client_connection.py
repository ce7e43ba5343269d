"""The bare connection that tools and benchmarks use."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from fake_daemon import LIMIT_S, Background, FakeConnection, FakeDaemon

from libtimeslice import DaemonUnreachable, UnknownGroup
from libtimeslice.connection import Connection, ConnectionLost
from libtimeslice.protocol import FrameReader, Message, encode


@pytest.fixture
def connection(daemon: FakeDaemon) -> Iterator[Connection]:
    with Connection.open(str(daemon.path)) as opened:
        yield opened


def test_a_tool_asks_single_questions(daemon: FakeDaemon, connection: Connection) -> None:
    assert connection.welcome["host"] == "n1"
    assert daemon.last("hello")["role"] == "tool"
    assert connection.request({"t": "ping"}) == {"re": 1}
    assert "groups" in connection.request({"t": "status"}, limit_s=5)["status"]
    with pytest.raises(UnknownGroup):
        connection.request({"t": "acquire", "groups": ["nope"]})


def test_what_comes_unasked_is_kept_in_order(daemon: FakeDaemon, connection: Connection) -> None:
    assert connection.take_notice(0.01) is None

    def tell(client: FakeConnection, message: Message) -> bool:
        for number in range(3):
            client.send({"t": "event", "event": {"n": number}})
        return False

    daemon.intercept = tell
    connection.request({"t": "ping"})
    notices = [connection.take_notice(LIMIT_S) for _ in range(3)]
    assert [notice and notice["event"]["n"] for notice in notices] == [0, 1, 2]


def test_a_request_without_an_answer_ends_at_its_limit_and_the_next_one_works(
    daemon: FakeDaemon, connection: Connection
) -> None:
    daemon.intercept = lambda _client, message: message.get("t") == "status"
    with pytest.raises(TimeoutError):
        connection.request({"t": "status"}, limit_s=0.02)
    assert connection.request({"t": "ping"}, limit_s=5)["re"] == 2


def test_a_lost_connection_ends_all_waits(daemon: FakeDaemon, connection: Connection) -> None:
    daemon.intercept = lambda _client, message: True
    threads = [Background(lambda: connection.request({"t": "ping"})) for _ in range(3)]
    daemon.wait_until(lambda: daemon.count("ping") == 3)
    daemon.hang_up()
    for thread in threads:
        with pytest.raises(ConnectionLost):
            thread.result()
    with pytest.raises(ConnectionLost):
        connection.request({"t": "ping"})
    assert connection.lost


def test_a_plain_echo_can_be_asked_too() -> None:
    """For benchmarks: any peer that frames its answers will do, with no hello."""
    here, there = socket.socketpair()

    def echo() -> None:
        reader = FrameReader()
        with there:
            while data := there.recv(4096):
                for message in reader.feed(data):
                    there.sendall(encode({"re": message["id"]}))

    server = threading.Thread(target=echo, daemon=True)
    server.start()
    with Connection(here) as connection:
        assert [connection.request({"t": "x"})["re"] for _ in range(3)] == [1, 2, 3]
    server.join(LIMIT_S)
    assert not server.is_alive()


class CountingSocket(socket.socket):
    """Counts the reads that may put the thread to sleep."""

    slept = 0

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        self.slept += not flags & socket.MSG_DONTWAIT
        return super().recv(size, flags)


def counting_pair() -> tuple[CountingSocket, socket.socket]:
    here, there = socket.socketpair()
    return CountingSocket(fileno=here.detach()), there


def test_an_answer_that_comes_at_once_is_had_without_going_to_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Longer than this thread may be kept from running, and than the other takes to answer.
    monkeypatch.setattr("libtimeslice.connection._AWAKE_S", LIMIT_S)
    here, there = counting_pair()

    def answer() -> None:
        (message,) = FrameReader().feed(there.recv(4096))
        there.sendall(encode({"re": message["id"]}))

    with there, Connection(here) as connection:
        server = Background(answer)
        assert connection.request({"t": "x"}) == {"re": 1}
        server.result()
        assert here.slept == 0


def test_a_wait_for_longer_is_spent_asleep() -> None:
    here, there = counting_pair()
    with there, Connection(here) as connection:
        before_s = time.thread_time()
        assert connection.take_notice(2.5) is None
        used_s = time.thread_time() - before_s
    assert here.slept >= 1
    assert used_s < 0.5


def test_a_signal_handler_that_asks_while_its_thread_reads_is_refused(
    connection: Connection, daemon: FakeDaemon
) -> None:
    """It could only wait for itself."""
    daemon.intercept = lambda _client, message: message.get("t") == "status"
    main = threading.main_thread().ident
    assert main is not None

    refused = threading.Event()

    def ask_again(*_: object) -> None:
        try:
            connection.request({"t": "ping"})  # before its thread reads, this is all right
        except RuntimeError as error:
            assert "signal handler" in str(error)  # noqa: PT017 - not what the test waits for
            refused.set()

    def send_signals() -> None:
        daemon.wait_until(lambda: daemon.count("status") == 1)
        while not refused.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            refused.wait(0.01)
        daemon.hang_up()

    before = signal.signal(signal.SIGUSR1, ask_again)
    try:
        sender = Background(send_signals)
        with pytest.raises(ConnectionLost):
            connection.request({"t": "status"}, limit_s=LIMIT_S)
        sender.result()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_message_that_may_get_lost_does_not_wait_for_a_full_socket(
    daemon: FakeDaemon, connection: Connection
) -> None:
    with daemon.changed:
        for _ in range(3000):
            notes = {f"note{i}": "x" * 225 for i in range(4)}
            connection.send_or_drop({"t": "progress", "fields": notes})
    assert connection.request({"t": "ping"}, limit_s=LIMIT_S)
    assert 10 < daemon.count("progress") < 3000


def test_opening_nothing_is_told_with_the_path(daemon: FakeDaemon) -> None:
    daemon.stop()
    with pytest.raises(DaemonUnreachable) as raised:
        Connection.open(str(daemon.path), limit_s=1)
    assert raised.value.facts == {"socket": str(daemon.path)}


def test_a_daemon_that_never_says_welcome_is_left_after_the_limit(daemon: FakeDaemon) -> None:
    daemon.intercept = lambda _client, message: True
    with pytest.raises(DaemonUnreachable, match=r"timed out|in time"):
        Connection.open(str(daemon.path), limit_s=0.05)
