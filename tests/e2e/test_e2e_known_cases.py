"""Cases that others ran into (docs/known-cases.md) and that no other test here lives through."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest
from harness import Host, MakeHost, Rank, until
from raw_client import RawClient

WAITERS = 1000


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """Lets this process have so many more files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count += len(os.listdir("/proc/self/fd"))
    if soft < count and hard < count:
        pytest.skip(f"this process may have only {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_waiters_go_before_one_that_asks_again_at_once_g4(make_host: MakeHost) -> None:
    """Each is a job of its own; each is granted in the order in which it asked."""
    host = make_host(settings={"limits": {"max_clients_per_uid": WAITERS + 50}})
    # Each has a connection, and a file for what it sees.
    with descriptors(2 * WAITERS + 200), ExitStack() as stack:
        greedy = stack.enter_context(RawClient(host.socket))
        greedy.hello(job="greedy")
        lease = greedy.ask("acquire", groups=["g1"])["lease"]
        waiters: list[tuple[RawClient, int]] = []
        for number in range(WAITERS):
            client = stack.enter_context(RawClient(host.socket))
            client.hello(job=f"waiter-{number}")
            asked = client.start("acquire", groups=["g1"])
            # The answer to the ping says that the daemon has had what came before it.
            client.ask("ping")
            waiters.append((client, asked))
        assert host.group()["waiters"] == WAITERS
        greedy.ask("release", lease=lease)
        again = greedy.start("acquire", groups=["g1"])
        tokens = []
        for client, asked in waiters:
            grant = client.answer_to(asked)
            tokens.append(grant["tokens"]["g1"])
            client.ask("release", lease=grant["lease"])
            client.send({"t": "bye"})
        last = greedy.answer_to(again)
        tokens.append(last["tokens"]["g1"])
        assert all(before < after for before, after in pairwise(tokens))
        greedy.send({"t": "bye"})
    until(lambda: host.group()["holder"] is None, "all are gone")


def test_two_groups_are_switched_at_the_same_time(host: Host) -> None:
    pairs: dict[str, list[Rank]] = {}
    for device, group in enumerate(("g1", "g2")):
        pairs[group] = [
            host.rank(f"{job}-{group}", CUDA_VISIBLE_DEVICES=f"{device}") for job in "ab"
        ]
        for rank in pairs[group]:
            rank.do("initialise", group=group, mib=8, seed=device)
    since = int(host.events()[-1]["seq"])
    host.fault("checkpoint * * delay:500")
    waiting = [ranks[0].start("acquire", groups=group) for group, ranks in pairs.items()]
    for pending in waiting:
        assert pending.wait()["restored"] is True
    host.fault()
    ends = {event["groups"]: event for event in host.operations("snapshot", since=since + 1)}
    assert set(ends) == {"g1", "g2"}
    begins = {group: event["at"] - event["seconds"] for group, event in ends.items()}
    assert begins["g1"] < ends["g2"]["at"], "one began before the other had ended"
    assert begins["g2"] < ends["g1"]["at"]


@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_the_next_job_is_served_when_the_one_that_was_left_on_the_devices_is_gone_g11(
    host: Host, how: str
) -> None:
    """Nobody waited when it released, so its state stayed; then it came to its end."""
    owner, survivor = host.trainer("owner"), host.trainer("survivor")
    owner.do("acquire", groups="g1", timeout=20)
    assert owner.do("release")["deferred"] is True
    since = int(host.events()[-1]["seq"])
    leave(owner, how)
    for _ in range(2):
        survivor.do("acquire", groups="g1", timeout=20)
        survivor.do("release")
    assert len(survivor.do("digest")) == 64
    assert host.events("faulted", "blocked", "pinned", since=since) == []
    until(lambda: host.job("owner") == {}, "it is forgotten")


def test_a_job_whose_owner_ends_in_the_middle_of_its_late_snapshot_is_no_fault_g11(
    host: Host,
) -> None:
    owner, survivor = host.trainer("owner"), host.rank("survivor")
    since = int(host.events()[-1]["seq"])
    host.fault(f"checkpoint {owner.pid} * delay:1000")
    pending = survivor.start("acquire", groups="g1", timeout=20)
    until(lambda: doing(host, owner) == "snapshot", "it is being snapshotted")
    owner.kill()
    assert pending.wait()["state"] == "held"
    host.fault()
    survivor.do("release")
    assert host.events("faulted", "blocked", "pinned", since=since) == []


def doing(host: Host, rank: Rank) -> str | None:
    ranks = host.ask("ps")["ranks"]
    return next((shown["doing"] for shown in ranks if shown["pid"] == rank.pid), None)


def leave(rank: Rank, how: str) -> None:
    if how == "it is killed":
        rank.kill()
        return
    assert rank.process.stdin is not None
    rank.process.stdin.close()
    rank.process.wait(20)


@pytest.mark.parametrize("registered", [False, True], ids=["unknown", "registered"])
def test_jobs_that_were_started_before_their_turn_and_idle_are_in_nobodys_way(
    host: Host, registered: bool
) -> None:
    """Their processes are there, without device state, before anybody asks."""
    first, second = host.rank("first"), host.rank("second")
    if registered:
        for rank in (first, second):
            rank.do("register")
    for rank in (first, second, first, second):
        lease = rank.do("acquire", groups="g1", timeout=10)
        assert lease["waited_s"] < 5
        rank.do("release")
    assert host.operations("freeze", "snapshot") == []


def test_a_job_id_that_is_used_again_starts_afresh(host: Host) -> None:
    """What the first one left parked, or had done wrong, is not the second one's."""
    parked = host.trainer("again", seed=1)
    other = host.trainer("other", seed=2)
    until(lambda: host.states().get(parked.pid) == "parked", "it is parked")
    parked.kill()
    until(lambda: host.job("again") == {}, "it is forgotten")
    successor = host.trainer("again", seed=3)
    digest = successor.do("digest")
    other.do("acquire", groups="g1", timeout=20)
    other.do("release")
    lease = successor.do("acquire", groups="g1", timeout=20)
    assert lease["restored"] is True
    assert successor.do("digest") == digest


def test_a_cluster_that_is_looked_at_all_the_time_answers_from_memory(host: Host) -> None:
    """A status costs no scan: NVML may hang, and it is answered all the same."""
    host.trainer("a")
    host.fault("nvml * * stall")
    with host.connection() as connection:
        for _ in range(200):
            assert connection.request({"t": "status"}, 5)["status"]["groups"]
    host.fault()
