"""How far moves have come, by what the kernel counts and by the pace of earlier ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from host_trees import FakeHost

from tsliced.core.model import ProcessId, Verb
from tsliced.host.moves import Moves, Progress

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
TARGET = ProcessId(7, 700)


class Machine:
    """A clock, and a process whose memory a test sets."""

    def __init__(self, root: Path) -> None:
        self.now = 100.0
        self.tree = FakeHost(root)
        self.moves = Moves(clock=lambda: self.now, proc=self.tree.proc)
        self.set_resident(50 * MIB)

    def set_resident(self, count: int) -> None:
        self.tree.write(f"proc/{TARGET.pid}/statm", f"999 {count // PAGE} 1 1 0 1 0\n")

    def progress(self) -> Progress:
        found = self.moves.of(TARGET)
        assert found is not None
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_its_target_grew_by_is_what_a_snapshot_has_saved(machine: Machine) -> None:
    machine.moves.begin(TARGET, Verb.SNAPSHOT, 100 * MIB)
    assert machine.moves
    machine.now += 2.0
    machine.set_resident(90 * MIB)
    found = machine.progress()
    assert (found.done_bytes, found.total_bytes) == (40 * MIB, 100 * MIB)
    assert found.bytes_per_s == 20 * MIB
    assert found.measured
    machine.moves.end(TARGET)
    assert not machine.moves
    assert machine.moves.of(TARGET) is None


def test_where_nothing_shows_the_pace_of_earlier_moves_has_to_do(machine: Machine) -> None:
    machine.moves.begin(TARGET, Verb.RESTORE, 100 * MIB)
    machine.now += 2.0
    assert machine.progress().bytes_per_s is None
    assert machine.progress().done_bytes == 0
    machine.moves.learn(Verb.RESTORE, 60 * MIB, 2.0)
    machine.moves.learn(Verb.SNAPSHOT, 60 * MIB, 60.0)
    found = machine.progress()
    assert (found.done_bytes, found.bytes_per_s) == (60 * MIB, 30 * MIB)
    assert not found.measured
    machine.now += 100.0
    assert machine.progress().done_bytes == 99 * MIB, "what is not over is not all"
    machine.moves.end(TARGET)


def test_what_others_of_its_kind_took_counts_before_what_anybody_took(machine: Machine) -> None:
    machine.moves.learn(Verb.SNAPSHOT, 100 * MIB, 1.0)
    machine.moves.begin(TARGET, Verb.SNAPSHOT, 100 * MIB, 20.0)
    machine.now += 2.0
    found = machine.progress()
    assert (found.done_bytes, found.bytes_per_s) == (10 * MIB, 5 * MIB)
    assert not found.measured
    machine.set_resident(90 * MIB)
    assert machine.progress().measured, "what is seen counts before both"
    machine.moves.end(TARGET)


def test_what_shrinks_is_a_restore(machine: Machine) -> None:
    machine.moves.begin(TARGET, Verb.RESTORE, 40 * MIB)
    machine.now += 1.0
    machine.set_resident(20 * MIB)
    assert machine.progress().done_bytes == 30 * MIB
    machine.moves.end(TARGET)


def test_the_latest_move_counts_as_much_as_all_before_it(machine: Machine) -> None:
    machine.moves.learn(Verb.SNAPSHOT, 10 * MIB, 1.0)
    machine.moves.learn(Verb.SNAPSHOT, 30 * MIB, 1.0)
    machine.moves.learn(Verb.SNAPSHOT, 100, 1.0)
    machine.moves.learn(Verb.FREEZE, 10 * MIB, 1.0)
    assert machine.moves.paces == {Verb.SNAPSHOT: 20 * MIB}


def test_paces_are_recalled_from_the_history(machine: Machine) -> None:
    good = {"kind": "operation", "verb": "restore", "bytes": 8 * MIB, "seconds": 2.0}
    machine.moves.recall(
        [
            {"kind": "granted"},
            {**good, "reason": None},
            {**good, "bytes": 800 * MIB, "reason": "it failed"},
            {"kind": "operation", "verb": "thaw", "bytes": 0, "seconds": 0.1, "reason": None},
        ]
    )
    assert machine.moves.paces == {Verb.RESTORE: 4 * MIB}


def test_only_what_moves_bytes_is_followed_and_a_process_that_is_gone_is_no_trouble(
    machine: Machine,
) -> None:
    machine.moves.begin(TARGET, Verb.FREEZE, MIB)
    assert machine.moves.of(TARGET) is None
    machine.moves.end(TARGET)
    machine.moves.begin(ProcessId(8, 1), Verb.SNAPSHOT, MIB)
    machine.now += 1.0
    gone = machine.moves.of(ProcessId(8, 1))
    assert gone is not None
    assert gone.done_bytes == 0
    machine.moves.end(ProcessId(8, 1))
