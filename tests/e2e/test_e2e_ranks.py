"""Ranks that take part in a move by their callbacks, and ranks that never call anything."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import MIB, Host, MakeHost, RankError, resident_bytes, until
from raw_client import RawClient

from libtimeslice import Unavailable


def has_restore_thread(pid: int) -> bool:
    names = (task / "comm" for task in Path(f"/proc/{pid}/task").iterdir())
    return any(name.read_text().startswith("cuda") for name in names)


def test_callbacks_of_a_rank_run_around_a_switch(host: Host) -> None:
    rank, other = host.trainer("a", mib=8), host.rank("b")
    host.add_hooks(rank)
    other.do("acquire", groups="g1", timeout=20)
    assert rank.do("called") == ["pause"]
    assert host.states() == {rank.pid: "parked"}
    other.do("release")
    rank.do("acquire", groups="g1", timeout=20)
    assert rank.do("called") == ["pause", "resume"]


def test_a_callback_that_fails_turns_the_eviction_back(host: Host) -> None:
    rank, other = host.trainer("a", mib=8), host.rank("b")
    host.add_hooks(rank, failing=True)
    with pytest.raises(RankError, match="requests are in flight"):
        other.do("acquire", groups="g1", timeout=1)
    assert host.operations("freeze") == [], "nothing was frozen"
    until(lambda: host.states() == {rank.pid: "running"}, "it runs")
    called = rank.do("called")
    assert called[:2] == ["pause", "resume"], "whoever was told to pause is told to go on"
    assert rank.do("acquire", groups="g1", timeout=5)["restored"] is False


def test_a_rank_with_an_agent_frees_what_it_keeps_without_need_before_it_is_copied(
    host: Host,
) -> None:
    rank, other = host.trainer("a", mib=8), host.rank("b")
    rank.do("keep_cached", mib=32)
    sessions = host.status()["sessions"]
    rank.do("register")
    until(lambda: host.status()["sessions"] > sessions, "its agent is connected")
    before = resident_bytes(rank.pid)
    other.do("acquire", groups="g1", timeout=20)
    assert rank.do("called") == ["empty_cache"]
    assert host.states() == {rank.pid: "parked"}
    assert resident_bytes(rank.pid) - before < 24 * MIB, "32 MiB fewer were copied"


@pytest.mark.parametrize("silence", ["says nothing", "hangs up"])
def test_an_agent_that_does_not_answer_turns_the_eviction_back(
    make_host: MakeHost, silence: str
) -> None:
    host = make_host(settings={"limits": {"quiesce_timeout_s": 0.3}})
    rank, other = host.trainer("a", mib=8), host.rank("b")
    with RawClient(host.socket) as agent:
        agent.hello(job="a", role="agent", caps=["quiesce"])
        asked = other.start("acquire", groups="g1", timeout=20)
        request = agent.receive()
        assert (request["t"], request["groups"], request["timeout_s"]) == ("quiesce", ["g1"], 0.3)
        if silence == "hangs up":
            agent.socket.close()
        failed = until(lambda: host.events("eviction_failed"), "it is turned back")[0]
        expected = "not connected" if silence == "hangs up" else "did not answer within 0.3 s"
        assert expected in failed["reason"]
        assert host.operations("freeze") == []
        if silence == "says nothing":
            # It is told to go on; from now on it answers, also what it was asked before.
            agent.send({"re": request["id"]})
            while (request := agent.receive())["t"] != "quiesce":
                agent.send({"re": request["id"]})
            agent.send({"re": request["id"]})
            assert asked.wait()["state"] == "held"
            assert host.states() == {rank.pid: "parked"}


def test_an_agent_that_is_away_is_waited_for_and_told_to_resume_until_it_heard(
    host: Host,
) -> None:
    rank, other = host.trainer("a", mib=8), host.rank("b")
    with RawClient(host.socket) as agent:
        welcome = agent.hello(job="a", role="agent", caps=["quiesce"])
    session = {"session": welcome["session"], "secret": welcome["secret"]}
    who = {"job": "a", "role": "agent", "caps": ["quiesce"], **session}
    asked = other.start("acquire", groups="g1", timeout=60)
    until(lambda: host.group()["next"], "it is on its way")
    with RawClient(host.socket) as agent:
        assert agent.hello(**who)["resumed"] is True
        request = agent.receive()
        assert request["t"] == "quiesce"
        agent.send({"re": request["id"]})
        assert asked.wait()["state"] == "held"
        assert host.states() == {rank.pid: "parked"}
        other.do("release")
        back = rank.start("acquire", groups="g1", timeout=60)
        assert agent.receive()["t"] == "resume"
    # It hung up instead of answering, and is asked again.
    with RawClient(host.socket) as agent:
        assert agent.hello(**who)["resumed"] is True
        request = agent.receive()
        assert request["t"] == "resume"
        agent.send({"re": request["id"]})
        assert back.wait()["restored"] is True
        agent.send({"t": "bye"})
    assert host.events("eviction_failed") == []


def test_a_rank_can_make_itself_known(host: Host) -> None:
    rank = host.rank("a")
    assert rank.do("register") == ["g1", "g2"], "without a context it may come to be on any"
    rank.do("context", device=1)
    assert rank.do("register") == ["g2"]
    assert host.ask("ps")["ranks"][0]["pid"] == rank.pid


def test_a_process_that_never_calls_us_is_attached_and_parked_for_another(host: Host) -> None:
    silent = host.rank()
    silent.do("context")
    silent.do("fill", mib=40)
    until(lambda: has_restore_thread(silent.pid), "the driver has a thread in it")
    digest = silent.do("digest")
    answer = host.ask("attach", job="quiet", pid=silent.pid, groups=None)
    assert answer["groups"] == ["g1"]
    other = host.rank("b")
    other.do("initialise", group="g1", mib=40, seed=1)
    assert host.states()[silent.pid] == "parked"
    with host.connection(role="client", job="quiet") as connection:
        lease = connection.request({"t": "acquire", "groups": ["g1"]}, 20)
        assert lease["restored"] is True
        assert silent.do("digest") == digest


def test_a_stopped_process_is_not_attached_until_it_goes_on(host: Host) -> None:
    silent = host.rank()
    silent.do("context")
    until(lambda: has_restore_thread(silent.pid), "the driver has a thread in it")
    silent.stop()
    with pytest.raises(Unavailable, match="SIGCONT"):
        host.ask("attach", job="quiet", pid=silent.pid, groups=None)
    os.kill(silent.pid, signal.SIGCONT)
    assert host.ask("attach", job="quiet", pid=silent.pid, groups=None)["groups"] == ["g1"]


def test_a_stranger_on_the_devices_is_named_and_keeps_others_off_g1(host: Host) -> None:
    stranger = host.rank()
    stranger.do("context")
    stranger.do("fill", mib=8)
    seen = until(lambda: host.events("stranger"), "it is seen")[0]
    assert seen["pid"] == stranger.pid
    rank = host.rank("a")
    with pytest.raises(RankError, match=f"pid {stranger.pid}"):
        rank.do("acquire", groups="g1", timeout=1)
    stranger.kill()
    assert rank.do("acquire", groups="g1", timeout=20)["state"] == "held"
