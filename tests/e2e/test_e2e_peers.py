"""Daemons of several hosts: links, who is let in, and what is seen when one is gone."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT_S, Host, MakeHost, Settings, own, until
from net_hosts import Cluster, at, ctl, linked_hosts, peer, wait_for


def linked(make_host: MakeHost, cluster: Cluster, **more: Any) -> tuple[Host, Host]:
    """Starts two hosts, with more settings than those of the cluster, and waits for their link."""
    n1 = make_host(settings={**cluster.settings("n1"), **more})
    n2 = make_host(settings={**cluster.settings("n2"), **more})
    wait_for(n1, "n2", "connected")
    wait_for(n2, "n1", "connected")
    return n1, n2


def refusals(host: Host, code: str) -> list[str]:
    """Returns the reasons of the refusals with a code that a host told of."""
    return [e["reason"] for e in host.events("peer_refused") if e["code"] == code]


def test_hosts_know_each_other_by_munge_and_refuse_whose_munged_has_another_key(
    make_host: MakeHost, make_munged: Callable[[], str], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "munge", "n1", "n2", "n3")
    place = make_munged()
    n1 = make_host(settings=cluster.settings("n1", munge_socket=place))
    n2 = make_host(settings=cluster.settings("n2", munge_socket=place))
    n3 = make_host(settings=cluster.settings("n3", munge_socket=make_munged()))
    wait_for(n1, "n2", "connected")
    wait_for(n2, "n1", "connected")
    for host in (n1, n2):
        until(lambda host=host: refusals(host, "auth"), "n3 is refused")  # type: ignore[misc]  # of a lambda
        assert refusals(host, "auth")[0] == "munge: Invalid credential"
    assert not n3.events("peer_up")
    assert n1.ask("status", host="n2")["status"]["host"] == "n2"


@pytest.mark.parametrize("auth", ["tls", "psk", "none"])
def test_a_host_that_dies_is_suspected_then_lost_and_known_when_it_is_back(
    make_host: MakeHost, tmp_path: Path, auth: str
) -> None:
    n1, n2 = linked(make_host, Cluster(tmp_path, auth, "n1", "n2"))
    before = peer(n1, "n2")
    until(lambda: peer(n1, "n2")["rtt_s"] is not None, "a ping is answered")
    ctl("cluster", "check", TSLICE_SOCKET=str(n1.socket))
    assert abs(peer(n1, "n2")["clock_ahead_s"]) < 5, "both have the clock of this machine"

    n2.kill_daemon()
    wait_for(n1, "n2", "suspect")
    lost = wait_for(n1, "n2", "lost")
    assert "nothing was heard of it for" in lost["reason"]
    n2.start_daemon()
    after = wait_for(n1, "n2", "connected")
    wait_for(n2, "n1", "connected")

    assert after["incarnation"] != before["incarnation"]
    kinds = [event["kind"] for event in n1.events("peer_up", "peer_suspect", "peer_lost")]
    assert kinds == ["peer_up", "peer_suspect", "peer_lost", "peer_up"]
    assert n1.events("peer_up")[-1]["restarted"] is True


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_hangs_is_lost_and_blames_nobody_when_it_goes_on(
    make_host: MakeHost, tmp_path: Path, stopped: int
) -> None:
    hosts = linked(make_host, Cluster(tmp_path, "psk", "n1", "n2"))
    names = ("n1", "n2")
    hung, other = hosts[stopped], hosts[1 - stopped]
    incarnation = peer(other, names[stopped])["incarnation"]
    assert hung.daemon is not None
    hung.daemon.send_signal(signal.SIGSTOP)
    try:
        wait_for(other, names[stopped], "lost")
    finally:
        hung.daemon.send_signal(signal.SIGCONT)
    assert wait_for(other, names[stopped], "connected")["incarnation"] == incarnation
    wait_for(hung, names[1 - stopped], "connected")
    assert not hung.events("peer_lost")


@pytest.mark.parametrize("auth", ["tls", "psk"])
def test_hosts_that_a_network_parts_lose_and_find_each_other_and_both_live_on(
    softcuda_build: Path, tmp_path: Path, auth: str
) -> None:
    with linked_hosts(softcuda_build, tmp_path, "n1", "n2", auth=auth) as hosts:
        sides = ((hosts["n1"], "n2"), (hosts["n2"], "n1"))
        before = [peer(host, other)["incarnation"] for host, other in sides]
        hosts.network.isolate("n1")
        for host, other in sides:
            assert wait_for(host, other, "lost")["reason"].startswith("nothing was heard of it for")
            assert host.group(host.name)["state"] == "free", "the host itself serves on"
        hosts.network.heal()
        after = [wait_for(host, other, "connected")["incarnation"] for host, other in sides]
        assert after == before
        for host, _ in sides:
            kinds = [event["kind"] for event in host.events("peer_up", "peer_suspect", "peer_lost")]
            assert kinds == ["peer_up", "peer_suspect", "peer_lost", "peer_up"]


def test_one_host_shows_the_state_of_all_and_says_of_whom_it_knows_nothing(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "tls", "n1", "n2", "n3")
    n1, n2 = linked(make_host, cluster)
    wait_for(n1, "n3", "lost")
    n2.trainer("job-of-n2")
    for host, other in ((n1, "n2"), (n2, "n1")):
        socket_path = str(host.socket)
        shown = json.loads(ctl("status", "--all", "--json", TSLICE_SOCKET=socket_path))
        by_name = {one["host"]: one for one in shown["hosts"]}
        assert by_name[other]["status"]["host"] == other
        assert by_name["n3"]["status"] is None
        assert by_name["n3"]["state"] in ("awaited", "lost")
        assert by_name["n3"]["reason"].startswith("n3 is ")
    jobs = n1.ask("status", host="n2")["status"]["jobs"]
    assert [job["job"]["id"] for job in jobs] == ["job-of-n2"]
    page = ctl("show", "host", "n2", TSLICE_SOCKET=str(n1.socket))
    assert f"incarnation  {peer(n1, 'n2')['incarnation']}" in page
    page = ctl("show", "host", "n3", TSLICE_SOCKET=str(n1.socket))
    assert re.search(r"^state +lost$", page, re.MULTILINE)
    ctl("show", "host", "n1", status=3, TSLICE_SOCKET=str(n1.socket))
    ctl("show", "host", "n4", status=3, TSLICE_SOCKET=str(n1.socket))
    text = ctl("status", "--all", TSLICE_SOCKET=str(n1.socket))
    assert "tsliced" in text
    assert "on n2, pid" in text
    assert "n3 is lost for" in text


def test_a_daemon_that_is_stopped_says_so(make_host: MakeHost, tmp_path: Path) -> None:
    n1, n2 = linked(make_host, Cluster(tmp_path, "tls", "n1", "n2"))
    assert n2.stop_daemon() == 0
    until(lambda: n1.events("peer_suspect"), "n1 tells of it")
    assert n1.events("peer_suspect")[0]["reason"] == "its daemon was stopped"


@pytest.mark.parametrize(
    ("auth", "reasons"),
    [("psk", ("another key", "another key")), ("tls", ("certificate", "ended the handshake"))],
)
def test_a_host_with_another_key_is_refused_by_both(
    make_host: MakeHost, tmp_path: Path, auth: str, reasons: tuple[str, str]
) -> None:
    cluster = Cluster(tmp_path, auth, "n1", "n2")
    foreign = tmp_path / "foreign"
    cluster.init(foreign)
    n1 = make_host(settings=cluster.settings("n1"))
    n2 = make_host(settings=cluster.settings("n2", keys=foreign))
    until(lambda: refusals(n1, "auth"), "n1 tells of a refusal")
    assert reasons[0] in refusals(n1, "auth")[0]
    until(lambda: refusals(n2, "auth"), "n2 tells of a refusal")
    assert reasons[1] in refusals(n2, "auth")[0]
    assert peer(n1, "n2")["state"] in ("awaited", "lost")
    assert peer(n2, "n1")["state"] in ("awaited", "lost")
    assert not n1.events("peer_up")
    assert not n2.events("peer_up")


def test_a_host_that_is_not_listed_is_refused(make_host: MakeHost, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2", "n3")
    n3 = make_host(settings=cluster.settings("n3", hosts=cluster.hosts[1:]))
    n1 = make_host(settings=cluster.settings("n1"))
    until(lambda: refusals(n3, "not_allowed"), "n3 refuses n1")
    until(lambda: refusals(n1, "not_allowed"), "n1 is told")
    assert "n1 is not among the hosts of n3" in peer(n1, "n3")["reason"]
    found = ctl("cluster", "check", status=1, TSLICE_SOCKET=str(n1.socket))
    assert "n1 is not among the hosts of n3" in found
    assert [line.split()[0] for line in found.splitlines()] == ["HOST", "n2", "n3"]


def test_hosts_that_do_not_agree_on_a_group_that_they_share_are_apart_until_they_do(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2")
    shared: Settings = {"groups.both": {"devices": ["n1:0", "n2:0"], "users": ["1"]}}
    other: Settings = {"groups.both": {"devices": ["n1:0", "n2:0-1"], "users": ["1"]}}
    n1 = make_host(settings={**cluster.settings("n1"), **shared})
    n2 = make_host(settings={**cluster.settings("n2"), **other})
    until(lambda: refusals(n2, "config"), "n2 refuses n1")
    assert "group both is not the same on n1 and n2" in peer(n1, "n2")["reason"]
    assert "group both is not the same on n1 and n2" in peer(n2, "n1")["reason"]
    n2.write_config(n2.config, {**cluster.settings("n2"), **shared})
    assert n2.daemon is not None
    n2.daemon.send_signal(signal.SIGHUP)
    wait_for(n1, "n2", "connected")
    # What they agreed on does not hold any more once one of them has read another configuration.
    n2.write_config(n2.config, {**cluster.settings("n2"), **other})
    n2.daemon.send_signal(signal.SIGHUP)
    until(lambda: peer(n1, "n2")["state"] != "connected", "the link ends")


def test_a_host_without_devices_knows_the_groups_of_others(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2")
    far: Settings = {"groups.far": {"devices": ["n2:0"]}}
    bare: Settings = {"daemon": {"host": "n1", "nvml_library": "/nowhere/libnvidia-ml.so.1"}}
    n1 = make_host(settings={**cluster.settings("n1"), **far, **bare})
    n2 = make_host(settings={**cluster.settings("n2"), **far})
    wait_for(n1, "n2", "connected")
    assert [(g["name"], g["state"]) for g in n1.status()["groups"]] == [("far", "elsewhere")]
    # What both know must be the same, or they would not reserve it in the same order.
    changed: Settings = {"groups.far": {"devices": ["n2:0"], "order": 3}}
    n2.write_config(n2.config, {**cluster.settings("n2"), **changed})
    assert n2.daemon is not None
    n2.daemon.send_signal(signal.SIGHUP)
    until(lambda: peer(n1, "n2")["state"] != "connected", "the link ends")
    until(lambda: refusals(n1, "config"), "and is refused")
    assert "group far is not the same on n1 and n2" in refusals(n1, "config")[0]


def test_a_lease_that_names_no_groups_is_for_those_of_this_host(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2")
    groups: Settings = {"groups.near": {"devices": ["n1:0"]}, "groups.far": {"devices": ["n2:0"]}}
    n1 = make_host(settings={**cluster.settings("n1"), **groups})
    with n1.connection(role="client", job="a") as client:
        assert client.welcome["groups"] == ["far", "near"], "it may lease both"
        answer = client.request({"t": "acquire"}, LIMIT_S)
        assert list(answer["tokens"]) == ["near"]


def test_a_group_that_another_host_arbitrates_is_shown_with_its_hosts_and_ordered_about_there(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2")
    groups: Settings = {
        "groups.near": {"devices": ["n1:0"]},
        "groups.both": {"devices": ["n2:0", "n1:1"]},
    }
    n1 = make_host(settings={**cluster.settings("n1"), **groups})
    both = n1.group("both")
    assert (both["hosts"], both["arbiter"], both["state"]) == (["n2", "n1"], "n2", "elsewhere")
    assert both["reason"].startswith("n2 is awaited: ")
    assert [device["index"] for device in both["devices"]] == [1]
    n2 = make_host(settings={**cluster.settings("n2"), **groups})
    wait_for(n1, "n2", "connected")
    assert n1.group("both")["reason"] is None
    assert n2.group("both")["state"] == "free"
    assert (n2.group("near")["state"], n2.group("near")["devices"]) == ("elsewhere", [])
    lines = [line.split() for line in at(n1, "status").splitlines()]
    assert (lines[2][0], lines[2][-1]) == ("GROUP", "HOSTS")
    assert [(line[0], line[1], line[-1]) for line in lines[3:5]] == [
        ("both", "elsewhere", "n2,n1"),
        ("near", "free", "n1"),
    ]
    page = at(n1, "show", "group", "both")
    assert re.search(r"(?m)^arbiter +n2$", page), page
    assert re.search(r"(?m)^groups +both$", at(n1, "show", "host", "n2"))
    shown = json.loads(at(n1, "drain", "--json"))["groups"]
    assert [group["name"] for group in shown] == ["near"], "what is decided elsewhere is left alone"
    error = json.loads(at(n1, "drain", "--group", "both", "--json", status=1))["error"]
    assert error["message"] == "group both is arbitrated by n2: type it on n2"


def test_a_host_is_dead_when_an_operator_says_so_and_it_does_not_answer_g10(
    make_host: MakeHost, tmp_path: Path
) -> None:
    n1, n2 = linked(make_host, Cluster(tmp_path, "psk", "n1", "n2"))

    def refused(*arguments: str, status: int) -> str:
        found = json.loads(at(n1, "host-dead", *arguments, "--json", status=status))
        return str(found["error"]["message"])

    assert "its daemon answers" in refused("n2", "--yes", status=1)
    assert "there is no link to a host 'n9'" in refused("n9", "--yes", status=3)
    assert "n1 is this host" in refused("n1", "--yes", status=3)
    n2.stop_daemon()
    wait_for(n1, "n2", "suspect")
    # Nobody is there to be asked whether it is certain.
    assert "--yes says that no process of n2 is left" in refused("n2", status=2)
    assert answered(n1, "n\n", "host-dead", "n2") == 1
    assert n1.events("host_dead") == []
    told = at(n1, "host-dead", "n2", "--yes", "--reason", "it burnt")
    assert told == "n2 is taken for dead; see tslicectl events\n"
    (event,) = n1.events("host_dead")
    user = "root" if os.getuid() == 0 else f"uid {os.getuid()}"
    assert (event["host"], event["by"]) == ("n2", f"{user} (it burnt)")
    assert answered(n1, "y\n", "host-dead", "n2") == 0
    assert len(n1.events("host_dead", "host_died")) == 2, "to say it again changes nothing"
    n1.kill_daemon()
    n1.start_daemon()
    assert peer(n1, "n2")["dead_by"] == f"{user} (it burnt) at n1"
    assert re.search("(?m)^n2 +dead .* dead, says root .it burnt. at n1", at(n1, "status"))
    assert re.search("(?m)^state +dead$", at(n1, "show", "host", "n2"))
    n2.start_daemon()
    wait_for(n1, "n2", "connected")
    assert peer(n1, "n2")["dead_by"] is None, "it is back"


def answered(host: Host, answer: str, *arguments: str) -> int:
    """Runs tslicectl on a terminal, answers its question, and returns its exit status."""
    terminal, theirs = pty.openpty()
    try:
        os.write(terminal, answer.encode())
        done = subprocess.run(
            [sys.executable, "-m", "tsliced.ctl", *arguments],
            env={**os.environ, "TSLICE_SOCKET": str(host.socket)},
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        os.close(terminal)
        os.close(theirs)
    assert "Is n2 dead, with all its processes? [y/N]" in done.stderr
    assert "two jobs\nmay use the same devices" in done.stderr
    return done.returncode


def test_a_job_on_two_hosts_makes_room_on_both_and_has_its_state_back_on_both_g12(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2")
    shared: Settings = {"groups.both": {"devices": ["n1:0", "n2:0"]}}
    n1, n2 = linked(make_host, cluster, **shared)
    ranks = [n1.rank("a"), n2.rank("a")]
    driver = ranks[1]
    driver.do("acquire", groups="both", timeout=LIMIT_S)
    for seed, rank in enumerate(ranks):
        rank.do("context", device=0)
        rank.do("fill", mib=2, seed=seed)
    digests = [rank.do("digest") for rank in ranks]
    other = n1.rank("b")
    asked = other.start("acquire", groups="both", timeout=LIMIT_S)
    until(lambda: n1.group("both")["queue"], "b waits")
    driver.do("release")
    asked.wait()
    assert [len(host.operations("snapshot")) for host in (n1, n2)] == [1, 1]
    again = driver.start("acquire", groups="both", timeout=LIMIT_S)
    other.do("release")
    again.wait()
    assert [rank.do("digest") for rank in ranks] == digests
    driver.do("release")


def test_the_histories_of_all_hosts_are_one(make_host: MakeHost, tmp_path: Path) -> None:
    shared: Settings = {"groups.both": {"devices": ["n1:0", "n2:0"]}}
    n1, n2 = linked(make_host, Cluster(tmp_path, "psk", "n1", "n2"), **shared)
    ranks = [n1.rank("a"), n2.rank("a")]
    ranks[1].do("acquire", groups="both", timeout=LIMIT_S)
    for seed, rank in enumerate(ranks):
        rank.do("context", device=0)
        rank.do("fill", mib=2, seed=seed)
    other = n1.rank("b")
    asked = other.start("acquire", groups="both", timeout=LIMIT_S)
    until(lambda: n1.group("both")["queue"], "b waits")
    ranks[1].do("release")
    asked.wait()
    other.do("release")

    whole = json.loads(at(n2, "events", "--all", "--job", "a", "--json"))
    assert (whole["hosts"], whole["missing"]) == (["n2", "n1"], {})
    times = [event["at"] for event in whole["events"]]
    assert times == sorted(times)
    moved = [e for e in whole["events"] if e["kind"] == "operation" and e["verb"] == "snapshot"]
    assert {(e["origin"], e["rank"].split(":")[0]) for e in moved} == {("n1", "n1"), ("n2", "n2")}
    assert {e["origin"] for e in whole["events"] if e["kind"] == "granted"} == {"n1"}
    of_n1 = json.loads(at(n2, "events", "--host", "n1", "--job", "a", "--json"))["events"]
    assert [e["seq"] for e in of_n1] == [e["seq"] for e in n1.events() if e.get("job") == own("a")]
    used = {
        row["name"]: row["leases"]
        for row in json.loads(at(n2, "usage", "--all", "--json"))["usage"]
    }
    assert used == {own("a"): 1, own("b"): 1}
    trace = json.loads(at(n2, "trace", "--all", "-o", "-"))
    assert trace["otherData"]["host"] == "n2, n1"
    tracks = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {
        f"rank {host.name}:{rank.pid}" for host, rank in ((n1, ranks[0]), (n2, ranks[1]))
    } <= tracks
    found = json.loads(at(n2, "report", "--all", "--json"))["figures"]
    assert len(found["jobs"]) == 2

    at(n2, "events", "--all", "--since", "1", status=2)
    at(n2, "events", "--all", "-f", status=2)
    at(n2, "events", "--host", "n9", status=3)
    n1.kill_daemon()
    wait_for(n2, "n1", "suspect")
    left = json.loads(at(n2, "events", "--all", "--json"))
    assert left["hosts"] == ["n2"]
    assert "n1 is suspect" in left["missing"]["n1"]
    n1.start_daemon()


def test_a_lease_of_another_host_outlives_both_daemons_g8(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2")
    shared: Settings = {"groups.both": {"devices": ["n1:0", "n2:0"]}}
    n1, n2 = linked(make_host, cluster, **shared)
    holder, waiter = n2.rank("a"), n2.rank("b")
    token = holder.do("acquire", groups="both", timeout=LIMIT_S)["tokens"]["both"]
    asked = waiter.start("acquire", groups="both", timeout=LIMIT_S)
    for host in (n2, n1):
        host.kill_daemon()
        host.start_daemon()
        wait_for(n1, "n2", "connected")
        wait_for(n2, "n1", "connected")
    assert not asked.is_over()
    holder.do("release")
    assert asked.wait()["tokens"]["both"] > token


def test_without_peers_nothing_listens_on_tcp(host: Host) -> None:
    assert host.daemon is not None
    assert host.status()["peers"] == []
    assert tcp_sockets(host.daemon.pid) == []


def test_with_peers_it_listens_where_it_is_told_and_nowhere_else(
    make_host: MakeHost, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, "psk", "n1", "n2")
    n2 = make_host(settings=cluster.settings("n2"))
    assert n2.daemon is not None
    assert tcp_sockets(n2.daemon.pid) == [f"0100007F:{cluster.ports['n2']:04X}"]


def tcp_sockets(pid: int) -> list[str]:
    """Returns the local addresses of the TCP sockets of a process, as the kernel writes them."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        # What was open a moment ago may be closed now.
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            inodes.add(target.removeprefix("socket:[").rstrip("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes:
                found.append(words[1])
    return found


@pytest.mark.parametrize(
    ("auth", "change", "status", "text"),
    [
        ("tls", {"daemon.host": "n3"}, 78, "is a certificate for n1, and this host is n3"),
        ("tls", {"peers.key_file": "/nowhere"}, 78, "/nowhere cannot be read"),
        ("psk", {"peers.secret_file": "/etc/passwd"}, 78, "is open to others"),
        ("psk", {"peers.listen": "192.0.2.1"}, 73, "cannot listen for other hosts"),
    ],
)
def test_a_daemon_that_others_could_not_know_does_not_start_and_says_why(
    softcuda_build: Path, tmp_path: Path, auth: str, change: dict[str, str], status: int, text: str
) -> None:
    cluster = Cluster(tmp_path, auth, "n1", "n2")
    settings = {name: dict(section) for name, section in cluster.settings("n1").items()}
    for key, value in change.items():
        section, _, name = key.partition(".")
        settings[section][name] = value
    host = Host(softcuda_build, settings=settings)
    try:
        host.write_config(host.config, settings)
        done = subprocess.run(
            [sys.executable, "-m", "tsliced", "--config", str(host.config)],
            env=host.variables(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == status, done.stderr
        assert text in done.stderr
    finally:
        host.close()
