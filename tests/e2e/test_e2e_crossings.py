"""Grants that cross something on their way: a cancel, a time-out, a death, a stop, a restart."""

from __future__ import annotations

import os
import signal

import pytest
from harness import Host, MakeHost, RankError, own, until
from raw_client import RawClient

from libtimeslice.protocol import Message


@pytest.fixture
def quick(make_host: MakeHost) -> Host:
    """A host on which a grant that nobody confirms is handed back soon."""
    return make_host(settings={"limits": {"ack_s": 0.4}})


def queue_up(host: Host, waiters: int) -> None:
    until(lambda: host.group()["waiters"] == waiters, f"{waiters} wait")


# --- the client's side


def test_a_waiter_that_is_killed_in_the_moment_of_its_grant_leaves_the_group_free_g5(
    host: Host,
) -> None:
    holder, victim, last = (host.rank(job) for job in "abc")
    holder.do("acquire", groups="g1")
    victim.start("acquire", groups="g1")
    queue_up(host, 1)
    asked = last.start("acquire", groups="g1", timeout=20)
    queue_up(host, 2)
    # It cannot take the grant in any more.
    victim.stop()
    holder.do("release")
    until(lambda: host.group()["holder"] == host.job("b")["job"], "it is granted")
    victim.kill()
    assert asked.wait()["state"] == "held"


def test_a_grant_that_nobody_takes_in_is_handed_back_and_fenced_g5(quick: Host) -> None:
    holder, stopped, last = (quick.rank(job) for job in "abc")
    holder.do("acquire", groups="g1")
    asked = stopped.start("acquire", groups="g1", timeout=60)
    queue_up(quick, 1)
    waiting = last.start("acquire", groups="g1", timeout=20)
    queue_up(quick, 2)
    stopped.stop()
    holder.do("release")
    lease = waiting.wait()
    assert lease["state"] == "held"
    os.kill(stopped.pid, signal.SIGCONT)
    late = asked.wait()
    until(lambda: stopped.do("look")["state"] == "lost", "it learns that it is too late")
    assert late["tokens"]["g1"] < lease["tokens"]["g1"], "whoever checks tokens refuses it"
    # It is as good as any other afterwards.
    stopped.do("release")
    last.do("release")
    assert stopped.do("acquire", groups="g1", timeout=20)["state"] == "held"


def test_a_client_that_hangs_up_on_its_grant_finds_it_when_it_resumes_g6(host: Host) -> None:
    holder = host.rank("a")
    holder.do("acquire", groups="g1")
    with RawClient(host.socket) as client:
        welcome = client.hello()
        client.start("acquire", groups=["g1"])
        queue_up(host, 1)
        holder.do("release")
        until(lambda: host.group()["state"] == "held", "it is granted")
        # The reply is in its buffer, and it never reads it.
    with RawClient(host.socket) as client:
        again = client.hello(session=welcome["session"], secret=welcome["secret"])
        (lease,) = again["leases"]
        client.send({"t": "acquire", "id": 1, "groups": ["g1"]})
        granted = client.receive()
        assert (granted["lease"], granted["tokens"]) == (lease["lease"], lease["tokens"])
        client.send({"t": "bye"})
    until(lambda: host.group()["holder"] is None, "nothing of it is left")


def test_a_cancel_that_crosses_the_grant_is_told_so_and_the_lease_is_released_g5(
    host: Host,
) -> None:
    holder = host.rank("a")
    holder.do("acquire", groups="g1")
    with RawClient(host.socket) as client:
        client.hello()
        acquire = client.start("acquire", groups=["g1"])
        queue_up(host, 1)
        holder.do("release")
        until(lambda: host.group()["state"] == "held", "it is granted")
        cancel = client.start("cancel", acquire=acquire)
        granted = client.answer_to(acquire)
        assert client.answer_to(cancel) == {"re": cancel, "cancelled": False}
        client.ask("release", lease=granted["lease"])
        assert host.group()["holder"] is None
        client.send({"t": "bye"})


def test_a_wait_that_ends_while_the_daemon_stands_still_leaves_no_trace_g5(host: Host) -> None:
    holder, waiter = host.rank("a"), host.rank("b")
    holder.do("acquire", groups="g1")
    assert host.daemon is not None
    asked = waiter.start("acquire", groups="g1", timeout=0.5)
    queue_up(host, 1)
    releasing = None
    host.daemon.send_signal(signal.SIGSTOP)
    try:
        # Both are in the daemon's buffers when it goes on: the release, and the end of the wait.
        releasing = holder.start("release")
        until(lambda: waiter_gave_up(host), "the client gives up by itself")
    finally:
        host.daemon.send_signal(signal.SIGCONT)
    releasing.wait()
    with pytest.raises(RankError) as caught:
        asked.wait()
    assert caught.value.code == "timeout"
    until(lambda: host.group()["state"] == "free", "nothing of it is left")
    assert holder.do("acquire", groups="g1", timeout=20)["state"] == "held"


