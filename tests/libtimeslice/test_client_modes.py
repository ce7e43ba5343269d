"""TSLICE_MODE: off, auto and require."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, state_of

from libtimeslice import AcquireTimeout, DaemonUnreachable, LeaseState, connect


def test_require_raises_where_there_is_no_socket_and_says_what_to_do(tmp_path: Path) -> None:
    with (
        connect(tmp_path / "none", connect_timeout_s=0.05) as ts,
        pytest.raises(DaemonUnreachable, match=r"there is no socket at .*start tsliced"),
    ):
        ts.acquire()


def test_require_waits_for_a_daemon_that_is_starting(daemon: FakeDaemon) -> None:
    daemon.stop()
    with connect(daemon.path) as ts:
        starter = threading.Timer(0.1, daemon.start)
        starter.start()
        with ts.lease("n1") as lease:
            assert lease.state is LeaseState.HELD
        starter.join()


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_socket_that_nobody_listens_on_is_an_error_in_either_mode(
    tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with (
        connect(path, mode=mode, connect_timeout_s=0.05) as ts,
        pytest.raises(DaemonUnreachable, match="no daemon listens"),
    ):
        ts.acquire()


def test_off_grants_everything_and_touches_no_socket(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSLICE_MODE", "off")
    with connect(daemon.path) as ts:
        assert not ts.shared
        ts.on_contended(print)
        with ts.lease("n1", timeout=0) as lease, ts.lease(["n1"]) as inner:
            assert lease.state is inner.state is LeaseState.HELD
            assert (lease.token, lease.tokens, lease.waited_s) == (0, {"n1": 0}, 0.0)
            assert not lease.contended
            with lease.off_accelerators():
                assert state_of(inner) is LeaseState.RELEASED
            assert state_of(inner) is LeaseState.HELD
        with ts.lease() as everything, ts.phase("reward"):
            assert everything.token == 0
            ts.progress(step=1)
            ts.queue("q", depth=1)
        assert ts.register() == ()
        assert ts.status() == {"groups": []}
    assert daemon.log == []


def test_auto_runs_unshared_with_one_warning_if_there_is_no_socket(tmp_path: Path) -> None:
    with connect(tmp_path / "none", mode="auto") as ts:
        with pytest.warns(RuntimeWarning, match="does not share") as warned:
            ts.acquire("n1").release()
        with ts.lease("n1"):
            ts.progress(step=1)
        assert len(warned) == 1


def test_auto_shares_as_soon_as_there_is_a_socket(daemon: FakeDaemon) -> None:
    daemon.stop()
    with connect(daemon.path, mode="auto") as ts:
        with pytest.warns(RuntimeWarning, match="does not share"):
            ts.acquire("n1")
        daemon.start()
        with ts.lease("n1"):  # it runs unshared until the outermost ends
            assert daemon.log == []
        ts.release()
        with ts.lease("n1"):
            assert daemon.count("acquire") == 1


def test_auto_does_not_run_unshared_once_a_daemon_has_answered(daemon: FakeDaemon) -> None:
    daemon.grace_s = 0.2
    with connect(daemon.path, mode="auto", connect_timeout_s=0.1) as ts:
        ts.status()
        daemon.stop()
        with pytest.raises((DaemonUnreachable, AcquireTimeout)):
            ts.acquire("n1", timeout=5)
        with pytest.raises(DaemonUnreachable):
            ts.acquire("n1")


def test_a_path_that_is_too_long_is_told_clearly(tmp_path: Path) -> None:
    with (
        connect(tmp_path / ("x" * 200), connect_timeout_s=0.05) as ts,
        pytest.raises(DaemonUnreachable, match="too long"),
    ):
        ts.status()
