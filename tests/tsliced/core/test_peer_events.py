"""What other hosts are and say, to a machine that shares nothing with them."""

from __future__ import annotations

import pytest
from world import World

from tsliced.core.actions import Effects
from tsliced.core.events import PeerConnected, PeerEvent, PeerSaid
from tsliced.core.messages import LiveSessions
from tsliced.core.model import HostName

OTHER = HostName("n2")


@pytest.mark.parametrize(
    "event",
    [
        PeerConnected(host=OTHER, boot="b"),
        PeerSaid(host=OTHER, message=LiveSessions(sessions=())),
    ],
)
def test_a_host_that_nothing_is_shared_with_changes_nothing(event: PeerEvent) -> None:
    world = World()
    assert world.feed(event) == Effects()
