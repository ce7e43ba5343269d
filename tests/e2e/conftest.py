"""Fixtures of the end-to-end tests: softcuda built, and hosts on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "endpoints"))

from harness import Host, MakeHost, Settings, build_softcuda, with_qualifying


@pytest.fixture(scope="session")
def softcuda_build() -> Path:
    """The directory of softcuda's libraries."""
    return build_softcuda()


@pytest.fixture
def make_host(softcuda_build: Path, request: pytest.FixtureRequest) -> Iterator[MakeHost]:
    """Makes hosts with two devices of 64 MiB, a group each, and a daemon that serves.

    On those of a module with `QUALIFIES` jobs come back once before they first make room.
    """
    hosts: list[Host] = []
    qualifies: bool = getattr(request.module, "QUALIFIES", False)

    def make(
        *, settings: Settings | None = None, launcher: Sequence[str] = (), **environment: str
    ) -> Host:
        if qualifies:
            settings = with_qualifying(settings)
        host = Host(softcuda_build, settings=settings, launcher=launcher, **environment)
        hosts.append(host)
        host.start_daemon()
        return host

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def host(make_host: MakeHost) -> Host:
    return make_host()
