"""Jobs leave their devices and come back once before anybody else depends on it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from alternating import STATE_MIB
from harness import LIMIT_S, MIB, REPOSITORY, Host, MakeHost, Rank, own, until

#: Jobs come back once before they first make room, as they do unless it is turned off.
QUALIFIES = True
CYCLE = ["freeze", "snapshot", "restore", "thaw"]


@pytest.fixture
def first(make_host: MakeHost) -> tuple[Host, Rank]:
    """A host, and a job with state on its device."""
    host = make_host()
    return host, host.trainer("a", mib=STATE_MIB, seed=1)


def qualify(host: Host, job: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Runs the command, as an operator does."""
    command = [sys.executable, "-m", "tsliced.ctl", "qualify", job, *more]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def shown(host: Host, job: str) -> dict[str, Any]:
    with host.connection() as connection:
        answer = connection.request({"t": "show", "kind": "job", "name": job}, LIMIT_S)
    qualification: dict[str, Any] = answer["shown"]["qualification"]
    return qualification


def test_the_first_that_makes_room_comes_back_once_and_others_of_its_kind_need_not_g12(
    first: tuple[Host, Rank],
) -> None:
    host, rank = first
    digest = rank.do("digest")
    other = host.rank("b")
    other.do("initialise", group="g1", mib=STATE_MIB, seed=2)
    assert [each["verb"] for each in host.operations()] == [*CYCLE, "freeze", "snapshot"]
    (event,) = host.events("qualified")
    assert event["job"] == own("a")
    found = shown(host, "a")
    assert found["state"] == "qualified"
    (measured,) = found["ranks"]
    assert measured["before_bytes"] >= STATE_MIB * MIB
    assert measured["back_bytes"] == measured["before_bytes"]
    assert measured["out_s"] > 0
    assert measured["in_s"] > 0
    # The next one runs the same program, as the same user: it is known how that goes.
    since = host.events()[-1]["seq"]
    rank.do("acquire", groups="g1", timeout=30)
    assert rank.do("digest") == digest
    moved = [each["verb"] for each in host.operations(since=since) if each["job"] == own("b")]
    assert moved == ["freeze", "snapshot"]
    assert shown(host, "b")["state"] == "known"
    # So it is after a restart.
    host.kill_daemon()
    host.start_daemon()
    rank.do("release")
    other.do("acquire", groups="g1", timeout=30)
    assert len(host.events("qualified")) == 1


def test_a_job_that_shares_with_nobody_is_never_moved_for_it_g7(first: tuple[Host, Rank]) -> None:
    host, rank = first
    rank.do("train", groups=["g1"], turns=50)
    assert host.operations() == []
    assert shown(host, "a")["state"] == "unknown"


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore"])
def test_a_job_that_cannot_qualify_is_in_nobodys_way_or_keeps_its_devices_g11(
    first: tuple[Host, Rank], step: str
) -> None:
    host, rank = first
    other = host.rank("b")
    host.fault(f"{step} {rank.pid} * error:801")
    waiting = other.start("acquire", groups="g1", timeout=60)
    kind = "faulted" if step == "restore" else "pinned"
    (event,) = until(lambda: host.events(kind), "it is told")
    assert event["job"] == own("a")
    assert "801" in event["reason"]
    found = shown(host, "a")
    assert found["state"] == "failed"
    assert "801" in found["reason"]
    if step == "restore":
        waiting.wait()
        assert host.states()[rank.pid] == "parked", "it is its own trouble alone"
    else:
        assert host.states() == {rank.pid: "running"}
        assert rank.do("digest")


