"""Who can have a job moved from another host, and who cannot (G10)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from harness import LIMIT_S, Host, MakeHost, Settings, until
from meddler import How, Meddler
from net_hosts import Cluster, Gang, wait_for

from tsliced.config import PeerAddress, load
from tsliced.config.peers import known_groups, shared_groups
from tsliced.core.actions import EndSession
from tsliced.core.events import ReleaseRequested, SessionClosed
from tsliced.core.messages import EndJob, PeerMessage, Presence, RankGone
from tsliced.core.model import (
    Counter,
    Goal,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankId,
    RequestId,
    SessionId,
    Stamp,
    TenancyKey,
)
from tsliced.core.signals import Order
from tsliced.net.peer_auth import Credentials, load_credentials
from tsliced.net.peer_codec import Encoder
from tsliced.net.peer_link import Identity, dial, new_incarnation
from tsliced.net.peer_messages import FEATURES, Frames, Hello, PeerRefused, Ping, Pong, Say

SHARED: Settings = {"groups.both": {"devices": ["n1:0", "n2:0"]}}
#: Of no epoch that is ever reached: a participant that believed it would obey nobody else.
LATE = Stamp(0, Counter(2**31 - 1, 1), 0)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, "psk", "n0", "n1", "n2")


def start(make_host: MakeHost, cluster: Cluster, name: str, **ports: int) -> Host:
    """Starts a host of the cluster, for which others may be at other ports than their own."""
    hosts = [f"{n}=127.0.0.1:{ports.get(n, port)}" for n, port in cluster.ports.items()]
    return make_host(settings={**cluster.settings(name, hosts=hosts), **SHARED})


def await_link(n1: Host, n2: Host) -> None:
    wait_for(n1, "n2", "connected")
    wait_for(n2, "n1", "connected")


# --- on the way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [b"order", b"report"], ids=["an order", "a report"])
def test_a_move_with_whose_messages_somebody_meddles_is_made_all_the_same_g10(
    make_host: MakeHost, cluster: Cluster, word: bytes
) -> None:
    with Meddler(cluster.ports["n2"]) as meddler:
        n1 = start(make_host, cluster, "n1", n2=meddler.port)
        n2 = start(make_host, cluster, "n2")
        await_link(n1, n2)
        jobs = [Gang(job, n1, (n1, n2), group="both").load() for job in "ab"]
        accidents: list[How] = ["changed", "repeated", "left out", "held back"]
        for number, how in enumerate(accidents):
            comes, leaves = jobs[number % 2], jobs[1 - number % 2]
            before = meddler.connections
            meddler.meddle(word, how)
            comes.acquire()
            assert meddler.is_done, how
            until(lambda n=before: meddler.connections > n, "the link is made anew")  # type: ignore[misc]  # of a lambda
            assert comes.look() == comes.digests, how
            assert {n2.states()[pid] for pid in leaves.pids & n2.states().keys()} == {"parked"}
            comes.release()
        refused = [e for host in (n1, n2) for e in host.events("peer_refused")]
        assert {event["code"] for event in refused} == {"bad_tag"}


# --- who is nobody --------------------------------------------------------------------------------


def moves(job: str, pid: int, stamp: Stamp = LATE) -> list[PeerMessage]:
    """Returns what would take a job off its devices, and its lease from it, if it were believed."""
    key = JobKey("", os.getuid(), job)
    tenancy = TenancyKey(key, (GroupName("both"),))
    rank = RankId(HostName("n2"), ProcessId(pid, 1))
    return [
        *(Order(host=HostName("n2"), tenancy=tenancy, stamp=stamp, goal=goal) for goal in Goal),
        EndJob(job=key, text="it is said so", grace_s=0.0, onward=True),
        RankGone(job=key, groups=tenancy.groups, rank=rank),
        Presence(group=GroupName("both"), ranks=(), clients=(), shortages=()),
    ]


def session_messages(session: str, lease: str) -> list[PeerMessage]:
    """Returns what would end a client's session, or its lease, if it were believed."""
    return [
        ReleaseRequested(session=SessionId(session), request=RequestId(9), lease=LeaseId(lease)),
        SessionClosed(session=SessionId(session)),
        EndSession(session=SessionId(session), text="it is said so"),
    ]


def test_without_the_key_a_move_is_not_even_heard_g10(
    make_host: MakeHost, cluster: Cluster
) -> None:
    n1, n2 = start(make_host, cluster, "n1"), start(make_host, cluster, "n2")
    await_link(n1, n2)
    job = Gang("job", n1, (n1, n2), group="both").load()
    job.acquire()
    order = Frames(max_bytes=1 << 20).encode(Say(kind="order", fields=()))
    with socket.create_connection(("127.0.0.1", cluster.ports["n2"]), LIMIT_S) as sock:
        sock.sendall(order)
        while sock.recv(1 << 16):
            pass  # a refusal, and then the end
    for secret in (b"another key, of as many bytes as", b"x" * 64):
        with pytest.raises(PeerRefused, match="another key"):
            say(n1, n2, cluster, moves("job", 1), secret=secret)
    assert_untouched(job, n1, n2)


