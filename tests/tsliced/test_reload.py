"""SIGHUP: another configuration for a daemon that runs, as a whole or not at all."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import Host, Settings, until

from libtimeslice.errors import TimeSliceError

BOTH: Settings = {"groups.g1": {"devices": ["0"]}, "groups.g2": {"devices": ["1"]}}
ALL_IN_G1 = {"groups.g1": {"devices": ["0", "1"]}}
ONLY_G2 = {"groups.g2": {"devices": ["1"]}}


@pytest.fixture
def host(softcuda_build: Path) -> Iterator[Host]:
    host = Host(softcuda_build, settings=BOTH)
    host.start_daemon()
    yield host
    host.close()


def reload(host: Host, settings: Settings | str) -> dict[str, Any]:
    """Let the daemon read another configuration; return the event that came of it."""
    since = max((event["seq"] for event in host.events()), default=-1) + 1
    if isinstance(settings, str):
        host.config.write_text(settings)
    else:
        host.write_config(host.config, settings)
    assert host.daemon is not None
    host.daemon.send_signal(signal.SIGHUP)
    return until(
        lambda: next(iter(host.events("reloaded", "reload_refused", since=since)), {}),
        "it was reloaded, or refused",
    )


def test_a_group_can_be_added_and_an_idle_one_removed_while_others_work(host: Host) -> None:
    holder, waiter = host.rank("a"), host.rank("b")
    held = holder.do("acquire", groups="g1")
    asked = waiter.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "b waits")
    event = reload(host, {"groups.g1": {"devices": ["0"]}, "groups.g3": {"devices": ["1"]}})
    assert event["kind"] == "reloaded"
    assert event["changed"] == "groups.g2, groups.g3"
    assert [group["name"] for group in host.status()["groups"]] == ["g1", "g3"]
    assert host.group()["token"] == held["tokens"]["g1"]
    holder.do("release")
    asked.wait()
    # To a session that there was before, too.
    assert holder.do("acquire", groups="g3", timeout=60)["state"] == "held"
    until(lambda: host.group("g3")["devices"][0]["used_bytes"] is not None, "it is looked at")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (ONLY_G2, "group g1 cannot be removed: job {job} has it or waits for it"),
        (ALL_IN_G1, "group g1 cannot get other devices: job {job} has it or waits for it"),
        ({**BOTH, "daemon": {"log_level": "loud"}}, "log_level: 'loud' is not allowed"),
        ({"groups.g1": {"devices": ["7"]}}, "n1 has no device 7"),
        ("[groups.g1", "tsliced.toml"),
    ],
)
def test_what_cannot_be_is_refused_as_a_whole_with_the_reason_and_nothing_changes(
    host: Host, settings: Settings | str, told: str
) -> None:
    rank = host.rank("a")
    held = rank.do("acquire", groups="g1")
    before = host.status()["groups"]
    job = host.group()["holder"]
    if not isinstance(settings, str):
        # It goes with the rest, though it could be had by itself.
        settings = {**settings, "limits": {"grace_s": 77.0}}
    event = reload(host, settings)
    assert event["kind"] == "reload_refused"
    assert told.format(job=f"{job['uid']}/{job['id']}") in event["reason"]
    after = host.status()["groups"]
    assert [g["name"] for g in after] == [g["name"] for g in before]
    assert host.group()["token"] == held["tokens"]["g1"]
    with host.connection() as connection:
        assert connection.welcome["grace_s"] != 77.0
    rank.do("release")


def test_limits_users_and_the_log_level_change_at_once(host: Host) -> None:
    settings: Settings = {
        **BOTH,
        "daemon": {"log_level": "error"},
        "limits": {
            "grace_s": 7.5,
            "max_clients": 8,
            "max_clients_per_uid": 8,
            "reserved_clients": 0,
        },
        "memory": {"snapshot_margin_bytes": "2 MiB"},
    }
    changed = reload(host, settings)["changed"].split(", ")
    assert {"daemon.log_level", "limits.max_clients", "limits.grace_s"} <= set(changed)
    assert "memory.snapshot_margin_bytes" in changed
    length = len(host.log.read_text())
    with host.connection(role="client", job="a") as connection:
        assert connection.welcome["grace_s"] == 7.5
        connection.request({"t": "acquire", "groups": ["g1"], "timeout_s": 10.0}, 10)
    assert len(host.log.read_text()) == length, "no line below the new level"

    def crowd() -> None:
        with ExitStack() as stack:
            for _ in range(9):
                stack.enter_context(host.connection())

    with pytest.raises(TimeSliceError, match="8 clients are connected"):
        crowd()
    until(host.serves, "the crowd is gone")


def test_what_needs_a_restart_is_named_and_the_rest_is_taken(host: Host) -> None:
    settings: Settings = {
        **BOTH,
        "daemon": {"socket": str(host.directory / "elsewhere"), "cluster": "lab"},
        "limits": {"block": 64, "grace_s": 7.5},
    }
    event = reload(host, settings)
    assert event["kind"] == "reloaded"
    assert event["changed"] == "limits.grace_s"
    (warning,) = host.events("config")
    assert warning["reason"] == ("waits for a restart: limits.block, daemon.socket, daemon.cluster")
    assert reload(host, BOTH)["changed"] == "limits.grace_s"


def test_the_service_manager_hears_of_a_reload_and_why_it_was_refused(host: Host) -> None:
    assert host.stop_daemon() == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(host.directory / "notify"))
        manager.settimeout(20)
        host.start_daemon(NOTIFY_SOCKET=str(host.directory / "notify"))
        while not manager.recv(4096).startswith(b"READY=1\n"):
            pass
        for settings, told in (
            ({"groups.g1": {"devices": ["7"]}}, "; configuration not reloaded: "),
            (BOTH, "g2 free"),
        ):
            reload(host, settings)
            begun, ended = manager.recv(4096).decode(), manager.recv(4096).decode()
            assert begun.startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert ended.startswith("READY=1\nSTATUS=serving 2 devices; g1 free")
            assert told in ended
            assert ended.count("\n") == 1
