"""What goes wrong with a job over several hosts: each fault is met on all of them.

What clients saw is judged over all hosts at the end, see `judging`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import RankError, fill_disk, own, until
from net_hosts import Gang, Hosts, NetHost, at, kill_in_each_step, linked_hosts, peer, wait_for

#: A freeze may take as long as a test needs to do something in the middle of it.
SETTINGS = {
    "groups.all": {"devices": ["n1:0", "n2:0", "n3:0"]},
    "limits": {"freeze_timeout_s": 5.0},
}


@pytest.fixture(scope="module")
def cluster(softcuda_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    names, directory = ("n1", "n2", "n3"), tmp_path_factory.mktemp("cluster")
    disks = {"n2": "4m"}
    with linked_hosts(softcuda_build, directory, *names, settings=SETTINGS, disks=disks) as hosts:
        yield hosts


@pytest.fixture
def hosts(cluster: Hosts) -> Iterator[Hosts]:
    """Three hosts for all tests here: each leaves them with nobody on them."""
    yield cluster
    cluster.rest()


def told_of(hosts: Hosts, job: str, *kinds: str, of: NetHost | None = None) -> list[dict[str, Any]]:
    """Returns what all hosts, or one of them, tell of a job, which no other test has."""
    events = hosts.events(*kinds) if of is None else of.events(*kinds)
    return [event for event in events if event.get("job") == own(job)]


def test_a_rank_that_dies_is_named_where_its_peers_are_and_they_make_room(hosts: Hosts) -> None:
    job = Gang("lost", hosts["n3"], hosts.all, group="all").load()
    lease = job.acquire()
    victim = job.ranks["n2"]
    victim.kill()
    for host in hosts.others("n2"):
        named = partial(told_of, hosts, "lost", "rank_lost", of=host)
        (event,) = until(named, f"{host.name} names it")
        assert (event["pid"], event["host"]) == (victim.pid, "n2")
    told = f"rank_lost: lease .*: rank {victim.pid} on n2 of this job ended"

    def is_told() -> bool:
        # A client reads what it is told when it is used.
        assert job.driver.do("look")["tokens"] == lease["tokens"], "it has its lease still"
        return re.search(told, hosts["n3"].log.read_text()) is not None

    until(is_told, "its client is told")
    waiter = hosts["n1"].rank("waiter")
    asked = waiter.start("acquire", groups="all", timeout=30)
    job.release()
    assert asked.wait()["state"] == "held"
    left = {rank.pid for name, rank in job.ranks.items() if name != "n2"}
    assert hosts.states() == dict.fromkeys(left, "parked")


def test_a_client_that_dies_waiting_on_another_host_is_out_of_the_queue_g3(hosts: Hosts) -> None:
    holder, victim, last = (hosts[name].rank(name) for name in ("n1", "n2", "n3"))
    holder.do("acquire", groups="all")
    victim.start("acquire", groups="all", timeout=30)
    until(lambda: hosts["n1"].group("all")["waiters"] == 1, "the victim waits")
    asked = last.start("acquire", groups="all", timeout=30)
    until(lambda: hosts["n1"].group("all")["waiters"] == 2, "the last one waits")
    victim.kill()
    until(lambda: hosts["n1"].group("all")["waiters"] == 1, "the victim is out of the queue")
    holder.do("release")
    assert asked.wait()["state"] == "held"


def test_a_client_that_dies_holding_on_another_host_is_fenced_and_its_ranks_leave_g3(
    hosts: Hosts,
) -> None:
    job = Gang("dies", hosts["n2"], hosts.all, group="all").load()
    job.acquire()
    waiter = hosts["n3"].rank("waiter")
    asked = waiter.start("acquire", groups="all", timeout=30)
    until(lambda: hosts["n1"].group("all")["waiters"] == 1, "it waits")
    job.driver.kill()
    lease = asked.wait()
    assert hosts.states() == dict.fromkeys(job.pids, "parked")
    until(lambda: hosts["n1"].job("dies")["orphaned"], "nobody speaks for it")
    waiter.do("release")
    # Its state is there for whoever speaks for the job next.
    heir = hosts["n1"].rank("dies")
    assert heir.do("acquire", groups="all", timeout=30)["tokens"]["all"] > lease["tokens"]["all"]
    assert job.look() == job.digests


def test_when_one_host_cannot_freeze_in_time_all_run_on_and_the_waiter_keeps_its_place(
    hosts: Hosts,
) -> None:
    job = Gang("busy", hosts["n1"], hosts.all, group="all").load()
    victim = job.ranks["n2"]
    hosts["n2"].fault(f"lock {victim.pid} * error:600")
    first, later = hosts["n3"].rank("first"), hosts["n2"].rank("later")
    asked = first.start("acquire", groups="all", timeout=30)
    until(lambda: hosts["n1"].group("all")["next"] is not None, "it is its turn")
    waits = later.start("acquire", groups="all", timeout=30)
    until(lambda: len(told_of(hosts, "busy", "eviction_failed")) >= 2, "it was tried again")
    assert job.look() == job.digests, "all run, between two tries"
    assert f"pid {victim.pid} on n2" in str(told_of(hosts, "busy", "eviction_failed")[0])
    assert not [e for e in told_of(hosts, "busy", "operation") if e["verb"] == "snapshot"]
    hosts["n2"].fault()
    assert asked.wait()["state"] == "held"
    assert not waits.is_over()
    assert hosts.states() == dict.fromkeys(job.pids, "parked")
    first.do("release")
    waits.wait()
    later.do("release")
    job.turn()


def test_a_job_that_one_host_cannot_snapshot_is_pinned_and_ended_on_all_g11(hosts: Hosts) -> None:
    job = Gang("pinned", hosts["n2"], hosts.all, group="all").load()
    victim = job.ranks["n3"]
    hosts["n3"].fault(f"checkpoint {victim.pid} * error:801")
    asked = hosts["n2"].rank("waiter").start("acquire", groups="all", timeout=60)
    reason = until(lambda: str(hosts["n1"].job("pinned").get("reason") or ""), "it is pinned")
    assert f"pid {victim.pid}" in reason
    assert job.look() == job.digests, "it runs as before, on all hosts"
    with pytest.raises(RankError, match=f"pid {victim.pid}") as caught:
        job.acquire()
    assert caught.value.code == "pinned"
    told = re.compile(rf"stalled: lease \S+: .*pid {victim.pid}.*")
    until(lambda: told.search(hosts["n2"].log.read_text()), "the waiter is told")
    assert not asked.is_over()
    at(hosts["n1"], "kill", own("pinned"), "--yes")
    assert asked.wait()["state"] == "held"
    assert hosts.states() == {}


def test_a_restore_that_breaks_a_rank_on_one_host_blocks_the_group_until_it_is_ended_g11(
    hosts: Hosts,
) -> None:
    job = Gang("broken", hosts["n1"], hosts.all, group="all").load()
    other = Gang("other", hosts["n3"], hosts.all, group="all").load()
    victim = job.ranks["n2"]
    hosts["n2"].fault(f"restore {victim.pid} * fail:999")
    asked = job.ask()
    group = until(
        lambda: (g := hosts["n1"].group("all"))["state"] == "blocked" and g, "it is blocked"
    )
    assert f"pid {victim.pid}" in group["reason"]
    with pytest.raises(RankError) as refused:
        asked.wait()
    assert refused.value.code in ("blocked", "refused")
    assert "running" not in {hosts.states()[pid] for pid in job.pids}, "nobody runs half"
    at(hosts["n1"], "kill", own("broken"), "--yes")
    other.turn()
    assert hosts.states() == dict.fromkeys(other.pids, "running")


def test_a_stranger_on_a_device_of_one_host_keeps_all_off_and_is_named_g1(hosts: Hosts) -> None:
    stranger = hosts["n3"].rank()
    stranger.do("context")
    stranger.do("fill", mib=8)
    until(lambda: hosts["n3"].events("stranger"), "it is seen")
    job = hosts["n2"].rank("kept")
    with pytest.raises(RankError, match=f"pid {stranger.pid}"):
        job.do("acquire", groups="all", timeout=1)
    stranger.kill()
    assert job.do("acquire", groups="all", timeout=20)["state"] == "held"


def test_a_rank_that_comes_late_on_one_host_is_taken_off_with_the_others_g1(hosts: Hosts) -> None:
    job = Gang("late", hosts["n1"], hosts.all, group="all").load()
    late = hosts["n3"].rank("late")
    late.do("called")  # it runs, and has no context
    hosts["n2"].fault(f"lock {job.ranks['n2'].pid} * delay:700")
    waiter = hosts["n2"].rank("waiter")
    asked = waiter.start("acquire", groups="all", timeout=60)
    frozen = partial(told_of, hosts, "late", "operation", of=hosts["n3"])
    until(frozen, "all of n3 that was known is frozen")
    late.do("context")
    late.do("fill", mib=8, seed=9)
    digest = late.do("digest")
    assert asked.wait()["state"] == "held"
    assert hosts.states() == dict.fromkeys({*job.pids, late.pid}, "parked")
    assert hosts["n3"].used_bytes() == 0
    waiter.do("release")
    job.turn()
    assert late.do("digest") == digest


def test_nobody_is_let_on_while_a_host_is_silent_and_who_holds_keeps_its_lease(
    hosts: Hosts,
) -> None:
    job = Gang("silent", hosts["n2"], hosts.all, group="all").load()
    lease = job.acquire()
    waiter = hosts["n1"].rank("waiter")
    asked = waiter.start("acquire", groups="all", timeout=60)
    until(lambda: hosts["n1"].group("all")["waiters"] == 1, "it waits")
    hosts.network.isolate("n3")
    wait_for(hosts["n1"], "n3", "lost")
    group = hosts["n1"].group("all")
    assert (group["state"], group["holder"]["id"]) == ("uncertain", "silent")
    assert "host n3 of group all is silent" in group["reason"]
    assert "uncertain" in at(hosts["n1"], "status")
    assert job.driver.do("look")["state"] == "held"
    assert job.look() == job.digests, "all run on"
    job.release()
    until(lambda: hosts["n1"].group("all")["holder"] is None, "it is given back")
    assert not asked.is_over()
    assert set(hosts.states().values()) == {"running"}, "nothing was begun"
    hosts.network.heal()
    assert asked.wait()["tokens"]["all"] > lease["tokens"]["all"]
    assert hosts.states() == dict.fromkeys(job.pids, "parked")
    waiter.do("release")
    job.turn()


def test_a_move_of_which_a_host_is_lost_is_turned_back_and_made_when_it_is_there_again(
    hosts: Hosts,
) -> None:
    job = Gang("parted", hosts["n1"], hosts.all, group="all").load()
    victim = job.ranks["n3"]
    hosts["n3"].fault(f"lock {victim.pid} * delay:500")
    asked = hosts["n2"].rank("waiter").start("acquire", groups="all", timeout=60)
    until(lambda: "freeze" in hosts["n3"].doing(), "it is about to be frozen")
    hosts.network.isolate("n3")
    wait_for(hosts["n1"], "n3", "lost")
    near = {job.ranks[name].pid for name in ("n1", "n2")}
    until(lambda: {hosts.states()[pid] for pid in near} == {"running"}, "all others run again")
    until(lambda: hosts["n3"].events("thawed_alone"), "it runs again too, by itself")
    assert hosts.states()[victim.pid] == "running"
    assert job.look() == job.digests
    assert not asked.is_over()
    hosts["n3"].fault()
    hosts.network.heal()
    assert asked.wait()["state"] == "held"
    assert hosts.states() == dict.fromkeys(job.pids, "parked")


@pytest.mark.parametrize("proof", ["it boots anew", "an operator says so"])
def test_a_host_that_dies_takes_its_ranks_along_on_proof_alone(hosts: Hosts, proof: str) -> None:
    name = f"dead-{len(proof)}"
    job = Gang(name, hosts["n2"], hosts.all, group="all").load()
    job.acquire()
    waiter = hosts["n1"].rank("waiter")
    asked = waiter.start("acquire", groups="all", timeout=60)
    until(lambda: hosts["n1"].group("all")["waiters"] == 1, "it waits")
    at(hosts["n1"], "host-dead", "n3", "--yes", status=1)
    hosts["n3"].lose_power()
    wait_for(hosts["n1"], "n3", "lost")
    assert not told_of(hosts, name, "rank_lost", of=hosts["n1"]), "silence proves nothing"
    if proof == "it boots anew":
        hosts["n3"].boot()
    else:
        # At any host: all that count on it are told.
        wait_for(hosts["n2"], "n3", "lost")
        at(hosts["n2"], "host-dead", "n3", "--yes", "--reason", "burnt")
    (event,) = until(lambda: told_of(hosts, name, "rank_lost", of=hosts["n1"]), "it is known")
    assert (event["host"], event["pid"]) == ("n3", job.ranks["n3"].pid)
    assert job.driver.do("look")["state"] == "held"
    assert not asked.is_over()
    job.release()
    assert asked.wait()["state"] == "held"
    for name in ("n1", "n2"):
        assert hosts[name].states() == {job.ranks[name].pid: "parked"}
    if hosts["n3"].daemon is None:
        waiter.do("release")
        assert_stays_dead(hosts)
        hosts["n3"].boot()
        wait_for(hosts["n1"], "n3", "connected")
        assert peer(hosts["n1"], "n3")["dead_by"] is None


def assert_stays_dead(hosts: Hosts) -> None:
    """Asserts that n3 is dead for all others, also after a restart, and holds nobody up."""
    hosts["n1"].kill_daemon()
    hosts["n1"].start_daemon()
    for host in hosts.others("n3"):
        assert peer(host, "n3")["dead_by"] == "root (burnt) at n2"
        assert re.search(
            r"n3 is dead for .*: dead, says root .burnt. at n2", at(host, "status", "--all")
        )
    hosts["n2"].rank("next").do("acquire", groups="all", timeout=20)


def test_an_arbiter_that_boots_anew_has_given_nothing_and_its_clients_elsewhere_know_it(
    hosts: Hosts,
) -> None:
    parked = Gang("parked", hosts["n2"], hosts.others("n1"), group="all").load()
    holder = hosts["n3"].rank("holder")
    lease = holder.do("acquire", groups="all", timeout=20)
    assert hosts.states() == dict.fromkeys(parked.pids, "parked")
    hosts["n1"].lose_power()
    wait_for(hosts["n2"], "n1", "lost")
    assert holder.do("look")["state"] == "held", "silence proves nothing"
    for host in hosts.all:
        host.forget()
    hosts["n1"].boot()
    until(lambda: holder.do("look")["state"] == "lost", "its lease is gone")
    assert parked.turn()["tokens"]["all"] > lease["tokens"]["all"], "tokens rise over a boot (G2)"


@pytest.mark.parametrize("killed", ["n1", "n2"], ids=["the arbiter's", "a participant's"])
def test_a_daemon_that_is_killed_in_any_step_of_a_move_takes_nothing_from_anybody_g8(
    hosts: Hosts, killed: str
) -> None:
    # One's driver is on the host whose daemon is killed, the other's is not.
    comes = Gang(f"here-{killed}", hosts[killed], hosts.all, group="all").load()
    leaves = Gang(f"there-{killed}", hosts["n3"], hosts.all, group="all").load()
    kill_in_each_step(hosts, comes, leaves, killed=hosts[killed], slow=hosts["n2"])


@pytest.mark.parametrize(
    ("stopped", "slow"), [("n1", "n3"), ("n3", "n3")], ids=["the arbiter's", "a participant's"]
)
def test_a_daemon_that_hangs_in_the_middle_of_a_freeze_is_waited_for_and_nobody_stays_frozen(
    hosts: Hosts, stopped: str, slow: str
) -> None:
    job = Gang(f"hung-{stopped}", hosts["n2"], hosts.all, group="all").load()
    # A participant has not said then that its rank is frozen, so nobody has decided anything.
    hosts[slow].fault(f"lock {job.ranks[slow].pid} * delay:4000")
    asked = hosts["n2"].rank("waiter").start("acquire", groups="all", timeout=60)
    until(lambda: "freeze" in hosts[slow].doing(), "it is about to be frozen")
    host = hosts[stopped]
    assert host.daemon is not None
    host.daemon.send_signal(signal.SIGSTOP)
    try:
        others = hosts.others(stopped)
        for other in others:
            wait_for(other, stopped, "lost")
        until(lambda: all(runs(other, job) for other in others), "all others run again")
    finally:
        host.daemon.send_signal(signal.SIGCONT)
    hosts[slow].fault()
    assert asked.wait()["state"] == "held"
    assert hosts.states() == dict.fromkeys(job.pids, "parked")
    assert not told_of(hosts, job.job, "rank_lost")


def test_a_daemon_that_hangs_after_the_freeze_is_waited_for_and_nobody_else_is_let_on(
    hosts: Hosts,
) -> None:
    job = Gang("hung-late", hosts["n2"], hosts.all, group="all").load()
    hosts["n3"].fault(f"checkpoint {job.ranks['n3'].pid} * delay:4000")
    asked = hosts["n2"].rank("waiter").start("acquire", groups="all", timeout=60)
    until(lambda: "snapshot" in hosts["n3"].doing(), "its snapshot is under way")
    host = hosts["n3"]
    assert host.daemon is not None
    host.daemon.send_signal(signal.SIGSTOP)
    try:
        others = hosts.others("n3")
        for other in others:
            wait_for(other, "n3", "lost")
        parked = {job.ranks[other.name].pid: "parked" for other in others}
        until(
            lambda: {p: s for other in others for p, s in other.states().items()} == parked,
            "all others are parked",
        )
        assert not asked.is_over(), "nothing is known of what was on its devices"
        assert hosts["n1"].group("all")["holder"] is None
    finally:
        host.daemon.send_signal(signal.SIGCONT)
    hosts["n3"].fault()
    assert asked.wait()["state"] == "held"
    assert hosts.states() == dict.fromkeys(job.pids, "parked")
    assert not told_of(hosts, job.job, "rank_lost")


def runs(host: NetHost, job: Gang) -> bool:
    return host.states()[job.ranks[host.name].pid] == "running"


def test_jobs_take_turns_over_a_network_that_loses_and_delays(hosts: Hosts) -> None:
    jobs = [Gang(f"net-{n}", hosts[n], hosts.all, group="all").load() for n in ("n2", "n3")]
    hosts.network.delay_s, hosts.network.loss = 0.05, 0.2
    for job in jobs:
        job.turn()
    off, on = (job.pids for job in jobs)
    assert hosts.states() == dict.fromkeys(on, "running") | dict.fromkeys(off, "parked")


def test_a_participant_with_a_full_disk_moves_nothing_and_goes_on_when_there_is_room_g2(
    hosts: Hosts,
) -> None:
    job = Gang("full", hosts["n1"], hosts.all, group="all").load()
    filler = fill_disk(hosts["n2"].state)
    asked = hosts["n3"].rank("waiter").start("acquire", groups="all", timeout=60)
    failed = until(lambda: told_of(hosts, "full", "eviction_failed"), "it is turned back")[0]
    assert re.search("disk is full|No space left on device", failed["reason"])
    assert "n2" in failed["reason"]
    assert job.look() == job.digests, "it runs as before, on all hosts"
    assert not asked.is_over()
    filler.unlink()
    assert asked.wait()["state"] == "held"
    assert hosts.states() == dict.fromkeys(job.pids, "parked")
