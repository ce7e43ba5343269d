"""What is under way between hosts: one queue for each direction of each link.

What a host hears of a link (that it is up, what is said over it, that it is down) comes in order,
and each host hears of it in its own time. When a link goes down, all that is under way on it is
lost: if a part of it still arrives, that is as if it had been heard before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from still import VALUES
from stills import Label, Outcome

from tsliced.core.events import PeerConnected, PeerDisconnected, PeerSaid
from tsliced.core.messages import LiveSessions, PeerMessage
from tsliced.core.model import HostName

#: By direction, see `Wires.direction`: the numbers of the events that are heard next, in order.
Queues: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Wires:
    """The directions between hosts, by their indices. It has no state of its own."""

    names: Sequence[HostName]
    #: Events of links, not of what is said over them.
    _of_links: set[int] = field(default_factory=set)
    _endings: set[int] = field(default_factory=set)

    def index_of(self, name: str | int) -> int:
        """Return the index of a host."""
        return self.names.index(HostName(str(name)))

    def direction(self, source: int, target: int) -> int:
        """Return the index of the direction from one host to another."""
        return source * len(self.names) + target

    def others(self, host: int) -> list[int]:
        """Return all hosts but one."""
        return [other for other in range(len(self.names)) if other != host]

    def said(self, source: int, message: int) -> int:
        """Return the event that a host hears when another one says something."""
        said = cast(PeerMessage, VALUES.all[message])
        return VALUES.of(PeerSaid(host=self.names[source], message=said))

    def _down(self, host: int) -> int:
        number = VALUES.of(PeerDisconnected(host=self.names[host]))
        self._of_links.add(number)
        self._endings.add(number)
        return number

    def _up(self, host: int, boots: Sequence[int]) -> int:
        boot = f"{self.names[host]} boot {boots[host]}"
        number = VALUES.of(PeerConnected(host=self.names[host], boot=boot))
        self._of_links.add(number)
        return number

    # --- what befalls links -------------------------------------------------------------------

    def part(self, queues: list[tuple[int, ...]], one: int, other: int, up: Sequence[bool]) -> None:
        """Let a link go down. `up`: whether `one`, and `other`, know it as up, or will."""
        for source, target, knows in ((one, other, up[1]), (other, one, up[0])):
            queues[self.direction(source, target)] = (self._down(source),) if knows else ()

    def join(
        self, queues: list[tuple[int, ...]], one: int, other: int, boots: Sequence[int]
    ) -> None:
        """Let a link come up."""
        for source, target in ((one, other), (other, one)):
            direction = self.direction(source, target)
            queues[direction] = (*queues[direction], self._up(source, boots))

    # --- what is said and heard ---------------------------------------------------------------

    def send(
        self,
        queues: list[tuple[int, ...]],
        cut: frozenset[int],
        host: int,
        label: Label,
        outcome: Outcome,
    ) -> None:
        """Put on its way what a host says, or lose it where no connection is."""
        for name, message in outcome.said:
            other = self.index_of(name)
            if 0 not in (host, other):
                # What `may_speak` relies on.
                assert label.kind == "hears", label
                assert self._is_greeting(int(label.what)), label
            direction = self.direction(host, other)
            incoming = queues[self.direction(other, host)]
            if direction not in cut and self._of_links.isdisjoint(incoming):
                queues[direction] = (*queues[direction], self.said(host, message))

    def hearings(self, queues: Queues, host: int) -> list[Label]:
        """Return what a host may hear next: from each other host the oldest thing."""
        labels: list[Label] = []
        for source in self.others(host):
            queue = queues[self.direction(source, host)]
            if queue:
                labels.append(Label("hears", queue[0], self.names[source]))
            if queue and queue[0] in self._endings:
                if len(queue) > 1:
                    # The new connection is known before the end of the old one.
                    labels.append(Label("hears", queue[1], self.names[source]))
                else:
                    name = self.names[source]
                    labels.append(Label("hears nothing of", name, name))
        return labels

    def take_off(self, queues: list[tuple[int, ...]], host: int, label: Label) -> None:
        """Take off what a host has heard."""
        direction = self.direction(self.index_of(label.how), host)
        queue = queues[direction]
        is_second = label.kind == "hears" and queue[0] != label.what
        queues[direction] = queue[2:] if is_second else queue[1:]

    def may_speak(self, queues: Queues, source: int, target: int) -> bool:
        """Whether a host may say something to another before that does anything more.

        The first host arbitrates all groups, or the only other one does: hosts that arbitrate
        nothing only greet each other, which `send` makes sure of.
        """
        if 0 in (source, target):
            return True
        return any(map(self._is_greeting, queues[self.direction(target, source)]))

    def _is_greeting(self, number: int) -> bool:
        event = VALUES.all[number]
        said = event.message if isinstance(event, PeerSaid) else event
        return isinstance(said, PeerConnected | LiveSessions)
