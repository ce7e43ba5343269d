"""How fast a group goes on when its holder dies: to the grant of whoever waits for it.

The grant comes after the dead one's lease is fenced and what its job left on the devices is
evicted, so no time to the beginning of the eviction is longer. What this process sees of the death
is what the kernel tells every watcher at once: a pidfd that becomes readable.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import closing
from dataclasses import dataclass, field

from bench.daemon import Place, group_names, start_daemon
from bench.holders import Holders
from bench.load import LIMIT_S, Client, acquire_of
from bench.rank import Rank
from bench.report import Goal, Row, Section, percentile

BACKEND = "bench.instant:InstantBackend"
JOB = "bench-dying"
DEATHS = 200
WARM_UP = 5
#: Memory of those whose killing takes the kernel a while.
LARGE_BYTES = 64 << 20


@dataclass(slots=True)
class Deaths:
    """Nanoseconds of each death of one kind of holder."""

    #: From the kill to the readable pidfd: the kernel's part.
    kernel_ns: list[int] = field(default_factory=list)
    #: From there to the next grant: ours.
    fenced_ns: list[int] = field(default_factory=list)
    #: From the kill to the next grant.
    whole_ns: list[int] = field(default_factory=list)


def measure_deaths(place: Place, deaths: int = DEATHS) -> Section:
    """Kills holders while another job waits and a rank of theirs lives on."""
    with (
        start_daemon(place, backend=BACKEND) as daemon,
        Holders(daemon.path) as holders,
        Rank() as survivor,
        closing(Client(daemon.path, JOB)) as family,
        closing(Client(daemon.path, "bench-waiting")) as waiter,
    ):
        family.request({"t": "register", "pid": survivor.pid})
        _kill_some(holders, waiter, WARM_UP, 0)
        small = _kill_some(holders, waiter, deaths, 0)
        large = _kill_some(holders, waiter, deaths, LARGE_BYTES)
    fenced_ns = small.fenced_ns + large.fenced_ns
    return Section(
        title="death of a holder, to the next job's grant",
        yardstick="kill to pidfd",
        rows=[
            Row(
                key="death_ms_p50",
                label="from its pidfd p50",
                unit="ms",
                ours=percentile(fenced_ns, 50) / 1e6,
            ),
            Row(
                key="death_ms_p99",
                label="from its pidfd p99",
                unit="ms",
                ours=percentile(fenced_ns, 99) / 1e6,
                headline="death_to_fenced_ms_p99",
                goal=Goal(limit=20),
            ),
            Row(
                key="kill_64mib_ms_p99",
                label="from SIGKILL, with 64 MiB, p99",
                unit="ms",
                ours=percentile(large.whole_ns, 99) / 1e6,
                theirs=percentile(large.kernel_ns, 99) / 1e6,
                headline="kill_to_fenced_64mib_ms_p99",
                goal=Goal(limit=100),
            ),
        ],
    )


def _kill_some(holders: Holders, waiter: Client, count: int, size: int) -> Deaths:
    deaths = Deaths()
    for _ in range(count):
        _kill_one(holders, waiter, size, deaths)
    return deaths


def _kill_one(holders: Holders, waiter: Client, size: int, deaths: Deaths) -> None:
    group = group_names()[0]
    pid = holders.start(JOB, group, size)
    waiting = waiter.send(acquire_of(group))
    # Requests of a connection are served in turn: once this is answered, the other is queued.
    waiter.request({"t": "ping"})
    pidfd = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.register(waiter.sock, select.POLLIN)
        killed_ns = time.perf_counter_ns()
        os.kill(pid, signal.SIGKILL)
        ready = poller.poll(LIMIT_S * 1000)
        dead_ns = time.perf_counter_ns()
        if not ready:
            raise TimeoutError(f"process {pid} did not die within {LIMIT_S:g} s")
        granted = waiter.wait(waiting)
        granted_ns = time.perf_counter_ns()
    finally:
        os.close(pidfd)
    deaths.kernel_ns.append(dead_ns - killed_ns)
    deaths.fenced_ns.append(granted_ns - dead_ns)
    deaths.whole_ns.append(granted_ns - killed_ns)
    waiter.request({"t": "release", "lease": granted["lease"]})
