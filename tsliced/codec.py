"""Values of the core <-> plain values that msgpack can carry, by the type hints of their fields.

A codec is put together once, at import; a hint that it does not know is a `TypeError` there and
then. Fields go by position.

Packing converts only what msgpack cannot pack as it is: a named tuple, a tuple and a `NewType` go
through untouched. Unpacking checks every value. What is let through beyond its type is a matter of
where it comes from, so a `Codecs` of its own says it: the journal's is this one, that of messages
of other hosts is in `net/peer_codec.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

#: The codec is generic over types that only their hints know; unpacking checks what it makes.
Convert: TypeAlias = Callable[[Any], Any]

#: For what msgpack cannot pack as it is, which are the members of enums alone. The property `value`
#: takes ten times as long to return what it finds in here.
value_of_member = attrgetter("_value_")


class CodecError(ValueError):
    """Plain values are not those of any value of the type that is expected."""


class Codec(NamedTuple):
    """Both directions of one type. `pack` None: msgpack packs the value as it is."""

    pack: Convert | None
    unpack: Convert


def shown(value: object) -> str:
    """Return any plain value as text for an error, however large or deep it is."""
    return f"{reprlib.repr(value):.80}"


def items_of(value: object, count: int | None = None) -> Sequence[object]:
    """Return a plain sequence, of that many items; raise `CodecError` if it is none."""
    if not isinstance(value, (list, tuple)):
        raise CodecError(f"{shown(value)} where a sequence was expected")
    if count is not None and len(value) != count:
        raise CodecError(f"{len(value)} values where {count} were expected")
    return value


class Codecs:
    """Makes codecs of type hints. A subclass overrides what it lets through."""

    def of(self, hint: Any) -> Codec:
        """Return the codec of a type hint; raise `TypeError` for one that cannot be carried."""
        while isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        origin = typing.get_origin(hint)
        found: Codec | None = None
        if origin is not None:
            found = self._of_generic(origin, typing.get_args(hint))
        elif isinstance(hint, type):
            found = self._of_class(hint)
        if found is None:
            raise TypeError(f"nothing here can hold {hint!r}: teach codec.py about it")
        return found

    # --- what a subclass may see differently --------------------------------------------------

    def field(self, owner: type, name: str, hint: Any) -> Codec:
        """Return the codec of one field of a dataclass or named tuple."""
        return self.of(hint)

    def scalar(self, kind: type) -> Codec:
        """Return the codec of a string, bytes, an integer or a truth value."""

        def unpack(value: object) -> object:
            # Exact, because a bool is an int.
            if type(value) is not kind:
                raise CodecError(f"{shown(value)} where {kind.__name__} was expected")
            return value

        return Codec(None, unpack)

    def number(self) -> Codec:
        """Return the codec of a float."""

        def unpack(value: object) -> float:
            # A float field that was given an int is carried as an int.
            if type(value) is not float and type(value) is not int:
                raise CodecError(f"{shown(value)} where a number was expected")
            return float(value)

        return Codec(None, unpack)

    def items(self, value: object) -> Sequence[object]:
        """Return a plain sequence of any length that is let through; raise `CodecError`."""
        return items_of(value)

    def product(self, codecs: Sequence[Codec], make: Callable[..., Any]) -> Codec:
        """Return the codec of a named tuple, or of another tuple of a fixed length."""
        return product(codecs, None, make)

    def of_dataclass(self, kind: type[Any]) -> Codec:
        """Return the codec of a dataclass."""
        names = [field.name for field in dataclasses.fields(kind)]
        return product(
            self.fields(kind, names),
            fetch_of(names),
            lambda *fields: kind(**dict(zip(names, fields, strict=True))),
        )

    # --- how codecs are put together ----------------------------------------------------------

    def fields(self, kind: type[Any], names: Sequence[str]) -> list[Codec]:
        """Return the codecs of fields of a dataclass or named tuple."""
        hints = typing.get_type_hints(kind)
        return [self.field(kind, name, hints[name]) for name in names]

    def _of_class(self, kind: type[Any]) -> Codec | None:
        if kind in (str, int, bool, bytes):
            return self.scalar(kind)
        if kind is float:
            return self.number()
        if issubclass(kind, enum.Enum):
            return _of_enum(kind)
        if dataclasses.is_dataclass(kind):
            return self.of_dataclass(kind)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return self.product(self.fields(kind, kind._fields), kind)
        return None

    def _of_generic(self, origin: object, arguments: tuple[Any, ...]) -> Codec | None:
        if origin is typing.Union or origin is types.UnionType:
            others = [argument for argument in arguments if argument is not types.NoneType]
            return _optional(self.of(others[0])) if len(others) == 1 else None
        if origin is frozenset:
            return self._frozenset(self.of(arguments[0]))
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return self._uniform_tuple(self.of(arguments[0]))
        if origin is tuple:
            return self.product([self.of(hint) for hint in arguments], lambda *items: items)
        return None

    def _uniform_tuple(self, inner: Codec) -> Codec:
        (pack, unpack), items = inner, self.items
        return Codec(
            None if pack is None else lambda value: [pack(item) for item in value],
            lambda value: tuple([unpack(item) for item in items(value)]),
        )

    def _frozenset(self, inner: Codec) -> Codec:
        (pack, unpack), items = inner, self.items
        return Codec(
            # Sorted, so that equal values have equal bytes.
            sorted if pack is None else lambda value: sorted(pack(item) for item in value),
            lambda value: frozenset([unpack(item) for item in items(value)]),
        )


def product(codecs: Sequence[Codec], fetch: Convert | None, make: Callable[..., Any]) -> Codec:
    """Return the codec of a fixed row of fields.

    `fetch` turns a value into the tuple of its fields; None: it is such a tuple already.
    """
    count = len(codecs)
    unpackers = [codec.unpack for codec in codecs]

    def unpack(value: object) -> object:
        items = items_of(value, count)
        return make(*[convert(item) for convert, item in zip(unpackers, items, strict=True)])

    return Codec(packer_of(codecs, fetch), unpack)


def packer_of(codecs: Sequence[Codec], fetch: Convert | None) -> Convert | None:
    """Return what packs a fixed row of fields; see `product`."""
    packers = [(i, codec.pack) for i, codec in enumerate(codecs) if codec.pack is not None]

    def pack(value: Any) -> Sequence[object]:
        fields = list(value if fetch is None else fetch(value))
        for index, convert in packers:
            fields[index] = convert(fields[index])
        return fields

    return pack if packers else fetch


def fetch_of(names: Sequence[str]) -> Convert:
    """Return what fetches fields of an object as a tuple."""
    get = attrgetter(*names)
    # With a single name, attrgetter gives the bare value.
    return get if len(names) > 1 else lambda value: (get(value),)


def _of_enum(kind: type[enum.Enum]) -> Codec:
    members: dict[object, enum.Enum] = {member.value: member for member in kind}

    def unpack(value: object) -> enum.Enum:
        try:
            return members[value]
        except (KeyError, TypeError) as exc:
            raise CodecError(f"{shown(value)} is no {kind.__name__}") from exc

    return Codec(None, unpack)


def _optional(inner: Codec) -> Codec:
    pack, unpack = inner
    return Codec(
        None if pack is None else lambda value: None if value is None else pack(value),
        lambda value: None if value is None else unpack(value),
    )
