"""The switch: evict one tenancy, admit another, over the whole core."""

from __future__ import annotations

from world import D1, G1, World, job

from tsliced.core.model import RankState

A, B = job("a"), job("b")


def test_a_job_without_a_context_is_granted_an_empty_group_at_once() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    assert world.held(lease)
    assert world.grants()[0].tokens[0][0] == G1


def test_two_jobs_take_turns_and_only_one_is_on_the_device() -> None:
    world = World()
    first, second = world.session(A), world.session(B)
    lease_a = world.acquire(first)
    rank_a = world.context(A, D1)
    lease_b = world.acquire(second)
    assert not world.held(lease_b)
    world.release(lease_a)
    assert world.held(lease_b)
    assert world.state(rank_a) is RankState.PARKED
    rank_b = world.context(B, D1)
    again_a = world.acquire(first)
    world.release(lease_b)
    assert world.held(again_a)
    assert world.state(rank_a) is RankState.RUNNING
    assert world.state(rank_b) is RankState.PARKED
    assert world.grants()[-1].restored
