"""The client library and the daemon over connections that lose, tear, repeat and delay frames."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import LIMIT_S, Host, own, until
from lossy_proxy import Fate, LossyProxy, Side
from raw_client import RawClient

from libtimeslice import AcquireTimeout, Lease, LeaseState, TimeSlice, TimeSliceError, connect
from libtimeslice.aio import AsyncTimeSlice
from libtimeslice.aio import connect as aio_connect
from libtimeslice.protocol import Message

GRACE_S = 2.0
ACK_S = 0.5


@pytest.fixture(scope="module")
def host(softcuda_build: Path) -> Iterator[Host]:
    """A host for all tests here: each leaves it with nobody on it."""
    host = Host(softcuda_build, settings={"limits": {"grace_s": GRACE_S, "ack_s": ACK_S}})
    host.start_daemon()
    yield host
    host.close()


@pytest.fixture
def proxy(host: Host) -> Iterator[LossyProxy]:
    with (
        tempfile.TemporaryDirectory() as directory,
        LossyProxy(Path(directory) / "s", host.socket) as proxy,
    ):
        yield proxy
    until(lambda: is_free(host), "nothing is left of the clients")


@pytest.fixture
def ts(proxy: LossyProxy) -> Iterator[TimeSlice]:
    with connect(proxy.path, job="lossy", reply_limit_s=10) as client:
        yield client


@pytest.fixture
def other(host: Host) -> Iterator[RawClient]:
    """Another job's client, with a good connection."""
    with RawClient(host.socket) as client:
        client.hello(job="other")
        yield client
        client.send({"t": "bye"})


def is_free(host: Host) -> bool:
    groups = host.status()["groups"]
    return all(group["holder"] is None and group["waiters"] == 0 for group in groups)


def latest(host: Host) -> int:
    """The number of the next event."""
    return int(host.ask("events", since=None, follow=False, limit=10_000)["next"])


#: Every message of a plain story, and who sends it.
MESSAGES: list[tuple[Side, str]] = [
    *(("client", name) for name in ("hello", "register", "acquire", "ack", "release", "status")),
    *(("daemon", name) for name in ("welcome", "register", "acquire", "release", "status")),
]
#: A socket loses nothing but with its connection, and repeats nothing: that is done by the client,
#: which never does it to a hello.
ACCIDENTS = [
    (sender, name, fate)
    for sender, name in MESSAGES
    for fate in (Fate.CUT, Fate.CUT_AFTER, Fate.TEAR, Fate.REPEAT)
    if fate is not Fate.REPEAT or name not in ("hello", "welcome")
]


class Waiting:
    """An acquire in a thread of its own."""

    def __init__(self, ts: TimeSlice, group: str = "g1") -> None:
        self._lease: Lease | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(ts, group), daemon=True)
        self._thread.start()

    def _run(self, ts: TimeSlice, group: str) -> None:
        try:
            self._lease = ts.acquire(group, timeout=LIMIT_S)
        except BaseException as error:
            self._error = error

    def result(self) -> Lease:
        """Waits for the lease, or raises what the acquire raised."""
        self._thread.join(LIMIT_S)
        if self._error is not None:
            raise self._error
        assert self._lease is not None, "the acquire did not return"
        return self._lease


@pytest.mark.parametrize(
    ("sender", "name", "fate"), ACCIDENTS, ids=lambda part: str(getattr(part, "value", part))
)
def test_whatever_becomes_of_one_frame_a_lease_is_granted_once_and_given_back_g6(
    host: Host,
    proxy: LossyProxy,
    ts: TimeSlice,
    other: RawClient,
    sender: Side,
    name: str,
    fate: Fate,
) -> None:
    rule = proxy.rule(sender, name, fate)
    since = latest(host)
    held = other.ask("acquire", groups=["g1"])
    ts.register()
    waiting = Waiting(ts)
    until(lambda: host.group()["waiters"] == 1, "it waits")
    other.ask("release", lease=held["lease"])
    with waiting.result() as lease:
        until(lambda: state_of(lease) is LeaseState.HELD, "it is certain")
        group = host.group()
        assert (group["holder"]["id"], group["token"]) == ("lossy", lease.token)
        ts.status()
    until(lambda: host.group()["holder"] is None, "it is given back")
    assert (lease.state, lease.reason) == (LeaseState.RELEASED, None)
    assert rule.left == 0, "the frame never came"
    assert host.grants(job=own("lossy"), since=since) == 1


