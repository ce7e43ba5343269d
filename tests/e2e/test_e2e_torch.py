"""Jobs of a real torch that move their own tensors when the daemon asks them to."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from harness import LIMIT_S, Host, MakeHost, Rank, own, until
from raw_client import RawClient

WIDTH = 512
#: torch is imported, and the rest of it when a first step is taken.
IMPORT_LIMIT_S = 90.0


@pytest.fixture
def torch_host(make_host: MakeHost) -> Host:
    return make_host(settings={"daemon": {"backend": "examples.grpo.cpu_backend:CpuTorchBackend"}})


def trainer(host: Host, job: str, seed: int, *, managed: bool = True) -> Rank:
    """Starts a rank that has loaded its model in a first turn."""
    rank = host.rank(job, program="torch_rank.py")
    rank.do("called", IMPORT_LIMIT_S)
    rank.do("acquire", groups="g1", timeout=30)
    size = rank.do("load", IMPORT_LIMIT_S, width=WIDTH, seed=seed, managed=managed)
    assert size > 4 * WIDTH * WIDTH * 4, "weights, gradients and two moments"
    rank.do("release")
    return rank


def test_two_jobs_of_torch_alternate_and_compute_what_they_would_alone_g12(
    torch_host: Host,
) -> None:
    host = torch_host
    first, second = (trainer(host, name, seed) for seed, name in enumerate("ab"))
    size = second.do("resident")
    comes, leaves = first, second
    digests: dict[int, str] = {}
    for turn in range(4):
        lease = comes.do("acquire", groups="g1", timeout=30)
        assert lease["restored"] is True
        assert host.states() == {comes.pid: "running", leaves.pid: "parked"}
        assert (comes.do("resident"), leaves.do("resident")) == (size, 0)
        if turn >= 2:
            # What it was when it left: nothing was computed meanwhile.
            assert comes.do("train", steps=0) == digests[comes.pid]
        digests[comes.pid] = comes.do("train", steps=3)
        comes.do("release")
        comes, leaves = leaves, comes
    for rank, seed in ((first, 0), (second, 1)):
        assert rank.do("twin", width=WIDTH, seed=seed, steps=7) == digests[rank.pid]
    moved = host.operations("snapshot", "restore")
    assert {each["bytes"] for each in moved} == {size}
    assert all(each["seconds"] > 0 and each["reason"] is None for each in moved)
    assert host.events("eviction_failed", "pinned") == []


def test_a_job_that_computes_while_it_is_evicted_stops_between_two_steps_g12(
    make_host: MakeHost,
) -> None:
    host = make_host(
        settings={
            "daemon": {"backend": "examples.grpo.cpu_backend:CpuTorchBackend"},
            "limits": {"max_hold_s": 0.2, "hold_warning_s": 0.1},
        }
    )
    rank = trainer(host, "a", 0)
    rank.do("acquire", groups="g1", timeout=30)
    rank.do("loop")
    other = host.rank("b")
    for _ in range(2):
        before = rank.do("steps")
        until(lambda: rank.do("steps") > before + 5, "it computes")  # noqa: B023 - called here
        other.do("acquire", groups="g1", timeout=30)
        assert host.states()[rank.pid] == "parked"
        stood = rank.do("steps")
        assert rank.do("resident") == 0
        assert rank.do("steps") == stood
        other.do("release")
        until(lambda: rank.do("look")["state"] == "lost", "it knows that it is not held")
        rank.do("acquire", groups="g1", timeout=30)
    digest, steps = rank.do("finish", more=5), rank.do("steps")
    assert rank.do("twin", width=WIDTH, seed=0, steps=steps) == digest


@pytest.mark.parametrize("lack", ["an agent", "managed tensors"])
def test_a_rank_that_can_move_nothing_is_pinned_and_who_waits_is_told_what_helps_g11(
    torch_host: Host, lack: str
) -> None:
    host = torch_host
    rank = host.rank("a", program="torch_rank.py")
    rank.do("called", IMPORT_LIMIT_S)  # raw clients keep nothing alive while it imports torch
    with RawClient(host.socket) as silent, RawClient(host.socket) as waiter:
        silent.hello(job="a")
        lease = silent.ask("acquire", groups=["g1"])["lease"]
        if lack == "an agent":
            silent.ask("register", pid=None)
        else:
            rank.do("register")
        silent.ask("release", lease=lease)
        waiter.hello(job="b")
        waiter.start("acquire", groups=["g1"])
        while (told := waiter.receive())["t"] != "stalled":
            pass
        assert told["cause"] == "unsupported"
        assert "ts.torch.manage" in told["reason"]
        (pinned,) = host.events("pinned")
        assert pinned["job"] == own("a")
        assert "tslicectl retry" in pinned["way_out"]
        if lack == "managed tensors":
            rank.do("load", IMPORT_LIMIT_S, width=WIDTH, seed=0)
            subprocess.run(
                [sys.executable, "-m", "tsliced.ctl", "retry", own("a")],
                env=host.variables(),
                check=True,
                timeout=LIMIT_S,
            )
            while (told := waiter.receive()).get("lease") is None or "tokens" not in told:
                pass
            waiter.send({"t": "ack", "lease": told["lease"]})
            assert rank.do("resident") == 0
            waiter.ask("release", lease=told["lease"])
        waiter.send({"t": "bye"})
        silent.send({"t": "bye"})


def test_a_process_without_an_agent_is_not_attached_and_told_what_it_lacks(
    torch_host: Host,
) -> None:
    rank = torch_host.rank("a", program="torch_rank.py")
    rank.do("acquire", groups="g1", timeout=10)
    with RawClient(torch_host.socket) as tool:
        tool.hello(job="a", role="tool")
        code, text = tool.refusal("attach", pid=rank.pid, groups=["g1"])
    assert code == "not_cuda"
    assert "ts.torch.manage" in text


def test_a_daemon_that_was_killed_finds_its_parked_ranks_and_brings_them_back_g8(
    torch_host: Host,
) -> None:
    host = torch_host
    first, second = (trainer(host, name, seed) for seed, name in enumerate("ab"))
    assert host.states() == {first.pid: "parked"}
    host.kill_daemon()
    host.start_daemon()
    # (Who was never moved is known by NVML alone, which lists nobody here.)
    second.kill()
    first.do("acquire", groups="g1", timeout=60)
    assert host.states() == {first.pid: "running"}
    assert first.do("twin", width=WIDTH, seed=0, steps=1) == first.do("train", steps=0)
    first.do("release")


def test_a_rank_that_dies_with_its_tensors_away_leaves_the_group_to_others(
    torch_host: Host,
) -> None:
    host = torch_host
    first, second = (trainer(host, name, seed) for seed, name in enumerate("ab"))
    assert host.states() == {first.pid: "parked"}
    first.kill()
    until(lambda: not host.states(), "it is forgotten")
    assert second.do("acquire", groups="g1", timeout=10)["restored"] is False


AGENT: dict[str, Any] = {"job": "a", "role": "agent", "caps": ["tensors"]}


def hold_once(host: Host, agent: RawClient) -> dict[str, Any]:
    """Makes this process a rank of a job that has had a lease; returns its agent's welcome."""
    with RawClient(host.socket) as client:
        client.hello(job="a")
        lease = client.ask("acquire", groups=["g1"])["lease"]
        welcome = agent.hello(**AGENT)
        agent.ask("register", pid=None)
        client.ask("release", lease=lease)
        client.send({"t": "bye"})
    return welcome


