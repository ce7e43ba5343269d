"""The daemon's disk full, broken and slow (G2, G9): nobody is harmed, and nothing waits for it.

The figures that are printed are of a bystander's pings: the event loop never waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import HERE, Host, Rank, RankError, fill_disk, until
from pinger import Pinger
from raw_client import RawClient

LAG_LIMIT_S = 2.0
SETTINGS = {"limits": {"retry_min_s": 0.05, "retry_max_s": 0.2}}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")

Mounted = Callable[..., Host]


def tell(figures: object) -> None:
    """Prints figures; pytest shows them with -rP."""
    sys.stdout.write(f"{figures}\n")


@pytest.fixture
def mounted(softcuda_build: Path) -> Iterator[Mounted]:
    """Makes hosts whose daemon keeps its state on a file system of its own."""
    hosts: list[tuple[Host, Path]] = []

    def make(*mount: str, **settings: dict[str, object]) -> Host:
        host = Host(softcuda_build, settings={**SETTINGS, **settings})
        state = host.directory / "state"
        state.mkdir(mode=0o700)
        done = subprocess.run(
            ["mount", *mount, str(state)], capture_output=True, text=True, timeout=30
        )
        if done.returncode:
            host.close()
            pytest.skip(f"it cannot be mounted: {done.stderr.strip()}")
        hosts.append((host, state))
        return host

    yield make
    for host, state in hosts:
        try:
            host.close()
        finally:
            subprocess.run(["umount", "--lazy", str(state)], check=True, timeout=30)


def acquire_until_refused(rank: Rank, group: str) -> RankError:
    """Takes leases, and gives them back, until the journal can take no more."""
    for _ in range(10_000):
        try:
            rank.do("acquire", groups=group, timeout=2)
        except RankError as error:
            return error
        rank.do("release")
    pytest.fail("it never was full")


@needs_root
def test_on_a_full_disk_nobody_new_is_let_on_and_holders_go_on_g2(mounted: Mounted) -> None:
    host = mounted("-t", "tmpfs", "-o", "size=2m,mode=700", "none")
    host.start_daemon()
    holder, other = host.trainer("holder", mib=8), host.rank("other")
    held = holder.do("acquire", groups="g1")
    digest = holder.do("digest")
    filler = fill_disk(host.directory / "state")
    with Pinger(host.socket) as pinger:
        refused = acquire_until_refused(other, "g2")
        assert "the disk is full; free some space there" in str(refused)
        assert host.group("g2")["holder"] is None, "what is not on record is not given"
        # Whoever holds is not concerned: it works, it is known, and it can give its lease back.
        assert holder.do("digest") == digest
        assert holder.do("look") == {**held, "state": "held"}
        assert host.group("g1")["token"] == held["tokens"]["g1"]
        asked = other.start("acquire", groups="g1", timeout=60)
        holder.do("release")
        # Its state is not touched for what cannot be written down.
        tries = host.log.read_text().count("the disk is full")
        until(lambda: host.log.read_text().count("the disk is full") > tries + 5, "tried again")
        assert host.operations("freeze") == []
        assert not asked.is_over() or host.group("g1")["holder"] is None
    tell(f"a full disk: {pinger}")
    assert pinger.worst_s < LAG_LIMIT_S
    filler.unlink()
    with contextlib.suppress(RankError):
        asked.wait()
        other.do("release")
    again = other.do("acquire", groups="g1", timeout=30)
    assert again["tokens"]["g1"] > held["tokens"]["g1"]
    assert host.states()[holder.pid] == "parked"
    # What could not be written then is on record now.
    host.kill_daemon()
    host.start_daemon()
    until(lambda: host.group("g1")["holder"] is not None, "its client is back")
    assert host.group("g1")["token"] == again["tokens"]["g1"]
    other.do("release")
    assert holder.do("acquire", groups="g1", timeout=30)["restored"] is True
    assert holder.do("digest") == digest


@needs_root
def test_on_a_disk_that_became_read_only_holders_go_on_and_all_of_it_is_said_g2(
    mounted: Mounted, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=30)
    host = mounted("-o", "loop,errors=remount-ro", str(image))
    host.start_daemon()
    holder, other = host.trainer("holder", mib=8), host.rank("other")
    held = holder.do("acquire", groups="g1")
    digest = holder.do("digest")
    break_file_system(host.directory / "state")
    with Pinger(host.socket) as pinger:
        refused = acquire_until_refused(other, "g2")
        assert "Read-only file system" in str(refused) or "Input/output error" in str(refused)
        assert "state/kept-" in str(refused), "it says which file"
        assert holder.do("digest") == digest
        assert holder.do("look") == {**held, "state": "held"}
        holder.do("release")
        with pytest.raises(RankError):
            other.do("acquire", groups="g1", timeout=1)
        assert host.operations("freeze") == []
    tell(f"a read-only disk: {pinger}")
    assert pinger.worst_s < LAG_LIMIT_S


def break_file_system(directory: Path) -> None:
    """Lets ext4 meet an error, upon which it lets nobody write any more."""
    with open("/proc/self/mountinfo") as file:
        fields = next(line for line in file if f" {directory} " in line).split(" - ")[1].split()
    trigger = Path("/sys/fs/ext4") / Path(fields[1]).name / "trigger_fs_error"
    if not trigger.exists():
        pytest.skip("this kernel's ext4 cannot be told to fail")
    trigger.write_text("a test")
    with pytest.raises(OSError, match=r"Read-only|Input/output"):
        (directory / "probe").write_text("x")


@needs_root
def test_a_daemon_does_not_start_on_a_read_only_disk_and_says_why(mounted: Mounted) -> None:
    host = mounted("-t", "tmpfs", "-o", "size=2m,mode=700", "none")
    state = host.directory / "state"
    subprocess.run(["mount", "-o", "remount,ro", str(state)], check=True, timeout=30)
    host.write_config(host.config, host.settings)
    done = subprocess.run(
        [sys.executable, "-m", "tsliced", "--config", str(host.config)],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 69
    assert str(state) in done.stderr
    assert "Read-only" in done.stderr


# --- a slow one


@pytest.fixture
def slow_host(softcuda_build: Path, tmp_path: Path) -> Iterator[Host]:
    """A host with a daemon whose fsyncs can be made slow, which no real disk here can be told."""
    library = tmp_path / "slow_disk.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(HERE / "slow_disk.c"), "-ldl"],
        check=True,
        timeout=60,
    )
    # Small blocks of numbers, so that they have to be reserved all the time.
    host = Host(softcuda_build, settings={"limits": {"block": 16}})
    host.start_daemon(LD_PRELOAD=str(library), SLOW_DISK=str(host.directory / "slow"))
    yield host
    host.close()


def test_the_loop_never_waits_for_a_slow_disk_but_grants_that_need_it_do_g2(
    slow_host: Host,
) -> None:
    host = slow_host
    rank = host.rank("a")
    rank.do("acquire", groups="g2")
    (host.directory / "slow").write_text("1000")
    with Pinger(host.socket) as pinger, RawClient(host.socket) as client:
        client.hello()
        tokens: list[int] = []
        waits: list[float] = []
        end = time.monotonic() + 6.0
        while time.monotonic() < end:
            began = time.monotonic()
            granted = client.ask("acquire", groups=["g1"])
            waits.append(time.monotonic() - began)
            tokens.append(granted["tokens"]["g1"])
            client.ask("release", lease=granted["lease"])
        assert tokens == sorted(set(tokens)), "no number was given twice"
        assert rank.do("look")["state"] == "held"
        client.send({"t": "bye"})
    tell(f"fsyncs of 1 s: {len(tokens)} grants, the slowest after {max(waits):.2f} s; {pinger}")
    assert max(waits) > 0.5, "a grant waits for the numbers that it needs to be durable"
    assert pinger.worst_s < 0.8
    (host.directory / "slow").unlink()
    rank.do("release")
    assert rank.do("acquire", groups="g1", timeout=20)["state"] == "held"
