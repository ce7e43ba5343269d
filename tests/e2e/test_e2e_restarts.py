"""The daemon ends and comes back at every moment of a move, and with less memory than it had.

What the clients saw is judged at the end of each test, see `judging`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness import HERE, Host, MakeHost, Pending, Rank, until

from libtimeslice import TimeSliceError
from libtimeslice.connection import Connection

STATE_MIB = 40


@dataclass(slots=True)
class Cast:
    """Two jobs that do not fit together, and a third without any state; all lease one group."""

    host: Host
    first: Rank
    second: Rank
    third: Rank
    digests: dict[Rank, str] = field(default_factory=dict)
    #: Who waits, in the order in which they asked.
    asked: list[tuple[Rank, Pending]] = field(default_factory=list)

    def ask(self, rank: Rank, **ask: object) -> None:
        """Has a rank wait."""
        self.asked.append((rank, rank.start("acquire", groups="g1", timeout=60, **ask)))

    def park_first(self) -> None:
        """Lets the second job have its state on the device instead of the first's."""
        self.second.do("initialise", group="g1", mib=STATE_MIB, seed=2)
        self.digests[self.second] = self.second.do("digest")

    def doing(self, verb: str) -> None:
        """Waits until a rank is well within an operation."""
        until(lambda: verb in self.host.doing(for_s=0.1), f"it is in {verb}")


def queued(cast: Cast) -> None:
    cast.first.do("acquire", groups="g1")
    cast.ask(cast.second)
    until(lambda: cast.host.group()["waiters"] == 1, "it is queued")


def held_and_parked(cast: Cast) -> None:
    cast.park_first()
    cast.second.do("acquire", groups="g1")
    cast.ask(cast.first)
    until(lambda: cast.host.group()["waiters"] == 1, "it is queued")


def parked_and_idle(cast: Cast) -> None:
    cast.park_first()


def quiescing(cast: Cast) -> None:
    cast.host.add_hooks(cast.first, seconds=0.7)
    cast.ask(cast.second)
    until(lambda: cast.host.called() == ["pause"], "it is told to pause")


def freezing(cast: Cast) -> None:
    cast.host.fault(f"lock {cast.first.pid} * delay:700")
    cast.ask(cast.second)
    cast.doing("freeze")


def snapshotting(cast: Cast) -> None:
    cast.host.fault(f"checkpoint {cast.first.pid} * delay:700")
    cast.ask(cast.second)
    cast.doing("snapshot")


def restoring(cast: Cast) -> None:
    cast.park_first()
    cast.host.fault(f"restore {cast.first.pid} * delay:700")
    cast.ask(cast.first)
    cast.doing("restore")


def thawing(cast: Cast) -> None:
    cast.park_first()
    cast.host.fault(f"unlock {cast.first.pid} * delay:700")
    cast.ask(cast.first)
    cast.doing("thaw")


def resuming(cast: Cast) -> None:
    cast.host.add_hooks(cast.first, seconds=0.7)
    cast.park_first()
    cast.ask(cast.first)
    until(lambda: cast.host.called()[-1] == "resume", "it is told to resume")


MOMENTS: list[Callable[[Cast], None]] = [
    queued,
    held_and_parked,
    parked_and_idle,
    quiescing,
    freezing,
    snapshotting,
    restoring,
    thawing,
    resuming,
]


@pytest.fixture
def cast(make_host: MakeHost) -> Cast:
    # Who is away so long is given up, and a test would be over long before.
    host = make_host(settings={"limits": {"grace_s": 120.0}})
    first = host.trainer("a", mib=STATE_MIB, seed=1)
    cast = Cast(host, first, host.rank("b"), host.rank("c"))
    cast.digests[first] = first.do("digest")
    return cast


