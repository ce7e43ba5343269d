"""The daemon's log: one line per transition, whatever is in it."""

from __future__ import annotations

import io
import re

import pytest

from tsliced.log import Log


def lines(level: str, *written: tuple[str, str, dict[str, str | int | float | bool | None]]) -> str:
    stream = io.StringIO()
    log = Log(level, stream=stream)
    for line in written:
        log.write(*line)
    assert stream.getvalue() == "", "lines are collected"
    log.flush()
    return stream.getvalue()


@pytest.fixture(autouse=True)
def _not_under_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)


def test_a_line_has_the_time_the_level_the_kind_and_the_facts() -> None:
    text = lines("info", ("info", "granted", {"job": "0/a", "token": 7, "waited_s": 0.12345678}))
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    granted job=0/a token=7 waited_s=0\.123457\n", text
    )


def test_facts_that_are_none_are_left_out() -> None:
    assert lines("info", ("info", "x", {"a": None, "b": False})).endswith(" x b=False\n")


def test_lines_below_the_level_are_left_out() -> None:
    text = lines("warning", ("info", "a", {}), ("warning", "b", {}), ("error", "c", {}))
    assert [line.split()[1:3] for line in text.splitlines()] == [["WARNING", "b"], ["ERROR", "c"]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two words", "'two words'"),
        ("line\nbreak", r"'line\nbreak'"),
        ("\x1b[31mred", r"'\x1b[31mred'"),
        ("", "''"),
        ("plain", "plain"),
        ("é", "é"),
    ],
)
def test_nothing_in_a_fact_can_end_the_line_or_reach_a_terminal(value: str, shown: str) -> None:
    assert lines("info", ("info", "x", {"a": value})).endswith(f" x a={shown}\n")


def test_under_systemd_a_line_begins_with_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1234")
    text = lines("debug", *((level, "x", {}) for level in ("debug", "info", "warning", "error")))
    assert text == "<7>x \n<6>x \n<4>x \n<3>x \n"


def test_the_time_goes_on_from_second_to_second(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    log = Log(stream=stream)
    for now in (10.25, 10.75, 11.0):
        monkeypatch.setattr("tsliced.log.time.time", lambda now=now: now)
        log.write("info", "x", {})
    log.flush()
    assert re.findall(r":(\d\d\.\d{3}) ", stream.getvalue()) == ["10.250", "10.750", "11.000"]


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log = Log(stream=Full())
    log.write("info", "x", {})
    log.flush()
    closed = io.StringIO()
    closed.close()
    log = Log(stream=closed)
    log.write("info", "x", {})
    log.flush()
