"""A daemon that is restarted under a service manager which keeps its descriptors (sd_notify(3)).

The manager is a stand-in of a few lines, so that these tests need no root; the real one is asked in
tests/systemd.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from harness import HERE, LIMIT_S, Host, path_with, until

from tsliced.net.listening import FIRST_PASSED

#: Shorter than the tests leave a client alone.
GRACE_S = 0.5


class ManagedHost(Host):
    """A host whose daemon is started by a manager: it listens, and keeps what it is told to."""

    def __init__(self, softcuda: Path) -> None:
        super().__init__(softcuda, settings={"limits": {"grace_s": GRACE_S}})
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.socket))
        self.listener.listen(64)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(self.directory / "notify"))
        self.kept: dict[str, socket.socket] = {}

    def start_daemon(
        self, *, program: Sequence[str] = ("-m", "tsliced"), **environment: str
    ) -> None:
        self.write_config(self.config, self.settings)
        self.hear()
        passed = [("control", self.listener), *self.kept.items()]
        # As far away as possible, so that none is overwritten before it is moved to its place.
        high = [fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 200) for _, sock in passed]
        moves = "".join(f" {FIRST_PASSED + i}<&{fd} {fd}<&-" for i, fd in enumerate(high))
        script = f'export LISTEN_PID=$$; exec "$@"{moves}'
        command = [sys.executable, *program, *self.arguments()]
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                # dash knows descriptors of one digit only.
                ["bash", "-c", script, "bash", *command],
                env=self.variables(
                    PYTHONPATH=path_with(HERE),
                    NOTIFY_SOCKET=str(self.directory / "notify"),
                    LISTEN_FDS=str(len(passed)),
                    LISTEN_FDNAMES=":".join(name for name, _ in passed),
                    **environment,
                ),
                stdout=log,
                stderr=log,
                pass_fds=high,
            )
        for fd in high:
            os.close(fd)
        until(self.serves, "the daemon serves")

    def hear(self) -> list[str]:
        """Do what the daemon asked for, forget connections that were left, return what it said."""
        said = []
        while select.select([self.notify], [], [], 0)[0]:
            data, descriptors, _, _ = socket.recv_fds(self.notify, 4096, 8)
            lines = data.decode().split("\n")
            said += lines
            name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "")
            if "FDSTORE=1" in lines:
                self.kept[name] = socket.socket(fileno=descriptors[0])
            elif "FDSTOREREMOVE=1" in lines:
                self.kept.pop(name).close()
        for name, sock in list(self.kept.items()):
            poller = select.poll()
            poller.register(sock, 0)
            if poller.poll(0):
                self.kept.pop(name).close()
        return said

    def keeps(self, count: int) -> bool:
        """Whether so many connections are kept."""
        self.hear()
        return len(self.kept) == count

    def close(self, *, answer_limit_s: float = LIMIT_S) -> None:
        for sock in (self.notify, *self.kept.values()):
            sock.close()
        # Of the listening socket it is the manager that takes the file away.
        self.listener.close()
        if self.daemon is not None:
            self.stop_daemon()
        self.socket.unlink()
        super().close(answer_limit_s=answer_limit_s)


@pytest.fixture
def host(softcuda_build: Path) -> Iterator[ManagedHost]:
    host = ManagedHost(softcuda_build)
    yield host
    host.close()


def stay_away(host: ManagedHost) -> None:
    """Let more time go by than a client without a connection is given."""
    since = time.monotonic()
    until(lambda: time.monotonic() > since + 3 * GRACE_S, "the grace is over", LIMIT_S)


@pytest.mark.parametrize("crash", [True, False])
def test_g8_a_client_that_cannot_come_back_in_time_keeps_lease_and_place_if_it_is_there(
    host: ManagedHost, crash: bool
) -> None:
    host.start_daemon()
    holder, waiter = host.rank("a"), host.rank("b")
    held = holder.do("acquire", groups="g1")
    asked = waiter.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "b waits")
    until(lambda: host.keeps(2), "both connections are kept")
    holder.stop()
    waiter.stop()
    if crash:
        host.kill_daemon()
    else:
        assert host.stop_daemon() == 0
    for _ in range(2):
        # Twice: what was left to one daemon is left to the next.
        host.start_daemon()
        stay_away(host)
        group = host.group()
        assert group["holder"]["id"] == "a"
        assert group["token"] == held["tokens"]["g1"]
        assert group["waiters"] == 1
        assert host.keeps(2)
        host.kill_daemon()
    host.start_daemon()
    for rank in (holder, waiter):
        os.kill(rank.pid, signal.SIGCONT)
    holder.do("release")
    assert asked.wait()["tokens"]["g1"] > held["tokens"]["g1"]
    until(lambda: host.keeps(2), "they have one connection each, and the old ones are dropped")


def test_a_client_that_left_meanwhile_is_not_taken_for_one_that_is_there(
    host: ManagedHost,
) -> None:
    host.start_daemon()
    holder, gone = host.rank("a"), host.rank("b")
    holder.do("acquire", groups="g1")
    gone.do("acquire", groups="g2")
    until(lambda: host.keeps(2), "both connections are kept")
    holder.stop()
    host.kill_daemon()
    gone.kill()
    assert host.keeps(1), "the kernel tells that its process is gone"
    host.start_daemon()
    until(lambda: host.group("g2")["state"] == "free", "its lease ends")
    assert host.group("g1")["state"] == "held"
    os.kill(holder.pid, signal.SIGCONT)
    holder.do("release")


def test_a_client_that_leaves_after_the_restart_gets_its_grace_and_no_more(
    host: ManagedHost,
) -> None:
    host.start_daemon()
    holder = host.rank("a")
    holder.do("acquire", groups="g1")
    until(lambda: host.keeps(1), "the connection is kept")
    holder.stop()
    host.kill_daemon()
    host.start_daemon()
    stay_away(host)
    assert host.group()["state"] == "held"
    holder.kill()
    until(lambda: host.group()["state"] == "free", "its lease ends")
    until(lambda: host.keeps(0), "nothing of it is kept")


def test_what_the_daemon_hangs_up_on_ends_for_the_client_although_it_is_kept(
    host: ManagedHost,
) -> None:
    host.start_daemon()
    with host.connection(role="client", job="a") as connection:
        until(lambda: host.keeps(1), "the connection is kept")
        with suppress(Exception):
            # A second hello is a mistake that ends a connection.
            connection.request({"t": "hello", "version": [1, 0], "client": "x", "caps": []}, 10)
        assert connection.wait_until_lost(LIMIT_S)
    until(lambda: host.keeps(0), "it is dropped")


def test_tools_are_not_kept(host: ManagedHost) -> None:
    host.start_daemon()
    with host.connection() as connection:
        connection.request({"t": "ping"}, 10)
        assert host.keeps(0)


def test_a_client_that_connects_before_the_daemon_is_there_is_served_once_it_is(
    host: ManagedHost,
) -> None:
    rank = host.rank("a")
    asked = rank.start("acquire", groups="g1", timeout=60)
    assert select.select([host.listener], [], [], LIMIT_S)[0], "it knocked"
    host.start_daemon()
    assert asked.wait()["state"] == "held"
    assert host.socket.exists()
