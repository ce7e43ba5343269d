"""The event histories of several hosts as one.

Hosts count their rounds, leases, processes and devices each for itself, so each event gets an
`origin`: the host whose history it is of. `accounts` and `timeline` tell apart by it what has the
same number on two hosts; devices are named ``HOST:DEVICE``. No clock, no I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter

from tsliced.host.history import Event


def merged(
    histories: Mapping[str, Iterable[Event]], ahead_s: Mapping[str, float]
) -> Iterator[Event]:
    """Yield the events of all hosts in the order of time; each history is in that order itself.

    `ahead_s`: by how much the clock of a host is ahead of the one that all times are to be of.
    """
    each = (_of(host, events, ahead_s.get(host, 0.0)) for host, events in histories.items())
    return heapq.merge(*each, key=itemgetter("at"))


def _of(host: str, events: Iterable[Event], ahead_s: float) -> Iterator[Event]:
    latest = float("-inf")
    for event in events:
        own = {**event, "origin": host}
        # A clock that is set back does not change what came after what.
        own["at"] = latest = max(latest, float(str(event["at"])) - ahead_s)
        if own.get("device") is not None and own["kind"] != "progress":
            own["device"] = f"{host}:{own['device']}"
        yield own
