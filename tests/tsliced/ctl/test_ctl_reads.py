"""Commands that only read, in this process, against a scripted daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_daemon import EVENTS, RANKS, STATUS, ScriptedDaemon

from libtimeslice.protocol import Message
from tsliced.ctl.__main__ import main
from tsliced.ctl.events import event_line

LIMIT_S = 20.0


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDaemon]:
    monkeypatch.setenv("TSLICE_SOCKET", str(tmp_path / "socket"))
    monkeypatch.setenv("TZ", "UTC")
    with ScriptedDaemon(tmp_path / "socket") as scripted:
        yield scripted


def document(capsys: pytest.CaptureFixture[str]) -> Message:
    """Returns the one JSON document on standard output."""
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1, "one document, on one line"
    parsed: Message = json.loads(printed)
    return parsed


def test_status_shows_who_holds_a_group_and_for_how_long(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tsliced 0.1.0 on n1, pid 4242, up 1d02h; driver 580.95.05")
    trainer = next(line for line in lines if line.startswith("trainer"))
    assert trainer.split() == [
        "trainer", "held", "root", "trainer-7", "3m12s", "rollout", "1", "0-3",
        "280.0", "of", "560.0", "GiB", "92%",
    ]  # fmt: skip


def test_status_shows_the_queue_the_jobs_and_why_a_group_is_blocked(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "sampler blocked - - - - 0 6 ? of 140.0 GiB -" in shown
    assert "sampler is blocked: process 99 holds memory and is of no job" in shown
    assert "trainer 1 4000000000 mars/4711 12.3s training" in shown
    assert "4000000000 mars/4711 parked 12.3s - 4 - 100.0 GiB - 2" in shown
    assert shown[-2:] == [
        "LOOK AT THIS",
        "sampler is blocked: process 99 holds memory and is of no job",
    ]
    assert "mars/4711: 2 of 4 ranks have asked for sampler (pid 31, 32)" in shown


def test_status_fits_into_80_columns(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "checkpoint of process 31: " + 20 * "the driver cannot do this, "
    way_out = "mend that; then try again (tslicectl retry 0/trainer-7)"
    held, *others = STATUS["jobs"]
    stood = {**held, "state": "faulted", "standstill": "pinned", "way_out": way_out}
    stood["reason"] = f"{reason}for 5 s now; {way_out}"
    trainer, sampler = STATUS["groups"]
    daemon.status = {
        **STATUS,
        "groups": [{**trainer, "reason": reason}, sampler],
        "jobs": [stood, *others],
    }
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    wrong = lines[lines.index("LOOK AT THIS") + 1 :]
    assert wrong[0] == "trainer is held: because of trainer-7, see there", "it is said once"
    assert "  way out: mend that; then try again (tslicectl retry 0/trainer-7)" in wrong
    assert any(line.startswith("root") and " pinned " in line for line in lines)


def test_status_as_json_is_what_the_daemon_said(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", "status"]) == 0
    assert document(capsys) == {"schema": 1, "status": STATUS}


def test_ps_shows_what_is_being_done_to_a_rank_without_its_control_characters(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == [
        "trainer-7", "root", "1234", "frozen", "snapshot", "1.50s", "trainer", "1", "70.0", "GiB",
        "python?[31m",
    ]  # fmt: skip


def test_ps_as_json_has_all_ranks(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "--json"]) == 0
    assert document(capsys) == {"schema": 1, "ranks": RANKS}


def test_what_jobs_tell_by_any_name_is_shown() -> None:
    event = {"seq": 1, "at": 0.0, "kind": "progress", "level": "info", "job": "7/a"}
    figures = {"bytes": 2048.0, "seconds": "nan", "x_s": -1, "y_bytes": 1e400, "z_s": 0.5}
    line = event_line({**event, **figures})
    assert line.endswith("job=7/a bytes=2.0KiB seconds=nan x_s=-1 y_bytes=inf z_s=0.50s")


def test_events_are_lines_of_key_and_value(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == [
        "2", lines[1].split()[1], "granted", "job=0/trainer-7", "groups=trainer", "lease=L1",
        "token=7", "waited_s=1.25s", "restored=yes", "switch_s=0.50s",
    ]  # fmt: skip


def test_events_can_begin_anywhere_and_be_of_chosen_kinds(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", "--since", "2", "--kind", "granted", "--kind", "queued", "--json"]) == 0
    assert document(capsys) == {"schema": 1, "events": [EVENTS[1]], "next": 4}
    assert daemon.wait_for("events")["since"] == 2


@pytest.mark.parametrize(
    ("request_name", "code", "status"),
    [
        ("status", "not_permitted", 4),
        ("status", "unavailable", 75),
        ("status", "shutting_down", 75),
        ("status", "internal", 1),
        ("hello", "unsupported_version", 1),
        ("hello", "not_permitted", 4),
    ],
)
def test_an_error_of_the_daemon_has_its_exit_code_and_is_json_if_asked(
    daemon: ScriptedDaemon,
    capsys: pytest.CaptureFixture[str],
    request_name: str,
    code: str,
    status: int,
) -> None:
    daemon.refusals[request_name] = (code, "because")
    assert main(["status", "--json"]) == status
    assert document(capsys) == {"schema": 1, "error": {"code": code, "message": "because"}}
    assert main(["status"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "tslicectl: because\n")


def test_without_a_daemon_the_exit_code_is_69_and_the_message_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--socket", str(tmp_path / "none")]) == 69
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "start tsliced, or set TSLICE_SOCKET" in captured.err
    assert main(["--socket", str(tmp_path / "none"), "ps", "--json"]) == 69
    assert document(capsys)["error"]["code"] == "unreachable"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["status", "extra"],
        ["status", "--watch", "0"],
        ["events", "--limit", "0"],
        ["events", "--since", "-1"],
        ["attach", "0"],
        ["attach", "self"],
        ["acquire", "--timeout", "nan"],
        ["acquire", "--group", ""],
        ["acquire", "--ranks", "0"],
        ["run"],
        ["run", "true"],
        ["run", "--"],
        ["status", "--", "true"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "tslicectl" in capsys.readouterr().err


def test_followed_events_go_on_after_a_restart_of_the_daemon(
    daemon: ScriptedDaemon, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tsliced.ctl", "events", "-f", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            read = process.stdout.readline
            assert [json.loads(read())["event"]["seq"] for _ in EVENTS] == [1, 2, 3]
            while not daemon.wait_for("events").get("follow"):
                pass
            daemon.tell_all({"t": "event", "event": {**EVENTS[0], "seq": 4}})
            assert json.loads(read())["event"]["seq"] == 4
            daemon.drop()
            while daemon.wait_for("events")["since"] != 5:
                pass
            daemon.tell_all({"t": "event", "event": {**EVENTS[0], "seq": 5}})
            assert json.loads(read())["event"]["seq"] == 5
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 130


def test_watching_the_status_prints_it_again_until_interrupted(daemon: ScriptedDaemon) -> None:
    command = [sys.executable, "-m", "tsliced.ctl", "status", "--watch", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for _ in range(3):
                assert json.loads(process.stdout.readline())["status"] == STATUS
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 130


def test_a_reader_that_has_seen_enough_is_no_error(daemon: ScriptedDaemon) -> None:
    program = f"{sys.executable} -m tsliced.ctl status --watch 0.1 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
