"""Crowds, floods and clients that misbehave (G9): each bound is reached for real.

Figures are printed; what is asserted of them has wide margins, for machines are busy.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from harness import HERE, LIMIT_S, Host, MakeHost, until
from pinger import Pinger
from raw_client import HELLO, RawClient

from libtimeslice.protocol import HEADER_BYTES, FrameReader, encode

MIB = 1 << 20
#: Longest time that anybody may have to wait for a sign of life while others misbehave.
LAG_LIMIT_S = 5.0
SWARM_LIMIT_S = 120.0
QUIET = {"daemon": {"log_level": "warning"}}


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    """Lets this process have as many descriptors as it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def tell(figures: str) -> None:
    """Prints figures; pytest shows them with -rP."""
    sys.stdout.write(f"{figures}\n")


def resident_mib(host: Host) -> float:
    assert host.daemon is not None
    with open(f"/proc/{host.daemon.pid}/status") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


class Swarms:
    """Processes of many clients each (`swarm.py`)."""

    def __init__(self, host: Host, *, processes: int, sessions: int, leases: int) -> None:
        command = [sys.executable, str(HERE / "swarm.py"), str(host.socket)]
        command += [str(sessions), str(leases), "0"]
        self.total = processes * sessions * leases
        self._running = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            for _ in range(processes)
        ]

    def read(self) -> list[dict[str, Any]]:
        """Waits for the next line of all of them."""
        return [json.loads(process.stdout.readline()) for process in self._running]  # type: ignore[union-attr]  # it is a pipe

    def go_on(self) -> None:
        for process in self._running:
            assert process.stdin is not None
            process.stdin.write("\n")

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


@contextmanager
def swarms(host: Host, *, processes: int, sessions: int, leases: int) -> Iterator[Swarms]:
    swarm = Swarms(host, processes=processes, sessions=sessions, leases=leases)
    try:
        yield swarm
    finally:
        swarm.close()


@pytest.mark.parametrize(
    ("sessions", "leases"),
    [(500, 1), (50, 50)],
    ids=["two thousand clients", "ten thousand waiters"],
)
def test_a_crowd_that_wants_the_same_group_is_served_to_the_last_g9(
    make_host: MakeHost, sessions: int, leases: int
) -> None:
    # The swarms are of this one user.
    limits = {"max_clients_per_uid": 4096, "max_leases_per_uid": 16_384, "grace_s": 60.0}
    host = make_host(settings={**QUIET, "limits": limits})
    holder = host.rank("holder")
    holder.do("acquire", groups="g1")
    before_mib, began = resident_mib(host), time.monotonic()
    with (
        swarms(host, processes=4, sessions=sessions, leases=leases) as crowd,
        Pinger(host.socket) as pinger,
    ):
        crowd.read()
        until(lambda: host.group()["waiters"] == crowd.total, "all wait", SWARM_LIMIT_S)
        waiting_s, waiting_mib = time.monotonic() - began, resident_mib(host) - before_mib
        crowd.go_on()
        began = time.monotonic()
        holder.do("release")
        served = crowd.read()
        served_s = time.monotonic() - began
        tell(
            f"{4 * sessions} clients, {crowd.total} waiters: queued in {waiting_s:.1f} s, "
            f"{waiting_mib * 1024 / crowd.total:.1f} KiB each; "
            f"{served_s / crowd.total * 1e3:.2f} ms per grant; {pinger}"
        )
        assert sum(one["granted"] for one in served) == crowd.total
        assert [one["refusals"] for one in served] == [[]] * 4
        assert waiting_mib * 1024 / crowd.total < 64
        assert pinger.worst_s < LAG_LIMIT_S


