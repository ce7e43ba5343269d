"""What Slurm's commands say, as far as it is not seen on a real Slurm (tests/slurm).

Programs stand in for them here: what they print and how they fail is up to the test.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tsliced.host.slurm import (
    JobFacts,
    Remark,
    SlurmError,
    ask_job,
    ask_remark,
    ask_stored_remark,
    expand_hosts,
    list_steps,
    write_remark,
    write_stored_remark,
)

LIMIT_S = 20.0


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the commands."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def command(slurm: Path, name: str, script: str) -> None:
    """Let a command be a script."""
    (slurm / name).write_text(f"#!/bin/sh\n{script}\n")
    (slurm / name).chmod(0o755)


def test_a_job_is_told_with_what_its_user_cannot_choose(slurm: Path) -> None:
    line = "7|7|1000|n[1-2]|2026-11-30T10:00:00|gres:tslice:2|rl"
    command(slurm, "squeue", f"echo '{line}'")
    (fact,) = ask_job("7", limit_s=LIMIT_S)
    ends_at = time.mktime((2026, 11, 30, 10, 0, 0, 0, 0, -1))
    assert fact == JobFacts(
        id="7",
        leader="7",
        uid=1000,
        nodes="n[1-2]",
        account="rl",
        tickets=2,
        ends_at_unix=ends_at,
    )


def test_an_account_may_hold_what_separates_and_all_may_be_missing(slurm: Path) -> None:
    command(
        slurm, "squeue", "echo '7|3_4|1000|n1|NONE|N/A|r|l'; echo '8|8|0||N/A|gres:gpu:1|(null)'"
    )
    first, second = ask_job("7", limit_s=LIMIT_S)
    assert (first.account, first.leader, first.tickets, first.ends_at_unix) == (
        "r|l",
        "7",
        None,
        None,
    )
    assert (second.account, second.tickets, second.nodes) == (None, None, "")


@pytest.mark.parametrize(
    ("text", "tickets"),
    [
        ("gres:tslice", 1),
        ("gres:gpu:2,gres:tslice:3", 3),
        ("gres/tslice:1", 1),
        ("gres:mytslice:2", None),
    ],
)
def test_tickets_are_told_apart_from_other_resources(
    slurm: Path, text: str, tickets: int | None
) -> None:
    command(slurm, "squeue", f"echo '7|7|1000|n1|NONE|{text}|rl'")
    assert ask_job("7", limit_s=LIMIT_S)[0].tickets == tickets


def test_of_a_component_all_components_are_told(slurm: Path) -> None:
    leader, other = "7|7+0|1000|n1|NONE|N/A|rl", "8|7+1|1000|n2|NONE|N/A|rl"
    command(
        slurm,
        "squeue",
        f'case "$3" in 7) echo "{leader}"; echo "{other}";; 8) echo "{other}";; esac',
    )
    for id in ("7", "8"):
        assert [(f.id, f.leader) for f in ask_job(id, limit_s=LIMIT_S)] == [("7", "7"), ("8", "7")]
    assert ask_job("9", limit_s=LIMIT_S) == []


def test_lines_that_are_none_are_left_out(slurm: Path) -> None:
    command(
        slurm, "squeue", "echo; echo 'slurm_load_jobs warning'; echo '7|7|nobody|n1|NONE|N/A|rl'"
    )
    assert ask_job("7", limit_s=LIMIT_S) == []


def test_a_single_host_needs_nobody_to_expand_it(slurm: Path) -> None:
    command(slurm, "scontrol", "exit 1")
    assert expand_hosts("n1", limit_s=LIMIT_S) == ("n1",)
    assert expand_hosts("", limit_s=LIMIT_S) == ()


def test_processes_of_a_job_are_told_with_their_steps(slurm: Path) -> None:
    lines = ["PID JOBID STEPID LOCALID GLOBALID", "70 7 batch 0 0", "-1 7 extern 0 0", "71 7 0 - -"]
    command(slurm, "scontrol", "; ".join(f"echo '{line}'" for line in [*lines, "72 8 0 0 0"]))
    assert list_steps("7", "n1", limit_s=LIMIT_S) == {70: "batch", 71: "0"}


def test_a_command_that_fails_is_named_with_its_last_words(slurm: Path) -> None:
    command(slurm, "scontrol", "echo first >&2; echo 'no such host' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"scontrol show hostnames n\[1-: no such host"):
        expand_hosts("n[1-", limit_s=LIMIT_S)


def test_a_command_that_hangs_is_left_in_time(slurm: Path) -> None:
    command(slurm, "squeue", "exec sleep 60")
    with pytest.raises(SlurmError, match=r"squeue did not answer within 0.2 s"):
        ask_job("7", limit_s=0.2)


def test_without_slurm_it_is_said(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsliced.host.slurm._USUAL_PLACES", str(slurm))
    monkeypatch.setenv("PATH", str(slurm))
    with pytest.raises(SlurmError, match="there is no squeue in PATH"):
        ask_job("7", limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        ("7 7 R tslice leases=3", Remark(job="7", text="tslice leases=3")),
        ("7 5_2 R (null)", Remark(job="5_2", text="")),
        ("7 7 PD", Remark(job="7", text="")),
        ("7 7 CG tslice leases=3", None),
        ("8 7_1 R somebody's", None),
    ],
)
def test_a_job_is_told_with_its_comment_while_that_can_be_changed(
    slurm: Path, line: str, remark: Remark | None
) -> None:
    command(slurm, "squeue", f'echo "{line}"')
    assert ask_remark("7", limit_s=LIMIT_S) == remark


def test_a_job_that_has_been_forgotten_has_ended(slurm: Path) -> None:
    command(slurm, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert ask_remark("7", limit_s=LIMIT_S) is None
    command(slurm, "squeue", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        ask_remark("7", limit_s=LIMIT_S)


def test_a_comment_is_written_to_the_controller_and_to_the_accounting(slurm: Path) -> None:
    said = slurm / "said"
    for name in ("scontrol", "sacctmgr"):
        command(slurm, name, f'for each; do echo "$each"; done >"{said}"')
    write_remark(Remark(job="5_2", text="tslice leases=3 x"), limit_s=LIMIT_S)
    assert said.read_text().split("\n")[-3:] == ["JobId=5_2", "AdminComment=tslice leases=3 x", ""]
    write_stored_remark(Remark(job="7", text="tslice leases=3"), limit_s=LIMIT_S)
    assert "-i\nmodify\njob\njobid=7\nset\nAdminComment=tslice leases=3\n" in said.read_text()


def test_of_a_job_in_the_accounting_the_comment_is_told(slurm: Path) -> None:
    command(slurm, "sacct", "echo 'ask Carol'")
    assert ask_stored_remark("7", limit_s=LIMIT_S) == Remark(job="7", text="ask Carol")
    command(slurm, "sacct", "echo")
    assert ask_stored_remark("7", limit_s=LIMIT_S) == Remark(job="7", text="")
    command(slurm, "sacct", "true")
    assert ask_stored_remark("7", limit_s=LIMIT_S) is None


def test_without_accounting_there_is_no_comment_and_another_failure_is_one(slurm: Path) -> None:
    command(slurm, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert ask_stored_remark("7", limit_s=LIMIT_S) is None
    command(slurm, "sacct", "echo 'Connection refused' >&2; exit 1")
    with pytest.raises(SlurmError, match="Connection refused"):
        ask_stored_remark("7", limit_s=LIMIT_S)
