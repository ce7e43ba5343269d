"""Journal records <-> plain values that msgpack can carry.

The codec of each record type is put together from the type hints of its fields (`codec`). They are
stored by position, so any change to a record type, or to a type in it, needs a new `SCHEMA` and an
entry in `MIGRATIONS`.

Writing is on the path of every grant and release; reading happens at start only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgpack

from tsliced.codec import CodecError, Codecs, Convert, items_of, shown, value_of_member
from tsliced.core.actions import (
    DrainRecord,
    FaultRecord,
    ForeignLeaseRecord,
    HandoverRecord,
    HostRecord,
    LeaseEndedRecord,
    LeaseRecord,
    RankEndedRecord,
    RankRecord,
    Record,
    RemainsRecord,
    ReservationRecord,
    SessionEndedRecord,
    SessionRecord,
    StrangerRecord,
    TenancyEndedRecord,
    TenancyRecord,
)

#: Version of the layout of all record types together.
SCHEMA = 3

#: A record as it is packed: its type's tag and its fields in the order of their definition.
Entry: TypeAlias = tuple[int, Sequence[object]]

#: Tags are stored. One that was ever in use is never given to another type.
_TAGS: Mapping[type[Record], int] = {
    SessionRecord: 1,
    SessionEndedRecord: 2,
    LeaseRecord: 3,
    LeaseEndedRecord: 4,
    TenancyRecord: 5,
    TenancyEndedRecord: 6,
    RankRecord: 7,
    RankEndedRecord: 8,
    FaultRecord: 9,
    DrainRecord: 10,
    StrangerRecord: 11,
    RemainsRecord: 12,
    ForeignLeaseRecord: 13,
    HostRecord: 14,
    ReservationRecord: 15,
    HandoverRecord: 16,
}

#: By tag: the fields that layout 2 added at the end, with what the daemons before it meant.
_ADDED_BY_2: Mapping[int, Sequence[object]] = {
    1: (None,),  # heartbeat_s: none was promised
    7: ((), ()),  # bytes_on and residue: not known
}

#: The same of layout 3.
_ADDED_BY_3: Mapping[int, Sequence[object]] = {
    1: (None,),  # host: every client was of this one
    5: (None,),  # lead: this host's
}


def _adding(fields_by_tag: Mapping[int, Sequence[object]]) -> Callable[[Entry], Entry]:
    def migrate(entry: Entry) -> Entry:
        tag, fields = entry
        return tag, [*fields, *fields_by_tag.get(tag, ())]

    return migrate


_add_by_3 = _adding(_ADDED_BY_3)


def _to_3(entry: Entry) -> Entry:
    tag, fields = _add_by_3(entry)
    if tag == _TAGS[TenancyRecord]:
        # A stamp begins with its term.
        tenancy, stamp, *rest = fields
        fields = [tenancy, [0, *items_of(stamp, 2)], *rest]
    return tag, fields


#: By schema version: what turns an entry of that version into one of the next. None drops it.
MIGRATIONS: Mapping[int, Callable[[Entry], Entry | None]] = {
    1: _adding(_ADDED_BY_2),
    2: _to_3,
}

#: Texts of errors may hold what the operating system gave us in no known encoding.
_UNICODE_ERRORS = "surrogatepass"


class RecordError(ValueError):
    """Stored bytes are not what any version of this program wrote."""


class _Packing(NamedTuple):
    tag: int
    pack: Convert


_CODECS = Codecs()


def _packing(kind: type[Record], tag: int) -> _Packing:
    pack = _CODECS.of(kind).pack
    assert pack is not None, f"{kind.__name__} is a dataclass, which msgpack cannot pack"
    return _Packing(tag, pack)


_PACKINGS = {kind: _packing(kind, tag) for kind, tag in _TAGS.items()}
_UNPACKERS = {tag: _CODECS.of(kind).unpack for kind, tag in _TAGS.items()}


def encode(record: Record) -> Entry:
    """Return a record as values that a packer of `make_packer` packs."""
    tag, pack = _PACKINGS[type(record)]
    return tag, pack(record)


def decode(entry: object) -> Record:
    """Return the record of an entry of the current schema; raise `CodecError` if it is none."""
    tag, fields = items_of(entry, 2)
    unpack = _UNPACKERS.get(tag) if isinstance(tag, int) else None
    if unpack is None:
        raise CodecError(f"unknown record type {shown(tag)}")
    record: Record = unpack(fields)
    return record


def make_packer() -> Callable[[Sequence[Record]], bytes]:
    """Return a function that packs a batch of records; one for each thread that packs."""
    # Making a msgpack packer costs as much as packing a record, and it is not safe for threads.
    packer = msgpack.Packer(default=value_of_member, unicode_errors=_UNICODE_ERRORS)
    pack: Callable[[object], bytes] = packer.pack

    def pack_batch(records: Sequence[Record]) -> bytes:
        return pack([encode(record) for record in records])

    return pack_batch


def unpack_batch(payload: bytes, *, schema: int = SCHEMA) -> list[Record]:
    """Return the records of one packed batch, written under `schema` (at most `SCHEMA`).

    Raises `RecordError` for anything that no version of `make_packer` can have made.
    """
    try:
        entries = msgpack.unpackb(payload, unicode_errors=_UNICODE_ERRORS)
    except ValueError as exc:  # msgpack's own errors are ValueErrors too
        raise RecordError(f"a batch is not msgpack: {exc}") from exc
    try:
        migrated = (_migrate(entry, schema) for entry in items_of(entries))
        return [decode(entry) for entry in migrated if entry is not None]
    except CodecError as exc:
        raise RecordError(str(exc)) from exc


def _migrate(entry: Any, schema: int) -> Entry | None:
    for version in range(schema, SCHEMA):
        if entry is None:
            break
        if version not in MIGRATIONS:
            raise CodecError(f"layout {version} was never written")
        tag, fields = items_of(entry, 2)
        if not isinstance(tag, int):
            raise CodecError(f"unknown record type {shown(tag)}")
        entry = MIGRATIONS[version]((tag, items_of(fields)))
    migrated: Entry | None = entry
    return migrated
