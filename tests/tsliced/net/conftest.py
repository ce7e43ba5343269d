from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
import uvloop
from in_process import LIMIT_S
from peer_lab import SETTINGS

from tsliced.ctl.__main__ import main as tslicectl
from tsliced.net.peer_auth import Credentials, load_credentials


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Awaitable[None]], None]]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:

        async def limited(work: Awaitable[None]) -> None:
            async with asyncio.timeout(LIMIT_S):
                await work

        yield lambda work: runner.run(limited(work))


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Credentials]:
    """Returns what a host of one cluster proves itself with."""
    directory = tmp_path_factory.mktemp("cluster")
    arguments = ["--hosts", "n1,n2,n3", "--dir", str(directory / "keys")]
    assert tslicectl(["cluster", "init", *arguments]) == 0

    def credentials_of(host: str) -> Credentials:
        place = directory / "keys" / host / "peers"
        settings = replace(
            SETTINGS,
            auth="tls",
            ca_file=str(place / "ca.crt"),
            cert_file=str(place / "host.crt"),
            key_file=str(place / "host.key"),
        )
        return load_credentials(settings, host)

    return credentials_of