def state_of(lease: Lease) -> LeaseState:
    # A type checker takes an attribute to keep what was seen in it.
    return lease.state


@pytest.mark.parametrize("fate", [Fate.CUT, Fate.CUT_AFTER, Fate.TEAR], ids=lambda f: f.value)
@pytest.mark.parametrize("sender", ["client", "daemon"])
@pytest.mark.parametrize("granted", [False, True], ids=["waiting", "just granted"])
def test_an_acquire_whose_cancel_is_lost_leaves_nothing_g5(
    host: Host, proxy: LossyProxy, other: RawClient, sender: Side, fate: Fate, granted: bool
) -> None:
    """The task is cancelled while it waits, or at the moment of its grant."""
    rule = proxy.rule(sender, "cancel", fate)
    if granted:
        # The grant is under way when the task gives up.
        proxy.rule("daemon", "acquire", 0.3)
    held = other.ask("acquire", groups=["g1"])

    async def story() -> None:
        async with aio_connect(proxy.path, job="lossy") as ts:
            asking = asyncio.create_task(ts.acquire("g1"))
            await asyncio.to_thread(until, lambda: host.group()["waiters"] == 1, "it waits")
            if granted:
                await asyncio.to_thread(other.ask, "release", lease=held["lease"])
                await asyncio.to_thread(until, lambda: holder(host) == "lossy", "it is granted")
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(until, lambda: holder(host) != "lossy", "it is given back")
            await asyncio.to_thread(until, lambda: host.group()["waiters"] == 0, "nobody waits")
            assert not ts.holding
            await ts.status()

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))
    assert rule.left == 0, "the frame never came"


def holder(host: Host) -> str | None:
    found = host.group()["holder"]
    return None if found is None else str(found["id"])


def test_a_grant_that_never_arrives_is_handed_back_and_the_next_waiter_served_g5(
    host: Host, proxy: LossyProxy, other: RawClient
) -> None:
    """The connection stands, so only the missing `ack` tells."""
    held = other.ask("acquire", groups=["g1"])
    with RawClient(proxy.path) as deaf:
        deaf.hello(job="deaf")
        proxy.rule("daemon", "acquire", Fate.DROP)
        asked = deaf.start("acquire", groups=["g1"])
        until(lambda: host.group()["waiters"] == 1, "it waits")
        again = other.start("acquire", groups=["g1"])
        other.ask("release", lease=held["lease"])
        assert other.answer_to(again)["groups"] == ["g1"]
        notice = deaf.receive()
        assert (notice["t"], notice["lease"]) == ("lost", deaf_lease(proxy, asked))
        code, _ = deaf.refusal("release", lease=notice["lease"])
        assert code == "lease_ended"
        deaf.send({"t": "bye"})


def deaf_lease(proxy: LossyProxy, asked: int) -> str:
    answers = [m for side, m in proxy.messages if side == "daemon" and m.get("re") == asked]
    return str(answers[0]["lease"])


def test_a_release_that_comes_twice_is_answered_twice_and_frees_once_g6(
    host: Host, proxy: LossyProxy
) -> None:
    with RawClient(proxy.path) as client, RawClient(host.socket) as other:
        client.hello(job="lossy")
        other.hello(job="other")
        lease = client.ask("acquire", groups=["g1"])["lease"]
        proxy.rule("client", "release", Fate.REPEAT)
        asked = client.start("release", lease=lease)
        first, second = client.receive(), client.receive()
        assert first == second == {"re": asked, "waiters": 0, "deferred": True}
        mine = other.ask("acquire", groups=["g1"])
        later = client.ask("release", lease=lease)
        assert (later["waiters"], later["deferred"]) == (0, True), "as it was answered at its end"
        assert host.group()["token"] == mine["tokens"]["g1"], "it is the other's still"
        for each in (client, other):
            each.send({"t": "bye"})


