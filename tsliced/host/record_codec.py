"""Journal records <-> plain values that msgpack can carry.

The codec of each record type is put together once, at import, from the type hints of its fields;
a hint that it does not know is a `TypeError` there and then. Fields are stored by position, so any
change to a record type, or to a type in it, needs a new `SCHEMA` and an entry in `MIGRATIONS`.

Writing is on the path of every grant and release, so it converts only what msgpack cannot pack as
it is: a named tuple, a tuple and a `NewType` go through untouched. Reading happens at start only,
and checks every value.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import msgpack

from tsliced.core.actions import (
    DrainRecord,
    FaultRecord,
    LeaseEndedRecord,
    LeaseRecord,
    RankEndedRecord,
    RankRecord,
    Record,
    RemainsRecord,
    SessionEndedRecord,
    SessionRecord,
    StrangerRecord,
    TenancyEndedRecord,
    TenancyRecord,
)

#: Version of the layout of all record types together.
SCHEMA = 2

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
}

#: By tag: the fields that layout 2 added at the end, with what the daemons before it meant.
_ADDED_BY_2: Mapping[int, Sequence[object]] = {
    1: (None,),  # heartbeat_s: none was promised
    7: ((), ()),  # bytes_on and residue: not known
}


def _to_2(entry: Entry) -> Entry:
    tag, fields = entry
    return tag, [*fields, *_ADDED_BY_2.get(tag, ())]


#: By schema version: what turns an entry of that version into one of the next. None drops it.
MIGRATIONS: Mapping[int, Callable[[Entry], Entry | None]] = {1: _to_2}

#: The codec is generic over types that only their hints know; `decode` checks what it makes.
_Convert: TypeAlias = Callable[[Any], Any]


#: Texts of errors may hold what the operating system gave us in no known encoding.
_UNICODE_ERRORS = "surrogatepass"


#: For what msgpack cannot pack as it is, which are the members of enums alone. The property `value`
#: takes ten times as long to return what it finds in here.
_value_of_member = attrgetter("_value_")


class RecordError(ValueError):
    """Stored bytes are not what any version of this program wrote."""


class _Codec(NamedTuple):
    """Both directions of one type. `pack` None: msgpack packs the value as it is."""

    pack: _Convert | None
    unpack: _Convert


def _scalar(kind: type) -> _Codec:
    def unpack(value: object) -> object:
        # Exact, because a bool is an int.
        if type(value) is not kind:
            raise RecordError(f"{value!r} where {kind.__name__} was expected")
        return value

    return _Codec(None, unpack)


def _float() -> _Codec:
    def unpack(value: object) -> float:
        # A float field that was given an int is stored as an int.
        if type(value) is not float and type(value) is not int:
            raise RecordError(f"{value!r} where a number was expected")
        return float(value)

    return _Codec(None, unpack)


def _enum(kind: type[enum.Enum]) -> _Codec:
    def unpack(value: object) -> enum.Enum:
        try:
            return kind(value)
        except ValueError as exc:
            raise RecordError(f"{value!r} is no {kind.__name__}") from exc

    return _Codec(None, unpack)


def _items(value: object, count: int | None = None) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise RecordError(f"{value!r} where a sequence was expected")
    if count is not None and len(value) != count:
        raise RecordError(f"{len(value)} values where {count} were expected")
    return value


def _optional(inner: _Codec) -> _Codec:
    pack, unpack = inner
    return _Codec(
        None if pack is None else lambda value: None if value is None else pack(value),
        lambda value: None if value is None else unpack(value),
    )


def _uniform_tuple(inner: _Codec) -> _Codec:
    pack, unpack = inner
    return _Codec(
        None if pack is None else lambda value: [pack(item) for item in value],
        lambda value: tuple([unpack(item) for item in _items(value)]),
    )


def _frozenset(inner: _Codec) -> _Codec:
    pack, unpack = inner
    return _Codec(
        # Sorted, so that equal records have equal bytes.
        sorted if pack is None else lambda value: sorted(pack(item) for item in value),
        lambda value: frozenset([unpack(item) for item in _items(value)]),
    )


def _product(codecs: Sequence[_Codec], fetch: _Convert | None, make: Callable[..., Any]) -> _Codec:
    """Return the codec of a fixed row of fields.

    `fetch` turns a value into the tuple of its fields; None: it is such a tuple already.
    """
    count = len(codecs)
    unpackers = [codec.unpack for codec in codecs]
    packers = [(i, codec.pack) for i, codec in enumerate(codecs) if codec.pack is not None]

    def pack(value: Any) -> Sequence[object]:
        fields = list(value if fetch is None else fetch(value))
        for index, convert in packers:
            fields[index] = convert(fields[index])
        return fields

    def unpack(value: object) -> object:
        items = _items(value, count)
        return make(*[convert(item) for convert, item in zip(unpackers, items, strict=True)])

    return _Codec(pack if packers else fetch, unpack)


def _dataclass(kind: type[Any]) -> _Codec:
    names = [field.name for field in dataclasses.fields(kind)]
    hints = typing.get_type_hints(kind)
    get = attrgetter(*names)
    # With a single name, attrgetter gives the bare value.
    fetch: _Convert = get if len(names) > 1 else lambda value: (get(value),)
    return _product(
        [codec_for(hints[name]) for name in names],
        fetch,
        lambda *fields: kind(**dict(zip(names, fields, strict=True))),
    )


def _named_tuple(kind: type[Any]) -> _Codec:
    hints = typing.get_type_hints(kind)
    return _product([codec_for(hints[name]) for name in kind._fields], None, kind)


def _codec_of_class(kind: type) -> _Codec | None:
    if kind in (str, int, bool, bytes):
        return _scalar(kind)
    if kind is float:
        return _float()
    if issubclass(kind, enum.Enum):
        return _enum(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _named_tuple(kind)
    return None


def _codec_of_generic(origin: object, arguments: tuple[Any, ...]) -> _Codec | None:
    if origin is typing.Union or origin is types.UnionType:
        others = [argument for argument in arguments if argument is not types.NoneType]
        return _optional(codec_for(others[0])) if len(others) == 1 else None
    if origin is frozenset:
        return _frozenset(codec_for(arguments[0]))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _uniform_tuple(codec_for(arguments[0]))
    if origin is tuple:
        return _product([codec_for(hint) for hint in arguments], None, lambda *items: items)
    return None


def codec_for(hint: Any) -> _Codec:
    """Return the codec of a type hint; raise `TypeError` for one that cannot be stored."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    origin = typing.get_origin(hint)
    found: _Codec | None = None
    if origin is not None:
        found = _codec_of_generic(origin, typing.get_args(hint))
    elif isinstance(hint, type):
        found = _codec_of_class(hint)
    if found is None:
        raise TypeError(f"journal records cannot hold {hint!r}: teach record_codec.py about it")
    return found