def test_a_host_that_has_no_part_in_a_job_can_do_nothing_to_it_g10(
    make_host: MakeHost, cluster: Cluster
) -> None:
    n1, n2 = start(make_host, cluster, "n1"), start(make_host, cluster, "n2")
    await_link(n1, n2)
    job = Gang("job", n1, (n1, n2), group="both").load()
    job.acquire()
    lease = job.driver.do("lease_id")
    session = lease.rpartition(".")[0]
    for host, rank in ((n1, job.ranks["n1"]), (n2, job.ranks["n2"])):
        messages = [*moves("job", rank.pid), *session_messages(session, lease)]
        say(n1, host, cluster, messages, name="n0")
    assert_untouched(job, n1, n2)


def test_a_job_without_a_process_on_a_host_is_not_moved_there_and_not_ended_g10(
    make_host: MakeHost, cluster: Cluster
) -> None:
    """Even the arbiter's own word, or of whoever has its key, is for jobs that are here."""
    n1, n2 = start(make_host, cluster, "n1"), start(make_host, cluster, "n2")
    await_link(n1, n2)
    here = n2.trainer("here", mib=8, group="both")
    until(lambda: n2.states() == {here.pid: "running"}, "it is known")
    digest = here.do("digest")
    token = here.do("acquire", groups="both", timeout=20)["tokens"]["both"]
    here.do("release")
    n1.kill_daemon()
    say(n1, n2, cluster, moves("elsewhere", here.pid), name="n1")
    assert n2.states() == {here.pid: "running"}
    assert n2.operations() == []
    # The same words about the job that is here are obeyed: so they were understood.
    # Its arbiter begins with a later epoch when it is back.
    next_one = Stamp(0, Counter(token >> 32, (token & 0xFFFFFFFF) + 1), 0)
    orders = [m for m in moves("here", 1, next_one) if isinstance(m, Order)]
    say(n1, n2, cluster, [m for m in orders if m.goal is Goal.FROZEN], name="n1")
    until(lambda: n2.operations("freeze"), "it is frozen")
    n1.start_daemon()
    assert n1.rank("here").do("acquire", groups="both", timeout=30)["state"] == "held"
    assert here.do("digest") == digest


def assert_untouched(job: Gang, *hosts: Host) -> None:
    """Nothing was moved, and the job has its lease."""
    for host in hosts:
        assert set(host.states().values()) == {"running"}
        assert host.operations() == []
        assert not host.events("rank_lost", "ending", "host_died")
    assert hosts[0].group("both")["holder"]["id"] == job.job
    assert job.driver.do("look")["state"] == "held"
    assert job.look() == job.digests
    job.release()


def say(
    like: Host,
    to: Host,
    cluster: Cluster,
    messages: Iterable[PeerMessage],
    *,
    name: str = "n0",
    secret: bytes | None = None,
) -> None:
    """Connects to a host, with the configuration of another, and says things to its core."""
    asyncio.run(_say(like, to, cluster, messages, name, secret))


async def _say(
    like: Host,
    to: Host,
    cluster: Cluster,
    messages: Iterable[PeerMessage],
    name: str,
    secret: bytes | None,
) -> None:
    config = load(like.config)
    other, here = HostName(to.name), HostName(name)

    def hello(_other: HostName) -> Hello:
        return Hello(
            host=name,
            incarnation=new_incarnation(),
            release="0",
            features=FEATURES,
            cluster="",
            heartbeat_s=config.peers.heartbeat_s,
            groups=shared_groups(config, other) if name == like.name else {},
            known=known_groups(config, other) if name == like.name else {},
        )

    credentials = load_credentials(config.peers, here)
    if secret is not None:
        credentials = Credentials(auth="psk", secret=secret)
    identity = Identity(
        host=here,
        settings=config.peers,
        credentials=credentials,
        hello=hello,
        allowed=frozenset({other}),
    )
    async with asyncio.timeout(LIMIT_S):
        link, _ = await dial(identity, other, PeerAddress("127.0.0.1", cluster.ports[to.name]))
        encoder = Encoder()
        link.send_bodies([encoder.encode(message) for message in messages])
        # What is answered came behind all that was said.
        link.send(Ping(seq=1))
        while not isinstance(await link.receive(), Pong):
            pass
        link.close()
