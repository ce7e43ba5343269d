"""What the core is told of other hosts, and what it says to theirs, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from in_process import inside, until
from peer_lab import N1, N2, NOBODY, SECRET, SETTINGS, Run, Side, state, stranger

from tsliced.core.actions import Effects, Send
from tsliced.core.events import (
    Event,
    PeerConnected,
    PeerDisconnected,
    PeerEvent,
    PeerLost,
    PeerSaid,
    SessionClosed,
)
from tsliced.core.messages import LiveSessions, PeerMessage, Presence
from tsliced.core.model import (
    Counter,
    Goal,
    GroupName,
    HostName,
    JobKey,
    SessionId,
    Stamp,
    TenancyKey,
)
from tsliced.core.signals import Order, Report
from tsliced.net.peer_auth import Credentials
from tsliced.net.peer_messages import (
    NONCE_BYTES,
    TAG_BYTES,
    Bye,
    Challenge,
    Ping,
    Pong,
    Say,
)


def up(host: HostName) -> PeerConnected:
    """Return what a core is told of the first daemon of a host."""
    return PeerConnected(host=host, boot=host, incarnation=f"{host}/1")


TENANCY = TenancyKey(JobKey("", 1000, "train"), (GroupName("both"),))
ORDER = Order(host=N2, tenancy=TENANCY, stamp=Stamp(0, Counter(1, 2), 3), goal=Goal.OFF)
NOTHING_HELD = LiveSessions(sessions=())
UP1, DOWN1 = up(N1), PeerDisconnected(host=N1)


def sends(host: HostName, *messages: PeerMessage) -> list[Send]:
    return [Send(host=host, message=message) for message in messages]


def changed(side: Side, before: list[PeerEvent]) -> bool:
    return side.events != before


def report(step: int) -> Report:
    stamp = Stamp(0, Counter(1, 2), step)
    return Report(host=N1, tenancy=TENANCY, stamp=stamp, failure=None, states=())


@pytest.mark.parametrize("auth", ["psk", "tls"])
def test_what_one_core_says_is_heard_by_the_other_in_order_after_the_link_is_known(
    run: Run, certified: Callable[[str], Credentials], auth: str
) -> None:
    def side(host: HostName) -> Side:
        if auth == "tls":
            return Side(host, credentials=certified(host))
        return Side(host, credentials=Credentials(auth="psk", secret=SECRET))

    async def story() -> None:
        one, two = side(N1), side(N2)
        async with two.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
            await until(lambda: one.events, "the core of n1 is told")
            assert one.events == [up(N2)]
            peers.deliver(sends(N2, NOTHING_HELD, ORDER, *map(report, range(100))))
            peers.deliver(sends(N2, report(100)))
            await until(lambda: len(two.events) == 104, "all of it has arrived")
            said: list[PeerMessage] = [NOTHING_HELD, ORDER, *map(report, range(101))]
            assert two.events == [UP1, *(PeerSaid(host=N1, message=m) for m in said)]
            assert len(one.events) == 1

    run(story())


def test_what_is_said_without_a_link_is_lost_and_not_said_later(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with side.serve(n1=NOBODY) as (peers, address):
            peers.deliver(sends(N1, ORDER) + sends(HostName("n9"), ORDER))
            async with stranger(address) as raw:
                await raw.greet()
                raw.send(Side(N1).hello(N2))
                await until(lambda: side.events == [UP1], "a link")
                peers.deliver(sends(N1, NOTHING_HELD))
                while not isinstance(message := await raw.receive(), Say):
                    pass
                assert message == Say(kind="live_sessions", fields=((),))
                raw.send(Bye())
                await until(lambda: side.events[1:] == [DOWN1], "n1 is gone")
                peers.deliver(sends(N1, ORDER))

    run(story())


def test_a_newer_connection_is_told_as_the_end_of_the_old_one_and_another(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with (
            side.serve(n1=NOBODY) as (peers, address),
            stranger(address) as old,
            stranger(address) as new,
        ):
            for raw, incarnation in ((old, "b1/17"), (new, "b2/3")):
                before = list(side.events)
                await raw.greet()
                raw.send(replace(Side(N1).hello(N2), incarnation=incarnation))
                await until(partial(changed, side, before), "a link")
            ups = [
                PeerConnected(host=N1, boot="b1", incarnation="b1/17"),
                PeerConnected(host=N1, boot="b2", incarnation="b2/3"),
            ]
            assert side.events == [ups[0], DOWN1, ups[1]]
            # What the old connection still had to say, and its end, concern nobody.
            old.send(Say(kind="live_sessions", fields=((),)))
            old.writer.close()
            new.send(Say(kind="live_sessions", fields=(("s-1",),)))
            await until(lambda: len(side.events) > 3, "it is heard")
            said = LiveSessions(sessions=(SessionId("s-1"),))
            assert side.events[3:] == [PeerSaid(host=N1, message=said)]
            assert state(peers) == "connected"

    run(story())


def test_a_host_that_falls_silent_is_disconnected_and_lost_and_back_when_it_speaks(
    run: Run,
) -> None:
    async def story() -> None:
        side = Side(N2, settings=replace(SETTINGS, suspect_s=0.3, lost_s=0.6))
        async with side.serve(n1=NOBODY) as (_, address):
            for _ in range(2):
                async with stranger(address) as raw:
                    await raw.greet()
                    raw.send(Side(N1).hello(N2))
                    # Its connection stays, and it says nothing more.
                    await until(lambda: PeerLost(host=N1) in side.events, "it is lost")
                    assert side.events == [UP1, DOWN1, PeerLost(host=N1)]
                    side.events.clear()

    run(story())


def test_a_host_that_never_came_is_lost_once(run: Run) -> None:
    async def story() -> None:
        side = Side(N2, settings=replace(SETTINGS, suspect_s=0.2, lost_s=0.3))
        async with side.serve(n1=NOBODY):
            await until(lambda: side.events, "it is lost")
            await asyncio.sleep(0.5)
            assert side.events == [PeerLost(host=N1)]

    run(story())


def test_a_host_that_cannot_speak_of_jobs_is_linked_and_not_heard(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with side.serve(n1=NOBODY) as (peers, address), stranger(address) as raw:
            await raw.greet()
            raw.send(Side(N1, features=("status",)).hello(N2))
            await until(lambda: state(peers) == "connected", "a link")
            peers.deliver(sends(N1, ORDER))
            raw.send(Ping(seq=1))
            while not isinstance(message := await raw.receive(), Pong):
                assert isinstance(message, Say) is False
            raw.send(Say(kind="live_sessions", fields=((),)))
            assert (await raw.refusal()).code == "bad_message"
            assert side.events == []

    run(story())


def test_what_no_core_can_have_said_ends_the_link_and_reaches_nobody_g9(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with side.serve(n1=NOBODY) as (_, address), stranger(address) as raw:
            await raw.greet()
            raw.send(Side(N1).hello(N2))
            raw.send(Say(kind="report", fields=(7,)))
            refusal = await raw.refusal()
            assert (refusal.code, "report" in refusal.text) == ("bad_message", True)
            await until(lambda: side.events[1:], "the link is over")
            assert side.events == [UP1, DOWN1]
            assert side.told("peer_refused")[0]["code"] == "bad_message"
        # The other side is told why, and says so.
        one, two = Side(N1), Side(N2)
        async with two.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
            await until(lambda: state(peers) == "connected", "a link")
            peer = peers._peers[N2]
            assert peer.link is not None
            peer.link.send(Challenge(nonce=b"n" * NONCE_BYTES, proof=b"p" * TAG_BYTES))
            await until(lambda: one.told("peer_refused"), "it is refused")
            told = one.told("peer_refused")[0]
            assert (told["by"], told["code"]) == ("it", "bad_message")
            assert told["reason"] == "Challenge came out of turn"

    run(story())


def test_a_host_that_cannot_be_told_all_is_told_nothing_and_its_link_ends(run: Run) -> None:
    async def story() -> None:
        shortages = ((TENANCY.job, "x" * 4096),) * 300
        large = Presence(group=GroupName("both"), ranks=(), clients=(), shortages=shortages)
        one, two = Side(N1), Side(N2)
        async with two.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
            await until(lambda: one.events, "a link")
            peers.deliver(sends(N2, NOTHING_HELD, large, ORDER))
            await until(lambda: len(two.events) >= 3, "the link is made anew")
            assert two.events[:3] == [UP1, DOWN1, UP1]
            assert "limit" in one.told("peers")[0]["reason"]
            assert "does not fit" in one.told("peer_suspect")[0]["reason"]

    run(story())


def test_a_driver_hands_the_words_of_one_turn_over_at_once_after_all_its_actions(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with inside(tmp_path) as daemon:
            handed: list[list[Send]] = []

            class Hosts:
                def deliver(self, sends: list[Send]) -> None:
                    handed.append(sends)

            said = iter(range(10))

            def handle(event: Event, *, now: float) -> Effects:
                # Others come too: what was begun at the start ends.
                told = isinstance(event, SessionClosed)
                return Effects(actions=tuple(sends(N2, report(next(said)))) if told else ())

            await until(lambda: daemon.machine.story, "it has started")
            monkeypatch.setattr(daemon.machine, "handle", handle)
            # Nobody is linked: what is said is lost.
            daemon.driver.post(SessionClosed(session=SessionId("s")))
            daemon.driver.after_turn(lambda: setattr(daemon.driver, "hosts", Hosts()))
            await until(lambda: daemon.driver.hosts is not None, "the turn is over")
            for _ in range(3):
                daemon.driver.post(SessionClosed(session=SessionId("s")))
            await until(lambda: handed, "the turn is over")
            assert handed == [sends(N2, *map(report, range(1, 4)))]

    run(story())


def test_a_core_hears_of_the_other_host_through_its_driver(run: Run, tmp_path: Path) -> None:
    async def story() -> None:
        async with inside(tmp_path) as daemon:
            one, two = Side(N1), Side(N2)
            two.post = daemon.driver.post
            async with two.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
                await until(lambda: one.events, "a link")
                peers.deliver(sends(N2, NOTHING_HELD))
                story = daemon.machine.story
                said = PeerSaid(host=N1, message=NOTHING_HELD)
                await until(lambda: said in [event for _, event in story], "it is heard")
                heard = [event for _, event in story if isinstance(event, PeerEvent)]
                assert heard == [UP1, said]

    run(story())