def test_who_floods_is_refused_in_time_and_nobody_else_waits_g9(make_host: MakeHost) -> None:
    host = make_host(settings={**QUIET, "limits": {"max_pending_requests": 64}})
    with Pinger(host.socket) as pinger, RawClient(host.socket) as flooder:
        flooder.hello()
        asked = 20_000
        flooder.send_bytes(
            b"".join(
                encode({"t": "acquire", "id": n, "groups": ["g1"]}) for n in range(1, asked + 1)
            )
        )
        codes: dict[str, int] = {}
        for _ in range(asked - 64):
            message = flooder.receive()
            if "err" in message:
                code = message["err"]["code"]
                codes[code] = codes.get(code, 0) + 1
        flooder.send({"t": "bye"})
        tell(f"a flood of {asked} requests: {codes}; {pinger}")
        assert set(codes) == {"would_exceed_limit"}
        assert pinger.worst_s < LAG_LIMIT_S


# --- frames and buffers


def test_the_longest_frames_keep_nobody_waiting_for_long_g9(host: Host) -> None:
    # Small values are what takes longest to unpack.
    numbers = encode({"t": "ping", "id": 1, "more": [1] * (MIB - 64)})
    text = encode({"t": "ping", "id": 1, "more": "x" * (MIB - 64)})
    assert MIB - 100 < len(numbers) - HEADER_BYTES <= MIB
    with Pinger(host.socket) as pinger, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(host.socket)) for _ in range(4)]
        for client in clients:
            client.hello()
        for _ in range(5):
            for client in clients:
                client.send_bytes(numbers)
                client.send_bytes(text)
            for client in clients:
                assert [client.receive(), client.receive()] == [{"re": 1}, {"re": 1}]
        tell(f"40 frames of 1 MiB: {pinger}")
        assert pinger.worst_s < LAG_LIMIT_S


def test_frames_that_never_end_have_a_common_bound_g9(make_host: MakeHost) -> None:
    limits = {"max_buffered_bytes": "4 MiB", "max_clients_per_uid": 4096}
    host = make_host(settings={**QUIET, "limits": limits})
    before_mib = resident_mib(host)
    part = encode({"t": "ping", "id": 1, "more": "x" * (MIB - 64)})[:-1]
    with Pinger(host.socket) as pinger, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(host.socket)) for _ in range(64)]
        for client in clients:
            client.hello(role="tool")
            with contextlib.suppress(ConnectionError):
                client.send_bytes(part)
        until(lambda: host.status()["sessions"] < 8, "those that had most are gone")
        grown_mib = resident_mib(host) - before_mib
        assert host.status()["sessions"] >= 4, "and no more of them than need be"
        tell(f"64 MiB of frames that do not end: {grown_mib:.1f} MiB more; {pinger}")
        assert grown_mib < 40
        assert pinger.worst_s < LAG_LIMIT_S


def test_those_who_do_not_read_have_a_common_bound_g9(make_host: MakeHost) -> None:
    limits = {
        "max_buffered_bytes": "4 MiB",
        "max_send_buffer_bytes": "3 MiB",
        "max_clients_per_uid": 4096,
    }
    host = make_host(settings={**QUIET, "limits": limits})
    # Of one job only so much is taken into the history at a time.
    for number in range(300):
        with RawClient(host.socket) as writer:
            writer.hello(job=f"j{number}")
            fields = {f"text{number}": "x" * 250 for number in range(12)}
            writer.send({"t": "progress", "fields": fields})
            writer.ask("ping")
    before_mib = resident_mib(host)
    with Pinger(host.socket) as pinger, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(host.socket)) for _ in range(32)]
        for client in clients:
            client.hello(role="tool")
            with contextlib.suppress(ConnectionError):
                for _ in range(3):
                    client.start("events", since=0, follow=False, limit=10_000)
        # The one that pings, the one that looks, and those that fit in.
        until(lambda: host.status()["sessions"] < 16, "those that had most are gone")
        grown_mib = resident_mib(host) - before_mib
        tell(f"32 clients that do not read: {grown_mib:.1f} MiB more; {pinger}")
        assert grown_mib < 60
        assert pinger.worst_s < LAG_LIMIT_S


# --- connections


