"""Mirrors bench/hosts.py and what it measures: switches over hosts, simulated and real."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from bench.daemon import SOFTCUDA, Place, make_devices
from bench.hosts import main
from bench.hosts_daemons import measure_linked
from bench.hosts_polling import overhead_s
from bench.hosts_simulated import simulate
from bench.machine import choose_cores

needs_softcuda = pytest.mark.skipif(
    not SOFTCUDA.is_dir(), reason="softcuda is not built: make softcuda"
)


@pytest.fixture
def place() -> Iterator[Place]:
    # The kernel limits paths of sockets.
    directory = Path(tempfile.mkdtemp(prefix="tsliced-bench-"))
    place = Place(directory=directory, state=directory / "state", cores=choose_cores())
    place.state.mkdir()
    make_devices(place)
    yield place
    shutil.rmtree(directory)


@pytest.mark.parametrize("hosts", [2, 3, 33])
def test_a_switch_is_four_round_trips_whatever_the_number_of_hosts(hosts: int) -> None:
    for cost in simulate(hosts, switches=3):
        assert cost.round_trips == 4
        each = 4 * (hosts - 1)
        assert cost.said == {"order": each, "report": each}, "and nothing else is said"


def test_one_host_alone_has_nobody_to_talk_to() -> None:
    (cost,) = simulate(1, switches=1)
    assert (cost.round_trips, cost.said.total()) == (0, 0)
    assert cost.overhead_s > 0


def test_a_participant_costs_the_coordinator_no_more_when_there_are_many() -> None:
    few, many = (
        median(cost.coordinator_s / hosts for cost in simulate(hosts, switches=5))
        for hosts in (16, 512)
    )
    assert many < 2 * few


def test_the_collector_is_as_it_was_afterwards() -> None:
    before = gc.get_threshold()
    simulate(2, switches=1)
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_the_other_design_notices_each_operation_of_each_node_at_the_next_tick() -> None:
    assert overhead_s(1) == 2.5
    assert overhead_s(8) == 16.5
    # Noticed after 3 s and 5 s, and after that by whoever waits.
    assert overhead_s(1, snapshot_s=2.5, restore_s=4.5) == 1.5
    assert overhead_s(3, snapshot_s=2.5, restore_s=4.5) == pytest.approx(17.5)


@needs_softcuda
def test_daemons_pass_a_group_over_all_of_them_to_and_fro(place: Place) -> None:
    linked = measure_linked(place, hosts=3, switches=5)
    assert len(linked.switch_ns) == 5
    assert len(linked.cpu_s) == 3
    assert min(linked.cpu_s) > 0, "each of them takes part"
    assert linked.syncs <= len(linked.sync_ns)
    # The other design has not asked for the first time by then.
    assert max(linked.switch_ns) < overhead_s(1) * 1e9


@needs_softcuda
def test_the_report_has_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench-hosts.json"
    arguments = ["--simulated", "1,3", "--switches", "2", "--daemons", "2"]
    cores = os.sched_getaffinity(0)
    try:
        assert main([*arguments, "--daemon-switches", "3", "--json", str(path)]) == 0
    finally:
        os.sched_setaffinity(0, cores)
    report = json.loads(path.read_text())
    assert report.keys() >= {"us_per_participant", "fsync_ms_p50", "machine", "raw"}
    assert report["round_trips"] == 4
    assert report["overhead_ms_p50"].keys() == {"1", "3"}
    assert report["overhead_ms_p50"]["3"] == report["overhead_3_hosts_ms_p50"]
    assert report["real_2_hosts_overhead_ms_p50"] > 0
    assert report["raw"]["messages_besides"] == 0
    assert report["goals"].keys() == {
        "overhead_3_hosts_ms_p50",
        "round_trips",
        "us_per_participant",
        "real_2_hosts_overhead_ms_p50",
    }
    printed = capsys.readouterr().out
    assert "2 daemons, release to grant p50" in printed
    assert "3 hosts, beyond operations p50" in printed
