"""What type hints say: values of them to try, and their layout in words."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import strategies as st

SCALARS: Mapping[object, st.SearchStrategy[Any]] = {
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    int: st.integers(-(2**63), 2**64 - 1),
}


def strategy_for(
    hint: Any, known: Mapping[object, st.SearchStrategy[Any]] = SCALARS
) -> st.SearchStrategy[Any]:
    """Return values of a type hint, told from the hint without the codec's help.

    `known` has those of scalars, and of whatever else is not to be told from its hint.
    """
    while isinstance(hint, typing.NewType) and hint not in known:
        hint = hint.__supertype__
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in known:
        return known[hint]
    inner = [
        strategy_for(argument, known)
        for argument in arguments
        if argument not in (Ellipsis, types.NoneType)
    ]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(st.none(), *inner) if types.NoneType in arguments else st.one_of(*inner)
    if origin is frozenset:
        return st.frozensets(inner[0], max_size=4)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(inner[0], max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*inner)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{name: strategy_for(of, known) for name, of in hints.items()})


def layouts_of(kinds: Iterable[type[Any]]) -> list[str]:
    """Return a line with the fields of each class, and of each that they name."""
    seen: dict[str, str] = {}
    for kind in kinds:
        layout_of(kind, seen)
    return [f"{name}: {fields}" for name, fields in seen.items()]


def layout_of(hint: Any, seen: dict[str, str]) -> str:
    """Return a hint in words, and note in `seen` the fields of every class that it names."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    arguments = [layout_of(argument, seen) for argument in typing.get_args(hint)]
    if arguments:
        origin = typing.get_origin(hint)
        name = "Union" if origin is types.UnionType else getattr(origin, "__name__", "Union")
        return f"{name}[{', '.join(arguments)}]"
    if hint is Ellipsis:
        return "..."
    name = str(hint.__name__)
    if (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")) and name not in seen:
        seen[name] = ""
        hints = typing.get_type_hints(hint)
        seen[name] = ", ".join(f"{field} {layout_of(hints[field], seen)}" for field in hints)
    return name