class _Packing(NamedTuple):
    tag: int
    pack: _Convert


def _packing(kind: type[Record], tag: int) -> _Packing:
    pack = codec_for(kind).pack
    assert pack is not None, f"{kind.__name__} is a dataclass, which msgpack cannot pack"
    return _Packing(tag, pack)


_PACKINGS = {kind: _packing(kind, tag) for kind, tag in _TAGS.items()}
_UNPACKERS = {tag: codec_for(kind).unpack for kind, tag in _TAGS.items()}


def encode(record: Record) -> Entry:
    """Return a record as values that a packer of `make_packer` packs."""
    tag, pack = _PACKINGS[type(record)]
    return tag, pack(record)


def decode(entry: object) -> Record:
    """Return the record of an entry of the current schema; raise `RecordError` if it is none."""
    tag, fields = _items(entry, 2)
    unpack = _UNPACKERS.get(tag) if isinstance(tag, int) else None
    if unpack is None:
        raise RecordError(f"unknown record type {tag!r}")
    record: Record = unpack(fields)
    return record


def make_packer() -> Callable[[Sequence[Record]], bytes]:
    """Return a function that packs a batch of records; one for each thread that packs."""
    # Making a msgpack packer costs as much as packing a record, and it is not safe for threads.
    packer = msgpack.Packer(default=_value_of_member, unicode_errors=_UNICODE_ERRORS)
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
    migrated = (_migrate(entry, schema) for entry in _items(entries))
    return [decode(entry) for entry in migrated if entry is not None]


def _migrate(entry: Any, schema: int) -> Entry | None:
    for version in range(schema, SCHEMA):
        if entry is None:
            break
        if version not in MIGRATIONS:
            raise RecordError(f"layout {version} was never written")
        tag, fields = _items(entry, 2)
        if not isinstance(tag, int):
            raise RecordError(f"unknown record type {tag!r}")
        entry = MIGRATIONS[version]((tag, _items(fields)))
    migrated: Entry | None = entry
    return migrated
