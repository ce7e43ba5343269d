"""Tokens, epochs and operation ids."""

from __future__ import annotations

import pytest
from world import failure

from tsliced.core.actions import ReserveNumbers
from tsliced.core.events import NumbersReserved
from tsliced.core.model import Cause, Counter
from tsliced.core.numbers import Numbers


def numbers(*, ceiling: int = 0, block: int = 4) -> Numbers:
    return Numbers(generation=7, ceiling=ceiling, block=block)


def reserve(supply: Numbers) -> None:
    ask = supply.ask()
    assert ask is not None
    supply.on_reserved(NumbersReserved(ceiling=ask.ceiling))


def test_g2_nothing_is_given_out_before_a_block_is_durable() -> None:
    supply = numbers()
    assert supply.take() is None
    assert supply.ask() == ReserveNumbers(ceiling=4)
    assert supply.take() is None
    supply.on_reserved(NumbersReserved(ceiling=4))
    assert supply.take() == Counter(7, 0)


def test_g2_numbers_rise_over_blocks_and_restarts() -> None:
    supply = numbers()
    given = []
    for _ in range(3):
        reserve(supply)
        given += [supply.take() for _ in range(3)]
    again = numbers(ceiling=supply.ceiling)
    reserve(again)
    given.append(again.take())
    assert None not in given
    assert given == sorted(set(given), key=lambda number: number or Counter(0, 0))


def test_the_next_block_is_asked_for_once_at_half_use() -> None:
    supply = numbers()
    reserve(supply)
    assert supply.take() is not None
    assert supply.ask() is None
    assert supply.take() is not None
    assert supply.ask() == ReserveNumbers(ceiling=8)
    assert supply.ask() is None


def test_several_are_taken_all_or_none_and_a_block_is_made_large_enough_for_them() -> None:
    supply = numbers()
    reserve(supply)
    assert supply.take_several(3) == [Counter(7, 0), Counter(7, 1), Counter(7, 2)]
    assert supply.take_several(9) is None
    assert supply.left() == 1
    assert supply.ask() == ReserveNumbers(ceiling=13)
    supply.on_reserved(NumbersReserved(ceiling=13))
    assert supply.take_several(9) is not None


def test_more_than_is_left_is_asked_for_even_before_half_use() -> None:
    supply = numbers(block=8)
    reserve(supply)
    assert supply.take_several(3) is not None
    before = supply.low
    assert supply.take_several(6) is None
    assert (before, supply.low) == (False, True)
    assert supply.ask() == ReserveNumbers(ceiling=16)


def test_after_a_failure_nothing_is_asked_for_until_let_go() -> None:
    supply = numbers()
    assert supply.ask() is not None
    supply.on_reserved(NumbersReserved(ceiling=4, failure=failure(Cause.JOURNAL)))
    assert supply.take() is None
    assert supply.ask() is None
    supply.let_go()
    assert supply.ask() == ReserveNumbers(ceiling=4)


def test_a_ceiling_never_falls() -> None:
    with pytest.raises(AssertionError, match="never falls"):
        numbers(ceiling=8).on_reserved(NumbersReserved(ceiling=4))


def test_operation_ids_are_never_used_twice() -> None:
    supply = numbers()
    assert [supply.take_op() for _ in range(3)] == [1, 2, 3]
