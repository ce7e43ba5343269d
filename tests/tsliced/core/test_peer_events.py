"""What other hosts are and say, to a machine that shares nothing with them."""

from __future__ import annotations

from world import World

from tsliced.core.actions import Effects, HostRecord, Send
from tsliced.core.events import PeerConnected, PeerDisconnected, PeerSaid
from tsliced.core.messages import HeldLeases, LiveSessions, Reservations
from tsliced.core.model import HostName

OTHER = HostName("n2")


def test_a_host_that_nothing_is_shared_with_is_told_who_is_here_and_changes_nothing() -> None:
    world = World()
    record = HostRecord(host=OTHER, boot="b", incarnation="b/1", dead_by=None)
    said = LiveSessions(sessions=()), Reservations(wanted=())
    told = tuple(Send(host=OTHER, message=message) for message in said)
    first = world.feed(PeerConnected(host=OTHER, boot="b", incarnation="b/1"))
    assert first == Effects(records=(record,), actions=told)
    assert world.feed(PeerDisconnected(host=OTHER)) == Effects()
    again = world.feed(PeerConnected(host=OTHER, boot="b", incarnation="b/1"))
    assert again == Effects(actions=told), "which run it is, is known"
    effects = world.feed(PeerSaid(host=OTHER, message=LiveSessions(sessions=())))
    assert effects == Effects(actions=(Send(host=OTHER, message=HeldLeases(leases=())),))
