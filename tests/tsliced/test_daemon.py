"""The daemon as a process: how it starts, what it tells the service manager, and how it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from harness import HERE, LIMIT_S, Host, Settings, path_with, until

from tsliced.host import kept_log, record_codec
from tsliced.host.journal import Journal

EX_UNAVAILABLE, EX_SOFTWARE, EX_CANTCREAT, EX_CONFIG = 69, 70, 73, 78


@pytest.fixture
def host(softcuda_build: Path) -> Iterator[Host]:
    """A host whose daemon has not been started."""
    host = Host(softcuda_build)
    yield host
    host.close()


def run(host: Host, settings: Settings | None = None) -> subprocess.CompletedProcess[str]:
    """Run a daemon that is to end by itself, with some settings changed."""
    config = host.write_config(host.directory / "other.toml", settings or {})
    return subprocess.run(
        [sys.executable, "-m", "tsliced", "--config", str(config)],
        env=host.variables(PYTHONPATH=path_with(HERE)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_a_second_daemon_at_the_same_socket_is_turned_away_and_the_first_goes_on(
    host: Host,
) -> None:
    host.start_daemon()
    second = run(host, {"daemon": {"state_dir": str(host.directory / "elsewhere")}})
    assert second.returncode == EX_CANTCREAT
    assert second.stderr.splitlines()[-1].startswith("tsliced: another daemon serves")
    assert "Traceback" not in second.stderr
    assert host.status()["uptime_s"] > 0


def test_a_second_daemon_on_the_same_state_is_turned_away(host: Host) -> None:
    host.start_daemon()
    other = host.directory / "s2"
    second = run(host, {"daemon": {"socket": str(other)}})
    assert second.returncode == EX_UNAVAILABLE
    assert "Traceback" not in second.stderr
    assert not other.exists()
    assert host.status()["uptime_s"] > 0


def test_a_state_of_a_newer_version_is_refused_for_good_and_not_touched_g8(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service manager does not try again, and who goes back to that version loses nothing."""
    host.start_daemon()
    assert host.stop_daemon() == 0
    state = host.directory / "state"
    with monkeypatch.context() as patch:
        patch.setattr(kept_log, "SCHEMA", record_codec.SCHEMA + 1)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with closing(Journal.open(state, now_unix=2e9, boot=boot)):
            pass
    before = contents(state)
    refused = run(host)
    assert refused.returncode == EX_CONFIG
    assert "was written by a newer tsliced" in refused.stderr
    assert "start that version again, or move the journal's directory away" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert contents(state) == before


def contents(directory: Path) -> dict[str, bytes]:
    """Return what is in the files of a journal, but for who has it open."""
    return {path.name: path.read_bytes() for path in directory.glob("[jk]*[!k]")}


def test_after_a_daemon_that_could_not_start_the_next_one_can(host: Host) -> None:
    failed = run(host, {"daemon": {"backend": "no_such_module:Backend"}})
    assert failed.returncode == EX_CONFIG
    assert "no_such_module" in failed.stderr
    assert not host.socket.exists()
    host.start_daemon()
    assert host.group()["state"] == "free"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"daemon": {"loop": "fast"}}, "other.toml:.*loop: 'fast' is not allowed"),
        ({"groups.g1": {"devices": ["7"]}}, "7"),
        ({"daemon": {"backend": "rocm"}}, "there is no backend 'rocm'; known: .*cuda"),
    ],
)
def test_what_cannot_be_is_told_with_its_place_and_not_tried_again(
    host: Host, settings: Settings, told: str
) -> None:
    ended = run(host, settings)
    assert ended.returncode == EX_CONFIG
    assert re.search(told, ended.stderr)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(host: Host, number: signal.Signals) -> None:
    host.start_daemon()
    assert host.daemon is not None
    host.daemon.send_signal(number)
    assert host.daemon.wait(LIMIT_S) == 0
    host.daemon = None
    assert not host.socket.exists()
    assert host.log.read_text().splitlines()[-1].endswith("stopped ")


def test_the_service_manager_is_told_when_it_serves_that_it_lives_and_when_it_stops(
    host: Host,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(host.directory / "notify"))
        manager.settimeout(LIMIT_S)
        host.start_daemon(NOTIFY_SOCKET=str(host.directory / "notify"), WATCHDOG_USEC="300000")
        assert manager.recv(1000) == b"EXTEND_TIMEOUT_USEC=30000000", "while it starts"
        assert manager.recv(1000) == b"READY=1\nSTATUS=serving 2 devices; g1 free; g2 free"
        for _ in range(3):
            assert manager.recv(1000) == b"WATCHDOG=1"
        assert host.stop_daemon() == 0
        while (message := manager.recv(1000)) == b"WATCHDOG=1":
            pass
        assert message == b"STOPPING=1"


NO_NVML = {"nvml_library": "/no-such-nvml.so.1"}


def test_without_nvml_groups_cannot_be_served_yet_and_it_is_to_be_tried_again(host: Host) -> None:
    ended = run(host, {"daemon": NO_NVML})
    assert ended.returncode == EX_UNAVAILABLE, "and not a mistake in the configuration"
    assert "no-such-nvml" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_nvml_and_groups_it_serves_and_says_what_is_missing(host: Host) -> None:
    text = host.write_config(host.config, {"daemon": NO_NVML}).read_text()
    host.config.write_text(text[: text.index("[groups.")])
    with host.log.open("ab") as log:
        host.daemon = subprocess.Popen(
            [sys.executable, "-m", "tsliced", "--config", str(host.config)],
            env=host.variables(),
            stdout=log,
            stderr=log,
        )
    until(host.serves, "it serves")
    assert host.status()["groups"] == []
    assert "no-such-nvml" in host.log.read_text()


def test_a_broken_promise_inside_ends_it_with_the_story_and_the_next_one_goes_on(
    host: Host,
) -> None:
    host.settings = {"daemon": {"backend": "noop_backend:BrokenBackend"}}
    host.start_daemon()
    rank = host.rank("a")
    rank.do("acquire", groups="g1")
    held = rank.do("look")["tokens"]
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "b waits")
    rank.do("context")
    rank.do("fill", mib=8)
    rank.start("release")
    assert host.daemon is not None
    assert host.daemon.wait(LIMIT_S) == EX_SOFTWARE
    log = host.log.read_text()
    assert "broken_invariant" in log
    assert f"not for process {rank.pid}" in log
    assert "ReleaseRequested" in log, "what led to it"
    host.settings = {}
    host.start_daemon()
    lease = asked.wait()
    assert lease["tokens"]["g1"] > held["g1"]
    assert host.states() == {rank.pid: "parked"}


def test_a_configuration_can_be_checked_and_shown_without_starting(host: Host) -> None:
    config = host.write_config(host.directory / "other.toml", {})

    def check(flag: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tsliced", "--config", str(config), flag]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)

    assert check("--check-config").returncode == 0
    shown = check("--print-config")
    assert shown.returncode == 0
    assert f'socket = "{host.socket}"' in shown.stdout
    assert not host.socket.exists()
