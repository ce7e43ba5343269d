"""A daemon that is gone for good: what it left parked is brought back without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from harness import LIMIT_S, Host, MakeHost, Rank, until

SMALL = {"memory": {"snapshot_margin_bytes": "1 MiB", "host_margin_bytes": "1 MiB"}}


def rescue(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tsliced.ctl", "rescue", "--config", str(host.config)]
    return subprocess.run(
        [*command, *arguments],
        env=host.variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )


def report(host: Host, *arguments: str) -> dict[int, dict[str, Any]]:
    """Runs a rescue and returns what it says of each process."""
    done = rescue(host, "--json", *arguments)
    document = json.loads(done.stdout)
    assert "ranks" in document, done.stderr
    return {rank["pid"]: rank for rank in document["ranks"]}


def left_parked(host: Host, *, mib: int) -> tuple[Rank, Rank, list[str]]:
    """Two jobs that are parked when the daemon is killed; also the digests of their state."""
    ranks = host.trainer("a", mib=mib, seed=1), host.trainer("b", mib=mib, seed=2)
    until(lambda: host.states() == {ranks[0].pid: "parked", ranks[1].pid: "running"}, "a is off")
    holder = host.rank("c")
    holder.do("acquire", groups="g1", timeout=30)
    until(lambda: set(host.states().values()) == {"parked"}, "both are parked")
    holder.do("release")
    host.kill_daemon()
    return *ranks, [sha(mib, 1), sha(mib, 2)]


def sha(mib: int, seed: int) -> str:
    """Returns the digest that a rank with that state gives."""
    import hashlib
    import random

    data, total, size = random.Random(seed).randbytes(4099) * 256, hashlib.sha256(), mib << 20
    for offset in range(0, size, 1048573):
        total.update(data[: min(1048573, size - offset)])
    return total.hexdigest()


def test_what_fits_is_brought_back_whole_and_the_next_daemon_goes_on_with_it(host: Host) -> None:
    first, second, digests = left_parked(host, mib=20)
    found = report(host, "--dry-run")
    assert {pid: (r["was"], r["state"]) for pid, r in found.items()} == {
        first.pid: ("parked", "parked"),
        second.pid: ("parked", "parked"),
    }
    found = report(host)
    assert {r["state"] for r in found.values()} == {"running"}
    assert [rank.do("digest") for rank in (first, second)] == digests
    host.start_daemon()
    until(lambda: set(host.states().values()) == {"running"}, "both are known to run")
    # Turns go on: who is granted is alone on the device.
    for rank, other in ((first, second), (second, first)):
        assert rank.do("acquire", groups="g1", timeout=30)["state"] == "held"
        assert host.states() == {rank.pid: "running", other.pid: "parked"}
        rank.do("release")
    assert [rank.do("acquire", groups="g1", timeout=30)["state"] for rank in (first,)] == ["held"]
    assert first.do("digest") == digests[0]
    assert not host.events("blocked", "pinned", "faulted", "broken_invariant")


def test_what_does_not_fit_beside_another_is_left_parked_and_said_so(host: Host) -> None:
    first, second, digests = left_parked(host, mib=40)
    done = rescue(host)
    assert done.returncode == 1
    assert "MiB) needed" in done.stdout
    states = {p: r["state"] for p, r in report(host, "--dry-run").items()}
    assert sorted(states.values()) == ["parked", "running"]
    (running,) = [rank for rank in (first, second) if states[rank.pid] == "running"]
    (parked,) = [rank for rank in (first, second) if rank is not running]
    assert running.do("digest") == digests[0 if running is first else 1]
    # A failed restore could never be repeated: there was none. The next daemon brings it back.
    host.start_daemon()
    assert parked.do("acquire", groups="g1", timeout=30)["state"] == "held"
    assert parked.do("digest") == digests[0 if parked is first else 1]
    parked.do("release")
    assert running.do("acquire", groups="g1", timeout=30)["state"] == "held"
    assert running.do("digest") == digests[0 if running is first else 1]


def test_one_job_is_chosen_by_its_name_and_an_unknown_one_is_not_found(host: Host) -> None:
    first, second, digests = left_parked(host, mib=20)
    done = rescue(host, "--job", "none")
    assert done.returncode == 3
    assert f"{os.getuid()}/a" in done.stderr
    assert list(report(host, "--job", "b")) == [second.pid]
    assert second.do("digest") == digests[1]
    assert report(host, "--dry-run")[first.pid]["state"] == "parked"
    host.start_daemon()


def test_it_refuses_while_a_daemon_runs(host: Host) -> None:
    for arguments in ((), ("--dry-run",), ("--pid", "1")):
        done = rescue(host, *arguments)
        assert done.returncode == 75, done
        assert "stop it first" in done.stderr
    assert host.status()["groups"]


def test_a_worker_that_is_still_in_a_call_is_waited_for(make_host: MakeHost) -> None:
    host = make_host()
    rank = host.trainer("a", mib=8)
    host.fault(f"checkpoint {rank.pid} * delay:2000")
    host.rank("b").start("acquire", groups="g1", timeout=60)
    until(lambda: any(r["doing"] == "snapshot" for r in host.ask("ps")["ranks"]), "in a call")
    host.kill_daemon()
    assert report(host)[rank.pid]["was"] == "parked", "the call was carried to its end first"
    assert rank.do("digest") == sha(8, 0)
    host.start_daemon()


def test_a_driver_that_does_not_answer_is_given_up_within_the_limit(host: Host) -> None:
    first, second, digests = left_parked(host, mib=8)
    first.stop()
    found = report(host, "--limit", "1")
    assert "stopped" in found[first.pid]["reason"]
    assert found[second.pid]["state"] == "running"
    assert second.do("digest") == digests[1]
    os.kill(first.pid, 18)
    assert report(host)[first.pid]["state"] == "running"
    assert first.do("digest") == digests[0]
    host.start_daemon()


def test_without_a_journal_processes_are_named_by_their_pids(host: Host) -> None:
    first, second, digests = left_parked(host, mib=4)
    journal = host.directory / "state"
    for path in journal.glob("kept*"):
        path.unlink()
    done = rescue(host)
    assert done.returncode == 0
    assert "--pid" in done.stderr
    found = report(host, "--pid", str(first.pid), "--pid", str(second.pid), "--force")
    assert {r["state"] for r in found.values()} == {"running"}
    assert [rank.do("digest") for rank in (first, second)] == digests
    assert rescue(host, "--pid", "4194304").returncode == 3
    host.start_daemon()