def test_a_job_of_a_kind_that_could_not_come_back_stays_where_it_is_g11(
    first: tuple[Host, Rank],
) -> None:
    host, rank = first
    host.fault(f"restore {rank.pid} * error:801")
    other = host.rank("b")
    other.do("initialise", group="g1", mib=STATE_MIB, seed=2)
    (faulted,) = host.events("faulted")
    assert faulted["job"] == own("a")
    # The next job of the same program is not even frozen, so it does not get lost as well.
    digest = other.do("digest")
    third = host.rank("c")
    waiting = third.start("acquire", groups="g1", timeout=60)
    (pinned,) = until(lambda: host.events("pinned"), "it is told")
    assert pinned["job"] == own("b")
    assert "another one of its kind left its devices and could not come back" in pinned["reason"]
    assert "801" in pinned["reason"]
    assert shown(host, "b")["state"] == "failed"
    verbs = [each["verb"] for each in host.operations() if each["job"] == own("b")]
    assert verbs == ["freeze"]
    assert host.states()[other.pid] == "running"
    # So it is after a restart, until somebody has seen one that does come back.
    host.kill_daemon()
    host.start_daemon()
    until(lambda: other.pid in host.states(), "it is known")
    assert other.do("digest") == digest
    host.fault()
    command = [sys.executable, "-m", "tsliced.ctl", "clear", "b"]
    subprocess.run(command, cwd=REPOSITORY, env=host.variables(), timeout=LIMIT_S, check=True)
    until(lambda: len(host.events("pinned")) == 2, "it is refused again")
    tried = qualify(host, "b")
    assert "stands still" in tried.stderr
    third.kill()
    subprocess.run(command, cwd=REPOSITORY, env=host.variables(), timeout=LIMIT_S, check=True)
    done = qualify(host, "b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert other.do("digest") == digest
    waits = host.rank("d")
    waits.do("acquire", groups="g1", timeout=30)
    assert host.states()[other.pid] == "parked"
    del waiting


def test_what_a_move_took_is_what_the_next_one_of_its_kind_is_expected_to_take(
    first: tuple[Host, Rank],
) -> None:
    host, rank = first
    other = host.rank("b")
    other.do("initialise", group="g1", mib=STATE_MIB, seed=2)
    (took,) = shown(host, "a")["ranks"]
    until(lambda: shown(host, "b")["state"] == "known", "it is seen")
    expected = shown(host, "b")
    assert expected["switch_s"] >= took["out_s"] + took["in_s"]
    (measured,) = expected["ranks"]
    assert (measured["out_s"], measured["in_s"]) == (took["out_s"], took["in_s"])
    # From its own first trip on its own counts.
    rank.do("acquire", groups="g1", timeout=30)
    rank.do("release")
    other.do("acquire", groups="g1", timeout=30)
    (own_trip,) = shown(host, "b")["ranks"]
    assert (own_trip["out_s"], own_trip["in_s"]) != (took["out_s"], took["in_s"])


def test_an_operator_has_an_idle_job_qualify_and_sees_what_it_takes(make_host: MakeHost) -> None:
    host = make_host()
    rank = host.trainer("a", mib=STATE_MIB, seed=1)
    until(lambda: host.states(), "it is known")
    digest = rank.do("digest")
    done = qualify(host, "a")
    assert done.returncode == 0, done.stderr
    assert "it left its devices and came back" in done.stdout
    assert f"{STATE_MIB + 2}.0 MiB" in done.stdout
    assert "not known: " in done.stdout, "what cannot be seen is not called fine"
    assert rank.do("digest") == digest
    assert [each["verb"] for each in host.operations()] == CYCLE
    again = json.loads(qualify(host, "a", "--json").stdout)
    assert again["qualification"]["state"] == "qualified"
    host.fault(f"checkpoint {rank.pid} * error:801")
    failed = qualify(host, "a")
    assert failed.returncode == 1
    assert "it cannot share devices: " in failed.stdout
    assert "801" in failed.stdout
    assert rank.do("digest") == digest
    host.fault()
    rank.do("acquire", groups="g1", timeout=10)
    assert "holds a lease" in qualify(host, "a").stderr
    rank.do("release")
    other = host.rank("b")
    other.do("acquire", groups="g1", timeout=30)
    assert "is parked" in qualify(host, "a").stderr
    assert "no state on devices" in qualify(host, "b").stderr


def test_why_a_job_cannot_leave_is_told_with_what_helps(make_host: MakeHost) -> None:
    host = make_host()
    rank = host.rank("a", CUDA_MPS_PIPE_DIRECTORY="/nowhere")
    rank.do("initialise", group="g1", mib=4, seed=1)
    until(lambda: host.states(), "it is known")
    host.fault(f"checkpoint {rank.pid} * error:801")
    failed = qualify(host, "a")
    assert failed.returncode == 1
    assert "MPS" in failed.stdout
    assert "end MPS on this host" in failed.stdout
