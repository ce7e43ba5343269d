"""What a request costs: one client against the echo, many clients, and against other ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing

from bench.comparing import CrowdSide, PairSide, ratio_of, take_turns
from bench.daemon import GROUP, JOB, Place, Tables, group_names, resident, start_daemon
from bench.echo import Answers, answers_of, start_echo
from bench.load import LIMIT_S, Crowd, PairTimes, acquire_of, measure_pairs
from bench.report import Goal, Row, Section, percentile
from bench.yardsticks import GrpcCaller, LockFile, start_grpc
from libtimeslice import client as library
from libtimeslice.connection import Connection
from libtimeslice.protocol import encode

ACQUIRE_ROUNDS = 24
ACQUIRE_PAIRS = 400
RECORDING_ROUNDS = 80
CROWD_ROUNDS = 10
CROWD_PAIRS = 250
YARDSTICK_ROUNDS = 12
YARDSTICK_PAIRS = 100


def measure_acquire(place: Place) -> Section:
    """Measures acquires and releases of a group whose rank is resident, by one client."""
    with (
        start_daemon(place) as daemon,
        resident(place, daemon) as ours,
        start_echo(place.directory, answers_of(ours), core=place.cores.server) as echo,
        Connection.open(str(echo.path)) as theirs,
    ):
        sides = [
            PairSide(run=lambda: measure_pairs(ours, GROUP, ACQUIRE_PAIRS), server=daemon),
            PairSide(run=lambda: measure_pairs(theirs, GROUP, ACQUIRE_PAIRS), server=echo),
        ]
        take_turns(sides, ACQUIRE_ROUNDS)
    daemon_side, echo_side = sides
    return Section(
        title="acquire and release of a resident group, one client",
        yardstick="echo",
        rows=[
            *_request_rows(daemon_side.times, echo_side.times),
            Row(
                key="pair_us_p50",
                label="pair p50",
                unit="us",
                ours=percentile(daemon_side.times.pair_ns, 50) / 1e3,
                theirs=percentile(echo_side.times.pair_ns, 50) / 1e3,
                ratio=ratio_of(daemon_side.round_ns, echo_side.round_ns),
                headline="acquire_ratio_p50",
                counts="ratio",
                goal=Goal(limit=1.5),
            ),
            Row(
                key="server_cpu_us_per_request",
                label="server CPU per request",
                unit="us",
                ours=daemon_side.cpu_us_per_request,
                theirs=echo_side.cpu_us_per_request,
                ratio=daemon_side.cpu_us_per_request / echo_side.cpu_us_per_request,
                headline="cpu_us_per_request",
                goal=Goal(limit=40),
            ),
        ],
    )


def measure_recording(place: Place) -> Section:
    """Measures what the event history adds to a pair that nobody waits for."""
    unrecorded: Tables = {"history": {"record": False}}
    with (
        start_daemon(place) as recording,
        start_daemon(place, name="unrecorded", settings=unrecorded) as silent,
        resident(place, recording) as ours,
        resident(place, silent, ordinal=1) as theirs,
    ):
        groups = group_names()
        sides = [
            PairSide(run=lambda: measure_pairs(ours, groups[0], ACQUIRE_PAIRS), server=recording),
            PairSide(run=lambda: measure_pairs(theirs, groups[1], ACQUIRE_PAIRS), server=silent),
        ]
        take_turns(sides, RECORDING_ROUNDS)
    with_it, without = sides
    return Section(
        title="event history of acquire and release, one client",
        yardstick="not recorded",
        rows=[
            Row(
                key="recorded_pair_cpu_us",
                label="server CPU per pair",
                unit="us",
                ours=2 * with_it.cpu_us_per_request,
                theirs=2 * without.cpu_us_per_request,
                ratio=with_it.cpu_us_per_request / without.cpu_us_per_request,
            ),
            Row(
                key="recording_cpu_us_per_pair",
                label="recording, CPU per pair",
                unit="us",
                # Of all rounds together: what is written once a second falls into few of them.
                ours=2 * (with_it.cpu_us_per_request - without.cpu_us_per_request),
                headline="recording_us_per_pair",
                goal=Goal(limit=5),
            ),
        ],
    )


def measure_crowd(place: Place) -> Section:
    """Measures the requests per second of a client on each of the groups."""
    groups = group_names()
    with start_daemon(place) as daemon:
        with Connection.open(str(daemon.path), role="client", job=JOB) as connection:
            answers = answers_of(connection)
        with (
            start_echo(place.directory, answers, core=place.cores.server) as echo,
            closing(Crowd(daemon.path, groups)) as ours,
            closing(Crowd(echo.path, groups)) as theirs,
        ):
            sides = [
                CrowdSide(crowd=ours, pairs=CROWD_PAIRS, server=daemon),
                CrowdSide(crowd=theirs, pairs=CROWD_PAIRS, server=echo),
            ]
            take_turns(sides, CROWD_ROUNDS)
    daemon_side, echo_side = sides
    return Section(
        title=f"{len(groups)} clients on {len(groups)} groups",
        yardstick="echo",
        rows=[
            Row(
                key="requests_per_s",
                label="requests per second",
                ours=statistics.median(daemon_side.rates),
                theirs=statistics.median(echo_side.rates),
                ratio=ratio_of(daemon_side.rates, echo_side.rates),
                headline="requests_ratio",
                counts="ratio",
                goal=Goal(limit=0.35, at_least=True),
            ),
            Row(
                key="crowd_server_cpu_us_per_request",
                label="server CPU per request",
                unit="us",
                ours=daemon_side.cpu_us_per_request,
                theirs=echo_side.cpu_us_per_request,
                ratio=daemon_side.cpu_us_per_request / echo_side.cpu_us_per_request,
            ),
            Row(
                key="crowd_server_busy_pct",
                label="server busy",
                unit="%",
                ours=daemon_side.busy_pct,
                theirs=echo_side.busy_pct,
            ),
        ],
    )


def measure_yardsticks(place: Place) -> Section:
    """Measures a lease by the public client against a lock file and two calls of gRPC."""
    with start_daemon(place) as daemon, resident(place, daemon) as connection:
        answers = answers_of(connection)
        with (
            start_grpc(place.directory, _answer_bytes(answers), core=place.cores.server) as server,
            closing(GrpcCaller(server.path, _request_bytes(answers))) as grpc,
            closing(library.connect(str(daemon.path), JOB, synchronize=False)) as client,
        ):
            lock = LockFile(place.directory / "lock")
            sides = [
                PairSide(run=lambda: _measure_leases(client, YARDSTICK_PAIRS)),
                PairSide(run=lambda: lock.measure_pairs(YARDSTICK_PAIRS)),
                PairSide(run=lambda: grpc.measure_pairs(YARDSTICK_PAIRS)),
            ]
            take_turns(sides, YARDSTICK_ROUNDS)
    ours, *theirs = sides
    return Section(
        title="lease() of the client library, a pair, p50",
        yardstick="the other",
        rows=[
            Row(
                key=f"{name}_pair_us_p50",
                label=label,
                unit="us",
                ours=percentile(ours.times.pair_ns, 50) / 1e3,
                theirs=percentile(side.times.pair_ns, 50) / 1e3,
                ratio=ratio_of(ours.round_ns, side.round_ns),
                headline=f"{name}_ratio_p50",
                counts="ratio",
            )
            for name, label, side in zip(
                ("filelock", "grpc"),
                ("against filelock", "against two unary calls of grpcio"),
                theirs,
                strict=True,
            )
        ],
    )


def _answer_bytes(answers: Answers) -> tuple[int, int]:
    acquire, release = (
        len(encode({"re": 1000, **answers[name]})) for name in ("acquire", "release")
    )
    return acquire, release


def _request_bytes(answers: Answers) -> tuple[int, int]:
    lease = answers["acquire"]["lease"]
    acquire, release = (
        len(encode({"id": 1000, **message}))
        for message in (acquire_of(GROUP), {"t": "release", "lease": lease})
    )
    return acquire, release


def _request_rows(ours: PairTimes, theirs: PairTimes) -> Iterator[Row]:
    for name, our_ns, their_ns in (
        ("acquire", ours.acquire_ns, theirs.acquire_ns),
        ("release", ours.release_ns, theirs.release_ns),
    ):
        for percent in (50, 99):
            our_us, their_us = (percentile(each, percent) / 1e3 for each in (our_ns, their_ns))
            yield Row(
                key=f"{name}_us_p{percent}",
                label=f"{name} p{percent}",
                unit="us",
                ours=our_us,
                theirs=their_us,
                ratio=our_us / their_us,
            )


def _measure_leases(client: library.TimeSlice, count: int) -> PairTimes:
    times = PairTimes()
    clock = time.perf_counter_ns
    for _ in range(count):
        started_ns = clock()
        with client.lease(GROUP, timeout=LIMIT_S):
            granted_ns = clock()
        released_ns = clock()
        times.acquire_ns.append(granted_ns - started_ns)
        times.release_ns.append(released_ns - granted_ns)
    return times
