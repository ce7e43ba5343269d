"""The llm-d client's calls, results and errors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon

from libtimeslice import compat, connect
from libtimeslice.compat import (
    AcquireResult,
    AgentJobState,
    GroupLockState,
    OrchestratorConnectionError,
    OrchestratorError,
    OrchestratorInternalError,
    OrchestratorInvalidArgumentError,
    OrchestratorTimeoutError,
    TimeSliceOrchestratorClient,
    YieldResult,
)


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[TimeSliceOrchestratorClient]:
    target = f"unix:{daemon.path}"
    with TimeSliceOrchestratorClient(target, job_id="job-a", group_id="n1") as made:
        yield made


def test_acquire_and_release_return_the_fields_of_the_llm_d_client(
    daemon: FakeDaemon, client: TimeSliceOrchestratorClient
) -> None:
    acquired = client.acquire(timeout_sec=5)
    assert (acquired.success, acquired.context_restored) == (True, True)
    assert 0 <= acquired.waited_ms < 1000
    daemon.queue_up(("n1",))
    released = client.release()
    assert released == YieldResult(success=True, pending_waiters=1, snapshot_deferred=False)
    assert daemon.last("hello")["job"] == "job-a"


def test_acquire_and_release_are_idempotent_and_do_not_count(
    daemon: FakeDaemon, client: TimeSliceOrchestratorClient
) -> None:
    client.acquire()
    again = client.acquire()
    assert again == AcquireResult(success=True, waited_ms=0, context_restored=False)
    client.release()
    assert daemon.held == {}
    nothing = YieldResult(success=True, pending_waiters=0, snapshot_deferred=True)
    assert client.release() == nothing
    assert daemon.count("release") == 1


def test_on_accelerators_is_context_manager_and_decorator_and_nests(
    daemon: FakeDaemon, client: TimeSliceOrchestratorClient
) -> None:
    @client.on_accelerators(timeout_sec=5)
    def inner() -> int:
        return len(daemon.held)

    with client.on_accelerators() as result:
        assert result.success
        assert inner() == 1
        assert len(daemon.held) == 1, "the inner block released the outer one's lease"
    assert daemon.held == {}
    assert inner() == 1
    assert inner() == 1


def test_ids_come_with_the_client_or_the_call_or_are_missed(daemon: FakeDaemon) -> None:
    with TimeSliceOrchestratorClient(str(daemon.path)) as client:
        with pytest.raises(ValueError, match="job_id"):
            client.acquire(group_id="n1")
        with pytest.raises(ValueError, match="group_id"):
            client.acquire(job_id="a")
        client.acquire(job_id="a", group_id="n1")
        client.acquire(job_id="b", group_id="n2")
        jobs = {held.session.job for held in daemon.held.values()}
        assert jobs == {"a", "b"}
        client.release(job_id="a", group_id="n1")
    daemon.wait_until(lambda: not daemon.held)


def test_errors_are_those_of_the_llm_d_client(
    daemon: FakeDaemon, client: TimeSliceOrchestratorClient, tmp_path: Path
) -> None:
    daemon.steal(("n1",))
    with pytest.raises(OrchestratorTimeoutError) as timed_out:
        client.acquire(timeout_sec=0)
    assert timed_out.value.code == "timeout"
    with pytest.raises(OrchestratorError) as unknown:
        client.acquire(group_id="nope")
    assert type(unknown.value) is OrchestratorError
    assert unknown.value.code == "unknown_group"
    absent = TimeSliceOrchestratorClient(str(tmp_path / "none"), "a", "n1")
    absent._clients["a"] = connect(tmp_path / "none", job="a", connect_timeout_s=0.05)
    with pytest.raises(OrchestratorConnectionError):
        absent.acquire()
    absent.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("internal", OrchestratorInternalError),
        ("bad_request", OrchestratorInvalidArgumentError),
        ("shutting_down", OrchestratorConnectionError),
        ("pinned", OrchestratorError),
    ],
)
def test_each_kind_of_refusal_has_its_exception(
    client: TimeSliceOrchestratorClient, daemon: FakeDaemon, code: str, kind: type[Exception]
) -> None:
    def refuse(connection: Any, message: Any) -> bool:
        if message["t"] == "acquire":
            connection.send({"re": message["id"], "err": {"code": code, "message": "m"}})
        return bool(message["t"] == "acquire")

    daemon.intercept = refuse
    with pytest.raises(kind) as raised:
        client.acquire()
    assert type(raised.value) is kind


def test_status_and_groups_come_from_the_daemon(
    daemon: FakeDaemon, client: TimeSliceOrchestratorClient
) -> None:
    client.acquire()
    daemon.queue_up(("n1",))
    assert client.list_groups() == ["n1", "n2"]
    status = client.get_status().group
    assert (status.group_id, status.group_state) == ("n1", GroupLockState.LOCKED)
    assert (status.locking_job, status.active_job, status.loaded_job) == ("job-a",) * 3
    assert status.waiter_queue_depth == 1
    assert status.state_timestamp is not None
    age = datetime.now(timezone.utc) - status.state_timestamp
    assert timedelta(seconds=1) < age < timedelta(seconds=30)
    free = client.get_status(group_id="n2").group
    assert (free.group_state, free.locking_job) == (GroupLockState.IDLE, "")
    with pytest.raises(OrchestratorError):
        client.get_status(group_id="nope")


KEY = {"cluster": "c", "uid": 0, "id": "a"}


@pytest.mark.parametrize(
    ("group", "state", "locking", "loaded", "waiters"),
    [
        ({}, GroupLockState.UNSPECIFIED, "", "", 0),
        ({"state": "HELD", "holder": KEY}, GroupLockState.LOCKED, "a", "", 0),
        ({"state": "held", "holder": "a", "resident": [KEY]}, GroupLockState.LOCKED, "a", "a", 0),
        (
            {"state": "free", "resident": [KEY], "waiters": []},
            GroupLockState.IDLE_YIELDED,
            "",
            "a",
            0,
        ),
        ({"state": "switching", "waiters": ["x", "y"]}, GroupLockState.SWITCHING, "", "", 2),
        ({"state": "dancing", "since_s": "soon"}, GroupLockState.UNSPECIFIED, "", "", 0),
    ],
)
def test_a_status_with_fields_missing_or_new_is_mapped_as_far_as_it_goes(
    group: dict[str, Any], state: GroupLockState, locking: str, loaded: str, waiters: int
) -> None:
    status = compat._group_status("g", group, {}).group
    assert status.group_state is state
    assert (status.locking_job, status.loaded_job) == (locking, loaded)
    assert status.waiter_queue_depth == waiters
    assert status.state_timestamp is None


def test_jobs_are_told_with_the_host_and_what_has_become_of_their_state() -> None:
    jobs = [
        {"job": KEY, "state": "held"},
        {"job": "b", "state": "parked"},
        {"job": "c", "state": "faulted"},
        {"job": "d", "state": "idle"},
    ]
    group = {"state": "held", "holder": KEY, "resident": [KEY]}
    status = compat._group_status("g", group, {"host": "n7", "jobs": jobs})
    assert {agent.agent for agent in status.agent_job_states} == {"n7"}
    assert {agent.job_id: agent.job_state for agent in status.agent_job_states} == {
        "a": AgentJobState.RUNNING,
        "b": AgentJobState.SAVED,
        "c": AgentJobState.FAULTED,
    }
