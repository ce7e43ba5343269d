"""Commands that hold a lease, as processes, against a scripted daemon."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted_daemon import ScriptedDaemon

LIMIT_S = 20.0
PYTHON = sys.executable


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDaemon]:
    monkeypatch.setenv("TSLICE_SOCKET", str(tmp_path / "socket"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TSLICE_JOB_ID", raising=False)
    with ScriptedDaemon(tmp_path / "socket") as scripted:
        yield scripted


def ctl(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    """Runs tslicectl to its end."""
    return subprocess.run(
        [PYTHON, "-m", "tsliced.ctl", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **options},
    )


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts tslicectl, with pipes, and makes sure that it ends."""
    process = subprocess.Popen(
        [PYTHON, "-m", "tsliced.ctl", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- run -------------------------------------------------------------------------------------


def test_run_passes_on_output_and_exit_code_and_releases(daemon: ScriptedDaemon) -> None:
    done = ctl("run", "--phase", "training", "--", "sh", "-c", "echo out; echo err >&2; exit 42")
    assert (done.returncode, done.stdout, done.stderr) == (42, "out\n", "err\n")
    assert daemon.wait_for("acquire")["phase"] == "training"
    assert daemon.wait_for("release")["lease"] == "L1"


def test_run_gives_its_command_job_and_token_and_makes_its_own_leases_do_nothing(
    daemon: ScriptedDaemon,
) -> None:
    program = (
        "import json, os, libtimeslice\n"
        "with libtimeslice.connect() as ts, ts.lease('trainer', timeout=1): pass\n"
        "print(json.dumps({k: os.environ.get(k) for k in"
        " ('TSLICE_JOB_ID', 'TSLICE_TOKEN', 'SPT_NOENV', 'TSLICE_SOCKET')}))"
    )
    done = ctl("run", "--group", "trainer", "--job", "mine", "--", PYTHON, "-c", program)
    assert json.loads(done.stdout) == {
        "TSLICE_JOB_ID": "mine",
        "TSLICE_TOKEN": "40",
        "SPT_NOENV": "1",
        "TSLICE_SOCKET": str(daemon.path),
    }
    assert daemon.wait_for("hello")["job"] == "mine"
    assert daemon.wait_for("acquire")["groups"] == ["trainer"]
    daemon.wait_for("release")
    assert all(message["t"] != "acquire" for message in list(daemon.seen.queue))


def test_run_names_the_group_of_each_token_when_there_are_several(daemon: ScriptedDaemon) -> None:
    done = ctl("run", "--", "sh", "-c", "echo $TSLICE_JOB_ID $TSLICE_TOKEN")
    assert done.stdout == "trainer-7 trainer=40,sampler=41\n"


def test_run_asks_alone_even_where_world_size_is_set(daemon: ScriptedDaemon) -> None:
    ctl("run", "--", "true", WORLD_SIZE="8", TSLICE_MODE="off")
    assert daemon.wait_for("acquire")["ranks"] in (None, 1)
    ctl("run", "--ranks", "8", "--", "true")
    assert daemon.wait_for("acquire")["ranks"] == 8


def test_run_says_128_and_the_signal_that_ended_its_command(daemon: ScriptedDaemon) -> None:
    assert ctl("run", "--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_run_passes_a_signal_on_and_then_releases(
    daemon: ScriptedDaemon, signum: signal.Signals
) -> None:
    program = (
        "import signal, sys, time\n"
        f"signal.signal({int(signum)}, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    with started("run", "--", PYTHON, "-c", program) as process:
        assert line_of(process) == "ready"
        process.send_signal(signum)
        assert process.wait(LIMIT_S) == 7
    daemon.wait_for("release")


def test_run_gives_up_its_place_in_the_queue_at_a_signal(daemon: ScriptedDaemon) -> None:
    daemon.busy = True
    with started("run", "--", "echo", "never") as process:
        daemon.wait_for("acquire")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert line_of(process) == ""


def test_run_starts_its_command_only_when_granted(daemon: ScriptedDaemon) -> None:
    daemon.busy = True
    with started("run", "--", "echo", "started") as process:
        daemon.wait_for("acquire")
        assert process.poll() is None
        daemon.grant_pending()
        assert line_of(process) == "started"
        assert process.wait(LIMIT_S) == 0


def test_run_exits_with_75_when_it_is_not_granted_in_time(daemon: ScriptedDaemon) -> None:
    daemon.busy = True
    done = ctl("run", "--timeout", "0.5", "--", "echo", "never")
    assert (done.returncode, done.stdout) == (75, "")
    assert "not granted in time" in done.stderr


def test_run_does_not_queue_up_for_a_command_that_cannot_start(
    daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    assert ctl("run", "--", "no-such-command-here").returncode == 127
    (tmp_path / "plain").write_text("not executable")
    assert ctl("run", "--", str(tmp_path / "plain")).returncode == 126
    assert daemon.seen.empty()


def test_run_exits_with_126_and_releases_when_the_command_turns_out_unfit(
    daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "odd").write_text("#!/no/such/interpreter\n")
    (tmp_path / "odd").chmod(0o755)
    done = ctl("run", "--", str(tmp_path / "odd"))
    assert done.returncode == 126
    assert "cannot execute" in done.stderr
    daemon.wait_for("release")


@pytest.mark.parametrize(("choice", "code"), [("keep", 3), ("kill", 128 + signal.SIGTERM)])
def test_run_says_that_its_lease_was_lost_and_keeps_or_ends_the_command(
    daemon: ScriptedDaemon, choice: str, code: int
) -> None:
    script = "echo ready; read _; exit 3"
    with started("run", "--on-lost", choice, "--", "sh", "-c", script) as process:
        assert line_of(process) == "ready"
        daemon.tell_all({"t": "lost", "lease": "L1", "reason": "the operator took it"})
        assert process.stderr is not None
        assert "the operator took it" in process.stderr.readline()
        if choice == "keep":
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.wait(LIMIT_S) == code


def test_ctrl_c_on_a_terminal_reaches_the_command_once(daemon: ScriptedDaemon) -> None:
    program = (
        "import signal, time\n"
        "count = 0\n"
        "def note(*_):\n"
        "    global count\n"
        "    count += 1\n"
        "signal.signal(signal.SIGINT, note)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1)\n"
        "print('interrupts', count, flush=True)"
    )
    terminal, stdio = os.openpty()
    process = subprocess.Popen(
        # A session whose terminal this is: what is typed there becomes a signal to its foreground.
        ["setsid", "--ctty", PYTHON, "-m", "tsliced.ctl", "run", "--", PYTHON, "-c", program],
        stdin=stdio,
        stdout=stdio,
        stderr=stdio,
    )
    os.close(stdio)
    with os.fdopen(terminal, "r+b", buffering=0) as stream, process:
        try:
            assert stream.readline().strip() == b"ready"
            stream.write(b"\x03")
            assert stream.readline().strip().endswith(b"interrupts 1")
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()


# --- acquire and release ---------------------------------------------------------------------


def test_acquire_leaves_a_holder_behind_that_release_ends(daemon: ScriptedDaemon) -> None:
    got = ctl("acquire", "--group", "trainer", "--json")
    assert got.returncode == 0, got.stderr
    grant = json.loads(got.stdout)
    holder = grant.pop("holder_pid")
    assert grant == {
        "schema": 1,
        "lease": "L1",
        "job": "trainer-7",
        "groups": ["trainer"],
        "tokens": {"trainer": 40},
        "waited_s": 0.5,
        "restored": True,
        "switch_s": 0.25,
    }
    descriptor = os.pidfd_open(holder)
    try:
        assert all(message["t"] != "release" for message in list(daemon.seen.queue))
        released = ctl("release", "L1", "--json")
        assert released.returncode == 0, released.stderr
        assert json.loads(released.stdout) == {
            "schema": 1,
            "released": "L1",
            "waiters": 0,
            "deferred": True,
        }
        assert daemon.wait_for("release")["lease"] == "L1"
        wait_until_dead(descriptor)
    finally:
        os.close(descriptor)
    assert ctl("release", "L1").returncode == 3


def wait_until_dead(pidfd: int) -> None:
    assert select.select([pidfd], [], [], LIMIT_S)[0], "the process did not end"


def test_acquire_prints_the_id_alone_so_that_a_shell_can_keep_it(daemon: ScriptedDaemon) -> None:
    daemon.waiters = 2
    got = ctl("acquire")
    assert got.stdout == "L1\n"
    released = ctl("release", got.stdout.strip())
    assert (released.returncode, released.stdout) == (0, "")
    assert "2 waited for it" in released.stderr


def test_acquire_exits_with_75_and_leaves_nothing_behind_when_not_granted_in_time(
    daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    daemon.busy = True
    got = ctl("acquire", "--timeout", "0.5", "--json")
    assert got.returncode == 75
    assert json.loads(got.stdout)["error"]["code"] == "timeout"
    assert list((tmp_path / "tslicectl").iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_acquire_that_a_signal_ends_leaves_no_holder_in_the_queue(
    daemon: ScriptedDaemon, signum: signal.Signals
) -> None:
    daemon.busy = True
    with started("acquire") as process:
        daemon.wait_for("acquire")
        process.send_signal(signum)
        assert process.wait(LIMIT_S) == 128 + signum
    assert daemon.wait_for("cancel")


def test_acquire_without_a_daemon_exits_with_69(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    got = ctl("acquire", "--socket", str(tmp_path / "none"))
    assert (got.returncode, got.stdout) == (69, "")


def test_a_lost_lease_ends_its_holder(daemon: ScriptedDaemon) -> None:
    grant = json.loads(ctl("acquire", "--json").stdout)
    descriptor = os.pidfd_open(grant["holder_pid"])
    try:
        daemon.tell_all({"t": "lost", "lease": "L1", "reason": "the operator took it"})
        wait_until_dead(descriptor)
    finally:
        os.close(descriptor)
    assert ctl("release", "L1").returncode == 3


def test_a_runtime_directory_that_others_may_open_is_refused(
    daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    (tmp_path / "tslicectl").mkdir(mode=0o755)
    (tmp_path / "tslicectl").chmod(0o755)
    got = ctl("acquire")
    assert got.returncode == 4
    assert "not a directory of yours alone" in got.stderr
    assert daemon.seen.empty()


def test_acquire_in_the_foreground_holds_until_its_input_ends(daemon: ScriptedDaemon) -> None:
    with started("acquire", "--foreground") as process:
        assert line_of(process) == "L1"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    daemon.wait_for("release")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_acquire_in_the_foreground_releases_at_a_signal(
    daemon: ScriptedDaemon, signum: signal.Signals, code: int
) -> None:
    with started("acquire", "--foreground") as process:
        assert line_of(process) == "L1"
        process.send_signal(signum)
        assert process.wait(LIMIT_S) == code
    daemon.wait_for("release")


# --- attach ----------------------------------------------------------------------------------


def test_attach_makes_a_process_a_rank_of_the_job_that_it_says_it_is_of(
    daemon: ScriptedDaemon,
) -> None:
    with subprocess.Popen(
        [PYTHON, "-c", "input()"], stdin=subprocess.PIPE, env={"TSLICE_JOB_ID": "theirs"}
    ) as rank:
        done = ctl("attach", str(rank.pid), "--group", "trainer", "--json")
        assert rank.stdin is not None
        rank.stdin.close()
    assert json.loads(done.stdout) == {
        "schema": 1,
        "job": "theirs",
        "rank": {"pid": rank.pid, "start_time": 99},
        "groups": ["trainer"],
    }
    assert daemon.wait_for("hello")["job"] == "theirs"


def test_attach_with_hold_keeps_a_lease_until_the_process_ends(daemon: ScriptedDaemon) -> None:
    with (
        subprocess.Popen([PYTHON, "-c", "input()"], stdin=subprocess.PIPE, env={}) as rank,
        started("attach", str(rank.pid), "--hold") as process,
    ):
        assert line_of(process) == "L1"
        assert daemon.wait_for("attach")["pid"] == rank.pid
        assert daemon.wait_for("hello")["job"] == f"pid-{rank.pid}"
        assert process.poll() is None
        assert rank.stdin is not None
        rank.stdin.close()
        assert process.wait(LIMIT_S) == 0
    daemon.wait_for("release")


def test_attach_to_a_process_that_is_gone_exits_with_3(daemon: ScriptedDaemon) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(LIMIT_S)
    assert ctl("attach", str(gone.pid)).returncode == 3
    daemon.refusals["attach"] = ("not_cuda", "process 1 uses no device")
    refused = ctl("attach", str(os.getpid()))
    assert (refused.returncode, refused.stderr) == (1, "tslicectl: process 1 uses no device\n")
