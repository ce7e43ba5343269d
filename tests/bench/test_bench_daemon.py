"""Mirrors bench/daemon.py and bench/instant.py: the daemon that is measured is the usual one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.daemon import DEVICES, config_text, group_names
from bench.instant import InstantBackend
from bench.switching import BACKEND
from tsliced.config import load
from tsliced.core.model import HostName, ProcessId, RankId, RankState, Verb
from tsliced.host.backends.base import BackendContext, load_backend


def test_the_configuration_says_where_things_are_and_leaves_the_rest_at_its_defaults(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tsliced.toml"
    path.write_text(config_text(tmp_path / "sock", tmp_path / "state", BACKEND))
    config = load(str(path))
    assert config.warnings == ()
    assert config.daemon.backend == (BACKEND,)
    assert sorted(group.name for group in config.groups) == sorted(group_names())
    assert len({group.devices for group in config.groups}) == DEVICES
    assert {key.split(".")[0] for key in config.origins} == {"daemon", "groups"}


def test_the_instant_backend_says_at_once_that_everything_is_done(tmp_path: Path) -> None:
    backend = load_backend(BACKEND, BackendContext(directory=tmp_path))
    assert isinstance(backend, InstantBackend)
    rank = RankId(HostName("n1"), ProcessId(7, 1))

    async def move() -> list[RankState]:
        verbs = (Verb.QUERY, Verb.FREEZE, Verb.SNAPSHOT, Verb.QUERY, Verb.RESTORE, Verb.THAW)
        return [(await backend.run(verb, rank, 1.0)).observed for verb in verbs]

    assert asyncio.run(move()) == [
        RankState.RUNNING,
        RankState.FROZEN,
        RankState.PARKED,
        RankState.PARKED,
        RankState.FROZEN,
        RankState.RUNNING,
    ]
