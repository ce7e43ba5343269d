"""The torch backend: what it makes of agents' answers, and of agents that do not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libtimeslice.protocol import Message
from tsliced.core.model import Cause, HostName, ProcessId, RankId, RankState, Verb
from tsliced.host.backends.base import AgentAwayError, BackendContext, Outcome, load_backend
from tsliced.host.backends.torch import TorchBackend
from tsliced.host.processes import identify


class FakeAgents:
    """Answers as it was told to, or raises that."""

    def __init__(self, answer: Message | AgentAwayError) -> None:
        self.answer = answer
        self.asked: list[tuple[ProcessId, Message, float | None]] = []

    def has_agent(self, process: ProcessId) -> bool:
        return not (isinstance(self.answer, AgentAwayError) and self.answer.never_came)

    async def ask(self, process: ProcessId, message: Message, limit_s: float | None) -> Message:
        self.asked.append((process, message, limit_s))
        if isinstance(self.answer, AgentAwayError):
            raise self.answer
        return self.answer


@pytest.fixture
def rank() -> Iterator[RankId]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identify(process.pid)
        assert identity is not None
        yield RankId(HostName("n1"), identity)
        process.kill()


def made(tmp_path: Path, answer: Message | AgentAwayError) -> tuple[TorchBackend, FakeAgents]:
    backend = load_backend("torch", BackendContext(directory=tmp_path))
    assert isinstance(backend, TorchBackend)
    agents = FakeAgents(answer)
    backend.meet(agents)
    return backend, agents


def run(backend: TorchBackend, verb: Verb, rank: RankId) -> Outcome:
    return asyncio.run(backend.run(verb, rank, 7.0 if verb is Verb.FREEZE else None))


@pytest.mark.parametrize(
    ("verb", "order", "state", "observed"),
    [
        (Verb.FREEZE, "freeze", "frozen", RankState.FROZEN),
        (Verb.SNAPSHOT, "snapshot", "parked", RankState.PARKED),
        (Verb.RESTORE, "restore", "frozen", RankState.FROZEN),
        (Verb.THAW, "thaw", "paused", RankState.RUNNING),
        (Verb.QUERY, "query", "running", RankState.RUNNING),
        (Verb.QUERY, "query", "asleep", RankState.UNKNOWN),
    ],
)
def test_each_verb_is_an_order_and_the_state_is_what_the_rank_says(
    tmp_path: Path, rank: RankId, verb: Verb, order: str, state: str, observed: RankState
) -> None:
    backend, agents = made(tmp_path, {"re": 1, "state": state, "bytes": 4096, "seconds": 0.5})
    assert run(backend, verb, rank) == Outcome(observed=observed, moved_bytes=4096, seconds=0.5)
    ((process, message, limit_s),) = agents.asked
    assert (process, message) == (rank.process, {"t": "tensors", "do": order})
    assert (limit_s is None) == (verb in (Verb.SNAPSHOT, Verb.RESTORE)), "a copy is not cut off"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("not_found", Cause.UNSUPPORTED),
        ("refused", Cause.UNSUPPORTED),
        ("unavailable", Cause.QUIESCE),
        ("no_host_memory", Cause.NO_HOST_MEMORY),
        ("no_device_memory", Cause.NO_DEVICE_MEMORY),
        ("internal", Cause.DRIVER),
    ],
)
def test_a_refusal_has_the_cause_that_its_code_stands_for(
    tmp_path: Path, rank: RankId, code: str, cause: Cause
) -> None:
    error = {"code": code, "message": "not this", "state": "frozen"}
    outcome = run(made(tmp_path, {"re": 1, "err": error})[0], Verb.SNAPSHOT, rank)
    assert outcome.observed is RankState.FROZEN
    assert outcome.failure is not None
    assert (outcome.failure.cause, outcome.failure.rank) == (cause, rank)
    assert outcome.failure.text.startswith("not this")
    assert ("ts.torch.manage" in outcome.failure.text) == (code == "not_found")


@pytest.mark.parametrize("verb", Verb)
def test_what_became_of_an_order_without_an_answer_is_not_known(
    tmp_path: Path, rank: RankId, verb: Verb
) -> None:
    away = AgentAwayError("its agent is away", never_came=False)
    outcome = run(made(tmp_path, away)[0], verb, rank)
    assert outcome.observed is RankState.UNKNOWN, "it may be carried out yet"
    assert outcome.failure is not None
    assert outcome.failure.cause is Cause.DRIVER


def test_a_rank_without_an_agent_runs_and_is_told_what_it_lacks(
    tmp_path: Path, rank: RankId
) -> None:
    backend = made(tmp_path, AgentAwayError("it has no agent", never_came=True))[0]
    outcome = run(backend, Verb.FREEZE, rank)
    assert outcome.observed is RankState.RUNNING
    assert outcome.failure is not None
    assert outcome.failure.cause is Cause.UNSUPPORTED
    assert "ts.torch.manage" in outcome.failure.text
    assert asyncio.run(backend.probe(rank.process)) is False


def test_a_stopped_rank_without_an_agent_has_nothing_to_move(tmp_path: Path, rank: RankId) -> None:
    backend = made(tmp_path, AgentAwayError("it has no agent", never_came=True))[0]
    os.kill(rank.process.pid, signal.SIGSTOP)
    assert asyncio.run(backend.probe(rank.process)) is False


@pytest.mark.parametrize(("answer", "has"), [({"state": "running"}, True), ({"err": {}}, False)])
def test_a_process_is_one_to_move_if_it_manages_tensors(
    tmp_path: Path, rank: RankId, answer: Message, has: bool
) -> None:
    assert asyncio.run(made(tmp_path, answer)[0].probe(rank.process)) is has


@pytest.mark.parametrize(
    ("verb", "observed"),
    [
        (Verb.FREEZE, RankState.RUNNING),
        (Verb.SNAPSHOT, RankState.FROZEN),
        (Verb.RESTORE, RankState.PARKED),
        (Verb.THAW, RankState.FROZEN),
        (Verb.QUERY, RankState.UNKNOWN),
    ],
)
def test_a_stopped_process_is_not_asked_and_stays_where_it_is(
    tmp_path: Path, rank: RankId, verb: Verb, observed: RankState
) -> None:
    backend, agents = made(tmp_path, {"state": "running"})
    os.kill(rank.process.pid, signal.SIGSTOP)
    os.waitpid(rank.process.pid, os.WUNTRACED)
    outcome = run(backend, verb, rank)
    assert outcome.observed is observed
    assert outcome.failure is not None
    assert outcome.failure.cause is Cause.STOPPED
    assert "SIGCONT" in outcome.failure.text
    assert agents.asked == []


@pytest.mark.parametrize("amount", ["much", -1, float("nan"), float("inf"), None, [1]])
def test_amounts_that_are_none_count_as_nothing_g9(
    tmp_path: Path, rank: RankId, amount: object
) -> None:
    answer = {"state": "parked", "bytes": amount, "seconds": amount}
    outcome = run(made(tmp_path, answer)[0], Verb.SNAPSHOT, rank)
    assert outcome == Outcome(observed=RankState.PARKED)


def test_without_a_daemon_nobody_can_ask(tmp_path: Path, rank: RankId) -> None:
    backend = TorchBackend(BackendContext(directory=tmp_path))
    outcome = run(backend, Verb.RESTORE, rank)
    assert outcome.failure is not None
    assert "only a daemon that runs" in outcome.failure.text
