"""What crosses a process boundary: pickles, forks, exits."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_daemon import LIMIT_S, FakeDaemon, state_of

from libtimeslice import LeaseState, connect
from libtimeslice.aio import AsyncTimeSlice
from libtimeslice.aio import connect as aio_connect

#: A stand-in for torch that has a CUDA context, as far as the library looks.
FAKE_TORCH = """
import sys, types
class cuda:
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    synchronize = staticmethod(lambda index: None)
    memory_reserved = staticmethod(lambda index: 0)
    empty_cache = staticmethod(lambda: None)
class _C:
    _cuda_hasPrimaryContext = staticmethod(lambda index: True)
torch = types.ModuleType("torch")
torch.cuda, torch._C = cuda, _C
sys.modules["torch"] = torch
"""


@contextmanager
def program(daemon: FakeDaemon, script: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a script in a process of its own; it finds the socket's path in sys.argv[1]."""
    with subprocess.Popen(
        # (Python 3.12 and later warn of any fork of a process with threads.)
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, str(daemon.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(daemon: FakeDaemon, script: str) -> str:
    """Runs a script to its end; it must succeed and be silent on stderr."""
    with program(daemon, script) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, err) == (0, "")
        return out


def test_a_client_pickles_as_its_configuration_with_the_job_that_was_found(
    daemon: FakeDaemon,
) -> None:
    with connect(daemon.path, groups={"trainer": ["n1"]}) as ts:
        ts.acquire("trainer")
        with pickle.loads(pickle.dumps(ts)) as copy:
            assert copy.job == ts.job == "found-out"
            assert not copy.holding
            copy.acquire("n2")
            assert daemon.last("hello")["job"] == "found-out"
            assert daemon.count("hello") == 2
    moved = pickle.loads(pickle.dumps(aio_connect(daemon.path, job="j")))
    assert isinstance(moved, AsyncTimeSlice)
    assert moved.job == "j"


def test_a_forked_child_starts_afresh_and_the_parents_lease_stands(daemon: FakeDaemon) -> None:
    script = """
import os, sys, threading
from libtimeslice import connect, LeaseState
ts = connect(sys.argv[1], job="j")
with ts.lease("n1") as lease:
    ts.on_contended(print)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert lease.state is LeaseState.LOST, lease
            assert not ts.holding
            lease.release()
            with ts.lease("n2") as mine:
                assert mine.state is LeaseState.HELD
            ts.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert lease.state is LeaseState.HELD
    assert ts.status()["groups"][0]["holder"] == "j"
    assert ts.status()["groups"][1]["holder"] is None
print("done", end="")
"""
    assert run(daemon, script) == "done"
    assert daemon.held == {}
    roles = [message["role"] for message in daemon.log if message["t"] == "hello"]
    assert roles.count("client") == 2


def test_a_child_may_fork_while_other_threads_are_in_the_library(daemon: FakeDaemon) -> None:
    script = """
import os, sys, threading
from libtimeslice import connect
ts = connect(sys.argv[1])
stop = threading.Event()
def work(group):
    while not stop.is_set():
        with ts.lease(group):
            ts.progress(step=1)
threads = [threading.Thread(target=work, args=(group,)) for group in ("n1", "n1", "n2")]
for thread in threads:
    thread.start()
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ts.status()
            ts.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
"""
    run(daemon, script)
    daemon.wait_until(lambda: not daemon.held and not daemon.connections)


def test_a_process_that_ends_says_bye(daemon: FakeDaemon) -> None:
    script = """
import sys
from libtimeslice import connect
ts = connect(sys.argv[1])
ts.acquire("n1")
ts.on_pause(lambda pause: None)
"""
    run(daemon, script)
    assert daemon.byes == 1
    assert daemon.held == {}


def test_a_process_that_is_killed_does_not(daemon: FakeDaemon) -> None:
    script = """
import os, signal, sys
from libtimeslice import connect
connect(sys.argv[1]).acquire("n1")
os.kill(os.getpid(), signal.SIGKILL)
"""
    with program(daemon, script) as process:
        assert process.wait(LIMIT_S) == -9
    daemon.wait_until(lambda: not daemon.connections)
    assert daemon.byes == 0


LEAVING = (
    FAKE_TORCH
    + """
from libtimeslice import connect
ts = connect(sys.argv[1], **options)
with ts.lease("n1", ranks=1):
    pass
print("released", flush=True)
sys.stdin.readline()
"""
)


def test_a_process_with_devices_takes_a_last_turn_and_leaves_with_it(daemon: FakeDaemon) -> None:
    with program(daemon, LEAVING.replace("**options", "last_turn_s=60")) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "released\n"
        other = daemon.steal(("n1",))
        process.stdin.write("leave\n")
        process.stdin.flush()
        daemon.wait_until(lambda: daemon.waiting)
        assert process.poll() is None
        assert 59 < daemon.last("acquire")["timeout_s"] <= 60
        daemon.give_back(other)
        assert process.wait(LIMIT_S) == 0
        daemon.wait_until(lambda: not daemon.connections)
        assert len(daemon.held) == 1, "it gave the lease back before it was gone"
        assert daemon.byes == 1, "only the first session was to end with a bye"


def test_a_parked_process_takes_the_last_turn_that_the_daemon_knows_of(
    daemon: FakeDaemon,
) -> None:
    daemon.caps, daemon.parked = ["last_turn"], True
    with program(daemon, LEAVING.replace("**options", "last_turn_s=60")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "released\n"
        other = daemon.steal(("n1",))
        assert process.stdin is not None
        process.stdin.write("leave\n")
        process.stdin.flush()
        daemon.wait_until(lambda: daemon.waiting)
        asked = daemon.last("last_turn")
        assert asked["leaving"] is True
        assert 59 < asked["timeout_s"] <= 60
        daemon.give_back(other)
        assert process.wait(LIMIT_S) == 0
        daemon.wait_until(lambda: not daemon.connections)
        assert len(daemon.held) == 1, "it gave the lease back before it was gone"
        assert daemon.count("acquire") == 1


def test_a_process_that_is_not_parked_leaves_at_once(daemon: FakeDaemon) -> None:
    daemon.caps = ["last_turn"]
    with program(daemon, LEAVING.replace("**options", "last_turn_s=60")) as process:
        process.communicate("leave\n", timeout=LIMIT_S)
        assert process.returncode == 0
    daemon.wait_until(lambda: not daemon.connections)
    assert daemon.count("last_turn") == 1
    assert daemon.byes == 2


CLOSING = {
    "blocking": """
from libtimeslice import connect
ts = connect(sys.argv[1], last_turn_s=60)
ts.status()
ts.close()
""",
    "asyncio": """
import asyncio
from libtimeslice.aio import connect
async def main():
    async with connect(sys.argv[1], last_turn_s=60) as ts:
        await ts.status()
asyncio.run(main())
""",
}


@pytest.mark.parametrize("kind", CLOSING)
def test_a_parked_process_that_closes_comes_back_and_stays_until_it_is_gone(
    daemon: FakeDaemon, kind: str
) -> None:
    daemon.caps, daemon.parked = ["last_turn"], True
    other = daemon.steal(("n1",))
    script = FAKE_TORCH + CLOSING[kind] + "print('closed', flush=True)\nsys.stdin.readline()\n"
    with program(daemon, script) as process:
        daemon.wait_until(lambda: daemon.waiting)
        assert daemon.last("last_turn")["leaving"] is False
        daemon.give_back(other)
        assert process.stdout is not None
        assert process.stdout.readline() == "closed\n"
        assert len(daemon.held) == 1
        process.communicate("leave\n", timeout=LIMIT_S)
        assert process.returncode == 0
    daemon.wait_until(lambda: not daemon.connections)
    assert len(daemon.held) == 1, "it gave the lease back before it was gone"
    assert daemon.count("last_turn") == 1


@pytest.mark.parametrize("kind", CLOSING)
def test_a_process_without_devices_closes_without_a_word_about_turns(
    daemon: FakeDaemon, kind: str
) -> None:
    daemon.caps, daemon.parked = ["last_turn"], True
    run(daemon, "import sys" + CLOSING[kind])
    assert daemon.count("last_turn") == 0


def test_a_close_that_is_interrupted_leaves_no_turn_behind(daemon: FakeDaemon) -> None:
    daemon.caps, daemon.parked = ["last_turn"], True
    daemon.steal(("n1",))
    with program(daemon, FAKE_TORCH + CLOSING["blocking"]) as process:
        daemon.wait_until(lambda: daemon.waiting)
        process.send_signal(signal.SIGINT)
        # Once in the close, and once in the exit, which asks for its own.
        daemon.wait_until(lambda: daemon.last("last_turn")["leaving"])
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == -signal.SIGINT, "as an interrupted program ends"
    daemon.wait_until(lambda: not daemon.connections)
    assert daemon.waiting == []


@pytest.mark.parametrize("option", ["last_turn_s=0.05", "last_turn_s=0"])
def test_the_last_turn_is_not_waited_for_beyond_its_limit(daemon: FakeDaemon, option: str) -> None:
    with program(daemon, LEAVING.replace("**options", option)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "released\n"
        daemon.steal(("n1",))
        process.communicate("leave\n", timeout=LIMIT_S)
        assert process.returncode == 0
    assert daemon.count("acquire") == (2 if option == "last_turn_s=0.05" else 1)


def test_a_process_that_holds_devices_at_its_end_keeps_them_until_it_is_gone(
    daemon: FakeDaemon,
) -> None:
    script = (
        FAKE_TORCH
        + """
from libtimeslice import connect
ts = connect(sys.argv[1])
ts.acquire("n1")
"""
    )
    run(daemon, script)
    daemon.wait_until(lambda: not daemon.connections)
    assert daemon.byes == 0
    assert len(daemon.held) == 1


def test_the_library_imports_neither_torch_nor_the_daemon(daemon: FakeDaemon) -> None:
    script = """
import sys
import libtimeslice, libtimeslice.aio, libtimeslice.compat
with libtimeslice.connect(sys.argv[1]) as ts, ts.lease("n1"):
    pass
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "tsliced", "numpy"}))
"""
    assert run(daemon, script) == "[]\n"


def test_leases_of_one_process_and_job_are_apart_for_two_clients(daemon: FakeDaemon) -> None:
    with connect(daemon.path) as first, connect(daemon.path) as second:
        held = first.acquire("n1")
        second.acquire("n2")
        first.close()
        daemon.wait_until(lambda: len(daemon.held) == 1)
        assert state_of(held) is LeaseState.RELEASED
        assert second.holding
