"""A short form of `make fuzz`, and that it finds what it is there to find."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import file_targets
import fuzz
import pytest
from fuzz import HERE, Growth, Inputs, LeakError, Run, fuzz_readers, mutate, opened_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation import Mutator

import libtimeslice.protocol
from libtimeslice.protocol import Message, Request
from tsliced.core.actions import ConfirmCancel
from tsliced.core.events import CancelRequested
from tsliced.core.leasing import Leasing
from tsliced.net import replies
from tsliced.net.connection import Connection
from tsliced.net.server import Server

FRAMES = 20_000
MOST_RUNS = 8
#: What the short form must have brought about at least, or it is no fuzzing of sessions.
REACHED = {
    *("acquire", "acquire contended", "acquire timeout", "release", "cancel cancelled"),
    *("welcome", "welcome resumed", "welcome resumed leases", "contended"),
    *("error bad_frame", "error bad_request", "acquire bad_request", "release unknown_lease"),
}
#: Enough for a mistake that any session brings about.
FEW = 4000


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with opened_run(tmp_path, FRAMES, None) as run:
        yield run


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=400))
def test_whatever_clients_do_nothing_of_them_is_left_g9(run: Run, data: bytes) -> None:
    run.one(data)


def test_many_frames_break_nothing_and_leave_nothing_behind_g9(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    reached: set[str] = set()
    # One run in four misses one of those that only a few of its inputs bring about.
    for more in range(MOST_RUNS):
        with opened_run(tmp_path / str(more), FRAMES, None) as run:
            mutate(run, seed + more)
            assert run.frames >= FRAMES
            reached |= run.behaviours
        if reached >= REACHED:
            return
    raise AssertionError(f"never reached: {REACHED - reached}")


def test_whatever_is_in_files_or_said_by_other_hosts_its_readers_say_so_g8(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    outcomes = fuzz_readers(tmp_path, seed, 1500)
    assert {"JournalCode.CORRUPT", "9 records", "OpRecord", "refused"} & set(outcomes)
    assert set(outcomes) >= {"Order", "Report", "Presence", "refused: bad_message"}


def test_a_log_whose_checksums_are_put_right_is_looked_into(tmp_path: Path) -> None:
    whole = file_targets.whole_log(tmp_path)
    assert file_targets.with_checksums(whole) == whole
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    repaired = file_targets.with_checksums(bytes(damaged))
    assert repaired[-1] == damaged[-1]
    assert repaired != bytes(damaged)


# --- it can fail


def plant_lost_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "on_closed", lambda _server, _connection: None)


def plant_exception(patch: pytest.MonkeyPatch) -> None:
    def parse(message: Message) -> Request:
        if message.get("t") == "queue":
            raise ValueError("planted")
        return libtimeslice.protocol.parse_untrusted(message)

    patch.setattr("tsliced.net.connection.parse_untrusted", parse)


def plant_internal_error(patch: pytest.MonkeyPatch) -> None:
    def confirm(action: Any) -> Message:
        return {"re": action.request, "err": {"code": "internal", "message": "planted"}}

    patch.setitem(replies.MESSAGES, ConfirmCancel, confirm)


def plant_broken_core(patch: pytest.MonkeyPatch) -> None:
    def cancel(_leasing: Leasing, _event: CancelRequested) -> None:
        raise AssertionError("planted")

    name = next(name for name in vars(Leasing) if "cancel" in name)
    patch.setattr(Leasing, name, cancel)


def plant_half_frame(patch: pytest.MonkeyPatch) -> None:
    def refuse(connection: Connection, code: str, text: str) -> None:
        assert connection._transport is not None
        connection._transport.write(b"\0\0\0\1\xc1")
        connection.close()

    patch.setattr(Connection, "refuse", refuse)


@pytest.mark.parametrize(
    "plant",
    [
        *(plant_lost_connection, plant_exception, plant_internal_error),
        *(plant_broken_core, plant_half_frame),
    ],
)
def test_a_planted_mistake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    monkeypatch.setattr("server_target.LIMIT_S", 0.5)
    plant(monkeypatch)
    run = Run(tmp_path / "servers", FEW, None, Inputs(tmp_path / "inputs"))
    run.open()
    try:
        with pytest.raises(BaseException, match=r".*") as found:
            mutate(run, 1)
        assert not isinstance(found.value, KeyboardInterrupt)
    finally:
        run.abandon()
    last = list(Inputs.read(tmp_path / "inputs"))
    assert 0 < len(last) <= fuzz.INPUTS_PER_SERVER


def test_objects_and_bytes_that_are_left_behind_are_noticed() -> None:
    growth = Growth()
    growth.look(0, 1000)
    growth.look(500, 1000)
    kept = [[number] for number in range(2 * fuzz.GROWTH_OBJECTS)]
    with pytest.raises(LeakError, match="objects"):
        growth.look(600, 1000)
    del kept
    growth.look(700, 1000)
    block = bytearray(2 * fuzz.GROWTH_BYTES)
    for page in range(0, len(block), 4096):
        block[page] = 1
    with pytest.raises(LeakError, match="MiB"):
        growth.look(800, 1000)


def test_the_same_seed_makes_the_same_inputs() -> None:
    first, second = (Mutator(5) for _ in range(2))
    for number in range(100):
        data = first.next()
        assert second.next() == data
        if number % 7 == 0:
            first.keep(data)
            second.keep(data)


# --- as a program


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_it_runs_as_a_program_and_its_inputs_can_be_run_again(tmp_path: Path) -> None:
    options = ("--engine", "mutation", "--directory", tmp_path)
    done = program("--frames", 500, "--seed", 7, *options)
    assert done.returncode == 0, done.stderr
    assert "seed 7" in done.stdout
    kept = tmp_path / "kept"
    (tmp_path / "inputs").rename(kept)
    again = program("--replay", kept, *options)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "inputs").read_bytes() == kept.read_bytes()


def test_an_input_that_never_ends_is_ended_with_a_traceback(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import conftest, fuzz
sys.path.insert(0, {str(HERE.parent / "golden")!r})
from pathlib import Path
fuzz.HANG_S = 0.5
import server_target
def hang(self, choices):
    while True:
        pass
server_target.ServerTarget._step = hang
with fuzz.opened_run(Path(sys.argv[1]), 10, None) as run:
    fuzz.mutate(run, 1)
"""
    hung = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert hung.returncode == 1
    assert "Timeout" in hung.stderr
    assert "hang" in hung.stderr
    assert len(list(Inputs.read(tmp_path / "inputs"))) == 1


def test_with_atheris_the_inputs_are_guided_by_coverage(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is installed by make fuzz")
    done = program("--engine", "atheris", "--frames", 500, "--directory", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "frames in" in done.stdout
