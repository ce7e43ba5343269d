"""What the daemon tells the service manager, against a manager's socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tsliced.sdnotify import Notifier


@pytest.fixture(params=["a path", "an abstract name"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A manager's socket, and its address as NOTIFY_SOCKET has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"tsliced-test-{os.getpid()}"
        address = str(tmp_path / "notify") if request.param == "a path" else f"@{name}"
        sock.bind(address if address[0] != "@" else f"\0{name}")
        sock.settimeout(10)
        yield sock, address


def test_all_lines_come_in_one_message(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address})
    assert notifier.enabled
    assert notifier.send("READY=1", "STATUS=serving 2 devices")
    assert sock.recv(1000) == b"READY=1\nSTATUS=serving 2 devices"


def test_a_status_that_is_shown_is_not_sent_again(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.ready("two")
    for text in ("two", "three", "three", "two"):
        notifier.status(text)
    notifier.send("STOPPING=1")
    said = [sock.recv(1000) for _ in range(4)]
    assert said == [b"READY=1\nSTATUS=two", b"STATUS=three", b"STATUS=two", b"STOPPING=1"]


def test_a_reload_is_told_with_its_instant(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    before = time.monotonic_ns() // 1000
    Notifier({"NOTIFY_SOCKET": address}).reloading()
    begun, _, usec = sock.recv(1000).decode().rpartition("=")
    assert begun == "RELOADING=1\nMONOTONIC_USEC"
    assert before <= int(usec) <= time.monotonic_ns() // 1000


def test_a_descriptor_is_handed_over_under_its_name_and_taken_back(
    manager: tuple[socket.socket, str],
) -> None:
    sock, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert notifier.store("c-1", theirs.fileno())
        data, (descriptor,), _, _ = socket.recv_fds(sock, 1000, 4)
        assert data == b"FDSTORE=1\nFDNAME=c-1"
        with socket.socket(fileno=descriptor) as kept:
            ours.send(b"it is the same")
            assert kept.recv(100) == b"it is the same"
        notifier.drop("c-1")
        assert sock.recv(1000) == b"FDSTOREREMOVE=1\nFDNAME=c-1"
        assert not Notifier({}).store("c-1", theirs.fileno())


def test_without_a_manager_nothing_is_sent() -> None:
    notifier = Notifier({})
    assert not notifier.enabled
    assert not notifier.send("READY=1")
    assert notifier.watchdog_s is None


def test_a_manager_that_is_gone_or_does_not_read_keeps_nobody_from_work(tmp_path: Path) -> None:
    assert not Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).send("WATCHDOG=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "busy"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "busy")})
        sent = 0
        while notifier.send("WATCHDOG=1"):
            sent += 1
            assert sent < 100_000, "its queue is full at some time"
        assert sent > 0


@pytest.mark.parametrize(
    ("usec", "pid", "expected_s"),
    [
        ("30000000", "", 30.0),
        ("500000", str(os.getpid()), 0.5),
        ("500000", str(os.getpid() + 1), None),
        ("0", "", None),
        ("", "", None),
        ("soon", "", None),
    ],
)
def test_the_watchdog_is_fed_if_it_is_meant_for_this_process(
    usec: str, pid: str, expected_s: float | None
) -> None:
    environ = {"WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}
    assert Notifier(environ).watchdog_s == expected_s


def test_the_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    assert Notifier().enabled
