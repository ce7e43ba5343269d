"""What a daemon takes that has worked and now has nothing to do."""

from __future__ import annotations

import time

from bench.daemon import GROUP, Place, resident, start_daemon
from bench.load import measure_pairs
from bench.report import Goal, Row, Section

ACQUIRES = 10_000
IDLE_S = 10.0
#: What the last requests left to do, such as the event history, is not idleness yet.
SETTLE_S = 2.0


def measure_footprint(place: Place) -> Section:
    """Measures memory after many acquires, and processor time while nothing is asked."""
    with start_daemon(place) as daemon, resident(place, daemon) as connection:
        measure_pairs(connection, GROUP, ACQUIRES)
        time.sleep(SETTLE_S)
        rss_bytes = daemon.rss_bytes()
        cpu_s = daemon.cpu_s()
        time.sleep(IDLE_S)
        idle_s = daemon.cpu_s() - cpu_s
    return Section(
        title="footprint of the daemon, workers apart",
        rows=[
            Row(
                key="rss_mib_after_acquires",
                label=f"RSS after {ACQUIRES:,} acquires",
                unit="MiB",
                ours=rss_bytes / (1 << 20),
                headline="rss_mib",
                goal=Goal(limit=45),
            ),
            Row(
                key="idle_cpu_pct_of_core",
                label=f"CPU while idle for {IDLE_S:g} s",
                unit="%",
                ours=100 * idle_s / IDLE_S,
                headline="idle_cpu_pct",
                goal=Goal(limit=0.5),
            ),
        ],
    )
