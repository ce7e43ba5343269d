"""tslicectl top, in a real terminal and in a pipe, against a scripted daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_daemon import EVENTS, MOVE, STATUS, ScriptedDaemon
from terminal import ALTERNATE, Terminal

from libtimeslice.protocol import Message

LIMIT_S = 20.0
TOP = [sys.executable, "-m", "tsliced.ctl", "top", "--interval", "0.1"]


def moving() -> Message:
    """Returns a status in which a job is taken off a group."""
    first, *others = STATUS["groups"]
    group = {**first, "state": "switching", "holder": None, "lease_since_s": None, "move": MOVE}
    return {**STATUS, "groups": [group, *others]}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDaemon]:
    monkeypatch.setenv("TSLICE_SOCKET", str(tmp_path / "socket"))
    monkeypatch.setenv("TZ", "UTC")
    with ScriptedDaemon(tmp_path / "socket") as scripted:
        yield scripted


def test_80_columns_are_enough_for_who_holds_who_waits_and_what_is_wrong(
    daemon: ScriptedDaemon,
) -> None:
    with Terminal(TOP) as terminal:
        terminal.until_shown(
            "tsliced 0.1.0 on n1",
            "trainer", "held", "trainer-7 (root)", "3m12s", "rollout", "92%",
            "mars/4711", "parked", "100.0GiB",
            "WAITING FOR", "12.3s", "training",
            "sampler is blocked: process 99 holds memory and is of no job",
        )  # fmt: skip
        assert not any("…" in line for line in terminal.text().splitlines()[3:5]), terminal.text()
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.is_as_before()


def test_how_far_a_move_is_is_drawn_and_changes(daemon: ScriptedDaemon) -> None:
    daemon.status = moving()
    with Terminal(TOP) as terminal:
        terminal.until_shown("████░", "30.0GiB/100.0GiB 2.50 GB/s 30.1s left: mars/4711 goes off")
        daemon.status = STATUS
        terminal.until(lambda: "█" not in terminal.text(), "the move is over")
        terminal.type("q")
        assert terminal.wait() == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)],
    ids=["SIGTERM", "SIGHUP", "Ctrl-C"],
)
def test_whatever_ends_it_the_terminal_is_as_before(
    daemon: ScriptedDaemon, number: signal.Signals, code: int
) -> None:
    with Terminal(TOP) as terminal:
        terminal.until_shown("trainer-7")
        assert ALTERNATE in terminal.written
        assert not terminal.is_as_before()
        if number is signal.SIGINT:
            terminal.type("\x03")
        else:
            terminal.signal(number)
        assert terminal.wait() == code
        assert terminal.is_as_before()


def test_it_can_be_suspended_and_goes_on(daemon: ScriptedDaemon) -> None:
    with Terminal(TOP) as terminal:
        terminal.until_shown("trainer-7")
        terminal.type("\x1a")
        terminal.until(lambda: terminal.state() == "T", "it is stopped")
        terminal.until(terminal.is_as_before, "the shell has the terminal as it was")
        daemon.status = moving()
        terminal.signal(signal.SIGCONT)
        terminal.until_shown("GB/s")
        assert not terminal.is_as_before()
        terminal.type("q")
        assert terminal.wait() == 0
        assert terminal.is_as_before()


#: Is told to stop while it draws, and says what it does.
DRAWS = """
import os, signal
from tsliced.ctl.top import suspending

class Live:
    def stop(self): print("gives the terminal back")
    def start(self, refresh): print("takes it again")

with suspending(Live()) as undisturbed:
    with undisturbed():
        os.kill(os.getpid(), signal.SIGTSTP)
        print("has drawn")
    os.kill(os.getpid(), signal.SIGTSTP)
    print("goes on")
"""


def test_it_is_not_suspended_in_the_middle_of_a_screen() -> None:
    with Terminal([sys.executable, "-c", DRAWS]) as terminal:
        terminal.until_shown("has drawn", "gives the terminal back")
        terminal.until(lambda: terminal.state() == "T", "it is stopped")
        assert "takes it again" not in terminal.text()
        terminal.signal(signal.SIGCONT)
        terminal.until(lambda: terminal.text().count("gives the") == 2, "again, and at once")
        terminal.until(lambda: terminal.state() == "T", "it is stopped")
        terminal.signal(signal.SIGCONT)
        terminal.until_shown("goes on")
        assert terminal.wait() == 0
    lines = terminal.text().split()
    assert lines.index("drawn") < lines.index("gives"), "the screen first"


def test_it_fits_a_terminal_that_is_made_smaller(daemon: ScriptedDaemon) -> None:
    with Terminal(TOP, columns=120, lines=40) as terminal:
        terminal.until_shown("trainer-7", "granted")
        terminal.resize(60, 12)
        written = len(terminal.written)
        terminal.until(lambda: len(terminal.written) > written + 2000, "it is drawn anew")
        terminal.until_shown("tsliced 0.1.0", "trainer")
        terminal.type("q")
        assert terminal.wait() == 0


def test_a_daemon_that_goes_away_is_waited_for(tmp_path: Path, daemon: ScriptedDaemon) -> None:
    with Terminal(TOP) as terminal:
        terminal.until_shown("trainer-7")
        daemon.refusals["hello"] = ("shutting_down", "it restarts")
        daemon.drop()
        terminal.until_shown("it restarts; trying again", "trainer-7")
        del daemon.refusals["hello"]
        terminal.until(lambda: "trying again" not in terminal.text(), "it is there again")
        terminal.type("q")
        assert terminal.wait() == 0


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tsliced.ctl", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )


def test_a_pipe_gets_one_plain_screen_of_80_columns(daemon: ScriptedDaemon) -> None:
    daemon.status = moving()
    for arguments in (("--once",), ()):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
        assert "2.50 GB/s 30.1s left: mars/4711" in done.stdout
        assert "granted" in done.stdout, "with the latest events"


def test_names_of_others_are_neither_markup_nor_control_characters(
    daemon: ScriptedDaemon,
) -> None:
    hostile = {"cluster": "", "uid": 0, "id": "[red]x[/red]\x1b[31m"}
    daemon.status = {**STATUS, "jobs": [{**STATUS["jobs"][0], "job": hostile}]}
    done = run("--once", COLUMNS="120")
    assert "[red]x[/red]?[31m" in done.stdout


def test_as_json_it_is_status_and_events(daemon: ScriptedDaemon) -> None:
    document = json.loads(run("--json").stdout)
    assert document == {"schema": 1, "status": STATUS, "events": EVENTS}


def test_without_a_daemon_it_says_so_and_leaves_the_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSLICE_SOCKET", str(tmp_path / "none"))
    with Terminal(TOP) as terminal:
        assert terminal.wait() == 69
        assert ALTERNATE not in terminal.written
