"""What somebody who never saw tsliced can tell from `tslicectl status` alone."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys

from harness import LIMIT_S, Host, until

CTL = [sys.executable, "-m", "tsliced.ctl"]


def shown(host: Host, *arguments: str) -> list[str]:
    """Returns the lines of a command, with single blanks."""
    done = subprocess.run(
        [*CTL, *arguments],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_who_holds_since_when_who_waits_what_is_parked_where_and_what_is_wrong(host: Host) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    host.trainer("parked", mib=24)
    holder = host.rank("holder")
    holder.do("acquire", groups="g1", phase="rollout", timeout=30)
    host.rank("waiter").start("acquire", groups="g1", phase="training", timeout=60)
    pinned = host.rank("pinned", CUDA_VISIBLE_DEVICES="1")
    pinned.do("initialise", group="g2", mib=8, seed=0)
    host.fault(f"checkpoint {pinned.pid} * error:801")
    host.rank("behind").start("acquire", groups="g2", timeout=60)
    until(lambda: host.events("pinned"), "it is pinned")
    until(lambda: len(host.group()["queue"]) == 1, "somebody waits")
    lines = shown(host, "status")

    held = next(line.split() for line in lines if line.startswith("g1 held"))
    assert held[:4] == ["g1", "held", user, "holder"]
    assert held[4].endswith("s"), "since when"
    assert held[5:7] == ["rollout", "1"]
    waiting = next(line.split() for line in lines if line.startswith("g1 1 "))
    assert waiting[2:4] == [user, "waiter"]
    assert waiting[5] == "training"
    parked = next(line for line in lines if line.startswith(f"{user} parked "))
    assert parked.split()[2:6] == ["parked", "-", "g1", "1"]
    words = parked.split()
    assert words[words.index("MiB") - 1].startswith("2"), "how much is in host memory"
    wrong = lines[lines.index("LOOK AT THIS") + 1 :]
    place = next(n for n, line in enumerate(wrong) if line.startswith("pinned is pinned: "))
    assert "for the process" in wrong[place]
    assert wrong[place + 1].startswith("way out: mend that; then try again (tslicectl retry "), (
        wrong
    )
    assert "g2 is switching: because of pinned, see there" in wrong, "it is said once"

    top = shown(host, "top", "--once")
    assert any("holder (" in line and "held" in line for line in top)
    assert any(line.startswith(f"g1 1 waiter {user}") for line in top)
    page = shown(host, "show", "job", "parked")
    assert any(line.startswith("parked 2") for line in page)
    assert any(line.startswith("parked for ") for line in page)
    host.fault()
