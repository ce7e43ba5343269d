"""Jobs in containers: name spaces of their own, with the socket's directory and no more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HERE, Host, Rank, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make mounts")

GAMES = 5
INSIDE = "/run/tsliced/tsliced.sock"

#: $0: the host's directory; $1: options of the mount; then pairs of a directory that only root may
#: enter and one below it that is needed; and behind "--" what is to run.
CONTAINER = """
mount -t tmpfs none /mnt
mkdir /mnt/run /mnt/devices
mount --bind "$0"/run /mnt/run
mount --bind "$0"/devices /mnt/devices
mount -t tmpfs -o mode=755 none "$0"
mkdir "$0"/devices
mount --move /mnt/devices "$0"/devices
mount -t tmpfs -o mode=755 none /run
mkdir /run/tsliced
mount --move /mnt/run /run/tsliced
mount -o remount,"$1" /run/tsliced
shift
while [ "$1" != -- ]; do
    mkdir /mnt/needed
    mount --bind "$2" /mnt/needed
    mount -t tmpfs -o mode=755 none "$1"
    mkdir -p "$2"
    mount --move /mnt/needed "$2"
    shift 2
done
shift
exec "$@"
"""


def options_of_enroot() -> str:
    """Returns the options with which enroot is told to mount, those that the kernel knows."""
    lines = (HERE.parents[1] / "systemd/enroot/60-tsliced.fstab").read_text().splitlines()
    (line,) = (line for line in lines if not line.startswith("#"))
    source, target, kind, options = line.split()
    assert (source, target, kind) == (str(Path(INSIDE).parent), str(Path(INSIDE).parent), "none")
    own = ("x-create=dir", "nofail", "silent")
    return ",".join(option for option in options.split(",") if option not in own)


def hidden_from_users(*needed: str) -> Iterator[str]:
    """Yields, for each directory that is needed and below one that only root may enter, both."""
    for path in needed:
        for above in reversed(Path(path).parents):
            if not above.stat().st_mode & 0o001:
                yield from (str(above), path)
                break


class ContainerHost(Host):
    """A host whose socket lies alone in a directory, as it does in /run/tsliced."""

    def _prepare(self) -> None:
        run = self.directory / "run"
        run.mkdir()
        self.socket = run / "tsliced.sock"
        self._environment["TSLICE_SOCKET"] = str(self.socket)

    def contained(self, job: str) -> Rank:
        """Starts a rank of an ordinary user, who is root in a container."""
        for path in (self.directory / "devices").rglob("*"):
            path.chmod(path.stat().st_mode | 0o666)
        within = (
            *("unshare", "--mount", "--propagation", "private"),
            *("sh", "-ec", CONTAINER, str(self.directory), options_of_enroot()),
            *hidden_from_users(sys.base_prefix, str(HERE.parents[1])),
            *("--", "setpriv", f"--reuid={GAMES}", f"--regid={GAMES}", "--clear-groups"),
            *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"),
            *("--kill-child", "--mount-proc"),
        )
        return self.rank(job, within=within, TSLICE_SOCKET=INSIDE)


def pid_of(rank: Rank) -> int:
    """Returns the pid of a contained rank as the host has it."""
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


@pytest.fixture
def host(softcuda_build: Path) -> Iterator[ContainerHost]:
    host = ContainerHost(softcuda_build)
    host.start_daemon()
    yield host
    host.close()


def test_a_contained_job_is_known_by_the_pid_and_user_that_it_has_outside_g10(
    host: ContainerHost,
) -> None:
    rank = host.contained("boxed")
    assert rank.do("whoami") == {"pid": 1, "uid": 0}, "this is what it sees of itself"
    rank.do("acquire", groups="g1")
    rank.do("register")
    assert host.group()["holder"] == {"cluster": "", "uid": GAMES, "id": "boxed"}
    rank.do("context")
    rank.do("register")
    (known,) = host.ask("ps")["ranks"]
    assert known["pid"] == pid_of(rank)
    assert known["job"] == {"cluster": "", "uid": GAMES, "id": "boxed"}


def test_a_contained_rank_is_parked_and_comes_back_g12(host: ContainerHost) -> None:
    rank, other = host.contained("boxed"), host.rank("free")
    rank.do("initialise", group="g1", mib=40, seed=7)
    digest = rank.do("digest")
    other.do("initialise", group="g1", mib=40, seed=8)
    assert host.states()[pid_of(rank)] == "parked"
    assert rank.do("acquire", groups="g1", timeout=20)["restored"] is True
    assert rank.do("digest") == digest
    assert host.states()[other.pid] == "parked"


def test_a_contained_job_finds_the_next_daemon_g8(host: ContainerHost) -> None:
    rank = host.contained("boxed")
    held = rank.do("acquire", groups="g1")
    before = host.socket.stat().st_ino
    host.kill_daemon()
    host.start_daemon()
    assert host.socket.stat().st_ino != before, "it is another socket, in the same directory"
    assert rank.do("acquire", groups="g2")["state"] == "held"
    until(lambda: host.group()["holder"] is not None, "its client is back")
    assert host.group()["token"] == held["tokens"]["g1"]
    assert host.stop_daemon() == 0
    host.start_daemon()
    assert rank.do("look")["state"] in ("held", "uncertain")
    for _ in range(2):
        rank.do("release")
    until(lambda: [g["holder"] for g in host.status()["groups"]] == [None, None], "both are free")


def test_a_contained_job_that_dies_is_seen_to_be_dead_at_once_g3(host: ContainerHost) -> None:
    rank, other = host.contained("boxed"), host.rank("free")
    rank.do("acquire", groups="g1")
    asked = other.start("acquire", groups="g1", timeout=20)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    rank.kill()
    assert asked.wait()["state"] == "held"
