"""What operators type: ways out of what stands still, and groups that are closed and opened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from harness import LIMIT_S, Host, MakeHost, Rank, RankError, own, until

CTL = [sys.executable, "-m", "tsliced.ctl"]
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def ctl(host: Host, *arguments: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command; `typed` is what a person types at its terminal."""
    command = [*CTL, *arguments]
    if typed is not None:
        # script(1) gives it a terminal.
        command = ["script", "-qec", " ".join(command), "/dev/null"]
    return subprocess.run(
        command,
        env=host.variables(),
        input=typed or "",
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )


def told(host: Host, *arguments: str) -> dict[str, Any]:
    """Runs a command that must succeed, and returns its JSON document."""
    done = ctl(host, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def pinned(host: Host) -> tuple[Rank, Any]:
    """A job that cannot be moved off, and one that waits for its devices."""
    rank = host.trainer("a", mib=8)
    host.fault(f"checkpoint {rank.pid} * error:801")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    until(lambda: host.events("pinned"), "it is pinned")
    return rank, asked


# --- ways out -------------------------------------------------------------------------------------


def test_what_is_pinned_is_shown_with_its_way_out_and_goes_on_when_it_is_tried_again_g11(
    host: Host,
) -> None:
    rank, asked = pinned(host)
    shown = told(host, "show", "job", "a")["shown"]
    (stop,) = shown["standstills"]
    assert (stop["state"], stop["groups"], stop["pid"]) == ("pinned", ["g1"], rank.pid)
    assert "checkpoint" in stop["reason"]
    page = ctl(host, "show", "job", "a").stdout
    assert "PINNED on g1 for" in page
    assert f"pid {rank.pid}" in page
    assert f"tslicectl retry {os.getuid()}/a" in page
    # The waiter is told the same, and the event names rank and way out.
    (event,) = host.events("pinned")
    assert event["rank"] == f"n1:{rank.pid}"
    assert f"tslicectl kill {os.getuid()}/a" in event["way_out"]
    host.fault()
    assert "pinned on g1 is tried again" in ctl(host, "retry", "a").stdout
    assert asked.wait()["state"] == "held"
    assert told(host, "show", "job", "a")["shown"]["standstills"] == []


def test_a_pin_that_is_cleared_is_tried_by_who_waits_g11(host: Host) -> None:
    rank, asked = pinned(host)
    host.fault()
    (stood,) = told(host, "clear", "a")["stood"]
    assert (stood["state"], stood["cause"]) == ("pinned", "unsupported")
    assert asked.wait()["state"] == "held"
    assert host.states()[rank.pid] == "parked"
    # Nothing is left to clear, which is no error.
    again = ctl(host, "clear", "a")
    assert (again.returncode, again.stdout) == (0, "")
    assert "nothing held" in again.stderr


def test_a_rank_that_the_driver_gave_up_blocks_its_group_until_its_job_is_killed_g11(
    host: Host,
) -> None:
    rank = host.trainer("a", mib=8)
    rank.do("managed", mib=4)
    other = host.rank("c")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    group = until(lambda: (g := host.group())["state"] == "blocked" and g, "it is blocked")
    assert f"pid {rank.pid}" in group["reason"]
    assert f"tslicectl kill {os.getuid()}/a" in group["reason"]
    assert "for 0 s" in group["reason"] or "for 1 s" in group["reason"]
    # Its fault is its own: others are not refused.
    assert other.do("acquire", groups="g2", timeout=20)["state"] == "held"
    with pytest.raises(RankError, match="tslicectl kill") as refused:
        host.rank("a").do("acquire", groups="g1", timeout=5)
    assert refused.value.code == "blocked"
    done = told(host, "kill", "a", "--grace", "1")
    assert rank.pid in done["pids"]
    assert (done["left"], done["ended"]) == ([], True)
    assert rank.process.wait(LIMIT_S) in (-signal.SIGTERM, -signal.SIGKILL)
    assert asked.wait()["state"] == "held"
    assert host.job("a") == {}


def test_a_faulted_job_is_brought_back_by_a_retry_g11(host: Host) -> None:
    rank, other = host.trainer("a", mib=8), host.trainer("b", mib=8)
    until(lambda: host.states() == {rank.pid: "parked", other.pid: "running"}, "a is parked")
    digest_of_b = other.do("digest")
    host.fault(f"restore {rank.pid} * error:999")
    with pytest.raises(RankError, match=f"pid {rank.pid}"):
        rank.do("acquire", groups="g1", timeout=20)
    assert host.job("a")["state"] == "faulted"
    (event,) = host.events("faulted")
    assert "tslicectl clear" in event["way_out"]
    host.fault()
    (stood,) = told(host, "retry", "a")["stood"]
    assert (stood["state"], stood["pid"]) == ("faulted", rank.pid)
    assert rank.do("acquire", groups="g1", timeout=20)["state"] == "held"
    assert other.do("acquire", groups="g2", timeout=20)["state"] == "held"
    rank.do("release")
    other.do("release")
    assert other.do("acquire", groups="g1", timeout=20)["state"] == "held"
    assert other.do("digest") == digest_of_b


def test_a_parked_job_is_killed_at_once_and_its_host_memory_is_free_again(host: Host) -> None:
    rank, other = host.trainer("a", mib=8), host.trainer("b", mib=8)
    until(lambda: host.states() == {rank.pid: "parked", other.pid: "running"}, "a is parked")
    done = ctl(host, "kill", "a", "--grace", "600")
    assert done.returncode == 0, done.stderr
    assert f"have ended: {rank.pid}" in done.stdout
    assert rank.process.wait(LIMIT_S) == -signal.SIGKILL
    assert host.job("a") == {}
    assert ctl(host, "show", "job", "a").returncode == 3


def test_a_call_that_hangs_is_shown_as_stuck_and_ended_with_its_job_g11(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"limits": {"stuck_base_s": 0.3}})
    rank = host.trainer("a", mib=8)
    host.fault(f"checkpoint {rank.pid} * hang")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["state"] == "stuck", "the alarm goes off")
    (stop,) = told(host, "show", "group", "g1")["shown"]["standstills"]
    assert (stop["state"], stop["pid"], stop["job"]["id"]) == ("stuck", rank.pid, "a")
    assert f"tslicectl kill {os.getuid()}/a" in stop["way_out"]
    assert "STUCK on g1 for" in ctl(host, "show", "job", "a").stdout
    assert told(host, "kill", "a", "--grace", "0.5")["ended"]
    assert asked.wait()["state"] == "held"
    assert host.group()["state"] == "held"