def test_half_open_connections_are_closed_in_time_and_keep_nobody_out_g9(
    make_host: MakeHost,
) -> None:
    limits = {"handshake_timeout_s": 1.0, "max_clients_per_uid": 4096}
    host = make_host(settings={**QUIET, "limits": limits})
    with Pinger(host.socket) as pinger, ExitStack() as stack:
        began = time.monotonic()
        half_open = []
        for number in range(2000):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(LIMIT_S)
            sock.connect(str(host.socket))
            # Some say nothing at all, some do not finish.
            sock.sendall(encode(HELLO)[: number % 20])
            half_open.append(sock)
        connected_s = time.monotonic() - began
        rank = host.rank("a")
        assert rank.do("acquire", groups="g1")["state"] == "held"
        for sock in half_open:
            assert _last_word(sock)["code"] == "bad_request"
        closed_s = time.monotonic() - began
        tell(
            f"2000 half-open connections in {connected_s:.2f} s, closed after {closed_s:.1f} s; "
            f"{pinger}"
        )
        assert pinger.worst_s < LAG_LIMIT_S


def _last_word(sock: socket.socket) -> dict[str, Any]:
    """Reads up to the end of a connection, and returns the message before it."""
    reader, messages = FrameReader(), []
    while data := sock.recv(1 << 16):
        messages += reader.feed(data)
    (message,) = messages
    return message


def test_a_storm_of_short_connections_leaves_nothing_behind_g9(host: Host) -> None:
    before, descriptors = host.status(), host.descriptors()
    with Pinger(host.socket) as pinger:
        began = time.monotonic()
        for number in range(3000):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(LIMIT_S)
                sock.connect(str(host.socket))
                if number % 3 == 0:
                    sock.sendall(encode({**HELLO, "role": "tool"}))
        tell(f"3000 connections in {time.monotonic() - began:.1f} s; {pinger}")
        assert pinger.worst_s < LAG_LIMIT_S
    until(lambda: host.status()["sessions"] == before["sessions"], "all are forgotten")
    assert host.descriptors() < descriptors + 10, "some of its own come and go"


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_daemon_without_descriptors_serves_whom_it_has_and_recovers_g9(
    make_host: MakeHost, loop: str
) -> None:
    host = make_host(
        settings={"daemon": {"loop": loop, "log_level": "warning"}},
        launcher=("prlimit", "--nofile=200:200", "--"),
    )
    holder, waiter = host.trainer("holder", mib=8), host.rank("waiter")
    holder.do("acquire", groups="g1")
    asked = waiter.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    said: list[str] = []
    with ExitStack() as stack:
        for _ in range(400):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(LIMIT_S)
            sock.connect(str(host.socket))
            said.append(_first_word(sock))
        holder.do("release")
        assert asked.wait()["state"] == "held", "the switch had the descriptors that it takes"
        assert waiter.do("release")["waiters"] == 0
        counts = {word: said.count(word) for word in sorted(set(said))}
        tell(f"400 clients, 200 descriptors: {counts}")
        assert 20 < counts["welcome"] < 150
        refusals = [word for word in counts if "LimitNOFILE" in word]
        assert refusals, "it says what to do"
    until(lambda: _comes_in(host), "others come in again when these are gone")
    assert host.rank("late").do("acquire", groups="g1", timeout=20)["state"] == "held"


def _first_word(sock: socket.socket) -> str:
    """Says hello, and returns what is answered."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(encode({**HELLO, "role": "tool"}))
        for message in FrameReader().feed(sock.recv(1 << 16)):
            return str(message.get("message", message["t"]))
    return "hung up"


def _comes_in(host: Host) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(str(host.socket))
        return _first_word(sock) == "welcome"


def test_the_daemon_takes_all_the_descriptors_that_it_may_have(make_host: MakeHost) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    host = make_host(launcher=("prlimit", "--nofile=64:", "--"))
    assert host.daemon is not None
    with open(f"/proc/{host.daemon.pid}/limits") as file:
        line = next(line for line in file if line.startswith("Max open files"))
    assert line.split()[3:5] == [str(most), str(most)]
