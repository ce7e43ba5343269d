"""``cuda_ckpt.process``: the parts without a driver here, and the scenarios on softcuda."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from cuda_lab import HERE, Lab, run_limited
from cuda_scenarios import CONTRACT, SOFTCUDA_ONLY

from cuda_ckpt import InvalidRequestError, Process, ProcessState, format_uuid, parse_uuid

pytest_plugins = ["cuda_ckpt_fixtures"]

RAW = bytes(range(16))
TEXT = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.mark.parametrize("name", [*CONTRACT, *SOFTCUDA_ONLY])
def test_on_softcuda(name: str, lab: Lab) -> None:
    command = [sys.executable, str(HERE / "cuda_scenarios.py"), name]
    ended = run_limited(command, lab.environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_device_map_is_refused_by_a_driver_before_580(lab: Lab) -> None:
    lab.environment["SOFTCUDA_VERSION"] = "12080"
    test_on_softcuda("a_restore_maps_devices_where_the_driver_can", lab)


HIDDEN = """
import os, sys
from cuda_ckpt import Driver, PermissionDeniedError, Process
driver = Driver()
os.setgid(65534); os.setuid(65534)
try:
    Process(int(sys.argv[1]), driver)
except PermissionDeniedError as exc:
    print(exc)
"""


def test_a_process_that_proc_hides_is_a_matter_of_permission(lab: Lab) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to mount a /proc that hides processes")
    mount = 'mount -t proc -o hidepid=1 proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", HIDDEN]
    ended = run_limited([*command, str(os.getpid())], lab.environment)
    if ended.returncode != 0 and "mount" in ended.stderr:
        pytest.skip(f"cannot mount /proc here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    assert f"cannot read /proc/{os.getpid()}/stat" in ended.stdout
    assert "CAP_SYS_PTRACE" in ended.stdout


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, ProcessState.RUNNING),
        (1, ProcessState.LOCKED),
        (2, ProcessState.CHECKPOINTED),
        (3, ProcessState.FAILED),
        (4, ProcessState.TRANSITIONAL),
        (5, ProcessState.TRANSITIONAL),
        (4_000_000_000, ProcessState.TRANSITIONAL),
    ],
)
def test_a_state_of_the_driver_has_its_word(code: int, state: ProcessState) -> None:
    assert ProcessState.from_code(code) is state


def test_a_uuid_is_written_as_nvidia_smi_prints_it_and_read_back() -> None:
    assert format_uuid(RAW) == TEXT
    assert parse_uuid(TEXT) == RAW
    assert parse_uuid(TEXT.removeprefix("GPU-").upper()) == RAW


@pytest.mark.parametrize(
    "text",
    ["", "GPU-", "0", TEXT[:-1], TEXT + "0", "MIG-" + TEXT[4:], TEXT.replace("0a", "  "), "GPU-x"],
)
def test_what_is_no_uuid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the UUID of a device"):
        parse_uuid(text)


@pytest.mark.parametrize("pid", [0, -1])
def test_a_pid_is_above_zero(pid: int) -> None:
    with pytest.raises(InvalidRequestError, match="above zero"):
        Process(pid)
