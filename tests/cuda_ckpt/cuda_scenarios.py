"""What the CUDA checkpoint API must do, as scenarios: ``cuda_scenarios.py NAME``.

Each runs in a process of its own, on the libcuda.so.1 that the environment leads to. Those in
CONTRACT hold for a real driver as for softcuda; those in SOFTCUDA_ONLY need faults to be injected.
Exit status: 0 passed, SKIPPED with the reason on stdout, anything else failed.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cuda_lab import Lab, Target, wait_for_blocked_signal

from cuda_ckpt import (
    CudaCheckpointError,
    Driver,
    DriverTooOldError,
    IllegalStateError,
    InvalidRequestError,
    LockTimeoutError,
    NotCudaError,
    OutOfDeviceMemoryError,
    Process,
    ProcessState,
    TargetGoneError,
    TargetUnreachableError,
    UnexpectedDriverError,
    parse_uuid,
)
from cuda_ckpt.errors import _TABLE

SKIPPED = 77
MIB = 1 << 20
LOCK_MS = 10_000

Scenario = Callable[[Lab], None]
CONTRACT: dict[str, Scenario] = {}
SOFTCUDA_ONLY: dict[str, Scenario] = {}


class SkippedError(Exception):
    """This machine lacks what the scenario needs."""


def contract(scenario: Scenario) -> Scenario:
    CONTRACT[scenario.__name__] = scenario
    return scenario


def softcuda_only(scenario: Scenario) -> Scenario:
    SOFTCUDA_ONLY[scenario.__name__] = scenario
    return scenario


def suspend(process: Process) -> None:
    process.lock(LOCK_MS)
    process.checkpoint()


def resume(process: Process) -> None:
    process.restore()
    process.unlock()


def expect_state(process: Process, state: ProcessState) -> None:
    assert process.state is state, f"{process.state} instead of {state}"


def expect(kind: type[CudaCheckpointError], call: Callable[[], object]) -> CudaCheckpointError:
    caught: CudaCheckpointError | None = None
    try:
        call()
    except CudaCheckpointError as exc:
        caught = exc
    assert type(caught) is kind, f"{type(caught).__name__} instead of {kind.__name__}: {caught}"
    return caught


def expect_silence(target: Target, limit_s: float) -> None:
    try:
        answer = target.answer(limit_s)
    except TimeoutError:
        return
    raise AssertionError(f"the process was not stopped: it answered {answer}")


def used_device_memory_bytes() -> list[int]:
    """Asks NVML how much memory of each device is in use."""
    try:
        import pynvml
    except ImportError as exc:
        raise SkippedError("needs nvidia-ml-py") from exc
    pynvml.nvmlInit()
    try:
        devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetMemoryInfo(device).used for device in devices]
    finally:
        pynvml.nvmlShutdown()


def wait_for_free_memory(device: int, at_most: int) -> None:
    """Waits until a device has no more than so many bytes in use; drivers lag a little."""
    deadline = time.monotonic() + 5
    while used_device_memory_bytes()[device] > at_most:
        assert time.monotonic() < deadline, "the device memory was not freed"
        time.sleep(0.05)


@contract
def a_running_process_is_running_and_names_its_restore_thread(lab: Lab) -> None:
    target = lab.target()
    process = Process(target.pid)
    expect_state(process, ProcessState.RUNNING)
    thread_id = process.restore_thread_id
    assert os.path.isdir(f"/proc/{target.pid}/task/{thread_id}")
    assert Process(thread_id).state is ProcessState.RUNNING


@contract
def bytes_survive_suspend_and_resume_and_lie_in_host_memory_between(lab: Lab) -> None:
    target = lab.target(mib=32)
    process = Process(target.pid)
    before = target.host_memory_bytes()
    process.lock(LOCK_MS)
    expect_state(process, ProcessState.LOCKED)
    process.checkpoint()
    expect_state(process, ProcessState.CHECKPOINTED)
    assert target.host_memory_bytes() >= before + 30 * MIB
    process.restore()
    expect_state(process, ProcessState.LOCKED)
    process.unlock()
    expect_state(process, ProcessState.RUNNING)
    assert target.ask("verify") == "same"


@contract
def a_checkpointed_process_holds_no_device_memory(lab: Lab) -> None:
    before = used_device_memory_bytes()[0]
    target = lab.target(mib=32)
    process = Process(target.pid)
    held = used_device_memory_bytes()[0]
    assert held >= before + 32 * MIB
    suspend(process)
    wait_for_free_memory(0, at_most=held - 32 * MIB)
    resume(process)
    assert used_device_memory_bytes()[0] >= before + 32 * MIB


@contract
def calls_of_a_locked_process_block_until_it_is_unlocked(lab: Lab) -> None:
    target = lab.target()
    process = Process(target.pid)
    process.lock(LOCK_MS)
    target.send("verify")
    expect_silence(target, limit_s=0.3)
    process.unlock()
    assert target.answer() == "same"


@contract
def a_suspended_process_can_go_round_twice(lab: Lab) -> None:
    target = lab.target()
    process = Process(target.pid)
    for _ in range(2):
        suspend(process)
        resume(process)
        assert target.ask("verify") == "same"


@contract
def an_operation_from_the_wrong_state_is_refused_and_changes_nothing(lab: Lab) -> None:
    process = Process(lab.target().pid)
    steps: list[tuple[ProcessState, Callable[[], None], list[Callable[[], None]]]] = [
        (
            ProcessState.RUNNING,
            lambda: process.lock(LOCK_MS),
            [process.checkpoint, process.restore, process.unlock],
        ),
        (
            ProcessState.LOCKED,
            process.checkpoint,
            [lambda: process.lock(LOCK_MS), process.restore],
        ),
        (
            ProcessState.CHECKPOINTED,
            process.restore,
            [lambda: process.lock(LOCK_MS), process.checkpoint, process.unlock],
        ),
    ]
    for state, step, refused in steps:
        for call in refused:
            assert expect(IllegalStateError, call).code == 401
            expect_state(process, state)
        step()
    process.unlock()


@contract
def a_lock_gives_up_after_its_limit_and_leaves_the_process_running(lab: Lab) -> None:
    target = lab.target()
    process = Process(target.pid)
    assert target.ask("spin 1500") == "queued"
    started = time.monotonic()
    error = expect(LockTimeoutError, lambda: process.lock(200))
    assert 0.19 <= time.monotonic() - started < 1.2
    assert error.code == 600
    expect_state(process, ProcessState.RUNNING)
    process.lock(LOCK_MS)
    process.unlock()
    assert target.ask("verify") == "same"


@contract
def a_lock_without_a_limit_is_refused(lab: Lab) -> None:
    process = Process(lab.target().pid)
    for timeout_ms in (0, -1, 2**32):
        refused = functools.partial(process.lock, timeout_ms)
        assert expect(InvalidRequestError, refused).code is None
    expect_state(process, ProcessState.RUNNING)


@contract
def a_process_without_cuda_is_told_apart(_lab: Lab) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as plain:
        process = Process(plain.pid)
        expect(NotCudaError, lambda: process.state)
        expect(NotCudaError, lambda: process.restore_thread_id)
        expect(NotCudaError, lambda: process.lock(LOCK_MS))
        plain.kill()


@contract
def a_dead_process_is_gone(lab: Lab) -> None:
    target = lab.target()
    process = Process(target.pid)
    os.kill(target.pid, signal.SIGKILL)
    os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT)
    for call in (lambda: process.state, process.checkpoint, lambda: process.lock(LOCK_MS)):
        assert expect(TargetGoneError, call).pid == target.pid
    expect(TargetGoneError, lambda: Process(target.pid))


@contract
def another_process_with_the_same_pid_is_not_touched(lab: Lab) -> None:
    target = lab.target()
    started = Process(target.pid).start_time
    expect(TargetGoneError, lambda: Process(target.pid, start_time=started - 1))
    opened = Process(target.pid, start_time=started)
    opened.start_time -= 1  # as if the pid had been reused since
    expect(TargetGoneError, lambda: opened.lock(LOCK_MS))
    assert Process(target.pid).state is ProcessState.RUNNING


@contract
def the_devices_have_uuids_and_memory(_lab: Lab) -> None:
    driver = Driver()
    uuids = driver.device_uuids()
    assert len(uuids) == driver.device_count() >= 1
    assert len({parse_uuid(uuid) for uuid in uuids}) == len(uuids)
    assert all(driver.total_memory_bytes(index) >= 32 * MIB for index in range(len(uuids)))


@contract
def a_restore_maps_devices_where_the_driver_can(lab: Lab) -> None:
    driver = Driver()
    target = lab.target()
    process = Process(target.pid, driver)
    suspend(process)
    same = {uuid: uuid for uuid in driver.device_uuids()}
    if driver.version < 13000:
        expect(DriverTooOldError, lambda: process.restore(same))
        expect_state(process, ProcessState.CHECKPOINTED)
        process.restore()
    else:
        process.restore(same)
    process.unlock()
    assert target.ask("verify") == "same"


@contract
def a_device_map_that_makes_no_sense_is_refused_before_the_driver_is_asked(lab: Lab) -> None:
    driver = Driver()
    if driver.version < 13000:
        raise SkippedError("needs driver 580")
    process = Process(lab.target().pid, driver)
    one, other = "GPU-" + "-".join("0" * n for n in (8, 4, 4, 4, 12)), driver.device_uuids()[0]
    nonsense: list[dict[str, str]] = [
        {},
        {one: "GPU-7"},
        {"MIG-" + one[4:]: one},
        {one: other, other: other},
    ]
    for device_map in nonsense:
        refused = functools.partial(process.restore, device_map)
        assert expect(InvalidRequestError, refused).code is None


@contract
def a_forked_child_cannot_use_the_driver_of_its_parent(lab: Lab) -> None:
    target = lab.target()
    driver = Driver()
    driver.init()
    child = os.fork()
    if child == 0:
        try:
            expect(InvalidRequestError, lambda: Process(target.pid, driver).state)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@softcuda_only
def every_code_of_the_driver_becomes_its_class(lab: Lab) -> None:
    process = Process(lab.target().pid)
    for code, (name, kind, _) in _TABLE.items():
        lab.write_faults(f"unlock * * error:{code}")
        error = expect(kind, process.unlock)
        assert (error.code, error.name, error.pid) == (code, name, process.pid)
        assert error.driver_version == process.driver.version


@softcuda_only
def a_code_that_nobody_knows_is_reported_with_the_driver(lab: Lab) -> None:
    process = Process(lab.target().pid)
    lab.write_faults("unlock * * error:12345")
    error = expect(UnexpectedDriverError, process.unlock)
    assert "12345" in str(error)
    assert "driver for CUDA 13.0" in str(error)


@softcuda_only
def a_process_that_dies_in_a_checkpoint_is_gone_and_not_unreachable(lab: Lab) -> None:
    target = lab.target()
    process = Process(target.pid)
    process.lock(LOCK_MS)
    lab.write_faults("checkpoint * * die-before")
    assert expect(TargetGoneError, process.checkpoint).code == 304


@softcuda_only
def a_process_that_a_lock_crashes_is_gone_and_not_unlocked(lab: Lab) -> None:
    process = Process(lab.target().pid)
    lab.write_faults("lock * * segv")
    expect(TargetGoneError, lambda: process.lock(LOCK_MS))


@softcuda_only
def a_restore_without_room_loses_the_process_for_good(lab: Lab) -> None:
    target = lab.target(mib=40)
    process = Process(target.pid)
    suspend(process)
    other = lab.target(mib=40)
    assert expect(OutOfDeviceMemoryError, process.restore).code == 2
    other.process.kill()
    other.process.wait()
    expect(TargetUnreachableError, process.restore)
    expect_state(process, ProcessState.CHECKPOINTED)


@softcuda_only
def a_restore_can_move_a_process_to_another_device(lab: Lab) -> None:
    driver = Driver()
    target = lab.target(mib=32)
    process = Process(target.pid, driver)
    suspend(process)
    first, second = driver.device_uuids()
    process.restore({first: second, second: first})
    process.unlock()
    used = used_device_memory_bytes()
    assert used[1] >= 32 * MIB > used[0]
    assert target.ask("verify") == "same"


@softcuda_only
def a_caller_told_to_terminate_dies_only_when_the_driver_has_answered(lab: Lab) -> None:
    target = lab.target()
    process = Process(target.pid)
    process.lock(LOCK_MS)
    lab.write_faults("checkpoint * * delay:400")
    program = (
        "import sys; from cuda_ckpt import Process\n"
        f"process = Process({target.pid})\n"
        "print('calling', flush=True); process.checkpoint()\n"
        "print('still there', flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "calling\n"
        wait_for_blocked_signal(caller.pid, signal.SIGTERM)
        caller.terminate()
        output, _ = caller.communicate(timeout=10)
    assert (caller.returncode, output) == (-signal.SIGTERM, "")
    # Had the caller died in the call, the target would hang now.
    expect_state(process, ProcessState.CHECKPOINTED)
    resume(process)
    assert target.ask("verify") == "same"


def main() -> int:
    scenario = (CONTRACT | SOFTCUDA_ONLY)[sys.argv[1]]
    lab = Lab(dict(os.environ), Path.cwd())
    try:
        scenario(lab)
    except SkippedError as exc:
        sys.stdout.write(f"{exc}\n")
        return SKIPPED
    finally:
        lab.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
