"""What the simulated network does to messages and links."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from network import LOST_S, Network
from timeline import Timeline

from tsliced.core.events import Event, PeerConnected, PeerDisconnected, PeerLost, PeerSaid
from tsliced.core.messages import LiveSessions
from tsliced.core.model import HostName, SessionId

ONE, OTHER = HostName("n1"), HostName("n2")


@dataclass(slots=True)
class Listener:
    """A daemon that remembers what it was told."""

    host: HostName
    boot: str = "b"
    alive: bool = True
    paused: bool = False
    heard: list[Event] = field(default_factory=list)

    def tell(self, event: Event) -> None:
        self.heard.append(event)

    def kinds(self) -> list[type[Event]]:
        return [type(event) for event in self.heard]


@dataclass(slots=True)
class Pair:
    """Two daemons and their network."""

    seed: int
    timeline: Timeline = field(default_factory=Timeline)
    network: Network = field(init=False)
    one: Listener = field(init=False)
    other: Listener = field(init=False)

    def __post_init__(self) -> None:
        self.network = Network(self.timeline, Random(self.seed), lambda _where, _text: None)
        self.one, self.other = Listener(ONE), Listener(OTHER)
        self.network.join((self.one, self.other))
        for listener in (self.one, self.other):
            self.network.start(listener.host)
        self.pass_time(5.0)

    def pass_time(self, seconds: float) -> None:
        self.timeline.run_until(self.timeline.now + seconds)

    def say(self, count: int, first: int = 0) -> None:
        """Let one host say some numbers to the other."""
        for number in range(first, first + count):
            said = LiveSessions(sessions=(SessionId(str(number)),))
            self.network.send(ONE, OTHER, said)

    def numbers(self) -> list[int]:
        """Return the numbers that the other host heard."""
        said = [e.message for e in self.other.heard if isinstance(e, PeerSaid)]
        return [int(m.sessions[0]) for m in said if isinstance(m, LiveSessions)]


@pytest.fixture(params=range(10))
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_daemons_that_run_are_connected(pair: Pair) -> None:
    for listener, other in ((pair.one, OTHER), (pair.other, ONE)):
        assert PeerConnected(host=other, boot="b") in listener.heard
        assert PeerLost not in listener.kinds()


def test_messages_arrive_in_their_order(pair: Pair) -> None:
    pair.say(20)
    pair.pass_time(1.0)
    assert pair.numbers() == list(range(20))


def test_what_is_under_way_is_lost_with_its_connection_and_nothing_else(pair: Pair) -> None:
    pair.say(5)
    pair.pass_time(1.0)
    pair.say(5, first=5)
    pair.network.drop(ONE, OTHER)
    pair.pass_time(5.0)
    pair.say(5, first=10)
    pair.pass_time(1.0)
    assert pair.numbers() == [*range(5), *range(10, 15)]
    assert pair.other.kinds().count(PeerConnected) >= 2


def test_a_new_connection_is_known_before_anything_is_said_on_it(pair: Pair) -> None:
    pair.one.heard.clear()
    pair.other.heard.clear()
    pair.network.renew(ONE, OTHER)
    end = pair.timeline.now + 5.0
    while PeerConnected not in pair.one.kinds() and pair.timeline.now < end:
        pair.pass_time(0.001)
    pair.say(3)
    pair.pass_time(1.0)
    # The end of the older one may be noticed first.
    kinds = [kind for kind in pair.other.kinds() if kind is not PeerDisconnected]
    assert kinds == [PeerConnected, PeerSaid, PeerSaid, PeerSaid]
    assert pair.numbers() == [0, 1, 2]


def test_a_cut_direction_holds_back_what_is_said_until_it_is_mended(pair: Pair) -> None:
    pair.network.cut(ONE, OTHER)
    pair.say(5)
    pair.pass_time(LOST_S / 2)
    assert pair.numbers() == []
    pair.network.mend(ONE, OTHER)
    pair.pass_time(1.0)
    assert pair.numbers() == list(range(5))


def test_who_hears_nothing_for_long_gives_the_other_up(pair: Pair) -> None:
    pair.network.cut(ONE, OTHER)
    pair.say(5)
    pair.pass_time(LOST_S + 1.0)
    assert PeerLost in pair.other.kinds()
    assert PeerLost not in pair.one.kinds()
    assert PeerDisconnected in pair.one.kinds()
    pair.network.mend(ONE, OTHER)
    pair.pass_time(5.0)
    assert pair.numbers() == [], "it went with its connection"
    assert pair.other.kinds()[-1] is PeerConnected


def test_a_killed_daemon_is_noticed_at_once_and_a_dead_machine_by_its_silence(pair: Pair) -> None:
    pair.one.alive = False
    pair.network.end(ONE, silently=False)
    pair.pass_time(1.0)
    assert pair.other.kinds()[-1] is PeerDisconnected
    pair.one.alive = True
    pair.network.start(ONE)
    pair.pass_time(5.0)
    pair.one.alive = False
    pair.network.end(ONE, silently=True)
    pair.pass_time(1.0)
    assert pair.other.kinds()[-1] is PeerConnected
    pair.pass_time(LOST_S)
    assert PeerLost in pair.other.kinds()
