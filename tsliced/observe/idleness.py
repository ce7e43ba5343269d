"""What a job that shares nothing leaves idle, and what sharing could give.

Works on samples of utilization, taken at regular instants, of the devices that the job is on. A
sample says in how much of the last moment (up to a second, by the driver) a kernel ran. So what is
idle for less than that is not seen, and each idle window may be longer by that much than it looks.

The estimate: a job that gives its devices away during an idle window pays two *switches* for it,
one to the other job and one back, so that it is not late itself if the window is longer than both.
No clock and no I/O here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

#: A kernel that runs for less than this share of a sample's time is taken for none, in per cent.
IDLE_BELOW_PCT: Final = 5.0
#: Upper bounds of idle windows in the histogram, in seconds; the last one has none.
WINDOW_BOUNDS: Final = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
#: What a copy of device state is taken to run at, in bytes per second: out to host memory, which is
#: touched anew, and back. Public measurements are from 2 to 5 and from 5 to 15 GB/s a device.
OUT_BYTES_PER_S: Final = 2.5e9
IN_BYTES_PER_S: Final = 8e9
#: What a switch takes beside copies, in seconds.
FIXED_SWITCH_S: Final = 1.0
#: An idle window must be longer than what it is taken for; a gain of less than this pays nobody.
WORTH_IT: Final = 1.3
PAYS: Final = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at the devices of a job."""

    at: float
    #: By device: per cent of the last moment in which a kernel ran, and bytes in use by the job.
    busy_pct: Mapping[str, float]
    used_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Samples in a row that are all idle, or all busy."""

    idle: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Idle windows of some length."""

    #: None: any length from the bound before on.
    below_s: float | None
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What a switch is taken to cost."""

    seconds: float
    #: ``given``, or worked out from the job's memory: by what was ``measured`` on this host, or
    #: ``estimated`` by public copy rates.
    source: str
    #: Of it, what is no copy.
    fixed_s: float = FIXED_SWITCH_S
    bytes_per_device: int = 0
    out_bytes_per_s: float = OUT_BYTES_PER_S
    in_bytes_per_s: float = IN_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What sharing could give."""

    #: Idle windows that are longer than two switches.
    windows: int
    #: What they have for others beyond the switches, and its share of the time observed.
    usable_s: float
    usable_share: float
    #: How many times as much two jobs like this one do together, in the time of both in turn.
    speedup: float
    #: The longest switch with which that would be at least `PAYS`; None: there is none.
    break_even_s: float | None

    @property
    def verdict(self) -> str:
        """``worth_it``, ``pays_a_little`` or ``not_worth_it``."""
        if self.speedup >= WORTH_IT:
            return "worth_it"
        return "pays_a_little" if self.speedup >= PAYS else "not_worth_it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """What was seen of a job."""

    seconds: float
    samples: int
    #: Share of the time in which any of its devices was busy, and the mean of all of them in which
    #: a kernel ran.
    busy_share: float
    kernel_share: float
    #: By device: the same mean, and the most bytes that the job used.
    kernel_share_of: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    windows: tuple[Window, ...]
    histogram: tuple[Bin, ...] = field(default=())

    @property
    def idle_s(self) -> list[float]:
        """Return the lengths of the idle windows, the longest last."""
        return sorted(window.seconds for window in self.windows if window.idle)

    @property
    def median_idle_s(self) -> float:
        """Return the median of the idle windows, 0 if there are none."""
        return statistics.median(self.idle_s) if self.idle_s else 0.0


def look_through(samples: Sequence[Sample], *, idle_below_pct: float = IDLE_BELOW_PCT) -> Idleness:
    """Return what samples come to; each stands for the time since the one before it.

    Raises ValueError if there are fewer than two.
    """
    if len(samples) < 2:
        raise ValueError("two samples are the least that say anything")
    seconds = samples[-1].at - samples[0].at
    busy_s = 0.0
    kernel_s: dict[str, float] = {}
    peak: dict[str, int] = {}
    windows: list[Window] = []
    for before, sample in pairwise(samples):
        span_s = sample.at - before.at
        for device, pct in sample.busy_pct.items():
            kernel_s[device] = kernel_s.get(device, 0.0) + span_s * pct / 100
        for device, used in sample.used_bytes.items():
            peak[device] = max(peak.get(device, 0), used)
        idle = max(sample.busy_pct.values(), default=0.0) < idle_below_pct
        busy_s += 0.0 if idle else span_s
        if windows and windows[-1].idle == idle:
            windows[-1] = Window(idle=idle, seconds=windows[-1].seconds + span_s)
        else:
            windows.append(Window(idle=idle, seconds=span_s))
    of = {device: busy / seconds for device, busy in kernel_s.items()}
    return Idleness(
        seconds=seconds,
        samples=len(samples),
        busy_share=busy_s / seconds,
        kernel_share=statistics.fmean(of.values()) if of else 0.0,
        kernel_share_of=of,
        peak_bytes=peak,
        windows=tuple(windows),
        histogram=_histogram(windows),
    )


def _histogram(windows: Sequence[Window]) -> tuple[Bin, ...]:
    bins = []
    lower = 0.0
    for upper in (*WINDOW_BOUNDS, None):
        lengths = [
            window.seconds
            for window in windows
            if window.idle and window.seconds >= lower and (upper is None or window.seconds < upper)
        ]
        bins.append(Bin(below_s=upper, count=len(lengths), seconds=sum(lengths)))
        lower = upper or lower
    return tuple(bins)


def estimate_switch(
    idleness: Idleness,
    *,
    fixed_s: float = FIXED_SWITCH_S,
    out_bytes_per_s: float = OUT_BYTES_PER_S,
    in_bytes_per_s: float = IN_BYTES_PER_S,
    source: str = "estimated",
) -> Switch:
    """Return what a switch would take by the job's memory: out with it, in with one as large.

    Devices are copied side by side, so the fullest one counts.
    """
    most = max(idleness.peak_bytes.values(), default=0)
    return Switch(
        seconds=fixed_s + most / out_bytes_per_s + most / in_bytes_per_s,
        source=source,
        fixed_s=fixed_s,
        bytes_per_device=most,
        out_bytes_per_s=out_bytes_per_s,
        in_bytes_per_s=in_bytes_per_s,
    )


def estimate_gain(idleness: Idleness, switch_s: float) -> Gain:
    """Return what sharing could give if a switch takes so long."""
    usable = [idle_s - 2 * switch_s for idle_s in idleness.idle_s if idle_s > 2 * switch_s]
    return Gain(
        windows=len(usable),
        usable_s=sum(usable),
        usable_share=sum(usable) / idleness.seconds,
        speedup=_speedup(idleness, switch_s),
        break_even_s=_break_even_s(idleness),
    )


def _speedup(idleness: Idleness, switch_s: float) -> float:
    """Return how much faster two such jobs are together than one after the other.

    Together they need the devices for what both are busy, and two switches for each window that is
    given away; and neither is faster than alone.
    """
    given = [idle_s for idle_s in idleness.idle_s if idle_s > 2 * switch_s]
    if not given:
        return 1.0
    busy_s = idleness.seconds - sum(given)
    together_s = max(idleness.seconds, 2 * busy_s + 2 * len(given) * switch_s)
    return max(1.0, 2 * idleness.seconds / together_s)


def _break_even_s(idleness: Idleness) -> float | None:
    """Return the longest switch that pays: found by halving, since a longer one never pays more."""
    if _speedup(idleness, 0.0) < PAYS:
        return None
    low, high = 0.0, max(idleness.idle_s)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _speedup(idleness, middle) >= PAYS else (low, middle)
    return low
