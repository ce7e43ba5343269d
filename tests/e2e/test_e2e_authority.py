"""Users among each other (G10): what one of them cannot do to another, with real users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Host, MakeHost, Rank, RankError, until
from raw_client import RawClient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

#: Of Debian; each has a Unix group of its own name.
DAEMON, GAMES, NOBODY = 1, 5, 65534
DEVICES = Path("/sys/fs/cgroup/devices")


def rank_of(host: Host, uid: int, job: str = "") -> Rank:
    """Starts a process of a user."""
    rank = host.rank(job)
    rank.do("become", uid=uid)
    return rank


@pytest.fixture(scope="module")
def host(softcuda_build: Path) -> Iterator[Host]:
    """A host for all tests here; uid 1 is one of its administrators."""
    host = Host(softcuda_build, settings={"daemon": {"admin_group": "daemon"}})
    host.start_daemon()
    yield host
    host.close()


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(host: Host) -> Iterator[None]:
    yield
    if host.daemon is not None:
        host.close_ranks()
        until(lambda: all(group["holder"] is None for group in host.status()["groups"]), "free")


def test_equal_jobs_of_two_users_never_meet_g10(host: Host) -> None:
    mine, theirs = rank_of(host, GAMES, "exp"), rank_of(host, NOBODY, "exp")
    mine.do("acquire", groups="g1")
    with pytest.raises(RankError, match="not granted") as caught:
        theirs.do("acquire", groups="g1", timeout=0.2)
    assert caught.value.code == "timeout"
    asked = theirs.start("acquire", groups="g1", timeout=20)
    until(lambda: host.group()["waiters"] == 1, "it waits, as for any other job")
    assert host.group()["holder"]["uid"] == GAMES
    mine.do("release")
    assert asked.wait()["state"] == "held"
    assert host.group()["holder"] == {"cluster": "", "uid": NOBODY, "id": "exp"}


def test_equal_slurm_ids_of_two_users_never_meet_either_g10(host: Host) -> None:
    mine, theirs = rank_of(host, GAMES), rank_of(host, NOBODY)
    jobs = [
        rank.do("ask", name="ping", hello={"job": "4711", "uid": None})["job"]
        for rank in (mine, theirs)
    ]
    assert jobs == [{"cluster": "", "uid": uid, "id": "4711"} for uid in (GAMES, NOBODY)]


def test_a_lease_of_another_user_cannot_be_released_g10(host: Host) -> None:
    holder, thief = rank_of(host, GAMES, "exp"), rank_of(host, NOBODY, "exp")
    holder.do("acquire", groups="g1")
    lease = holder.do("lease_id")
    with pytest.raises(RankError) as caught:
        thief.do("ask", name="release", hello={"job": "exp"}, lease=lease)
    assert caught.value.code == "unknown_lease"
    assert holder.do("look")["state"] == "held"
    assert host.group()["holder"]["uid"] == GAMES


def test_a_session_cannot_be_taken_over_by_another_user_g10(host: Host) -> None:
    thief = rank_of(host, NOBODY)
    with RawClient(host.socket) as owner:
        welcome = owner.hello(job="mine")
        owner.ask("acquire", groups=["g1"])
        answer = thief.do("resume", session=welcome["session"], secret=welcome["secret"].hex())
        assert answer == {"resumed": False, "leases": []}
        assert owner.ask("ping"), "and its owner is still connected"
        owner.send({"t": "bye"})


@pytest.mark.parametrize("request_", ["register", "attach"])
def test_a_process_of_another_user_cannot_be_named_g10(host: Host, request_: str) -> None:
    mine, thief = rank_of(host, GAMES, "exp"), rank_of(host, NOBODY, "exp")
    with pytest.raises(RankError, match=f"belongs to uid {GAMES}, not to uid {NOBODY}") as caught:
        thief.do("ask", name=request_, hello={}, pid=mine.pid)
    assert caught.value.code == "not_permitted"


def test_nobody_acts_for_another_user_but_administrators_g10(host: Host) -> None:
    theirs = {"uid": GAMES, "job": "exp"}
    with pytest.raises(RankError, match=f"may not act for uid {GAMES}") as caught:
        rank_of(host, NOBODY).do("ask", name="ping", hello=theirs)
    assert caught.value.code == "not_permitted"
    for uid in (0, DAEMON):
        answer = rank_of(host, uid).do("ask", name="ping", hello=theirs)
        assert answer["job"] == {"cluster": "", "uid": GAMES, "id": "exp"}


def test_an_administrator_puts_a_process_into_a_job_of_its_own_user_only_g10(host: Host) -> None:
    mine, admin = rank_of(host, GAMES, "exp"), rank_of(host, DAEMON)
    with pytest.raises(RankError, match=f"say hello for uid {GAMES}") as caught:
        admin.do("ask", name="register", hello={"job": "exp"}, pid=mine.pid)
    assert caught.value.code == "not_permitted"
    hello = {"job": "exp", "uid": GAMES}
    assert admin.do("ask", name="register", hello=hello, pid=mine.pid)["rank"]["pid"] == mine.pid


def test_what_a_process_of_two_users_may_do_its_client_user_must_be_allowed_g10(
    host: Host,
) -> None:
    both = host.rank("exp")
    both.do("become_effective", uid=NOBODY)
    with pytest.raises(RankError, match=f"uid {NOBODY} may not act for uid 0") as caught:
        both.do("ask", name="ping", hello={})
    assert caught.value.code == "not_permitted"


# --- lists


def test_a_group_is_leased_by_those_whom_it_lists_g10(make_host: MakeHost) -> None:
    host = make_host(
        settings={
            "groups.g1": {"devices": ["0"], "users": ["games", "4711"]},
            "groups.g2": {"devices": ["1"], "users": ["@nogroup", "@no-such-group"]},
        }
    )
    may = {
        uid: rank_of(host, uid).do("ask", name="ping", hello={})["groups"]
        for uid in (0, DAEMON, GAMES, NOBODY, 4711)
    }
    assert may == {0: ["g1", "g2"], DAEMON: [], GAMES: ["g1"], NOBODY: ["g2"], 4711: ["g1"]}
    games = rank_of(host, GAMES, "exp")
    with pytest.raises(RankError, match="may not lease group 'g2'") as caught:
        games.do("acquire", groups="g2")
    assert caught.value.code == "not_permitted"
    assert games.do("acquire")["groups"] == ["g1"], "all that it may lease"


# --- the cgroup of the process

#: A /dev of its own for the daemon, where the devices have files.
WITH_DEVICE_FILES = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-ec"),
    'here="$0"; mount -t tmpfs none "$here"; mkdir "$here"/up "$here"/work "$here"/shm\n'
    'mount --bind /dev/shm "$here"/shm\n'
    'mount -t overlay none -o lowerdir=/dev,upperdir="$here"/up,workdir="$here"/work /dev\n'
    'mount --move "$here"/shm /dev/shm\n'
    "for n in 0 1; do [ -e /dev/nvidia$n ] || mknod -m 666 /dev/nvidia$n c 195 $n; done\n"
    'exec "$@"',
)


@pytest.mark.skipif(
    not (DEVICES / "devices.list").exists(), reason="needs version 1 of the devices cgroup"
)
def test_a_job_leases_only_groups_whose_devices_its_cgroup_lets_it_open_g10(
    make_host: MakeHost, tmp_path: Path
) -> None:
    host = make_host(launcher=(*WITH_DEVICE_FILES, str(tmp_path)))
    confined = DEVICES / f"tsliced-test-{os.getpid()}"
    confined.mkdir()
    try:
        (confined / "devices.deny").write_text("c 195:0 rwm")
        rank, free = host.rank("confined"), host.rank("free")
        (confined / "cgroup.procs").write_text(str(rank.pid))
        for uid in (0, GAMES):
            rank.do("become", uid=uid)
            assert rank.do("ask", name="ping", hello={})["groups"] == ["g2"], f"uid {uid}"
        with pytest.raises(RankError, match="cgroup") as caught:
            rank.do("acquire", groups="g1")
        assert caught.value.code == "not_permitted"
        assert rank.do("acquire")["groups"] == ["g2"]
        assert free.do("ask", name="ping", hello={})["groups"] == ["g1", "g2"]
    finally:
        host.close_ranks()
        until(lambda: not (confined / "cgroup.procs").read_text(), "it is empty")
        confined.rmdir()


# --- how much of everything


def test_each_user_has_limits_and_one_who_reaches_them_is_told_which_g9(
    make_host: MakeHost,
) -> None:
    host = make_host(
        settings={
            "limits": {
                "max_sessions_per_uid": 3,
                "max_pending_requests_per_uid": 4,
                "max_leases_per_uid": 6,
            }
        }
    )
    holder = host.rank("holder")
    holder.do("acquire", groups="g1")
    mine, other = rank_of(host, GAMES, "mine"), rank_of(host, NOBODY, "other")
    said = mine.do("throng", sessions=4, requests=2)
    assert said == {
        "refused sessions": [
            f"uid {GAMES} has 3 sessions, which is the limit max_sessions_per_uid"
        ],
        "refused requests": [
            f"4 requests of uid {GAMES} wait for an answer already, "
            "which is the limit max_pending_requests_per_uid"
        ]
        * 2,
    }
    assert other.do("throng", sessions=1, requests=1) == {
        "refused sessions": [],
        "refused requests": [],
    }
    until(lambda: host.group()["waiters"] == 0, "their sessions are over")
    assert mine.do("throng", sessions=2, requests=2)["refused requests"] == []
