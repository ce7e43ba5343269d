"""When a host counts as connected, suspect and lost."""

from __future__ import annotations

from tsliced.net.peer_liveness import Liveness, PeerState


def make() -> Liveness:
    return Liveness(suspect_s=3.0, lost_s=10.0, now=100.0)


def test_a_host_that_never_came_is_lost_in_the_end_and_never_suspected() -> None:
    peer = make()
    assert not peer.pass_time(109.9)
    assert peer.state is PeerState.AWAITED
    assert peer.pass_time(110.0)
    assert (peer.state, peer.since) == (PeerState.LOST, 110.0)
    assert not peer.pass_time(200.0), "it is told once"


def test_silence_makes_it_suspect_and_then_lost_and_a_word_makes_it_connected() -> None:
    peer = make()
    assert peer.hear(101.0)
    assert not peer.hear(102.0)
    assert not peer.pass_time(104.9)
    assert peer.pass_time(105.0)
    assert (peer.state, peer.reason) == (
        PeerState.SUSPECT,
        "nothing was heard of it for 3.0 s",
    )
    assert not peer.pass_time(111.9)
    assert peer.hear(111.95)
    assert (peer.state, peer.reason, peer.since) == (PeerState.CONNECTED, "", 111.95)
    assert peer.pass_time(121.95)
    assert peer.state is PeerState.LOST, "also when nobody looked in between"


def test_an_end_of_its_connection_makes_it_suspect_at_once_and_is_the_reason() -> None:
    peer = make()
    peer.hear(101.0)
    assert peer.close("it closed the connection", 101.5)
    assert peer.state is PeerState.SUSPECT
    assert not peer.close("n2:7423: Connection refused", 102.0)
    assert peer.reason == "n2:7423: Connection refused"
    assert peer.pass_time(111.0)
    assert peer.reason == "nothing was heard of it for 10.0 s; n2:7423: Connection refused"


def test_the_latest_trouble_is_the_reason_also_when_it_is_lost() -> None:
    peer = make()
    peer.pass_time(110.0)
    peer.close("no route", 120.0)
    assert peer.reason == "nothing was heard of it for 20.0 s; no route"
    assert peer.since == 110.0


def test_while_this_side_did_not_listen_nobody_was_silent() -> None:
    peer = make()
    peer.hear(101.0)
    peer.excuse(60.0)
    assert not peer.pass_time(162.0)
    assert peer.silent_s(150.0) == 0.0
    assert peer.pass_time(164.0)
