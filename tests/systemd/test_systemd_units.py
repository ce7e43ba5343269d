"""The units as files, and what is installed, by systemd's own tools; no systemd has to run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
UNITS = ("tsliced.service", "tsliced.socket")
#: Tenths of what `systemd-analyze security` calls an exposure.
MOST_EXPOSED = 45

analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def run(*command: str | Path, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s)


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units as they are installed, with a program that is there."""
    for name in UNITS:
        text = (REPOSITORY / "systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace("@LIBDIR@/current/bin/tsliced", "/bin/true"))
    return [tmp_path / name for name in UNITS]


@analyze
def test_systemd_finds_nothing_wrong_with_the_units(units: list[Path]) -> None:
    checked = run("systemd-analyze", "verify", "--man=no", *units)
    assert checked.returncode == 0, checked.stderr
    assert "tsliced" not in checked.stderr, "it says nothing about them"


@analyze
def test_the_daemon_is_shut_in_as_far_as_the_devices_allow(units: list[Path]) -> None:
    flags = ("--offline=yes", f"--threshold={MOST_EXPOSED}", "--no-pager")
    checked = run("systemd-analyze", "security", *flags, units[0])
    assert checked.returncode == 0, checked.stdout
    assert "Overall exposure level" in checked.stdout


def settings(name: str) -> dict[str, str]:
    text = (REPOSITORY / "systemd" / name).read_text()
    return dict(re.findall(r"^([A-Za-z]+)=(.*)$", text, flags=re.MULTILINE))


def test_what_would_take_the_devices_or_others_processes_away_is_not_set() -> None:
    # ProtectClock= allows the clock's device, and by that no other.
    breaking = {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "PrivateUsers"}
    assert breaking.isdisjoint(settings("tsliced.service"))
    assert settings("tsliced.service").get("ProtectProc", "default") == "default"


def test_the_units_agree_with_the_defaults_of_the_configuration() -> None:
    from tsliced.config import DaemonSettings, ServerLimits
    from tsliced.net.listening import LISTENER_NAME, SOCKET_MODE

    service, sock = settings("tsliced.service"), settings("tsliced.socket")
    daemon = DaemonSettings()
    assert sock["ListenStream"] == daemon.socket
    assert sock["FileDescriptorName"] == LISTENER_NAME
    assert int(sock["SocketMode"], 8) == SOCKET_MODE
    limits = ServerLimits()
    assert int(service["FileDescriptorStoreMax"]) == limits.max_clients + limits.reserved_clients
    needed = limits.max_clients + limits.reserved_clients + limits.max_processes
    assert int(service["LimitNOFILE"]) > needed
    assert f"/var/lib/{service['StateDirectory']}" == daemon.state_dir


# --- make install ---------------------------------------------------------------------------------


def install(bundle: Path, target: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run(bundle / "install.sh", "--destdir", target, *flags)


needs_python = pytest.mark.skipif(
    not Path("/usr/bin/python3").exists(), reason="there is no /usr/bin/python3"
)


@needs_python
def test_it_is_installed_without_a_network_and_again_and_a_changed_configuration_stays(
    bundle: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    first = install(bundle, target)
    assert first.returncode == 0, first.stderr
    lib = target / "usr/local/lib"
    for path in ("systemd/system/tsliced.service", "systemd/system/tsliced.socket"):
        assert (lib / path).is_file()
    assert (
        "ExecStart=/usr/local/lib/tsliced/current/bin/tsliced\n"
        in (lib / "systemd/system/tsliced.service").read_text()
    )
    assert (lib / "sysusers.d/tsliced.conf").is_file()
    assert (lib / "tmpfiles.d/tsliced.conf").is_file()
    for program in ("tsliced", "tslicectl", "cuda-ckpt"):
        link = target / "usr/local/bin" / program
        assert link.resolve().is_file()
        assert str(target) not in link.read_text(), "it knows its place after the move"
    config = target / "etc/tsliced/tsliced.toml"
    sample = (bundle / "systemd/tsliced.toml").read_text()
    assert config.read_text() == sample

    environment = (lib / "tsliced/current").resolve()
    age = environment.stat().st_mtime_ns
    config.write_text("# mine\n")
    again = install(bundle, target)
    assert again.returncode == 0, again.stderr
    assert (lib / "tsliced/current").resolve() == environment
    assert environment.stat().st_mtime_ns == age, "nothing is made twice"
    assert config.read_text() == "# mine\n"
    assert (config.parent / "tsliced.toml.dist").read_text() == sample
    assert "is yours and stays" in again.stdout

    assert install(bundle, target, "--uninstall").returncode == 0
    left = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert left == ["etc/tsliced/tsliced.toml", "etc/tsliced/tsliced.toml.dist"]


@needs_python
def test_the_installed_files_are_good_for_systemds_own_tools(bundle: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-sysusers") is None:
        pytest.skip("systemd-sysusers is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root can make directories for other users")
    root = tmp_path / "root"
    assert install(bundle, root, "--prefix", "/usr").returncode == 0
    for name in ("passwd", "group"):
        (root / "etc" / name).write_text("")
    for tool in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        done = run(*tool, f"--root={root}", "tsliced.conf")
        assert done.returncode == 0, done.stderr
    assert (root / "etc/group").read_text().startswith("tsliced:")
    assert (root / "run/tsliced").is_dir()


def test_a_python_that_the_sandbox_would_hide_is_refused(bundle: Path, tmp_path: Path) -> None:
    hidden = Path("/root/.tsliced-test-python")
    try:
        hidden.symlink_to("/nowhere")
    except OSError:
        pytest.skip("only root can put a Python into root's home")
    hidden.unlink()
    hidden.write_text(f"#!/bin/sh\ncase $* in *base_executable*) echo {hidden} ;; esac\n")
    hidden.chmod(0o755)
    try:
        done = install(bundle, tmp_path, "--python", str(hidden))
    finally:
        hidden.unlink()
    assert done.returncode == 1
    assert "lies in a home directory" in done.stderr
    assert not list(tmp_path.iterdir())
