"""``cuda_ckpt.__main__``: the utility's flags, words and exit status, on softcuda processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_lab import LIMIT_S, Lab, Target, run_limited, wait_for_blocked_signal

from cuda_ckpt.__main__ import exit_status

pytest_plugins = ["cuda_ckpt_fixtures"]

MIB = 1 << 20
NVML_USE = """
import json, pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]))
"""


@pytest.fixture
def target(lab: Lab) -> Target:
    return lab.target(mib=32)


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "cuda_ckpt", *map(str, arguments)]


def run(lab: Lab, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_limited(command_line(*arguments), lab.environment)


def check(lab: Lab, *arguments: object) -> str:
    ended = run(lab, *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.strip()


def state(lab: Lab, target: Target) -> str:
    return check(lab, "--get-state", "--pid", target.pid)


def pids_on_device(lab: Lab) -> str:
    ended = run_limited([sys.executable, "-c", NVML_USE], lab.environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_g12_toggle_freezes_a_process_off_its_device_and_thaws_it_intact(
    lab: Lab, target: Target
) -> None:
    before = target.host_memory_bytes()
    assert pids_on_device(lab) == f"[{target.pid}]"
    check(lab, "--toggle", "--pid", target.pid)
    assert state(lab, target) == "checkpointed"
    assert target.host_memory_bytes() >= before + 30 * MIB
    assert pids_on_device(lab) == "[]"
    target.send("verify")
    with pytest.raises(TimeoutError):
        target.answer(limit_s=0.2)
    check(lab, "--toggle", "--pid", target.pid)
    assert target.answer() == "same"
    assert state(lab, target) == "running"
    assert pids_on_device(lab) == f"[{target.pid}]"


def test_actions_step_through_the_states(lab: Lab, target: Target) -> None:
    assert state(lab, target) == "running"
    for arguments, after in [
        (["--action", "lock", "--timeout", "5000"], "locked"),
        (["--action", "checkpoint"], "checkpointed"),
        (["--action", "restore"], "locked"),
        (["--action", "unlock"], "running"),
    ]:
        assert check(lab, *arguments, "--pid", target.pid) == ""
        assert state(lab, target) == after
    assert target.ask("verify") == "same"


def test_the_restore_thread_is_printed(lab: Lab, target: Target) -> None:
    thread = check(lab, "--get-restore-tid", "--pid", target.pid)
    assert Path(f"/proc/{target.pid}/task/{thread}").is_dir()


def test_a_device_map_moves_the_process(lab: Lab, target: Target) -> None:
    listing = "from cuda_ckpt import Driver; print(*Driver().device_uuids())"
    first, second = run_limited([sys.executable, "-c", listing], lab.environment).stdout.split()
    check(lab, "--toggle", "--pid", target.pid)
    device_map = f"{first}={second},{second}={first}"
    lab.environment["CUDA_VISIBLE_DEVICES"] = ""  # as if the caller hid all devices
    check(lab, "--action", "restore", "--device-map", device_map, "--pid", target.pid)
    del lab.environment["CUDA_VISIBLE_DEVICES"]
    assert pids_on_device(lab) == "[]"
    check(lab, "--action", "unlock", "--pid", target.pid)
    assert target.ask("verify") == "same"


def test_the_exit_status_is_the_code_of_the_driver(lab: Lab, target: Target) -> None:
    ended = run(lab, "--action", "unlock", "--pid", target.pid)
    assert ended.returncode == 401 % 256
    assert ended.stdout == ""
    assert "CUDA_ERROR_ILLEGAL_STATE 401" in ended.stderr


@pytest.mark.parametrize(
    ("code", "status"), [(None, 1), (1, 1), (3, 3), (401, 401), (256, 255), (512, 255)]
)
def test_no_error_exits_with_what_a_shell_takes_for_success(code: int | None, status: int) -> None:
    assert exit_status(code) == status
    assert exit_status(code) % 256 != 0


def test_a_process_without_cuda_exits_with_3(lab: Lab) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as plain:
        ended = run(lab, "--get-state", "--pid", plain.pid)
        plain.kill()
    assert ended.returncode == 3
    assert "NOT_INITIALIZED" in ended.stderr


def test_a_process_that_does_not_exist_exits_with_1(lab: Lab) -> None:
    ended = run(lab, "--toggle", "--pid", 2**31 - 1)
    assert ended.returncode == 1
    assert "no such process" in ended.stderr


def test_a_lock_gives_up_after_its_time_and_the_process_runs_on(lab: Lab, target: Target) -> None:
    assert target.ask("spin 1500") == "queued"
    ended = run(lab, "--action", "lock", "--timeout", 50, "--pid", target.pid)
    assert ended.returncode == 600 % 256
    assert state(lab, target) == "running"


def test_a_toggle_whose_checkpoint_fails_unlocks_the_process(lab: Lab, target: Target) -> None:
    lab.write_faults("checkpoint * 1 error:801")
    ended = run(lab, "--toggle", "--pid", target.pid)
    assert ended.returncode == 801 % 256
    assert "It was unlocked again and runs on." in ended.stderr
    assert state(lab, target) == "running"
    assert target.ask("verify") == "same"


def test_a_toggle_that_leaves_the_process_failed_says_so(lab: Lab, target: Target) -> None:
    lab.write_faults("checkpoint * 1 fail:801")
    ended = run(lab, "--toggle", "--pid", target.pid)
    assert ended.returncode == 801 % 256
    assert "The process is failed now." in ended.stderr
    assert state(lab, target) == "failed"


def test_a_toggle_of_a_locked_process_is_refused(lab: Lab, target: Target) -> None:
    check(lab, "--action", "lock", "--pid", target.pid)
    ended = run(lab, "--toggle", "--pid", target.pid)
    assert ended.returncode == 401 % 256
    assert "It is locked" in ended.stderr
    assert state(lab, target) == "locked"


def test_an_interrupt_waits_until_the_toggle_is_over(lab: Lab, target: Target) -> None:
    lab.write_faults("checkpoint * * delay:300")
    with subprocess.Popen(
        command_line("--toggle", "--pid", target.pid), env=lab.environment
    ) as process:
        wait_for_blocked_signal(process.pid, signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    assert state(lab, target) == "checkpointed"


def test_a_missing_library_exits_with_1_and_says_what_to_do(lab: Lab, target: Target) -> None:
    lab.environment["CUDA_CKPT_LIBRARY"] = "/nowhere/libcuda.so.1"
    ended = run(lab, "--get-state", "--pid", target.pid)
    assert ended.returncode == 1
    assert "/nowhere/libcuda.so.1" in ended.stderr


def test_a_driver_without_checkpoint_functions_exits_with_1(
    lab: Lab, target: Target, softcuda_build: Path
) -> None:
    lab.environment["CUDA_CKPT_LIBRARY"] = str(
        softcuda_build.parent / "softcuda-550" / "libcuda.so.1"
    )
    ended = run(lab, "--get-state", "--pid", target.pid)
    assert ended.returncode == 1
    assert "570" in ended.stderr


USAGE_ERRORS = [
    "",
    "--toggle",
    "--pid 1",
    "--toggle --pid 1 --pid 2",
    "--toggle --pid 0",
    "--toggle --pid -1",
    "--toggle --pid x",
    "--toggle --get-state --pid 1",
    "--toggle --timeout 5 --pid 1",
    "--toggle --device-map a=b --pid 1",
    "--get-state --timeout 5 --pid 1",
    "--action explode --pid 1",
    "--action lock --timeout 0 --pid 1",
    "--action lock --timeout -5 --pid 1",
    "--action lock --timeout 4294967296 --pid 1",
    "--action unlock --timeout 5 --pid 1",
    "--action unlock --device-map a=b --pid 1",
    "--action restore --device-map a --pid 1",
    "--action restore --device-map a=b=c --pid 1",
    "--action restore --device-map a=b,a=c --pid 1",
    "--action restore --device-map a=,b=c --pid 1",
    "--tog --pid 1",
    "--toggle --pid 1 surplus",
]


def test_a_wrong_command_line_exits_with_1_before_any_driver_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from cuda_ckpt.__main__ import main

    for line in USAGE_ERRORS:
        with pytest.raises(SystemExit) as caught:
            main(line.split())
        assert caught.value.code == 1, line
        captured = capsys.readouterr()
        assert captured.out == "", line
        assert captured.err.startswith("cuda-ckpt: "), line


def test_help_names_the_flags_that_other_tools_probe_for(lab: Lab) -> None:
    for flag in ("-h", "--help"):
        text = check(lab, flag)
        for option in ("--get-state", "--toggle", "--action", "--timeout", "--device-map"):
            assert option in text
        assert "lock,checkpoint,restore,unlock" in text
