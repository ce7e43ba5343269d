"""Mirrors bench/backends.py and what it measures: moves of each backend, beside plain copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.backend_rank import memory_copies
from bench.backend_scenes import Scenes, devices_of, torch_mib
from bench.backends import main
from bench.daemon import SOFTCUDA

MIB = 1 << 20

needs_softcuda = pytest.mark.skipif(
    not SOFTCUDA.is_dir(), reason="softcuda is not built: make softcuda"
)


@needs_softcuda
def test_each_backend_is_measured_and_the_figures_that_count_are_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    sizes = ["--torch-mib=64", "--many=100", "--driver-mib=32", "--cycles=2"]
    assert main(["--hardware=softcuda", f"--json={file}", *sizes]) == 0
    figures = json.loads(file.read_text())
    ways = [f"{name}_{way}" for name in ("torch", "softcuda", "cli") for way in ("out", "in")]
    for way in ways:
        assert figures[f"{way}_ratio"] > 0
        assert figures["raw"][f"{way}_gb_per_s_yardstick"] > 0
    for name in ("endpoint_out_ms", "endpoint_in_ms", "command_out_ms", "command_in_ms"):
        assert figures[name] > 0
    assert set(figures["goals"]) >= {"torch_out_ratio", "torch_in_ratio", "torch_many_ratio"}
    assert "torch, 64 MiB in 10 tensors" in capsys.readouterr().out


@needs_softcuda
def test_what_is_measured_are_the_bytes_that_the_rank_has(tmp_path: Path) -> None:
    with devices_of("softcuda", 16) as devices:
        scenes = Scenes(directory=tmp_path, devices=devices, cycles=2, driver_mib=16)
        for cycle in scenes.driver():
            assert cycle.out.bytes == cycle.back.bytes >= 16 * MIB
            assert cycle.copy is not None
            assert cycle.out_ratio == cycle.out.gb_per_s / cycle.copy.out
        assert all(cycle.copy is None for cycle in scenes.command())


def test_a_copy_is_of_all_bytes_also_where_they_fill_no_buffer() -> None:
    assert min(memory_copies(3 * MIB + 1)()) > 0


def test_no_more_is_moved_than_a_machine_has_room_for() -> None:
    assert torch_mib(1) == 1
    assert torch_mib(1 << 40) < 1 << 30
