"""Long moves show how far they have come: to those who look, and to those who wait."""

from __future__ import annotations

from typing import Any

import pytest
from harness import MIB, Host, MakeHost, until


def look(host: Host, step: str) -> dict[str, Any] | None:
    """Returns what is shown of a move under way: of the group, of job a, and of its rank."""
    status = host.status()
    move = next(group["move"] for group in status["groups"] if group["name"] == "g1")
    job = next(job for job in status["jobs"] if job["job"]["id"] == "a")
    ranks = [rank["progress"] for rank in host.ask("ps")["ranks"] if rank["progress"]]
    # It may be over between the two questions.
    if move is None or move["step"] != step or not move["done_bytes"] or not ranks:
        return None
    return {"move": move, "job": job["move"], "rank": ranks[0]}


@pytest.mark.parametrize("step", ["snapshotting", "restoring"])
def test_a_move_is_shown_with_bytes_pace_and_time_left_and_told_to_who_waits(
    make_host: MakeHost, step: str
) -> None:
    # A copy of 40 MiB takes 2.8 s.
    host = make_host(SOFTCUDA_THROTTLE_MBPS="15")
    rank, other = host.trainer("a", mib=40), host.rank("b")
    asker = other
    if step == "restoring":
        other.do("acquire", groups="g1", timeout=20)
        other.do("release")
        asker = rank
    asker.do("watch_moves")
    asked = asker.start("acquire", groups="g1", timeout=30)
    shown = until(lambda: look(host, step), f"{step} is under way")
    assert shown is not None
    move = shown["move"]
    assert move["job"]["id"] == "a"
    assert 0 < move["done_bytes"] < move["total_bytes"]
    assert 40 * MIB <= move["total_bytes"] < 50 * MIB
    # Half of what was moved may still be on its way: memory is taken in pieces of 16 MiB.
    assert 5e6 < move["bytes_per_s"] < 60e6
    assert move["done_bytes"] + move["left_s"] * move["bytes_per_s"] == pytest.approx(
        move["total_bytes"]
    )
    assert shown["job"]["step"] == step
    assert shown["rank"]["total_bytes"] == move["total_bytes"]
    asked.wait()
    told = [line.split() for line in asker.do("called") if line.startswith("a ")]
    assert told, "who waits is told"
    assert all(words[1] == step and 0 <= int(words[2]) <= int(words[3]) for words in told)
    assert host.group()["move"] is None
