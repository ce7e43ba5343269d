"""What a snapshot leaves on the devices: measured, kept, and never too much."""

from __future__ import annotations

from participant_lab import FREE_DEVICE, FROZEN, P1, PARKED, PARKED_NOW, Lab, found
from world import D1, D2, D3

from tsliced.core.actions import RankRecord, ScanGroups
from tsliced.core.model import Cause, Goal
from tsliced.core.signals import Report


def test_g12_a_little_that_a_snapshot_leaves_is_remembered_and_needed_no_more() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1), unlisted={D1: 7, D2: 1})
    rank = lab.participant.ranks[P1]
    rank.bytes_on = ((D1, 100),)
    lab.order(Goal.OFF, step=1)
    lab.reserved(5)
    (look,) = lab.ended(6, P1, PARKED)
    assert isinstance(look, ScanGroups)
    assert (look.residue_bytes, look.unlisted) == (50, ((D1, 7), (D2, 1)))
    # 20 that it is listed for, and 10 more than before that nobody is listed for; on D2 it is not.
    record, *rest = lab.scanned(7, found(P1, device_bytes=20), unlisted={D1: 17, D2: 5, D3: 9})
    assert rest == [PARKED_NOW, FREE_DEVICE, lab.at(step=1)]
    assert isinstance(record, RankRecord)
    assert record.residue == ((D1, 30),)
    assert rank.residue_bytes == 30
    assert rank.needs() == ((D1, 70),)
    lab.order(Goal.RESTORED)
    lab.scanned(8)
    lab.reserved(9)
    lab.ended(10, P1, FROZEN)
    assert rank.residue_bytes == 0


def test_more_than_may_be_left_is_no_snapshot_though_nobody_is_listed_for_it() -> None:
    lab = Lab()
    lab.freeze_one()
    lab.scanned(4, found(P1), unlisted={D1: 7})
    lab.order(Goal.OFF, step=1)
    lab.reserved(5)
    lab.ended(6, P1, PARKED)
    (answer,) = lab.scanned(7, unlisted={D1: 7 + 51})
    assert isinstance(answer, Report)
    assert answer.failure is not None
    assert answer.failure.cause is Cause.NOT_FREED
    assert lab.participant.ranks[P1].residue == ()
