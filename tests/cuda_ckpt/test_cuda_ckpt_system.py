"""``cuda_ckpt._system``: identity and death of processes, and signals that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cuda_ckpt import _system

# exit(2), which ends the calling thread only; the C library offers no name for it.
EXIT_THREAD = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
SLEEP = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_start_time_is_field_22_of_the_stat_file(child: subprocess.Popen[str]) -> None:
    with open(f"/proc/{child.pid}/stat") as file:
        assert _system.start_time(child.pid) == int(file.read().split()[21])


def test_a_command_name_with_spaces_and_parentheses_does_not_confuse() -> None:
    rename = f"open('/proc/self/comm', 'w').write(') R 1 (a'); {SLEEP}"
    with subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with open(f"/proc/{process.pid}/stat") as file:
            fields = file.read().rsplit(") R 1 (a) ", 1)[1].split()
        assert _system.start_time(process.pid) == int(fields[19])
        process.kill()


def test_a_pid_that_does_not_exist_is_dead() -> None:
    assert _system.start_time(2**31 - 1) is None


def test_a_zombie_is_dead(child: subprocess.Popen[str]) -> None:
    started = _system.start_time(child.pid)
    assert started is not None
    assert _system.is_alive(child.pid, started)
    child.kill()
    # It is not reaped here, so its entry in /proc stays.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert os.path.exists(f"/proc/{child.pid}")
    assert not _system.is_alive(child.pid, started)


def test_a_process_whose_main_thread_has_left_is_alive() -> None:
    leave = (
        "import ctypes, sys, threading\n"
        "def work():\n"
        "    print('up', flush=True)\n"
        "    sys.stdin.readline()\n"
        "threading.Thread(target=work).start()\n"
        f"ctypes.CDLL(None).syscall({EXIT_THREAD}, 0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", leave], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state = ""
        while state != "Z":  # the test's own time limit ends this
            with open(f"/proc/{process.pid}/stat") as file:
                state = file.read().rsplit(") ", 1)[1][0]
        assert _system.start_time(process.pid) is not None
        process.kill()


def test_another_start_time_is_another_process(child: subprocess.Popen[str]) -> None:
    started = _system.start_time(child.pid)
    assert started is not None
    assert not _system.is_alive(child.pid, started + 1)


def test_waiting_for_a_death_ends_with_it(child: subprocess.Popen[str]) -> None:
    started = _system.start_time(child.pid)
    assert started is not None
    child.kill()
    assert _system.dies_within(child.pid, started, limit_s=10)


def test_waiting_for_a_death_has_a_limit(child: subprocess.Popen[str]) -> None:
    started = _system.start_time(child.pid)
    assert started is not None
    assert not _system.dies_within(child.pid, started, limit_s=0.02)


def test_root_may_attach_and_a_stranger_may_not(child: subprocess.Popen[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    assert _system.may_attach(child.pid)
    ask = (
        "import os, sys; from cuda_ckpt import _system; os.setgid(65534); os.setuid(65534)\n"
        f"sys.exit(0 if _system.may_attach({child.pid}) else 42)"
    )
    assert subprocess.run([sys.executable, "-c", ask], timeout=30).returncode == 42


def test_signals_wait_until_the_end_of_the_block() -> None:
    came: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with _system.signals_blocked():
            signal.raise_signal(signal.SIGUSR1)
            assert came == []
            assert signal.SIGUSR1 in signal.sigpending()
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_signals_that_report_faults_are_never_blocked() -> None:
    with _system.signals_blocked():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT} <= mask
    assert not {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT} & mask
