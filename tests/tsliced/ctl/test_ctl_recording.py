"""Where reports and traces get their events from, and where they go."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_daemon import EVENTS, ScriptedDaemon

from tsliced.ctl.__main__ import main


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDaemon]:
    monkeypatch.setenv("TSLICE_SOCKET", str(tmp_path / "socket"))
    with ScriptedDaemon(tmp_path / "socket") as scripted:
        yield scripted


def written(path: Path) -> list[str]:
    """Returns the categories of the slices in a trace."""
    document = json.loads(path.read_text())
    return sorted({e["cat"] for e in document["traceEvents"] if e["ph"] == "X"})


def test_a_trace_is_made_of_what_the_daemon_tells(
    daemon: ScriptedDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "t.json"
    assert main(["trace", "-o", str(target), "--since", "1h"]) == 0
    assert written(target) == ["hold", "switch", "wait"]
    assert capsys.readouterr().err == f"tslicectl: wrote {target}\n"
    assert daemon.wait_for("events")["after"] > 1_700_000_000
    assert stat.S_IMODE(target.stat().st_mode) & 0o400


def test_standard_output_gets_nothing_but_the_trace(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["displayTimeUnit"] == "ms"


@pytest.mark.parametrize("lines", [False, True], ids=["one document", "one a line"])
def test_a_file_that_events_wrote_will_do_without_a_daemon(tmp_path: Path, lines: bool) -> None:
    source, target = tmp_path / "events.json", tmp_path / "t.json"
    if lines:
        source.write_text("".join(json.dumps({"schema": 1, "event": e}) + "\n" for e in EVENTS))
    else:
        source.write_text(json.dumps({"schema": 1, "events": EVENTS, "next": 4}))
    call = ["trace", "--history", str(source), "-o", str(target)]
    assert main(call) == 0
    assert written(target) == ["hold", "switch", "wait"]
    for choice in (["--job", "trainer-7"], ["--job", "0/trainer-7"], ["--group", "trainer"]):
        assert main([*call, *choice]) == 0
    for choice in (["--job", "other"], ["--group", "other"], ["--since", "@1800000000"]):
        assert main([*call, *choice]) == 3
    assert main([*call, "--until", "@1600000000"]) == 3


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", '{"events": [{"at": "now"}]}'])
def test_a_file_that_is_none_is_told_with_how_to_make_one(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "events.json"
    source.write_text(text)
    assert main(["trace", "--history", str(source)]) in (2, 3)
    assert "tslicectl events" in capsys.readouterr().err


def test_a_report_is_one_page_or_its_figures_as_json(
    daemon: ScriptedDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, solo = tmp_path / "r.html", tmp_path / "solo.json"
    solo.write_text(json.dumps({"schema": 1, "events": EVENTS, "next": 4}))
    assert main(["report", "-o", str(target), "--solo", str(solo)]) == 0
    page = target.read_text()
    assert page.startswith("<!doctype html>")
    assert "trainer-7" in page
    assert "Shared devices on n1" in page
    capsys.readouterr()
    assert main(["report", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (group,) = document["figures"]["groups"]
    assert group["name"] == "trainer"
    assert document["verdict"][0]["tone"] in ("good", "plain", "bad")
    assert main(["report", "--solo", str(tmp_path / "none")]) == 3


def test_a_missing_file_and_a_place_that_cannot_be_written_are_told(
    tmp_path: Path, daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--history", str(tmp_path / "none")]) == 3
    assert main(["trace", "-o", str(tmp_path / "no" / "where.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err
