"""Two machines with a real systemd that peer: a job on both, whose daemons come and go as services.

Needs root, for the boxes and their network; see box.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from box import Box, BoxRank, why_not
from harness import Settings, build_softcuda, until
from namespaces import Network, skip_without_namespaces

NAMES = ("n1", "n2")
KEYS = "/root/cluster"


@pytest.fixture
def boxes(bundle: Path) -> Iterator[list[Box]]:
    """Two boxes on one network, set up as the README has it, with a group over both."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    skip_without_namespaces()
    build_softcuda()
    with ExitStack() as stack:
        network = Network(*NAMES)
        stack.callback(network.close)
        made: list[Box] = []
        for name in NAMES:
            box = Box(within=network.inside(name))
            stack.callback(box.close)
            made.append(box)
        with ThreadPoolExecutor() as pool:
            for each in [pool.submit(box.install, bundle.name) for box in made]:
                each.result()
        for box in made:
            box.fresh()
        link(made, network)
        yield made
        for box in made:
            sys.stdout.write(box.journal())


def link(boxes: list[Box], network: Network) -> None:
    """Gives all hosts their keys and the same groups, and starts them."""
    hosts = [f"{name}={network.addresses[name]}" for name in NAMES]
    boxes[0].run("tslicectl", "cluster", "init", "--hosts", ",".join(hosts), "--dir", KEYS)
    for name, box in zip(NAMES, boxes, strict=True):
        for file in ("ca.crt", "host.crt", "host.key"):
            text = boxes[0].run("cat", f"{KEYS}/{name}/peers/{file}").stdout
            box.write(f"/etc/tsliced/peers/{file}", text)
        box.run("chmod", "600", "/etc/tsliced/peers/host.key")
        settings: Settings = {
            "daemon": {"host": name},
            "peers": {"auth": "tls", "hosts": hosts, "reconnect_max_s": 0.5},
            "groups.g1": {},
            "groups.g2": {},
            "groups.both": {"devices": [f"{each}:0" for each in NAMES]},
        }
        box.configure(settings)
        box.start()
    for box in boxes:
        until(partial(is_linked, box), "they are linked")


def is_linked(box: Box) -> bool:
    return [peer["state"] for peer in box.status()["peers"]] == ["connected"]


class Job:
    """A job with a rank in each box, and a driver in one of them."""

    def __init__(self, name: str, boxes: list[Box], driver: Box) -> None:
        self.driver = driver.rank(name)
        self.ranks = [box.rank(name) for box in boxes]
        self.driver.do("acquire", groups="both", timeout=60)
        for number, rank in enumerate(self.ranks):
            rank.do("context")
            rank.do("fill", mib=40, seed=len(name) + number)
        self.digests = self.look()
        self.driver.do("release")

    def look(self) -> list[str]:
        return [rank.do("digest") for rank in self.ranks]

    def turn(self) -> None:
        """Takes a turn, in which all must be as it was made."""
        self.driver.do("acquire", groups="both", timeout=60)
        assert self.look() == self.digests
        self.driver.do("release")


def states(boxes: list[Box]) -> list[list[str]]:
    return [sorted(rank["state"] for rank in box.ask("ps")["ranks"]) for box in boxes]


def test_services_of_two_hosts_move_a_job_on_both_and_come_and_go_meanwhile_g8(
    boxes: list[Box],
) -> None:
    first, second = Job("a", boxes, boxes[0]), Job("second", boxes, boxes[1])
    for job in (first, second):
        job.turn()
        assert states(boxes) == [["parked", "running"]] * 2
    held = second.driver.do("acquire", groups="both", timeout=60)
    for number, box in enumerate(boxes):
        waiter: BoxRank = box.rank(f"waiter-{number}")
        waiting = waiter.start("acquire", groups="both", timeout=120)
        until(lambda: boxes[0].group("both")["waiters"] == 1, "it waits")
        # An upgrade restarts the service; a crash is restarted by systemd.
        if number == 0:
            box.run("systemctl", "restart", "tsliced.service")
        else:
            old = box.main_pid()
            box.run("systemctl", "kill", "--kill-whom=main", "-s", "KILL", "tsliced.service")
            box.wait_for_new_daemon(old)
        until(partial(is_linked, box), "they are linked again")
        until(lambda: second.driver.do("look")["state"] == "held", "it has it still")
        assert second.driver.do("look")["tokens"] == held["tokens"]
        assert second.look() == second.digests
        assert not waiting.is_over()
        second.driver.do("release")
        assert waiting.wait()["tokens"]["both"] > held["tokens"]["both"]
        waiter.do("release")
        held = second.driver.do("acquire", groups="both", timeout=60)
    second.driver.do("release")
    for job in (first, second):
        job.turn()
