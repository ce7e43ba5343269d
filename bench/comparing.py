"""Rounds of several variants of the same work, taken in turns, and what they come to.

Whatever else the machine does meanwhile hits neighbouring rounds alike, so the ratio of two
neighbours is steady where times are not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.load import Crowd, PairTimes
from bench.report import percentile
from bench.server import Server


class Variant(Protocol):
    """One of the things that are compared."""

    def round(self, *, warm_up: bool = False) -> None:
        """Does one round; a round of the warm-up does not count."""
        ...


def take_turns(variants: Sequence[Variant], rounds: int) -> None:
    """Does so many rounds of each variant, in turns; every second turn in the reverse order.

    The first round of each fills caches and specialises the interpreter, and does not count.
    """
    for variant in variants:
        variant.round(warm_up=True)
    for number in range(rounds):
        for variant in reversed(variants) if number % 2 else variants:
            variant.round()


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median of the ratios of neighbouring rounds."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


@dataclass(kw_only=True)
class PairSide:
    """Pairs by one client, each request timed."""

    run: Callable[[], PairTimes]
    #: Whose processor time counts; None: it has no server.
    server: Server | None = None
    times: PairTimes = field(default_factory=PairTimes)
    #: Of each round, in its order: the median time of a pair.
    round_ns: list[int] = field(default_factory=list)
    cpu_s: float = 0.0

    def round(self, *, warm_up: bool = False) -> None:
        """Does one round."""
        cpu_before_s = self._server_cpu_s()
        times = self.run()
        if not warm_up:
            self.cpu_s += self._server_cpu_s() - cpu_before_s
            self.times.add(times)
            self.round_ns.append(percentile(times.pair_ns, 50))

    @property
    def cpu_us_per_request(self) -> float:
        """Processor time of the server for one request, in microseconds."""
        return self.cpu_s * 1e6 / self.times.requests

    def _server_cpu_s(self) -> float:
        return self.server.cpu_s() if self.server else 0.0


@dataclass(kw_only=True)
class CrowdSide:
    """Pairs by many clients, timed as a whole."""

    crowd: Crowd
    server: Server
    #: Of each client in one round.
    pairs: int
    #: Requests per second of each round, in its order.
    rates: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    seconds: float = 0.0

    def round(self, *, warm_up: bool = False) -> None:
        """Does one round."""
        cpu_before_s = self.server.cpu_s()
        seconds = self.crowd.run(self.pairs)
        if not warm_up:
            self.cpu_s += self.server.cpu_s() - cpu_before_s
            self.seconds += seconds
            self.rates.append(self.requests_per_round / seconds)

    @property
    def requests_per_round(self) -> int:
        """How many requests all clients make together."""
        return 2 * self.pairs * len(self.crowd.clients)

    @property
    def cpu_us_per_request(self) -> float:
        """Processor time of the server for one request, in microseconds."""
        return self.cpu_s * 1e6 / (self.requests_per_round * len(self.rates))

    @property
    def busy_pct(self) -> float:
        """Share of the time in which the server had its core; near 100, it is the bottleneck."""
        return 100 * self.cpu_s / self.seconds
