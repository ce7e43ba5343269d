"""What stays free for Ray's memory monitor."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_trees import FakeHost

from tsliced.core.model import ProcessId
from tsliced.host.cgroups import Cgroups
from tsliced.host.memory import HOST, Demand, DramLedger, Granted, HostMemory, Shortage
from tsliced.host.ray import RayMargin

MIB = 1 << 20
TOTAL_BYTES = 999999 * 1024


def margin_of(host: FakeHost, *, when: str = "auto", ratio: float = 0.1) -> RayMargin:
    memory = HostMemory(Cgroups(host.proc))
    return RayMargin(memory, when=when, ratio=ratio, proc=host.proc)


def add_process(host: FakeHost, pid: int, name: str, *, cgroup: str = "/") -> None:
    host.process(pid, name=name, cgroups=f"4:memory:{cgroup}\n")
    host.write(f"proc/{pid}/comm", f"{name}\n")


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.set_available(500 * MIB)
    point = host.mount("memory")
    host.cgroup(point / "pod", memory_limit_in_bytes=200 * MIB, memory_usage_in_bytes=0)
    add_process(host, 11, "python", cgroup="/pod")
    return host


def test_without_a_raylet_nothing_more_stays_free_unless_it_always_does(host: FakeHost) -> None:
    expected: dict[str, dict[str, int]] = {
        "auto": {},
        "never": {},
        "always": {HOST: TOTAL_BYTES // 10},
    }
    for when, places in expected.items():
        margin = margin_of(host, when=when)
        assert margin.in_bytes() == {}, "before the first look"
        margin.look()
        assert margin.in_bytes() == places


def test_where_a_raylet_runs_a_share_of_the_host_and_of_its_container_stays_free(
    host: FakeHost,
) -> None:
    add_process(host, 12, "raylet", cgroup="/pod")
    pod = f"{host.root}/cgroup/memory/pod"
    margin = margin_of(host)
    margin.look()
    assert margin.in_bytes() == {HOST: TOTAL_BYTES // 10, pod: 20 * MIB}
    ledger = DramLedger(HostMemory(Cgroups(host.proc)), ray_bytes=margin.in_bytes)
    job = ProcessId(11, 1100)
    assert isinstance(ledger.reserve("a", [Demand(job, 180 * MIB)]), Granted)
    short = ledger.reserve("a", [Demand(job, 180 * MIB + 1)])
    assert isinstance(short, Shortage)
    assert (short.where, short.have_bytes) == (pod, 180 * MIB)
    assert "20,971,520 more stay free: with less, Ray kills workers" in str(short)
    never = margin_of(host, when="never")
    never.look()
    assert never.in_bytes() == {}
    host.process(12, name="raylet", state="Z", cgroups="4:memory:/pod\n")
    margin.look()
    assert margin.in_bytes() == {}


def test_the_larger_of_the_two_margins_of_the_host_counts(host: FakeHost) -> None:
    memory = HostMemory(Cgroups(host.proc))
    elsewhere = ProcessId(99, 1)
    for margin_bytes, have in ((10 * MIB, 400 * MIB), (200 * MIB, 300 * MIB)):
        ledger = DramLedger(memory, margin_bytes=margin_bytes, ray_bytes=lambda: {HOST: 100 * MIB})
        short = ledger.reserve("a", [Demand(elsewhere, 450 * MIB)])
        assert isinstance(short, Shortage)
        assert short.have_bytes == have
