"""Devices that are lost, with jobs on them, and that come back."""

from __future__ import annotations

from world import D1, D2, G1, G2, World, job

from tsliced.core.actions import TellStalled
from tsliced.core.model import Cause, DeviceId, RankState

A, B, C = job("a"), job("b"), job("c")


def fault(world: World) -> dict[str, str]:
    return {key.id: str(reason) for key, reason in world.machine.leasing.faults.items()}


def test_a_group_with_a_lost_device_is_given_to_nobody_until_it_is_back_g11() -> None:
    world = World()
    world.look(D1)
    lost = world.acquire(world.session(A), G1)
    assert world.waits(lost)
    assert world.held(world.acquire(world.session(B), G2)), "the others go on"
    (told,) = world.all_of(TellStalled)
    assert told.reason.cause is Cause.DEVICE_LOST
    assert told.reason.text == "device GPU-1 is lost (GPU is lost)"
    assert "nvidia-smi -r" in told.way_out
    (note,) = world.notes("device_lost")
    assert (note.level, note.facts["device"], note.facts["groups"]) == ("error", D1, G1)
    world.look(D1)
    assert len(world.notes("device_lost")) == 1, "it is said once"
    world.look()
    assert world.held(lost)
    assert [n.facts["device"] for n in world.notes("device_back")] == [D1]


def test_who_holds_without_a_context_does_not_get_it_again_while_it_is_lost() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, G1)
    world.look(D1)
    assert world.held(lease)
    world.release(lease)
    again = world.acquire(session, G1)
    assert world.waits(again)
    world.look()
    assert world.held(again)


def test_g11_a_job_that_was_parked_has_a_fault_as_long_as_its_device_is_lost() -> None:
    world = World()
    first, second = world.session(A), world.session(B)
    lease = world.acquire(first, G1)
    parked = world.context(A, D1)
    world.look()
    world.release(lease)
    world.release(world.acquire(second, G1))
    assert world.state(parked) is RankState.PARKED
    world.look(D1)
    assert "goes back when the device does" in fault(world)["a"]
    (note,) = world.notes("device_lost")
    assert note.facts["jobs"] == "1000/a"
    refused = world.acquire(first, G1)
    assert world.code(refused) == "job_faulted"
    # An operator's word does not bring the device back.
    world.clear(A)
    world.look(D1)
    assert "a" in fault(world)
    world.restart()
    assert "a" in fault(world), "it is on record"
    world.look(D1)
    world.look(D1, D2)
    world.look()
    assert fault(world) == {}
    assert world.held(world.acquire(first, G1))
    assert world.state(parked) is RankState.RUNNING


def test_g11_a_job_that_ran_on_it_has_a_fault_until_its_process_ends() -> None:
    world = World()
    session = world.session(A)
    world.acquire(session, G1)
    rank = world.context(A, D1)
    elsewhere = world.session(C)
    other = world.acquire(elsewhere, G2)
    world.context(C, D2)
    world.look()
    world.look(D1)
    assert f"(pid {rank.pid} on n1)" in fault(world)["a"]
    assert "what the job had on it is gone" in fault(world)["a"]
    assert fault(world).keys() == {"a"}
    world.look()
    assert fault(world).keys() == {"a"}, "its context is gone for good"
    assert world.held(other)
    world.die(rank)
    assert fault(world) == {}


def test_after_a_restart_it_is_judged_when_the_driver_has_been_asked() -> None:
    world = World()
    lease = world.acquire(world.session(A), G1)
    world.context(A, D1)
    world.look()
    world.release(lease)
    world.release(world.acquire(world.session(B), G1))
    world.auto = False
    world.restart()
    world.look(D1)
    assert fault(world) == {}
    world.auto = True
    world.run()
    world.look(D1)
    assert "goes back when the device does" in fault(world)["a"]


def test_a_device_of_no_group_is_named_and_concerns_nobody() -> None:
    world = World()
    world.look(DeviceId("GPU-9"))
    (note,) = world.notes("device_lost")
    assert (note.facts["groups"], note.facts["jobs"]) == (None, "")
    assert world.held(world.acquire(world.session(A), G1))