def test_a_move_that_waits_says_every_while_for_whom_and_show_says_it_live(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"limits": {"barrier_report_s": 0.1}})
    rank = host.trainer("a", mib=8)
    host.fault(f"checkpoint {rank.pid} * hang")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)

    def reports() -> list[dict[str, Any]]:
        return [event for event in host.events("barrier") if event["step"] == "snapshotting"]

    first, second, *_ = until(lambda: (found := reports())[1:] and found, "it is said twice")
    assert (first["job"], first["groups"]) == (own("a"), "g1")
    assert f"n1 (pid {rank.pid} snapshot" in first["missing"]
    assert 0.1 <= first["seconds"] < second["seconds"]
    (tenancy,) = (
        t for t in told(host, "show", "group", "g1")["shown"]["tenancies"] if t["waiting"]
    )
    waiting = tenancy["waiting"]
    assert (tenancy["job"]["id"], waiting["step"]) == ("a", "snapshotting")
    (missing,) = waiting["missing"]
    (operation,) = missing["operations"]
    assert (missing["host"], missing["step"]) == ("n1", None)
    assert (operation["pid"], operation["verb"]) == (rank.pid, "snapshot")
    assert 0.1 <= operation["seconds"] <= waiting["waiting_s"]
    page = ctl(host, "show", "group", "g1").stdout
    assert f"for n1 (pid {rank.pid} snapshot" in page
    assert told(host, "kill", "a", "--grace", "0.1")["ended"]
    assert asked.wait()["state"] == "held"
    assert told(host, "show", "group", "g1")["shown"]["tenancies"][0]["waiting"] is None
    assert " waits since " not in ctl(host, "show", "group", "g1").stdout


def test_a_kill_is_asked_about_on_a_terminal(host: Host) -> None:
    rank = host.trainer("a", mib=8)
    refused = ctl(host, "kill", "a", typed="n\n")
    assert f"End 1 processes of {os.getuid()}/a ({rank.pid})? [y/N]" in refused.stdout
    assert refused.returncode == 1
    assert rank.process.poll() is None
    assert ctl(host, "kill", "a", typed="y\n").returncode == 0
    rank.process.wait(LIMIT_S)


def test_a_process_that_ignores_its_end_is_killed_after_the_grace(host: Host) -> None:
    rank = host.trainer("a", mib=8)
    # Stopped, it cannot heed SIGTERM.
    rank.stop()
    assert told(host, "kill", "a", "--grace", "0.5")["ended"]
    assert rank.process.wait(LIMIT_S) in (-signal.SIGTERM, -signal.SIGKILL)
    (event,) = host.events("ending")
    assert event["reason"] in ("root wants it", f"uid {os.getuid()} wants it")