def waiter_gave_up(host: Host) -> bool:
    # 0.5 s, and what the library adds for an answer that is on its way.
    (acquire,) = [a for a in host.judge().acquires if a.job == own("b")]
    return acquire.ended_at is not None


@pytest.mark.parametrize("while_down", ["acquire", "release"])
def test_a_client_that_dies_while_the_daemon_is_down_leaves_no_trace_g3(
    host: Host, while_down: str
) -> None:
    holder, victim = host.rank("a"), host.rank("b")
    if while_down == "release":
        victim.do("acquire", groups="g1")
    else:
        holder.do("acquire", groups="g1")
        victim.start("acquire", groups="g1")
        queue_up(host, 1)
    host.kill_daemon()
    victim.kill()
    host.start_daemon()
    until(lambda: host.job("b") == {}, "it is forgotten")
    assert host.group()["waiters"] == 0
    if while_down == "acquire":
        holder.do("release")
    assert holder.do("acquire", groups="g1", timeout=20)["state"] == "held"


# --- the same question again, to the next daemon


def resume(client: RawClient, welcome: Message) -> Message:
    again = client.hello(session=welcome["session"], secret=welcome["secret"])
    assert again["resumed"] is True
    return again


@pytest.mark.parametrize("end", ["crash", "stop"])
def test_answers_are_the_same_from_the_next_daemon_g6(host: Host, end: str) -> None:
    with RawClient(host.socket) as client:
        welcome = client.hello()
        first = client.ask("acquire", groups=["g1"])
        client.ask("release", lease=first["lease"])
        held = client.ask("acquire", groups=["g2"])
        refused = client.ask("acquire", groups=["g9"])
        timed_out = client.ask("acquire", groups=["g2"], timeout_s=0)
    host.end_daemon(end)
    host.start_daemon()
    with RawClient(host.socket) as client:
        again = resume(client, welcome)
        assert again["leases"] == [{key: held[key] for key in ("lease", "groups", "tokens")}]
        for number, groups in ((3, ["g2"]), (4, ["g9"]), (5, ["g2"])):
            client.send({"t": "acquire", "id": number, "groups": groups})
        assert client.receive()["tokens"] == held["tokens"]
        assert client.receive()["err"]["code"] == refused["err"]["code"]
        assert client.receive()["err"]["code"] == timed_out["err"]["code"]
        # The one that was given back is over, however often its release comes.
        for number in (2, 2, 6):
            client.send({"t": "release", "id": number, "lease": first["lease"]})
            assert client.receive() == {"re": number, "waiters": 0, "deferred": True}
        client.send({"t": "acquire", "id": 1, "groups": ["g1"]})
        assert client.receive()["err"]["code"] == "lease_ended"
        assert host.group("g1")["holder"] is None
        client.send({"t": "bye"})


@pytest.mark.parametrize("end", ["crash", "stop"])
def test_one_that_waits_is_asked_for_twice_and_answered_once_by_the_next_daemon_g6(
    host: Host, end: str
) -> None:
    holder = host.rank("a")
    holder.do("acquire", groups="g1")
    with RawClient(host.socket) as client:
        welcome = client.hello()
        client.start("acquire", groups=["g1"])
        queue_up(host, 1)
    host.end_daemon(end)
    host.start_daemon()
    with RawClient(host.socket) as client:
        resume(client, welcome)
        for _ in range(2):
            client.send({"t": "acquire", "id": 1, "groups": ["g1"]})
        queue_up(host, 1)
        until(lambda: holder.do("look")["state"] == "held", "the holder is back")
        holder.do("release")
        granted = client.receive()
        assert granted["re"] == 1
        client.send({"t": "ack", "lease": granted["lease"]})
        assert client.ask("ping") == {"re": client._ids}, "there is one answer"
        client.send({"t": "bye"})


def test_a_grant_that_nobody_confirmed_is_handed_back_by_the_next_daemon_too_g5(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"limits": {"grace_s": 5.0, "ack_s": 1.0}})
    holder, last = host.rank("a"), host.rank("c")
    holder.do("acquire", groups="g1")
    with RawClient(host.socket) as client:
        client.hello()
        client.start("acquire", groups=["g1"])
        queue_up(host, 1)
        asked = last.start("acquire", groups="g1", timeout=30)
        queue_up(host, 2)
        holder.do("release")
        until(lambda: host.group()["state"] == "held", "it is granted")
        host.kill_daemon()
    host.start_daemon()
    assert asked.wait()["state"] == "held"
