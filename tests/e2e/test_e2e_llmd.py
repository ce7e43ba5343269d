"""Programs written for the llm-d client run with the import and the target changed."""

from __future__ import annotations

import sys

import pytest
from harness import HERE, LIMIT_S, MakeHost, own

from libtimeslice.compat import (
    GroupLockState,
    OrchestratorConnectionError,
    OrchestratorError,
    OrchestratorTimeoutError,
    TimeSliceOrchestratorClient,
)

ROLES = {"groups.samplers": {"devices": ["0"]}, "groups.trainers": {"devices": ["1"]}}
STEPS = 3


def test_two_jobs_of_the_published_shape_share_samplers_and_trainers(make_host: MakeHost) -> None:
    host = make_host(settings=ROLES)
    jobs = [
        host.spawn([sys.executable, str(HERE / "llmd_job.py"), name, str(STEPS)]) for name in "ab"
    ]
    for job in jobs:
        output, _ = job.communicate(timeout=LIMIT_S)
        assert output.split() == [*["intact", "rewarded", "intact"] * STEPS, "done"]
        assert job.returncode == 0
    for group in ("samplers", "trainers"):
        granted = [event for event in host.events("granted") if event["groups"] == group]
        assert host.grants(group=group) == 2 * (1 + STEPS)
        assert {event["job"] for event in granted} == {own("a"), own("b")}
        assert any(event["restored"] for event in granted), "they alternated"


def test_the_client_returns_what_the_llm_d_client_returns(make_host: MakeHost) -> None:
    host = make_host(settings=ROLES)
    with (
        TimeSliceOrchestratorClient(f"unix:{host.socket}", "a", "samplers") as first,
        TimeSliceOrchestratorClient(f"unix://{host.socket}", "b", "samplers") as second,
    ):
        assert first.list_groups() == ["samplers", "trainers"]
        assert first.get_status().group.group_state is GroupLockState.IDLE
        acquired = first.acquire()
        assert (acquired.success, acquired.context_restored) == (True, False)
        assert first.acquire().success, "asking again for what one has is no error"
        status = first.get_status().group
        assert status.group_state is GroupLockState.LOCKED
        assert status.locking_job == "a"
        with pytest.raises(OrchestratorTimeoutError):
            second.acquire(timeout_sec=0.2)
        released = first.release()
        assert (released.success, released.pending_waiters) == (True, 0)
        assert released.snapshot_deferred
        assert first.release().success, "giving back what one has not is no error"
        with second.on_accelerators() as result:
            assert result.success
        with pytest.raises(OrchestratorError, match="no-such-group"):
            second.acquire(group_id="no-such-group")
    with pytest.raises(ValueError, match="group_id"):
        TimeSliceOrchestratorClient(f"unix:{host.socket}", "a").acquire()


def test_without_a_daemon_the_client_says_that_it_cannot_be_reached(make_host: MakeHost) -> None:
    host = make_host(settings=ROLES)
    client = TimeSliceOrchestratorClient(f"unix:{host.directory}/elsewhere", "a", "samplers")
    with pytest.raises(OrchestratorConnectionError, match="elsewhere"):
        client.acquire(timeout_sec=0.5)
