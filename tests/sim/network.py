"""The simulated network: connections between daemons, and everything that befalls them.

A message arrives later, in the order in which it was sent on its connection, or never: what is
under way is lost with its connection. Each side of a connection learns of its beginning and of its
end in its own time. A direction that is cut holds back what is sent, as TCP does, and whoever
hears nothing for `LOST_S` gives the other up, as `net/peers.py` does. A daemon that is killed
closes its connections; a machine without power is just silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from random import Random
from typing import Protocol

from timeline import Timeline

from libtimeslice import protocol
from tsliced.core.events import Event, PeerConnected, PeerDisconnected, PeerLost, PeerSaid
from tsliced.core.messages import PeerMessage
from tsliced.core.model import HostName
from tsliced.net.peer_codec import decode_untrusted, encode
from tsliced.net.peer_messages import Say, parse_untrusted

#: Silence after which a host counts as lost, seconds.
LOST_S = 10.0
#: From an end of a connection to the next attempt, seconds at most.
RECONNECT_S = 1.0


#: What becomes of a message on its way from one host to another.
Carry = Callable[[HostName, HostName, PeerMessage], PeerMessage]


def over_the_wire(source: HostName, target: HostName, message: PeerMessage) -> PeerMessage:
    """Return what is left of a message after it was encoded, and decoded by the other side."""
    said = parse_untrusted(protocol.decode_untrusted(encode(message)))
    assert isinstance(said, Say)
    return decode_untrusted(said, speaker=source, listener=target)


class Daemon(Protocol):
    """What the network knows of a host."""

    host: HostName
    #: Of the run of its system.
    boot: str
    #: Its daemon runs.
    alive: bool
    #: Its daemon was stopped, and does nothing until it is continued.
    paused: bool

    def tell(self, event: Event) -> None:
        """Hand an event over to the daemon."""


@dataclass(slots=True, eq=False)
class Connection:
    """One connection; what is under way on it dies with it."""

    broken: bool = False
    #: By the receiving host: when the latest message arrives there at the earliest.
    arrival: dict[HostName, float] = field(default_factory=dict)
    #: By the receiving host: what a cut direction, or a side that is not open yet, holds back.
    held_back: dict[HostName, deque[PeerMessage]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Side:
    """What one host has of the link to another."""

    me: Daemon
    other: Daemon
    connection: Connection | None = None
    #: Nothing can be heard of the other since then; None: it is heard.
    deaf_since: float | None = 0.0
    #: The other was given up, and has not been heard since.
    lost: bool = False


class Network:
    """Links between all pairs of hosts."""

    def __init__(
        self,
        timeline: Timeline,
        random: Random,
        note: Callable[[str, str], None],
        carry: Carry = lambda _source, _target, message: message,
    ) -> None:
        self._timeline, self._random, self._note = timeline, random, note
        self._carry = carry
        self._sides: dict[tuple[HostName, HostName], Side] = {}
        #: Directions, from and to, on which nothing gets through.
        self._cut: set[tuple[HostName, HostName]] = set()
        #: The longest that a message takes, seconds.
        self.delay_s = 0.05

    def join(self, daemons: tuple[Daemon, ...]) -> None:
        """Lay the links; nobody is connected yet."""
        for one, other in combinations(daemons, 2):
            self._sides[one.host, other.host] = Side(one, other)
            self._sides[other.host, one.host] = Side(other, one)

    # --- what daemons do ----------------------------------------------------------------------

    def send(self, source: HostName, target: HostName, message: PeerMessage) -> None:
        """Let a daemon say something; without a connection it is lost."""
        connection = self._sides[source, target].connection
        if connection is None or connection.broken:
            return
        due = max(self._soon(), connection.arrival.get(target, 0.0))
        connection.arrival[target] = due
        carried = self._carry(source, target, message)
        self._timeline.at(due, lambda: self._arrive(connection, source, target, carried))

    def start(self, host: HostName) -> None:
        """A daemon runs from now on, and listens for others."""
        for side in self._sides_of(host):
            side.connection, side.lost, side.deaf_since = None, False, self._timeline.now
            self._await(side)
            self._reach_out(side)

    def end(self, host: HostName, *, silently: bool) -> None:
        """A daemon does not run any more. `silently`: with its machine, so that nobody is told."""
        for side in self._sides_of(host):
            connection, side.connection = side.connection, None
            if connection is not None and not silently:
                self._break(connection, side)
            elif connection is not None:
                connection.broken = True
            self._listen(self._facing(side))

    def listen_to(self, host: HostName) -> None:
        """A daemon was stopped, or continued: others hear it no more, or again."""
        for side in self._sides_of(host):
            self._listen(self._facing(side))

    # --- what befalls links -------------------------------------------------------------------

    def drop(self, one: HostName, other: HostName) -> None:
        """End the connection of two hosts."""
        side = self._sides[one, other]
        connection = side.connection or self._facing(side).connection
        if connection is not None:
            self._break(connection, side)
            self._reach_out(side)

    def renew(self, one: HostName, other: HostName) -> None:
        """Let two hosts connect once more, though they are connected."""
        self._timeline.at(self._soon(), lambda: self._connect(one, other))

    def cut(self, source: HostName, target: HostName) -> None:
        """Let nothing get through from one host to the other."""
        self._note(source, f"nothing gets through to {target}")
        self._cut.add((source, target))
        self._listen(self._sides[target, source])

    def mend(self, source: HostName, target: HostName) -> None:
        """Let everything get through again."""
        self._note(source, f"everything gets through to {target}")
        self._cut.discard((source, target))
        side = self._sides[target, source]
        self._listen(side)
        self._reach_out(side)
        if side.connection is None:
            return
        if side.connection.broken:
            self._close(side, side.connection)
        else:
            self._let_through(side, side.connection)

    def mend_all(self) -> None:
        """Undo all cuts."""
        for source, target in sorted(self._cut):
            self.mend(source, target)

    # --- one connection -----------------------------------------------------------------------

    def _soon(self) -> float:
        return self._timeline.now + self._random.random() ** 2 * self.delay_s

    def _sides_of(self, host: HostName) -> list[Side]:
        return [side for (me, _), side in self._sides.items() if me == host]

    def _facing(self, side: Side) -> Side:
        return self._sides[side.other.host, side.me.host]

    def _passes(self, source: HostName, target: HostName) -> bool:
        return (source, target) not in self._cut

    def _reach_out(self, side: Side) -> None:
        """Try to connect before long."""
        one, other = sorted((side.me.host, side.other.host))
        delay_s = self._random.random() * RECONNECT_S
        self._timeline.after(delay_s, lambda: self._connect_if_apart(one, other))

    def _connect_if_apart(self, one: HostName, other: HostName) -> None:
        here, there = self._sides[one, other], self._sides[other, one]
        if here.connection is None or here.connection is not there.connection:
            self._connect(one, other)

    def _connect(self, one: HostName, other: HostName) -> None:
        sides = self._sides[one, other], self._sides[other, one]
        if not all(side.me.alive for side in sides):
            return
        if not (self._passes(one, other) and self._passes(other, one)):
            return
        connection = Connection()
        for side in sides:
            connection.held_back[side.me.host] = deque()
            self._timeline.at(self._soon(), partial(self._open, side, connection))

    def _open(self, side: Side, connection: Connection) -> None:
        """Let one side know of a new connection, which takes the place of an older one."""
        if connection.broken or not side.me.alive:
            self._break(connection, side)
            return
        older = side.connection
        side.connection, side.lost = connection, False
        if older is not None:
            self._break(older, side)
        self._listen(side)
        self._listen(self._facing(side))
        side.me.tell(PeerConnected(host=side.other.host, boot=side.other.boot))
        self._let_through(side, connection)

    def _break(self, connection: Connection, by: Side) -> None:
        """End a connection for both sides; each of them notices in its own time."""
        connection.broken = True
        for side in (by, self._facing(by)):
            self._timeline.at(self._soon(), partial(self._close, side, connection))

    def _close(self, side: Side, connection: Connection) -> None:
        if side.connection is not connection:
            return
        if not self._passes(side.other.host, side.me.host):
            # The word that it is over does not get through either; silence will tell.
            return
        side.connection = None
        self._listen(side)
        if side.me.alive:
            side.me.tell(PeerDisconnected(host=side.other.host))
        self._reach_out(side)

    # --- messages -----------------------------------------------------------------------------

    def _arrive(
        self, connection: Connection, source: HostName, target: HostName, message: PeerMessage
    ) -> None:
        side = self._sides[target, source]
        held_back = connection.held_back[target]
        if connection.broken:
            return
        is_open = side.connection is connection and self._passes(source, target)
        if held_back or not is_open:
            held_back.append(message)
        else:
            side.me.tell(PeerSaid(host=source, message=message))

    def _let_through(self, side: Side, connection: Connection) -> None:
        """Hand over what was held back, in order, while nothing holds it back any more."""
        held_back = connection.held_back[side.me.host]
        while held_back and side.connection is connection and not connection.broken:
            if not self._passes(side.other.host, side.me.host):
                return
            side.me.tell(PeerSaid(host=side.other.host, message=held_back.popleft()))

    # --- silence ------------------------------------------------------------------------------

    def _listen(self, side: Side) -> None:
        """See whether one side hears the other; if it no longer does, its silence begins."""
        connection = side.connection
        heard = (
            side.other.alive
            and not side.other.paused
            and self._passes(side.other.host, side.me.host)
            and connection is not None
            and not connection.broken
            and connection is self._facing(side).connection
        )
        if heard:
            side.deaf_since = None
        elif side.deaf_since is None:
            side.deaf_since = self._timeline.now
            self._await(side)

    def _await(self, side: Side) -> None:
        since = side.deaf_since
        self._timeline.after(LOST_S, lambda: self._give_up(side, since))

    def _give_up(self, side: Side, since: float | None) -> None:
        """Count the other as lost, unless it was heard meanwhile."""
        if since is None or side.deaf_since != since or side.lost or not side.me.alive:
            return
        if side.me.paused:
            # It does not take its own absence for others' silence.
            self._await(side)
            return
        side.lost = True
        connection, side.connection = side.connection, None
        if connection is not None:
            side.me.tell(PeerDisconnected(host=side.other.host))
            self._break(connection, side)
            self._reach_out(side)
        side.me.tell(PeerLost(host=side.other.host))
