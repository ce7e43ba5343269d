"""`tsliced --user`: a daemon with the rights of one user, inside of what that user was given."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import DEFAULTS, Host, Settings, until, write_toml

from libtimeslice.environment import DEFAULT_SOCKET

pytestmark = pytest.mark.skipif(
    os.path.exists(DEFAULT_SOCKET), reason="the daemon of this machine would be found instead"
)

#: Of Debian, with a home directory where this user may write nothing.
GAMES = 5


def as_user() -> tuple[str, ...]:
    """Returns the command that makes a process of an ordinary user, if this one is root's."""
    if os.geteuid() != 0:
        return ()
    # The interpreter may lie where only root may read, and that is all that is kept of root.
    return (
        *("setpriv", f"--reuid={GAMES}", f"--regid={GAMES}", "--clear-groups"),
        *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
        *("--bounding-set=-all,+dac_read_search", "--"),
    )


class UserHost(Host):
    """A host on which everything runs as an ordinary user, who knows of no daemon but this one."""

    def __init__(self, softcuda: Path) -> None:
        super().__init__(softcuda, user=as_user(), CUDA_VISIBLE_DEVICES="1")

    def _prepare(self) -> None:
        home, run = self.directory / "home", self.directory / "run"
        self.config = home / ".config" / "tsliced" / "tsliced.toml"
        self.config.parent.mkdir(parents=True)
        run.mkdir(mode=0o700)
        # As a batch job has it, which is no login: there is nothing that says where.
        self.socket = run / "tsliced" / "tsliced.sock"
        self._environment |= {"HOME": str(home), "XDG_RUNTIME_DIR": str(run)}
        del self._environment["TSLICE_SOCKET"]
        for path in (self.directory, *self.directory.rglob("*")):
            if self.user:
                os.chown(path, GAMES, GAMES)

    def write_config(self, path: Path, settings: Settings) -> Path:
        """Writes what this machine needs, and nothing that `--user` is to find for itself."""
        sections = {k: v for k, v in DEFAULTS.items() if not k.startswith("groups.")}
        libraries = {
            "nvml_library": str(self._softcuda / "libnvidia-ml.so.1"),
            "cuda_library": str(self._softcuda / "libcuda.so.1"),
        }
        write_toml(path, {**sections, "daemon": {"host": "n1", **libraries}})
        return path

    def arguments(self) -> list[str]:
        return ["--user"]

    @property
    def state(self) -> Path:
        """Where the daemon's state must lie."""
        return self.directory / "home" / ".local" / "state" / "tsliced" / os.uname().nodename


@pytest.fixture
def host(softcuda_build: Path) -> Iterator[UserHost]:
    host = UserHost(softcuda_build)
    host.start_daemon()
    yield host
    host.close()


def test_it_says_where_it_listens_and_its_user_s_jobs_find_it(host: UserHost) -> None:
    told = host.log.read_text().splitlines()
    assert f"export TSLICE_SOCKET={shlex.quote(str(host.socket))}" in told
    uid = GAMES if host.user else os.getuid()
    assert host.socket.stat().st_uid == uid
    assert (host.state / "workers").is_dir()
    rank = host.rank("a")
    assert rank.do("acquire")["groups"] == ["n1"]
    assert host.group("n1")["holder"] == {"cluster": "", "uid": uid, "id": "a"}
    listed = subprocess.run(
        [*host.user, sys.executable, "-m", "tsliced.ctl", "status", "--json"],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert '"n1"' in listed.stdout


def test_it_serves_the_devices_that_its_user_was_given(host: UserHost) -> None:
    (group,) = host.status()["groups"]
    (device,) = group["devices"]
    assert device["index"] == 1


def test_jobs_of_its_user_take_turns_with_their_state_intact_g12(host: UserHost) -> None:
    first, second = host.rank("a"), host.rank("b")
    for seed, rank in enumerate((first, second)):
        rank.do("initialise", group="n1", mib=40, seed=seed)
    digest = second.do("digest")
    assert host.states()[first.pid] == "parked"
    first.do("acquire", timeout=20)
    assert host.states()[second.pid] == "parked"
    first.do("release")
    second.do("acquire", timeout=20)
    assert second.do("digest") == digest


def test_jobs_survive_its_restart_g8(host: UserHost) -> None:
    rank, other = host.trainer("a", mib=40, group="n1"), host.rank("b")
    held = other.do("acquire", groups="n1", timeout=20)
    assert host.states()[rank.pid] == "parked"
    host.kill_daemon()
    host.start_daemon()
    until(lambda: other.do("look")["state"] == "held", "it has its lease still")
    assert other.do("look")["tokens"] == held["tokens"]
    other.do("release")
    assert rank.do("acquire", groups="n1", timeout=20)["restored"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_nobody_else_is_served_but_root_g10(host: UserHost) -> None:
    assert host.ask("ping") == {"re": 1}, "root is"
    # As if the directory were open, which keeps them out as well.
    host.socket.parent.chmod(0o755)
    host.socket.parent.parent.chmod(0o755)
    host.socket.chmod(0o666)
    program = (
        "import os, sys; os.setresuid(65534, 65534, 65534)\n"
        "from raw_client import RawClient\n"
        "print(RawClient(sys.argv[1]).hello())"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import raw_client\n" + program, str(host.socket)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "not_permitted" in done.stdout
    assert "nobody but the user who runs it" in done.stdout


def test_a_second_one_is_not_started(host: UserHost) -> None:
    second = subprocess.run(
        [*host.user, sys.executable, "-m", "tsliced", "--user"],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode != 0
    assert second.stdout == ""
    assert str(host.state) in second.stderr, "it says whose state this is"
