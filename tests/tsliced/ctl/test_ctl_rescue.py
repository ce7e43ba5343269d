"""tslicectl rescue where it cannot work: it says why, and what to do instead."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tsliced.ctl.__main__ import main
from tsliced.host import kept_log, record_codec
from tsliced.host.journal import Journal


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state directory of a daemon that has ended."""
    directory = tmp_path / "state"
    Journal.open(directory, now_unix=time.time()).close()
    return directory


def rescue(state: Path, *arguments: str) -> int:
    config = state.parent / "tsliced.toml"
    config.write_text(f'[daemon]\nstate_dir = "{state}"\nhost = "n1"\n')
    return main(["rescue", "--config", str(config), *arguments])


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)], ids=["rescue", "dry run"])
def test_a_journal_that_a_daemon_has_is_refused(
    state: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal.open(state, now_unix=time.time())
    try:
        assert rescue(state, *arguments) == 75
    finally:
        journal.close()
    assert f"another daemon (pid {os.getpid()})" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)], ids=["rescue", "dry run"])
def test_a_journal_of_a_newer_version_is_left_and_pids_are_asked_for(
    state: Path,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kept_log, "SCHEMA", record_codec.SCHEMA + 1)
    Journal.open(state, now_unix=time.time()).close()
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in state.glob("kept-*")}
    assert rescue(state, *arguments) == 1
    assert "name the processes with --pid" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in state.glob("kept-*")} == before


def test_a_directory_without_a_journal_is_no_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rescue(tmp_path / "none", "--json") == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "no_journal"
    assert str(tmp_path / "none") in error["message"]


def test_a_configuration_with_mistakes_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[daemon]\nsocket = 7\n")
    assert main(["rescue", "--config", str(config)]) == 2
    assert "socket" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every journal")
def test_another_users_journal_is_not_permitted(state: Path) -> None:
    state.chmod(0)
    try:
        assert rescue(state) == 4
    finally:
        state.chmod(0o700)
