"""Metrics for Prometheus: what stands now, and what the event history adds up to since the start.

Nothing is computed before somebody asks. A page is made in chunks of bounded size, one for each
call of the event loop, so that answering a scrape never holds up a request. Names are `tsliced_*`
in base units; no histogram has a job or process as a label, and series of jobs that are over are
gone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from libtimeslice import __version__
from libtimeslice.protocol import Message
from tsliced.core.machine import Machine
from tsliced.core.model import GroupConfig, JobKey, RankState
from tsliced.host.journal import Journal
from tsliced.host.memory import HOST, HostMemory
from tsliced.observe.accounts import MOVING, Accounts, Held, Spread
from tsliced.observe.sampling import Sampler
from tsliced.observe.status import StatusPage
from tsliced.observe.told import JobTold, Told

#: Samples that are written without giving way to others.
CHUNK: Final = 250
#: Jobs whose own figures are shown, those heard of last.
MOST_JOBS: Final = 256

#: Figures that jobs report by these names have metrics of their own.
_KNOWN: Final = {
    "step": "Number of the step that a job is at, as it says.",
    "reward": "Reward of a job, as it says.",
    "loss": "Loss of a job, as it says.",
    "staleness": "Staleness of a job's samples, in steps, as it says.",
}
_LAG_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(slots=True, kw_only=True)
class Running:
    """What the parts of the daemon cannot say by themselves: sums over its time."""

    accounts: Accounts
    started_unix: float
    #: How late the event loop came to what was due.
    lag: Spread = field(default_factory=lambda: Spread(_LAG_BOUNDS))
    worst_lag_s: float = 0.0
    #: The most that was in host memory at once.
    peak_parked_bytes: int = 0

    def add_lag(self, late_s: float) -> None:
        """Count one look at the loop."""
        self.lag.add(late_s)
        self.worst_lag_s = max(self.worst_lag_s, late_s)


@dataclass(slots=True, kw_only=True)
class MetricsPage:
    """Makes the page. All methods belong to the event loop."""

    machine: Machine
    status: StatusPage
    told: Told
    #: None: nobody looks at the devices.
    sampler: Sampler | None
    journal: Journal
    running: Running
    #: Called before a page is made: the history is told what it has not been told yet.
    catch_up: Callable[[], None]
    memory: HostMemory
    clock: Callable[[], float] = time.monotonic
    clock_unix: Callable[[], float] = time.time

    def chunks(self) -> Iterator[bytes]:
        """Yield the page in parts; others may have their turn between two of them."""
        self.catch_up()
        self._forget_jobs()
        families = (
            self._daemon,
            self._groups,
            self._held,
            self._waits,
            self._moves,
            self._devices,
            self._memory,
            self._ranks,
            self._peers,
            self._jobs,
            self._figures,
            self._backlogs,
            _process,
        )
        for make in families:
            for family in make():
                yield from _rendered(family)

    def note_parked(self) -> int:
        """Return the device state that is in host memory, and know the most there ever was."""
        tenancies = self.machine.tenancies.all.values()
        ranks = (rank for tenancy in tenancies for rank in tenancy.participant.ranks.values())
        parked = sum(rank.parked_bytes for rank in ranks if rank.state is RankState.PARKED)
        self.running.peak_parked_bytes = max(self.running.peak_parked_bytes, parked)
        return parked

    def _forget_jobs(self) -> None:
        known = {*map(str, self._known_jobs()), *self.told.jobs}
        for job in self.running.accounts.jobs.keys() - known:
            self.running.accounts.forget_job(job)

    def _known_jobs(self) -> Iterable[JobKey]:
        leasing = self.machine.leasing
        return {*self.machine.tenancies.by_job, *leasing.by_job, *leasing.faults}

    # --- the daemon ---------------------------------------------------------------------------

    def _daemon(self) -> Iterator[Metric]:
        info = {"version": __version__, "backend": self.status.backend}
        if self.status.inventory:
            info["driver"] = self.status.inventory[0].driver_version
        yield InfoMetricFamily("tsliced_build", "What this daemon is.", info)
        running, journal = self.running, self.journal
        yield GaugeMetricFamily(
            "tsliced_start_time_seconds", "When the daemon started.", running.started_unix
        )
        sessions = len(self.machine.leasing.sessions)
        yield GaugeMetricFamily("tsliced_sessions", "Sessions of clients.", sessions)
        yield _histogram(
            "tsliced_event_loop_lag_seconds",
            "How late the event loop came to what was due, looked at once a second.",
            [([], running.lag)],
        )
        yield GaugeMetricFamily(
            "tsliced_event_loop_lag_worst_seconds", "The worst of that.", running.worst_lag_s
        )
        warnings = CounterMetricFamily(
            "tsliced_warnings", "Events of level warning and error, by kind.", labels=["kind"]
        )
        for kind, count in sorted(running.accounts.warnings.items()):
            warnings.add_metric([kind], count)
        yield warnings
        yield CounterMetricFamily(
            "tsliced_history_lost_events",
            "Events that could not be stored: the disk is full or too slow.",
            journal.history_lost,
        )
        yield CounterMetricFamily(
            "tsliced_journal_fsyncs", "Commits that waited for the disk.", journal.fsync_count
        )
        yield GaugeMetricFamily(
            "tsliced_journal_failing",
            "1 while the journal cannot be written.",
            journal.background_error is not None,
        )

    # --- groups -------------------------------------------------------------------------------

    def _here(self) -> list[GroupConfig]:
        here = self.machine.config.host
        return [g for g in self.machine.config.groups if (g.hosts or (here,))[0] == here]

    def _groups(self) -> Iterator[Metric]:
        now = self.clock()
        held = _gauge("tsliced_group_held", "1 while a job holds a lease on a group.", "group")
        hold = _gauge(
            "tsliced_group_current_hold_seconds", "How long the present lease is held.", "group"
        )
        waiters = _gauge("tsliced_group_waiters", "Jobs in the queue of a group.", "group")
        oldest = _gauge(
            "tsliced_group_oldest_wait_seconds", "How long the first in a queue waits.", "group"
        )
        drained = _gauge("tsliced_group_drained", "1 while an operator keeps it closed.", "group")
        still = _gauge(
            "tsliced_group_standstill",
            "1 while a group is given to nobody: blocked, stuck, lost or uncertain.",
            "group",
            "state",
        )
        for group in self._here():
            summary = self.status.summary(group, now)
            held.add_metric([group.name], summary.held_s is not None)
            hold.add_metric([group.name], summary.held_s or 0.0)
            waiters.add_metric([group.name], summary.waiters)
            oldest.add_metric([group.name], summary.oldest_wait_s)
            drained.add_metric([group.name], group.name in self.machine.leasing.drains)
            if summary.standstill is not None:
                still.add_metric([group.name, summary.standstill], 1)
        yield from (held, hold, waiters, oldest, drained, still)

    def _held(self) -> Iterator[Metric]:
        accounts, now_unix = self.running.accounts, self.clock_unix()
        queued = _counter("tsliced_queued", "Leases that had to wait in a queue.", "group")
        leases = _counter("tsliced_leases_granted", "Leases that were granted.", "group")
        rounds = _counter(
            "tsliced_rounds_granted",
            "Rounds that were granted: state had to move for them (switch), or not (fast).",
            "group",
            "path",
        )
        useful = _counter(
            "tsliced_group_useful_seconds", "Time that a group was held, switches apart.", "group"
        )
        switching = _counter(
            "tsliced_group_switch_seconds", "Time that switches took of a group.", "group"
        )
        held = _counter(
            "tsliced_group_held_seconds",
            "Time that jobs had a group: from the begin of a switch to the release.",
            "group",
        )
        for config in self._here():
            name, labels = config.name, [config.name]
            group = accounts.groups.get(name) or Held()
            queued.add_metric(labels, group.queued)
            leases.add_metric(labels, group.leases)
            rounds.add_metric([name, "switch"], group.switches)
            rounds.add_metric([name, "fast"], group.rounds - group.switches)
            useful.add_metric(labels, accounts.useful_s(name, now_unix))
            switching.add_metric(labels, group.switch_s)
            held.add_metric(labels, accounts.held_s(name, now_unix))
        yield from (queued, leases, rounds, useful, switching, held)
        refused = _counter(
            "tsliced_leases_not_granted", "Leases that waited and were not granted.", "cause"
        )
        for cause, count in sorted(accounts.not_granted.items()):
            refused.add_metric([cause], count)
        yield refused
        reclaims = _counter("tsliced_reclaims", "Leases that were taken back, not given.", "cause")
        for cause, count in sorted(accounts.reclaims.items()):
            reclaims.add_metric([cause], count)
        yield reclaims
        yield CounterMetricFamily(
            "tsliced_forced_pauses",
            "Leases that ended because they were held for too long, or without signs of life.",
            accounts.warnings["revoked"],
        )

    def _waits(self) -> Iterator[Metric]:
        groups = sorted(self.running.accounts.groups.items())
        yield _histogram(
            "tsliced_lease_wait_seconds",
            "From asking for a lease to having it.",
            [([name], group.waits) for name, group in groups],
            "group",
        )
        yield _histogram(
            "tsliced_hold_seconds",
            "How long a group was held for one round, switches apart.",
            [([name], group.holds) for name, group in groups],
            "group",
        )

    # --- moves --------------------------------------------------------------------------------

    def _moves(self) -> Iterator[Metric]:
        accounts = self.running.accounts
        yield _histogram(
            "tsliced_move_seconds",
            "Moves of jobs off their devices and onto them, and how they ended.",
            [([kind], move.seconds) for kind, move in sorted(accounts.moves.items())],
            "result",
        )
        steps = sorted(accounts.steps.items())
        yield _histogram(
            "tsliced_step_seconds",
            "Steps of moves: of a rank, or (quiesce, resume) of all of a job's on this host.",
            [([verb], step.seconds) for verb, step in steps],
            "step",
        )
        moved = _counter("tsliced_step_bytes", "Device state that was moved.", "step")
        rate = _gauge(
            "tsliced_latest_copy_bytes_per_second", "Rate of the latest copy of a rank.", "step"
        )
        failures = _counter("tsliced_step_failures", "Steps that failed.", "step", "cause")
        for verb, step in steps:
            if verb in MOVING:
                moved.add_metric([verb], step.bytes)
            if step.latest_bytes_per_s is not None:
                rate.add_metric([verb], step.latest_bytes_per_s)
            for cause, count in sorted(step.failures.items()):
                failures.add_metric([verb, cause], count)
        yield from (moved, rate, failures)
        failed = _counter("tsliced_move_failures", "Moves that failed.", "result", "cause")
        for kind, move in sorted(accounts.moves.items()):
            for cause, count in sorted(move.causes.items()):
                failed.add_metric([kind, cause], count)
        yield failed

    # --- devices and memory -------------------------------------------------------------------

    def _devices(self) -> Iterator[Metric]:
        accounts, now_unix = self.running.accounts, self.clock_unix()
        info = InfoMetricFamily(
            "tsliced_device", "Devices of this host.", labels=["device", "group"]
        )
        used = _gauge("tsliced_device_used_bytes", "Memory in use, by NVML.", "device")
        total = _gauge("tsliced_device_memory_bytes", "Memory in all.", "device")
        lost = _gauge("tsliced_device_lost", "1 while a device is lost.", "device")
        busy = _counter(
            "tsliced_device_kernel_seconds", "Time in which a kernel ran, by NVML.", "device"
        )
        seen = _counter(
            "tsliced_device_observed_seconds", "Time for which that is known.", "device"
        )
        held = _counter("tsliced_device_held_seconds", "Time that its group was held.", "device")
        useful = _counter("tsliced_device_useful_seconds", "The same, switches apart.", "device")
        sampled = self.sampler.totals if self.sampler is not None else {}
        by_uuid = {device.uuid: device for device in self.status.inventory}
        for group in self.machine.config.groups:
            held_s = accounts.held_s(group.name, now_unix)
            useful_s = accounts.useful_s(group.name, now_unix)
            for uuid in group.devices:
                device = by_uuid.get(uuid)
                labels = [str(device.index) if device is not None else uuid]
                about = {"uuid": uuid, "name": device.name if device is not None else "unknown"}
                info.add_metric([*labels, group.name], about)
                lost.add_metric(labels, uuid in self.machine.leasing.lost)
                held.add_metric(labels, held_s)
                useful.add_metric(labels, useful_s)
                if device is not None:
                    total.add_metric(labels, device.total_bytes)
                if (totals := sampled.get(uuid)) is not None:
                    used.add_metric(labels, totals.used_bytes)
                    busy.add_metric(labels, totals.busy_s)
                    seen.add_metric(labels, totals.seen_s)
        yield from (info, used, total, lost, busy, seen, held, useful)

    def _memory(self) -> Iterator[Metric]:
        running, parked = self.running, self.note_parked()
        available = self.memory.host_available_bytes()
        promised = self.status.reserved_bytes().get(HOST, 0)
        for name, text, value in (
            ("parked_bytes", "Device state that is in host memory.", parked),
            ("parked_peak_bytes", "The most since the start.", running.peak_parked_bytes),
            ("host_memory_available_bytes", "Host memory that is free to use.", available),
            ("host_memory_promised_bytes", "Promised to snapshots, and not used yet.", promised),
            (
                "snapshot_headroom_bytes",
                "Host memory that is promised to nobody; below 0 not all jobs can be parked.",
                available - promised,
            ),
        ):
            yield GaugeMetricFamily(f"tsliced_{name}", text, value)

    def _ranks(self) -> Iterator[Metric]:
        states: Counter[RankState] = Counter()
        for tenancy in self.machine.tenancies.all.values():
            states.update(rank.state for rank in tenancy.participant.ranks.values())
        ranks = _gauge("tsliced_ranks", "Processes of jobs with device state.", "state")
        for state in RankState:
            ranks.add_metric([state.value], states[state])
        yield ranks
        yield GaugeMetricFamily(
            "tsliced_stuck_operations",
            "Operations that do not come back.",
            len(self.machine.alarms.stuck),
        )
        yield GaugeMetricFamily(
            "tsliced_faulted_jobs",
            "Jobs whose state could not be brought back.",
            len(self.machine.leasing.faults),
        )

    def _peers(self) -> Iterator[Metric]:
        up = _gauge("tsliced_peer_up", "1 while the link to another host stands.", "peer")
        rtt = _gauge("tsliced_peer_round_trip_seconds", "Round trip to another host.", "peer")
        peers: list[Message] = self.status.peers()
        for peer in peers:
            up.add_metric([peer["host"]], peer["state"] == "connected")
            if peer["rtt_s"] is not None:
                rtt.add_metric([peer["host"]], peer["rtt_s"])
        yield from (up, rtt)

    # --- jobs ---------------------------------------------------------------------------------

    def _jobs(self) -> Iterator[Metric]:
        tenancies, now_unix = self.machine.tenancies, self.clock_unix()
        jobs = list(islice(self._known_jobs(), MOST_JOBS))
        used = _gauge("tsliced_job_device_bytes", "Device memory of a job on this host.", "job")
        parked = _gauge("tsliced_job_parked_bytes", "Its state in host memory.", "job")
        useful = _counter(
            "tsliced_job_useful_seconds", "Time that a job held groups, switches apart.", "job"
        )
        for job in jobs:
            ranks = tenancies.ranks_of_job(job)
            away = [rank for rank in ranks if rank.state is RankState.PARKED]
            labels = [str(job)]
            on = sum(rank.device_bytes for rank in ranks if rank.state is not RankState.PARKED)
            used.add_metric(labels, on)
            parked.add_metric(labels, sum(rank.parked_bytes for rank in away))
            useful.add_metric(labels, self.running.accounts.job_useful_s(str(job), now_unix))
        yield from (used, parked, useful)

    def _told_jobs(self) -> list[tuple[str, JobTold]]:
        latest = sorted(self.told.jobs.items(), key=lambda item: item[1].heard_at, reverse=True)
        return latest[:MOST_JOBS]

    def _figures(self) -> Iterator[Metric]:
        now, jobs = self.clock(), self._told_jobs()
        for name, text in _KNOWN.items():
            known = _gauge(f"tsliced_job_{name}", text, "job")
            for job, told in jobs:
                if (value := _number(told.figures.get(name))) is not None:
                    known.add_metric([job], value)
            yield known
        own = _gauge("tsliced_job_figure", "What else a job says of itself.", "job", "figure")
        for job, told in jobs:
            for name, figure in told.figures.items():
                if name not in _KNOWN and (value := _number(figure)) is not None:
                    own.add_metric([job, name], value)
        yield own
        for pace, text in (("steps", "Steps"), ("tokens", "Tokens")):
            rate = _gauge(
                f"tsliced_job_{pace}_per_hour", f"{text} of a job an hour, over the last.", "job"
            )
            for job, told in jobs:
                per_hour = (told.steps if pace == "steps" else told.tokens).per_hour(now)
                if per_hour is not None:
                    rate.add_metric([job], per_hour)
            yield rate

    def _backlogs(self) -> Iterator[Metric]:
        depth = _gauge("tsliced_job_queue_depth", "Items between two stages.", "job", "queue")
        target = _gauge("tsliced_job_queue_target", "How many there should be.", "job", "queue")
        for job, told in self._told_jobs():
            for name, backlog in told.queues.items():
                depth.add_metric([job, name], backlog.depth)
                if backlog.target is not None:
                    target.add_metric([job, name], backlog.target)
        yield from (depth, target)


# --- families -------------------------------------------------------------------------------------


def _process() -> Iterable[Metric]:
    return ProcessCollector(registry=None).collect()


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)


def _histogram(
    name: str, text: str, spreads: Iterable[tuple[list[str], Spread]], *labels: str
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, spread in spreads:
        below, buckets = 0, []
        for bound, count in zip((*spread.bounds, "+Inf"), spread.buckets, strict=True):
            below += count
            buckets.append((str(bound), below))
        family.add_metric(values, buckets, sum_value=spread.total)
    return family


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (bool, int, float)) else None


@dataclass(slots=True)
class _Only(Collector):
    """A registry of one family."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.family,)


def _rendered(family: Metric) -> Iterator[bytes]:
    """Yield a family's text; of a large one in several parts."""
    for start in range(0, max(1, len(family.samples)), CHUNK):
        part = Metric(family.name, family.documentation, family.type)
        part.samples = family.samples[start : start + CHUNK]
        text: bytes = generate_latest(_Only(part))
        # The lines of HELP and TYPE are the first ones, and come once.
        yield text if not start else text.split(b"\n", 2)[2]
