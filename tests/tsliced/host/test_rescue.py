"""Bringing back what a daemon left: who comes first, what is not touched, what is written down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from in_process import D1, D2, G1, HOST, MIB, TOTAL_BYTES, FakeBackend, FakeDevices, job, process_of
from journal_records import lease, session

from tsliced.core.actions import RankRecord, Record, TenancyRecord
from tsliced.core.coordinator import NO_STAMP
from tsliced.core.model import (
    Cause,
    DeviceId,
    Goal,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    TenancyKey,
    Verb,
)
from tsliced.host.backends.base import Outcome, failed
from tsliced.host.devices import DevicesError
from tsliced.host.memory import DeviceLedger
from tsliced.host.rescue import Case, Rescue, case_of, cases_in

RUNNING, FROZEN, PARKED = RankState.RUNNING, RankState.FROZEN, RankState.PARKED
A, B = job("a"), job("b")


def rank(process: ProcessId, owner: JobKey, *, mib: int = 8, device: DeviceId = D1) -> RankRecord:
    return RankRecord(
        rank=RankId(HOST, process),
        tenancy=TenancyKey(owner, (G1,)),
        devices=frozenset({device}),
        device_bytes=mib * MIB,
        state=PARKED,
        verb=Verb.SNAPSHOT,
    )


def tenancy(owner: JobKey) -> TenancyRecord:
    return TenancyRecord(tenancy=TenancyKey(owner, (G1,)), stamp=NO_STAMP, goal=Goal.OFF)


class SilentBackend(FakeBackend):
    """A backend that has no answer about one process."""

    silent: ProcessId | None = None

    async def state(self, rank: RankId) -> Outcome:
        if rank.process == self.silent:
            await asyncio.sleep(60)
        return await super().state(rank)


@dataclass
class Ward:
    """Processes that were left, and what is written down of them."""

    backend: SilentBackend
    devices: FakeDevices
    processes: list[ProcessId]
    kept: list[Record] = field(default_factory=list)

    def left(self, *states: RankState, mib: int = 8) -> None:
        """Leave the processes in these states."""
        for process, state in zip(self.processes, states, strict=True):
            self.backend.states[process] = state
            if state is PARKED:
                self.backend.parked[process] = {D1: mib * MIB}
            else:
                self.devices.put(process, mib * MIB)

    def rescue(self, records: Sequence[Record], cases: Sequence[Case], **more: float) -> None:
        """Examine and treat all."""

        async def run() -> None:
            rescuer = Rescue(
                records=records,
                backend=self.backend,
                eye=self.devices,
                ledger=DeviceLedger(),
                query_limit_s=more.get("query_limit_s", 10.0),
                keep=self.kept.extend,
            )
            for case in cases:
                await rescuer.examine(case)
            for case in cases:
                await rescuer.treat(case)

        asyncio.run(run())

    def rescued(self, *records: Record) -> list[tuple[RankState | None, str | None]]:
        """Rescue all that these records tell of; return where each process is, and why."""
        cases = cases_in(records)
        self.rescue(records, cases)
        return [(patient.now, patient.reason) for case in cases for patient in case.patients]


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    with ExitStack() as stack:
        devices = FakeDevices()
        processes = [stack.enter_context(process_of(name)) for name in ("a", "b")]
        yield Ward(SilentBackend(devices, tmp_path), devices, processes)


def test_ranks_of_a_job_are_all_restored_before_any_is_thawed_and_it_is_written_down(
    ward: Ward,
) -> None:
    ward.left(PARKED, PARKED)
    one, two = ward.processes
    ranks = [rank(one, A), rank(two, A)]
    assert ward.rescued(tenancy(A), *ranks) == [(RUNNING, None), (RUNNING, None)]
    calls = [call.split()[0] for call in ward.backend.calls]
    assert calls == ["restore", "restore", "thaw", "thaw"]
    assert ward.kept == [
        *(replace(each, state=RUNNING, verb=None) for each in ranks),
        replace(tenancy(A), goal=Goal.ON),
    ]


def test_who_is_frozen_is_only_thawed_and_who_runs_is_left_alone(ward: Ward) -> None:
    ward.left(FROZEN, RUNNING)
    one, two = ward.processes
    assert ward.rescued(rank(one, A), rank(two, B)) == [(RUNNING, None), (RUNNING, None)]
    assert ward.backend.calls == [f"thaw {one.pid}"]


def test_a_job_that_does_not_fit_is_left_as_it_is(ward: Ward) -> None:
    ward.left(PARKED, PARKED, mib=40)
    one, two = ward.processes
    (first, why), (second, reason) = ward.rescued(rank(one, A, mib=40), rank(two, B, mib=40))
    assert (first, why) == (RUNNING, None)
    assert second is PARKED
    assert reason is not None
    assert "device memory: " in reason
    assert "(40 MiB) needed" in reason
    assert "(24 MiB) available" in reason
    assert f"restore {two.pid}" not in ward.backend.calls


def test_without_a_look_at_the_devices_nothing_is_restored(ward: Ward) -> None:
    ward.left(PARKED, FROZEN)
    one, two = ward.processes
    ward.devices.error = DevicesError("NVML is gone")
    (parked, reason), frozen = ward.rescued(rank(one, A), rank(two, B))
    assert (parked, reason) == (PARKED, "the devices cannot be looked at: NVML is gone")
    assert frozen == (RUNNING, None), "to thaw takes no memory"


def test_a_job_with_a_rank_that_is_broken_for_good_is_not_touched(ward: Ward) -> None:
    ward.left(PARKED, RankState.FAILED)
    one, two = ward.processes
    (parked, reason), _ = ward.rescued(rank(one, A), rank(two, A))
    assert parked is PARKED
    assert reason is not None
    assert f"process {two.pid} is broken for good" in reason
    assert ward.backend.calls == []
    assert ward.kept == []


def test_a_restore_that_fails_stops_the_rescue_of_its_job_alone(ward: Ward) -> None:
    ward.left(PARKED, PARKED)
    one, two = ward.processes
    ward.backend.instead["restore"] = failed(RankId(HOST, one), Cause.DRIVER, "no luck", PARKED)
    (first, why), (second, reason) = ward.rescued(rank(one, A), rank(two, A))
    assert first is PARKED
    assert why is not None
    assert "no luck" in why
    assert second is PARKED
    assert reason == f"rank {one.pid} of this job could not be restored"


def test_who_cannot_be_asked_in_time_is_left_with_its_job(ward: Ward) -> None:
    ward.left(PARKED, PARKED)
    one, two = ward.processes
    records = [rank(one, A), rank(two, B)]
    ward.backend.silent = one
    cases = cases_in(records)
    ward.rescue(records, cases, query_limit_s=0.1)
    (first,), (second,) = (case.patients for case in cases)
    assert first.was is None
    assert "no answer within 0.1 s" in str(first.reason)
    assert second.now is RUNNING


def test_holders_come_first_then_those_who_wait_then_the_rest(ward: Ward) -> None:
    one, two = ward.processes
    holder, waiter = JobKey("slurm", 1000, "4711"), job("waits")
    waits = replace(lease(2), tokens=(), session="s-2")  # type: ignore[arg-type]  # a new name
    records: list[Record] = [
        session("s-1"),
        replace(session("s-2"), job=waiter),
        rank(one, job("idle")),
        rank(two, waiter),
        rank(ProcessId(os.getpid(), 0), B),
        replace(rank(one, holder), rank=RankId(HOST, one)),
        waits,
        lease(1),
    ]
    assert [case.job for case in cases_in(records)] == [holder, waiter, job("idle")]


def test_of_a_process_named_by_its_pid_all_its_memory_is_what_it_may_need(ward: Ward) -> None:
    one, two = ward.processes
    case = case_of([one.pid, two.pid], HOST, [D1, D2])
    assert [patient.rank.process for patient in case.patients] == [one, two]
    with open(f"/proc/{one.pid}/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon:")]
    most = int(line.split()[1]) * 1024
    assert case.patients[0].needs == ((D1, most), (D2, most))
    ward.left(PARKED, FROZEN)
    ward.devices.put(two, TOTAL_BYTES)
    ward.rescue([], [case])
    assert "device memory" in str(case.patients[0].reason)
    with pytest.raises(LookupError, match="4194304"):
        case_of([4194304], HOST, [])
