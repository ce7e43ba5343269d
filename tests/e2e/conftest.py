"""Fixtures of the end-to-end tests: softcuda built, and hosts on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "endpoints"))

from harness import Host, MakeHost, Settings, build_softcuda


@pytest.fixture(scope="session")
def softcuda_build() -> Path:
    """The directory of softcuda's libraries."""
    return build_softcuda()


@pytest.fixture
def make_host(softcuda_build: Path) -> Iterator[MakeHost]:
    """Makes hosts with two devices of 64 MiB, a group each, and a daemon that serves."""
    hosts: list[Host] = []

    def make(
        *, settings: Settings | None = None, launcher: Sequence[str] = (), **environment: str
    ) -> Host:
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