def answer(agent: RawClient, order: str, **fields: object) -> None:
    """Waits for an order to the tensors, and answers it."""
    while (asked := agent.receive()).get("do") != order:
        pass
    agent.send({"re": asked["id"], **fields})


def test_an_agent_whose_connection_ends_in_the_middle_of_a_move_is_asked_again_g6(
    torch_host: Host,
) -> None:
    host = torch_host
    with RawClient(host.socket) as waiter, RawClient(host.socket) as again:
        with RawClient(host.socket) as agent:
            welcome = hold_once(host, agent)
            waiter.hello(job="b")
            asked = waiter.start("acquire", groups=["g1"])
            answer(agent, "freeze", state="frozen")
            while agent.receive().get("do") != "snapshot":
                pass
        session = {"session": welcome["session"], "secret": welcome["secret"]}
        assert again.hello(**AGENT, **session)["resumed"] is True
        answer(again, "snapshot", state="parked", bytes=4096, seconds=0.5, regions=[])
        lease = waiter.answer_to(asked)["lease"]
        waiter.send({"t": "ack", "lease": lease})
        (moved,) = host.operations("snapshot")
        assert (moved["bytes"], moved["seconds"]) == (4096, 0.5)
        waiter.ask("release", lease=lease)
        waiter.send({"t": "bye"})
        again.send({"t": "bye"})


def test_what_an_agent_says_wrong_is_no_state_and_no_trouble_to_the_daemon_g9(
    torch_host: Host,
) -> None:
    host = torch_host
    with RawClient(host.socket) as agent, RawClient(host.socket) as waiter:
        hold_once(host, agent)
        waiter.hello(job="b")
        waiter.start("acquire", groups=["g1"])
        answer(agent, "freeze", state=["frozen"], bytes="many", seconds=float("nan"))
        answer(agent, "query", err={"code": 7, "message": None, "state": {}})
        answer(agent, "query", state="running", bytes=-1, seconds=1e300)
        answer(agent, "freeze", state="frozen")
        assert host.operations("snapshot") == [], "nothing that it said before was believed"
        answer(agent, "snapshot", state="parked", bytes=True, regions=7)
        waiter.send({"t": "bye"})
        agent.send({"t": "bye"})
