"""A fake daemon for each test, and an environment that says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TSLICE_SOCKET", "TSLICE_JOB_ID", "TSLICE_MODE", "TSLICE_GROUPS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "s.sock") as running:
        yield running
