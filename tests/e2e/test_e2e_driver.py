"""A driver in trouble: calls that hang, fail or lose their target; processes that cannot run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cgroup_dirs import Cgroup, cgroup
from harness import MIB, Host, MakeHost, Pending, Rank, RankError, own, until

from libtimeslice import Refused

#: What the driver calls each operation, and what we call it.
VERBS = {"lock": "freeze", "checkpoint": "snapshot", "restore": "restore", "unlock": "thaw"}

IMPATIENT = {"limits": {"stuck_base_s": 0.3}}


class Stage:
    """A job `a` whose next move meets one call of the driver, and a job `b` that shares g1 with it.

    For lock and checkpoint b asks and a is in its way; for restore and unlock a comes back.
    """

    def __init__(self, host: Host, call: str) -> None:
        self.host, self.call = host, call
        self.a, self.b = host.trainer("a", mib=8, seed=1), host.trainer("b", mib=8, seed=2)
        self.leaves = call in ("lock", "checkpoint")
        first, self.asker = (self.a, self.b) if self.leaves else (self.b, self.a)
        first.do("acquire", groups="g1", timeout=20)
        self.digests = {first: first.do("digest")}
        first.do("release")

    def begin(self, *faults: str) -> Pending:
        """Let the move begin that meets the faults."""
        self.host.fault(*(f"{self.call} {self.a.pid} * {fault}" for fault in faults))
        return self.asker.start("acquire", groups="g1", timeout=60)

    def until_in_call(self) -> None:
        doing = VERBS[self.call]
        until(lambda: doing in (r["doing"] for r in self.host.ask("ps")["ranks"]), "it is called")

    def check(self) -> None:
        """All is well: both can have their turns, with all of their state."""
        for rank in (self.asker, self.b if self.leaves else self.a, self.a, self.b):
            if rank.process.poll() is None and rank.do("acquire", groups="g1", timeout=20):
                digest = rank.do("digest")
                assert self.digests.setdefault(rank, digest) == digest
                rank.do("release")


@pytest.mark.parametrize("call", VERBS)
def test_a_call_that_hangs_is_named_holds_up_its_own_group_and_may_come_back_g11(
    make_host: MakeHost, call: str
) -> None:
    stage = Stage(make_host(settings=IMPATIENT), call)
    host, pid = stage.host, stage.a.pid
    asked = stage.begin("stall")
    stuck = until(lambda: host.events("stuck"), "the alarm goes off")[0]
    assert (stuck["rank"], stuck["verb"]) == (f"n1:{pid}", VERBS[call])
    assert stuck["seconds"] >= 0.3
    group = host.group()
    assert group["state"] == "stuck"
    assert re.match(rf"{VERBS[call]} for \d+ s: the driver has not .*pid {pid}", group["reason"])
    (rank,) = (r for r in host.ask("ps")["ranks"] if r["pid"] == pid)
    assert rank["doing"] == VERBS[call]
    assert "nothing is killed in the middle" in rank["reason"]
    assert host.rank("c").do("acquire", groups="g2", timeout=20)["state"] == "held"
    assert not asked.is_over()
    host.fault()
    assert asked.wait()["state"] == "held"
    assert host.events("unstuck")[0]["reason"] == "it ended"
    assert host.group()["state"] == "held"
    stage.asker.do("release")
    stage.check()


def test_a_question_that_hangs_after_a_restart_holds_up_its_own_group_only(
    make_host: MakeHost,
) -> None:
    host = make_host(settings=IMPATIENT)
    rank = host.trainer("a", mib=8)
    digest = rank.do("digest")
    until(lambda: host.states() == {rank.pid: "running"}, "it is known")
    host.kill_daemon()
    host.fault(f"state {rank.pid} * stall")
    host.start_daemon()
    stuck = until(lambda: host.events("stuck"), "the alarm goes off")[0]
    assert (stuck["rank"], stuck["verb"]) == (f"n1:{rank.pid}", "query")
    other = host.rank("b")
    asked = other.start("acquire", groups="g1", timeout=60)
    assert host.rank("c").do("acquire", groups="g2", timeout=20)["state"] == "held"
    assert not asked.is_over()
    host.fault()
    assert asked.wait()["state"] == "held"
    assert host.states()[rank.pid] == "parked"
    other.do("release")
    rank.do("acquire", groups="g1", timeout=20)
    assert rank.do("digest") == digest


@pytest.mark.parametrize("call", VERBS)
@pytest.mark.parametrize("told", [True, False], ids=["304", "never told"])
def test_a_target_that_is_killed_in_a_call_frees_the_group_g3(
    make_host: MakeHost, call: str, told: bool
) -> None:
    stage = Stage(make_host(SOFTCUDA_DEATH_HANGS=str(int(not told))), call)
    asked = stage.begin("stall")
    stage.until_in_call()
    stage.a.kill()
    if stage.leaves:
        assert asked.wait()["state"] == "held"
        stage.b.do("release")
    until(lambda: stage.a.pid not in stage.host.states(), "it is forgotten")
    until(lambda: stage.host.job("a") == {}, "its job is forgotten, with no fault")
    stage.check()


def test_a_process_that_is_stopped_after_its_call_began_is_named_until_it_goes_on(
    host: Host,
) -> None:
    stage = Stage(host, "lock")
    asked = stage.begin("stall")
    stage.until_in_call()
    stage.a.stop()
    host.fault()
    stuck = until(lambda: host.events("stuck"), "it is seen")[0]
    assert "stopped by a signal" in stuck["reason"]
    assert "SIGCONT" in stuck["reason"]
    assert host.group()["state"] == "stuck"
    assert "SIGCONT" in host.group()["reason"]
    os.kill(stage.a.pid, signal.SIGCONT)
    assert asked.wait()["state"] == "held"
    assert host.events("unstuck")
    stage.b.do("release")
    stage.check()


class Freezer:
    """Freezes a cgroup, in either version."""

    def __init__(self, place: Cgroup, *, version: int) -> None:
        self._place, self._is_v1 = place, version == 1

    def freeze(self) -> None:
        if self._is_v1:
            self._place.write("freezer.state", "FROZEN")
            until(lambda: self._place.read("freezer.state") == "FROZEN", "it is frozen")
        else:
            self._place.write("cgroup.freeze", 1)
            until(lambda: "frozen 1" in self._place.read("cgroup.events"), "it is frozen")

    def thaw(self) -> None:
        if self._is_v1:
            self._place.write("freezer.state", "THAWED")
        else:
            self._place.write("cgroup.freeze", 0)


@contextmanager
def freezer(version: int) -> Iterator[tuple[Freezer, Cgroup]]:
    with cgroup("freezer" if version == 1 else "") as place:
        frozen = Freezer(place, version=version)
        try:
            # Frozen is the parent of where the process is.
            yield frozen, place.child("job")
        finally:
            frozen.thaw()


@pytest.mark.parametrize("version", [1, 2])
def test_a_process_in_a_frozen_cgroup_is_not_touched_and_goes_on_when_it_is_thawed(
    make_host: MakeHost, version: int
) -> None:
    with freezer(version) as (frozen, place):
        host = make_host()
        stage = Stage(host, "lock")
        place.take(stage.a.pid)
        before = len(host.operations())
        frozen.freeze()
        with pytest.raises(RankError, match=r"its cgroup is frozen.*thaw the cgroup"):
            stage.b.do("acquire", groups="g1", timeout=1)
        refused = host.operations()[before:]
        assert {(o["verb"], o["state"]) for o in refused} == {("freeze", "running")}
        assert host.group("g1")["waiters"] == 0
        frozen.thaw()
        stage.b.do("acquire", groups="g1", timeout=20)
        assert host.states()[stage.a.pid] == "parked"
        stage.b.do("release")
        stage.check()


def test_what_the_driver_does_not_permit_pins_the_job_and_says_what_is_missing_g11(
    host: Host,
) -> None:
    stage = Stage(host, "lock")
    asked = stage.begin("error:800")
    reason = until(lambda: str(host.job("a").get("reason") or ""), "it is pinned")
    for words in ("does not permit", "NOT_PERMITTED 800", "CAP_SYS_PTRACE", f"pid {stage.a.pid}"):
        assert words in reason
    # The event has what happened; who asks is told what to do, too.
    assert reason.startswith(host.events("pinned")[0]["reason"])
    assert f"tslicectl retry {own('a')}" in reason
    assert not asked.is_over()
    assert host.states()[stage.a.pid] == "running"
    stage.a.kill()
    assert asked.wait()["state"] == "held"


def test_when_one_rank_of_several_cannot_be_frozen_all_run_on_and_the_waiter_keeps_its_place(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"limits": {"freeze_timeout_s": 0.3}})
    ranks = [host.trainer("a", mib=8, seed=n) for n in range(3)]
    digests = [rank.do("digest") for rank in ranks]
    until(lambda: len(host.states()) == 3, "all are known")
    host.fault(f"lock {ranks[2].pid} * error:600")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["next"] is not None, "it is its turn")
    later = host.rank("c").start("acquire", groups="g1", timeout=60)
    until(lambda: len(host.events("eviction_failed")) >= 2, "it was tried again")
    assert [rank.do("digest") for rank in ranks] == digests, "all run, between two tries"
    assert {o["verb"] for o in host.operations()} == {"freeze", "thaw"}
    first, second, *_ = (e["at"] for e in host.events("eviction_failed"))
    assert second - first >= 0.025, "with a pause between them"
    until(lambda: host.group()["waiters"] == 1, "somebody came later")
    host.fault()
    assert asked.wait()["state"] == "held"
    assert not later.is_over()
    assert set(host.states().values()) == {"parked"}


def test_a_restore_that_breaks_the_process_blocks_its_group_until_that_ends_g11(
    host: Host,
) -> None:
    stage = Stage(host, "restore")
    asked = stage.begin("fail:999")
    group = until(lambda: (g := host.group())["state"] == "blocked" and g, "it is blocked")
    for words in ("broken for good", "end the process", f"pid {stage.a.pid}"):
        assert words in group["reason"]
    with pytest.raises(RankError) as refused:
        asked.wait()
    assert refused.value.code in ("blocked", "refused")
    assert host.rank("c").do("acquire", groups="g2", timeout=20)["state"] == "held"
    stage.a.kill()
    stage.check()


def test_a_process_without_cuda_is_not_attached(host: Host) -> None:
    silent = host.rank()
    silent.do("called")  # it runs, and has not loaded the driver
    with pytest.raises(Refused) as refused:
        host.ask("attach", job="quiet", pid=silent.pid, groups=None)
    assert refused.value.code == "not_cuda"
    assert host.states() == {}


def test_a_child_that_is_forked_while_parked_is_no_rank_and_harms_nothing(host: Host) -> None:
    stage = Stage(host, "restore")
    assert host.states()[stage.a.pid] == "parked"
    child = stage.a.do("fork")
    assert stage.asker.do("acquire", groups="g1", timeout=20)["restored"] is True
    assert set(host.states()) == {stage.a.pid, stage.b.pid}
    stage.a.do("release")
    stage.check()
    stage.a.kill()
    until(lambda: host.job("a") == {}, "it is forgotten, though its child lives")
    assert stage.b.do("acquire", groups="g1", timeout=20)["state"] == "held"
    os.kill(child, signal.SIGKILL)


def run_under_pid(host: Host, pid: int, job: str) -> Rank:
    """Starts a rank that is given a pid which was another's before."""
    last_pid = "/proc/sys/kernel/ns_last_pid"
    if not os.access(last_pid, os.W_OK):
        pytest.skip("to choose a pid needs root and checkpoint support in the kernel")
    for _ in range(50):
        with open(last_pid, "w") as file:
            file.write(str(pid - 1))
        rank = host.rank(job)
        if rank.pid == pid:
            return rank
        rank.close()
    pytest.skip("other processes are started too often to get a chosen pid")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose a pid")
def test_whoever_has_the_pid_of_a_parked_rank_that_died_is_somebody_else(host: Host) -> None:
    stage = Stage(host, "restore")
    assert host.states()[stage.a.pid] == "parked"
    host.kill_daemon()
    stage.a.kill()
    heir = run_under_pid(host, stage.a.pid, "heir")
    heir.do("context", device=1)
    heir.do("fill", mib=4)
    host.start_daemon()
    ranks: dict[int, Any] = {}

    def known() -> bool:
        ranks.update((rank["pid"], rank) for rank in host.ask("ps")["ranks"])
        return heir.pid in ranks and ranks[heir.pid]["state"] == "running"

    until(known, "the heir is known")
    assert ranks[heir.pid]["job"]["id"] == "heir"
    assert host.job("a") == {}
    assert host.used_bytes(1) >= 4 * MIB
    assert stage.b.do("acquire", groups="g1", timeout=20)["state"] == "held"
    assert stage.b.do("digest") == stage.digests[stage.b]
