"""Long moves show how far they have come: to those who look, and to those who wait."""

from __future__ import annotations

from typing import Any

import pytest
from harness import MIB, Host, MakeHost, until


def move_of(host: Host, step: str) -> dict[str, Any]:
    """Returns the group's move when a part of its bytes is seen to have gone."""

    def look() -> dict[str, Any] | None:
        move: dict[str, Any] | None = host.group()["move"]
        under_way = move is not None and move["step"] == step and move["done_bytes"] > 0
        return move if under_way else None

    found = until(look, f"{step} is under way")
    assert found is not None
    return found


@pytest.mark.parametrize("step", ["snapshotting", "restoring"])
def test_a_move_is_shown_with_bytes_pace_and_time_left_and_told_to_who_waits(
    make_host: MakeHost, step: str
) -> None:
    # A copy of 40 MiB takes 1.4 s.
    host = make_host(SOFTCUDA_THROTTLE_MBPS="30")
    rank, other = host.trainer("a", mib=40), host.rank("b")
    asker = other
    if step == "restoring":
        other.do("acquire", groups="g1", timeout=20)
        other.do("release")
        asker = rank
    asker.do("watch_moves")
    asked = asker.start("acquire", groups="g1", timeout=30)
    move = move_of(host, step)
    assert move["job"]["id"] == "a"
    assert 0 < move["done_bytes"] < move["total_bytes"]
    assert 40 * MIB <= move["total_bytes"] < 50 * MIB
    # Half of what was moved may still be on its way: memory is taken in pieces of 16 MiB.
    assert 10e6 < move["bytes_per_s"] < 90e6
    assert 0 < move["left_s"] < 10
    assert move["done_bytes"] + move["left_s"] * move["bytes_per_s"] == pytest.approx(
        move["total_bytes"]
    )
    assert host.job("a")["move"]["step"] == step
    doing = next(rank for rank in host.ask("ps")["ranks"] if rank["doing"])
    assert doing["progress"]["total_bytes"] == move["total_bytes"]
    asked.wait()
    told = [line.split() for line in asker.do("called") if line.startswith("a ")]
    assert told, "who waits is told"
    assert all(words[1] == step and 0 <= int(words[2]) <= int(words[3]) for words in told)
    assert host.group()["move"] is None
