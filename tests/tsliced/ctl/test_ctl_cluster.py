"""`tslicectl cluster`: what it makes, what it does not write over, and what it finds wrong."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import tomllib

from tsliced.ctl.__main__ import main
from tsliced.ctl.cluster import problem_of


def init(directory: Path, *more: str, hosts: str = "n1=10.0.0.1,n2") -> int:
    return main(["cluster", "init", "--hosts", hosts, "--dir", str(directory), *more])


def files_in(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def test_each_host_gets_its_certificate_and_its_key_and_the_authority_stays_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path) == 0
    own = {"peers.toml", "peers/ca.crt", "peers/host.crt", "peers/host.key"}
    assert files_in(tmp_path) == {
        "authority/ca.crt",
        "authority/ca.key",
        *(f"{host}/{name}" for host in ("n1", "n2") for name in own),
    }
    keys = {path.read_bytes() for path in tmp_path.rglob("*.key")}
    assert len(keys) == 3
    section = tomllib.loads((tmp_path / "n2" / "peers.toml").read_text())
    assert section == {"peers": {"auth": "tls", "hosts": ["n1=10.0.0.1", "n2"]}}
    printed = capsys.readouterr().out
    assert "/etc/tsliced/peers/" in printed
    assert "keep it off the hosts" in printed


def test_with_psk_all_hosts_get_one_key(tmp_path: Path) -> None:
    assert init(tmp_path, "--auth", "psk") == 0
    assert files_in(tmp_path) == {
        f"{host}/{name}" for host in ("n1", "n2") for name in ("peers.toml", "peers/secret")
    }
    secrets = {path.read_text() for path in tmp_path.rglob("secret")}
    assert len(secrets) == 1
    assert len(secrets.pop().strip()) == 64


@pytest.mark.parametrize("auth", ["tls", "psk"])
def test_nothing_that_it_makes_is_open_to_others(tmp_path: Path, auth: str) -> None:
    assert init(tmp_path / "new", "--auth", auth) == 0
    for path in (tmp_path / "new").rglob("*"):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


def test_what_is_there_is_written_over_by_force_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--auth", "psk") == 0
    before = (tmp_path / "n1" / "peers" / "secret").read_text()
    capsys.readouterr()
    assert init(tmp_path, "--auth", "psk", "--json") == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "exists"
    assert "--force" in error["message"]
    assert (tmp_path / "n1" / "peers" / "secret").read_text() == before
    assert init(tmp_path, "--auth", "psk", "--force") == 0
    assert (tmp_path / "n1" / "peers" / "secret").read_text() != before


def test_without_openssl_it_says_what_to_do_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert init(tmp_path / "new") == 1
    assert "apt-get install openssl" in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert init(tmp_path / "file" / "x") == 1
    assert "Not a directory" in capsys.readouterr().err


def test_init_needs_hosts_and_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "init"]) == 2
    assert "--hosts n1,n2 --dir DIR" in capsys.readouterr().err


CONNECTED = {"state": "connected", "since_s": 3.0, "reason": None, "clock_ahead_s": None}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"clock_ahead_s": -0.9}, None),
        ({"clock_ahead_s": 2.04}, "its clock is 2.0 s ahead: see NTP"),
        ({"clock_ahead_s": -65.0}, "its clock is 65.0 s behind: see NTP"),
        ({"state": "lost", "reason": "no route"}, "lost for 3.00s: no route"),
        ({"state": "suspect"}, "suspect for 3.00s: no reason"),
    ],
)
def test_a_link_is_good_if_it_is_there_and_clocks_agree(
    change: dict[str, object], problem: str | None
) -> None:
    assert problem_of({**CONNECTED, **change}) == problem


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("n1", "two hosts or more"),
        ("n1,n1=10.0.0.1", "n1 is named twice"),
        ("n1,n/2", "'n/2' names no host"),
        ("n1,authority", "no host can be called authority"),
    ],
)
def test_hosts_that_make_no_sense_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: str, text: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        init(tmp_path, hosts=hosts)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_with_munge_there_is_nothing_to_make_but_the_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--auth", "munge") == 0
    assert files_in(tmp_path) == {"n1/peers.toml", "n2/peers.toml"}
    assert "copy its peers.toml to /etc/tsliced/tsliced.toml.d" in capsys.readouterr().out
