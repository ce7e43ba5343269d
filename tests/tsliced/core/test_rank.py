"""One rank's device context and its one operation in flight."""

from __future__ import annotations

import pytest
from world import D1, G1, HOST, failure, job

from tsliced.core.actions import RankRecord
from tsliced.core.events import OperationFinished
from tsliced.core.model import (
    Cause,
    Counter,
    OpId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    TenancyKey,
    Verb,
)
from tsliced.core.rank import Operation, Rank

RANK = RankId(HOST, ProcessId(1, 1))
KEY = TenancyKey(job("a"), (G1,))


def rank(state: RankState = RankState.RUNNING, *, parked_bytes: int = 0) -> Rank:
    return Rank(
        id=RANK,
        devices=frozenset({D1}),
        device_bytes=100,
        state=state,
        parked_bytes=parked_bytes,
    )


def operation(verb: Verb, op: int = 1) -> Operation:
    return Operation(op=OpId(op), verb=verb, epoch=Counter(1, 1), started_at=0.0)


def finished(
    observed: RankState, *, op: int = 1, moved_bytes: int = 0, failed: Reason | None = None
) -> OperationFinished:
    return OperationFinished(
        op=OpId(op), rank=RANK, observed=observed, moved_bytes=moved_bytes, failure=failed
    )


def test_one_operation_is_in_flight() -> None:
    known = rank()
    known.start(operation(Verb.FREEZE))
    with pytest.raises(AssertionError, match="one operation"):
        known.start(operation(Verb.QUERY, op=2))


@pytest.mark.parametrize(
    ("verb", "state"),
    [
        (Verb.FREEZE, RankState.FROZEN),
        (Verb.SNAPSHOT, RankState.RUNNING),
        (Verb.RESTORE, RankState.FROZEN),
        (Verb.THAW, RankState.PARKED),
    ],
)
def test_a_verb_is_applied_only_where_it_is_legal(verb: Verb, state: RankState) -> None:
    with pytest.raises(AssertionError):
        rank(state).start(operation(verb))


@pytest.mark.parametrize("state", list(RankState))
def test_every_state_may_be_asked_for(state: RankState) -> None:
    known = rank(state)
    known.start(operation(Verb.QUERY))
    assert known.operation is not None


def test_what_the_driver_observed_counts_whether_it_failed_or_not() -> None:
    known = rank()
    known.start(operation(Verb.FREEZE))
    ended = known.finish(finished(RankState.FROZEN, failed=failure(Cause.FREEZE_TIMEOUT)))
    assert ended == operation(Verb.FREEZE)
    assert known.state is RankState.FROZEN
    assert known.operation is None


def test_a_result_belongs_to_the_operation_in_flight() -> None:
    known = rank()
    known.start(operation(Verb.FREEZE))
    with pytest.raises(AssertionError):
        known.finish(finished(RankState.FROZEN, op=2))


@pytest.mark.parametrize(("moved_bytes", "parked_bytes"), [(70, 70), (0, 100)])
def test_what_a_snapshot_moved_is_what_a_restore_will_need(
    moved_bytes: int, parked_bytes: int
) -> None:
    known = rank(RankState.FROZEN)
    known.start(operation(Verb.SNAPSHOT))
    known.finish(finished(RankState.PARKED, moved_bytes=moved_bytes))
    assert known.parked_bytes == parked_bytes
    known.start(operation(Verb.QUERY))
    known.finish(finished(RankState.PARKED))
    assert known.parked_bytes == parked_bytes
    known.start(operation(Verb.RESTORE))
    known.finish(finished(RankState.FROZEN))
    assert known.parked_bytes == 0


def test_a_record_says_what_is_about_to_be_done() -> None:
    known = rank()
    assert known.record(KEY) == RankRecord(
        rank=RANK,
        tenancy=KEY,
        devices=frozenset({D1}),
        device_bytes=100,
        state=RankState.RUNNING,
        verb=None,
    )
    known.start(operation(Verb.FREEZE))
    assert known.record(KEY).verb is Verb.FREEZE