@pytest.mark.parametrize("end", ["crash", "stop"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_daemon_that_ends_at_any_moment_takes_nothing_from_anybody_g8(
    cast: Cast, moment: Callable[[Cast], None], end: str
) -> None:
    host = cast.host
    moment(cast)
    holders = [rank for rank in (cast.first, cast.second) if is_holder(host, rank)]
    host.end_daemon(end)
    host.start_daemon()
    # Whoever comes only now goes last.
    cast.ask(cast.third)
    for holder in holders:
        until(lambda h=holder: h.do("look")["state"] == "held", "it has it still")  # type: ignore[misc]
        holder.do("release")
    host.fault()
    for rank, asked in cast.asked:
        assert asked.wait()["state"] == "held"
        if rank in cast.digests:
            assert rank.do("digest") == cast.digests[rank]
        rank.do("release")
    for rank, digest in reversed(cast.digests.items()):
        rank.do("acquire", groups="g1", timeout=30)
        assert rank.do("digest") == digest
        rank.do("release")
    if moment in (quiescing, resuming):
        assert host.called()[-1] == "resume", "who was told to pause is told to go on"


def is_holder(host: Host, rank: Rank) -> bool:
    holder = host.group()["holder"]
    return holder is not None and holder["id"] == rank.job


@pytest.mark.parametrize("end", ["crash", "stop"])
def test_a_round_goes_on_gathering_behind_a_restart_g8(make_host: MakeHost, end: str) -> None:
    host = make_host()
    ranks = [host.rank("a") for _ in range(3)]
    asked = [rank.start("acquire", groups="g1", ranks=3, timeout=60) for rank in ranks[:2]]
    until(lambda: gathered(host) == {rank.pid for rank in ranks[:2]}, "two of three have asked")
    host.end_daemon(end)
    host.start_daemon()
    assert gathered(host) == {rank.pid for rank in ranks[:2]}
    asked.append(ranks[2].start("acquire", groups="g1", ranks=3, timeout=60))
    assert len({answer.wait()["tokens"]["g1"] for answer in asked}) == 1


def gathered(host: Host) -> set[int]:
    return {pid for round_ in host.job("a").get("gathering", ()) for pid in round_["arrived"]}


def test_a_daemon_that_dies_again_and_again_in_one_move_loses_nothing_g8(cast: Cast) -> None:
    host = cast.host
    cast.park_first()
    host.fault(*(f"{verb} * * delay:300" for verb in ("lock", "checkpoint", "restore", "unlock")))
    cast.ask(cast.first)
    for verb in ("freeze", "snapshot", "restore", "thaw"):
        until(lambda v=verb: v in host.doing(), f"it is in {verb}")  # type: ignore[misc]
        host.kill_daemon()
        host.start_daemon()
    assert cast.asked[0][1].wait()["state"] == "held"
    assert cast.first.do("digest") == cast.digests[cast.first]


# --- with less memory than it had


def journal_files(host: Host, pattern: str = "*") -> list[Path]:
    return sorted(path for path in (host.directory / "state").glob(pattern) if path.is_file())


def test_after_a_reboot_nothing_is_left_but_the_tokens_g2(host: Host) -> None:
    parked, holder = host.trainer("a"), host.trainer("b")
    before = holder.do("acquire", groups="g1")["tokens"]["g1"]
    host.kill_daemon()
    for rank in (parked, holder):
        rank.kill()
    boot_id = host.directory / "boot_id"
    boot_id.write_text("11111111-2222-3333-4444-555555555555\n")
    host.start_daemon(program=[str(HERE / "rebooted_daemon.py")], BOOT_ID=str(boot_id))
    assert host.states() == {}
    assert host.status()["jobs"] == []
    rank = host.rank("a")
    assert rank.do("acquire", groups="g1", timeout=20)["tokens"]["g1"] > before


def lose(host: Host, what: str) -> None:
    """Lets the journal of a daemon that is down be lost, or a part of it."""
    host.forget()
    log = journal_files(host, "kept*")[-1]
    match what:
        case "all of it" | "its log" | "its numbers":
            pattern = {"all of it": "*", "its log": "kept*", "its numbers": "journal.db*"}[what]
            for path in journal_files(host, pattern):
                path.unlink()
        case "the end of its log":
            os.truncate(log, log.stat().st_size - 3)
        case _:
            with log.open("ab") as file:
                file.write(b"\xff" * 100)
    # With nothing left to go by the next generation is the clock's, in whole seconds.
    second = int(time.time())
    until(lambda: int(time.time()) > second, "the next second has begun")


LOSSES = ["all of it", "its log", "its numbers", "the end of its log", "sense at its end"]


@pytest.mark.parametrize("lost", LOSSES)
def test_a_journal_that_is_lost_costs_leases_and_places_but_no_state_g2(
    cast: Cast, lost: str
) -> None:
    host = cast.host
    before = cast.first.do("acquire", groups="g1")["tokens"]["g1"]
    cast.ask(cast.second)
    until(lambda: host.group()["waiters"] == 1, "it is queued")
    host.kill_daemon()
    lose(host, lost)
    host.start_daemon()
    until(lambda: cast.first.do("look")["state"] != "uncertain", "the holder knows more")
    kept = lost == "its numbers"
    assert cast.first.do("look")["state"] == ("held" if kept else "lost") or lost == LOSSES[3]
    cast.first.do("release")
    lease = cast.asked[0][1].wait()
    assert lease["tokens"]["g1"] > before
    assert host.states() == {cast.first.pid: "parked"}, "it was found and sent away"
    cast.second.do("release")
    assert cast.first.do("acquire", groups="g1", timeout=30)["restored"] is True
    assert cast.first.do("digest") == cast.digests[cast.first]


@pytest.mark.parametrize("lost", ["all of it", "its log"])
def test_what_a_lost_journal_left_parked_is_found_by_asking_the_driver_g12(
    cast: Cast, lost: str
) -> None:
    host = cast.host
    cast.park_first()
    host.kill_daemon()
    lose(host, lost)
    host.start_daemon()
    assert cast.first.do("acquire", groups="g1", timeout=30)["restored"] is True
    assert cast.first.do("digest") == cast.digests[cast.first]
    cast.first.do("release")
    cast.second.do("acquire", groups="g1", timeout=30)
    assert cast.second.do("digest") == cast.digests[cast.second]


def test_one_that_a_lost_journal_left_parked_and_stopped_is_not_passed_by(cast: Cast) -> None:
    host = cast.host
    cast.park_first()
    host.kill_daemon()
    lose(host, "all of it")
    host.start_daemon()
    with host.connection(role="client", job="a") as connection:
        # Once this is answered, connections that were closed before it count no more.
        connection.request({"t": "ping"})
        # Theirs, and this one.
        until(lambda: sessions(connection) == 3, "the ranks are back")
        cast.first.stop()
        with pytest.raises(TimeSliceError, match="SIGCONT"):
            connection.request({"t": "acquire", "groups": ["g1"], "timeout_s": 3}, 30)
        os.kill(cast.first.pid, signal.SIGCONT)
        assert connection.request({"t": "acquire", "groups": ["g1"]}, 30)["restored"] is True
        assert cast.first.do("digest") == cast.digests[cast.first]


def sessions(connection: Connection) -> int:
    """Returns how many sessions the daemon has."""
    count: int = connection.request({"t": "status"})["status"]["sessions"]
    return count
