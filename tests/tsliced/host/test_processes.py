"""Identity, run state and death of processes, with real ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from host_trees import FakeHost

from tsliced.core.model import ProcessId
from tsliced.host.cgroups import Cgroups
from tsliced.host.processes import (
    ExitWatch,
    NotAProcessError,
    ProcessLimitError,
    RunState,
    command_name,
    environment,
    identify,
    is_alive,
    ns_pid,
    parent_chain,
    run_state,
    send_signal,
    uid_of,
)
from tsliced.host.procfs import read_stat

LIMIT_S = 20.0
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@contextlib.contextmanager
def python(code: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program that prints a line when it is ready; kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True, **options
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the program ended early"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


IDLE = "import time; print('ready'); time.sleep(60)"


def wait_for_exit(pid: int) -> None:
    """Wait until a process is dead, without reaping it."""
    pidfd = os.pidfd_open(pid)
    try:
        assert select.select([pidfd], [], [], LIMIT_S)[0], "it lives on"
    finally:
        os.close(pidfd)


def zombie_child() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(["true"])
    wait_for_exit(child.pid)
    return child


def in_child(function: Callable[[], bool]) -> bool:
    """Return what a function returns in a forked child, which may give up its rights there."""
    pid = os.fork()
    if pid == 0:
        status = 2
        with contextlib.suppress(BaseException):
            status = 0 if function() else 1
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 1), "the child failed"
    return status == 0


def start_time_by_psutil(pid: int) -> int:
    since_boot_s = psutil.Process(pid).create_time() - psutil.boot_time()
    return round(since_boot_s * os.sysconf("SC_CLK_TCK"))


def test_a_process_is_its_pid_and_start_time() -> None:
    process = identify(os.getpid())
    assert process is not None
    assert process == ProcessId(os.getpid(), start_time_by_psutil(os.getpid()))
    assert is_alive(process)
    assert not is_alive(ProcessId(process.pid, process.start_time + 1))


def test_a_signal_reaches_this_very_process_and_no_other() -> None:
    with python(IDLE) as child:
        process = identify(child.pid)
        assert process is not None
        assert not send_signal(ProcessId(child.pid, process.start_time - 1), signal.SIGKILL)
        assert child.poll() is None
        assert send_signal(process, signal.SIGTERM)
        assert child.wait(LIMIT_S) == -signal.SIGTERM
        assert not send_signal(process, signal.SIGTERM)


def test_a_name_with_parentheses_and_blanks_does_not_confuse_the_fields() -> None:
    code = "open('/proc/self/comm', 'w').write('x) Z 9 (y'); " + IDLE
    with python(code) as child:
        stat = read_stat(child.pid)
        assert stat is not None
        assert (stat.name, stat.parent) == ("x) Z 9 (y", os.getpid())
        assert command_name(child.pid) == "x) Z 9 (y"
        assert stat.start_time == start_time_by_psutil(child.pid)


def test_a_zombie_is_dead() -> None:
    child = zombie_child()
    try:
        os.kill(child.pid, 0)  # still there for those who ask so
        assert identify(child.pid) is None
        assert run_state(child.pid) is RunState.ZOMBIE
    finally:
        child.wait(timeout=LIMIT_S)
    assert run_state(child.pid) is RunState.GONE
    assert identify(child.pid) is None


def test_a_process_whose_first_thread_ended_lives_on() -> None:
    code = """
import ctypes, threading, time
def work():
    while open('/proc/self/stat').read().rpartition(') ')[2][0] != 'Z':
        time.sleep(0.005)
    print('ready')
    time.sleep(60)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60, 0)
