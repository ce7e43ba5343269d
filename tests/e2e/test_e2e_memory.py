"""Memory of the host and of the devices: asked for before anything is touched, and shown."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cgroup_dirs import Cgroup, limit_memory, memory_cgroup, used_memory
from harness import MIB, Host, MakeHost, Rank, RankError, resident_bytes, until

NUMBERS = r"host memory: ([\d,]+) bytes .* needed, ([\d,]+) bytes .* available in ([^;]+);"


@contextmanager
def confined(host: Host, *ranks: Rank, room_mib: int, at: str = "job") -> Iterator[Cgroup]:
    """Puts ranks into a memory cgroup two levels deep, with room for so much more.

    `at` says which of the two levels is limited.
    """
    with memory_cgroup() as outer:
        inner = outer.child("job")
        for rank in ranks:
            # What it has already stays charged to where it was.
            inner.take(rank.pid)
        limited = inner if at == "job" else outer
        limit_memory(limited, used_memory(limited) + room_mib * MIB)
        try:
            yield limited
        finally:
            for rank in ranks:
                rank.kill()


@pytest.mark.parametrize("at", ["job", "parent"])
def test_a_job_whose_cgroup_has_no_room_is_refused_before_it_is_touched(
    host: Host, at: str
) -> None:
    rank, other = host.trainer("a", mib=40), host.rank("b")
    with confined(host, rank, room_mib=24, at=at) as limited:
        with pytest.raises(RankError, match=NUMBERS) as refused:
            other.do("acquire", groups="g1", timeout=1)
        numbers = re.search(NUMBERS, str(refused.value))
        assert numbers is not None
        need, have = (int(n.replace(",", "")) for n in numbers.groups()[:2])
        assert need > 40 * MIB
        assert 0 <= have <= 25 * MIB
        assert numbers[3] == str(limited)
        assert host.operations() == [], "not even frozen"
        assert len(rank.do("digest")) == 64, "and it runs"
        # It is told too, before it is let on again and could never leave.
        with pytest.raises(RankError, match="could not be parked") as own:
            rank.do("acquire", groups="g1", timeout=5)
        assert own.value.code == "no_host_memory"
        limit_memory(limited, used_memory(limited) + 80 * MIB)
        assert other.do("acquire", groups="g1", timeout=20)["state"] == "held"
        assert host.states() == {rank.pid: "parked"}
        assert used_memory(limited) > 40 * MIB, "the state is in that cgroup"


def test_two_groups_are_not_promised_the_same_host_memory(host: Host) -> None:
    ranks = [host.trainer("a", mib=30, group="g1"), host.rank("c")]
    ranks[1].do("acquire", groups="g2")
    ranks[1].do("context", device=1)
    ranks[1].do("fill", mib=30)
    ranks[1].do("release")
    with confined(host, *ranks, room_mib=50):
        asked = [
            host.rank(f"waiter-{group}").start("acquire", groups=group, timeout=60)
            for group in ("g1", "g2")
        ]
        first = until(lambda: [a for a in asked if a.is_over()], "one of them is let on")
        assert len(first) == 1
        short = until(
            lambda: [e for e in host.events("eviction_failed") if "host memory" in e["reason"]],
            "the other is told why not",
        )
        assert re.search(NUMBERS, short[0]["reason"])
        parked = [rank for rank in ranks if host.states()[rank.pid] == "parked"]
        assert len(parked) == 1
        assert resident_bytes(parked[0].pid) > 30 * MIB


def test_a_job_that_grows_until_it_is_frozen_is_asked_for_again_and_thawed(host: Host) -> None:
    rank, other = host.trainer("a", mib=8), host.rank("b")
    host.add_hooks(rank, growing_mib=30)
    with confined(host, rank, room_mib=24):
        with pytest.raises(RankError, match=NUMBERS):
            other.do("acquire", groups="g1", timeout=2)
        verbs = [o["verb"] for o in host.operations()]
        assert "freeze" in verbs, "it grew after it had been found small enough"
        assert "snapshot" not in verbs
        assert verbs.count("thaw") == verbs.count("freeze")
        assert host.states() == {rank.pid: "running"}
        assert len(rank.do("digest")) == 64


def test_host_memory_that_others_take_after_the_freeze_turns_it_back(make_host: MakeHost) -> None:
    host = make_host()
    rank, other = host.trainer("a", mib=24), host.rank("b")
    with confined(host, rank, room_mib=40) as limited:
        host.fault(f"lock {rank.pid} * stall")
        asked = other.start("acquire", groups="g1", timeout=60)
        until(lambda: doing(host) == ["freeze"], "it is being frozen")
        limit_memory(limited, used_memory(limited) + 8 * MIB)
        host.fault()
        failed = until(lambda: host.events("eviction_failed"), "it is turned back")[0]
        assert re.search(NUMBERS, failed["reason"])
        assert "snapshot" not in {o["verb"] for o in host.operations()}
        assert not asked.is_over(), "who waits keeps its place"
        limit_memory(limited, used_memory(limited) + 80 * MIB)
        assert asked.wait()["state"] == "held"


# --- device memory --------------------------------------------------------------------------------


def doing(host: Host) -> list[str]:
    return [rank["doing"] for rank in host.ask("ps")["ranks"]]


def residue(host: Host, rank: Rank) -> int:
    found: int = next(r["residue_bytes"] for r in host.ask("ps")["ranks"] if r["pid"] == rank.pid)
    return found


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "listed for nobody"])
def test_what_a_snapshot_leaves_is_shown_kept_and_nobody_is_restored_into_it(
    make_host: MakeHost, listed: bool
) -> None:
    host = make_host(SOFTCUDA_RESIDUE_LISTED=str(int(listed)))
    whole = host.trainer("a", mib=56, seed=1)
    digest = whole.do("digest")
    small = host.rank("b", SOFTCUDA_RESIDUE_MIB="12")
    small.do("initialise", group="g1", mib=40, seed=2)
    states = {whole.pid: "parked", small.pid: "running"}
    until(lambda: host.states() == states, "both are known")
    assert residue(host, whole) == 0
    with pytest.raises(RankError, match=rf"left behind by snapshots .* pid {small.pid}") as full:
        whole.do("acquire", groups="g1", timeout=20)
    assert full.value.code == "no_device_memory"
    assert "60,817,408 bytes (58 MiB) needed, 54,525,952 bytes (52 MiB)" in str(full.value)
    assert "restore" not in {o["verb"] for o in host.operations()}, "it would be lost for ever"
    assert residue(host, small) == 12 * MIB
    assert host.job("b")["residue_bytes"] == 12 * MIB
    assert host.used_bytes() == 12 * MIB
    host.kill_daemon()
    host.start_daemon()
    until(lambda: host.states() == {whole.pid: "parked", small.pid: "parked"}, "both are known")
    assert residue(host, small) == 12 * MIB
    # Its own is no obstacle to who left it, and the way out is its end.
    small.do("acquire", groups="g1", timeout=20)
    small.do("release")
    small.kill()
    assert whole.do("acquire", groups="g1", timeout=20)["restored"] is True
    assert whole.do("digest") == digest


def test_a_snapshot_that_leaves_more_than_it_may_is_none(make_host: MakeHost) -> None:
    host = make_host(settings={"memory": {"max_residue_bytes": "4 MiB"}})
    rank = host.rank("a", SOFTCUDA_RESIDUE_MIB="6")
    rank.do("initialise", group="g1", mib=40, seed=1)
    digest = rank.do("digest")
    asked = host.rank("b").start("acquire", groups="g1", timeout=60)
    failed = until(lambda: host.events("eviction_failed"), "it is turned back", limit_s=60)[0]
    for words in ("6,291,456 bytes are still", "4,194,304 may be", "memory.max_residue_bytes"):
        assert words in failed["reason"]
    assert not asked.is_over()
    rank.kill()
    assert asked.wait()["state"] == "held"
    assert len(digest) == 64


def test_room_is_asked_for_on_each_device_as_much_as_was_there(make_host: MakeHost) -> None:
    host = make_host(settings={"groups.both": {"devices": ["0-1"]}})
    uneven = host.rank("a")
    uneven.do("acquire", groups="both", timeout=20)
    for device, mib in ((1, 4), (0, 52)):
        uneven.do("context", device=device)
        uneven.do("fill", mib=mib)
    digest = uneven.do("digest")
    uneven.do("release")
    host.rank("b", SOFTCUDA_RESIDUE_MIB="20").do("initialise", group="both", mib=48, seed=2)
    # On average there would be room enough on both devices, but not on the first one.
    with pytest.raises(RankError, match=r"54 MiB\) needed, .* \(44 MiB\) available") as full:
        uneven.do("acquire", groups="both", timeout=20)
    assert full.value.code == "no_device_memory"
    assert host.operations("restore") == []
    assert host.states()[uneven.pid] == "parked"
    assert len(digest) == 64


def test_where_a_raylet_runs_no_snapshot_takes_what_ray_would_kill_workers_for(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"memory": {"ray_margin_ratio": 1}})
    rank, other = host.trainer("a", mib=8), host.rank("b")
    # A process of that name is all that can be seen of one.
    raylet = host.directory / "raylet"
    raylet.symlink_to("/bin/sleep")
    running = host.spawn([str(raylet), "600"])
    comm = Path(f"/proc/{running.pid}/comm")
    until(lambda: comm.read_text() == "raylet\n", "it has its name")

    def refused() -> bool:
        with contextlib.suppress(RankError):
            other.do("acquire", groups="g1", timeout=0.5)
            other.do("release")
            rank.do("acquire", groups="g1", timeout=20)
            rank.do("release")
        return any("Ray kills workers" in e["reason"] for e in host.events("eviction_failed"))

    until(refused, "it is refused")
    asked = other.start("acquire", groups="g1", timeout=60)
    pinned = until(lambda: host.events("pinned"), "it is given up on")[0]
    assert "Ray kills workers" in pinned["reason"]
    running.kill()
    assert asked.wait()["state"] == "held", "that ends with its cause"
    assert host.states() == {rank.pid: "parked"}
