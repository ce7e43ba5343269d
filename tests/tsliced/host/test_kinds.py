"""Kinds of ranks: what is kept of them, for how long, and what makes two ranks of one kind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from host_trees import FakeHost

from tsliced.core.model import ProcessId, Verb
from tsliced.host import kinds
from tsliced.host.kinds import FAILURE_S, Kinds, Measured, name_of, shape_of
from tsliced.host.processes import identify

TRIP = Measured(way="cuda", before_bytes=1000, out_bytes=500, out_s=4.0, in_s=2.0, back_bytes=1000)


class Clock:
    """The clock on the wall, which a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_a_trip_takes_goes_by_what_there_is_to_move() -> None:
    assert TRIP.switch_s(2000) == 12.0
    assert TRIP.switch_s(0) == 6.0, "where nobody counts it is as much as then"
    assert TRIP.step_s(Verb.SNAPSHOT, 2000) == 8.0
    assert TRIP.step_s(Verb.RESTORE, 1000) == 4.0, "of what was moved out"
    assert TRIP.step_s(Verb.FREEZE, 1000) is None
    assert Measured(out_s=1.0).switch_s(10) is None
    assert Measured().step_s(Verb.RESTORE, 10) is None


@pytest.mark.parametrize(
    ("back_bytes", "is_whole"), [(1000, True), (901, True), (899, False), (None, True)]
)
def test_who_comes_back_with_less_is_not_whole(back_bytes: int | None, is_whole: bool) -> None:
    assert replace(TRIP, back_bytes=back_bytes).is_whole is is_whole


def test_a_kind_that_came_back_is_known_and_after_a_restart_too(tmp_path: Path) -> None:
    path = tmp_path / "kinds.json"
    first = Kinds(path)
    assert (first.get("k"), first.get(None)) == (None, None)
    first.keep("k", "python train.py", TRIP)
    for of in (first, Kinds(path)):
        found = of.get("k")
        assert found is not None
        assert (found.measured, found.failure) == (TRIP, None)
    assert json.loads(path.read_text())["k"]["program"] == "python train.py"


def test_that_a_kind_could_not_come_back_is_believed_for_a_day_or_until_one_does(
    tmp_path: Path,
) -> None:
    clock = Clock()
    of = Kinds(tmp_path / "kinds.json", clock=clock)
    of.keep("k", "p", TRIP)
    of.keep_failure("k", "p", "801")
    of.keep_failure("new", "p", "801")
    again = Kinds(tmp_path / "kinds.json", clock=clock)
    failed, new = again.get("k"), again.get("new")
    assert failed is not None
    assert new is not None
    assert (failed.failure, failed.measured) == ("801", TRIP), "what is known stays known"
    assert (new.failure, new.measured) == ("801", Measured())
    clock.now += FAILURE_S + 1
    assert again.get("k") is None, "it is tried anew"
    clock.now -= FAILURE_S
    again.keep("k", "p", TRIP)
    mended = again.get("k")
    assert mended is not None
    assert mended.failure is None


def test_figures_are_always_of_the_latest_and_written_when_they_differ_much(tmp_path: Path) -> None:
    path = tmp_path / "kinds.json"
    of = Kinds(path)

    def keep(out_s: float) -> tuple[float | None, float]:
        of.keep("k", "p", replace(TRIP, out_s=out_s))
        found = of.get("k")
        assert found is not None
        return found.measured.out_s, json.loads(path.read_text())["k"]["out_s"]

    assert keep(4.0) == (4.0, 4.0)
    assert keep(5.0) == (5.0, 4.0)
    assert keep(7.0) == (7.0, 7.0)
    of.keep("k", "p", replace(TRIP, way="torch+cuda"))
    assert json.loads(path.read_text())["k"]["way"] == "torch+cuda"


def test_the_kinds_that_were_not_seen_for_longest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "MAX_KINDS", 2)
    of = Kinds(tmp_path / "kinds.json")
    for name in ("a", "b", "a", "c"):
        of.keep(name, "p", TRIP)
    assert [name for name in "abc" if of.get(name)] == ["a", "c"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"k": 1}', '{"k": {"program": "p"}}', "figures"],
    ids=["empty", "a list", "no entry", "too little", "no figures"],
)
def test_a_file_that_makes_no_sense_is_one_that_is_not_there(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kinds.json"
    if content == "figures":
        Kinds(path).keep("k", "p", TRIP)
        content = path.read_text().replace("4.0", '"4.0"')
    path.write_text(content)
    of = Kinds(path)
    assert of.get("k") is None
    of.keep("k", "p", TRIP)
    assert Kinds(path).get("k") is not None


def test_without_room_on_the_disk_it_is_known_until_the_daemon_ends(tmp_path: Path) -> None:
    of = Kinds(tmp_path / "missing" / "kinds.json")
    of.keep("k", "p", TRIP)
    assert of.get("k") is not None


# ---- what makes a kind


def shape(tmp_path: Path, command: str = "python3 train.py --lr 1", environ: str = "A=1") -> object:
    tree = FakeHost(tmp_path)
    tree.write("proc/7/cmdline", command.replace(" ", "\0"))
    tree.write("proc/7/environ", environ.replace(" ", "\0"))
    tree.write("proc/7/status", "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n")
    return shape_of(ProcessId(7, 1), proc=tree.proc)


def test_a_program_with_other_arguments_is_of_the_same_kind(tmp_path: Path) -> None:
    usual = shape(tmp_path)
    assert usual == ("python train.py", "1000", "")
    assert shape(tmp_path, "python3 train.py --lr 2") == usual
    assert shape(tmp_path, environ="HOME=/root") == usual


@pytest.mark.parametrize(
    "how",
    [
        {"command": "python3 other.py"},
        {"environ": "WORLD_SIZE=2"},
        {"environ": "SLURM_NTASKS=2"},
        {"environ": "NCCL_NVLS_ENABLE=0"},
        {"environ": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"},
        {"environ": "CUDA_MPS_PIPE_DIRECTORY=/p"},
    ],
    ids=lambda how: next(iter(how.values())),
)
def test_what_decides_whether_it_can_be_moved_makes_it_another_kind(
    tmp_path: Path, how: dict[str, str]
) -> None:
    assert shape(tmp_path, **how) != shape(tmp_path)


def test_of_a_process_that_does_not_say_what_it_runs_nothing_is_known(tmp_path: Path) -> None:
    assert shape(tmp_path, command="") == ()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identify(process.pid)
        assert identity is not None
        assert shape_of(identity)[0].startswith("python")
        process.kill()
    assert shape_of(identity) == ()


def test_names_of_kinds_differ_with_each_word_and_where_one_ends() -> None:
    assert name_of("a", "b") == name_of("a", "b")
    assert len({name_of("a", "b"), name_of("ab"), name_of("a", "b", ""), name_of("\udcff")}) == 4
