"""Beginnings that several tests share, over the simulated world."""

from __future__ import annotations

from world import D1, G1, Process, World, failure, job

from tsliced.core.model import (
    Cause,
    LeaseId,
    ProcessId,
    RankState,
    Reason,
    SessionId,
    TenancyKey,
    Verb,
)

A, B, C = job("a"), job("b"), job("c")
RUNNING, FROZEN, PARKED = RankState.RUNNING, RankState.FROZEN, RankState.PARKED
ON_G1 = TenancyKey(A, (G1,))


def resident(world: World, *, ranks: int = 1) -> tuple[SessionId, list[ProcessId]]:
    """Let job a be on the device, with nobody waiting."""
    session = world.session(A)
    lease = world.acquire(session)
    processes = [world.context(A, D1) for _ in range(ranks)]
    world.look()
    world.release(lease)
    return session, processes


def parked(world: World, *, ranks: int = 1) -> tuple[SessionId, list[ProcessId], LeaseId]:
    """Let job a be parked while b holds."""
    session, processes = resident(world, ranks=ranks)
    lease = world.acquire(world.session(B))
    assert world.held(lease)
    return session, processes, lease


def fails(world: World, verb: Verb, cause: Cause, *, times: int = 1000) -> None:
    """Let a verb fail so often."""
    left = [times]

    def verdict(what: Verb, process: Process) -> Reason | None:
        if what is not verb or not left[0]:
            return None
        left[0] -= 1
        return failure(cause, process.id)

    world.verdict = verdict
