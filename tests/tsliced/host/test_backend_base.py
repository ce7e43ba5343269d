"""What all backends have in common: how they are loaded, and what they are asked."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tsliced.config.backends import ENTRY_POINTS
from tsliced.core.model import Cause, HostName, ProcessId, RankId, RankState, Verb
from tsliced.host.backends import base
from tsliced.host.backends.base import (
    Backend,
    BackendContext,
    BackendError,
    Outcome,
    failed,
    load_backend,
)
from tsliced.host.backends.cuda import CudaBackend

RANK = RankId(HostName("n1"), ProcessId(12, 34))


class ListingBackend(Backend):
    """Answers each operation with its name."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.asked: list[tuple[object, ...]] = []

    async def probe(self, process: ProcessId) -> bool:
        return False

    async def freeze(self, rank: RankId, *, timeout_s: float) -> Outcome:
        return self._note("freeze", rank, timeout_s)

    async def snapshot(self, rank: RankId) -> Outcome:
        return self._note("snapshot", rank)

    async def restore(self, rank: RankId) -> Outcome:
        return self._note("restore", rank)

    async def thaw(self, rank: RankId) -> Outcome:
        return self._note("thaw", rank)

    async def state(self, rank: RankId) -> Outcome:
        return self._note("state", rank)

    def _note(self, *asked: object) -> Outcome:
        self.asked.append(asked)
        return Outcome(observed=RankState.RUNNING)


NOT_A_BACKEND = 7


@pytest.fixture
def context(tmp_path: Path) -> BackendContext:
    return BackendContext(directory=tmp_path)


def test_a_verb_runs_the_operation_of_its_name(context: BackendContext) -> None:
    backend = ListingBackend(context)

    async def run() -> None:
        await backend.run(Verb.FREEZE, RANK, 2.5)
        for verb in (Verb.SNAPSHOT, Verb.RESTORE, Verb.THAW, Verb.QUERY):
            await backend.run(verb, RANK, None)
        with pytest.raises(AssertionError, match="has a limit"):
            await backend.run(Verb.FREEZE, RANK, None)
        # What most have no use for does nothing.
        await backend.start()
        backend.prepare(RANK.process)
        backend.forget(RANK.process)
        await backend.close()

    asyncio.run(run())
    assert backend.asked == [
        ("freeze", RANK, 2.5),
        ("snapshot", RANK),
        ("restore", RANK),
        ("thaw", RANK),
        ("state", RANK),
    ]


def test_what_went_wrong_names_its_rank() -> None:
    outcome = failed(RANK, Cause.DRIVER, "no answer", RankState.UNKNOWN)
    assert outcome.observed is RankState.UNKNOWN
    assert str(outcome.failure) == "no answer (pid 12 on n1)"


def test_a_backend_is_found_by_its_entry_point(
    context: BackendContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [EntryPoint("cuda", "tsliced.host.backends.cuda:CudaBackend", ENTRY_POINTS)]
    monkeypatch.setattr(base, "entry_points", lambda group: entries)
    assert isinstance(load_backend("cuda", context), CudaBackend)
    with pytest.raises(BackendError, match="there is no backend 'rocm'; known: cuda"):
        load_backend("rocm", context)
    entries.clear()
    with pytest.raises(BackendError, match="is the package installed"):
        load_backend("cuda", context)


def test_the_package_has_its_entry_point(context: BackendContext) -> None:
    assert isinstance(load_backend("cuda", context), CudaBackend)


def test_a_backend_is_found_as_module_and_class(context: BackendContext) -> None:
    backend = load_backend(f"{__name__}:ListingBackend", context)
    assert isinstance(backend, ListingBackend)
    assert backend.context is context


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no.such.module:Backend", "cannot be loaded: No module named"),
        (f"{__name__}:Missing", "cannot be loaded: .*Missing"),
        (f"{__name__}:NOT_A_BACKEND", "is not a subclass of"),
        ("pathlib:Path", "is not a subclass of"),
    ],
)
def test_what_is_no_backend_is_refused_by_name(
    context: BackendContext, name: str, told: str
) -> None:
    with pytest.raises(BackendError, match=told):
        load_backend(name, context)
