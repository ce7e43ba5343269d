"""A fake daemon for each test, and an environment that says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_daemon import FakeDaemon

from libtimeslice import leaving


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TSLICE_SOCKET", "TSLICE_JOB_ID", "TSLICE_MODE", "TSLICE_GROUPS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have loaded a driver, and who uses devices waits for last turns."""
    monkeypatch.setattr(leaving, "accelerator", SimpleNamespace(in_use=lambda: False))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "s.sock") as running:
        yield running
