"""Journal records to bytes and back."""

from __future__ import annotations

import random
import typing
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_records import STANDING, lease, rank, session_ended
from shapes import layouts_of, strategy_for

from tsliced.core.actions import Record
from tsliced.core.model import DeviceId
from tsliced.host import record_codec
from tsliced.host.record_codec import RecordError, make_packer, unpack_batch

RECORD_TYPES = typing.get_args(Record)
LAYOUT = Path(__file__).with_name("record_layout.txt")


@pytest.mark.parametrize("kind", RECORD_TYPES)
@settings(max_examples=40, deadline=None, database=None)
@given(data=st.data())
def test_every_record_comes_back_as_it_went_in(kind: type[Record], data: st.DataObject) -> None:
    records = data.draw(st.lists(strategy_for(kind), min_size=1, max_size=3))
    assert unpack_batch(make_packer()(records)) == records


def test_what_comes_back_has_the_types_of_the_core_and_not_only_equal_values() -> None:
    # A named tuple equals a bare tuple, but does not look like one. One device: sets are unordered.
    records = [*STANDING, replace(rank(), devices=frozenset({DeviceId("GPU-0")}))]
    records = [record for record in records if record != rank()]
    assert repr(unpack_batch(make_packer()(records))) == repr(records)


def test_equal_records_have_equal_bytes_in_whatever_order_a_set_was_made() -> None:
    names = [DeviceId(f"GPU-{number}") for number in range(40)]
    shuffled = random.Random(1).sample(names, len(names))
    pack = make_packer()
    assert pack([replace(rank(), devices=frozenset(names))]) == pack(
        [replace(rank(), devices=frozenset(shuffled))]
    )


def test_text_in_no_known_encoding_survives() -> None:
    record = lease(1, text=b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert unpack_batch(make_packer()([record])) == [record]


@pytest.mark.parametrize(
    "entries",
    [
        7,
        [7],
        [[3]],
        [[99, []]],
        [["3", []]],
        [[2, []]],
        [[2, [7]]],
        [[2, ["s-1", "more"]]],
        [[9, [["slurm", 1000, "4711"], ["no_such_cause", "text", None]]]],
        [[9, [["slurm", True, "4711"], None]]],
        [[9, ["slurm/1000/4711", None]]],
    ],
)
def test_values_of_another_shape_are_refused(entries: object) -> None:
    with pytest.raises(RecordError):
        unpack_batch(msgpack.packb(entries))


def test_damaged_bytes_give_records_or_an_error_of_their_own_and_nothing_else() -> None:
    rng = random.Random(20260101)
    packed = make_packer()(STANDING)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(packed)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            unpack_batch(bytes(damaged[: rng.randint(1, len(damaged))]))
        except RecordError:
            refused += 1
    assert refused > 1000


def test_an_older_layout_is_brought_up_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = msgpack.packb([[2, ["s-1"]], [2, ["drop me"]]])

    def to_2(entry: record_codec.Entry) -> record_codec.Entry | None:
        return None if entry[1][0] == "drop me" else (entry[0], [f"{entry[1][0]} in 2"])

    def to_3(entry: record_codec.Entry) -> record_codec.Entry:
        return entry[0], [f"{entry[1][0]} in 3"]

    monkeypatch.setattr(record_codec, "SCHEMA", 3)
    monkeypatch.setattr(record_codec, "MIGRATIONS", {1: to_2, 2: to_3})
    assert unpack_batch(packed, schema=1) == [session_ended("s-1 in 2 in 3")]
    with pytest.raises(RecordError, match="never written"):
        unpack_batch(packed, schema=0)


@pytest.mark.parametrize("entries", [[7], [[3]], [["3", []]], [[None, None]], [[1, 7]]])
def test_what_no_older_layout_can_have_been_is_refused_as_well(entries: object) -> None:
    with pytest.raises(RecordError):
        unpack_batch(msgpack.packb(entries), schema=1)


def test_no_stored_layout_changes_without_a_new_schema() -> None:
    layout = "\n".join([f"SCHEMA {record_codec.SCHEMA}", *layouts_of(RECORD_TYPES)]) + "\n"
    # If this fails: give SCHEMA the next number, say in MIGRATIONS how an entry of the one before
    # becomes one of it, and put what is on the left into the file. Only a layout that no release
    # has ever written may change under its number.
    assert layout == LAYOUT.read_text()
