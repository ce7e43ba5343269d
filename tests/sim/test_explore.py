"""Short forms of the search over all ways in which a switch can go; `make explore` has the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from explore import Search, Step, budgets
from mutations import (
    Mutation,
    drop_stale_results,
    go_on_at_the_first_answer_in,
    thaw_restored_ones_alone,
)
from scenes import SCENES
from space import Budget
from stills import Label

from tsliced.core.coordinator import Place
from tsliced.core.model import RankState


def found_in(search: Search) -> str:
    """Search, and return what was wrong, with the way to it."""
    search.run()
    return "\n".join(map(str, search.findings.values()))


@pytest.mark.parametrize("budget", [*budgets(0), *(b for b in budgets(1) if not b.kills)], ids=str)
def test_g1_whatever_goes_wrong_once_over_two_hosts_ends_well(budget: Budget) -> None:
    search = Search(SCENES["switch"](), budget)
    assert not found_in(search)
    assert search.complete


def test_g1_g8_a_participant_that_is_killed_at_any_time_does_no_harm() -> None:
    killed = Budget(kills=1)
    search = Search(SCENES["switch"](), killed, limit=10_000, may=lambda step: step.host == 1)
    assert not found_in(search)


@pytest.mark.parametrize("kind", ["failures", "clocks", "acts"])
def test_g1_whatever_goes_wrong_once_with_a_lease_over_two_arbiters_ends_well(kind: str) -> None:
    search = Search(SCENES["joint"](), Budget(**{kind: 1}))
    assert not found_in(search)
    assert search.complete


@pytest.mark.parametrize("kind", ["failures", "clocks"])
def test_g1_whatever_goes_wrong_once_while_a_job_comes_back_before_it_makes_room_ends_well(
    kind: str,
) -> None:
    search = Search(SCENES["first"](), Budget(**{kind: 1}))
    assert not found_in(search)
    assert search.complete


def test_g1_three_hosts_switch_in_any_order() -> None:
    search = Search(SCENES["switch3"](), Budget())
    assert not found_in(search)
    assert search.complete


@dataclass(frozen=True, slots=True)
class Rule:
    """How a rule is taken away, and where a search is to look for what follows."""

    without: Mutation
    budget: Budget
    may: Callable[[Step], bool] = lambda _step: True


def only_alone(step: Step) -> bool:
    """Whether a step is a fault that lets a participant thaw alone, and no other clock."""
    is_first_killed = step.host == 0 and step.label.kind == "is killed"
    return is_first_killed or step.label.how in ("", "alone")


RULES = {
    "OFF only when all are FROZEN": Rule(go_on_at_the_first_answer_in(Place.FREEZING), Budget()),
    "others only when all are OFF": Rule(
        go_on_at_the_first_answer_in(Place.SNAPSHOTTING), Budget()
    ),
    "ON only when all are RESTORED": Rule(go_on_at_the_first_answer_in(Place.RESTORING), Budget()),
    "alone only from FROZEN": Rule(thaw_restored_ones_alone, Budget(cuts=1, clocks=1), only_alone),
    "results are true, however late": Rule(drop_stale_results, Budget(clocks=1)),
    "after a restart all are asked first": Rule(
        go_on_at_the_first_answer_in(Place.ASKING), Budget(kills=1, clocks=1), only_alone
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_protocol_without_one_of_its_rules_is_found_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULES[name]
    rule.without(monkeypatch)
    assert found_in(Search(SCENES["switch"](), rule.budget, limit=50_000, may=rule.may))


@pytest.mark.parametrize(
    ("scene", "budget"),
    [("switch", Budget(acts=1)), ("joint", Budget(failures=1)), ("switch3", Budget())],
    ids=["switch", "joint", "switch3"],
)
def test_taking_some_steps_in_one_order_only_leaves_out_no_end(scene: str, budget: Budget) -> None:
    def ends(*, reduced: bool) -> tuple[int, set[tuple[bytes, ...]]]:
        search = Search(SCENES[scene](), budget, reduced=reduced)
        assert not found_in(search)
        ends = (state.hosts for state in search.states if search.is_over(state))
        digests = [stills.digests for stills in search.stills]
        found = {tuple(d[number] for d, number in zip(digests, end, strict=True)) for end in ends}
        return len(search.states), found

    (few, found), (all_, expected) = ends(reduced=True), ends(reduced=False)
    assert few < all_
    assert expected
    assert found == expected


def test_a_finding_tells_the_way_to_it() -> None:
    search = Search(SCENES["switch"](), Budget())
    search.run()
    number = next(
        number
        for number, state in enumerate(search.states)
        if any(p.state is RankState.FROZEN for p in search.judge.processes(state.hosts))
    )
    search.find("it is frozen", number, [Step(0, Label("reboots"))])
    lines = str(search.findings["it is frozen"]).splitlines()
    assert lines[0] == "it is frozen"
    assert any("goal=frozen" in line for line in lines)
    assert lines[-1].strip() == "n1 reboots"