def test_an_answer_that_is_late_finds_its_request_given_up_and_hurts_no_other(
    host: Host, proxy: LossyProxy, ts: TimeSlice, other: RawClient
) -> None:
    held = other.ask("acquire", groups=["g1"])
    ts.status()
    proxy.rule("daemon", "acquire", 1.5)  # and all that comes behind it
    with pytest.raises(AcquireTimeout):
        ts.acquire("g1", timeout=0.1)
    assert ts.status()
    with ts.lease("g2") as lease:
        assert lease.state is LeaseState.HELD
    other.ask("release", lease=held["lease"])
    assert not ts.holding


def test_inner_leases_ask_the_daemon_nothing_in_either_client(
    host: Host, proxy: LossyProxy, ts: TimeSlice
) -> None:
    with ts.lease(["g1", "g2"]) as outer, ts.lease("g1") as inner, ts.lease("g2"):
        assert inner.tokens["g1"] == outer.tokens["g1"]
        proxy.cut()
    assert proxy.count("client", "acquire") == 1
    until(lambda: is_free(host), "the outermost frees")

    async def tasks() -> None:
        async with (
            aio_connect(proxy.path, job="nested") as client,
            client.lease(["g1", "g2"]),
        ):
            await asyncio.gather(*(one(client, group) for group in ("g1", "g2") * 10))
            proxy.cut()
            await client.status()
            assert await asyncio.to_thread(holder, host) == "nested"

    async def one(client: AsyncTimeSlice, group: str) -> None:
        async with client.lease(group) as lease:
            await asyncio.sleep(0)
            assert lease.groups == ("g1", "g2")

    asyncio.run(asyncio.wait_for(tasks(), LIMIT_S))
    assert proxy.count("client", "acquire") == 2


class Chaos:
    """Cuts, tears and repeats frames at random; no hello is repeated."""

    def __init__(self, proxy: LossyProxy, seed: int) -> None:
        self._rng = random.Random(seed)
        self._proxy = proxy
        proxy.on_frame = self._on_frame

    def _on_frame(self, sender: Side, name: str, _message: Message) -> None:
        if self._rng.random() < 0.03:
            fates = [Fate.CUT, Fate.CUT_AFTER, Fate.TEAR]
            if name not in ("hello", "welcome"):
                fates.append(Fate.REPEAT)
            self._proxy.rule(sender, name, self._rng.choice(fates))


THREADS, TURNS = 4, 15


def test_threads_share_two_clients_over_connections_that_break_all_the_time_g1(
    host: Host, proxy: LossyProxy
) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    lock = threading.Lock()
    inside: dict[str, list[str]] = {"g1": [], "g2": []}
    wrong: list[object] = []

    def work(ts: TimeSlice, job: str, number: int) -> None:
        rng = random.Random(seed + number)
        try:
            for _ in range(TURNS):
                wanted = rng.choice((["g1"], ["g2"], ["g1", "g2"]))
                with ts.lease(wanted, timeout=LIMIT_S) as lease:
                    with lock:
                        for group in wanted:
                            inside[group].append(job)
                            if set(inside[group]) != {job}:
                                wrong.append(dict(inside))
                    lease.check()
                    with lock:
                        for group in wanted:
                            inside[group].remove(job)
                if rng.random() < 0.2:
                    ts.progress(step=number)
        except BaseException as error:
            wrong.append(error)

    Chaos(proxy, seed)
    with connect(proxy.path, job="a") as a, connect(proxy.path, job="b") as b:
        threads = [
            threading.Thread(target=work, args=(ts, job, number))
            for number in range(THREADS)
            for ts, job in ((a, "a"), (b, "b"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        assert wrong == []
        assert not a.holding
        assert not b.holding
        proxy.on_frame = None


def test_a_daemon_that_goes_silent_costs_a_request_its_limit_and_the_lease_nothing(
    host: Host, proxy: LossyProxy
) -> None:
    with connect(proxy.path, job="lossy", reply_limit_s=0.3) as ts:
        with ts.lease("g1") as lease:
            proxy.rule("daemon", "status", Fate.DROP)
            with pytest.raises(TimeSliceError, match="did not answer"):
                ts.status()
            assert lease.state is LeaseState.HELD
            assert ts.status()
        until(lambda: host.group()["holder"] is None, "it is given back")
