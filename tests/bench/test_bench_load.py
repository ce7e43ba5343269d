"""Mirrors bench/load.py, bench/echo.py and bench/syncs.py: real clients against a real echo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench.echo import Answers, answers_of, start_echo
from bench.load import Client, Crowd, acquire_of, measure_pairs
from bench.machine import cpu_s, rss_bytes
from bench.server import Server, ServerError
from bench.syncs import SyncCounter, measure_syncs
from libtimeslice.connection import Connection
from libtimeslice.errors import TimeSliceError
from libtimeslice.protocol import PROTOCOL_VERSION, Message, encode

GRANT: Message = {
    "lease": "s.1",
    "groups": ["g0"],
    "tokens": {"g0": 7},
    "restored": False,
    "ack_s": None,
}
ANSWERS: Answers = {
    "hello": {"t": "welcome", "version": list(PROTOCOL_VERSION)},
    "acquire": GRANT,
    "release": {"waiters": 0, "deferred": True},
    "ping": {"err": {"code": "unavailable", "message": "as the test wants it"}},
}


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    core = min(os.sched_getaffinity(0))
    with start_echo(tmp_path_factory.mktemp("echo"), ANSWERS, core=core) as server:
        yield server


def test_the_echo_answers_with_the_bytes_of_the_daemons_answer(echo: Server) -> None:
    with closing(Client(echo.path, "job")) as client:
        answer = client.request(acquire_of("g0"))
        assert encode(answer) == encode({"re": 1, **GRANT})


def test_answers_are_taken_from_a_server_without_the_ids_of_requests(echo: Server) -> None:
    with Connection.open(str(echo.path)) as connection:
        answers = answers_of(connection)
    assert answers == {name: ANSWERS[name] for name in ("hello", "acquire", "release")}


def test_every_request_of_a_pair_is_timed(echo: Server) -> None:
    with Connection.open(str(echo.path)) as connection:
        times = measure_pairs(connection, "g0", 20)
    assert times.requests == 40
    assert min(times.acquire_ns + times.release_ns) > 0
    assert times.pair_ns[0] == times.acquire_ns[0] + times.release_ns[0]


def test_a_crowd_makes_all_pairs_of_all_clients(
    echo: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[tuple[str, int]] = Counter()
    send = Client.send

    def counting(client: Client, message: Message) -> int:
        sent[message["t"], client.sock.fileno()] += 1
        return send(client, message)

    monkeypatch.setattr(Client, "send", counting)
    with closing(Crowd(echo.path, ["g0", "g1", "g2"])) as crowd:
        crowd.run(5)
        numbers = [client.sock.fileno() for client in crowd.clients]
    assert sent == {(kind, n): 5 for kind in ("acquire", "release") for n in numbers}


def test_a_refusal_is_no_answer_that_counts(echo: Server) -> None:
    with closing(Client(echo.path, "job")) as client, pytest.raises(TimeSliceError):
        client.request({"t": "ping"})


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no socket today')"]
    core = min(os.sched_getaffinity(0))
    server = Server(command, path=tmp_path / "none", core=core, log=tmp_path / "log")
    with pytest.raises(ServerError, match="ended with status 1") as caught, server:
        pass
    assert "no socket today" in caught.value.__notes__[0]


def test_a_process_is_measured_from_outside_as_it_measures_itself() -> None:
    program = (
        "import time\n"
        "while time.process_time() < 0.2: pass\n"
        "print(time.process_time(), flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said_s = float(process.stdout.readline())
        assert said_s <= cpu_s(process.pid) < said_s + 0.1
        assert 1 << 20 < rss_bytes(process.pid) < 1 << 28
        process.communicate("\n")


def test_the_disk_waits_of_another_process_are_counted(tmp_path: Path) -> None:
    counter = SyncCounter(tmp_path)
    program = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "for _ in range(3): os.fsync(file)\n"
        "for _ in range(2): os.fdatasync(file)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, tmp_path / "file"],
        env={**os.environ, **counter.environment},
        check=True,
        timeout=30,
    )
    durations = counter.durations_ns()
    assert len(durations) == 5
    assert all(0 < duration < 10_000_000_000 for duration in durations)


def test_a_bare_disk_wait_leaves_nothing_behind(tmp_path: Path) -> None:
    assert len(measure_syncs(tmp_path, 3)) == 3
    assert list(tmp_path.iterdir()) == []
