"""What Slurm's records of a job are told: sums of it and its parts; what others wrote stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsliced.host.history import Fact
from tsliced.observe.remarks import put_remark, remark_of

JOB = "lab/1000/7"
LIMIT_S = 20.0


def event(at: float, kind: str, job: str | None, **facts: Fact) -> dict[str, Fact]:
    return {"at": at, "kind": kind, "level": "info", "job": job, **facts}


def held(at: float, job: str, groups: str, held_s: float) -> dict[str, Fact]:
    return event(at, "held", job, groups=groups, leases=2, ranks=1, held_s=held_s)


def test_a_job_and_its_parts_are_added_up_and_others_are_left_out() -> None:
    events = [
        event(1.0, "started", None, groups="n1,n2,n9"),
        held(10.0, JOB, "n1,n2", 4.0),
        held(20.0, f"{JOB}.sweep", "n2,n3", 2.4),
        event(22.0, "evicted", JOB, groups="n1,n2"),
        held(23.0, "lab/1000/71", "n1", 100.0),
        event(30.0, "job_ended", JOB),
    ]
    assert remark_of(events, JOB, until_unix=50.0) == (
        "tslice leases=4 switches=0 held_s=6 useful_s=6 waited_s=0 parked_s=8 groups=n1,n2,n3"
    )


def test_of_a_job_that_has_had_nothing_just_that_is_said() -> None:
    told = remark_of([], JOB, until_unix=50.0)
    assert told == "tslice leases=0 switches=0 held_s=0 useful_s=0 waited_s=0 parked_s=0"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of Slurm's commands; what is written stands in ``written``."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("scontrol", "sacctmgr"):
        command(tmp_path, name, f'echo "{name} $*" >>"{tmp_path}/written"')
    return tmp_path


def command(slurm: Path, name: str, script: str) -> None:
    (slurm / name).write_text(f"#!/bin/sh\n{script}\n")
    (slurm / name).chmod(0o755)


def put(text: str = "tslice leases=1") -> bool:
    return put_remark("7", text, lambda: LIMIT_S)


@pytest.mark.parametrize(
    ("squeue", "sacct", "written"),
    [
        ("7 7 R", "", "scontrol update JobId=7 AdminComment=tslice leases=1\n"),
        ("7 7 R tslice leases=0", "", "scontrol update JobId=7 AdminComment=tslice leases=1\n"),
        ("", "tslice x", "sacctmgr -i modify job jobid=7 set AdminComment=tslice leases=1\n"),
        ("7 7 CG", "", "sacctmgr -i modify job jobid=7 set AdminComment=tslice leases=1\n"),
    ],
    ids=["no word of anybody", "our own", "forgotten", "ending"],
)
def test_what_is_ours_is_renewed_where_it_can_be(
    slurm: Path, squeue: str, sacct: str, written: str
) -> None:
    command(slurm, "squeue", f'echo "{squeue}"')
    command(slurm, "sacct", f'echo "{sacct}"')
    assert put()
    assert (slurm / "written").read_text() == written


@pytest.mark.parametrize(
    ("squeue", "sacct"),
    [("7 7 R ask Carol", "true"), ("", "echo ask Carol"), ("", "true")],
    ids=["somebody's", "somebody's in the accounting", "in no accounting"],
)
def test_where_there_is_no_place_for_it_nothing_is_written(
    slurm: Path, squeue: str, sacct: str
) -> None:
    command(slurm, "squeue", f'echo "{squeue}"')
    command(slurm, "sacct", sacct)
    assert not put()
    assert not (slurm / "written").exists()


def test_what_stands_there_already_is_not_written_again(slurm: Path) -> None:
    command(slurm, "squeue", "echo 7 7 R tslice leases=1")
    assert put()
    assert not (slurm / "written").exists()