"""
    with python(code) as child:
        stat = read_stat(child.pid)
        assert stat is not None
        assert stat.state == "Z"
        assert identify(child.pid) is not None
        assert run_state(child.pid) is RunState.RUNNING


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    with python(IDLE) as child:
        assert run_state(child.pid) is RunState.RUNNING
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert run_state(child.pid) is RunState.STOPPED
        assert identify(child.pid) is not None
        child.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert run_state(child.pid) is RunState.RUNNING


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("R", RunState.RUNNING),
        ("S", RunState.RUNNING),
        ("D", RunState.RUNNING),
        ("T", RunState.STOPPED),
        ("t", RunState.STOPPED),
        ("Z", RunState.ZOMBIE),
        ("X", RunState.ZOMBIE),
    ],
)
def test_each_letter_of_the_kernel_has_its_meaning(
    tmp_path: Path, state: str, expected: RunState
) -> None:
    host = FakeHost(tmp_path)
    host.process(7, state=state)
    assert run_state(7, cgroups=Cgroups(host.proc)) is expected


@contextlib.contextmanager
def real_cgroup(controller: str) -> Iterator[Path]:
    """Make a cgroup in a hierarchy of this host, or skip the test."""
    mount = Cgroups().directory(controller, "/")
    if mount is None or not os.access(mount, os.W_OK):
        pytest.skip(f"no writable {controller or 'version 2'} cgroup hierarchy here")
    directory = Path(mount, f"tsliced-test-{os.getpid()}")
    directory.mkdir()
    try:
        yield directory
    finally:
        directory.rmdir()


@needs_root
def test_a_process_in_a_frozen_version_2_cgroup_is_frozen() -> None:
    with real_cgroup("") as directory:
        if not (directory / "cgroup.freeze").exists():
            pytest.skip("this kernel has no version 2 freezer")
        below = directory / "below"
        below.mkdir()
        with python(IDLE) as child:
            (below / "cgroup.procs").write_text(str(child.pid))
            assert run_state(child.pid) is RunState.RUNNING
            (directory / "cgroup.freeze").write_text("1")
            assert run_state(child.pid) is RunState.FROZEN
            (directory / "cgroup.freeze").write_text("0")
            assert run_state(child.pid) is RunState.RUNNING
        below.rmdir()


@needs_root
def test_a_process_in_a_frozen_version_1_cgroup_is_frozen() -> None:
    with real_cgroup("freezer") as directory:
        below = directory / "below"
        below.mkdir()
        with python(IDLE) as child:
            (below / "cgroup.procs").write_text(str(child.pid))
            assert run_state(child.pid) is RunState.RUNNING
            (directory / "freezer.state").write_text("FROZEN")
            try:
                assert run_state(child.pid) is RunState.FROZEN
            finally:
                (directory / "freezer.state").write_text("THAWED")
            assert run_state(child.pid) is RunState.RUNNING
        below.rmdir()


def test_a_freeze_of_any_ancestor_counts_before_it_is_complete(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    point = host.mount("")
    host.cgroup(point / "a/b", cgroup_freeze=0, cgroup_events="populated 1\nfrozen 0")
    host.cgroup(point / "a", cgroup_freeze=1, cgroup_events="populated 1\nfrozen 0")
    host.process(7, cgroups="0::/a/b\n")
    assert run_state(7, cgroups=Cgroups(host.proc)) is RunState.FROZEN
    host.cgroup(point / "a", cgroup_freeze=0)
    assert run_state(7, cgroups=Cgroups(host.proc)) is RunState.RUNNING


@pytest.mark.parametrize(
    ("state", "expected"),
    [("THAWED", RunState.RUNNING), ("FREEZING", RunState.FROZEN), ("FROZEN", RunState.FROZEN)],
)
def test_a_version_1_freezer_counts_while_it_freezes(
    tmp_path: Path, state: str, expected: RunState
) -> None:
    host = FakeHost(tmp_path)
    host.cgroup(host.mount("freezer") / "job", freezer_state=state)
    host.process(7, state="D", cgroups="3:freezer:/job\n0::/\n")
    assert run_state(7, cgroups=Cgroups(host.proc)) is expected


def test_the_chain_of_parents_leads_to_the_first_process() -> None:
    code = (
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c',"
        "'import os; print(os.getpid(), flush=True); input()'], text=True).returncode)"
    )
    with python(code, stdin=subprocess.PIPE) as child:
        grandchild = psutil.Process(child.pid).children()[0].pid
        chain = parent_chain(grandchild)
        assert [process.pid for process in chain[:2]] == [child.pid, os.getpid()]
        assert chain[0] == identify(child.pid)
        assert [process.pid for process in chain] == [
            process.pid for process in psutil.Process(grandchild).parents()
        ]


def test_the_environment_is_the_one_that_the_process_was_started_with() -> None:
    code = "import os; os.environ['LATER'] = '1'; " + IDLE
    with python(code, env={"A": "1", "B": "x=y", "EMPTY": ""}) as child:
        values = environment(child.pid)
        assert values is not None
        assert {"A": "1", "B": "x=y", "EMPTY": ""}.items() <= values.items()
        assert "LATER" not in values


def test_a_long_environment_is_read_to_its_end() -> None:
    long = {name: name * 100_000 for name in "ABC"}
    with python(IDLE, env={**long, "LAST": "1"}) as child:
        values = environment(child.pid)
        assert values is not None
        assert {**long, "LAST": "1"}.items() <= values.items()


def test_an_environment_that_setproctitle_overwrote_holds_nothing() -> None:
    code = "import setproctitle; setproctitle.setproctitle('ray::' + 'x' * 4000); " + IDLE
    with python(code, env={"TSLICE_JOB_ID": "a"}) as child:
        values = environment(child.pid)
        assert values is not None
        assert "TSLICE_JOB_ID" not in values


@needs_root
def test_an_environment_that_may_not_be_read_is_unknown_and_not_empty() -> None:
    with python(IDLE) as child:

        def is_unknown() -> bool:
            os.setresuid(65534, 65534, 65534)
            return environment(child.pid) is None

        assert in_child(is_unknown)
        assert environment(child.pid) is not None
    assert environment(child.pid) is None


@needs_root
def test_the_uid_is_the_real_one() -> None:
    def differs() -> bool:
        os.setresuid(1234, 65534, 65534)
        return uid_of(os.getpid()) == 1234 and os.stat("/proc/self").st_uid != 1234

    assert in_child(differs)
    assert uid_of(os.getpid()) == os.getuid()


@needs_root
def test_a_process_in_a_container_knows_itself_by_another_pid() -> None:
    with python(
        "import subprocess; subprocess.run(['unshare', '--pid', '--fork', 'sh', '-c', "
        "'echo ready; sleep 60'])"
    ) as child:
        inner = psutil.Process(child.pid).children(recursive=True)
        shell = next(process for process in inner if process.name() == "sh")
        try:
            assert ns_pid(shell.pid) == 1
        finally:
            for process in inner:
                # With the first of a name space all others in it end.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    assert ns_pid(os.getpid()) == os.getpid()


def test_nobody_has_a_pid_that_cannot_be() -> None:
    for pid in (-1, 0, 1 << 40):
        assert identify(pid) is None
        assert uid_of(pid) is None
        assert environment(pid) is None
        assert parent_chain(pid) == ()


def test_running_out_of_descriptors_is_not_taken_for_a_death() -> None:
    process = identify(os.getpid())
    assert process is not None
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        is_alive(process)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/dev/null", os.O_RDONLY)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    gaps: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                gaps.append(os.dup(spare))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in [*gaps, spare]:
            os.close(descriptor)


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class Deaths:
    """Collects what an `ExitWatch` reports."""

    def __init__(self) -> None:
        self.seen: list[ProcessId] = []
        self._more = asyncio.Event()

    def add(self, process: ProcessId) -> None:
        self.seen.append(process)
        self._more.set()

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.seen) < count:
                self._more.clear()
                await self._more.wait()


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], test: Coroutine[Any, Any, None]) -> None:
    failures: list[object] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(lambda _loop, context: failures.append(context))
        runner.run(test)
    assert failures == []


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@LOOPS
def test_a_killed_process_is_reported_once_before_it_is_reaped(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def check() -> None:
        deaths = Deaths()
        watch = ExitWatch(asyncio.get_running_loop(), deaths.add)
        with python(IDLE) as child, python(IDLE) as other:
            process, bystander = identify(child.pid), identify(other.pid)
            assert process is not None
            assert bystander is not None
            watch.add(process)
            watch.add(process)
            watch.add(bystander)
            assert len(watch) == 2
            child.kill()
            await deaths.wait(1)
            assert process not in watch
            assert bystander in watch
            await asyncio.sleep(0)
            assert deaths.seen == [process]
            watch.close()

    run(new_loop, check())


@LOOPS
def test_the_dead_and_those_whose_pid_was_reused_are_reported_after_add_returned(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def check() -> None:
        deaths = Deaths()
        watch = ExitWatch(asyncio.get_running_loop(), deaths.add)
        me = identify(os.getpid())
        assert me is not None
        child = zombie_child()
        stat = read_stat(child.pid)
        assert stat is not None
        zombie = ProcessId(child.pid, stat.start_time)
        watch.add(zombie)
        child.wait(timeout=LIMIT_S)
        gone = ProcessId(child.pid, stat.start_time + 1)
        predecessor = ProcessId(me.pid, me.start_time - 1)
        watch.add(gone)
        watch.add(predecessor)
        assert deaths.seen == []
        await deaths.wait(3)
        assert sorted(deaths.seen) == sorted([zombie, gone, predecessor])
        assert len(watch) == 0

    run(new_loop, check())


@LOOPS
def test_nothing_is_reported_after_discard_or_close_and_no_descriptor_is_left(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def check() -> None:
        deaths = Deaths()
        loop = asyncio.get_running_loop()
        watch = ExitWatch(loop, deaths.add)
        with python(IDLE) as child, python(IDLE) as other:
            processes = [identify(child.pid), identify(other.pid), ProcessId(1 << 21, 1)]
            before = open_descriptors()
            for process in processes:
                assert process is not None
                watch.add(process)
            assert len(open_descriptors() - before) == 2
            watch.discard(ProcessId(1 << 21, 1))
            first = processes[0]
            assert first is not None
            watch.discard(first)
            watch.discard(first)
            watch.close()
            assert open_descriptors() == before
            child.kill()
            other.kill()
            wait_for_exit(child.pid)
            wait_for_exit(other.pid)
            witness = ExitWatch(loop, deaths.add)
            witness.add(first)
            await deaths.wait(1)
            assert deaths.seen == [first]

    run(new_loop, check())


def test_more_processes_than_the_limit_are_refused_with_the_limit() -> None:
    async def check() -> None:
        watch = ExitWatch(asyncio.get_running_loop(), lambda _process: None, limit=1)
        with python(IDLE) as child:
            me, process = identify(os.getpid()), identify(child.pid)
            assert me is not None
            assert process is not None
            watch.add(me)
            with pytest.raises(ProcessLimitError, match="1 processes are watched") as caught:
                watch.add(process)
            assert caught.value.limit == 1
            watch.discard(me)
            watch.add(process)
        watch.close()

    asyncio.run(check())


def test_a_watch_without_descriptors_says_what_to_raise() -> None:
    async def check() -> None:
        watch = ExitWatch(asyncio.get_running_loop(), lambda _process: None)
        me = identify(os.getpid())
        assert me is not None
        with no_descriptor_left(), pytest.raises(ProcessLimitError, match="LimitNOFILE"):
            watch.add(me)
        assert len(watch) == 0

    asyncio.run(check())


def test_a_thread_is_no_process() -> None:
    started, done = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        done.wait(LIMIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(LIMIT_S)

    async def check() -> None:
        watch = ExitWatch(asyncio.get_running_loop(), lambda _process: None)
        with pytest.raises(NotAProcessError, match="is a thread"):
            watch.add(ProcessId(thread.native_id or 0, 1))

    try:
        asyncio.run(check())
    finally:
        done.set()
        thread.join()
