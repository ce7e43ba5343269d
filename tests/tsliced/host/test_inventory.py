"""The devices that a host had before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tsliced.core.model import DeviceId
from tsliced.host.devices import Device, Devices
from tsliced.host.inventory import FILE_NAME, recall, remember


def device(index: int, uuid: str = "") -> Device:
    return Device(
        uuid=DeviceId(uuid or f"GPU-{index}"),
        index=index,
        name="Model",
        total_bytes=100,
        driver_version="580.95.05",
        persistence=True,
    )


def test_what_was_written_down_is_known_again(tmp_path: Path) -> None:
    assert recall(tmp_path) == ()
    remember(tmp_path, [device(0), device(1)])
    assert recall(tmp_path) == (device(0), device(1))
    remember(tmp_path, [device(1)])
    assert recall(tmp_path) == (device(1),)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("content", ["", "[", "{}", "[1]", '[{"uuid": "GPU-0"}]', "7"])
def test_what_makes_no_sense_is_no_device(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    assert recall(tmp_path) == ()


def test_what_a_later_version_knows_is_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps([{**asdict(device(0)), "later": 1}]))
    assert recall(tmp_path) == (device(0),)


def test_that_it_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    remember(tmp_path / "missing", [device(0)])


def test_only_what_nobody_is_there_for_now_is_lost() -> None:
    devices = Devices()
    devices.add_lost([device(1), device(0)])
    devices.add_lost([device(1, "GPU-other"), device(5, "GPU-0"), device(2)])
    assert devices.inventory() == (device(0), device(1), device(2))
