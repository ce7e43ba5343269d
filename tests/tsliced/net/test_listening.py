"""The listening socket: no second daemon, no stale file in the way, open to all users."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tsliced.core.model import SessionId
from tsliced.net.listening import (
    MAX_PATH_BYTES,
    SOCKET_MODE,
    Inheritance,
    ListenError,
    inherit,
    listen,
)
from tsliced.net.survivors import name_of, session_of


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def test_the_socket_listens_in_a_directory_that_it_makes_and_is_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "run" / "tsliced" / "s"
    with listen(str(path), backlog=8) as sock:
        assert connects(path)
        assert stat.S_IMODE(path.stat().st_mode) == SOCKET_MODE
        assert not sock.getblocking()
        assert not sock.get_inheritable(), "workers must not keep it open"
    assert os.listdir(path.parent) == ["s"], "no other file is left"


def test_a_socket_that_nobody_serves_any_more_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen(str(path), backlog=8).close()
    assert path.exists()
    assert not connects(path)
    with listen(str(path), backlog=8):
        assert connects(path)


def test_a_file_that_is_no_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("left by somebody")
    with listen(str(path), backlog=8):
        assert connects(path)


def test_a_second_daemon_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen(str(path), backlog=8):
        with pytest.raises(ListenError, match="another daemon serves"):
            listen(str(path), backlog=8)
        assert connects(path)


def test_a_daemon_that_has_no_room_for_a_connection_is_one_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(path))
        full.listen(0)
        # The kernel takes in one more than it is told.
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(ListenError, match="another daemon serves"):
            listen(str(path), backlog=8)
        for client in waiting:
            client.close()


def test_the_path_may_be_as_long_as_the_kernel_takes(tmp_path: Path) -> None:
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    path = tmp_path / ("x" * room)
    with listen(str(path), backlog=8):
        assert connects(path)
    with pytest.raises(ListenError, match="at most 107 bytes"):
        listen(f"{path}x", backlog=8)


def test_a_path_that_cannot_be_made_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ListenError, match=r"cannot listen at .*file/s: File exists"):
        listen(str(tmp_path / "file" / "s"), backlog=8)
    (tmp_path / "directory").mkdir()
    with pytest.raises(ListenError, match=r"cannot listen at .*directory: "):
        listen(str(tmp_path / "directory"), backlog=8)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


def test_a_private_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "tsliced-me" / "s"
    with listen(str(path), backlog=8, private=True):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # Whoever made it first could have put anything there.
    path.parent.chmod(0o777)
    with pytest.raises(ListenError, match="others may write there"):
        listen(str(path), backlog=8, private=True)
    assert path.exists(), "nothing there was touched"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_private_socket_is_not_put_where_another_user_is_master(tmp_path: Path) -> None:
    os.chown(tmp_path, 5, 5)
    with pytest.raises(ListenError, match="belongs to another user"):
        listen(str(tmp_path / "s"), backlog=8, private=True)


@pytest.mark.parametrize("environ", [{}, {"LISTEN_PID": "1", "LISTEN_FDS": "2"}])
def test_what_was_passed_to_another_process_is_left_alone_and_not_passed_on(
    environ: dict[str, str],
) -> None:
    environ = {**environ, "LISTEN_FDNAMES": "control:c-1", "HOME": "/"}
    assert inherit(environ) == Inheritance()
    assert environ == {"HOME": "/"}


#: Says what was taken over; descriptors: a listening socket, a file, two connections.
HEIR = """
import os, sys
from tsliced.net.listening import inherit
os.environ["LISTEN_PID"] = str(os.getpid())
found = inherit()
assert found.listener is not None and not found.listener.get_inheritable()
print(found.listener.getsockname(), *(name for name, _ in found.kept), "LISTEN_FDS" in os.environ)
"""


def test_what_was_passed_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "s"
    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as sock, ours, theirs, open("/dev/null") as file:
        sock.bind(str(path))
        sock.listen(8)
        passed = [one.fileno() for one in (sock, file, theirs, theirs)]
        high = [os.dup2(descriptor, 200 + i) for i, descriptor in enumerate(passed)]
        moves = " ".join(f"{3 + i}<&{fd}" for i, fd in enumerate(high))
        done = subprocess.run(
            ["bash", "-c", f'exec "$@" {moves}', "bash", sys.executable, "-c", HEIR],
            env={
                **os.environ,
                "LISTEN_FDS": "4",
                "LISTEN_FDNAMES": "control:file:c-s1-0a:stranger",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            pass_fds=high,
            capture_output=True,
            text=True,
            timeout=30,
        )
        for fd in high:
            os.close(fd)
    assert done.stdout.split() == [str(path), "c-s1-0a", "False"], done.stderr
    assert session_of("c-s1-0a") == "s1"
    assert session_of(name_of(SessionId("s1"))) == "s1"
    assert name_of(SessionId("s1")) != name_of(SessionId("s1"))
