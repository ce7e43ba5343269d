"""What the caller and the environment say, and which of them wins."""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path

import pytest

from libtimeslice import environment
from libtimeslice.environment import (
    DEFAULT_SOCKET,
    Mode,
    settings_from,
    socket_path,
    user_socket,
)


def test_what_is_given_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {
        "TSLICE_SOCKET": "unix:/run/env.sock",
        "TSLICE_JOB_ID": "env-job",
        "TSLICE_MODE": "auto",
    }
    plain, told = settings_from(environ={}), settings_from(environ=environ)
    given = settings_from(socket="/given.sock", job="mine", mode="off", environ=environ)
    assert plain.path({"TMPDIR": "/nowhere"}) == DEFAULT_SOCKET
    assert (plain.job, plain.mode) == (None, Mode.REQUIRE)
    assert told.path(environ) == "/run/env.sock"
    assert (told.job, told.mode) == ("env-job", Mode.AUTO)
    assert given.path(environ) == "/given.sock"
    assert (given.job, given.mode) == ("mine", Mode.OFF)


def test_the_socket_of_a_user_s_own_daemon_is_found_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system.sock"
    monkeypatch.setattr(environment, "DEFAULT_SOCKET", str(system))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert settings_from().path(environ) == str(system), "which says what is missing"
    own = tmp_path / "tsliced" / "tsliced.sock"
    own.parent.mkdir()
    own.write_text("no socket")
    assert settings_from().path(environ) == str(system)
    own.unlink()
    with socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as other:
        sock.bind(str(own))
        assert settings_from().path(environ) == str(own)
        assert settings_from().path({**environ, "TSLICE_SOCKET": "/told"}) == "/told"
        other.bind(str(system))
        assert settings_from().path(environ) == str(system), "the system's daemon comes first"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_socket_that_another_user_put_there_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "DEFAULT_SOCKET", str(tmp_path / "none"))
    environ = {"TMPDIR": str(tmp_path)}
    trap = Path(user_socket(environ))
    trap.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(trap))
        assert settings_from().path(environ) == str(trap)
        os.chown(trap.parent, 5, 5)
        assert settings_from().path(environ) == str(tmp_path / "none")


def test_a_pickle_keeps_the_job_and_asks_the_new_place_for_the_socket() -> None:
    settings = settings_from(environ={"TSLICE_SOCKET": "/here", "TSLICE_JOB_ID": "j"})
    moved = pickle.loads(pickle.dumps(settings))
    assert moved == settings
    assert moved.job == "j"
    assert moved.path({"TSLICE_SOCKET": "/there"}) == "/there"


def test_role_names_stand_for_groups_and_each_group_is_asked_once() -> None:
    settings = settings_from(
        groups={"eval": "n9"}, environ={"TSLICE_GROUPS": " trainer=n1, n2 ;sampler=n3;"}
    )
    assert settings.groups_of("trainer") == ("n1", "n2")
    assert settings.groups_of(["sampler", "n1", "trainer"]) == ("n3", "n1", "n2")
    assert settings.groups_of("eval") == ("n9",)
    assert settings.groups_of("other") == ("other",)
    assert settings.groups_of(None) is None


@pytest.mark.parametrize("text", ["trainer", "trainer=", "=n1", "a=n1;b"])
def test_a_malformed_tslice_groups_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="must look like"):
        settings_from(environ={"TSLICE_GROUPS": text})


@pytest.mark.parametrize("groups", [[], [""], ["a\n"], ["x" * 129], [f"g{n}" for n in range(65)]])
def test_groups_that_the_wire_cannot_carry_are_refused(groups: list[str]) -> None:
    with pytest.raises(ValueError, match="group"):
        settings_from(environ={}).groups_of(groups)


def test_a_mode_or_a_limit_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="'off', 'auto' or 'require'"):
        settings_from(environ={"TSLICE_MODE": "on"})
    with pytest.raises(ValueError, match="connect_timeout_s"):
        settings_from(connect_timeout_s=0, environ={})


def test_world_size_makes_a_round_unless_a_call_or_the_caller_says_otherwise() -> None:
    settings = settings_from(environ={})
    assert settings.round_of(None, {"WORLD_SIZE": "8"}) == 8
    assert settings.round_of(None, {"WORLD_SIZE": "1"}) is None
    assert settings.round_of(None, {}) is None
    assert settings.round_of(2, {"WORLD_SIZE": "8"}) == 2
    assert settings.round_of(1, {"WORLD_SIZE": "8"}) is None
    assert settings_from(ranks=3, environ={}).round_of(None, {"WORLD_SIZE": "8"}) == 3
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        settings.round_of(None, {"WORLD_SIZE": "many"})
    with pytest.raises(ValueError, match="ranks"):
        settings.round_of(0, {})


def test_a_target_may_be_a_path_or_a_unix_address() -> None:
    for target in ("/run/s", "unix:/run/s", "unix:///run/s"):
        assert socket_path(target) == "/run/s"


def test_the_promise_of_signs_of_life_is_given_or_in_the_environment() -> None:
    environ = {"TSLICE_HEARTBEAT_S": "2.5"}
    assert settings_from(environ={}).heartbeat_s is None
    assert settings_from(environ=environ).heartbeat_s == 2.5
    assert settings_from(heartbeat_s=7, environ=environ).heartbeat_s == 7.0


@pytest.mark.parametrize("text", ["often", "0", "-1", "nan", "1e10"])
def test_a_promise_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"TSLICE_HEARTBEAT_S|heartbeat_s must be"):
        settings_from(environ={"TSLICE_HEARTBEAT_S": text})