def test_what_is_not_there_is_said_with_what_is(host: Host) -> None:
    for arguments, code, text in (
        (("show", "job", "none"), 3, "no job 'none'"),
        (("kill", "none", "--yes"), 3, "no job 'none'"),
        (("show", "group", "g9"), 3, "there are: g1, g2"),
        (("show", "device", "9"), 3, "there are: 0 (GPU-"),
        (("show", "session", "x"), 3, "no session 'x'"),
        (("show", "lease", "x"), 3, "no lease 'x'"),
        (("drain", "--group", "g9"), 3, "there are: g1, g2"),
        (("drain", "--group", "g1", "--device", "0"), 2, "not both"),
        (("show", "planet", "x"), 2, "invalid choice"),
    ):
        done = ctl(host, *arguments)
        assert done.returncode == code, (arguments, done)
        assert text in done.stderr


def test_one_thing_is_shown_with_all_that_belongs_to_it(host: Host) -> None:
    rank = host.rank("a")
    rank.do("acquire", groups="g1", phase="rollout")
    rank.do("context")
    rank.do("fill", mib=8)
    until(lambda: host.states() == {rank.pid: "running"}, "its rank is seen")
    (lease,) = told(host, "show", "job", "a")["shown"]["leases"]
    shown = told(host, "show", "lease", lease["lease"])["shown"]
    assert (shown["state"], shown["groups"], shown["phase"]) == ("held", ["g1"], "rollout")
    assert shown["tokens"] == {"g1": host.group()["token"]}
    session = told(host, "show", "session", shown["session"])["shown"]
    assert (session["pid"], session["connected"]) == (rank.pid, True)
    assert [entry["lease"] for entry in session["leases"]] == [lease["lease"]]
    device = told(host, "show", "device", "0")["shown"]
    assert [entry["pid"] for entry in device["rank_list"]] == [rank.pid]
    assert device["group"]["holder"]["id"] == "a"
    assert told(host, "show", "device", device["uuid"])["shown"]["index"] == 0
    for kind, name in (
        ("lease", lease["lease"]),
        ("session", shown["session"]),
        ("device", "0"),
        ("group", "g1"),
        ("job", f"{os.getuid()}/a"),
    ):
        page = ctl(host, "show", kind, name)
        assert page.returncode == 0, page.stderr
        assert page.stdout.startswith(f"{kind} ")
        assert "g1" in page.stdout


@needs_root
def test_users_have_their_own_jobs_ended_and_no_others_g10(host: Host) -> None:
    rank = host.trainer("a", mib=8)
    user = host.rank("u")
    user.do("become", uid=NOBODY)
    hello = {"role": "tool", "job": "any"}
    for name, fields in (
        ("retry", {"job": "0/a"}),
        ("clear", {"job": "a"}),
        ("kill", {"job": "a"}),
        ("drain", {"groups": ["g1"]}),
        ("undrain", {}),
        ("host_dead", {"host": "n2"}),
    ):
        with pytest.raises(RankError) as refused:
            user.do("ask", name=name, hello=hello, **fields)
        assert refused.value.code == "not_permitted", name
    assert rank.process.poll() is None
    assert host.group()["drain"] is None
    # The same id of another user is another job, and one's own comes first.
    own = host.rank("own")
    own.do("become", uid=NOBODY)
    own.do("ask", name="acquire", hello={"job": "a", "role": "client"}, groups=["g2"])
    answer = user.do("ask", name="clear", hello=hello, job="a")
    assert answer["stood"] == []


def test_what_is_wrong_with_devices_is_on_the_first_screen(make_host: MakeHost) -> None:
    host = make_host(SOFTCUDA_PERSISTENCE="0")
    screen = ctl(host, "status").stdout
    assert "device 0-1: persistence mode is off" in screen
    assert "device 1: persistence mode is off" in ctl(host, "show", "device", "1").stdout
    host.fault("nvml:0 * * error:15")
    until(lambda: host.group()["state"] == "lost", "it is seen", limit_s=10)
    screen = ctl(host, "status").stdout
    assert "g1 is lost: " in screen
    assert "device 0: " in screen
    assert "GPU is lost" in screen
    assert "GPU is lost" in ctl(host, "show", "device", "0").stdout
    host.fault()
    until(lambda: host.group()["state"] == "free", "it is back", limit_s=30)


# --- drains ---------------------------------------------------------------------------------------


