"""``cuda_ckpt.worker``: real workers on real softcuda processes, and daemons that vanish."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_lab import LIMIT_S, REPOSITORY, Lab, Target, WorkerClient

from cuda_ckpt import _system
from cuda_ckpt.worker import NOT_ASKED, read_op_file

pytest_plugins = ["cuda_ckpt_fixtures"]


def identity(target: Target) -> tuple[int, int]:
    started = _system.start_time(target.pid)
    assert started is not None
    return target.pid, started


@pytest.fixture
def target(lab: Lab) -> Target:
    return lab.target()


@pytest.fixture
def worker(lab: Lab, target: Target) -> WorkerClient:
    return lab.worker(identity(target))


def status_of(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


# ---- a good life ----


def test_the_first_line_says_who_is_ready(worker: WorkerClient) -> None:
    pid = worker.process.pid
    assert worker.ready == {
        "ready": True,
        "driver_version": 13000,
        "pid": pid,
        "start_time": _system.start_time(pid),
    }


def test_each_operation_is_answered_with_the_state_that_it_left(
    worker: WorkerClient, target: Target
) -> None:
    assert worker.request("state")["state"] == "running"
    for op, fields, state in [
        ("lock", {"timeout_ms": 5000}, "locked"),
        ("checkpoint", {}, "checkpointed"),
        ("restore", {}, "locked"),
        ("unlock", {}, "running"),
    ]:
        reply = worker.request(op, **fields)
        assert (reply["ok"], reply["code"], reply["name"]) == (True, 0, "CUDA_SUCCESS")
        assert (reply["error"], reply["message"], reply["state"]) == ("", "", state)
        assert isinstance(reply["seconds"], float)
    assert target.ask("verify") == "same"


def test_the_restore_thread_is_named(worker: WorkerClient, target: Target) -> None:
    reply = worker.request("restore_thread")
    assert reply["ok"] is True
    assert os.path.isdir(f"/proc/{target.pid}/task/{reply['thread_id']}")


def test_the_op_file_tells_of_an_operation_while_it_runs_and_after(
    lab: Lab, worker: WorkerClient, target: Target
) -> None:
    lab.write_faults("lock * * delay:200")
    worker.send_line({"op_id": "op-7", "op": "lock", "timeout_ms": 5000})
    record = worker.wait_for_start("lock")
    assert (record.op_id, record.target) == ("op-7", identity(target))
    assert record.worker == (worker.ready["pid"], worker.ready["start_time"])
    reply = worker.receive()
    ended = read_op_file(worker.op_file)
    assert ended is not None
    assert {"op_id": "op-7", **(ended.result or {})} == reply


def test_queries_leave_the_op_file_alone(worker: WorkerClient) -> None:
    worker.request("state")
    worker.request("restore_thread")
    assert read_op_file(worker.op_file) is None


def test_the_seconds_are_those_of_the_call(lab: Lab, worker: WorkerClient) -> None:
    lab.write_faults("lock * * delay:150")
    seconds = worker.request("lock", timeout_ms=5000)["seconds"]
    assert isinstance(seconds, float)
    assert 0.15 <= seconds < 5


def test_a_device_map_moves_the_target(worker: WorkerClient, lab: Lab, target: Target) -> None:
    worker.request("lock", timeout_ms=5000)
    worker.request("checkpoint")
    uuids = device_uuids(lab)
    assert len(uuids) == 2
    swapped = dict(zip(uuids, reversed(uuids), strict=True))
    reply = worker.request("restore", device_map=swapped)
    assert (reply["ok"], reply["message"]) == (True, "")
    assert worker.request("unlock")["state"] == "running"
    assert target.ask("verify") == "same"


def test_a_worker_sees_the_devices_that_its_environment_hides(lab: Lab, target: Target) -> None:
    blind = {**lab.environment, "CUDA_VISIBLE_DEVICES": ""}
    assert lab.worker(identity(target), environment=blind).ready["ready"] is True


def device_uuids(lab: Lab) -> list[str]:
    program = "from cuda_ckpt import Driver; print(*Driver().device_uuids())"
    listed = subprocess.run(
        [sys.executable, "-c", program],
        env=lab.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return listed.stdout.split()


# ---- a daemon that goes, signals that come ----


def test_a_call_is_finished_and_recorded_when_the_daemon_vanishes_in_it(
    lab: Lab, worker: WorkerClient, target: Target
) -> None:
    worker.request("lock", timeout_ms=5000)
    lab.write_faults("checkpoint * * delay:300")
    worker.send_line({"op_id": "last", "op": "checkpoint"})
    worker.wait_for_start("checkpoint")
    worker.socket.close()
    assert worker.process.wait(LIMIT_S) == 0
    record = read_op_file(worker.op_file)
    assert record is not None
    assert record.op_id == "last"
    assert record.result is not None
    assert (record.result["ok"], record.result["state"]) == (True, "checkpointed")
    # The target is well: another worker brings it back.
    successor = lab.worker(identity(target))
    assert successor.request("restore")["state"] == "locked"
    assert successor.request("unlock")["state"] == "running"
    assert target.ask("verify") == "same"


def test_an_idle_worker_ends_when_the_daemon_vanishes(worker: WorkerClient) -> None:
    worker.socket.close()
    assert worker.process.wait(LIMIT_S) == 0


def test_a_request_that_the_daemon_left_behind_is_not_started(
    lab: Lab, worker: WorkerClient
) -> None:
    lab.write_faults("lock * * delay:300")
    worker.send_line({"op_id": "running", "op": "lock", "timeout_ms": 5000})
    worker.wait_for_start("lock")
    worker.send_line({"op_id": "left behind", "op": "checkpoint"})
    worker.socket.close()
    assert worker.process.wait(LIMIT_S) == 0
    record = read_op_file(worker.op_file)
    assert record is not None
    assert (record.op_id, record.op) == ("running", "lock")


def test_a_daemon_that_vanishes_before_the_driver_is_up_is_no_error(
    lab: Lab, target: Target, tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair()
    pid, started = identity(target)
    command = [sys.executable, "-m", "cuda_ckpt.worker", "--fd", str(theirs.fileno())]
    command += ["--target-pid", str(pid), "--target-start-time", str(started)]
    command += ["--op-file", str(tmp_path / "op.json")]
    with subprocess.Popen(
        command, env=lab.environment, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
    ) as process:
        theirs.close()
        ours.close()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, b"")


def test_signals_do_not_stop_a_call_nor_the_worker(lab: Lab, worker: WorkerClient) -> None:
    lab.write_faults("lock * * delay:300")
    worker.send_line({"op_id": "op", "op": "lock", "timeout_ms": 5000})
    worker.wait_for_start("lock")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT):
        worker.process.send_signal(number)
    reply = worker.receive()
    assert (reply["ok"], reply["state"]) == (True, "locked")
    assert worker.request("unlock")["state"] == "running"
    assert worker.process.poll() is None


def test_a_worker_has_a_session_of_its_own_out_of_reach_of_the_terminal(
    worker: WorkerClient,
) -> None:
    pid = worker.process.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert os.getsid(0) != pid


# ---- targets that are not what they were ----


def test_a_reused_pid_is_gone_and_the_driver_is_not_asked(lab: Lab, target: Target) -> None:
    pid, started = identity(target)
    impostor = lab.worker((pid, started + 1))
    for op, fields in [("state", {}), ("restore_thread", {}), ("lock", {"timeout_ms": 5000})]:
        reply = impostor.request(op, **fields)
        assert (reply["ok"], reply["code"], reply["name"]) == (False, NOT_ASKED, "NOT_ASKED")
        assert (reply["error"], reply["state"]) == ("TargetGoneError", "gone")
    assert lab.worker((pid, started)).request("state")["state"] == "running"


def test_a_target_that_dies_is_gone(worker: WorkerClient, target: Target) -> None:
    target.process.kill()
    target.process.wait()
    assert worker.request("state")["state"] == "gone"


def test_a_target_that_dies_in_a_call_is_gone(lab: Lab, worker: WorkerClient) -> None:
    worker.request("lock", timeout_ms=5000)
    lab.write_faults("checkpoint * * die-before")
    reply = worker.request("checkpoint")
    assert (reply["ok"], reply["code"], reply["state"]) == (False, 304, "gone")
    assert reply["error"] == "TargetGoneError"


def test_a_process_without_cuda_has_no_state(lab: Lab) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as plain:
        started = _system.start_time(plain.pid)
        assert started is not None
        worker = lab.worker((plain.pid, started))
        for op, fields in [("restore_thread", {}), ("lock", {"timeout_ms": 5000})]:
            reply = worker.request(op, **fields)
            assert (reply["code"], reply["error"]) == (3, "NotCudaError")
            assert reply["state"] is None
        plain.kill()


def test_a_checkpoint_that_fails_is_reported_with_the_state_of_the_driver(
    lab: Lab, worker: WorkerClient
) -> None:
    worker.request("lock", timeout_ms=5000)
    lab.write_faults("checkpoint * * error:801")
    reply = worker.request("checkpoint")
    assert (reply["ok"], reply["code"], reply["error"]) == (False, 801, "UnsupportedError")
    assert reply["name"] == "CUDA_ERROR_NOT_SUPPORTED"
    assert reply["state"] == worker.request("state")["state"]
    record = read_op_file(worker.op_file)
    assert record is not None
    assert record.result == {key: value for key, value in reply.items() if key != "op_id"}


def test_a_lock_that_times_out_leaves_the_target_running(
    worker: WorkerClient, target: Target
) -> None:
    assert target.ask("spin 1000") == "queued"
    reply = worker.request("lock", timeout_ms=50)
    assert (reply["code"], reply["error"], reply["state"]) == (600, "LockTimeoutError", "running")


# ---- drivers that do not come up ----


def test_a_missing_library_is_told_before_anything_else(lab: Lab, target: Target) -> None:
    worker = lab.worker(identity(target), library="/nowhere/libcuda.so.1")
    assert (worker.ready["ready"], worker.ready["code"]) == (False, NOT_ASKED)
    assert worker.ready["error"] == "DriverMissingError"
    assert "/nowhere/libcuda.so.1" in str(worker.ready["message"])
    assert worker.process.wait(LIMIT_S) == 1


def test_a_driver_without_checkpoint_functions_is_too_old(
    lab: Lab, target: Target, softcuda_build: Path
) -> None:
    old = softcuda_build.parent / "softcuda-550" / "libcuda.so.1"
    worker = lab.worker(identity(target), library=str(old))
    assert (worker.ready["ready"], worker.ready["error"]) == (False, "DriverTooOldError")


def test_a_driver_that_cannot_initialise_is_told_with_its_code(lab: Lab, target: Target) -> None:
    lab.write_faults("init * * error:100")
    worker = lab.worker(identity(target))
    assert (worker.ready["ready"], worker.ready["code"]) == (False, 100)
    assert worker.ready["name"] == "CUDA_ERROR_NO_DEVICE"
    assert worker.process.wait(LIMIT_S) == 1


# ---- requests that are none ----

BAD_REQUESTS = [
    b"\n",
    b"hello\n",
    b"[]\n",
    b"null\n",
    b"\xff\xfe\n",
    b"[" * 50_000 + b"\n",
    b'{"op": "state"}\n',
    b'{"op_id": "", "op": "state"}\n',
    b'{"op_id": 7, "op": "state"}\n',
    b'{"op_id": "a", "op": "explode"}\n',
    b'{"op_id": "a", "op": ["state"]}\n',
    b'{"op_id": "a", "op": "lock"}\n',
    b'{"op_id": "a", "op": "lock", "timeout_ms": "9"}\n',
    b'{"op_id": "a", "op": "lock", "timeout_ms": true}\n',
    b'{"op_id": "a", "op": "lock", "timeout_ms": 0}\n',
    b'{"op_id": "a", "op": "lock", "timeout_ms": 1e400}\n',
    b'{"op_id": "a", "op": "lock", "timeout_ms": 4294967296}\n',
    b'{"op_id": "a", "op": "checkpoint", "timeout_ms": 5}\n',
    b'{"op_id": "a", "op": "restore", "device_map": ["x"]}\n',
    b'{"op_id": "a", "op": "restore", "device_map": {"x": 1}}\n',
    b'{"op_id": "a", "op": "restore", "device_map": {"x": "y"}}\n',
    b'{"op_id": "a", "op": "unlock", "device_map": {"x": "y"}}\n',
    b'{"op_id": "a", "op": "state", "padding": "' + b"x" * 70_000 + b'"}\n',
    b"x" * 200_000 + b"\n",
]


def test_a_bad_request_is_answered_and_the_next_one_served(worker: WorkerClient) -> None:
    for line in BAD_REQUESTS:
        worker.send_bytes(line)
        reply = worker.receive()
        assert (reply["ok"], reply["code"]) == (False, NOT_ASKED), line[:80]
        assert reply["error"] == "InvalidRequestError", line[:80]
        assert reply["message"]
    assert worker.request("state")["state"] == "running"


def test_requests_in_one_piece_and_in_many_are_told_apart(worker: WorkerClient) -> None:
    worker.send_bytes(b'{"op_id": "1", "op": "state"}\n{"op_id": "2", "op": "state"}\n{"op_')
    assert [worker.receive()["op_id"] for _ in range(2)] == ["1", "2"]
    worker.send_bytes(b'id": "3", "op": "state"}\n')
    assert worker.receive()["op_id"] == "3"


def test_an_operation_whose_start_cannot_be_recorded_is_not_started(
    worker: WorkerClient,
) -> None:
    os.mkdir(f"{worker.op_file}.tmp")
    reply = worker.request("lock", timeout_ms=5000)
    assert (reply["ok"], reply["code"], reply["error"]) == (False, NOT_ASKED, "OpFileError")
    assert worker.request("state")["state"] == "running"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--fd"],
        ["--fd", "x", "--target-pid", "1", "--target-start-time", "1", "--op-file", "x"],
        ["--fd", "0", "--target-pid", "1", "--target-start-time", "1"],
        ["--fd", "999", "--target-pid", "1", "--target-start-time", "1", "--op-file", "x"],
        ["--fd", "0", "--target-pid", "1", "--target-start-time", "1", "--op-file", "", "--x", "y"],
    ],
)
def test_a_wrong_command_line_is_told_on_stderr(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "cuda_ckpt.worker", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("cuda_ckpt.worker: ")
    assert ended.stderr.count("\n") == 1


# ---- what it costs ----


def test_a_worker_is_small(worker: WorkerClient) -> None:
    worker.request("state")
    status = status_of(worker.process.pid)
    assert int(status["VmRSS"].split()[0]) < 20 * 1024
    assert int(status["Threads"]) <= 3


def test_a_worker_imports_nothing_heavy() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import cuda_ckpt.worker\n"
        "print(*sys.modules)"
    )
    # -S and -I: what site-packages or the environment load does not count.
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    heavy = {"argparse", "asyncio", "dataclasses", "inspect", "logging", "pathlib", "subprocess"}
    assert not heavy & set(listed.stdout.split())
