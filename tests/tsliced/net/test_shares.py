"""What each user may have of the daemon (G9)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tsliced.config import ServerLimits
from tsliced.net.shares import OWN_DESCRIPTORS, ROOT, Shares

ALICE, BOB = 1001, 1002
MIB = 1 << 20


def make(*, descriptors: int = 10_000, watched: int = 0, **limits: int) -> Shares:
    return Shares(
        ServerLimits(**limits),
        descriptors=OWN_DESCRIPTORS + descriptors,
        watched=lambda: watched,
    )


def connect(shares: Shares, uid: int, count: int) -> list[str | None]:
    return [shares.add_connection(uid) for _ in range(count)]


def test_a_user_has_so_many_connections_and_others_are_not_concerned_g9() -> None:
    shares = make(max_clients_per_uid=2)
    *_, refusal = connect(shares, ALICE, 3)
    assert refusal == "uid 1001 has 2 connections, which is the limit max_clients_per_uid"
    assert connect(shares, BOB, 1) == [None]
    shares.remove_connection(ALICE)
    assert connect(shares, ALICE, 1) == [None], "one that ended makes room"


def test_when_the_daemon_is_full_root_still_gets_in_g9() -> None:
    shares = make(max_clients=2, max_clients_per_uid=2, reserved_clients=1)
    assert connect(shares, ALICE, 2) == [None, None]
    assert connect(shares, BOB, 1) == ["2 clients are connected, which is the limit max_clients"]
    assert connect(shares, ROOT, 2)[0] is None
    assert connect(shares, ROOT, 1) != [None], "but not without end"


def test_nobody_gets_in_who_would_take_the_daemon_s_own_descriptors_g9() -> None:
    shares = make(descriptors=5, watched=3)
    *_, refusal = connect(shares, ALICE, 3)
    assert refusal is not None
    assert "LimitNOFILE" in refusal
    assert connect(shares, ROOT, 1) == [refusal]


@pytest.mark.parametrize("limit", ["max_sessions", "max_sessions_per_uid"])
def test_there_are_so_many_sessions_and_no_more_g9(limit: str) -> None:
    shares = make(**{limit: 2})
    first, _ = shares.add_session(ALICE), shares.add_session(ALICE)
    refusal = shares.session_objection(ALICE)
    assert refusal is not None
    assert f"the limit {limit}" in refusal
    assert shares.session_objection(ROOT) is None
    assert (shares.session_objection(BOB) is None) == (limit == "max_sessions_per_uid")
    shares.remove_session(first)
    assert shares.session_objection(ALICE) is None


def test_a_user_who_has_nothing_left_is_forgotten() -> None:
    shares = make()
    shares.add_connection(ALICE)
    session = shares.add_session(ALICE)
    shares.remove_connection(ALICE)
    assert shares.of(ALICE) is session
    shares.remove_session(session)
    assert shares.of(ALICE) is not session


@dataclass(eq=False)
class Hoard:
    """Has something in its buffers."""

    buffered_bytes: int
    is_dropped: bool = False

    def drop(self) -> None:
        self.is_dropped = True


def test_those_who_have_most_in_the_buffers_are_dropped_when_these_are_full_g9() -> None:
    shares = make(max_buffered_bytes=8 * MIB)
    small, large, larger = Hoard(1 * MIB), Hoard(3 * MIB), Hoard(4 * MIB)
    for hoard in (small, large, larger):
        shares.add_hoard(hoard)
    assert not larger.is_dropped
    small.buffered_bytes = 2 * MIB
    shares.add_hoard(small)
    assert [one.is_dropped for one in (small, large, larger)] == [False, False, True]
    large.buffered_bytes = 0
    shares.remove_hoard(large)
    small.buffered_bytes = 8 * MIB
    shares.add_hoard(small)
    assert not small.is_dropped
