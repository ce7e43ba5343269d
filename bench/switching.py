"""What a switch costs apart from the moving of bytes: from a release to the other job's grant."""

from __future__ import annotations

import time
from contextlib import closing

from bench.daemon import Place, group_names, start_daemon
from bench.load import Client, acquire_of
from bench.rank import Rank
from bench.report import Goal, Row, Section, percentile
from bench.syncs import SyncCounter, measure_syncs

BACKEND = "bench.instant:InstantBackend"
#: Enough to use up blocks of reserved numbers, so that their fsyncs are in the figures.
SWITCHES = 1000
WARM_UP = 20
SYNC_PROBES = 100


def measure_switch(place: Place) -> Section:
    """Lets two jobs with a rank each take turns on a group, with the journal as it always is."""
    counter = SyncCounter(place.directory)
    with (
        start_daemon(place, backend=BACKEND, environment=counter.environment) as daemon,
        Rank() as first,
        Rank() as second,
        closing(Client(daemon.path, "bench-first")) as one,
        closing(Client(daemon.path, "bench-second")) as other,
    ):
        one.request({"t": "register", "pid": first.pid})
        other.request({"t": "register", "pid": second.pid})
        turns = Turns(one, other, group_names()[0])
        turns.warm_up(WARM_UP)
        syncs_before = len(counter.durations_ns())
        cpu_before_s = daemon.cpu_s()
        switch_ns = turns.take(SWITCHES)
        cpu_s = daemon.cpu_s() - cpu_before_s
        sync_ns = counter.durations_ns()
    return Section(
        title="switch between two jobs, instant backend",
        yardstick="bare fdatasync",
        rows=[
            Row(
                key="switch_ms_p50",
                label="release to grant p50",
                unit="ms",
                ours=percentile(switch_ns, 50) / 1e6,
                headline="switch_overhead_ms_p50",
                goal=Goal(limit=1.5),
            ),
            Row(
                key="switch_ms_p99",
                label="release to grant p99",
                unit="ms",
                ours=percentile(switch_ns, 99) / 1e6,
            ),
            Row(
                key="switch_cpu_ms",
                label="server CPU per switch",
                unit="ms",
                ours=cpu_s * 1e3 / SWITCHES,
            ),
            Row(
                key="fsyncs_per_switch",
                label="fsyncs per switch",
                ours=(len(sync_ns) - syncs_before) / SWITCHES,
            ),
            Row(
                key="fsync_ms_p50",
                label=f"fsync p50, over all {len(sync_ns)} of the daemon",
                unit="ms",
                ours=percentile(sync_ns, 50) / 1e6,
                theirs=percentile(measure_syncs(place.state, SYNC_PROBES), 50) / 1e6,
            ),
        ],
    )


class Turns:
    """Two clients that pass a group to and fro."""

    def __init__(self, one: Client, other: Client, group: str) -> None:
        self._holder, self._waiter = one, other
        self._group = group
        self._lease = self._holder.request(acquire_of(self._group))["lease"]

    def take(self, count: int) -> list[int]:
        """Passes the group so many times; returns the nanoseconds from release to grant."""
        return [self._pass_on() for _ in range(count)]

    def warm_up(self, count: int) -> None:
        """Passes the group so many times; each rank is parked for the first time meanwhile."""
        for _ in range(count):
            self._pass_on(must_restore=False)

    def _pass_on(self, *, must_restore: bool = True) -> int:
        waiting = self._waiter.send(acquire_of(self._group))
        # Requests of a connection are served in turn: once this is answered, the other is queued.
        self._waiter.request({"t": "ping"})
        started_ns = time.perf_counter_ns()
        releasing = self._holder.send({"t": "release", "lease": self._lease})
        granted = self._waiter.wait(waiting)
        switch_ns = time.perf_counter_ns() - started_ns
        self._holder.wait(releasing)
        if must_restore and not granted["restored"]:
            raise RuntimeError(f"a grant without a switch: {granted}")
        self._lease = granted["lease"]
        self._holder, self._waiter = self._waiter, self._holder
        return switch_ns