def test_a_drained_group_lets_its_holder_end_and_nobody_in_until_it_is_resumed(
    host: Host,
) -> None:
    holder, waiter = host.rank("a"), host.rank("b")
    holder.do("acquire", groups="g1")
    drained = ctl(host, "drain", "--group", "g1", "--reason", "new driver")
    assert drained.returncode == 0, drained.stderr
    assert "g1 is draining; a holds it for" in drained.stdout
    asked = waiter.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    assert holder.do("look")["state"] == "held"
    holder.do("release")
    group = until(lambda: (g := host.group())["state"] == "drained" and g, "nobody is on it")
    assert "new driver" in group["reason"]
    assert group["drain"]["since_s"] < 600
    assert not asked.is_over()
    with pytest.raises(RankError, match=r"drained by .*new driver"):
        host.rank("c").do("acquire", groups="g1", timeout=0.2)
    assert host.rank("d").do("acquire", groups="g2", timeout=20)["state"] == "held"
    assert [e["kind"] for e in host.events("drained")] == ["drained"]
    assert told(host, "resume", "--group", "g1")["groups"][0]["drain"] is None
    assert asked.wait()["state"] == "held"


def test_a_drain_outlives_the_daemon_g8(host: Host) -> None:
    ctl(host, "drain")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    host.kill_daemon()
    host.start_daemon()
    assert [g["state"] for g in host.status()["groups"]] == ["drained", "drained"]
    until(lambda: host.group()["waiters"] == 1, "it waits still")
    assert not asked.is_over()
    assert ctl(host, "resume").returncode == 0
    assert asked.wait()["state"] == "held"


def test_a_device_is_drained_with_all_that_is_on_it_parked_and_comes_back_whole(
    host: Host,
) -> None:
    rank = host.trainer("a", mib=8)
    digest = rank.do("digest")
    rank.do("acquire", groups="g1")
    draining = ctl(host, "drain", "--device", "0", "--wait", "--timeout", "0.5")
    assert draining.returncode == 75, draining.stdout
    rank.do("release")
    drained = ctl(host, "drain", "--device", "0", "--wait", "--timeout", "20")
    assert drained.returncode == 0, drained.stderr
    assert f"pid {rank.pid}: parked" in drained.stdout
    assert "still have the driver open" in drained.stderr
    assert host.used_bytes() == 0
    assert host.group("g2")["state"] == "free", "only the device's own group"
    asked = rank.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    ctl(host, "resume", "--device", "0")
    assert asked.wait()["state"] == "held"
    assert rank.do("digest") == digest


def test_what_cannot_be_parked_is_named_when_its_device_is_drained_g11(make_host: MakeHost) -> None:
    host = make_host()
    rank = host.trainer("a", mib=8)
    host.fault(f"checkpoint {rank.pid} * error:801")
    ctl(host, "drain", "--device", "0")
    until(lambda: host.events("pinned"), "it is pinned")
    shown = ctl(host, "drain", "--device", "0", "--wait", "--timeout", "0.3")
    assert shown.returncode == 75
    assert "a is pinned" in shown.stdout
    assert "way out: " in shown.stdout
    rank.kill()
    assert ctl(host, "drain", "--device", "0", "--wait", "--timeout", "20").returncode == 0


# --- what only root can try -----------------------------------------------------------------------


def as_user(host: Host, uid: int) -> Rank:
    user = host.rank(f"user-{uid}")
    user.do("become", uid=uid)
    return user


@needs_root
def test_members_of_the_admin_group_are_operators_g10(make_host: MakeHost) -> None:
    host = make_host(settings={"daemon": {"admin_group": "nogroup"}})
    rank = host.trainer("a", mib=8)
    member, other = as_user(host, NOBODY), as_user(host, NOBODY - 1)
    with pytest.raises(RankError) as refused:
        other.do("ask", name="drain", hello={"role": "tool"}, groups=["g1"])
    assert refused.value.code == "not_permitted"
    member.do("ask", name="drain", hello={"role": "tool"}, groups=["g1"])
    assert host.group()["drain"]["by"] == f"uid {NOBODY}"
    answer = member.do("ask", name="kill", hello={"role": "tool"}, job="0/a", grace_s=1)
    assert answer["pids"] == [rank.pid]
    rank.process.wait(LIMIT_S)


@needs_root
def test_of_several_jobs_with_one_id_the_operator_says_which(host: Host) -> None:
    for uid in (NOBODY, NOBODY - 1):
        user = host.rank("same", told=True)
        user.do("become", uid=uid)
        user.do("register")
    done = ctl(host, "show", "job", "same")
    assert done.returncode == 2
    assert f"{NOBODY}/same" in done.stderr
    assert f"{NOBODY - 1}/same" in done.stderr
    assert told(host, "show", "job", f"{NOBODY}/same")["shown"]["job"]["uid"] == NOBODY
