"""Mirrors bench/report.py and bench/comparing.py: figures, goals, the table and the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import parse
from bench.comparing import ratio_of, take_turns
from bench.machine import Machine
from bench.report import Goal, Row, Section, document, percentile, publish, table

MACHINE = Machine(
    cpu_model="model",
    cores=2,
    kernel="6.1",
    python="CPython 3.11",
    load_average=0.5,
    file_system="ext4",
)


def row(value: float, **fields: object) -> Row:
    goal = Goal(limit=1.5)
    return Row(key="pair_us", label="pair", ratio=value, counts="ratio", goal=goal, **fields)  # type: ignore[arg-type]  # keywords of Row


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7], 50, 7),
        ([3, 1, 2], 50, 2),
        ([4, 3, 2, 1], 50, 2),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 102)), 99, 100),
    ],
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[int], percent: float, expected: int
) -> None:
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal(limit=1.5), 1.5, True),
        (Goal(limit=1.5), 1.51, False),
        (Goal(limit=0.35, at_least=True), 0.35, True),
        (Goal(limit=0.35, at_least=True), 0.34, False),
    ],
)
def test_a_goal_is_met_up_to_its_limit(goal: Goal, value: float, met: bool) -> None:
    assert goal.is_met(value) is met


def test_the_table_says_what_was_missed() -> None:
    rows = [row(1.2), row(1.7, unit="us", ours=1234.0)]
    text = table([Section(title="requests", yardstick="echo", rows=rows)])
    assert [line.split() for line in text.splitlines()] == [
        ["requests", "tsliced", "echo", "ratio", "goal"],
        ["pair", "1.200", "<=", "1.5", "ok"],
        ["pair", "1,234", "us", "1.700", "<=", "1.5", "MISS"],
    ]


def test_the_json_has_what_counts_at_the_top_and_the_rest_as_raw() -> None:
    counting = row(1.7, headline="acquire_ratio_p50", ours=12.0, theirs=8.0)
    plain = Row(key="switch_ms", label="switch", ours=1 / 3)
    found = document([Section(title="", rows=[counting, plain])], MACHINE)
    assert found["acquire_ratio_p50"] == 1.7
    assert found["goals"] == {"acquire_ratio_p50": {"at_most": 1.5, "met": False}}
    assert found["raw"] == {
        "pair_us": 12.0,
        "pair_us_yardstick": 8.0,
        "pair_us_ratio": 1.7,
        "switch_ms": 0.333333,
    }
    assert found["machine"] == MACHINE.as_dict()


def test_a_run_is_printed_and_written_with_what_else_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "further" / "bench.json"
    sections = [Section(title="requests", rows=[row(1.2)])]
    publish(sections, MACHINE, path, apart=False, further={"more": [1]})
    assert json.loads(path.read_text()) == {**document(sections, MACHINE), "more": [1]}
    printed = capsys.readouterr()
    assert printed.out.startswith("model, 2 cores")
    assert "only core" in printed.out
    assert table(sections) in printed.out
    assert str(path) in printed.err


def test_what_to_measure_adds_up_where_it_is_named_twice() -> None:
    assert parse(["--only", "acquire", "--only", "deaths,switch"]).only == [
        "acquire",
        "deaths",
        "switch",
    ]
    assert parse([]).only is None


def test_a_ratio_is_of_neighbouring_rounds_so_that_a_slow_spell_does_not_count() -> None:
    assert ratio_of([2, 20, 2], [1, 10, 1]) == 2


def test_variants_take_turns_in_both_orders_after_a_warm_up() -> None:
    done: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def round(self, *, warm_up: bool = False) -> None:
            done.append(self.name.upper() if warm_up else self.name)

    take_turns([Noted("a"), Noted("b")], rounds=3)
    assert "".join(done) == "AB" + "ab" + "ba" + "ab"
